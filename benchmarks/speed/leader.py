"""Claims and refusals of a window in leader mode and without, in a small and a large fleet."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass

from apscheduler_tasklock import upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed.counts import LOGGED
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.leader_replica import PERIOD, TASKS
from benchmarks.speed.report import Goal, Section, table
from benchmarks.speed.store_replica import processes
from tests.support.faults import CLAIM, FIRST_CLAIM, READ, RELEASE, RERUN

# Processes, and replicas in each.
FLEETS = ((3, 1), (4, 15))
# Seconds after which each replica knows how many there are, and has had its looks as a new one.
KNOWN_AFTER = 40.0
# By how much the claims of a window may differ between a small and a large fleet.
WITHIN = 0.1

_SETTINGS = {**LOGGED, "max_connections": "200", "log_line_prefix": "at %n by %a: "}
_STATEMENT = re.compile(
    r"^at ([0-9.]+) by .*?: LOG:  (?:statement|execute [^:]+): (.*(?:\n[ \t].*)*)", re.MULTILINE
)
# Texts of statements, and what they are. Reruns come first, because they are claims as well.
_KINDS = {
    RERUN: "rerun",
    FIRST_CLAIM: "claim",
    CLAIM: "claim",
    RELEASE: "release",
    READ: "read",
    b"WITH led AS (": "lead",
}


@dataclass(frozen=True)
class Sent:
    """What a fleet sent, on average.

    :ivar claims: of a window
    :ivar refusals: of a window
    :ivar reads: a second, by which replicas look at the rows of their tasks
    :ivar leading: statements a second by which a replica leads
    """

    claims: float
    refusals: float
    reads: float
    leading: float


def run(effort: Effort) -> Section:
    """Count in both fleets, with leader mode, and in a full run also without."""
    section = Section(
        "Leader mode",
        f"{TASKS} tasks, each of which is due every {PERIOD} s, so that each claim is a statement. "
        "The replicas of the small fleet are a process each, those of the large one share four. "
        "Counted are the statements in the server's log, in a fleet that goes on undisturbed: the "
        "claims, those among them that are refused, the looks at the rows, and the statements by "
        "which the leader renews its lease.",
    )
    rows, found = [], {}
    # Each fleet takes a minute until it is known, so the quick form leaves the comparison out.
    for leader in effort.of((True, False), (True,)):
        for count, schedulers in FLEETS:
            replicas = count * schedulers
            with_or_without = "in leader mode" if leader else "without"
            progress(f"{replicas} replicas, {with_or_without}")
            sent = _count(count, schedulers, effort.of(120, 32), leader=leader)
            found[replicas, leader] = sent
            rows.append(
                [
                    f"{replicas} replicas, {with_or_without}",
                    f"{sent.claims:.2f}",
                    f"{sent.refusals:.2f}",
                    f"{sent.reads:.1f}",
                    f"{sent.leading:.2f}",
                ]
            )
    header = ["", "claims of a window", "refusals", "reads a second", "renewals a second"]
    section.tables.append(table(header, rows))
    small, large = (found[count * schedulers, True].claims for count, schedulers in FLEETS)
    section.goals.append(
        Goal(
            "claims of a window in leader mode, of the large fleet beside the small one",
            f"within {WITHIN:.0%}",
            f"{large:.2f} and {small:.2f}",
            abs(large / small - 1) <= WITHIN,
        )
    )
    return section


def _count(count: int, schedulers: int, seconds: int, *, leader: bool) -> Sent:
    """Let the tasks come due for so many seconds, and return what was sent."""
    with EmbeddedServer(_SETTINGS, loopback=True) as server:
        upgrade(server.url)
        arguments = (server.url, str(schedulers), str(int(leader)))
        with processes("benchmarks.speed.leader_replica", count, *arguments):
            time.sleep(KNOWN_AFTER)
            begun = time.time()
            time.sleep(seconds + 1)
            log = server.log
    counts = Counter(
        _kind(text) for at, text in _STATEMENT.findall(log) if begun <= float(at) < begun + seconds
    )
    windows = counts["release"]
    return Sent(
        counts["claim"] / windows,
        (counts["claim"] - windows) / windows,
        counts["read"] / seconds,
        counts["lead"] / seconds,
    )


def _kind(text: str) -> str:
    encoded = text.encode()
    return next((kind for mark, kind in _KINDS.items() if mark in encoded), "other")
