"""Commits that wait for a synchronous standby: what is not confirmed grants nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import psycopg
import pytest
from sqlalchemy.engine import make_url

from apscheduler_tasklock import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockUnknownError,
    upgrade,
)
from apscheduler_tasklock.demo.server import EmbeddedServer
from apscheduler_tasklock.lock import HeldLock
from tests.support.claims import claim, held
from tests.support.commands import PatientTaskLocks
from tests.support.outages import BACK, UNAVAILABLE, said
from tests.support.polling import eventually
from tests.support.unconfirmed import LonelyServer
from tests.support.waist import Lead, LockClient, LockSettings, Timings, hear_of_probes

pytestmark = pytest.mark.own_server

# The version of the task's row, after its release.
VERSION = "SELECT xmin::text FROM task_lock WHERE task_name = 'task' AND finished_at IS NOT NULL"

Make = Callable[..., LockClient]

# The test alone ends the waits of commits.
PATIENT = Timings(longest_answer=600.0)


@pytest.fixture(scope="module")
def lonely() -> Iterator[LonelyServer]:
    with EmbeddedServer({"fsync": "off"}) as server, closing(LonelyServer(server)) as lonely:
        upgrade(server.url)
        yield lonely


@pytest.fixture
def make(lonely: LonelyServer) -> Iterator[Make]:
    """Return a function that makes a client whose claims are tried for as long as it takes."""
    made: list[LockClient] = []

    def make(replica_id: str = "replica", **settings: Any) -> LockClient:
        options = {"claim_timeout": 600.0, "timings": PATIENT, **settings}
        locks = LockClient(LockSettings(lonely.url, replica_id, **options))
        made.append(locks)
        held(locks, f"warm-up of {replica_id}")  # its statements are prepared
        return locks

    yield make
    for locks in made:
        locks.close()
    lonely.run("DELETE FROM task_lock")


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:
    """Return a function that calls another one in a thread."""
    with ThreadPoolExecutor() as threads:
        yield threads.submit


@pytest.mark.parametrize("end", [LonelyServer.cancel, LonelyServer.terminate])
def test_a_claim_whose_wait_for_a_standby_was_ended_is_granted_when_a_write_is_confirmed(
    lonely: LonelyServer,
    make: Make,
    aside: Callable[..., Future[Any]],
    end: Callable[[LonelyServer, int], None],
) -> None:
    """The server has committed it, so a read finds it; a failover to the standby would lose it."""
    locks = make()
    with lonely.hanging():
        asked = aside(claim, locks)
        waiting = lonely.one_waiting()
        end(lonely, waiting)
        lonely.one_waiting(but=waiting)  # what is sent next waits as well
        assert not asked.done()
    assert isinstance(asked.result(60), HeldLock)


def test_a_claim_that_is_given_up_in_doubt_is_handed_over(
    lonely: LonelyServer, make: Make, aside: Callable[..., Future[Any]]
) -> None:
    locks = make()
    with lonely.hanging():
        asked = aside(claim, locks, runs="function", failover=True)
        lonely.cancel_first()
        locks.stop_claiming()
        with pytest.raises(TaskLockError):
            asked.result(60)
    found = "SELECT handed_over FROM task_lock WHERE task_name = 'task'"
    eventually(lambda: lonely.run(found) == [(True,)])


def test_commits_that_wait_are_one_outage_however_many_statements_meet_it(
    lonely: LonelyServer,
    make: Make,
    aside: Callable[..., Future[Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    locks = make()
    with lonely.hanging():
        asked = aside(claim, locks)
        last = 0
        for _ in range(3):
            last = lonely.one_waiting(but=last)
            lonely.cancel(last)
    held(locks, "another")
    asked.result(60)
    assert said(caplog) == [UNAVAILABLE, BACK]


def test_a_notice_of_another_kind_changes_nothing(lonely: LonelyServer, make: Make) -> None:
    lonely.run(
        "CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS $$"
        " BEGIN RAISE WARNING 'canceling wait for synchronous replication'; RETURN NEW; END $$"
    )
    lonely.run(
        "CREATE TRIGGER warns BEFORE INSERT OR UPDATE ON task_lock"
        " FOR EACH ROW EXECUTE FUNCTION warn()"
    )
    try:
        held(make(), "task")
    finally:
        lonely.run("DROP FUNCTION warn CASCADE")


def test_a_renewal_before_a_begin_counts_only_when_it_is_confirmed(
    lonely: LonelyServer, make: Make, aside: Callable[..., Future[Any]]
) -> None:
    locks = make()
    lock = held(locks, lease=600.0)
    before = lock.locked_until
    with lonely.hanging():
        asked = aside(locks.renew_now, lock)
        lonely.cancel(lonely.one_waiting())
        assert asked.result(60) is False
    assert lock.locked_until == before
    assert locks.renew_now(lock)
    locks.release(lock)


def test_a_release_that_is_not_confirmed_is_sent_again(
    lonely: LonelyServer, make: Make, aside: Callable[..., Future[Any]]
) -> None:
    """Else a failover would bring the run back, and another replica would run it again."""
    locks = make()
    lock = held(locks)
    with lonely.hanging():
        release = locks.begin_release(lock)
        lonely.cancel_first()
        written = lonely.run(VERSION)
    eventually(lambda: lonely.run(VERSION) != written)
    assert release.in_doubt


def _lead(locks: LockClient, _url: str) -> object:
    return bool(locks.ask(locks.carrying_out(Lead("\x01leader:", "one", 600.0))))


def test_the_releases_of_a_shutdown_are_sent_although_commits_hang(
    lonely: LonelyServer, make: Make, aside: Callable[..., Future[Any]]
) -> None:
    """Else their runs look dead once commits are confirmed again, and are run again."""
    # The stop alone limits the wait for the probe, and nothing limits the stop.
    locks = make(timings=Timings(longest_answer=600.0, closing_timeout=600.0))
    lock = held(locks)
    with lonely.hanging():
        asked = aside(_lead, locks, lonely.url)
        lonely.cancel(lonely.one_waiting())
        assert isinstance(asked.exception(60), TaskLockDatabaseError)
        locks.begin_release(lock)
        lonely.one_waiting()  # the probe, for which no time is left from now on
        closed = aside(locks.close)
        eventually(lambda: lonely.run(VERSION))  # once the cancel has ended its wait
    closed.result(60)


def test_what_is_sent_once_fails_if_it_is_not_confirmed(
    lonely: LonelyServer, make: Make, aside: Callable[..., Future[Any]]
) -> None:
    locks = make()
    with lonely.hanging():
        asked = aside(_lead, locks, lonely.url)
        lonely.cancel(lonely.one_waiting())
        with pytest.raises(TaskLockDatabaseError, match="none confirms them"):
            asked.result(60)


def test_an_operators_action_is_done_once_a_write_is_confirmed(
    lonely: LonelyServer, make: Make, aside: Callable[..., Future[Any]]
) -> None:
    """The server has committed it, so pages show it; nobody says that it was done."""
    make()
    shown = "SELECT count(*) FROM task_lock WHERE paused_at IS NOT NULL"
    noted = "SELECT count(*) FROM task_lock_run WHERE outcome = 'paused'"
    with PatientTaskLocks(lonely.url, claim_timeout=600.0) as locks:
        with lonely.hanging():
            asked = aside(locks.pause, "warm-up of replica")
            lonely.cancel_first()
            assert lonely.run(shown) == [(1,)]
            assert not asked.done()
        [change] = asked.result(60)
    assert change.is_paused
    assert lonely.run(noted) == [(1,)]


def test_of_an_action_that_is_given_up_before_that_nothing_is_known(
    lonely: LonelyServer, make: Make, aside: Callable[..., Future[Any]]
) -> None:
    make()
    with lonely.hanging():
        locks = PatientTaskLocks(lonely.url, claim_timeout=600.0)
        asked = aside(locks.pause, "warm-up of replica")
        lonely.cancel_first()
        aside(locks.close)
        with pytest.raises(TaskLockUnknownError, match="whether the pause was made: "):
            asked.result(60)


@pytest.mark.parametrize("level", ["on", "remote_write", "remote_apply", "local", "off"])
def test_the_role_decides_whether_a_standby_is_waited_for(
    lonely: LonelyServer, make: Make, aside: Callable[..., Future[Any]], level: str
) -> None:
    lonely.run(f"ALTER ROLE postgres SET synchronous_commit = {level}")
    try:
        locks = make()
        with lonely.hanging():
            asked = aside(claim, locks)
            if level not in ("local", "off"):
                lonely.one_waiting()
                lonely.wait_for("''")
            assert isinstance(asked.result(60), HeldLock)
    finally:
        lonely.run("ALTER ROLE postgres RESET synchronous_commit")


def test_no_session_is_left_behind_for_each_probe_where_cancels_do_not_arrive(
    lonely: LonelyServer,
    make: Make,
    aside: Callable[..., Future[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would wait in the server, and after some minutes the server would be full."""
    monkeypatch.setattr(psycopg.capabilities, "has_cancel_safe", lambda: False)
    probes: list[None] = []
    locks = make(timings=Timings())  # probes are given up
    with ExitStack() as stack, lonely.hanging():
        stack.callback(hear_of_probes(lambda: probes.append(None)))
        asked = aside(claim, locks)
        first = lonely.one_waiting()
        eventually(lambda: len(probes) >= 3)
        assert [pid for pid, _ in lonely.waiting()] == [first]
        lonely.terminate(first)  # from now on nothing keeps the next one from being sent
        lonely.one_waiting(but=first)
    assert isinstance(asked.result(60), HeldLock)


