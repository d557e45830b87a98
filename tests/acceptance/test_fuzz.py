"""Eight processes increment two unprotected counters under the lock; none may be lost."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import pytest

from apscheduler_tasklock import HeldLock
from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock._lock.replica import LockSettings
from tests.support.waist import ClaimRequest, LockClient

PROCESSES = 8
TASKS = ("first", "second")
INCREMENTS = 40


def increment(counter: Path) -> None:
    """Read, yield to the others, write: two at the same time lose one."""
    value = int(counter.read_text())
    time.sleep(0.0005)
    counter.write_text(str(value + 1))


def work(database_url: str, folder: Path, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311  # repeatable, not secret
    locks = LockClient(LockSettings(database_url, f"process {seed}", claim_timeout=60))
    left = dict.fromkeys(TASKS, INCREMENTS)
    while left:
        task = rng.choice(sorted(left))
        claimed = locks.claim(ClaimRequest(task, min_lock=0.0, max_lock=60.0))
        if isinstance(claimed, HeldLock):
            increment(folder / task)
            locks.release(claimed, RunOutcome(rng.choice([WindowAfter.KEEP, WindowAfter.OPEN])))
            left[task] -= 1
            if not left[task]:
                del left[task]
    locks.close()


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_counter_under_the_lock_loses_nothing(
    database_url: str, tmp_path: Path, rng: random.Random
) -> None:
    for task in TASKS:
        (tmp_path / task).write_text("0")
    seeds = [rng.randrange(2**32) for _ in range(PROCESSES)]
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=work, args=(database_url, tmp_path, seed)) for seed in seeds
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    counted = [int((tmp_path / task).read_text()) for task in TASKS]
    assert counted == [PROCESSES * INCREMENTS] * len(TASKS)
