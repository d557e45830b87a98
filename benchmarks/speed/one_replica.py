"""Many jobs that are due at once on one replica, before and after requests travelled together."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed import one_replica_process
from benchmarks.speed.connections import watched
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.report import Goal, Section, median, milliseconds, table
from benchmarks.speed.versions import BEFORE, NOW, VersionProcess, library_before, running

JOBS = 200
# How many times as many jobs a second there should be as before.
GOALS = {"thread pool": 3.0, "asyncio": 6.0}

# Seconds to set up the jobs in; more are tried if they were not enough.
LEADS = (0.3, 1.0, 5.0, 30.0)

# How often connections are counted, in seconds.
COUNT_EVERY = 0.002

# The kind of scheduler, and the version of the library.
Which = tuple[str, str]


@dataclass
class Found:
    """What was measured of one replica.

    :ivar seconds: how long each burst took
    :ivar peak: the most connections that it had in a burst
    """

    seconds: list[float] = field(default_factory=list)
    peak: int = 0


class Replica:
    """A process that is one replica, with a version of the library.

    :param name: the replica's id, and the schema of its table
    """

    def __init__(self, process: VersionProcess, name: str) -> None:
        self.name = name
        self._process = process

    def burst(self) -> float:
        """Return the seconds from the moment at which the jobs are due to the last release."""
        for lead in LEADS:
            self._process.tell(str(lead))
            measured = json.loads(self._process.answer())
            if measured["released"] != JOBS:
                raise RuntimeError(f"{self.name}: {measured['released']} of {JOBS} jobs were run")
            if not measured["late"]:
                return float(measured["seconds"])
            progress(f"{self.name}: set up {measured['late']:.1f} s too late; once more")
        raise RuntimeError(f"{LEADS[-1]} s are not enough to set up the jobs")


@contextmanager
def started(folder: Path, which: Which, url: str) -> Iterator[Replica]:
    """Start a replica's process, and end it."""
    kind, version = which
    name = f"{kind} {version}".replace(" ", "-")
    with running(one_replica_process, folder, kind, url, name, str(JOBS)) as process:
        process.wait_until_loaded()
        yield Replica(process, name)


def run(effort: Effort) -> Section:
    """Measure both versions in turn, on a thread pool and on an event loop."""
    rounds = effort.of(15, 3)
    section = Section(
        f"{JOBS} jobs due at once on one replica",
        f"{JOBS} jobs that do nothing, all with the same run time: functions on a "
        "`BackgroundScheduler` with APScheduler's pool of 10 threads, and coroutines on an "
        f"`AsyncIOScheduler`. *Before* is the library of commit {BEFORE[:7]}, which sent a "
        "statement for each claim and each release. Time is from the moment at which the jobs are "
        f"due until the last one's lock is released; the median of {rounds} bursts, and the "
        "longest. Each replica is a process of its own, which has run the same jobs once before. "
        "The versions take turns, in a shuffled order; the ratios of jobs a second are taken "
        "within rounds and their median given. Connections are counted in a further burst, every "
        f"{COUNT_EVERY * 1e3:g} ms.",
    )
    with EmbeddedServer(loopback=True) as server, library_before() as before, ExitStack() as stack:
        folders = {"before": before, "now": NOW}
        replicas = {
            (kind, version): stack.enter_context(started(folder, (kind, version), server.url))
            for kind in GOALS
            for version, folder in folders.items()
            if folder is not None
        }
        found = _measure(replicas, rounds, effort)
        for which, replica in replicas.items():
            found[which].peak = _peak(replica, server.url)
    if before is None:
        section.tables.append(
            f"**Not measured: the version before. Commit {BEFORE[:7]} is not in this folder's git "
            "history, so there are no ratios.**"
        )
    section.tables.append(_table(found))
    section.goals = [_faster(kind, found) for kind in GOALS] + [_connections(found)]
    return section


def _measure(replicas: Mapping[Which, Replica], rounds: int, effort: Effort) -> dict[Which, Found]:
    found = {which: Found() for which in replicas}
    rng = effort.rng()
    for number in range(-1, rounds):
        for which in _shuffled(replicas, rng):
            seconds = replicas[which].burst()
            if number >= 0:  # the first one is to warm up
                found[which].seconds.append(seconds)
        progress(f"round {number + 1} of {rounds}")
    return found


def _shuffled(replicas: Mapping[Which, Replica], rng: random.Random) -> list[Which]:
    """Return a round's order: kinds one after the other, so that the versions are side by side."""
    kinds = rng.sample(list(GOALS), len(GOALS))
    shuffled = rng.sample(list(replicas), len(replicas))
    return sorted(shuffled, key=lambda which: kinds.index(which[0]))


def _peak(replica: Replica, url: str) -> int:
    """Return the most connections that a replica had in a burst, as the server counts them."""
    with watched(url, f"tasklock {replica.name}", COUNT_EVERY) as seen:
        replica.burst()
    return max(connections for _, connections in seen)


def _ratio(kind: str, version: str, found: Mapping[Which, Found]) -> float | None:
    """Return how many times as many jobs a second there are as before, if that was measured."""
    before = found.get((kind, "before"))
    if before is None:
        return None
    pairs = zip(before.seconds, found[kind, version].seconds, strict=True)
    return median([earlier / later for earlier, later in pairs])


def _table(found: Mapping[Which, Found]) -> str:
    header = ["", "took", "longest", "jobs a second", "x before", "connections at the peak"]
    return table(header, [_row(which, found) for which in found])


def _row(which: Which, found: Mapping[Which, Found]) -> Sequence[str]:
    ours = found[which]
    ratio = _ratio(*which, found)
    return [
        ", ".join(which),
        milliseconds(median(ours.seconds)),
        milliseconds(max(ours.seconds)),
        f"{JOBS / median(ours.seconds):,.0f}",
        "-" if ratio is None else f"{ratio:.2f}",
        str(ours.peak),
    ]


def _faster(kind: str, found: Mapping[Which, Found]) -> Goal:
    ratio = _ratio(kind, "now", found)
    return Goal(
        f"{JOBS} jobs due at once on one replica, {kind}",
        f"at least {GOALS[kind]:g} x as many a second as before",
        "no version before" if ratio is None else f"{ratio:.2f} x",
        None if ratio is None else ratio >= GOALS[kind],
    )


def _connections(found: Mapping[Which, Found]) -> Goal:
    peaks = {kind: found[kind, "now"].peak for kind in GOALS}
    return Goal(
        f"connections of a replica with {JOBS} jobs due at once",
        "1 at the peak",
        ", ".join(f"{peak} with {kind}" for kind, peak in peaks.items()),
        max(peaks.values()) <= 1,
    )
