"""What the lock adds to one job on APScheduler's thread pool, beside its claim and its release."""

from __future__ import annotations

import queue
import time
from datetime import datetime, timezone
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockExecutor, task_lock, upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed.contenders import Library
from benchmarks.speed.effort import Effort
from benchmarks.speed.report import Goal, Section, median, microseconds, p99, table

MOST = 0.2e-3


def run(effort: Effort) -> Section:
    """Submit jobs to a plain pool and to ours, in turn, and time them until they are reported."""
    rounds = effort.of(2000, 200)
    section = Section(
        "One job on the thread pool",
        f"From `submit_job` until APScheduler has reported the job's end, one job at a time, "
        f"{rounds:,} rounds in a shuffled order; claim and release on their own are measured in "
        "the same rounds. Added is ours less plain, claim and release, within each round.",
    )
    with EmbeddedServer(loopback=True) as server:
        upgrade(server.url)
        samples = _measure(server.url, effort, rounds)
    plain, ours, claim, release = (samples[key] for key in ("plain", "ours", "claim", "release"))
    added = [o - p - c - r for p, o, c, r in zip(plain, ours, claim, release, strict=True)]
    rows = {
        "APScheduler alone": plain,
        "with the task lock": ours,
        "claim": claim,
        "release": release,
        "added beside them": added,
    }
    section.tables.append(
        table(
            ["", "median", "p99"],
            [[what, microseconds(median(t)), microseconds(p99(t))] for what, t in rows.items()],
        )
    )
    section.goals.append(
        Goal(
            "cost added to a job on the thread pool",
            "claim + release + at most 200 us",
            f"claim + release {median(added) * 1e6:+,.0f} us",
            median(added) <= MOST,
        )
    )
    return section


def nothing() -> None:
    """Be the job."""


@task_lock(min_lock=0)
def unlocked_window() -> None:
    """Be the job whose next run time is at once a new window."""


def _measure(url: str, effort: Effort, rounds: int) -> dict[str, list[float]]:
    scheduler = BackgroundScheduler(
        executors={
            "plain": ThreadPoolExecutor(1),
            "ours": TaskLockExecutor(url, ThreadPoolExecutor(1), replica_id="bench"),
        }
    )
    done: queue.SimpleQueue[float] = queue.SimpleQueue()

    def note(event: Any) -> None:
        assert event.code == EVENT_JOB_EXECUTED, event.exception
        done.put(time.perf_counter())

    scheduler.add_listener(note, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
    jobs = {
        "plain": scheduler.add_job(nothing, "interval", hours=1, id="plain", executor="plain"),
        "ours": scheduler.add_job(unlocked_window, "interval", hours=1, id="ours", executor="ours"),
    }
    scheduler.start(paused=True)
    library = Library(url)
    rng = effort.rng()
    samples: dict[str, list[float]] = {"plain": [], "ours": [], "claim": [], "release": []}
    try:
        for number in range(-20, rounds):
            keep = samples if number >= 0 else {key: [] for key in samples}
            for what in rng.sample(["plain", "ours", "lock"], 3):
                if what == "lock":
                    _claim_and_release(library, keep)
                else:
                    keep[what].append(_submit(scheduler, jobs[what], what, done))
    finally:
        library.close()
        scheduler.shutdown()
    return samples


def _submit(scheduler: Any, job: Any, alias: str, done: queue.SimpleQueue[float]) -> float:
    run_time = datetime.now(timezone.utc)
    begun = time.perf_counter()
    scheduler._executors[alias].submit_job(job, [run_time])
    return done.get(timeout=30) - begun


def _claim_and_release(library: Library, keep: dict[str, list[float]]) -> None:
    begun = time.perf_counter()
    held = library.claim("on its own")
    claimed = time.perf_counter()
    library.release(held)
    keep["claim"].append(claimed - begun)
    keep["release"].append(time.perf_counter() - claimed)
