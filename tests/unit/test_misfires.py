"""Since when a job waits for a worker: the pass of the scheduler that submitted it."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_JOB_MISSED
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock._runs.misfires import LONGEST_PASS, SchedulerPasses
from tests.support.internals import instances
from tests.support.polling import eventually
from tests.support.schedulers import Replica


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
def test_a_fork_knows_of_no_worker(database_url: str, direct_url: str) -> None:
    """Its parent's queue counts workers, one of which is reserved for a claim at the fork.

    In the child that claim never comes back, so the worker would be missing, or seem to be free.
    """
    replica = Replica(database_url, max_workers=1, min_factor=0)
    replica.start()
    replica.run_once(print)
    replica.one(EVENT_JOB_EXECUTED)
    child = multiprocessing.get_context("fork").Process(target=miss_a_job, args=[replica.executor])
    try:
        with psycopg.connect(direct_url) as session:
            session.execute("SELECT FROM task_lock FOR UPDATE")
            replica.run_once(print, replace_existing=True)
            eventually(lambda: instances(replica.executor).get("job"))
            child.start()
            child.join(100)
            status = child.exitcode
            child.kill()
    finally:
        replica.shutdown()
    assert status == 0


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
    monkeypatch.setattr("apscheduler_tasklock._runs.misfires.time.time", lambda: clocks.wall)
    monkeypatch.setattr(
        "apscheduler_tasklock._runs.misfires.time.monotonic", lambda: clocks.monotonic
    )
    return clocks


def test_hundreds_of_submissions_are_one_pass_that_began_with_the_first(clocks: Clocks) -> None:
    passes, due = SchedulerPasses(), clocks.run_time()
    began = []
    for _ in range(600):
        began.append(passes.submitting(due))
        clocks.go_on(0.01)
    assert began == [100.0] * 600


def test_what_is_due_after_a_pass_began_is_another_pass(clocks: Clocks) -> None:
    passes = SchedulerPasses()
    assert passes.submitting(clocks.run_time()) == 100.0
    clocks.go_on(1)
    assert passes.submitting(clocks.run_time()) == 101.0


def test_a_pass_takes_no_longer_than_its_limit(clocks: Clocks) -> None:
    passes, due = SchedulerPasses(), clocks.run_time()
    passes.submitting(due)
    clocks.go_on(LONGEST_PASS + 1)
    assert passes.submitting(due) == clocks.monotonic
