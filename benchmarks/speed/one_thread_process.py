"""A process that claims and releases task locks, again and again, as it is told.

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
from pathlib import Path

import apscheduler_tasklock
from apscheduler_tasklock import TaskLockRefusedError, TaskLocks, upgrade

# Of one thread, for one figure.
REPEATS = 200
# At once.
CLAIMS = 200
THREADS = 10


class Measures:
    """What is measured.

    :param locks: the task locks
    """

    def __init__(self, locks: TaskLocks) -> None:
        self._locks = locks
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
        """Return the seconds in which coroutines do."""

        async def one(number: int) -> None:
            async with self._locks.hold(f"task {number}", min_lock=0, max_lock=600):
                pass

        async def all_of_them() -> float:
            begun = time.perf_counter()
            await asyncio.gather(*map(one, range(CLAIMS)))
            return time.perf_counter() - begun

        return asyncio.run(all_of_them())


def _mean(do: Callable[[int], None], times: int = REPEATS) -> float:
    begun = time.perf_counter()
    for number in range(times):
        do(number)
    return (time.perf_counter() - begun) / times


def main(url: str, name: str) -> None:
    """Do what is read from the input, until that ends."""
    upgrade(url, schema=name)
    locks = TaskLocks(url, schema=name)
    measures = Measures(locks)
    print(Path(apscheduler_tasklock.__file__).parent.parent, flush=True)
    for line in sys.stdin:
        print(getattr(measures, line.strip())(), flush=True)
    locks.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
