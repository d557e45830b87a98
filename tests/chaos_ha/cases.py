"""The cases: what befalls the database, and which server takes writes afterwards."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psycopg

from tests.chaos_ha.cluster import BOTH, ONE, Cluster, alter
from tests.chaos_ha.replica import TASKS

STORED = frozenset(task.name for task in TASKS if task.is_stored)

# Seconds for which an event goes on: longer than one wait for an answer, so that some statements
# are given up, and shorter than a claim is tried; and until a standby is promoted.
_LONG, _SHORT = (4.0, 6.0), (0.5, 3.0)
# Seconds after which replicas have left an old primary: a claim's wait for its answer, a probe's,
# and a connect.
_SPLIT = (8.0, 10.0)

# How an operator ends waits for a standby, and for how many seconds in each way.
_END_WAITS = tuple(
    f"SELECT {ends}(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'".encode()
    for ends in ("pg_cancel_backend", "pg_terminate_backend")
)
_BY_HAND = 1.5

# Seconds by which the standby's clock is off.
_AHEAD, _BEHIND = 30.0, -12.0


class Scene:
    """What a case acts on.

    :param event: notes that an event begins
    :param ask_doctor: lets `doctor` examine a database, at the same time as the case goes on
    """

    def __init__(
        self,
        cluster: Cluster,
        rng: random.Random,
        event: Callable[[str], None],
        ask_doctor: Callable[[str], None],
    ) -> None:
        self.cluster = cluster
        self.rng = rng
        self.event = event
        self.ask_doctor = ask_doctor

    def wait(self, between: tuple[float, float]) -> None:
        """Let the event go on for some seconds, and ask the doctor twice meanwhile.

        Whom a doctor sees depends on the moment.
        """
        third = self.rng.uniform(*between) / 3
        for _ in range(2):
            time.sleep(third)
            self.ask_doctor(self.cluster.url)
        time.sleep(third)


# Makes an event happen whenever it is resumed, and yields the URL of the server that is to take
# writes from then on.
Story = Callable[[Scene], Iterator[str]]


@dataclass(frozen=True)
class Case:
    """A case.

    :ivar loses_commits: whether commits are lost that had been confirmed
    :ivar waiting: the tasks that wait for something that is documented
    :ivar skew: seconds by which the standby's clock is ahead
    :ivar routes: the routes of which one is drawn
    """

    story: Story
    loses_commits: bool = False
    waiting: frozenset[str] = frozenset()
    skew: float = 0.0
    routes: tuple[str, ...] = (ONE, BOTH)


def _killed(scene: Scene) -> Iterator[str]:
    scene.event("the primary is killed")
    scene.cluster.pair.kill_primary()
    scene.wait(_SHORT)
    scene.cluster.promote()
    yield scene.cluster.standby.url


def _stopped(scene: Scene) -> Iterator[str]:
    scene.event("the primary is stopped")
    scene.cluster.freeze(scene.cluster.primary)
    scene.wait(_LONG)
    scene.cluster.promote()
    yield scene.cluster.standby.url
    scene.event("the old primary goes on")
    scene.cluster.thaw()
    yield scene.cluster.standby.url


def _cut(scene: Scene) -> Iterator[str]:
    scene.event("no client reaches the primary")
    scene.cluster.cut(silently=scene.rng.random() < 0.5)
    scene.wait(_LONG)
    scene.cluster.promote()
    yield scene.cluster.standby.url
    scene.event("clients reach the old primary again")
    scene.cluster.reconnect()
    yield scene.cluster.standby.url


def _split(scene: Scene) -> Iterator[str]:
    """Promote the standby while clients still reach the old primary, whose commits then hang."""
    scene.event("the standby is promoted beside the primary")
    scene.cluster.promote()
    scene.wait(_SPLIT)
    yield scene.cluster.standby.url


def _read_only(scene: Scene) -> Iterator[str]:
    scene.event("the primary is read-only")
    alter(scene.cluster.primary, b"ALTER SYSTEM SET default_transaction_read_only = on")
    scene.wait(_LONG)
    alter(scene.cluster.primary, b"ALTER SYSTEM RESET default_transaction_read_only")
    yield scene.cluster.primary.url


def _hang(scene: Scene) -> Iterator[str]:
    scene.event("commits hang")
    scene.cluster.standby.stop()
    scene.wait(_LONG)
    scene.cluster.standby.start()
    yield scene.cluster.primary.url


def _unconfirmed(scene: Scene) -> Iterator[str]:
    """Lose what the primary has committed while no standby confirmed it.

    An operator ends waits by hand meanwhile: PostgreSQL then answers as if all were well, but for a
    warning, or ends the session.
    """
    scene.event("commits hang, and the primary is killed")
    scene.cluster.standby.stop()
    with psycopg.connect(scene.cluster.primary.url, autocommit=True) as operator:
        scene.wait(_LONG)
        for ends in scene.rng.sample(_END_WAITS, len(_END_WAITS)):
            until = time.monotonic() + _BY_HAND
            while time.monotonic() < until:
                operator.execute(ends)
                time.sleep(0.05)
    scene.cluster.pair.kill_primary()
    scene.cluster.standby.start()
    scene.cluster.promote()
    yield scene.cluster.standby.url


# No run may go on when the rows are saved: after the restore its lease would have to end.
_SAVE = """
    CREATE TABLE saved AS SELECT * FROM task_lock
    WHERE NOT EXISTS (SELECT FROM task_lock WHERE finished_at IS NULL)
"""


def _restored(scene: Scene) -> Iterator[str]:
    with psycopg.connect(scene.cluster.primary.url, autocommit=True) as connection:
        while connection.execute(_SAVE).rowcount <= 0:
            connection.execute("DROP TABLE saved")
            time.sleep(0.02)
        scene.wait(_LONG)
        scene.event("the rows are those of an earlier moment")
        with connection.transaction():
            connection.execute("DELETE FROM task_lock")
            connection.execute("INSERT INTO task_lock SELECT * FROM saved")
    yield scene.cluster.primary.url


CASES = {
    "killed": Case(_killed),
    "stopped": Case(_stopped),
    "cut": Case(_cut),
    # With one address, replicas cannot leave the old primary.
    "split": Case(_split, routes=(BOTH,)),
    "read-only": Case(_read_only),
    "hang": Case(_hang),
    "unconfirmed": Case(_unconfirmed),
    "restored": Case(_restored, loses_commits=True),
    "ahead": Case(_killed, skew=_AHEAD),
    # Stored jobs stand still for as long as the clock went back.
    "behind": Case(_killed, waiting=STORED, skew=_BEHIND),
}
