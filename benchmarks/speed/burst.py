"""Many replicas with many jobs that are all due in the same second."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import psycopg

from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed import burst_process
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.report import Goal, Section, table
from benchmarks.speed.versions import NOW, running

# Tries with more and more time in which the jobs are set up before they are due.
LEADS = 3
# Replicas and jobs of the largest burst, and the seconds that it may take.
LARGEST = (64, 200)
MOST = 4.0
# APScheduler's default `misfire_grace_time`, in seconds.
DEFAULT_GRACE = 1
_COUNT = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'tasklock %'"
# Seconds between two counts of connections.
_COUNT_EVERY = 0.05


@dataclass(frozen=True)
class Decisions:
    """What one replica saw.

    :ivar granted: names of the tasks, one for each grant
    :ivar refused: how many claims were refused
    :ivar errors: how many failed
    :ivar missed: how many run times were misfires, and claimed nothing
    :ivar run: how often a job ran
    :ivar ended: when the last claim was decided, in seconds since 1970
    :ivar late: seconds by which the setting up ended after the jobs were due
    :ivar outages: how often the replica reported an outage
    """

    granted: list[str]
    refused: int
    errors: int
    missed: int
    run: int
    ended: float
    late: float
    outages: int


@dataclass(frozen=True)
class Burst:
    """One burst and how it ended."""

    replicas: int
    jobs: int
    seconds: float
    peak: int
    rest: int
    once: bool
    decided: int
    missed: int
    errors: int
    outages: int

    @property
    def claims(self) -> int:
        """How many claims were made."""
        return self.replicas * self.jobs


def run(effort: Effort) -> Section:
    """Measure the largest burst."""
    replicas, jobs = effort.of(LARGEST, (16, 200))
    rounds = effort.of(3, 1)
    burst = _typical([_measure(replicas, jobs) for _ in range(rounds)])
    section = Section(
        "A burst",
        "R replicas, each a process with a `BackgroundScheduler` with APScheduler's pool of 10 "
        "threads, and the same J jobs, all due at one moment, without a `misfire_grace_time`, so "
        "that each is claimed; on the same cores as the server. Time is from then until the last "
        f"claim is decided: the median of {rounds} bursts. All else is the worst of them. *Once* "
        "says whether each of the J windows was granted exactly once, its job ran exactly once, "
        "and all other claims were refused. *Told away* counts replicas that took the database to "
        "be away, because a connection took too long to open. *At rest* is right before the jobs "
        f"are due. The full form has one more burst, with APScheduler's default misfire grace of "
        f"{DEFAULT_GRACE} s: run times that reach their worker later are misfires, and not "
        "claimed.",
    )
    section.tables.append(_table(burst))
    section.goals = [_decided(burst), *_fast(burst), _connections(burst)]
    if not effort.quick:
        section.goals.append(_with_misfires(_measure(replicas, jobs, DEFAULT_GRACE)))
    return section


def _table(burst: Burst) -> str:
    return table(
        [
            "replicas x jobs",
            "claims",
            "took",
            "a claim",
            "once",
            "errors",
            "told away",
            "peak",
            "at rest",
        ],
        [
            [
                f"{burst.replicas} x {burst.jobs}",
                f"{burst.claims:,}",
                f"{burst.seconds:.2f} s",
                f"{burst.seconds / burst.claims * 1e6:,.0f} us",
                "yes" if burst.once else "**no**",
                str(burst.errors),
                str(burst.outages),
                f"{burst.peak} connections",
                str(burst.rest),
            ]
        ],
    )


def _typical(bursts: Sequence[Burst]) -> Burst:
    """Return several bursts of one size as one: the median of the times, all else at its worst."""
    worst_decided = min(bursts, key=lambda burst: burst.decided)
    return replace(
        worst_decided,
        seconds=statistics.median(burst.seconds for burst in bursts),
        peak=max(burst.peak for burst in bursts),
        rest=max(burst.rest for burst in bursts),
        once=all(burst.once for burst in bursts),
        errors=sum(burst.errors for burst in bursts),
        missed=sum(burst.missed for burst in bursts),
        outages=sum(burst.outages for burst in bursts),
    )


def _what(burst: Burst) -> str:
    return f"{burst.replicas} replicas x {burst.jobs} jobs due at once"


def _decided(burst: Burst) -> Goal:
    decided = f"{burst.decided:,} claims decided"
    return Goal(_what(burst), "every window decided once", decided, burst.once)


def _fast(burst: Burst) -> list[Goal]:
    """Return the goal for the time. There is one for the largest burst only."""
    if (burst.replicas, burst.jobs) != LARGEST:
        return []
    met = burst.once and burst.seconds <= MOST
    return [Goal(_what(burst), f"in {MOST:g} s", f"{burst.seconds:.2f} s", met)]


def _with_misfires(burst: Burst) -> Goal:
    return Goal(
        f"{_what(burst)}, with the default misfire grace",
        "every window run once",
        f"{burst.decided:,} claims decided, {burst.missed:,} misfires",
        burst.once,
    )


def _connections(burst: Burst) -> Goal:
    return Goal(
        "connections of a replica in a burst of many",
        "1, at the peak and at rest",
        f"{burst.peak / burst.replicas:.1f} at the peak, {burst.rest / burst.replicas:.1f} at rest",
        burst.peak <= burst.replicas and burst.rest <= burst.replicas,
    )


def _measure(replicas: int, jobs: int, grace: int | None = None) -> Burst:
    """Let some replicas have some jobs each, all due at one moment, and see how it ends.

    :param grace: the jobs' ``misfire_grace_time``; a misfire claims nothing
    """
    # All of them connect and add their jobs on the same cores first.
    lead = 1 + replicas * 0.02 + replicas * jobs * 0.0001
    for _ in range(LEADS):
        burst = _due_after(lead, replicas, jobs, grace)
        if burst is not None:
            return burst
        lead *= 3
    raise RuntimeError(f"{lead / 3:.0f} s are not enough to set up {replicas} x {jobs} jobs")


def _due_after(lead: float, replicas: int, jobs: int, grace: int | None) -> Burst | None:
    """Run a burst; return ``None`` if the jobs were due before all of them were set up."""
    settings = {"max_connections": str(5 * max(replicas, 16) + 20)}
    with EmbeddedServer(settings, loopback=True) as server, ExitStack() as stack:
        arguments = (server.url, str(jobs), "" if grace is None else str(grace))
        processes = [
            stack.enter_context(running(burst_process, NOW, *arguments)) for _ in range(replicas)
        ]
        for process in processes:
            process.wait_until_loaded()
        processes[0].tell("upgrade")
        processes[0].answer()
        seen = stack.enter_context(_watched(server.url))
        due = time.time() + lead
        for process in processes:
            process.tell(repr(due))
        parts = [Decisions(**json.loads(process.answer())) for process in processes]
    late = max(part.late for part in parts)
    if late:
        progress(f"{replicas} x {jobs}: set up {late:.1f} s after they were due; once more")
        return None
    burst = _outcome(replicas, jobs, due, parts, seen)
    progress(f"{replicas} x {jobs}: {burst.seconds:.2f} s")
    return burst


def _outcome(
    replicas: int, jobs: int, due: float, parts: Sequence[Decisions], seen: list[tuple[float, int]]
) -> Burst:
    granted = [name for part in parts for name in part.granted]
    refused = sum(part.refused for part in parts)
    ran = sum(part.run for part in parts)
    missed = sum(part.missed for part in parts)
    expected = sorted(f"job {number}" for number in range(jobs))
    return Burst(
        replicas=replicas,
        jobs=jobs,
        seconds=max(part.ended for part in parts) - due,
        peak=max(connections for _, connections in seen),
        rest=[connections for when, connections in seen if when < due][-1],
        once=sorted(granted) == expected
        and ran == jobs
        and refused + missed == (replicas - 1) * jobs,
        decided=len(granted) + refused,
        missed=missed,
        errors=sum(part.errors for part in parts),
        outages=sum(part.outages for part in parts),
    )


@contextmanager
def _watched(url: str) -> Iterator[list[tuple[float, int]]]:
    """Count the connections of all replicas again and again, until the end.

    :return: when they were counted, in seconds since 1970, and how many there were
    """
    seen: list[tuple[float, int]] = []
    stop = threading.Event()

    def watch() -> None:
        with psycopg.connect(url, autocommit=True, application_name="watch") as connection:
            while not stop.wait(_COUNT_EVERY):
                row = connection.execute(_COUNT).fetchone()
                assert row is not None
                seen.append((time.time(), row[0]))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
