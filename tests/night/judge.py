"""The judge: puts each moment's rows into a database, asks what is told, and compares it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from apscheduler_tasklock import TaskLocks, upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.night import drawn, words  # noqa: F401  # they add their checks
from tests.night.checks import Untrue, untrue_of
from tests.night.recording import Moment, Night, show_moment, still_database
from tests.night.said import Said
from tests.night.truth import Truth


@dataclass
class Judgement:
    """What the judge has found.

    :ivar texts: all that was told, by the moments' names
    """

    untrue: list[Untrue] = field(default_factory=list)
    texts: dict[str, dict[str, str]] = field(default_factory=dict)


@contextmanager
def moments_shown(url: str, night: Night) -> Iterator[Callable[[Moment], Said]]:
    """Give a function that shows a moment in a database, and returns what is told of it.

    :param url: the URL of a database with the tables
    """
    with still_database(url) as connection, TaskLocks(url) as locks:

        def shown(moment: Moment) -> Said:
            show_moment(connection, moment)
            return Said(locks, moment)

        yield shown


def judge(night: Night, say: Callable[[str], None]) -> Judgement:
    """Compare what is told at each moment with the ledger."""
    truth, found = Truth(night.events), Judgement()
    with EmbeddedServer() as server:
        upgrade(server.url)
        with moments_shown(server.url, night) as shown:
            for moment in night.moments:
                said = shown(moment)
                untrue = untrue_of(said, truth)
                found.untrue += untrue
                found.texts[moment.name] = said.texts
                say(f"{moment.name}: {len(untrue)} untrue")
    return found
