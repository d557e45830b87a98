"""Run times that wait for a worker: how often, and for how long, it is asked which are taken."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

import pytest
from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.executors.debug import DebugExecutor
from apscheduler.executors.pool import ProcessPoolExecutor, ThreadPoolExecutor
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._scheduler.adapter import has_own_threads
from apscheduler_tasklock._scheduler.queued import LONGEST_PAUSE, QueuedRuns
from apscheduler_tasklock._scheduler.submission import Submission, new_claim_ids
from apscheduler_tasklock.options import DEFAULTS

pytestmark = pytest.mark.inside

NOW = datetime(2025, 6, 6, 10, tzinfo=timezone.utc)
HOURLY = IntervalTrigger(hours=1)
JITTER = 1.25


class Clock:
    """Stands in for the monotonic clock, which tells of a busy machine more than of a claim."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Recorder:
    """Stands in for a replica's locks: pauses of minutes are noted, and not waited for."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.asked: list[int] = []

    def wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return False

    def find_taken(self, requests: Sequence[Any]) -> dict[UUID, Any]:
        self.asked.append(len(requests))
        return {}


class SlowTrigger(IntervalTrigger):  # type: ignore[misc]  # APScheduler has no types
    """Takes so long that claims of hundreds of such jobs would take minutes."""

    SECONDS = 0.1

    def get_next_fire_time(self, *times: Any) -> Any:
        time.sleep(self.SECONDS)
        return super().get_next_fire_time(*times)


@dataclass
class Job:
    """What is asked of a job."""

    trigger: Any
    id: str = "job"
    func: Any = print


def submissions(count: int, trigger: Any = HOURLY) -> list[Submission]:
    return [
        Submission(
            job=Job(trigger),
            jobstore="default",
            trigger=trigger,
            run_times=(NOW,),
            task_name=f"task {number}",
            options=DEFAULTS,
            run_unlocked=False,
            logger_name="",
            claim_ids=new_claim_ids([NOW]),
        )
        for number in range(count)
    ]


@dataclass
class Worker:
    """Asks as one does whose claim was refused, after it took 2 ms."""

    clock: Clock = field(default_factory=Clock)
    locks: Any = field(default_factory=Recorder)

    def __post_init__(self) -> None:
        self.queued = QueuedRuns(clock=self.clock)

    def finds_waiting(self, made: Sequence[Submission]) -> None:
        for submission in made:
            self.queued.add(submission)

    def asks(self, times: int = 1) -> None:
        for _ in range(times):
            sent = self.clock()
            self.clock.seconds += 0.002
            self.queued.ask(self.locks, sent)


def test_who_is_refused_again_and_again_pauses_longer_and_not_beyond_a_limit() -> None:
    worker = Worker()
    worker.finds_waiting(submissions(10))
    worker.asks(times=100)
    pauses = worker.locks.pauses
    assert pauses[0] < 0.1
    assert pauses[1] > pauses[0]
    assert max(pauses) <= LONGEST_PAUSE * JITTER
    assert pauses[-1] > LONGEST_PAUSE / JITTER


def test_after_a_hundred_refusals_a_few_grants_make_the_pause_short_again() -> None:
    worker = Worker()
    worker.finds_waiting(submissions(10))
    worker.asks(times=100)
    for _ in range(10):
        worker.queued.note_granted()
    worker.asks()
    assert worker.locks.pauses[-1] < 0.1


def test_a_burst_after_the_last_one_begins_with_a_short_pause() -> None:
    worker = Worker()
    for _ in range(2):
        burst = submissions(10)
        worker.finds_waiting(burst)
        worker.asks(times=20)
        for submission in burst:
            worker.queued.take(submission)
    assert worker.locks.pauses[19] > 0.1 > worker.locks.pauses[20]


def test_claims_of_slow_triggers_are_made_for_a_moment_only() -> None:
    queued, locks = QueuedRuns(), Recorder()
    for submission in submissions(50, SlowTrigger(hours=1)):
        queued.add(submission)
    queued.ask(locks, since=time.monotonic())
    assert sum(locks.asked) < 5


def test_only_workers_of_a_pool_of_the_executors_own_pause() -> None:
    """Threads of an event loop are the application's too, and processes know of no others."""
    assert has_own_threads(ThreadPoolExecutor())
    assert not has_own_threads(ProcessPoolExecutor())
    assert not has_own_threads(AsyncIOExecutor())
    assert not has_own_threads(DebugExecutor())
