"""The judge: puts each moment's rows into a database, asks what is told, and compares it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from apscheduler_tasklock import TaskLocks, upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.night import (  # noqa: F401  # they add their checks
    drawn,
    sayings_of_answers,
    sayings_of_replicas,
    sayings_of_tasks,
    sayings_of_why,
    words,
)
from tests.night.checks import Untrue, untrue_of
from tests.night.recording import Moment, Night, show_moment, stop_clock
from tests.night.said import Said, SaidLive
from tests.night.truth import Truth
from tests.support.commands import PATIENT


@dataclass
class Judgement:
    """What the judge has found.

    :ivar untrue: what is untrue, also what is known to be
    :ivar texts: all that was told, by the moments' names
    """

    untrue: list[Untrue] = field(default_factory=list)
    texts: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def unknown(self) -> list[Untrue]:
        """What is untrue and not known to be."""
        return [each for each in self.untrue if each.check not in known_untrue()]

    @property
    def mended(self) -> list[str]:
        """The checks that are known to find something, and found nothing."""
        found = {each.check for each in self.untrue}
        return [name for name in known_untrue() if name not in found]


# The checks that find something today.
KNOWN = Path(__file__).parent / "untrue.txt"


def known_untrue() -> list[str]:
    """Return the names of the checks that find something today."""
    lines = [line for line in KNOWN.read_text().splitlines() if not line.startswith("#")]
    return [line.partition(" | ")[0] for line in lines]


class _PatientLocks(TaskLocks):
    """No machine is so slow that a read of the night's rows fails."""

    timings = PATIENT


@contextmanager
def moments_shown(url: str) -> Iterator[Callable[[Moment], Said]]:
    """Give a function that shows a moment in a database, and returns what is told of it.

    :param url: the URL of a database with the tables, whose clock stands still
    """
    with psycopg.connect(url, autocommit=True) as connection, _PatientLocks(url) as locks:

        def shown(moment: Moment) -> Said:
            show_moment(connection, moment)
            return Said(locks, moment)

        yield shown


def judge(night: Night, say: Callable[[str], None]) -> Judgement:
    """Compare what is told at each moment with the ledger."""
    truth, found = Truth(night.events), Judgement()
    with EmbeddedServer() as server:
        upgrade(server.url)
        with psycopg.connect(server.url, autocommit=True) as connection:
            stop_clock(connection)
        with moments_shown(server.url) as shown:
            for moment in night.moments:
                said = shown(moment)
                untrue = untrue_of(said, truth)
                if moment.told:
                    untrue += untrue_of(SaidLive(moment), truth)
                found.untrue += untrue
                found.texts[moment.name] = said.texts
                say(f"{moment.name}: {len(untrue)} untrue")
    return found
