"""A run time that the application sets inside a window is refused, and the application is told.

Such run times are a button's ``modify_job(next_run_time=now)``, a listener that retries by it, and
``add_job(next_run_time=now)`` at the start of each replica.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.triggers.cron import CronTrigger

from apscheduler_tasklock import EVENT_TASK_LOCK_REFUSED, EVENT_TASK_LOCK_RELEASED, TaskLocks
from apscheduler_tasklock.status import Verdict
from tests.support.commands import Command
from tests.support.polling import eventually
from tests.support.schedulers import DAILY, Replica

MakeReplica = Callable[..., Replica]

SET = ", which modify_job or add_job has set: "


def now() -> datetime:
    return datetime.now(timezone.utc)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    """Return the levels and the messages of refused run times of the application."""
    caplog.set_level(logging.INFO)
    return lambda: [
        (record.levelname, record.getMessage())
        for record in list(caplog.records)
        if SET in record.getMessage()
    ]


@pytest.fixture
def operator(make_task_locks: Callable[..., TaskLocks]) -> TaskLocks:
    return make_task_locks()


def ran(replica: Replica, *, count: int = 1) -> None:
    """Wait until the job's window is taken, and its runs here are over."""
    eventually(lambda: replica.codes().count(EVENT_TASK_LOCK_RELEASED) >= count)


def refused(replica: Replica, count: int) -> None:
    eventually(lambda: replica.codes().count(EVENT_TASK_LOCK_REFUSED) >= count)
    replica.idle()


def set_now(replica: Replica) -> None:
    replica.scheduler.modify_job("job", next_run_time=now())


Told = Callable[[], list[tuple[str, str]]]


@pytest.mark.parametrize(
    "trigger", [{"trigger": "interval", "hours": 1}, {"trigger": "cron", **DAILY}]
)
def test_a_button_is_told_at_info_then_at_warning_then_no_more(
    make_replica: MakeReplica, told: Told, trigger: dict[str, Any]
) -> None:
    replica = make_replica()
    replica.scheduler.add_job(
        print, id="job", next_run_time=now(), misfire_grace_time=None, **trigger
    )
    ran(replica)
    for count in range(1, 4):
        set_now(replica)
        refused(replica, count)
    assert [level for level, _ in told()] == ["INFO", "WARNING"]
    message = told()[0][1]
    assert ", which ends at " in message
    assert "executor.run_now('job')" in message
    assert "the option retries" in message


def test_a_listener_that_retries_by_it_is_told(make_replica: MakeReplica, told: Told) -> None:
    replica = make_replica()
    at = timedelta(seconds=0.1)
    replica.scheduler.add_listener(
        lambda event: replica.scheduler.modify_job(event.job_id, next_run_time=now() + at),
        EVENT_JOB_ERROR,
    )
    replica.run_once(lambda: 1 / 0)
    refused(replica, 1)
    [(level, message)] = told()
    assert level == "INFO"
    assert "the option retries" in message


def test_why_tells_it_although_its_window_has_a_run(
    make_replica: MakeReplica, operator: TaskLocks, database_url: str, capsys: Any
) -> None:
    replica = make_replica(poll_interval=0.2, replica_id="web-1")
    replica.run_once(print)
    ran(replica)
    for count in (1, 2):
        set_now(replica)
        refused(replica, count)
        eventually(lambda so_far=count: told_misses(operator) == so_far)
    [miss] = misses(operator)  # one entry for one window
    assert (miss.cause, miss.replica) == ("refused", "web-1")
    story = operator.why("job")
    assert (story.verdict, story.miss) == (Verdict.MISSED, miss)
    assert story.before is not None
    assert story.before.outcome == "ok"
    command = Command(database_url, capsys)
    words = command("why", "job").out
    assert "its last run time until then was " in words
    assert ", which was refused" in words
    assert "modify_job or add_job has set it, and it falls into the window of the run time" in words
    assert "no replica ran" not in words
    # It is no run time that anybody has missed.
    assert operator.tasks("job")[0].missed_at is None


def misses(operator: TaskLocks) -> list[Any]:
    return list(operator.runs("job", outcome="missed"))


