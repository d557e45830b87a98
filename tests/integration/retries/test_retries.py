"""Retries: a job that raises an exception is run again, on any replica, for a while."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.triggers.cron import CronTrigger

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    HeldLock,
    TaskLockGiveUp,
    TaskLockOptionError,
    TaskLockRetry,
    TaskLocks,
    TaskLockStateError,
    TaskState,
    current_lock,
    task_lock,
)
from apscheduler_tasklock._lock.client import LockClient
from tests.support.claims import die, ended_runs, row
from tests.support.internals import deferred_run_times
from tests.support.outages import count_looks, until_looked
from tests.support.polling import eventually
from tests.support.schedulers import Replica
from tests.support.waist import retry_of

MakeReplica = Callable[..., Replica]
Connection = psycopg.Connection[Any]

AT_ONCE: dict[str, Any] = {"retry_delay": 0, "poll_interval": 0.2}


def now() -> datetime:
    return datetime.now(timezone.utc)


class Flaky:
    """A job that fails a few times, and then succeeds.

    :param failures: how many times it fails
    :param error: what it raises
    :ivar attempts: the attempts that it was run as, in order
    """

    def __init__(self, failures: int, error: Callable[[], BaseException] = ValueError) -> None:
        self.failures = failures
        self.error = error
        self.attempts: list[int] = []

    def __call__(self) -> str:
        lock = current_lock()
        assert lock is not None
        self.attempts.append(lock.attempt)
        if len(self.attempts) <= self.failures:
            raise self.error()
        return "done"


def add_hourly(replica: Replica, job: Callable[..., Any], run_time: datetime | None = None) -> None:
    """Add a job as a user does, due now."""
    run_time = run_time or now().replace(microsecond=0)  # so that all replicas have it
    replica.scheduler.add_job(
        job,
        "interval",
        hours=1,
        start_date=run_time,
        next_run_time=run_time,
        id="job",
        misfire_grace_time=600,
    )


def finished(connection: Connection, attempt: int) -> bool:
    found = connection.execute("SELECT attempt, finished_at FROM task_lock").fetchone()
    return found is not None and found[0] == attempt and found[1] is not None


def test_a_job_that_fails_twice_runs_three_times_and_its_failure_is_forgotten(
    make_replica: MakeReplica, connection: Connection, database_url: str
) -> None:
    replica, job = make_replica(retries=3, **AT_ONCE), Flaky(2)
    add_hourly(replica, job)

    replica.one(EVENT_JOB_EXECUTED)
    eventually(lambda: finished(connection, 3))

    assert job.attempts == [1, 2, 3]
    with TaskLocks(database_url) as locks:
        runs = ended_runs(locks)
        assert [(run.outcome, run.kind, run.attempt) for run in runs] == [
            ("ok", "retry", 3),
            ("error", "retry", 2),
            ("error", "schedule", 1),
        ]
        assert len({run.scheduled_at for run in runs}) == 1
        assert [run.retry_at is not None for run in runs] == [False, True, True]
        [task] = locks.tasks()
    assert (task.state, task.failures, task.attempt, task.retry_at) == (TaskState.OK, 0, 3, None)


def test_the_events_and_the_log_tell_of_each_attempt(
    make_replica: MakeReplica, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "apscheduler_tasklock")
    replica = make_replica(retries=1, **AT_ONCE)
    add_hourly(replica, Flaky(1))

    eventually(lambda: replica.codes()[-1:] == [EVENT_TASK_LOCK_RELEASED] and len(replica.of()) > 4)

    once = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_ERROR, EVENT_TASK_LOCK_RELEASED]
    again = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]
    assert replica.codes() == once + again
    granted, _, failed, retried, _, released = replica.of()
    assert (granted.attempt, granted.reason) == (1, None)
    assert (failed.attempt, failed.retry_at is not None) == (1, True)
    assert (retried.attempt, retried.reason) == (2, "retry")
    assert (released.attempt, released.retry_at) == (2, None)
    assert retried.scheduled_run_time == granted.scheduled_run_time
    told = [record.getMessage() for record in caplog.records if "attempt" in record.getMessage()]
    assert "attempt 1 at the run time" in told[0]
    assert "has failed (ValueError); it is run again at" in told[0]
    assert "again (attempt 2" in told[1]


def test_without_retries_a_job_fails_once(
    make_replica: MakeReplica, connection: Connection
) -> None:
    replica, job = make_replica(**AT_ONCE), Flaky(9)
    add_hourly(replica, job)

    released = replica.one(EVENT_TASK_LOCK_RELEASED)

    assert released.retry_at is None
    assert row(connection)["retry_of"] is None


def test_after_its_last_attempt_the_job_has_failed_once(
    make_replica: MakeReplica, connection: Connection, database_url: str
) -> None:
    replica, job = make_replica(retries=2, **AT_ONCE), Flaky(9)
    add_hourly(replica, job)

    eventually(lambda: finished(connection, 3))

    with TaskLocks(database_url) as locks:
        [task] = locks.tasks()
    assert (task.state, task.failures) == (TaskState.FAILING, 1)
    assert job.attempts == [1, 2, 3]


def test_while_a_retry_is_to_come_the_task_does_not_count_as_failing(
    make_replica: MakeReplica, connection: Connection, database_url: str
) -> None:
    add_hourly(make_replica(retries=1, retry_delay=600), Flaky(9))

    eventually(lambda: finished(connection, 1))

    with TaskLocks(database_url) as locks:
        [task] = locks.tasks()
        assert (task.state, task.failures) == (TaskState.RETRYING, 0)
        assert task.retry_at is not None
        assert task.finished_at is not None
        pause = (task.retry_at - task.finished_at).total_seconds()
        assert 599 < pause < 661  # up to a tenth is added
        connection.execute("UPDATE task_lock SET retry_at = now() - interval '1 hour'")
        [task] = locks.tasks()  # long after the task's grace time, so nobody retries it
    assert (task.state, task.failures) == (TaskState.FAILING, 1)


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (TaskLockGiveUp, [1]),
        (SystemExit, [1]),
        (KeyError, [1, 2, 3]),
        (lambda: TaskLockRetry("not yet", after=0), [1, 2, 3]),
    ],
    ids=["give up", "exit", "error", "retry"],
)
def test_what_the_job_raises_decides_whether_it_is_retried(
    error: Callable[[], BaseException],
    attempts: list[int],
    make_replica: MakeReplica,
    connection: Connection,
) -> None:
    is_own_delay = error not in (TaskLockGiveUp, SystemExit, KeyError)
    delay = 3000 if is_own_delay else 0
    replica, job = make_replica(retries=2, retry_delay=delay, poll_interval=0.2), Flaky(9, error)
    add_hourly(replica, job)

    eventually(lambda: finished(connection, len(attempts)))

    assert job.attempts == attempts
    assert row(connection)["retry_of"] != row(connection)["claim_id"]


class TooManyRequests(TaskLockRetry):
    """An application's own exception, which does not call the base class's ``__init__``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit


