"""A process with a version of the library, which measures what it is told to, again and again.

It is run as a script with the folder of the library's version in ``PYTHONPATH``, and so imports
nothing of the benchmarks. It first prints the library's folder. Then it reads lines, each with the
name of one of the measures below, and prints the seconds that it took.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MISSED
from apscheduler.schedulers.background import BackgroundScheduler

import apscheduler_tasklock
from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_REFUSED,
    TaskLockExecutor,
    TaskLockRefusedError,
    TaskLocks,
    upgrade,
)

# Claims in a row whose mean is one figure.
REPEATS = 200
# Claims at once, and the threads that make them.
CLAIMS = 200
THREADS = 10

REPLICAS = 4
JOBS = 200
# Threads of a replica's pool.
WORKERS = 10
# Seconds that short jobs take.
SHORT = 0.02
# Seconds in which jobs are added before they are due, for each job of each replica.
LEAD = 0.002
# Lone jobs in a row whose mean CPU time is one figure.
LONE = 10
# Seconds until a round whose jobs have not ended fails.
PATIENCE = 120.0


class Claims:
    """Measures of ``TaskLocks``, without a scheduler."""

    def __init__(self, url: str, schema: str) -> None:
        self._locks = TaskLocks(url, schema=schema)
        self._pool = ThreadPoolExecutor(THREADS)
        # The minimum lock keeps it taken.
        with self._locks.hold("taken", min_lock=3600, max_lock=3600):
            pass

    def _hold(self, number: int) -> None:
        with self._locks.hold(f"task {number}", min_lock=0, max_lock=600):
            pass

    def _be_refused(self) -> None:
        with suppress(TaskLockRefusedError), self._locks.hold("taken", min_lock=0, max_lock=600):
            raise AssertionError("it is taken")

    def hold(self) -> float:
        """Return the seconds of a claim and its release, by one thread."""
        return _mean(lambda number: self._hold(number % 20))

    def refused(self) -> float:
        """Return the seconds of a claim that is refused."""
        return _mean(lambda _number: self._be_refused())

    def beside_work(self) -> float:
        """Return the seconds of a claim and its release beside a thread that burns the CPU."""
        stopped = threading.Event()

        def burn() -> None:
            while not stopped.is_set():
                sum(range(1000))

        burning = threading.Thread(target=burn)
        burning.start()
        try:
            return _mean(lambda number: self._hold(number % 20), REPEATS // 10)
        finally:
            stopped.set()
            burning.join()

    def threads(self) -> float:
        """Return the seconds in which some threads claim and release all."""
        begun = time.perf_counter()
        list(self._pool.map(self._hold, range(CLAIMS)))
        return time.perf_counter() - begun

    def coroutines(self) -> float:
        """Return the seconds in which as many coroutines claim and release all."""

        async def one(number: int) -> None:
            async with self._locks.hold(f"task {number}", min_lock=0, max_lock=600):
                pass

        async def all_of_them() -> float:
            begun = time.perf_counter()
            await asyncio.gather(*map(one, range(CLAIMS)))
            return time.perf_counter() - begun

        return asyncio.run(all_of_them())


class Jobs:
    """Measures of replicas whose jobs are due at one moment."""

    def __init__(self, url: str, schema: str) -> None:
        self._rounds = count()
        self._left = 0
        self._changed = threading.Condition()
        self._ended = 0.0
        self._begun = 0.0
        self._schedulers = [
            BackgroundScheduler(executors={"default": TaskLockExecutor(url, schema=schema)})
            for _ in range(REPLICAS)
        ]
        codes = EVENT_JOB_EXECUTED | EVENT_TASK_LOCK_REFUSED
        failed = EVENT_JOB_ERROR | EVENT_JOB_MISSED | EVENT_TASK_LOCK_ERROR
        for scheduler in self._schedulers:
            scheduler.add_listener(self._note_end, codes)
            scheduler.add_listener(self._note_failure, failed)
            scheduler.start()
        self._bare = psycopg.connect(url, autocommit=True)
        self._bare.execute(
            "CREATE TABLE IF NOT EXISTS bare_loop (task text PRIMARY KEY, until timestamptz)"
        )
        self._bare.execute(
            "INSERT INTO bare_loop SELECT 't' || n FROM generate_series(0, %s) AS n "
            "ON CONFLICT DO NOTHING",
            [JOBS],
        )

    def _note_end(self, _event: Any) -> None:
        with self._changed:
            self._left -= 1
            self._ended = time.time()
            self._changed.notify_all()

    def _note_failure(self, event: Any) -> None:
        print(f"a run has failed: {event.code} {event.job_id}", file=sys.stderr, flush=True)

    def _begin(self) -> None:
        self._begun = time.time()

    def _run(self, replicas: int, jobs: int, function: Callable[[], object]) -> float:
        """Let jobs be due; return when, in seconds since 1970, after they have all ended."""
        number = next(self._rounds)
        self._left = replicas * jobs
        due = time.time() + 0.2 + LEAD * self._left
        at = datetime.fromtimestamp(due, timezone.utc)
        for scheduler in self._schedulers[:replicas]:
            for job in range(jobs):
                scheduler.add_job(
                    function, "date", run_date=at, id=f"{number} {job}", misfire_grace_time=None
                )
        if time.time() > due:
            raise RuntimeError("the jobs could not be added before they were due")
        with self._changed:
            if not self._changed.wait_for(lambda: self._left == 0, PATIENCE):
                raise RuntimeError(f"{self._left} jobs have not ended")
        return due

    def alone(self) -> float:
        """Return the seconds from a job's run time until it begins."""
        due = self._run(1, 1, self._begin)
        return self._begun - due

    def effort(self) -> float:
        """Return the seconds of CPU that this process needs for a job alone, all threads together.

        The figure has what the scheduler needs to add the job and to wait for it, too.
        """
        begun = time.process_time()
        for _ in range(LONE):
            self._run(1, 1, _nothing)
        return (time.process_time() - begun) / LONE

    def pool(self) -> float:
        """Return the seconds in which one replica runs all jobs."""
        return -self._run(1, JOBS, _nothing) + self._ended

    def bare_loop(self) -> float:
        """Return the seconds of as many UPDATEs as there are jobs, by a cursor of psycopg."""
        begun = time.perf_counter()
        for number in range(JOBS):
            self._bare.execute(
                "UPDATE bare_loop SET until = now() + interval '1 s' WHERE task = %s "
                "RETURNING until",
                [f"t{number}"],
            ).fetchone()
        return time.perf_counter() - begun

    def fleet(self) -> float:
        """Return the seconds in which each job is run by one of the replicas."""
        return -self._run(REPLICAS, JOBS, _nothing) + self._ended

    def short(self) -> float:
        """Return the same for jobs that last."""
        return -self._run(REPLICAS, JOBS, _last) + self._ended


def _nothing() -> None: ...


def _last() -> None:
    time.sleep(SHORT)


def _mean(do: Callable[[int], None], times: int = REPEATS) -> float:
    begun = time.perf_counter()
    for number in range(times):
        do(number)
    return (time.perf_counter() - begun) / times


def main(url: str, schema: str, kind: str) -> None:
    """Measure what is read from the input, until that ends."""
    upgrade(url, schema=schema)
    measures = Claims(url, schema) if kind == "claims" else Jobs(url, schema)
    print(Path(apscheduler_tasklock.__file__).parent.parent, flush=True)
    for line in sys.stdin:
        print(getattr(measures, line.strip())(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
