"""Runs that were asked for by hand, with real replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    HeldLock,
    TaskLocks,
    current_lock,
)
from apscheduler_tasklock._lock.client import LockClient
from tests.integration.conftest import Job
from tests.support import claims
from tests.support.claims import LaterThan, ended_runs, row
from tests.support.internals import wake_poll
from tests.support.polling import eventually
from tests.support.rows import add_task
from tests.support.schedulers import Replica
from tests.support.waist import manual_run_of

MakeReplica = Callable[..., Replica]
MakeLocks = Callable[..., LockClient]
Connection = psycopg.Connection[Any]

FAST: dict[str, Any] = {"poll_interval": 0.2}
NEVER_RAN = {
    **dict.fromkeys(
        ("started_at", "finished_at", "locked_until", "run_until", "window_start", "window_until"),
        "'epoch'",
    ),
    "token": "0",
    "kind": "NULL",
    "succeeded_at": "NULL",
}

locks_seen: list[HeldLock] = []


def fail() -> None:
    """Note the lock, and raise."""
    lock = current_lock()
    assert lock is not None
    locks_seen.append(lock)
    raise ValueError("no")


def name_of(function: Callable[[], None]) -> str:
    """Return what a job function is to a claim."""
    return f"{__name__}:{function.__name__}"


@pytest.fixture
def operator(make_task_locks: Callable[..., TaskLocks]) -> TaskLocks:
    return make_task_locks(replica_id="operator")


@pytest.fixture
def die_by_hand(connection: Connection, make_locks: MakeLocks) -> Callable[..., HeldLock]:
    """Let a replica called "dead" begin a run by hand of a task, and be heard of no more."""

    def die(function: Callable[[], None], max_lock: float = 18_000, **changes: str) -> HeldLock:
        dying = make_locks(replica_id="dead")
        columns = {**changes, "request_id": "gen_random_uuid()", "runs": f"'{name_of(function)}'"}
        add_task(connection, "job", request_until="now() + interval '1 hour'", **columns)
        request_id: UUID = row(connection)["request_id"]
        asked = {"lease": 600, "failover": True, "runs": name_of(function)}
        held = dying.claim(manual_run_of("job", request_id, max_lock, **asked))
        assert isinstance(held, HeldLock)
        claims.die(dying, held)
        claims.end_lease(connection)
        return held

    return die


def make_heir(make_replica: MakeReplica, **options: Any) -> Replica:
    """Make a replica with failover that believes the rows from the start."""
    replica = make_replica(start=False, **{"failover": True, "lease": 600, **FAST, **options})
    replica.executor.locks.outage.believe()
    return replica


def is_near(moment: datetime | None) -> bool:
    """Tell whether a moment was a short while ago."""
    assert moment is not None
    return abs(datetime.now(timezone.utc) - moment) < timedelta(minutes=1)


def soon() -> datetime:
    return datetime.now(timezone.utc) + timedelta(hours=1)


@pytest.mark.parametrize("how", ["by hand", "modified", "added"])
def test_a_run_right_before_a_run_time_has_the_maximum_lock_of_others(
    make_replica: MakeReplica, operator: TaskLocks, connection: Connection, how: str
) -> None:
    """Else a run by hand that takes some minutes could overlap with that of the schedule."""
    replica = make_replica(**FAST)
    at = datetime.now(timezone.utc) + timedelta(minutes=10)
    daily = {"hour": at.hour, "minute": at.minute, "timezone": "UTC", "misfire_grace_time": None}
    now = {"next_run_time": datetime.now(timezone.utc)}
    replica.scheduler.add_job(print, "cron", id="job", **daily, **(now if how == "added" else {}))
    if how == "by hand":
        eventually(lambda: operator.replicas() and operator.tasks("job"))
        operator.request_run("job")
    elif how == "modified":
        replica.scheduler.modify_job("job", **now)
    replica.one(EVENT_JOB_EXECUTED)
    found = connection.execute("SELECT run_until - started_at FROM task_lock").fetchone()
    assert found == (timedelta(days=5),)


def test_a_run_time_set_to_now_in_the_window_of_a_run_that_has_ended_is_refused(
    make_replica: MakeReplica,
) -> None:
    """By ``modify_job``. To run a job whatever its windows, there is a run by hand."""
    replica = make_replica()
    replica.run_once(print)
    eventually(lambda: replica.codes()[-2:] == [EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED])
    replica.scheduler.modify_job("job", next_run_time=datetime.now(timezone.utc))
    assert replica.one(EVENT_TASK_LOCK_REFUSED).reason == "window"


class TestOverADeadRun:
    @pytest.mark.parametrize("why", ["paused", "renamed"])
    def test_that_nobody_takes_over_it_is_begun(
        self,
        make_replica: MakeReplica,
        make_locks: MakeLocks,
        operator: TaskLocks,
        connection: Connection,
        why: str,
    ) -> None:
        dying = make_locks(replica_id="dead")
        what = name_of(fail) if why == "paused" else "jobs:as_it_was_called_before"
        hourly: dict[str, Any] = {"min_lock": 3240, "max_lock": 18_000}
        claims.die(dying, claims.held(dying, "job", lease=600, failover=True, runs=what, **hourly))
        claims.end_lease(connection)
        if why == "paused":
            operator.pause("job")
        replica = make_heir(make_replica)
        replica.scheduler.add_job(fail, "interval", days=1, id="job")
        replica.scheduler.start()
        eventually(lambda: [seen for seen in operator.replicas() if "job" in seen.tasks])
        operator.request_run("job")
        if why == "renamed":  # a while ago
            ago = "locked_until = now() - interval '60 s', requested_at = now() - interval '60 s'"
            connection.execute(f"UPDATE task_lock SET {ago}")
        eventually(lambda: [run.kind for run in ended_runs(operator)] == ["manual", "schedule"])


class TestRunTimesThatFollow:
    def test_begin_without_a_wait_on_the_same_replica(
        self, make_replica: MakeReplica, operator: TaskLocks, job: Job
    ) -> None:
        replica = make_replica(start=False, poll_interval=3600)
        replica.scheduler.add_job(job.run, "interval", days=1, id="job", misfire_grace_time=60)
        replica.scheduler.start()
        eventually(lambda: [seen for seen in operator.replicas() if "job" in seen.tasks])
        operator.request_run("job")
        wake_poll(replica.executor)
        eventually(job.begun.is_set)
        replica.scheduler.modify_job("job", next_run_time=datetime.now(timezone.utc))
        eventually(lambda: replica.scheduler.get_job("job").next_run_time > soon())
        job.go_on.set()
        eventually(lambda: [run.kind for run in ended_runs(operator)] == ["schedule", "manual"])


class TestFailover:
    @pytest.mark.parametrize("before", [{}, NEVER_RAN], ids=["ran before", "never ran"])
    def test_of_a_run_by_hand_leaves_the_window_of_the_schedule_alone(
        self,
        make_replica: MakeReplica,
        die_by_hand: Callable[..., HeldLock],
        operator: TaskLocks,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
        before: dict[str, str],
    ) -> None:
        caplog.set_level(logging.INFO)
        locks_seen.clear()
        died = die_by_hand(fail, **{"window_until": "now() - interval '60 s'", **before})
        window = (row(connection)["window_start"], row(connection)["window_until"])
        replica = make_heir(make_replica, jobs={"job": {"on_failure": "release"}})
        replica.scheduler.add_job(fail, "interval", days=1, id="job")
        replica.scheduler.start()
        granted = replica.one(EVENT_TASK_LOCK_GRANTED)
        replica.one(EVENT_JOB_ERROR)
        replica.idle()
        [lock] = locks_seen
        assert (granted.reason, granted.token) == ("takeover", LaterThan(died.token))
        assert lock.is_takeover
        assert is_near(lock.run_time)
        assert is_near(granted.scheduled_run_time)
        assert "runs the manual run again" in caplog.text
        assert (row(connection)["window_start"], row(connection)["window_until"]) == window
        told = [(run.kind, run.scheduled_at, run.outcome) for run in ended_runs(operator)]
        assert told == [("manual", None, "error"), ("manual", None, "died")]

    def test_that_is_given_up_names_no_window(
        self,
        make_replica: MakeReplica,
        die_by_hand: Callable[..., HeldLock],
        connection: Connection,
    ) -> None:
        die_by_hand(fail, **NEVER_RAN)
        connection.execute("UPDATE task_lock SET run_until = now()")
        replica = make_heir(make_replica)
        replica.scheduler.add_job(fail, "interval", days=1, id="job")
        replica.scheduler.start()
        given_up = replica.one(EVENT_TASK_LOCK_ERROR)
        assert "the manual run is given up" in str(given_up.exception)
        assert is_near(given_up.scheduled_run_time)
