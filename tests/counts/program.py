"""Jobs in a process of their own, which counts the calls that they take.

    python -m tests.counts.program KIND URL [--plain] [--bare]

KIND is `lone`, `burst` or `stored`. It prints a line of JSON for each round: how often a frame of
the library's files was entered, a frame of any file, and a function of C, and the CPU time, all for
each job.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import FrameType
from typing import Any

LIBRARY = str(Path(__file__).parents[2] / "apscheduler_tasklock") + "/"
# Seconds that are counted before the first job and after the last one.
BESIDE = 2.0
# Seconds between two lone jobs.
APART = 0.5
LONE, BURST = 10, 200
# Bursts, and seconds from one to the next.
ROUNDS, PERIOD = 5, 6.0
# Jobs before the counted ones, so that connections are open, statements are prepared, and the
# threads of the pool are started. psycopg prepares a statement that is sent for the sixth time.
WARMING = 12

Counts = dict[str, float]


class Counter:
    """Counts the calls of one thread, because numbers that threads share would lose some.

    :ivar ours: entered frames whose file is the library's
    :ivar python: all entered frames, also those of generators that go on
    :ivar c: calls of functions in C
    """

    counting = False

    def __init__(self) -> None:
        self.ours = self.python = self.c = 0
        self._is_ours: dict[Any, bool] = {}

    def __call__(self, frame: FrameType, event: str, _arg: object) -> None:
        if not Counter.counting:
            return
        if event == "call":
            self.python += 1
            code = frame.f_code
            is_ours = self._is_ours.get(code)
            if is_ours is None:
                is_ours = self._is_ours[code] = code.co_filename.startswith(LIBRARY)
            self.ours += is_ours
        elif event == "c_call":
            self.c += 1


counters: list[Counter] = []


def begin(frame: FrameType, event: str, arg: object) -> None:
    """Give a thread a counter of its own. Called with a thread's first event."""
    counter = Counter()
    counters.append(counter)
    sys.setprofile(counter)
    counter(frame, event, arg)


def job() -> None:
    """Do nothing."""


def make_scheduler(url: str, kind: str, *, plain: bool) -> Any:
    from apscheduler.executors.pool import ThreadPoolExecutor
    from apscheduler.schedulers.background import BackgroundScheduler

    from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore

    # The looks at the tasks' rows belong to no job.
    executor = ThreadPoolExecutor(10) if plain else TaskLockExecutor(url, poll_interval=3600)
    stores = {"default": TaskLockJobStore(url, functions=[__package__])} if kind == "stored" else {}
    return BackgroundScheduler(
        timezone=timezone.utc, executors={"default": executor}, jobstores=stores
    )


class Jobs:
    """A scheduler's jobs, and how many of the counted runs have not ended yet."""

    def __init__(self, scheduler: Any) -> None:
        from apscheduler.events import EVENT_JOB_EXECUTED

        self._scheduler = scheduler
        self._left = 0
        self._from = datetime.max.replace(tzinfo=timezone.utc)
        self._ended = threading.Event()
        scheduler.add_listener(self._executed, EVENT_JOB_EXECUTED)

    def _executed(self, event: Any) -> None:
        if event.scheduled_run_time >= self._from:
            self._left -= 1
            if not self._left:
                self._ended.set()

    def expect(self, runs: int, first: datetime) -> None:
        """Count these runs, and no earlier ones."""
        self._left, self._from = runs, first
        self._ended.clear()

    def wait(self, seconds: float = 120) -> bool:
        return self._ended.wait(seconds)

    def add(
        self, prefix: str, number: int, first: datetime, apart: float = 0.0, period: float = 3600
    ) -> None:
        """Add jobs that are no one-off jobs."""
        for each in range(number):
            at = first + timedelta(seconds=apart * each)
            self._scheduler.add_job(
                f"{__package__}.program:job",
                "interval",
                seconds=period,
                start_date=at,
                next_run_time=at,  # also on a machine that is too slow to add it before
                timezone=timezone.utc,
                id=f"{prefix} {each}",
                misfire_grace_time=None,
            )

    def remove(self) -> None:
        """Remove all jobs, and wait for those that run."""
        self._scheduler.remove_all_jobs()
        time.sleep(1)

    def count(self, runs: int, first: datetime, within: float = 120) -> Counts | None:
        """Return what runs take, of which the first is due then; ``None``: they were too slow."""
        seconds = first.timestamp() - BESIDE - time.time()
        if seconds < 0:
            return None
        self.expect(runs, first)
        time.sleep(seconds)
        before, cpu = sums(), time.process_time()
        Counter.counting = True
        in_time = self.wait(BESIDE + within)
        time.sleep(BESIDE if in_time else 0)
        Counter.counting = False
        if not in_time:
            return None
        counted = {name: value - before[name] for name, value in sums().items()}
        counted["cpu_ms"] = (time.process_time() - cpu) * 1000
        return {name: value / runs for name, value in counted.items()}


def sums() -> Counts:
    return {
        "library": sum(each.ours for each in counters),
        "python": sum(each.python for each in counters),
        "c": sum(each.c for each in counters),
    }


def run(url: str, kind: str, *, plain: bool) -> Iterator[Counts]:
    """Run the jobs, and yield what each of them took, once for each round."""
    scheduler = make_scheduler(url, kind, plain=plain)
    jobs = Jobs(scheduler)
    scheduler.start()
    warm = in_seconds(0.5)
    jobs.expect(WARMING, warm)
    jobs.add("warming", WARMING, warm, 0.1)
    assert jobs.wait(), "a job has not run"
    yield from bursts(jobs) if kind == "burst" else lone(jobs)
    scheduler.shutdown()


def lone(jobs: Jobs) -> Iterator[Counts]:
    counts, lead = None, 2.0
    while counts is None:
        lead *= 2  # for a machine that is too slow to add the jobs in time
        first = in_seconds(BESIDE + lead)
        jobs.add(f"counted {lead}", LONE, first, APART)
        counts = jobs.count(LONE, first)
    yield counts


def bursts(jobs: Jobs) -> Iterator[Counts]:
    """Yield the counts of bursts, but of no first one, whose tasks were never claimed."""
    rounds, period = 0, PERIOD
    while rounds < ROUNDS:
        first = in_seconds(BESIDE + 1)
        jobs.add(f"every {period} s", BURST, first, period=period)
        first += timedelta(seconds=period)
        while rounds < ROUNDS:
            counts = jobs.count(BURST, first, period - 2 * BESIDE)
            first += timedelta(seconds=period)
            if counts is None:
                break
            rounds += 1
            yield counts
        jobs.remove()
        period *= 2  # for a machine on which a burst was not over before the next one's count


def in_seconds(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.counts.program")
    parser.add_argument("kind", choices=["lone", "burst", "stored"])
    parser.add_argument("url")
    parser.add_argument("--plain", action="store_true", help="APScheduler without the library")
    parser.add_argument("--bare", action="store_true", help="count no calls, which takes CPU time")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    # Before the first thread starts, so that each one has a counter; the main thread only waits.
    # Python 3.12 could set it in threads that run already, 3.10 and 3.11 cannot.
    if not options.bare:
        threading.setprofile(begin)
    for counts in run(options.url, options.kind, plain=options.plain):
        print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