class TryAgainAtOnce(TaskLockRetry):
    after = timedelta(0)


class TryAgainSoon(TaskLockRetry):
    after = float("nan")


@pytest.mark.parametrize(
    ("error", "is_soon"),
    [(lambda: TooManyRequests(3), False), (TryAgainAtOnce, True), (TryAgainSoon, False)],
    ids=["no init", "of the class", "impossible"],
)
def test_an_applications_own_exception_asks_for_a_retry(
    error: Callable[[], BaseException],
    is_soon: bool,
    make_replica: MakeReplica,
    connection: Connection,
) -> None:
    """An impossible delay must not keep the row locked; that of the options stands."""
    replica = make_replica(retries=1, retry_delay=600)
    add_hourly(replica, Flaky(9, error))

    released = replica.one(EVENT_TASK_LOCK_RELEASED)

    assert released.retry_at is not None
    assert (released.retry_at < now() + timedelta(seconds=300)) is is_soon


def test_retries_of_a_one_off_job_without_an_id_are_an_error(
    make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    def run(**_: Any) -> None: ...

    replica, options = make_replica(), {"task_lock": {"retries": 1}}
    replica.scheduler.add_job(run, "date", run_date=now(), kwargs=options)

    eventually(lambda: "will not run" in caplog.text)
    assert "its retries need a lock, and it has none" in caplog.text


def test_a_one_off_job_without_an_id_runs_although_its_function_has_retries(
    make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    """The function's other jobs have ids, so that the retries are no mistake."""
    ran = threading.Event()

    @task_lock(retries=1)
    def run() -> None:
        ran.set()

    make_replica().scheduler.add_job(run, "date", run_date=now(), misfire_grace_time=None)

    assert ran.wait(60)
    assert "its lock options (retries) have no effect" in caplog.text


def test_a_retry_that_would_come_after_the_next_run_time_does_not_come(
    make_replica: MakeReplica, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    replica, job = make_replica(retries=3, retry_delay="7200"), Flaky(9)
    add_hourly(replica, job)

    released = replica.one(EVENT_TASK_LOCK_RELEASED)

    assert released.retry_at is None
    told = "its retry_delay of 7200 s is not below its period of 3600 s, so that its runs are not"
    assert told in caplog.text


def test_the_next_run_time_voids_the_retry(
    make_replica: MakeReplica, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim of the next run time has another id, so nothing has to be written for it."""
    replica, job = make_replica(retries=1, retry_delay=1500, poll_interval=0.2), Flaky(1)
    add_hourly(replica, job)
    eventually(lambda: finished(connection, 1))
    replica.idle()  # else the next run time is one instance too many
    connection.execute("UPDATE task_lock SET window_until = window_start")

    replica.scheduler.modify_job("job", next_run_time=now())
    replica.one(EVENT_JOB_EXECUTED)
    eventually(lambda: row(connection)["finished_at"] is not None)
    connection.execute("UPDATE task_lock SET retry_at = now()")
    until_looked(count_looks(replica, monkeypatch))

    assert job.attempts == [1, 1]


def test_a_retry_that_the_next_run_time_has_voided_in_a_pause_does_not_come_back(
    make_replica: MakeReplica,
    connection: Connection,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the pause a replica registers the run time after the one that fell into it."""
    replica, job = make_replica(retries=1, retry_delay=1500, poll_interval=0.2), Flaky(1)
    add_hourly(replica, job)
    eventually(lambda: finished(connection, 1))
    with TaskLocks(database_url) as locks:
        locks.pause("job", by="me")
        connection.execute(
            "UPDATE task_lock SET due_at = now(), overdue_at = now() + interval '1 min',"
            " retry_at = now() - interval '1 min', paused_at = now() - interval '1 min'"
        )
        locks.resume("job", by="me")
    eventually(lambda: row(connection)["due_at"] > now() + timedelta(minutes=30))
    until_looked(count_looks(replica, monkeypatch))

    assert job.attempts == [1]


def test_three_replicas_begin_each_attempt_once(
    make_replica: MakeReplica, connection: Connection
) -> None:
    replicas = [make_replica(retries=4, **AT_ONCE) for _ in range(3)]
    job = Flaky(4)
    run_time = now().replace(microsecond=0) + timedelta(seconds=2)
    for replica in replicas:
        add_hourly(replica, job, run_time)

    eventually(lambda: finished(connection, 5))

    assert job.attempts == [1, 2, 3, 4, 5]
    # Of the run time itself; who loses the race for a retry tells nothing.
    assert sum(replica.codes().count(EVENT_TASK_LOCK_REFUSED) for replica in replicas) <= 2


def test_another_replica_retries_when_the_first_one_stops(
    make_replica: MakeReplica, connection: Connection
) -> None:
    first, job = make_replica(retries=1, retry_delay=600), Flaky(1)
    second = make_replica(retries=1, poll_interval=0.2)
    run_time = now()
    add_hourly(first, job, run_time)
    eventually(lambda: finished(connection, 1))
    first.shutdown()
    add_hourly(second, job, run_time + timedelta(hours=1))
    connection.execute("UPDATE task_lock SET retry_at = now()")

    second.one(EVENT_JOB_EXECUTED)

    assert job.attempts == [1, 2]


def test_a_replica_without_retries_leaves_them_to_the_others(
    make_replica: MakeReplica, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the deployment that gives the job retries: each replica goes by its own options."""
    run_time = now().replace(microsecond=0)
    first, job = make_replica(retries=2, retry_delay=600), Flaky(1)
    add_hourly(first, job, run_time)
    eventually(lambda: finished(connection, 1))
    first.shutdown()
    other = make_replica(poll_interval=0.2)
    add_hourly(other, job, run_time + timedelta(hours=1))
    connection.execute("UPDATE task_lock SET retry_at = now()")

    until_looked(count_looks(other, monkeypatch))
    assert job.attempts == [1]

    third = make_replica(retries=1, poll_interval=0.2)
    add_hourly(third, job, run_time + timedelta(hours=1))
    third.one(EVENT_JOB_EXECUTED)
    assert (job.attempts, other.of()) == ([1, 2], [])


def test_a_one_off_job_is_retried_although_its_scheduler_has_dropped_it(
    make_replica: MakeReplica, connection: Connection
) -> None:
    replica, job = make_replica(retries=2, **AT_ONCE), Flaky(2)
    replica.scheduler.add_job(job, "date", id="job", misfire_grace_time=None)

    replica.one(EVENT_JOB_EXECUTED)

    assert job.attempts == [1, 2, 3]
    assert replica.scheduler.get_job("job") is None


def test_a_one_off_job_is_retried_by_a_replica_whose_own_run_was_refused(
    make_replica: MakeReplica, connection: Connection
) -> None:
    options: dict[str, Any] = {"retries": 1, "retry_delay": 600, "poll_interval": 0.2}
    first, second, job = make_replica(**options), make_replica(**options), Flaky(1)
    run_date = now() + timedelta(seconds=0.5)
    for replica in (first, second):
        replica.scheduler.add_job(job, "date", run_date=run_date, id="job", misfire_grace_time=None)
    eventually(lambda: finished(connection, 1))
    holder = row(connection)["locked_by"]
    ran, other = (first, second) if first.executor.locks.replica_id == holder else (second, first)
    other.one(EVENT_TASK_LOCK_REFUSED)
    ran.shutdown()
    connection.execute("UPDATE task_lock SET retry_at = now()")

    other.one(EVENT_JOB_EXECUTED)

    assert job.attempts == [1, 2]


def test_each_attempt_of_a_job_with_jitter_has_the_same_run_time(
    make_replica: MakeReplica, connection: Connection
) -> None:
    replica, run_times = make_replica(retries=1, **AT_ONCE), []

    def fail_at_first() -> None:
        lock = current_lock()
        assert lock is not None
        run_times.append(lock.run_time)
        if len(run_times) == 1:
            raise ValueError

    # The run time of half a day ago, for which the replica has drawn half a day of jitter.
    nominal = now().replace(minute=0, second=0, microsecond=0) - timedelta(hours=12)
    trigger = CronTrigger(hour=nominal.hour, timezone=timezone.utc, jitter=86_000)
    given = {"next_run_time": now(), "misfire_grace_time": None}
    replica.scheduler.add_job(fail_at_first, trigger, id="job", **given)

    replica.one(EVENT_JOB_EXECUTED)

    assert run_times == [nominal, nominal]


def test_the_options_of_one_job(make_replica: MakeReplica, connection: Connection) -> None:
    replica, job = make_replica(poll_interval=0.2), Flaky(1)

    def run(**_: Any) -> None:
        job()

    replica.scheduler.add_job(
        run,
        "interval",
        hours=1,
        id="job",
        next_run_time=now(),
        misfire_grace_time=None,
        kwargs={"task_lock": {"retries": 1, "retry_delay": timedelta(0), "retry_backoff": 1}},
    )

    replica.one(EVENT_JOB_EXECUTED)

    assert job.attempts == [1, 2]


def test_a_pause_holds_the_retry_until_its_end(
    make_replica: MakeReplica,
    connection: Connection,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, job = make_replica(retries=1, retry_delay=600, poll_interval=0.2), Flaky(1)
    with TaskLocks(database_url) as locks:
        add_hourly(replica, job)
        eventually(lambda: finished(connection, 1))
        locks.pause("job", duration=300, by="me")
        connection.execute("UPDATE task_lock SET retry_at = now()")
        until_looked(count_looks(replica, monkeypatch))
        assert job.attempts == [1]
        locks.resume("job", by="me")

    replica.one(EVENT_JOB_EXECUTED)
    assert job.attempts == [1, 2]


@pytest.mark.nightly
def test_a_run_time_that_comes_during_a_retry_follows_it(
    make_replica: MakeReplica, connection: Connection
) -> None:
    """Else a retry that goes on at 11:00 costs the run of 11:00."""
    replica, began, is_kept = make_replica(retries=1, **AT_ONCE), [], threading.Event()

    def job() -> None:
        lock = current_lock()
        assert lock is not None
        began.append((lock.attempt, lock.run_time))
        if len(began) == 1:
            raise ValueError
        if len(began) == 2:
            assert is_kept.wait(60)

    first = now().replace(microsecond=0)  # so that all replicas have these run times
    replica.scheduler.add_job(
        job,
        "interval",
        seconds=6,
        start_date=first,
        next_run_time=first,
        id="job",
        max_instances=2,
        misfire_grace_time=None,
    )
    eventually(lambda: deferred_run_times(replica.executor))
    is_kept.set()
    eventually(lambda: len(began) > 2)

    assert [attempt for attempt, _ in began[:3]] == [1, 2, 1]
    assert began[1][1] == began[0][1]
    assert began[2][1] == began[0][1] + timedelta(seconds=6)


@pytest.mark.nightly
def test_jobs_that_fail_together_are_not_retried_together(
    make_replica: MakeReplica, connection: Connection
) -> None:
    replica, jobs = make_replica(retries=1, retry_delay=5, max_workers=20), 500
    due = now().replace(microsecond=0)
    failed = [Flaky(1) for _ in range(jobs)]
    for number, job in enumerate(failed):
        replica.scheduler.add_job(
            job,
            "interval",
            hours=1,
            start_date=due,
            next_run_time=due,
            id=f"job {number}",
            misfire_grace_time=600,
        )

    eventually(lambda: all(job.attempts == [1, 2] for job in failed), timeout=100)

    delays = "SELECT retry_at - ended_at FROM task_lock_run WHERE attempt = 1"
    found = [delay.total_seconds() for (delay,) in connection.execute(delays)]
    assert max(found) - min(found) > 0.3  # a tenth of the delay, at random


def test_after_an_operator_has_freed_the_task_there_is_no_retry(
    make_replica: MakeReplica, connection: Connection, database_url: str
) -> None:
    add_hourly(make_replica(retries=1, retry_delay=600), Flaky(9))
    eventually(lambda: finished(connection, 1))

    with TaskLocks(database_url) as locks:
        [task] = locks.tasks()
        locks.free("job", task.token, by="me")

        [task] = locks.tasks()
        assert (task.state, task.retry_at) == (TaskState.FAILING, None)
        assert [run.outcome for run in locks.runs("job")] == ["freed", "error"]
        with pytest.raises(TaskLockStateError, match="its run has ended"):
            locks.free("job", task.token, by="me")


@pytest.mark.nightly
def test_a_dead_holder_of_a_retry_is_followed_by_the_same_attempt(
    make_replica: MakeReplica, make_locks: Callable[..., LockClient], connection: Connection
) -> None:
    """The deaths of all attempts count together, so that a poisonous job kills only so many."""
    replica, job = make_replica(retries=1, retry_delay=600, failover=True), Flaky(1)
    add_hourly(replica, job)
    eventually(lambda: finished(connection, 1))
    dying = make_locks(replica_id="dead")
    request = retry_of("job", row(connection)["claim_id"], 300, lease=1, failover=True)
    connection.execute("UPDATE task_lock SET retry_at = now()")
    held = dying.claim(request)
    assert isinstance(held, HeldLock)
    die(dying, held)

    replica.one(EVENT_JOB_EXECUTED)

    assert job.attempts == [1, 2]
    assert row(connection)["kind"] == "takeover"


def test_bad_options_are_refused_early(make_replica: MakeReplica) -> None:
    for options, message in (
        ({"retries": 21}, "retries must be a whole number from 0 to 20, not 21"),
        ({"retries": -1}, "retries must be a whole number from 0 to 20, not -1"),
        ({"retries": True}, "retries must be a whole number"),
        ({"retry_delay": timedelta(days=2)}, "retry_delay must be .* from 0 to a day"),
        ({"retry_backoff": 0.5}, "retry_backoff must be a number from 1 to 100, not 0.5"),
    ):
        with pytest.raises(TaskLockOptionError, match=message):
            make_replica(start=False, **options)
    with pytest.raises(TaskLockOptionError, match="after must be seconds or a timedelta"):
        TaskLockRetry(after=-1)
