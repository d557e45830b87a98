"""How late a job is at its worker: simulated pools on a clock that goes on only as they work."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from heapq import heappop, heappush
from itertools import count
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_JOB_MISSED
from apscheduler.schedulers.background import BackgroundScheduler
from hypothesis import given
from hypothesis import strategies as st

from apscheduler_tasklock._scheduler.lateness import (
    LONGEST_PASS,
    SchedulerPasses,
    WorkerQueue,
    is_late,
)
from tests.support.polling import eventually
from tests.support.schedulers import Replica

pytestmark = pytest.mark.inside

HOUR = 3600.0

WAITING = """
    SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()
"""


@dataclass(frozen=True)
class Fire:
    """A fire: when it was submitted, and what its claim, its job and its release take."""

    at: float = 0.0
    claim: float = 0.0
    job: float = 0.0
    release: float = 0.0


@dataclass
class Begun:
    """When fires began, and when they would have if the lock took no time, as is reckoned."""

    really: list[float]
    reckoned: list[float]


def begun(fires: Sequence[Fire], workers: int) -> Begun:
    """Let a pool work."""
    now = 0.0
    queue, seen = WorkerQueue(lambda: now), Begun([], [])
    waiting, order = list(fires), count()
    pending: list[tuple[float, int, Iterator[float]]] = []  # what goes on, and until when
    idle = workers

    def work(fire: Fire) -> Iterator[float]:
        """Do as a worker that the lock keeps waiting; give how long each step takes."""
        turn = queue.begin(fire.at)
        seen.really.append(now)
        seen.reckoned.append(turn.at)
        yield fire.claim
        with turn.job():
            yield fire.job
        yield fire.release
        turn.end()

    while waiting or pending:
        while idle and waiting and waiting[0].at <= now:
            idle -= 1
            heappush(pending, (now, next(order), work(waiting.pop(0))))
        if not pending:
            now = waiting[0].at
            continue
        if waiting and idle and waiting[0].at < pending[0][0]:
            now = waiting[0].at
            continue
        now, _, steps = heappop(pending)
        takes = next(steps, None)
        if takes is None:
            idle += 1
        else:
            heappush(pending, (now + takes, next(order), steps))
    return seen


def begun_without_a_lock(fires: Sequence[Fire], workers: int) -> list[float]:
    free = [0.0] * workers
    begun_at = []
    for fire in fires:
        begun_at.append(max(fire.at, heappop(free)))
        heappush(free, begun_at[-1] + fire.job)
    return begun_at


def test_time_in_claims_and_releases_is_not_lateness() -> None:
    assert begun([Fire(claim=2, release=1)] * 40, workers=1).reckoned == [0.0] * 40
    assert begun([Fire(claim=2, release=1)] * 40, workers=10).reckoned == [0.0] * 40


def test_an_executor_busy_with_its_own_jobs_for_an_hour_is_an_hour_late() -> None:
    assert begun([Fire(job=HOUR), Fire(at=1)], workers=1).reckoned == [0.0, HOUR]
    assert begun([Fire(job=HOUR)] * 10 + [Fire(at=1, claim=2)] * 3, workers=10).reckoned == [
        *[0.0] * 10,
        *[HOUR] * 3,
    ]


def test_a_job_is_as_late_as_the_jobs_before_it_took_and_no_later() -> None:
    fires = [Fire(claim=2, job=1, release=2)] * 4
    assert begun(fires, workers=1).reckoned == [0.0, 1.0, 2.0, 3.0]
    assert begun(fires, workers=2).reckoned == [0.0, 0.0, 1.0, 1.0]


def test_time_in_claims_does_not_count_while_some_workers_are_busy_with_long_jobs() -> None:
    # The second worker has 40 claims to wait for; the first one joins it after its job of 10 s.
    fires = [Fire(job=10), *[Fire(claim=2)] * 40]
    assert begun(fires, workers=2).reckoned == [0.0] * 41


def test_a_worker_that_was_idle_is_not_early() -> None:
    assert begun([Fire(), Fire(at=100), Fire(at=HOUR)], workers=1).reckoned == [0.0, 100.0, HOUR]
    assert begun([Fire(job=5), Fire(at=100), Fire(at=HOUR)], workers=3).reckoned == [
        0.0,
        100.0,
        HOUR,
    ]


def test_no_fire_is_later_than_it_really_is() -> None:
    # The third was reckoned as the first worker's, which was waiting for a claim, and the first
    # worker has taken as long as both.
    fires = [Fire(claim=1, job=10), Fire(job=0.5), Fire(job=10), Fire(at=12, job=2), Fire(at=13)]
    assert begun(fires, workers=2).reckoned == [0.0, 0.0, 0.0, 12.0, 13.0]


takes = st.sampled_from([0.0, 0.5, 1.0, 2.0, 10.0])


@given(
    fires=st.lists(
        st.builds(Fire, at=st.sampled_from([0.0, 1.0, 5.0]), claim=takes, job=takes, release=takes),
        max_size=20,
    ),
    workers=st.integers(1, 4),
)
def test_a_fire_is_as_late_as_without_a_lock(fires: list[Fire], workers: int) -> None:
    fires.sort(key=lambda fire: fire.at)
    with_lock, without = begun(fires, workers), begun_without_a_lock(fires, workers)
    for fire, really, reckoned in zip(fires, with_lock.really, with_lock.reckoned, strict=True):
        assert fire.at <= reckoned <= really
    if workers == 1:
        assert with_lock.reckoned == pytest.approx(without)
    unclaimed = begun([Fire(fire.at, job=fire.job) for fire in fires], workers)
    assert unclaimed.reckoned == pytest.approx(without)


def miss_a_job(executor: Any) -> None:
    """Keep an executor's one worker busy until the next job is too late."""
    codes: dict[str, int] = {}
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(60)

    scheduler = BackgroundScheduler(executors={"default": executor}, timezone=timezone.utc)
    scheduler.add_listener(
        lambda event: codes.update({event.job_id: event.code}),
        EVENT_JOB_EXECUTED | EVENT_JOB_MISSED,
    )
    scheduler.start()
    scheduler.add_job(work, id="long", misfire_grace_time=None)
    assert begun.wait(60)
    scheduler.add_job(print, id="late", misfire_grace_time=1)
    time.sleep(1.5)
    go_on.set()
    eventually(lambda: codes == {"long": EVENT_JOB_EXECUTED, "late": EVENT_JOB_MISSED})
    scheduler.shutdown()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