def test_another_host_is_tried_while_commits_hang_on_the_first(
    lonely: LonelyServer, aside: Callable[..., Future[Any]]
) -> None:
    """An old primary takes connections, and confirms nothing any more."""
    with EmbeddedServer({"fsync": "off"}) as promoted:
        upgrade(promoted.url)
        hosts = "&".join(
            f"host={url.host}:{url.port}" for url in map(make_url, (lonely.url, promoted.url))
        )
        url = f"postgresql://postgres@/postgres?{hosts}"
        with closing(LockClient(LockSettings(url, "replica", claim_timeout=600.0))) as locks:
            held(locks, "on the first")
            with lonely.hanging():
                lock = aside(held, locks).result(60)
            with psycopg.connect(promoted.url) as there:
                found = there.execute("SELECT claim_id FROM task_lock WHERE task_name = 'task'")
                assert found.fetchall() == [(lock.claim_id,)]
            locks.release(lock)
    lonely.run("DELETE FROM task_lock")


def test_an_outage_is_over_for_who_only_reads_once_a_probe_was_confirmed(
    lonely: LonelyServer,
    make: Make,
    aside: Callable[..., Future[Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    make()
    with PatientTaskLocks(lonely.url, claim_timeout=600.0) as locks:
        with lonely.hanging():
            asked = aside(locks.check_writes)
            lonely.cancel(lonely.one_waiting())
            with pytest.raises(TaskLockDatabaseError):
                asked.result(60)
            locks.tasks()  # operators can read meanwhile
            assert said(caplog) == [UNAVAILABLE]
        eventually(lambda: locks.tasks() and said(caplog) == [UNAVAILABLE, BACK])
