"""Rows that somebody else has written, whose triggers are made to hold replicas up; broken stores.

Each replica goes on with everything else: the jobs that are due, users' calls, dead holders.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.jobstores.base import JobLookupError
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger

from apscheduler_tasklock import TaskLockOptionError
from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock.jobstore.stored_triggers import encode_trigger
from tests.support import claims
from tests.support.hostile_json import hostile_trigger, hostile_value
from tests.support.polling import eventually
from tests.support.stored_jobs import StoreReplica, note, ran, store_replicas
from tests.support.waist import LockClient, printable

Connection = psycopg.Connection[Any]
Make = Callable[..., StoreReplica]

# A freeze ends such a test.
pytestmark = pytest.mark.timeout(300)


def cron(**fields: Any) -> CronTrigger:
    return CronTrigger(timezone="UTC", **fields)


def never() -> Any:
    """Return a trigger whose parts do not agree until the year 9999."""
    return AndTrigger([cron(hour=hour) for hour in (3, 4)])


def many_parts() -> Any:
    """Return a trigger of 100 KB of parts that do not agree."""
    return AndTrigger([cron(hour=number % 24, minute=number % 60) for number in range(900)])


@pytest.fixture
def key() -> str:
    return f"job-{uuid4().hex[:8]}"


@pytest.fixture
def make(database_url: str) -> Iterator[Make]:
    """Make a replica with the job store; it is shut down after the test."""
    with store_replicas(database_url) as make:
        yield make


def write_trigger(connection: Connection, job_id: str, trigger: Any) -> None:
    connection.execute(
        "UPDATE task_lock_job SET trigger = %s::jsonb WHERE id = %s",
        [json.dumps(encode_trigger(trigger)), job_id],
    )


# That many parts share one budget of steps is tested in tests/unit/test_jobstore_limits.py, by
# counting the steps. Here each call takes all of them.
@pytest.mark.parametrize("hostile", [never, pytest.param(many_parts, marks=pytest.mark.nightly)])
def test_a_job_whose_trigger_is_asked_for_ever_is_not_resumed_and_stays(
    make: Make, key: str, connection: Connection, hostile: Callable[[], Any]
) -> None:
    replica = make()
    replica.scheduler.add_job(note, "interval", hours=1, args=[key], id=key)
    write_trigger(connection, key, hostile())
    assert replica.scheduler.pause_job(key).next_run_time is None
    with pytest.raises(TaskLockOptionError, match=f"job '{key}' has no next run time"):
        replica.scheduler.resume_job(key)
    with pytest.raises(TaskLockOptionError, match="has no next run time"):
        replica.scheduler.get_job(key).resume()
    assert replica.scheduler.get_job(key).next_run_time is None
    # Its owner mends it.
    declare = {"args": [key], "id": key, "replace_existing": True}
    replica.scheduler.add_job(note, "cron", hour=3, **declare)
    assert replica.scheduler.resume_job(key).next_run_time > datetime.now(timezone.utc)
    assert replica.scheduler.get_job(key) is not None


def test_a_paused_job_whose_schedule_is_over_is_removed_when_it_is_resumed(
    make: Make, key: str
) -> None:
    """As APScheduler has it, also where a scheduler has other stores."""
    replica = make()
    replica.scheduler.add_jobstore(MemoryJobStore(), "memory")
    past = cron(year=2020)
    for store in ("default", "memory"):
        options = {"id": key, "args": [key], "next_run_time": None, "jobstore": store}
        replica.scheduler.add_job(note, past, **options)
        assert replica.scheduler.resume_job(key, store) is None
        assert replica.scheduler.get_job(key, store) is None
        replica.scheduler.add_job(note, "cron", hour=3, **options)
        assert replica.scheduler.resume_job(key, store).next_run_time is not None
        replica.scheduler.remove_job(key, store)


def test_names_of_rows_forge_no_lines_of_apschedulers_log(
    make: Make, key: str, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="apscheduler")
    forged = f"\x1b[2J{key}\r\nINFO:apscheduler.scheduler:Removed job backup\u2028"
    replica = make(paused=True)
    now = datetime.now(timezone.utc)
    replica.scheduler.add_job(note, "interval", hours=1, args=[key], id=key, next_run_time=now)
    connection.execute("UPDATE task_lock_job SET id = %s", [forged])
    connection.execute(
        "UPDATE task_lock_job SET options = jsonb_set(options, '{name}', to_jsonb(id))"
    )
    replica.scheduler.resume()
    replica.runs(key)
    replica.idle()
    assert replica.scheduler.get_job(forged).name == printable(forged)
    said = [r.getMessage() for r in caplog.records if r.name.startswith("apscheduler.")]
    assert any(key in line for line in said)
    assert [line for line in said if not line.isprintable()] == []


def test_a_job_whose_version_is_at_its_maximum_can_be_changed(
    make: Make, key: str, connection: Connection
) -> None:
    replica = make()
    replica.scheduler.add_job(note, "cron", hour=3, args=[key], id=key)
    connection.execute("UPDATE task_lock_job SET version = 9223372036854775807")
    assert replica.scheduler.pause_job(key).next_run_time is None
    connection.execute("UPDATE task_lock_job SET version = 9223372036854775807, ended = true")
    replica.scheduler.add_job(note, "cron", hour=4, args=[key], id=key)
    replica.scheduler.remove_job(key)


@pytest.mark.nightly
def test_a_due_job_of_very_many_parts_holds_nobody_up(
    make: Make, key: str, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make(paused=True)
    now = datetime.now(timezone.utc)
    replica.scheduler.add_job(note, "interval", hours=1, args=[key], id=key, next_run_time=now)
    write_trigger(connection, key, many_parts())
    replica.run_at(note, f"{key}-good")
    replica.scheduler.resume()
    replica.runs(f"{key}-good")
    eventually(lambda: f"Job '{key}' is not run on this replica" in caplog.text)
    assert "takes more than 20000 steps" in caplog.text
    replica.run_at(note, f"{key}-next")
    replica.runs(f"{key}-next")
    assert ran[key] == []


def test_a_user_who_nests_a_trigger_too_deep_is_told(make: Make, key: str) -> None:
    replica = make()
    trigger: Any = cron(hour=3)
    for _ in range(25):
        trigger = OrTrigger([trigger])
    with pytest.raises(TaskLockOptionError, match="nested more than 10 deep"):
        replica.scheduler.add_job(note, trigger, args=[key], id=key)
    options = {"args": [key], "id": key, "next_run_time": None}
    with pytest.raises(TaskLockOptionError, match="jitter is neither None nor a number"):
        replica.scheduler.add_job(note, "cron", hour=3, jitter="x", **options)
    assert replica.scheduler.get_jobs() == []


class BrokenStore(MemoryJobStore):  # type: ignore[misc]  # APScheduler has no types
    """A job store that cannot be read until it is mended."""

    is_broken = True

    def get_all_jobs(self) -> Any:
        if self.is_broken:
            raise OSError("the job store is unavailable")
        return super().get_all_jobs()


def dead_holder(
    dying: LockClient,
    connection: Connection,
    task: str,
    function: str = "tests.support.stored_jobs:note",
) -> None:
    """Leave behind what a killed replica does."""
    held = claims.held(
        dying, task, min_lock=3240, max_lock=18000, lease=600, failover=True, runs=function
    )
    claims.die(dying, held)
    claims.end_lease(connection, task)


@pytest.fixture
def dying(database_url: str) -> Iterator[LockClient]:
    locks = LockClient(LockSettings(database_url, "dead"))
    yield locks
    locks.close()


def test_a_store_that_cannot_be_listed_keeps_no_other_jobs_from_being_taken_over(
    make: Make, key: str, dying: LockClient, connection: Connection
) -> None:
    replica = make(paused=True, failover=True, lease=600, poll_interval=0.3)
    replica.executor.user.outage.believe()
    store = BrokenStore()
    replica.scheduler.add_jobstore(store, "broken")
    replica.scheduler.add_jobstore(MemoryJobStore(), "memory")
    for alias in ("broken", "memory"):
        task = {"task_lock": {"name": f"{key}-{alias}"}}
        options = {"id": f"{key}-{alias}", "args": [f"{key}-{alias}"], "jobstore": alias}
        replica.scheduler.add_job(note, "interval", hours=1, kwargs=task, **options)
    dead_holder(dying, connection, f"{key}-memory")
    replica.scheduler.resume()
    replica.runs(f"{key}-memory")
    replica.one(EVENT_JOB_EXECUTED, f"{key}-memory")
    store.is_broken = False
    registered = "SELECT FROM task_lock WHERE task_name = %s AND due_at IS NOT NULL"
    eventually(lambda: connection.execute(registered, [f"{key}-broken"]).rowcount == 1)


def test_random_rows_are_jobs_or_unreadable_and_others_run(
    make: Make,
    key: str,
    connection: Connection,
    rng: random.Random,
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = make(paused=True)
    ids = [f"{key}-{number}" for number in range(40)]
    for job_id in ids:
        due = datetime.now(timezone.utc)
        options = {"args": [key], "next_run_time": due, "misfire_grace_time": 60}
        replica.scheduler.add_job(note, "interval", hours=1, id=job_id, **options)
        columns = {"trigger": hostile_trigger(rng), "arguments": {"args": [], "kwargs": {}}}
        columns["arguments"]["kwargs"] = {rng.choice(["x", "task_lock"]): hostile_value(rng)}
        change = "UPDATE task_lock_job SET trigger = %s::jsonb, arguments = %s::jsonb WHERE id = %s"
        texts = [
            re.sub(r"\b(NaN|-?Infinity)", "null", json.dumps(columns[name]))
            for name in ("trigger", "arguments")
        ]
        connection.execute(change, [*texts, job_id])
    assert sorted(job.id for job in replica.scheduler.get_jobs()) == sorted(ids)
    replica.scheduler.resume()
    replica.run_at(note, f"{key}-good")
    replica.runs(f"{key}-good")
    for job in replica.scheduler.get_jobs():
        if job.id in ids:
            # It has ended meanwhile, or its lock's options make no sense.
            with suppress(JobLookupError, TaskLockOptionError):
                assert replica.scheduler.pause_job(job.id).next_run_time is None
            with suppress(JobLookupError):
                replica.scheduler.remove_job(job.id)
    replica.run_at(note, f"{key}-next")
    replica.runs(f"{key}-next")
    for said in ("could not be looked at", "could not be registered", "could not check"):
        assert said not in caplog.text
