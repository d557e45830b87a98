"""What operators and monitoring services see of retries."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta, timezone
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.triggers.cron import CronTrigger

from apscheduler_tasklock import TaskLocks, TaskState
from apscheduler_tasklock.checkins import CheckIns
from tests.integration.operators.test_checkins import Collected, Service, sentry, service
from tests.integration.retries.test_retries import AT_ONCE, Flaky, add_hourly, finished, now
from tests.support.commands import Command
from tests.support.polling import eventually
from tests.support.schedulers import Replica
from tests.support.telemetry import Telemetry, telemetry

MakeReplica = Callable[..., Replica]
Connection = psycopg.Connection[Any]

__all__ = ["sentry", "service"]  # fixtures


@pytest.fixture
def sdk() -> Telemetry:
    sdk = telemetry()
    sdk.forget()
    return sdk


@pytest.mark.parametrize(
    ("failures", "paths"),
    [(1, ["start", "start", ""]), (9, ["start", "start", "fail"])],
    ids=["succeeds at last", "fails for good"],
)
def test_check_ins_tell_a_failure_at_the_last_attempt_only(
    failures: int,
    paths: list[str],
    make_replica_in_memory: MakeReplica,
    service: Service,
) -> None:
    replica = make_replica_in_memory(retries=1, **AT_ONCE)
    CheckIns(ping=f"{service.url}/{{task}}").attach(replica.scheduler)
    add_hourly(replica, Flaky(failures))
    eventually(lambda: len(service.paths) >= len(paths))
    replica.shutdown()  # which sends what waits

    assert service.paths == [f"/job/{path}".rstrip("/") for path in paths]


def test_the_check_ins_of_all_attempts_of_a_job_with_jitter_have_one_id(
    make_replica_in_memory: MakeReplica, sentry: Collected
) -> None:
    replica = make_replica_in_memory(retries=1, **AT_ONCE)
    check_ins = CheckIns(sentry=["job"]).attach(replica.scheduler)
    # Due half a day ago, with half a day of jitter.
    hour = (now() - timedelta(hours=12)).hour
    trigger = CronTrigger(hour=hour, timezone=timezone.utc, jitter=86_000)
    given = {"next_run_time": now(), "misfire_grace_time": None}
    replica.scheduler.add_job(Flaky(1), trigger, id="job", **given)
    replica.one(EVENT_JOB_EXECUTED)
    eventually(lambda: len(sentry.check_ins) >= 3)
    check_ins.close()

    assert [check_in["status"] for check_in in sentry.check_ins] == ["in_progress"] * 2 + ["ok"]
    assert len({check_in["check_in_id"] for check_in in sentry.check_ins}) == 1


def test_the_command_line_shows_the_attempts(
    make_replica: MakeReplica, connection: Connection, command: Command
) -> None:
    add_hourly(make_replica(retries=2, retry_delay=600), Flaky(9))
    eventually(lambda: finished(connection, 1))

    shown = command("show", "job").out
    assert "retrying: attempt 1 failed (ValueError); its retry is due at 20" in shown
    eventually(lambda: "retries 2 (in the executor)" in command("show", "job").out)
    assert command("check").status == 0
    assert "to be retried at 20" in command("why", "job").out
    assert "to be retried at 20" in command("runs", "job").out


@pytest.mark.parametrize("of_all", [False, True], ids=["of the task", "of all tasks"])
def test_a_retry_that_waits_for_the_end_of_a_pause_raises_no_alarm(
    of_all: bool,
    make_replica: MakeReplica,
    connection: Connection,
    command: Command,
    database_url: str,
) -> None:
    replica = make_replica(retries=1, retry_delay=600)
    add_hourly(replica, Flaky(9))
    eventually(lambda: finished(connection, 1))
    replica.shutdown()
    connection.execute("UPDATE task_lock SET retry_at = now() - interval '30 minutes'")

    with TaskLocks(database_url) as locks:
        assert [task.state for task in locks.tasks()] == [TaskState.FAILING]
        if of_all:
            locks.pause_all(duration=None, by="me")
        else:
            locks.pause("job", by="me")
        assert [task.failures for task in locks.tasks()] == [0]
        if of_all:
            locks.resume_all(by="me")
        else:
            locks.resume("job", by="me")
        assert [(task.state, task.failures) for task in locks.tasks()] == [(TaskState.RETRYING, 0)]
    assert command("check").status == 0


def test_a_retry_that_has_died_without_failover_is_a_failure(
    make_replica: MakeReplica, connection: Connection, database_url: str
) -> None:
    replica = make_replica(retries=1, retry_delay=600)
    add_hourly(replica, Flaky(9))
    eventually(lambda: finished(connection, 1))
    replica.shutdown()
    connection.execute("UPDATE task_lock SET attempt = 2, finished_at = NULL, locked_until = now()")

    with TaskLocks(database_url) as locks:
        [task] = locks.tasks()
        assert (task.state, task.failures) == (TaskState.DEAD, 1)
        connection.execute("UPDATE task_lock SET failover = true")
        assert [task.failures for task in locks.tasks()] == [0]  # until it is taken over


def test_what_is_measured_of_a_retry(make_replica_in_memory: MakeReplica, sdk: Telemetry) -> None:
    replica = make_replica_in_memory(retries=1, **AT_ONCE)
    add_hourly(replica, Flaky(1))
    replica.one(EVENT_JOB_EXECUTED)
    replica.idle()

    kinds = [each["tasklock.run.kind"] for each in sdk.attributes("tasklock.run.duration", "job")]
    assert sorted(kinds) == ["retry", "schedule"]
