"""A job of a DjangoJobStore under a task lock, in the project of django-apscheduler's tests."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timezone

import pytest
from apscheduler.schedulers.background import BackgroundScheduler
from django_apscheduler.jobstores import DjangoJobStore
from django_apscheduler.models import DjangoJobExecution

from apscheduler_tasklock import EVENT_TASK_LOCK_REFUSED, TaskLocks

pytestmark = pytest.mark.django_db(transaction=True)


def job() -> None: ...


@pytest.fixture
def scheduler() -> Iterator[BackgroundScheduler]:
    scheduler = BackgroundScheduler(timezone=timezone.utc)
    scheduler.add_jobstore(DjangoJobStore())
    scheduler.start()
    yield scheduler
    scheduler.shutdown()


def add_due_job(scheduler: BackgroundScheduler) -> None:
    due = datetime.now(timezone.utc)
    scheduler.add_job(job, "interval", hours=1, id="hourly", next_run_time=due)


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def statuses() -> list[str]:
    return list(DjangoJobExecution.objects.values_list("status", flat=True))


def test_a_run_is_claimed_and_recorded_as_executed(scheduler: BackgroundScheduler) -> None:
    add_due_job(scheduler)
    eventually(lambda: statuses() == [DjangoJobExecution.SUCCESS])


def test_a_run_time_that_is_refused_stays_recorded_as_started(
    scheduler: BackgroundScheduler, request: pytest.FixtureRequest
) -> None:
    refused: list[object] = []
    scheduler.add_listener(refused.append, EVENT_TASK_LOCK_REFUSED)
    database = json.loads(os.environ["TASKLOCK_FOREIGN"])["database"]
    name = f"{request.node.nodeid} hourly"
    with closing(TaskLocks(database)) as locks, locks.hold(name, min_lock=60, max_lock=60):
        add_due_job(scheduler)
        eventually(lambda: bool(refused))
    eventually(lambda: statuses() == [DjangoJobExecution.SENT])
