"""Many replicas with many jobs that are all due in the same second."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

import psycopg

from apscheduler_tasklock import upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.fleet import Decisions, run_replicas
from benchmarks.speed.report import Goal, Section, table

PROCESSES = 4
JOBS = 200
REPLICAS = (8, 16, 32, 64)
# How often a longer time is tried for the jobs to be set up in before they are due.
LEADS = 3
GROWTH_REPLICAS = 16
GROWTH_JOBS = (50, 100, 200, 400, 800)

# A line through the points explains so much of how they differ, or it is no line.
LINEAR = 0.98


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
    errors: int
    outages: int

    @property
    def claims(self) -> int:
        """How many claims were made."""
        return self.replicas * self.jobs


def run(effort: Effort) -> Section:
    """Measure one burst after the other."""
    sizes = [(replicas, JOBS) for replicas in effort.of(REPLICAS, (8, 16))]
    more = [(GROWTH_REPLICAS, jobs) for jobs in effort.of(GROWTH_JOBS, (50, 100))]
    bursts = {size: _burst(*size) for size in dict.fromkeys([*sizes, *more])}
    by_replicas = [bursts[size] for size in sizes]
    by_jobs = [bursts[size] for size in more]
    section = Section(
        "A burst",
        f"R replicas, each a `BackgroundScheduler` of its own with APScheduler's pool of 10 "
        f"threads, an engine of its own and the same J jobs, all due at one moment; "
        f"{PROCESSES} processes share the replicas, on the same cores as the server. Time is from "
        "then until the last claim is decided. *Once* says whether each of the J windows was "
        "granted exactly once, its job ran exactly once, and all others were refused. *Told "
        "away* counts replicas that took the database to be away for a while, because a connection "
        "took too long to open. At rest is right before the moment.",
    )
    section.tables += [_table(by_replicas), _table(by_jobs)]
    section.goals = [_decided(by_replicas[-1]), _linear(by_replicas, by_jobs)]
    section.goals.append(_at_rest(by_replicas[-1]))
    return section


def _table(bursts: Sequence[Burst]) -> str:
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
            for burst in bursts
        ],
    )


def _decided(burst: Burst) -> Goal:
    what = f"{burst.replicas} replicas x {burst.jobs} jobs due at once"
    return Goal(what, "every window decided once", f"{burst.decided:,} claims decided", burst.once)


def _linear(by_replicas: Sequence[Burst], by_jobs: Sequence[Burst]) -> Goal:
    every = [*by_replicas, *by_jobs]
    claims, seconds = [burst.claims for burst in every], [burst.seconds for burst in every]
    slope, start = statistics.linear_regression(claims, seconds)
    share = statistics.correlation(claims, seconds) ** 2
    return Goal(
        "how long a burst takes",
        "grows linearly with replicas x jobs",
        f"{slope * 1e6:,.0f} us a claim {start:+.2f} s, R2 {share:.3f}",
        share >= LINEAR,
    )


def _at_rest(burst: Burst) -> Goal:
    return Goal(
        "connections of a replica",
        "at most 5, 1 at rest",
        f"{burst.peak / burst.replicas:.1f} at the peak, {burst.rest / burst.replicas:.1f} at rest",
        burst.peak <= 5 * burst.replicas and burst.rest <= burst.replicas,
    )


def _burst(replicas: int, jobs: int) -> Burst:
    # All of them import, connect, and add their jobs on the same cores first.
    lead = 5 + replicas * 0.05 + replicas * jobs * 0.0006
    for _ in range(LEADS):
        burst = _due_after(lead, replicas, jobs)
        if burst is not None:
            return burst
        lead *= 3
    raise RuntimeError(f"{lead / 3:.0f} s are not enough to set up {replicas} x {jobs} jobs")


def _due_after(lead: float, replicas: int, jobs: int) -> Burst | None:
    """Run a burst; return ``None`` if the jobs were due before all of them were set up."""
    with EmbeddedServer({"max_connections": str(5 * max(replicas, 16) + 20)}) as server:
        upgrade(server.url)
        share = [replicas // PROCESSES] * PROCESSES
        due = time.time() + lead
        with (
            _watched(server.url) as seen,
            ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool,
        ):
            parts = list(
                pool.map(
                    run_replicas,
                    [server.url] * PROCESSES,
                    share,
                    [jobs] * PROCESSES,
                    [due] * PROCESSES,
                )
            )
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
    expected = sorted(f"job {number}" for number in range(jobs))
    return Burst(
        replicas=replicas,
        jobs=jobs,
        seconds=max(part.ended for part in parts) - due,
        peak=max(connections for _, connections in seen),
        rest=[connections for when, connections in seen if when < due][-1],
        once=sorted(granted) == expected and ran == jobs and refused == (replicas - 1) * jobs,
        decided=len(granted) + refused,
        errors=sum(part.errors for part in parts),
        outages=sum(part.outages for part in parts),
    )


@contextmanager
def _watched(url: str) -> Iterator[list[tuple[float, int]]]:
    """Count the replicas' connections now and then, until the end."""
    seen: list[tuple[float, int]] = []
    stop = threading.Event()

    def watch() -> None:
        with psycopg.connect(url, autocommit=True, application_name="watch") as connection:
            while not stop.wait(0.05):
                row = connection.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'tasklock%'"
                ).fetchone()
                assert row is not None
                seen.append((time.time(), row[0]))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