def told_misses(operator: TaskLocks) -> int:
    return sum(miss.run_times or 0 for miss in misses(operator))


def test_a_run_that_still_goes_on_in_its_window_is_told_of(
    make_replica: MakeReplica, told: Told, job: Any
) -> None:
    replica = make_replica(replica_id="web-1")
    replica.run_once(job.run, max_instances=2)
    eventually(job.begun.is_set)
    set_now(replica)
    eventually(lambda: EVENT_TASK_LOCK_REFUSED in replica.codes())
    job.go_on.set()
    [(_, message)] = told()
    assert "and the run on web-1 (token " in message
    assert "is not over" in message


# A job each second, whose first run takes the window of the next ten minutes.
EACH_SECOND: dict[str, Any] = {"trigger": "interval", "seconds": 1, "hours": 0}


@pytest.mark.parametrize("change", ["none", "resume", "reschedule", "trigger", "name"])
def test_a_run_time_that_the_trigger_gives_is_an_ordinary_refusal(
    make_replica: MakeReplica, told: Told, change: str
) -> None:
    replica = make_replica()
    options = {"task_lock": {"min_lock": 600}}
    # Its run times count on from this one, and not from the trigger's start.
    replica.run_once(work, kwargs=options, max_instances=9, **EACH_SECOND)
    refused(replica, 1)
    scheduler = replica.scheduler
    if change == "resume":
        scheduler.pause_job("job")
        scheduler.resume_job("job")
    elif change == "reschedule":
        scheduler.reschedule_job("job", trigger="interval", seconds=1)
    elif change == "trigger":  # which leaves the next run time of the interval
        scheduler.modify_job("job", trigger=CronTrigger(second="*"))
    elif change == "name":
        scheduler.modify_job("job", name="other")
    refused(replica, 3)
    assert told() == []


class TestRunAtStart:
    def start(self, make_replica: MakeReplica, **job: Any) -> Replica:
        replica = make_replica()
        replica.run_once(print, replace_existing=True, **job)
        return replica

    def test_on_three_replicas_nothing_is_told(self, make_replica: MakeReplica, told: Told) -> None:
        replicas = [make_replica() for _ in range(3)]
        for replica in replicas:
            replica.run_once(print, replace_existing=True)
        codes = (EVENT_TASK_LOCK_REFUSED, EVENT_JOB_EXECUTED)
        for replica in replicas:
            eventually(lambda each=replica: set(each.codes()) & set(codes))
            replica.idle()
        assert told() == []

    def test_jobs_that_all_replicas_add_again_later_are_not_told_either(
        self, make_replica: MakeReplica, told: Told, connection: Any
    ) -> None:
        replicas = [make_replica() for _ in range(2)]
        for count in (1, 2):
            for replica in replicas:
                replica.run_once(print, replace_existing=True)
            for replica in replicas:
                eventually(lambda it=replica, so_far=count: self.ended(it) == so_far)
            connection.execute(
                "UPDATE task_lock SET window_start = window_start - interval '2 hours',"
                " window_until = window_until - interval '2 hours', locked_until = now()"
            )
        assert told() == []

    def ended(self, replica: Replica) -> int:
        codes = replica.codes()
        return sum(
            codes.count(code) for code in (EVENT_TASK_LOCK_REFUSED, EVENT_TASK_LOCK_RELEASED)
        )

    def test_a_later_start_within_the_window_is_told(
        self, make_replica: MakeReplica, told: Told, connection: Any
    ) -> None:
        ran(self.start(make_replica))
        connection.execute(
            "UPDATE task_lock SET window_start = window_start - interval '2 minutes'"
        )
        late = self.start(make_replica)
        refused(late, 1)
        assert [level for level, _ in told()] == ["INFO"]

    def test_a_job_that_is_added_again_on_the_replica_that_ran_it_is_told(
        self, make_replica: MakeReplica, told: Told
    ) -> None:
        replica = self.start(make_replica)
        ran(replica)
        replica.run_once(print, replace_existing=True)
        refused(replica, 1)
        assert [level for level, _ in told()] == ["INFO"]


def work(**_task_lock: Any) -> None: ...