# What Python 3.12 and later say of a fork beside threads, which is what is tested here.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_knows_of_no_worker(
    database_url: str, direct_url: str, connection: psycopg.Connection[Any]
) -> None:
    """One of its parent's that waits for a claim at the fork would always seem to be free."""
    replica = Replica(database_url, max_workers=1, min_factor=0)
    replica.start()
    replica.run_once(print)
    replica.one(EVENT_JOB_EXECUTED)
    child = multiprocessing.get_context("fork").Process(target=miss_a_job, args=[replica.executor])
    try:
        with psycopg.connect(direct_url) as session:
            session.execute("SELECT FROM task_lock FOR UPDATE")
            replica.run_once(print, replace_existing=True)
            eventually(lambda: connection.execute(WAITING).fetchone(), 20)
            child.start()
            child.join(30)
            status = child.exitcode
            child.kill()
    finally:
        replica.shutdown()
    assert status == 0


def test_a_new_worker_process_is_late_by_its_start_and_an_old_one_is_not() -> None:
    queue = WorkerQueue(lambda: 10.0)
    first = queue.begin(0.0, new_worker_since=3.0)
    assert first.at == 3.0
    first.end()
    assert queue.begin(4.0, new_worker_since=10.0).at == 4.0


# Passes of the scheduler


@dataclass
class Clocks:
    """The wall clock and the monotonic one, which go on only when a test says so."""

    wall: float = 1_750_000_000.0
    monotonic: float = 100.0

    def go_on(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds

    def run_time(self, ago: float = 0.0) -> datetime:
        return datetime.fromtimestamp(self.wall - ago, timezone.utc)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr("apscheduler_tasklock._scheduler.lateness.time.time", lambda: clocks.wall)
    monkeypatch.setattr(
        "apscheduler_tasklock._scheduler.lateness.time.monotonic", lambda: clocks.monotonic
    )
    return clocks


def test_hundreds_of_submissions_are_one_pass_that_began_with_the_first(clocks: Clocks) -> None:
    passes, due = SchedulerPasses(), clocks.run_time()
    began = []
    for _ in range(600):
        began.append(passes.submitting(due).began_at)
        clocks.go_on(0.01)
    assert began == [100.0] * 600
    assert is_late(due, 1, clocks.monotonic)
    assert not is_late(due, 1, began[-1])


def test_what_is_due_after_a_pass_began_is_another_pass(clocks: Clocks) -> None:
    passes = SchedulerPasses()
    assert passes.submitting(clocks.run_time()).began_at == 100.0
    clocks.go_on(1)
    assert passes.submitting(clocks.run_time()).began_at == 101.0


def test_a_pass_takes_no_longer_than_its_limit(clocks: Clocks) -> None:
    passes, due = SchedulerPasses(), clocks.run_time()
    passes.submitting(due)
    clocks.go_on(LONGEST_PASS + 1)
    assert passes.submitting(due).began_at == clocks.monotonic


def test_coroutines_of_a_pass_are_as_late_as_the_event_loop_was_busy(clocks: Clocks) -> None:
    passes, due = SchedulerPasses(), clocks.run_time()
    for _ in range(600):
        a_pass = passes.submitting(due)
        clocks.go_on(0.01)
    late_by = 5.0  # seconds, after the pass
    clocks.go_on(late_by - 0.01)
    begun_at = [a_pass.begin_coroutine()]
    clocks.go_on(60)  # while they claim
    begun_at.append(a_pass.begin_coroutine())
    assert begun_at == [pytest.approx(100.0 + late_by)] * 2


# Grace times


@pytest.mark.parametrize(
    ("grace", "ago", "late"),
    [(1, 0.9, False), (1, 1.1, True), (None, HOUR, False), (HOUR, 1.1, False), (1, -5, False)],
)
def test_a_run_time_is_late_after_its_grace(
    clocks: Clocks, grace: float | None, ago: float, late: bool
) -> None:
    run_time = clocks.run_time(ago)
    assert is_late(run_time, grace, clocks.monotonic) == late
    clocks.go_on(HOUR)  # of claims, which do not count
    assert is_late(run_time, grace, clocks.monotonic - HOUR) == late
