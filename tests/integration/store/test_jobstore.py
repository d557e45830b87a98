"""The job store that all replicas share, with several schedulers in this process.

What is promised, row by row. Real processes that are killed are in the acceptance tests.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_JOB_MISSED, EVENT_JOB_SUBMITTED
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.base import ConflictingIdError, JobLookupError
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.combining import AndTrigger
from apscheduler.triggers.cron import CronTrigger
from psycopg import sql

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockExecutor,
    TaskLockJobStore,
    TaskLockOptionError,
    TaskLocks,
    TaskLockSchemaError,
    upgrade,
)
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.job_rows import DueRows, JobRows
from apscheduler_tasklock.jobstore.due import MOST_READ
from apscheduler_tasklock.jobstore.stored_triggers import encode_trigger
from tests.support.claims import LaterThan, ended_runs
from tests.support.event_loops import abandoned_loop
from tests.support.internals import (
    abandon,
    executors_of,
    instances,
    jobs_lock,
    pool_of,
)
from tests.support.polling import eventually
from tests.support.proxy import Proxy, pass_on
from tests.support.roles import role
from tests.support.stored_jobs import (
    PATIENT,
    Gate,
    OwnTrigger,
    StoreReplica,
    note,
    note_and_fail,
    note_and_wait,
    note_on_the_loop,
    ran,
    store_class,
)
from tests.support.waist import intercept_claims, let_hang

# What the statement has by which a run time without a lock is moved on.
MOVED_WITHOUT_A_CLAIM = b"last_run_time = CASE WHEN"

Make = Callable[..., StoreReplica]
Connection = psycopg.Connection[Any]

SOON = timedelta(seconds=0.3)


def now() -> datetime:
    return datetime.now(timezone.utc)


def job_row(connection: Connection, job_id: str) -> dict[str, Any] | None:
    cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
    return cursor.execute("SELECT * FROM task_lock_job WHERE id = %s", [job_id]).fetchone()


def set_clock(connection: Connection, offset: str) -> int:
    """Set the database's clock for new connections; return the hours of the offset."""
    connection.execute(
        f"CREATE SCHEMA travel; CREATE FUNCTION travel.now() RETURNS timestamptz STABLE"
        f" LANGUAGE sql AS $$SELECT pg_catalog.now() + interval '{offset}'$$"
    )
    path = "ALTER DATABASE {} SET search_path = travel, pg_catalog, public"
    connection.execute(sql.SQL(path).format(sql.Identifier(connection.info.dbname)))
    return int(offset.split(maxsplit=1)[0])


def nested_trigger(depth: int) -> Any:
    """Return a trigger within so many combinations, as JSON."""
    data: Any = encode_trigger(CronTrigger(hour=3, timezone="UTC"))
    for _ in range(depth):
        data = {"type": "or", "triggers": [data], "jitter": None}
    return data


# What somebody may have made of a job's row: a column, and what is merged into it.
BROKEN = [
    ("trigger", '{"type": "moon"}'),
    ("trigger", '{"length": [1e15, 0, 0]}'),
    ("trigger", '{"start_date": "yesterday"}'),
    ("trigger", '{"timezone": 3}'),
    ("trigger", '{"timezone": "Europe"}'),
    ("trigger", f'{{"timezone": "{"x" * 300}"}}'),
    ("trigger", '{"jitter": "x"}'),
    ("trigger", json.dumps(nested_trigger(30))),
    ("trigger", "[]"),
    ("arguments", '{"args": 3}'),
    ("arguments", '{"kwargs": []}'),
    ("arguments", f'{{"args": [{"9" * 5000}]}}'),
    ("arguments", f'{{"args": {"[" * 700}{"]" * 700}}}'),
    ("options", '{"max_instances": "many"}'),
    ("arguments", f'{{"args": {"[" * 70}{"]" * 70}}}'),
    ("arguments", '{"kwargs": {"at": {"$": "time", "value": "03:00", "zone": "Europe"}}}'),
    ("options", '{"misfire_grace_time": -1e100}'),
    ("options", "[]"),
]


def break_row(connection: Connection, job_id: str, column: str, value: str) -> None:
    """Merge something into a JSON column of a job."""
    connection.execute(
        f"UPDATE task_lock_job SET {column} = CASE WHEN jsonb_typeof(%(value)s::jsonb) = 'object'"
        f" THEN {column} || %(value)s::jsonb ELSE %(value)s::jsonb END WHERE id = %(job_id)s",
        {"value": value, "job_id": job_id},
    )


class Malicious:
    """Writes something down when its pickle is read."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __reduce__(self) -> Any:
        return note, (self.key,)


def texts(connection: Connection, job_id: str) -> dict[str, str]:
    """Return the row of a job as PostgreSQL shows it, also where Python cannot read it."""
    read = "SELECT key, value::text FROM task_lock_job AS job, json_each_text(row_to_json(job))"
    return dict(connection.execute(f"{read} WHERE id = %s", [job_id]).fetchall())


def moment(connection: Connection, text: str) -> datetime:
    """Return a moment that PostgreSQL shows; Python 3.10 reads not all of its fractions."""
    [found] = connection.execute("SELECT %s::timestamptz", [text]).fetchone() or [None]
    assert isinstance(found, datetime)
    return found


@pytest.fixture
def key() -> str:
    """An id that no other test uses."""
    return f"job-{uuid4().hex[:8]}"


@pytest.fixture
def gate(key: str) -> Iterator[Gate]:
    """Lets ``note_and_wait`` of this key go on, after the test at the latest."""
    gate = Gate(key)
    yield gate
    gate.open()


@pytest.fixture
def make(database_url: str) -> Iterator[Make]:
    """Make and start a replica with the job store; it is shut down after the test.

    Jobs that have ended are not kept for long, so that tests see soon that they are deleted.
    """
    with ExitStack() as closing:

        def make(
            *,
            start: bool = True,
            database: str = database_url,
            timings: Timings | None = None,
            **options: Any,
        ) -> StoreReplica:
            # Through the proxy, calls may have to fail.
            usual = PATIENT if database == database_url else Timings()
            timings = replace(timings or usual, ended_kept=1.0)
            replica = StoreReplica(database, timings=timings, **options)
            if start:
                replica.start()
            closing.callback(replica.shutdown)
            return replica

        yield make


def wait_for_one_due_after(replica: StoreReplica, key: str, moment: datetime) -> None:
    """Wait until a job has run that came due after a moment.

    Whatever was due by then was looked for together with it, or before.
    """
    later = f"{key}-later"
    run_date = moment + timedelta(seconds=0.1)
    replica.scheduler.add_job(
        note, "date", run_date=run_date, args=[later], id=later, misfire_grace_time=None
    )
    replica.runs(later)


def after_each_read(replica: StoreReplica, call: Callable[[DueRows], object]) -> None:
    """Let this be called with what a replica has read of what is due, before it does more."""
    jobs = replica.store.user.database.jobs
    read_due = jobs.read_due

    def read_and_call(cursor: Any, *arguments: Any, **options: Any) -> DueRows:
        found = read_due(cursor, *arguments, **options)
        call(found)
        return found

    jobs.read_due = read_and_call  # type: ignore[method-assign]  # of this replica alone


def wait_for_a_worker(replica: StoreReplica, key: str, gate: Gate) -> None:
    """Let a job be read, and wait for one of two workers that seems to be free.

    Both are busy with the application's own work. Behind it another job waits in the pool, and
    until that has begun nothing more is claimed.
    """
    for _ in range(2):
        pool_of(replica.executor).submit(gate.event.wait, 60)
    replica.scheduler.add_jobstore("memory", "own")
    replica.scheduler.add_job(int, jobstore="own", id="given", misfire_grace_time=None)
    eventually(lambda: instances(replica.executor.inner).get("given"))
    read: list[str] = []
    after_each_read(replica, lambda found: read.extend(each.row.id for each in found.jobs))
    replica.run_at(note, key)
    eventually(lambda: key in read)


# What a user may do that makes a job due, by what is tested with it.
CHANGES: dict[str, Callable[[StoreReplica, str], Any]] = {
    "adds it": lambda replica, key: replica.run_at(note, key),
    "adds it for later": lambda replica, key: replica.run_at(note, key, after=0.5),
    "moves it": lambda replica, key: replica.scheduler.modify_job(key, next_run_time=now()),
    "gives it another schedule": lambda replica, key: replica.scheduler.reschedule_job(
        key, trigger="date", run_date=now()
    ),
}


def until_it_listens_and_has_looked(
    replica: StoreReplica, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Return what waits until a replica has looked for what it missed before it listened."""
    read_due = JobRows.read_due
    looked = threading.Event()

    def read(rows: JobRows, *arguments: Any, **named: Any) -> Any:
        user = replica.store.user
        listened = rows is user.database.jobs and user.thread.listens
        found = read_due(rows, *arguments, **named)
        if listened:
            looked.set()
        return found

    monkeypatch.setattr(JobRows, "read_due", read)
    return lambda: eventually(looked.is_set)


def quiet(proxy: Proxy) -> None:
    """Wait until nothing has been sent for a second."""
    sent = [time.monotonic()]

    def note_time(data: bytes) -> bytes:
        sent.append(time.monotonic())
        return data

    proxy.to_server = note_time
    eventually(lambda: time.monotonic() > sent[-1] + 1)
    proxy.to_server = pass_on


class PatientStore(TaskLockJobStore):
    """A job store whose calls have their time on a slow machine, too."""

    timings = PATIENT


class TestRuns:
    @pytest.mark.nightly
    def test_a_one_off_job_runs_once_and_is_gone_then(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replicas = [make(replica_id=f"replica {number}") for number in range(3)]
        replicas[0].run_at(note, key)
        replicas[0].runs(key)
        eventually(lambda: job_row(connection, key) is None)
        assert len(ran[key]) == 1
        assert all(replica.scheduler.get_job(key) is None for replica in replicas)

    @pytest.mark.nightly
    def test_a_recurring_job_runs_at_each_run_time_once(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        for number in range(3):
            make(replica_id=f"replica {number}").scheduler.add_job(
                note,
                "interval",
                seconds=1,
                args=[key],
                id=key,
                replace_existing=True,
                start_date=now().replace(microsecond=0) + timedelta(seconds=1),
                misfire_grace_time=None,
            )
        eventually(lambda: len(ran[key]) >= 4)
        run_times = [run_time for run_time, *_ in ran[key]]
        assert len(set(run_times)) == len(run_times)
        gaps = [(b - a).total_seconds() for a, b in pairwise(run_times)]
        assert all(gap >= 1 and gap == int(gap) for gap in gaps)
        tokens = [token for _, token, _ in ran[key]]
        assert tokens == sorted(set(tokens))

    @pytest.mark.nightly
    def test_a_job_whose_period_is_below_the_poll_interval_runs_as_often_as_it_is_due(
        self, make: Make, key: str
    ) -> None:
        """Whichever replica runs it looks again when it is due next."""
        for number in range(2):
            make(replica_id=f"replica {number}", store={"poll_interval": 60}).scheduler.add_job(
                note,
                "interval",
                seconds=0.5,
                args=[key],
                id=key,
                replace_existing=True,
                start_date=now().replace(microsecond=0) + timedelta(seconds=1),
                misfire_grace_time=None,
            )
        eventually(lambda: len(ran[key]) >= 20)
        run_times = [run_time for run_time, *_ in ran[key]]
        gaps = [(b - a).total_seconds() for a, b in pairwise(run_times)]
        assert gaps.count(0.5) >= 15  # a busy machine may coalesce a few

    @pytest.mark.nightly
    def test_each_run_time_is_read_once(self, make: Make, key: str) -> None:
        replica, reads = make(store={"poll_interval": 60}), []
        given = {"args": [key], "id": key, "misfire_grace_time": None}
        replica.scheduler.add_job(note, "interval", seconds=0.5, **given)
        replica.runs(key)
        after_each_read(replica, reads.append)
        before = len(ran[key])
        replica.runs(key, before + 10)
        # Not at the end of each run, too. Dead runs are looked for beside it. More may have run.
        number = len(reads)
        assert number <= len(ran[key]) - before + 1

    def test_its_run_is_in_the_history_and_the_task_knows_when_it_is_due(
        self,
        make: Make,
        key: str,
        database_url: str,
        connection: Connection,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Also if the job runs after it was read for its registration, and before that arrives."""
        replica = make(poll_interval=0.3)
        lookup_job = replica.store.lookup_job

        def read_before_it_runs(job_id: str) -> Any:
            job = lookup_job(job_id)
            replica.runs(key)
            return job

        monkeypatch.setattr(replica.store, "lookup_job", read_before_it_runs)
        due = now() + timedelta(seconds=2)
        given = {"args": [key], "id": key, "next_run_time": due, "misfire_grace_time": None}
        replica.scheduler.add_job(note, "interval", hours=1, **given)
        locks = TaskLocks(database_url)
        [run] = eventually(lambda: ended_runs(locks, key))
        eventually(lambda: locks.tasks()[0].zone)  # which only a registration writes
        [task] = locks.tasks()
        locks.close()
        row = job_row(connection, key)
        assert row is not None
        assert (run.outcome, run.kind) == ("ok", "schedule")
        assert row["next_run_time"] == run.scheduled_at + timedelta(hours=1)
        assert task.due_at is not None
        assert abs(task.due_at - row["next_run_time"]) < timedelta(minutes=1)
        assert row["last_run_time"] == run.scheduled_at

    def test_many_that_are_due_at_once_all_run_once_on_more_than_one_replica(
        self, make: Make, key: str
    ) -> None:
        replicas = [make(replica_id=f"replica {number}", max_workers=4) for number in range(3)]
        for number in range(60):
            replicas[0].run_at(note, key, id=f"{key}-{number}", args=[key, number], after=1.0)
        # One more of these than a replica has workers, so that another replica runs it.
        waits = f"{key}-waits"
        gate = Gate(waits)
        for number in range(5):
            replicas[0].run_at(note_and_wait, waits, id=f"{waits}-{number}", args=[waits])
        replicas[0].runs(waits, 5)
        gate.open()
        eventually(lambda: len(ran[key]) >= 60)
        assert sorted(value for *_, value in ran[key]) == list(range(60))
        holders = [
            len([e for e in replica.events if e.code == EVENT_TASK_LOCK_GRANTED])
            for replica in replicas
        ]
        assert len([count for count in holders if count]) > 1

    def test_a_job_that_raises_is_reported_and_goes_on(self, make: Make, key: str) -> None:
        replica = make()
        replica.scheduler.add_job(
            note_and_fail, "interval", seconds=1, args=[key], id=key, next_run_time=now()
        )
        replica.runs(key, 2)

    def test_run_times_that_came_due_meanwhile_are_coalesced(
        self, make: Make, key: str, database_url: str
    ) -> None:
        """Also those of two weeks."""
        replica = make(start=False, poll_interval=0.3)
        given = {"args": [key], "id": key, "misfire_grace_time": None, "coalesce": True}
        given["kwargs"] = {"task_lock": {"grace": 0}}  # so that a miss is told at once
        end = now()
        given["next_run_time"] = end - timedelta(days=15)
        replica.scheduler.add_job(note, "cron", second="*", end_date=end, **given)
        replica.start()
        [(run_time, *_)] = replica.runs(key)
        assert end - run_time < timedelta(seconds=1)
        with closing(TaskLocks(database_url)) as locks:
            # A slow machine walks through that many run times for minutes.
            [missed] = eventually(lambda: [run for run in locks.runs(key) if run.run_times], 300)
        assert (missed.cause, missed.run_times) == ("unasked", 10_001)
        assert missed.last_scheduled_at == run_time - timedelta(seconds=1)
        assert len(ran[key]) == 1

    def test_or_run_one_after_the_other(self, make: Make, key: str) -> None:
        replicas = [make(start=False), make(start=False)]
        first = now() - timedelta(hours=3, minutes=30)
        replicas[0].scheduler.add_job(
            note,
            "interval",
            hours=1,
            args=[key],
            id=key,
            misfire_grace_time=None,
            coalesce=False,
            next_run_time=first,
        )
        for replica in replicas:
            replica.start()
        replicas[0].runs(key, 4)
        expected = [first + timedelta(hours=hours) for hours in range(4)]
        assert [run_time for run_time, *_ in ran[key]] == expected

    def test_a_missed_run_time_is_told_and_not_run(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        replica.scheduler.add_job(
            note,
            "interval",
            hours=1,
            args=[key],
            id=key,
            misfire_grace_time=60,
            next_run_time=now() - timedelta(minutes=5),
        )
        replica.one(EVENT_JOB_MISSED, key)
        row = job_row(connection, key)
        assert row is not None
        assert (row["next_run_time"] > now(), ran[key]) == (True, [])

    def test_a_one_off_job_with_the_default_grace_time_is_never_missed(
        self, make: Make, key: str
    ) -> None:
        replica = make(job_defaults={})
        job = replica.run_at(note, key, after=-3600)
        assert job.misfire_grace_time is None
        replica.runs(key)

    @pytest.mark.nightly
    def test_a_missed_one_off_job_is_removed_with_a_warning_and_an_entry_in_the_history(
        self,
        make: Make,
        key: str,
        connection: Connection,
        database_url: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        replica = make()
        replica.run_at(note, key, after=-300, misfire_grace_time=60)
        replica.one(EVENT_JOB_MISSED, key)
        eventually(lambda: job_row(connection, key) is None)
        assert "is removed without this run" in caplog.text
        assert ran[key] == []
        locks = TaskLocks(database_url)
        [run] = eventually(lambda: locks.runs(key))
        locks.close()
        # Nobody was there at its run time, so no replica is named.
        assert (run.outcome, run.replica) == ("missed", "")

    @pytest.mark.parametrize("function", [note, note_on_the_loop])
    def test_on_an_event_loop(self, database_url: str, key: str, function: Any) -> None:
        async def runs() -> None:
            scheduler = AsyncIOScheduler(
                jobstores={"default": PatientStore(database_url, functions=["tests."])},
                executors={"default": TaskLockExecutor(database_url)},
            )
            scheduler.start()
            try:
                for number, missed in enumerate([False, True]):
                    scheduler.add_job(
                        function,
                        "date",
                        run_date=now() - timedelta(seconds=300 * missed),
                        args=[key],
                        id=f"{key}-{number}",
                        misfire_grace_time=60,
                    )
                await asyncio.wait_for(over(scheduler), 60)
            finally:
                scheduler.shutdown()

        async def over(scheduler: AsyncIOScheduler) -> None:
            while not ran[key] or scheduler.get_jobs():
                await asyncio.sleep(0.02)

        asyncio.run(runs())
        assert len(ran[key]) == 1

    @pytest.mark.nightly
    @pytest.mark.direct("the proxy leads to the server")
    @pytest.mark.parametrize("outage", [False, True], ids=["alone", "in an outage"])
    def test_a_one_off_job_that_a_blocked_event_loop_keeps_from_its_begin_is_handed_over(
        self,
        proxy: Proxy,
        key: str,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
        outage: bool,
    ) -> None:
        """Also if the hand-over arrives only after the maximum lock has ended."""

        def is_row(condition: str) -> int:
            query = f"SELECT FROM task_lock WHERE task_name = %s AND {condition}"
            return connection.execute(query, [key]).rowcount

        def block_the_event_loop(executor: TaskLockExecutor) -> None:
            if outage:
                # In the replica, and not just in the row. A claim whose answer is lost is handed
                # over, too, but not because of the event loop.
                heartbeat = executor.user.replica.heartbeat
                eventually(lambda: heartbeat.due_at < inf or is_row("handed_over"))
                proxy.accepting = False
                proxy.cut_all()
                eventually(lambda: is_row("run_until < now()"))
                proxy.accepting = True
            eventually(lambda: is_row("handed_over"))

        async def run() -> None:
            executor = TaskLockExecutor(proxy.url, poll_interval=0.3)
            scheduler = AsyncIOScheduler(
                jobstores={"default": TaskLockJobStore(proxy.url, functions=["tests."])},
                executors={"default": executor},
            )
            scheduler.start()
            try:
                scheduler.add_job(
                    note_on_the_loop,
                    "date",
                    args=[key],
                    id=key,
                    kwargs={"task_lock": {"name": key, "max_lock": 2}},
                    misfire_grace_time=None,
                )
                block_the_event_loop(executor)
                while not ran[key]:
                    await asyncio.sleep(0.05)
            finally:
                scheduler.shutdown()

        asyncio.run(asyncio.wait_for(run(), 60))
        assert len(ran[key]) == 1
        assert "did not begin before its lease or its maximum lock ended" in caplog.text

    @pytest.mark.nightly
    def test_a_job_that_waits_in_the_pool_behind_other_work_is_run_by_another_replica(
        self, make: Make, key: str, gate: Gate, connection: Connection
    ) -> None:
        """The pool is the application's, too: it has taken the only worker."""
        busy = make(max_workers=1)
        pool_of(busy.executor).submit(gate.event.wait, 60)
        busy.run_at(note, key, kwargs={"task_lock": {"max_lock": 2}})
        claimed = "SELECT FROM task_lock WHERE locked_by = %s"
        eventually(lambda: connection.execute(claimed, [busy.executor.user.replica_id]).rowcount)
        make(poll_interval=0.3).runs(key)
        gate.open()
        busy.idle()
        assert len(ran[key]) == 1

    def test_more_coroutines_than_are_read_at_a_time_all_run(
        self, database_url: str, key: str
    ) -> None:
        count = MOST_READ + 50

        def add(scheduler: Any) -> None:
            for number in range(count):
                scheduler.add_job(
                    note_on_the_loop,
                    "date",
                    id=f"{key}-{number}",
                    args=[key],
                    misfire_grace_time=None,
                )

        async def run() -> None:
            scheduler = AsyncIOScheduler(
                jobstores={"default": PatientStore(database_url, functions=["tests."])},
                executors={"default": TaskLockExecutor(database_url)},
            )
            scheduler.start(paused=True)
            try:
                await asyncio.to_thread(add, scheduler)
                scheduler.resume()
                while len(ran[key]) < count:
                    await asyncio.sleep(0.05)
            finally:
                scheduler.shutdown()

        asyncio.run(asyncio.wait_for(run(), 110))
        assert len(ran[key]) == count

    def test_in_worker_processes(self, make: Make, key: str) -> None:
        replica = make(executor="processpool", max_workers=2)
        replica.run_at(note, key)
        assert replica.one(EVENT_JOB_EXECUTED, key).retval is None
        replica.run_at(note, f"{key}-late", after=-300, misfire_grace_time=60)
        replica.one(EVENT_JOB_MISSED, f"{key}-late")


# For a job of each second, whose maximum lock would be five of them: a slow machine outlives it.
LONG_RUNS = {"max_factor": 600}


def run_each_second(replica: StoreReplica, key: str) -> None:
    """Add a job of each second, and wait for its first run, which goes on until the gate opens."""
    replica.scheduler.add_job(
        note_and_wait,
        "interval",
        seconds=1,
        args=[key],
        id=key,
        next_run_time=now(),
        misfire_grace_time=None,
    )
    replica.runs(key)


class TestRunning:
    def test_what_is_due_while_its_task_runs_waits_for_the_end(
        self, make: Make, key: str, gate: Gate, connection: Connection
    ) -> None:
        replicas = [make(**LONG_RUNS), make(**LONG_RUNS)]
        run_each_second(replicas[0], key)
        row = job_row(connection, key)
        assert row is not None
        wait_for_one_due_after(replicas[0], key, row["next_run_time"])
        assert len(ran[key]) == 1
        gate.open()
        replicas[0].runs(key, 2)

    def test_what_waited_for_the_end_is_due_from_then_on_and_not_overdue_at_once(
        self, make: Make, key: str, gate: Gate, database_url: str
    ) -> None:
        replica = make(**LONG_RUNS)
        run_each_second(replica, key)
        with closing(TaskLocks(database_url)) as operator:
            due_at = operator.tasks(key)[0].due_at
            assert due_at is not None
            wait_for_one_due_after(replica, key, due_at)
            replica.scheduler.pause()
            gate.open()
            eventually(lambda: operator.tasks(key)[0].finished_at)
            [task] = operator.tasks(key)
        assert task.due_at is not None
        assert task.finished_at is not None
        assert task.due_at >= task.finished_at

    @pytest.mark.nightly
    def test_what_is_due_while_its_task_runs_is_late_only_from_its_end_on(
        self, make: Make, key: str, gate: Gate, connection: Connection
    ) -> None:
        """A grace time that is shorter than the run costs no run time."""
        replica = make()
        given = {"args": [key], "id": key, "next_run_time": now(), "misfire_grace_time": 1}
        replica.scheduler.add_job(note_and_wait, "interval", hours=1, **given)
        replica.runs(key)
        connection.execute("UPDATE task_lock_job SET next_run_time = now()")
        wait_for_one_due_after(replica, key, now() + timedelta(seconds=2))
        gate.open()
        replica.runs(key, 2)
        assert EVENT_JOB_MISSED not in replica.codes(key)

    @pytest.mark.nightly
    def test_of_what_came_meanwhile_the_latest_is_run(
        self, make: Make, key: str, gate: Gate, caplog: pytest.LogCaptureFixture
    ) -> None:
        replica = make()
        first = now()
        given = {"args": [key], "id": key, "next_run_time": first, "misfire_grace_time": None}
        replica.scheduler.add_job(note_and_wait, "interval", seconds=1, coalesce=False, **given)
        replica.runs(key)
        wait_for_one_due_after(replica, key, first + timedelta(seconds=3))
        ended = now()
        gate.open()
        replica.runs(key, 2)
        replica.scheduler.remove_job(key)
        run_time = ran[key][1][0]
        assert ended - timedelta(seconds=1.1) < run_time
        assert (run_time - first).total_seconds() % 1 == 0
        assert "are missed" in caplog.text

    @pytest.mark.nightly
    def test_a_dead_run_whose_job_has_no_failover_any_more_is_given_up(
        self, make: Make, key: str, gate: Gate, proxy: Proxy, caplog: pytest.LogCaptureFixture
    ) -> None:
        holder = make(database=proxy.url, failover=True, lease=2, max_factor=100)
        given = {"args": [key], "id": key, "next_run_time": now(), "misfire_grace_time": None}
        holder.scheduler.add_job(note_and_wait, "interval", seconds=2, **given)
        holder.runs(key)
        proxy.accepting = False  # the holder is as good as dead
        proxy.cut_all()
        other = make(failover=False, lease=2, max_factor=100, poll_interval=0.3)
        gate.open()
        other.one(EVENT_TASK_LOCK_ERROR, key)
        assert "failover is off for its job by now" in caplog.text
        eventually(lambda: EVENT_TASK_LOCK_GRANTED in other.codes(key))
        other.scheduler.remove_job(key)

    @pytest.mark.nightly
    def test_a_job_can_add_and_remove_its_own_id_while_it_runs(
        self, make: Make, key: str, gate: Gate, connection: Connection
    ) -> None:
        replica = make()
        replica.run_at(note_and_wait, key)
        replica.runs(key)
        with pytest.raises(JobLookupError):
            replica.scheduler.remove_job(key)  # its last run time was claimed
        replica.run_at(note, key, after=0.1)
        gate.open()
        replica.runs(key, 2)
        eventually(lambda: job_row(connection, key) is None)
        assert len(ran[key]) == 2

    @pytest.mark.nightly
    def test_a_task_that_is_paused_is_not_run_and_its_one_off_jobs_are_kept(
        self, make: Make, key: str, database_url: str, connection: Connection
    ) -> None:
        replica = make()
        replica.scheduler.add_job(
            note,
            "interval",
            seconds=1,
            args=[key],
            id=key,
            next_run_time=now(),
            misfire_grace_time=None,
            kwargs={"task_lock": {"name": key}},
        )
        replica.runs(key)
        locks = TaskLocks(database_url)
        try:
            locks.pause(key)
            replica.idle()
            count = len(ran[key])
            replica.run_at(
                note, f"{key}-once", args=[f"{key}-once"], kwargs={"task_lock": {"name": key}}
            )
            rename = "UPDATE task_lock_job SET task_name = %s WHERE id = %s"
            connection.execute(rename, [key, f"{key}-once"])
            wait_for_one_due_after(replica, key, now() + timedelta(seconds=1.5))
            assert (len(ran[key]), ran[f"{key}-once"]) == (count, [])
            resuming_at = now()
            locks.resume(key)
        finally:
            locks.close()
        replica.runs(f"{key}-once")
        replica.runs(key, count + 1)
        run_times = [run_time for run_time, *_ in ran[key][count:]]
        assert all(run_time > resuming_at - timedelta(seconds=0.2) for run_time in run_times)

    def test_a_recurring_run_time_that_fell_into_a_pause_is_not_made_up_for(
        self, make: Make, key: str, database_url: str, connection: Connection
    ) -> None:
        replica = make()
        replica.scheduler.add_job(
            note,
            "interval",
            hours=1,
            args=[key],
            id=key,
            next_run_time=now(),
            misfire_grace_time=None,
        )
        replica.runs(key)
        replica.idle()
        locks = TaskLocks(database_url)
        try:
            locks.pause(key)
            replica.scheduler.modify_job(key, next_run_time=now())
            due = job_row(connection, key)
            assert due is not None
            wait_for_one_due_after(replica, key, due["next_run_time"])
            locks.resume(key)
        finally:
            locks.close()

        def moved() -> bool:
            row = job_row(connection, key)
            return row is not None and row["next_run_time"] > due["next_run_time"]

        eventually(moved)
        replica.idle()
        assert len(ran[key]) == 1


class TestUsersChanges:
    def test_on_one_replica_are_known_on_all(self, make: Make, key: str) -> None:
        one, other = make(), make()
        one.scheduler.add_job(note, "cron", hour=3, args=[key], id=key, name="first")
        job = other.scheduler.get_job(key)
        assert (job.name, job.args, str(job.trigger)) == ("first", (key,), "cron[hour='3']")
        job.modify(name="second")
        assert one.scheduler.get_job(key).name == "second"
        job.pause()
        assert one.scheduler.get_job(key).next_run_time is None
        assert one.scheduler.resume_job(key).next_run_time is not None
        other.scheduler.reschedule_job(key, trigger="interval", seconds=1)
        one.runs(key)
        other.scheduler.remove_job(key)
        assert one.scheduler.get_jobs() == []
        with pytest.raises(JobLookupError):
            one.scheduler.remove_job(key)

    def test_an_id_that_is_taken_is_a_conflict(self, make: Make, key: str) -> None:
        one, other = make(), make()
        one.run_at(note, key, after=60)
        with pytest.raises(ConflictingIdError):
            other.run_at(note, key, after=60)

    def test_after_a_pause_or_removal_has_returned_nothing_begins(
        self, make: Make, key: str
    ) -> None:
        # With the default of 5 a run would be over after 1 s, and handed over if it has not begun.
        one, other = make(max_factor=3000), make(max_factor=3000)
        kept = f"{key}-10"
        for number in range(11):
            job_id = f"{key}-{number}"
            one.scheduler.add_job(
                note, "interval", seconds=0.2, args=[job_id], id=job_id, misfire_grace_time=None
            )
        one.runs(f"{key}-9")
        counts = {}
        for number in range(10):
            job_id = f"{key}-{number}"
            if number % 2:
                other.scheduler.pause_job(job_id)
            else:
                other.scheduler.remove_job(job_id)
            one.idle()  # a run that was claimed just before may still begin
            other.idle()
            counts[job_id] = len(ran[job_id])
        one.runs(kept, len(ran[kept]) + 5)
        assert {job_id: len(ran[job_id]) for job_id in counts} == counts

    def test_of_different_attributes_at_once_both_stay(self, make: Make, key: str) -> None:
        one, other = make(), make()
        one.scheduler.add_job(note, "cron", hour=3, args=[key], id=key)
        changes: list[dict[str, Any]] = [
            {"name": "changed"},
            {"coalesce": False},
            {"misfire_grace_time": 77},
            {"args": [key, "other"]},
            {"next_run_time": None},
        ]
        at_once = threading.Barrier(len(changes))

        def modify(number: int, change: dict[str, Any]) -> None:
            at_once.wait()
            [one, other][number % 2].scheduler.modify_job(key, **change)

        threads = [threading.Thread(target=modify, args=each) for each in enumerate(changes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        job = one.scheduler.get_job(key)
        assert (job.name, job.coalesce, job.misfire_grace_time) == ("changed", False, 77)
        assert (job.args, job.next_run_time) == ((key, "other"), None)

    def test_removing_all_clears_the_fleet_and_says_so(
        self, make: Make, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        one, other = make(), make()
        one.run_at(note, key, after=60)
        other.scheduler.remove_all_jobs()
        assert one.scheduler.get_jobs() == []
        assert "removed, for all replicas: 1" in caplog.text

    @pytest.mark.direct("a pooler tells nobody")
    @pytest.mark.parametrize("change", CHANGES)
    def test_reach_a_replica_that_polls_each_hour(
        self, make: Make, key: str, change: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changing = make(start=False)
        changing.scheduler.start(paused=True)  # so that only the other one can run it
        if not change.startswith("adds it"):
            changing.scheduler.add_job(note, "cron", year=2099, args=[key], id=key)
        store = {"poll_interval": 3600, "replica_id": f"sleeper of {key}"}
        sleeper = make(start=False, store=store)
        looked = until_it_listens_and_has_looked(sleeper, monkeypatch)
        sleeper.start()
        looked()
        CHANGES[change](changing, key)
        sleeper.runs(key)

    @pytest.mark.direct("a pooler tells nobody")
    def test_reach_it_in_one_packet_with_the_last_answer(
        self, make: Make, key: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing more comes, so nothing wakes a wait for the connection."""
        changing = make(start=False)
        changing.scheduler.start(paused=True)  # so that only the other one can run it
        never = replace(PATIENT, longest_answer=60.0, report_interval=3600.0)
        asleep = {"poll_interval": 3600, "replica_id": f"sleeper of {key}"}
        sleeper = StoreReplica(proxy.url, store=asleep, timings=never, **asleep)
        sleeper.scheduler.add_jobstore("memory", "memory")
        joins, has_answer, held_back = threading.Event(), threading.Event(), bytearray()

        def join(data: bytes) -> bytes:
            if not joins.is_set():
                return data
            held_back.extend(data)
            has_answer.set()
            if b"task_lock_job\0" not in held_back:
                return b""
            joins.clear()
            return bytes(held_back)

        looked = until_it_listens_and_has_looked(sleeper, monkeypatch)
        sleeper.start()
        try:
            looked()
            job = sleeper.run_once(joins.set, jobstore="memory", next_run_time=None)
            quiet(proxy)
            proxy.to_client = join
            sleeper.executor.submit_job(job, [now()])
            assert has_answer.wait(60)  # of its release, after which nothing is sent
            changing.run_at(note, key)
            sleeper.runs(key)
        finally:
            proxy.to_client = pass_on
            sleeper.shutdown()


class TestDeclaredJobs:
    """``replace_existing=True``, as an application declares its jobs when it starts."""

    def test_by_three_replicas_at_once_are_one_each_and_stay_paused(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        first = make()
        first.scheduler.add_job(note, "cron", hour=3, args=[key], id=key)
        first.scheduler.pause_job(key)
        before = job_row(connection, key)
        replicas = [make(start=False) for _ in range(3)]
        for replica in replicas:
            replica.scheduler.add_job(
                note, "cron", hour=3, args=[key], id=key, replace_existing=True
            )
        threads = [threading.Thread(target=replica.start) for replica in replicas]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(first.scheduler.get_jobs()) == 1
        assert job_row(connection, key) == before

    def test_keep_the_next_run_time_of_an_interval(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        declare = {"trigger": "interval", "hours": 1, "args": [key], "id": key}
        replica.scheduler.add_job(note, **declare)
        before = job_row(connection, key)
        job = make().scheduler.add_job(note, replace_existing=True, **declare)
        assert job_row(connection, key) == before
        assert before is not None
        assert job.next_run_time == before["next_run_time"]

    def test_write_what_else_has_changed(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        declare = {"trigger": "interval", "hours": 1, "id": key, "replace_existing": True}
        replica.scheduler.add_job(note, args=[key], **declare)
        before = job_row(connection, key)
        replica.scheduler.add_job(note, args=[key, "new"], **declare)
        after = job_row(connection, key)
        assert before is not None
        assert after is not None
        assert after["arguments"]["args"] == [key, "new"]
        assert after["next_run_time"] == before["next_run_time"]
        assert (after["version"], after["trigger"]) == (2, before["trigger"])

    @pytest.mark.parametrize("value", [True, 1.0])
    def test_or_are_modified_write_a_value_that_python_calls_equal(
        self, make: Make, key: str, value: Any
    ) -> None:
        replica = make()
        declare = {"trigger": "interval", "hours": 1, "id": key, "replace_existing": True}
        changes: list[Callable[[], Any]] = [
            lambda: replica.scheduler.add_job(note, args=[key, value], **declare),
            lambda: replica.scheduler.modify_job(key, args=[key, value]),
        ]
        for change in changes:
            replica.scheduler.add_job(note, args=[key, 1], **declare)
            change()
            assert type(replica.scheduler.get_job(key).args[1]) is type(value)

    def test_mend_an_option_that_python_calls_equal(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        declare = {"trigger": "interval", "hours": 1, "args": [key], "id": key}
        replica.scheduler.add_job(note, **declare)
        break_row(connection, key, "options", '{"coalesce": 1}')
        replica.scheduler.add_job(note, replace_existing=True, **declare)
        row = job_row(connection, key)
        assert row is not None
        assert row["options"]["coalesce"] is True

    def test_with_another_interval_count_from_the_last_run(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        declare = {"args": [key], "id": key, "replace_existing": True}
        replica.scheduler.add_job(note, "interval", hours=1, next_run_time=now(), **declare)
        replica.runs(key)
        ran_at = ran[key][0][0]
        for hours in (2, 1, 2):  # of replicas of two versions that restart
            replica.scheduler.add_job(note, "interval", hours=hours, **declare)
            row = job_row(connection, key)
            assert row is not None
            assert row["next_run_time"] == ran_at + timedelta(hours=hours)

    def test_with_a_shorter_interval_run_once_for_all_that_would_have_been_due(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        declare = {"args": [key], "id": key, "replace_existing": True, "coalesce": False}
        declare["misfire_grace_time"] = None
        replica.scheduler.add_job(note, "interval", hours=1, next_run_time=now(), **declare)
        replica.runs(key)
        connection.execute(
            "UPDATE task_lock_job SET next_run_time = next_run_time - interval '40 min',"
            " last_run_time = last_run_time - interval '40 min'"
        )
        row = job_row(connection, key)
        assert row is not None
        last = row["last_run_time"]
        replica.scheduler.pause()
        replica.scheduler.add_job(note, "interval", minutes=3, **declare)
        row = job_row(connection, key)
        assert row is not None
        assert row["next_run_time"] == last + 13 * timedelta(minutes=3)

    def test_that_have_not_run_are_not_pushed_ahead(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        declare = {"args": [key], "id": key, "replace_existing": True}
        replica.scheduler.add_job(note, "interval", hours=1, **declare)
        first = job_row(connection, key)
        for hours in (2, 1, 2):
            replica.scheduler.add_job(note, "interval", hours=hours, **declare)
        row = job_row(connection, key)
        assert first is not None
        assert row is not None
        assert row["next_run_time"] == first["next_run_time"]

    def test_with_another_interval_that_has_ended_have_no_next_run_time(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        declare = {"args": [key], "id": key, "replace_existing": True}
        replica.scheduler.add_job(note, "interval", hours=1, next_run_time=now(), **declare)
        replica.runs(key)
        next_run_times = []
        for hours, end in [(2, timedelta(hours=-1)), (3, timedelta(hours=1))]:
            trigger = {"trigger": "interval", "hours": hours, "end_date": now() + end}
            replica.scheduler.add_job(note, **trigger, **declare)
            row = job_row(connection, key)
            assert row is not None
            next_run_times.append(row["next_run_time"])
        assert next_run_times == [None, None]

    def test_with_another_schedule_stay_paused(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        replica.scheduler.add_job(note, "cron", hour=3, args=[key], id=key)
        replica.scheduler.pause_job(key)
        declare = {"args": [key], "id": key, "replace_existing": True}
        replica.scheduler.add_job(note, "cron", hour=4, **declare)
        row = job_row(connection, key)
        assert row is not None
        assert row["next_run_time"] is None
        assert row["trigger"]["fields"]["hour"] == "4"

    def test_that_end_or_are_removed_at_that_moment_are_added(
        self, database_url: str, key: str, connection: Connection
    ) -> None:
        class Slow(PatientStore):
            """Meanwhile the job that has the id is removed."""

            def add_job(self, job: Any) -> None:
                try:
                    super().add_job(job)
                except ConflictingIdError:
                    connection.execute("DELETE FROM task_lock_job WHERE id = %s", [job.id])
                    raise

        scheduler = BackgroundScheduler(
            jobstores={"default": Slow(database_url, functions=["tests."])},
            executors={"default": TaskLockExecutor(database_url)},
        )
        scheduler.start()
        try:
            declare = {"args": [key], "id": key, "replace_existing": True}
            scheduler.add_job(note, "cron", hour=3, **declare)
            scheduler.add_job(note, "cron", hour=4, **declare)
            row = job_row(connection, key)
        finally:
            scheduler.shutdown()
        assert row is not None
        assert (row["version"], row["trigger"]["fields"]["hour"]) == (1, "4")

    def test_that_are_removed_while_they_are_written_are_added_as_new_ones(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        declare = {"trigger": "cron", "hour": 3, "id": key}
        replica.scheduler.add_job(note, args=[key], **declare)
        replica.scheduler.pause_job(key)
        connection.execute(
            "CREATE FUNCTION remove() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " DELETE FROM task_lock_job WHERE id = OLD.id; RETURN NULL; END $$;"
            "CREATE TRIGGER remove BEFORE UPDATE ON task_lock_job"
            " FOR EACH ROW EXECUTE FUNCTION remove()"
        )
        replica.scheduler.add_job(note, args=[key, "new"], replace_existing=True, **declare)
        row = job_row(connection, key)
        assert row is not None
        assert (row["version"], row["arguments"]["args"]) == (1, [key, "new"])
        assert row["next_run_time"] > now()

    @pytest.mark.parametrize("started", [True, False])
    def test_with_a_next_run_time_have_that(
        self, make: Make, key: str, connection: Connection, started: bool
    ) -> None:
        make().scheduler.add_job(note, "cron", hour=3, args=[key], id=key)
        replica = make(start=started)
        replica.scheduler.add_job(
            note, "cron", hour=3, args=[key], id=key, replace_existing=True, next_run_time=None
        )
        if not started:
            replica.start()
        row = job_row(connection, key)
        assert row is not None
        assert row["next_run_time"] is None


class TestRunsWhereItCan:
    def test_a_function_that_cannot_be_imported_here_is_left_to_others_with_one_warning(
        self, make: Make, key: str, connection: Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        replica = make(start=False)
        replica.scheduler.start(paused=True)
        replica.run_at(note, key)
        connection.execute(
            "UPDATE task_lock_job SET func = 'tests.support.stored_jobs:not_yet' WHERE id = %s",
            [key],
        )
        replica.scheduler.resume()
        eventually(lambda: "cannot be imported here" in caplog.text)
        [job] = replica.scheduler.get_jobs()
        assert job.id == key
        connection.execute(
            "UPDATE task_lock_job SET func = 'tests.support.stored_jobs:note' WHERE id = %s", [key]
        )
        replica.runs(key)
        assert caplog.text.count("cannot be imported here") == 1

    def test_a_module_that_ends_the_process_when_it_is_imported_ends_no_thread(
        self,
        make: Make,
        key: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        module = key.replace("-", "_")
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / f"{module}.py").write_text("import sys\nsys.exit(3)\n")
        replica = make(store={"functions": ["tests.", module]})
        replica.scheduler.pause()
        replica.run_at(note, key)
        connection.execute("UPDATE task_lock_job SET func = %s", [f"{module}:note"])
        replica.scheduler.resume()
        eventually(lambda: "its module calls sys.exit(3)" in caplog.text)
        replica.run_at(note, f"{key}-next")
        replica.runs(f"{key}-next")
        assert {job.id for job in replica.scheduler.get_jobs()} == {key}

    @pytest.mark.parametrize(
        ("store", "change"),
        [
            ({"secret": "a secret of 16 bytes or more"}, "signature = 'other'"),
            ({}, "func = 'os:x'"),
        ],
        ids=["signature", "function"],
    )
    def test_many_that_may_not_run_here_do_not_keep_others_from_it(
        self, make: Make, key: str, connection: Connection, store: dict[str, Any], change: str
    ) -> None:
        """There are more of them than workers, and they are due for longer."""
        replica = make(store=store, job_defaults={})
        replica.scheduler.pause()
        for number in range(60):
            replica.run_at(note, f"{key}-{number}", args=[key], after=-60)
        connection.execute(f"UPDATE task_lock_job SET {change}")
        replica.run_at(note, f"{key}-good")
        replica.scheduler.resume()
        replica.runs(f"{key}-good")
        assert ran[key] == []

    def test_one_that_cannot_be_imported_can_be_paused_and_removed(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        replica.run_at(note, key, after=60)
        connection.execute("UPDATE task_lock_job SET func = 'tests.gone:away'")
        assert replica.scheduler.pause_job(key).next_run_time is None
        row = job_row(connection, key)
        assert row is not None
        assert row["func"] == "tests.gone:away"
        replica.scheduler.remove_job(key)
        assert job_row(connection, key) is None

    def test_one_that_cannot_be_imported_keeps_its_function_when_it_is_changed(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        replica.run_at(note, key, after=60)
        connection.execute("UPDATE task_lock_job SET func = 'tests.gone:away'")
        replica.scheduler.modify_job(key, args=["other"], name="another")
        row = job_row(connection, key)
        assert row is not None
        assert (row["func"], row["options"]["name"]) == ("tests.gone:away", "another")
        assert row["arguments"] == {"args": ["other"], "kwargs": {}}

    @pytest.mark.parametrize("serializer", ["json", "pickle"])
    def test_arguments_by_place_and_by_name_are_changed_apart(
        self,
        make: Make,
        key: str,
        monkeypatch: pytest.MonkeyPatch,
        serializer: str,
    ) -> None:
        store = {"serializer": serializer, "secret": "a secret of ours"}
        one, other = make(store=store), make(store=store)
        one.run_at(note, key, after=60)
        read, meanwhile = JobRows.read, iter([lambda: other.scheduler.modify_job(key, args=["a"])])

        def read_after_it(*arguments: Any, **named: Any) -> Any:
            found = read(*arguments, **named)
            next(meanwhile, lambda: None)()
            return found

        monkeypatch.setattr(JobRows, "read", read_after_it)
        one.scheduler.modify_job(key, kwargs={"value": 1})
        job = one.scheduler.get_job(key)
        assert (job.args, job.kwargs) == (("a",), {"value": 1})

    def test_a_job_of_an_executor_that_is_not_here_stays_and_runs_where_it_is(
        self, make: Make, key: str, connection: Connection, database_url: str
    ) -> None:
        adds = make()
        adds.run_at(note, key, executor="other")
        replica = make(start=False)
        replica.scheduler.add_executor(TaskLockExecutor(database_url), "other")
        replica.start()
        replica.runs(key)

    def test_a_row_that_nobody_signed_is_left_alone_with_an_error(
        self, make: Make, key: str, connection: Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        replica = make(store={"functions": None, "secret": "a secret of ours"})
        replica.run_at(note, key, after=60)
        connection.execute(
            'UPDATE task_lock_job SET arguments = \'{"args": ["other"], "kwargs": {}}\''
        )
        connection.execute("UPDATE task_lock_job SET next_run_time = now()")
        replica.run_at(note, f"{key}-signed")
        replica.runs(f"{key}-signed")
        eventually(lambda: "somebody else wrote or changed it" in caplog.text)
        before = job_row(connection, key)
        with pytest.raises(TaskLockOptionError, match="not changed: its row is unreadable"):
            replica.scheduler.modify_job(key, name="another")  # which would vouch for the rest
        assert job_row(connection, key) == before
        assert replica.scheduler.get_job(key).args == ()
        replica.scheduler.modify_job(key, next_run_time=now())
        replica.run_at(note, f"{key}-next")
        replica.runs(f"{key}-next")
        assert (ran["other"], ran[key]) == ([], [])

    def test_a_bad_row_stops_nobody(
        self, make: Make, key: str, connection: Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        replica = make(start=False)
        replica.scheduler.start(paused=True)
        for name in ("never", "broken"):
            replica.scheduler.add_job(
                note, "interval", hours=1, args=[key], id=f"{key}-{name}", next_run_time=now()
            )
        never = AndTrigger([CronTrigger(hour=hour, timezone="UTC") for hour in (3, 4)])
        endless = json.dumps(encode_trigger(never))
        update = "UPDATE task_lock_job SET trigger = %s::jsonb WHERE id = %s"
        connection.execute(update, [endless, f"{key}-never"])
        connection.execute(update, ['{"type": "moon"}', f"{key}-broken"])
        replica.run_at(note, f"{key}-good")
        replica.scheduler.resume()
        replica.runs(f"{key}-good")
        eventually(lambda: "the parts of its trigger" in caplog.text)
        eventually(lambda: "a trigger of an unknown type, 'moon'" in caplog.text)
        assert ran[key] == []
        assert job_row(connection, f"{key}-never") is not None

    def test_a_job_whose_row_cannot_be_read_is_listed_paused_and_removed(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        for column, value in BROKEN:
            replica.scheduler.add_job(note, "interval", hours=1, args=[key], id=key)
            break_row(connection, key, column, value)
            before = texts(connection, key)
            [job] = replica.scheduler.get_jobs()
            due = moment(connection, before["next_run_time"])
            assert (job.id, job.next_run_time) == (key, due), value
            assert replica.scheduler.pause_job(key).next_run_time is None, value
            after = texts(connection, key)
            changed = {name for name in after if after[name] != before[name]}
            assert changed == {"next_run_time", "version", "changed_id", "changed_at"}, value
            with pytest.raises(TaskLockOptionError):
                replica.scheduler.resume_job(key)
            with pytest.raises(TaskLockOptionError):
                replica.scheduler.modify_job(key, name="another")
            assert texts(connection, key) == after, value
            replica.scheduler.remove_job(key)
            assert job_row(connection, key) is None, value

    def test_declaring_a_job_mends_a_row_that_cannot_be_read(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        for number, (column, value) in enumerate(BROKEN):
            job_id = f"{key}-{number}"
            declare = {"args": [job_id], "id": job_id, "replace_existing": True}
            replica.scheduler.add_job(note, "interval", hours=1, **declare)
            # A run time that no declaration computes anew.
            connection.execute(
                "UPDATE task_lock_job SET next_run_time = next_run_time - interval '10 min'"
                " WHERE id = %s",
                (job_id,),
            )
            before = job_row(connection, job_id)
            break_row(connection, job_id, column, value)
            replica.scheduler.add_job(note, "interval", hours=1, **declare)
            row = job_row(connection, job_id)
            assert before is not None
            assert row is not None
            for name in ("options", "arguments"):
                assert row[name] == before[name], value
            assert row["trigger"]["length"] == before["trigger"]["length"], value
            assert row["next_run_time"] == before["next_run_time"], value
            replica.scheduler.modify_job(job_id, next_run_time=now())
            replica.runs(job_id)

    def test_declaring_a_job_signs_nothing_of_a_row_that_somebody_else_wrote(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make(store={"secret": "a secret of ours"})
        declare = {"trigger": "interval", "hours": 1, "args": [key], "id": key}
        replica.scheduler.add_job(note, **declare)
        before = job_row(connection, key)
        theirs = "2020-02-02T02:02:02.020202+00:00"
        break_row(connection, key, "trigger", f'{{"start_date": "{theirs}"}}')
        replica.scheduler.add_job(note, replace_existing=True, **declare)
        row = job_row(connection, key)
        assert before is not None
        assert row is not None
        assert row["signature"] not in (None, before["signature"])
        assert row["trigger"]["start_date"] != theirs

    def test_a_pickle_that_nobody_signed_is_not_read(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make(store={"serializer": "pickle", "secret": "a secret of ours"})
        replica.run_at(note, key, after=3600)
        pickled = b64encode(pickle.dumps(Malicious(key))).decode()
        break_row(connection, key, "arguments", f'{{"pickle": "{pickled}"}}')
        [job] = replica.scheduler.get_jobs()
        assert job.id == key
        replica.scheduler.pause_job(key)
        assert ran[key] == []

    def test_a_module_that_cannot_be_imported_is_not_imported_each_time_that_jobs_are_listed(
        self,
        make: Make,
        key: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        connection: Connection,
    ) -> None:
        module = key.replace("-", "_")
        replica = make(store={"functions": ["tests.", module]})
        monkeypatch.syspath_prepend(tmp_path)
        source = "from tests.support.stored_jobs import note"
        (tmp_path / f"{module}.py").write_text(f"{source}\nnote({key!r})\nraise OSError\n")
        for number in range(3):
            replica.run_at(note, f"{key}-{number}", after=3600)
        connection.execute(
            "UPDATE task_lock_job SET func = %s || replace(':' || id, '-', '_')", [module]
        )
        for _ in range(20):
            assert len(replica.scheduler.get_jobs()) == 3
        # Of 60 times: it is tried again after 1, 2, 4 and so on seconds.
        assert 1 <= len(ran[key]) < 10

    def test_where_locks_are_off_what_two_replicas_have_read_runs_on_one_with_one_warning_each(
        self, make: Make, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, second = make(enabled=False, start=False), make(enabled=False)
        # Not paused later, when it may be about to process its jobs once more.
        first.scheduler.start(paused=True)
        reads = []

        def wait_for_the_first(found: DueRows) -> None:
            if any(each.row.id == key for each in found.jobs):
                reads.append(key)
                eventually(lambda: ran[key])
            elif reads:
                reads.append("later")

        after_each_read(second, wait_for_the_first)
        first.run_at(note, key)
        eventually(lambda: reads)
        first.scheduler.resume()
        eventually(lambda: "later" in reads)
        assert len(ran[key]) == 1
        assert caplog.text.count("The executor 'default' has enabled=False") == 2

    @pytest.mark.nightly
    def test_where_locks_are_off_it_runs_on_one_replica_at_most_once_with_one_warning(
        self, make: Make, key: str, connection: Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As on a developer's machine, with ``enabled=False``."""
        replicas = [make(enabled=False) for _ in range(3)]
        replicas[0].run_at(note, key, args=[key])
        again = f"{key}-again"
        replicas[0].scheduler.add_job(
            note, "interval", seconds=1, args=[again], id=again, next_run_time=now()
        )
        replicas[0].runs(again, 3)
        assert len(ran[key]) == 1
        assert ran[key][0][1] is None
        eventually(lambda: job_row(connection, key) is None)
        assert caplog.text.count("The executor 'default' has enabled=False") == len(replicas)

    @pytest.mark.nightly
    @pytest.mark.direct("the proxy leads to the server")
    def test_a_dead_run_is_not_taken_over_where_its_function_is_not_allowed(
        self,
        make: Make,
        key: str,
        gate: Gate,
        proxy: Proxy,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        failover = {"failover": True, "lease": 2, "poll_interval": 0.3}
        holder = make(database=proxy.url, **failover)
        holder.run_at(note_and_wait, key)
        holder.runs(key)
        lacking = make(store={"functions": ["elsewhere."]}, **failover)
        proxy.accepting = False  # the holder is as good as dead
        proxy.cut_all()
        eventually(lambda: "is left to other replicas" in caplog.text)
        row = job_row(connection, key)
        assert row is not None
        assert (row["ended"], len(ran[key]), lacking.codes(key)) == (True, 1, [])
        make(**failover).runs(key, 2)
        assert lacking.codes(key) == []
        assert caplog.text.count("is left to other replicas") == 1

    def test_a_run_by_hand_is_not_begun_where_its_function_is_not_allowed(
        self, make: Make, key: str, database_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        having = make(poll_interval=0.3)
        having.scheduler.add_job(note, "cron", year=2099, args=[key], id=key)
        lacking = make(store={"functions": ["elsewhere."]}, poll_interval=0.3)
        with closing(TaskLocks(database_url)) as locks:
            eventually(lambda: sum(key in seen.tasks for seen in locks.replicas()) == 2)
            having.shutdown()
            locks.request_run(key)
            eventually(lambda: "is left to other replicas" in caplog.text)
            assert ended_runs(locks, key) == []
            make(poll_interval=0.3).runs(key)
            [run] = eventually(lambda: ended_runs(locks, key))
        assert (run.kind, run.outcome, lacking.codes(key)) == ("manual", "ok", [])

    @pytest.mark.direct("the proxy leads to the server")
    def test_a_job_without_a_lock_runs_also_if_the_next_ones_answer_is_lost(
        self, make: Make, key: str, proxy: Proxy
    ) -> None:
        replica = make(database=proxy.url, enabled=False, timings=PATIENT)
        replica.scheduler.pause()
        keys = [f"{key}-{number}" for number in range(2)]
        for each in keys:
            replica.run_at(note, each)
        moves: list[bytes] = []

        def cut_the_second_move(_number: int, to_server: bool, data: bytes) -> bytes | None:
            if to_server and MOVED_WITHOUT_A_CLAIM in data:
                moves.append(data)
                return None if len(moves) == 2 else data
            return data

        proxy.tap = cut_the_second_move
        replica.scheduler.resume()
        for each in keys:
            replica.runs(each)
        assert len(moves) == 3
        assert [len(ran[each]) for each in keys] == [1, 1]

    def test_what_comes_due_while_a_module_is_imported_is_found(
        self,
        make: Make,
        key: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        connection: Connection,
    ) -> None:
        module = key.replace("-", "_")
        replica = make(store={"functions": ["tests.", module], "poll_interval": 600})
        monkeypatch.syspath_prepend(tmp_path)
        source = "import time\nfrom tests.support.stored_jobs import note\n"
        (tmp_path / f"{module}.py").write_text(
            f"{source}def noted(key): note(key)\ntime.sleep(1)\n"
        )
        replica.run_at(note, key, after=1.0)
        update = "UPDATE task_lock_job SET func = %s WHERE id = %s"
        connection.execute(update, [f"{module}:noted", key])
        replica.run_at(note, f"{key}-next", after=1.5)
        replica.runs(key)
        replica.runs(f"{key}-next")

    @pytest.mark.parametrize("ends_by", ["its return", "a shutdown"])
    def test_a_module_whose_import_hangs_holds_up_no_other_job(
        self,
        make: Make,
        key: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
        ends_by: str,
    ) -> None:
        """Also if as many hang as may: then the looks go on as soon as one of them returns."""
        let_hang(monkeypatch, 1)
        modules = [f"{key.replace('-', '_')}_{number}" for number in range(2)]
        gates = [Gate(module) for module in modules]
        store = {"functions": ["tests.", *modules]}
        replica = make(store=store, timings=replace(PATIENT, longest_turn=0.5))
        monkeypatch.syspath_prepend(tmp_path)
        source = "from tests.support import stored_jobs as jobs\ndef note(key): jobs.note(key)\n"
        for module in modules:
            hangs = f"jobs.note_and_wait({module!r})\nhas_returned = True\n"
            (tmp_path / f"{module}.py").write_text(source + hangs)

        def hang(number: int) -> None:
            """Add a job whose import hangs, and another one in the same look."""
            replica.scheduler.pause()
            replica.run_at(note, f"{key}-{number}")
            update = "UPDATE task_lock_job SET func = %s WHERE id = %s"
            connection.execute(update, [f"{modules[number]}:note", f"{key}-{number}"])
            replica.scheduler.resume()
            eventually(lambda: caplog.text.count("has not returned for 0.5 s") == number + 1)

        try:
            hang(0)
            replica.run_at(note, f"{key}-other")
            replica.runs(f"{key}-other")
            hang(1)
            replica.run_at(note, f"{key}-third")
            assert ran[f"{key}-0"] == ran[f"{key}-third"] == []
            if ends_by == "a shutdown":
                replica.scheduler.shutdown()
                eventually(lambda: "tasklock" not in {each.name for each in threading.enumerate()})
            else:
                gates[0].open()
                replica.runs(f"{key}-0")
                replica.runs(f"{key}-third")
            # None but the opened gate has opened by itself, as each does after a minute.
            returned = [hasattr(sys.modules[module], "has_returned") for module in modules]
            assert returned == [ends_by == "its return", False]
        finally:
            for gate in gates:
                gate.open()
        if ends_by == "its return":
            replica.runs(f"{key}-1")

    def test_where_no_thread_could_be_started_for_a_look_the_next_change_starts_it(
        self, make: Make, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start, refused = threading.Thread.start, threading.Event()

        def refuse(thread: threading.Thread) -> None:
            if thread.name == "tasklock-store":
                refused.set()
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        replica = make()
        replica.run_at(note, key)
        assert refused.wait(60)
        monkeypatch.undo()
        replica.run_at(note, f"{key}-next")
        replica.runs(key)
        replica.runs(f"{key}-next")

    @pytest.mark.parametrize("lock", ["a lock", "no lock"])
    def test_a_job_stays_if_its_executor_is_removed_when_it_is_due(
        self, make: Make, key: str, lock: str, database_url: str, connection: Connection
    ) -> None:
        replica, other = make(start=False), make(start=False)
        for each in (replica, other):
            executor = TaskLockExecutor(database_url, enabled=lock == "a lock")
            each.scheduler.add_executor(executor, "extra")
        replica.start()
        once = f"{key}-once"

        def remove_executor(found: DueRows) -> None:
            if any(each.row.id == key for each in found.jobs):
                replica.scheduler.remove_executor("extra")

        after_each_read(replica, remove_executor)
        given = {"executor": "extra", "next_run_time": now(), "misfire_grace_time": None}
        replica.scheduler.add_job(note, "interval", hours=1, args=[key], id=key, **given)
        eventually(lambda: "extra" not in executors_of(replica.scheduler))
        replica.run_at(note, once)
        replica.runs(once)
        assert job_row(connection, key) is not None
        other.start()
        if lock == "a lock":
            other.runs(key)
        assert len(ran[key]) == (lock == "a lock")


class TestLimits:
    def test_an_id_that_postgresql_cannot_hold_is_of_no_job(self, make: Make) -> None:
        replica = make()
        assert replica.scheduler.get_job("\0") is None
        with pytest.raises(JobLookupError):
            replica.scheduler.remove_job("\0")

    @pytest.mark.parametrize(
        ("options", "job", "says"),
        [
            ({}, {"max_instances": 2}, "max_instances=2 makes no sense"),
            ({}, {"kwargs": {"task_lock": {"on_failure": "release"}}}, "on_failure='release'"),
            ({"on_database_error": "run"}, {}, "on_database_error='run'"),
            ({}, {"kwargs": {"task_lock": {"lease": 0}}}, "lease"),
            ({}, {"args": [(1, 2)]}, r"args\[0\] cannot be stored: a tuple"),
            ({}, {"func": print}, "is not allowed here"),
        ],
    )
    def test_what_makes_no_sense_here_is_rejected(
        self, make: Make, key: str, options: Any, job: Any, says: str, connection: Connection
    ) -> None:
        replica = make(**options)
        with pytest.raises(TaskLockOptionError, match=says):
            replica.run_at(job.pop("func", note), key, **job)
        assert job_row(connection, key) is None

    def test_without_a_lock_they_are_errors_when_they_are_added_or_changed(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        replica.scheduler.add_executor(ThreadPoolExecutor(1), "plain")
        with pytest.raises(TaskLockOptionError, match="executor 'plain' is a ThreadPoolExecutor"):
            replica.run_at(note, key, executor="plain")
        with pytest.raises(TaskLockOptionError, match="task_lock: False makes no sense"):
            replica.run_at(note, key, kwargs={"task_lock": False})
        assert job_row(connection, key) is None
        replica.run_at(note, key, after=3600)
        with pytest.raises(TaskLockOptionError, match="need a TaskLockExecutor"):
            replica.scheduler.modify_job(key, executor="plain")
        with pytest.raises(TaskLockOptionError, match="task_lock: False makes no sense"):
            replica.scheduler.modify_job(key, kwargs={"task_lock": False})
        replica.scheduler.modify_job(key, executor="of another replica")

    @pytest.mark.parametrize("job", [{"executor": "plain"}, {"kwargs": {"task_lock": False}}])
    def test_without_a_lock_they_are_errors_at_the_start_if_they_were_added_before(
        self, make: Make, key: str, job: dict[str, Any]
    ) -> None:
        replica = make(start=False)
        replica.scheduler.add_executor(ThreadPoolExecutor(1), "plain")
        replica.run_at(note, key, **job)
        with pytest.raises(TaskLockOptionError, match=r"need a TaskLockExecutor|task_lock: False"):
            replica.scheduler.start()
        replica.scheduler.remove_job(key)
        replica.run_at(note, key)
        replica.start()
        replica.runs(key)

    @pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
    def test_a_paused_scheduler_that_adds_jobs_needs_no_executor_of_ours(
        self, make: Make, key: str, database_url: str, before: bool
    ) -> None:
        """As in a web process, whose jobs run elsewhere."""
        make()
        scheduler = BackgroundScheduler(
            jobstores={"default": PatientStore(database_url, functions=["tests."])}
        )
        if not before:
            scheduler.start(paused=True)
        scheduler.add_job(note, "date", args=[key], id=key, misfire_grace_time=None)
        if before:
            scheduler.start(paused=True)
        eventually(lambda: ran[key])
        scheduler.shutdown()

    def test_what_a_paused_one_has_added_without_a_lock_is_left_alone_and_told(
        self, make: Make, key: str, connection: Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        replica = make()
        replica.scheduler.pause()
        replica.run_at(note, key, kwargs={"task_lock": False})
        replica.scheduler.resume()
        eventually(
            lambda: "is not run on this replica: task_lock: False makes no sense" in caplog.text
        )
        assert job_row(connection, key) is not None
        assert ran[key] == []

    def test_a_scheduler_without_an_executor_of_ours_says_that_it_runs_none(
        self, database_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        scheduler = BackgroundScheduler(
            jobstores={"default": PatientStore(database_url, functions=["tests."])}
        )
        scheduler.start()
        eventually(lambda: "The job store 'default' runs no jobs here" in caplog.text)
        scheduler.shutdown()

    def test_it_needs_functions_or_a_secret(self, database_url: str) -> None:
        with pytest.raises(TaskLockOptionError, match="needs functions="):
            TaskLockJobStore(database_url)

    @pytest.mark.parametrize("place", [{"table": "other"}, {"schema": "elsewhere"}])
    def test_the_executor_has_to_have_its_locks_beside_the_jobs(
        self, database_url: str, direct_url: str, place: dict[str, str]
    ) -> None:
        upgrade(direct_url, **place)  # so that all is there, but in two places
        executor = TaskLockExecutor(database_url, **place)
        scheduler = BackgroundScheduler(
            jobstores={"default": PatientStore(database_url, functions=["tests."])},
            executors={"default": executor},
        )
        try:
            with pytest.raises(TaskLockOptionError, match="'default' has its task locks in"):
                scheduler.start()
        finally:
            executor.shutdown()

    def test_one_that_is_added_later_and_has_not_is_left_alone_with_an_error(
        self, make: Make, key: str, database_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        replica = make()
        replica.scheduler.add_executor(TaskLockExecutor(database_url, schema="public"), "added")
        replica.run_at(note, key, executor="added")
        replica.run_at(note, f"{key}-other")
        replica.runs(f"{key}-other")
        eventually(lambda: "the executor 'added' has its task locks in" in caplog.text)
        assert ran[key] == []
        other = make(start=False)
        other.scheduler.add_executor(TaskLockExecutor(database_url), "added")
        other.start()
        other.runs(key)
        assert caplog.text.count("Its jobs are not run") == 1

    def test_two_stores_of_one_scheduler_cannot_have_one_table(
        self, make: Make, database_url: str
    ) -> None:
        replica = make()
        store = TaskLockJobStore(database_url, functions=["tests."])
        with pytest.raises(TaskLockOptionError, match="has the same table"):
            replica.scheduler.add_jobstore(store, "second")
        replica.scheduler.remove_jobstore("second", shutdown=False)

    def test_a_table_that_is_missing_is_a_clear_error(
        self, database_url: str, connection: Connection
    ) -> None:
        connection.execute("DROP TABLE task_lock_job")
        store = TaskLockJobStore(database_url, functions=["tests."])
        with pytest.raises(TaskLockSchemaError, match="task_lock_job does not exist"):
            store.start(BackgroundScheduler(), "default")

    def test_a_role_that_may_not_delete_is_told_the_grant(
        self, database_url: str, connection: Connection
    ) -> None:
        with role(database_url) as (name, url):
            connection.execute(
                "GRANT SELECT, INSERT, UPDATE ON task_lock, task_lock_run, task_lock_replica, "
                f'task_lock_job TO "{name}"'
            )
            store = TaskLockJobStore(url, functions=["tests."])
            with pytest.raises(TaskLockSchemaError, match="run: GRANT DELETE ON task_lock_job"):
                store.start(BackgroundScheduler(), "default")

    def test_a_paused_scheduler_keeps_nothing_for_itself(self, make: Make, key: str) -> None:
        paused = make(start=False)
        paused.scheduler.start(paused=True)
        paused.run_at(note, key)
        other = make()
        other.runs(key)

    def test_a_configuration_makes_it(
        self, database_url: str, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(TaskLockJobStore, "timings", PATIENT)
        scheduler = BackgroundScheduler(
            {
                "apscheduler.jobstores.default": {
                    "class": "apscheduler_tasklock:TaskLockJobStore",
                    "database": database_url,
                    "functions": ["tests."],
                    "poll_interval": "0.5",
                },
                "apscheduler.executors.default": {"type": "tasklock", "database": database_url},
            }
        )
        scheduler.start()
        try:
            scheduler.add_job(
                note, "date", run_date=now(), args=[key], id=key, misfire_grace_time=None
            )
            eventually(lambda: ran[key])
        finally:
            scheduler.shutdown()

    def test_it_has_a_plugin_alias(self, checkout: Path) -> None:
        declared = (checkout / "pyproject.toml").read_text()
        [aliases] = re.findall(r'"apscheduler.jobstores"\]\n(.*)', declared)
        assert aliases == 'tasklock = "apscheduler_tasklock.jobstore.store:TaskLockJobStore"'

    def test_a_scheduler_may_have_a_memory_store_as_well(self, make: Make, key: str) -> None:
        replica = make(start=False)
        replica.scheduler.add_jobstore("memory", "here")
        replica.start()
        replica.run_at(note, key, jobstore="here", id=f"{key}-here")
        replica.run_at(note, key)
        replica.runs(key, 2)


def job_of(replica: StoreReplica, key: str) -> Any:
    """Return a job, or ``None``, also while the database is away."""
    with suppress(TaskLockDatabaseError):
        return replica.scheduler.get_job(key)
    return None


class TestEvents:
    def test_it_is_told_when_it_is_submitted_where_it_runs(self, make: Make, key: str) -> None:
        replicas = [make(), make()]
        replicas[0].run_at(note, key, after=0.5)
        replicas[0].runs(key)
        for replica in replicas:
            replica.idle()
        told = [submissions_and_grants(replica, key) for replica in replicas]
        assert sorted(told) == [[], [EVENT_JOB_SUBMITTED, EVENT_TASK_LOCK_GRANTED]]

    def test_in_worker_processes_too(self, make: Make, key: str) -> None:
        replica = make(executor="processpool", max_workers=1)
        replica.run_at(note, key)
        replica.one(EVENT_JOB_EXECUTED, key)
        told = submissions_and_grants(replica, key)
        assert told == [EVENT_JOB_SUBMITTED, EVENT_TASK_LOCK_GRANTED]

    def test_and_when_it_is_missed(self, make: Make, key: str) -> None:
        replica = make()
        replica.run_at(note, key, after=-300, misfire_grace_time=60)
        replica.one(EVENT_JOB_MISSED, key)
        assert submissions_and_grants(replica, key) == [EVENT_JOB_SUBMITTED]


class TestBatches:
    def test_many_that_are_missed_are_moved_on_together(self, make: Make, key: str) -> None:
        replica, counts = make(max_workers=2), []
        rows = replica.store.user.database.jobs
        move_on = rows.move_on

        def count_and_move(cursor: Any, moves: Any, **options: Any) -> set[str]:
            counts.append(len(moves))
            return move_on(cursor, moves, **options)

        rows.move_on = count_and_move
        replica.scheduler.pause()
        for number in range(300):
            given = {"id": f"{key}-{number}", "args": [key], "misfire_grace_time": 60}
            replica.run_at(note, key, after=-300, **given)
        replica.scheduler.resume()
        eventually(lambda: sum(counts) >= 300)
        assert (len(counts) < 15, ran[key]) == (True, [])

    def test_what_fails_is_tried_again_after_a_pause(self, make: Make, key: str) -> None:
        """As where a right is missing: neither the database nor the log is flooded."""
        replica, asked = make(), []

        def fail(attempts: Any, _most: Any, tell: Callable[[Any], object]) -> None:
            asked.append(monotonic())
            tell([(each, TaskLockError("on purpose")) for each in attempts])

        undo = intercept_claims(replica.executor.user.locks, lambda _send: fail)
        replica.run_at(note, key)
        eventually(lambda: len(asked) >= 4)
        undo()
        assert asked[3] - asked[0] > 0.05 + 0.1 + 0.2
        replica.runs(key)


def submissions_and_grants(replica: StoreReplica, key: str) -> list[int]:
    """Return the codes of these events of a job, in their order."""
    told = [e for e in list(replica.events) if getattr(e, "job_id", None) == key]
    wanted = (EVENT_JOB_SUBMITTED, EVENT_TASK_LOCK_GRANTED)
    return [event.code for event in told if event.code in wanted]


class TestDatabase:
    """It is away, or its clock is another one than the replicas'."""

    @pytest.mark.nightly
    def test_away_makes_nothing_late(self, make: Make, key: str, proxy: Proxy) -> None:
        replica = make(database=proxy.url)
        replica.run_at(note, key, after=1, misfire_grace_time=2)
        proxy.accepting = False
        proxy.cut_all()
        refused = proxy.refused
        due_at = monotonic() + 1
        eventually(lambda: monotonic() > due_at + 3 and proxy.refused > refused)
        proxy.accepting = True
        replica.runs(key)
        assert EVENT_JOB_MISSED not in replica.codes(key)

    @pytest.mark.nightly
    def test_away_from_mid_run_on_it_costs_no_run_time_that_came_after_the_run(
        self, make: Make, key: str, proxy: Proxy, gate: Gate
    ) -> None:
        replica = make(database=proxy.url, max_factor=1000)
        given = {"misfire_grace_time": None, "coalesce": False}
        replica.scheduler.add_job(
            note_and_wait, "interval", seconds=0.5, args=[key], id=key, next_run_time=now(), **given
        )
        replica.runs(key)
        proxy.accepting = False
        proxy.cut_all()
        gate.open()
        ended = now()
        eventually(lambda: now() > ended + timedelta(seconds=3) and proxy.refused)
        proxy.accepting = True
        times = [run_time for run_time, *_ in replica.runs(key, 8)]
        assert times[1] <= ended + timedelta(seconds=1)
        steps = {after - before for before, after in pairwise(times[1:])}
        assert steps == {timedelta(seconds=0.5)}

    @pytest.mark.nightly
    def test_away_nothing_fires_and_no_thread_ends_and_then_all_goes_on(
        self, make: Make, key: str, proxy: Proxy, caplog: pytest.LogCaptureFixture
    ) -> None:
        replica = make(database=proxy.url)
        replica.scheduler.add_job(
            note,
            "interval",
            seconds=1,
            args=[key],
            id=key,
            next_run_time=now(),
            misfire_grace_time=None,
        )
        replica.runs(key)
        proxy.accepting = False
        proxy.cut_all()
        with pytest.raises(TaskLockDatabaseError):
            replica.scheduler.get_job(key)
        replica.idle()
        count, refused = len(ran[key]), proxy.refused
        eventually(lambda: proxy.refused >= refused + 10)
        assert len(ran[key]) == count
        assert replica.executor.health().live
        proxy.accepting = True
        replica.runs(key, count + 1)

    def test_away_a_users_call_fails_within_some_seconds_and_adds_nothing_twice(
        self,
        make: Make,
        key: str,
        proxy: Proxy,
        connection: Connection,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        replica = make(database=proxy.url, timings=PATIENT)
        replica.scheduler.get_jobs()

        def is_carried_out() -> bool:
            with pytest.raises(TaskLockDatabaseError):
                replica.run_at(note, key, after=3600)
            # A slow machine may let the call's time pass before it is sent.
            return job_row(connection, key) is not None

        # Carried out, and the answer lost.
        proxy.to_client = lambda data: None if job_row(connection, key) else data
        with monkeypatch.context() as patching:
            patching.setattr(replica.store, "timings", Timings())
            eventually(is_carried_out)
        proxy.to_client = pass_on
        eventually(lambda: job_of(replica, key))
        with pytest.raises(ConflictingIdError):
            replica.run_at(note, key, after=3600)

    def test_away_calls_that_follow_one_that_failed_do_not_wait_as_well(
        self, make: Make, key: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replica = make(database=proxy.url, timings=PATIENT)
        replica.scheduler.get_jobs()
        monkeypatch.setattr(replica.store, "timings", Timings())
        proxy.accepting = False
        proxy.cut_all()
        for _ in range(100):  # each of them would try for two seconds
            with pytest.raises(TaskLockDatabaseError):
                replica.scheduler.get_job(key)

    def test_away_at_the_start_it_is_started_again_and_runs_each_job_once(
        self, make: Make, key: str, proxy: Proxy
    ) -> None:
        replica = make(start=False, database=proxy.url)
        keys = [f"{key}-{number}" for number in range(8)]
        for each in keys:
            replica.run_at(note, each)
        proxy.accepting = False
        with pytest.raises(TaskLockDatabaseError):
            replica.start()
        proxy.accepting = True

        def starts() -> bool:
            with suppress(TaskLockDatabaseError):
                replica.start()
                return True
            return False

        eventually(starts)

        def threads() -> list[str]:
            names = [thread.name for thread in threading.enumerate()]
            return [name for name in names if name == "tasklock"]

        # The thread of a start that failed ends when its connection is closed.
        eventually(lambda: threads() == ["tasklock"], instead=threads)
        for each in keys:
            replica.runs(each)
            assert len(ran[each]) == 1

    def test_a_call_whose_answer_was_lost_is_no_conflict(
        self, make: Make, key: str, proxy: Proxy
    ) -> None:
        replica = make(database=proxy.url, timings=PATIENT)
        replica.scheduler.get_jobs()
        lost = threading.Event()

        def lose_once(data: bytes) -> bytes | None:
            if key.encode() in data and not lost.is_set():
                lost.set()
                return None
            return data

        proxy.to_client = lose_once
        replica.run_at(note, key, after=3600)
        assert lost.is_set()
        assert [job.id for job in replica.scheduler.get_jobs()] == [key]

    @pytest.mark.nightly
    def test_a_claim_that_is_never_answered_is_run_all_the_same_and_once(
        self, make: Make, key: str, proxy: Proxy, connection: Connection
    ) -> None:
        """Without failover, too: its job never began, and it has moved on."""
        one_off, other = f"{key}-once", make(poll_interval=0.3)
        replica = make(database=proxy.url, claim_timeout=1, lease=30)
        other.scheduler.pause()
        claimed = threading.Event()

        def lose(data: bytes) -> bytes | None:
            if claimed.is_set() or connection.execute("SELECT FROM task_lock").rowcount:
                claimed.set()
                proxy.accepting = False
                return None
            return data

        proxy.to_client = lose
        replica.run_at(note, one_off, args=[one_off])
        replica.one(EVENT_TASK_LOCK_ERROR, one_off)
        row = job_row(connection, one_off)
        assert row is not None
        assert (ran[one_off], row["ended"]) == ([], True)
        other.scheduler.resume()
        proxy.to_client, proxy.accepting = pass_on, True
        other.runs(one_off)
        eventually(lambda: job_row(connection, one_off) is None)
        assert len(ran[one_off]) == 1

    @pytest.mark.direct("pgbouncer's connections are older than the setting")
    @pytest.mark.parametrize("offset", ["-1 hour", "1 hour"])
    def test_another_clock_than_the_replicas_decides_when_it_is_due(
        self, make: Make, key: str, connection: Connection, offset: str
    ) -> None:
        replica = make(start=False)
        hours = set_clock(connection, offset)
        replica.start()
        due = now() + timedelta(hours=hours)
        given = {"hours": 3, "misfire_grace_time": 60}
        for job_id, first in ((key, due + timedelta(minutes=10)), (f"{key}-other", due)):
            replica.scheduler.add_job(
                note, "interval", args=[job_id], id=job_id, next_run_time=first, **given
            )
        replica.runs(f"{key}-other")
        assert ran[key] == []
        replica.scheduler.modify_job(key, next_run_time=due)
        replica.runs(key)
        late = (now() + timedelta(hours=hours) - due).total_seconds()
        assert 0 <= late < 30
        assert ran[key][0][0] == due

    @pytest.mark.direct("pgbouncer's connections are older than the setting")
    @pytest.mark.parametrize("offset", ["-1 hour", "1 hour"])
    def test_another_clock_than_the_replicas_decides_when_it_is_due_next(
        self, make: Make, key: str, connection: Connection, offset: str
    ) -> None:
        hours = set_clock(connection, offset)
        replica = make()

        def seconds_until(job: Any) -> float:
            until: timedelta = job.next_run_time - now() - timedelta(hours=hours)
            return until.total_seconds()

        def add(**interval: Any) -> Any:
            options = {"args": [key], "id": key, "replace_existing": True, **interval}
            return replica.scheduler.add_job(note, "interval", **options)

        start = datetime(2026, 1, 1, tzinfo=timezone.utc)
        assert 240 < seconds_until(add(minutes=5)) <= 300
        assert 0 < seconds_until(add(minutes=7, start_date=start)) <= 420
        assert (
            240
            < seconds_until(replica.scheduler.reschedule_job(key, trigger="interval", minutes=5))
            <= 300
        )
        replica.scheduler.pause_job(key)
        assert 0 < seconds_until(replica.scheduler.resume_job(key)) <= 300
        # What is given is not computed.
        given = now() + timedelta(minutes=90)
        assert add(minutes=7, next_run_time=given).next_run_time == given
        replica.scheduler.modify_job(key, next_run_time=given + timedelta(minutes=1))
        assert replica.scheduler.get_job(key).next_run_time == given + timedelta(minutes=1)

    @pytest.mark.nightly
    @pytest.mark.direct("pgbouncer's connections are older than the setting")
    def test_a_takeover_has_the_run_time_of_another_clock(
        self, make: Make, key: str, proxy: Proxy, connection: Connection
    ) -> None:
        hours = set_clock(connection, "1 hour")
        other = make(poll_interval=0.3, failover=True)
        other.scheduler.pause()
        replica = make(database=proxy.url, claim_timeout=1, lease=2, failover=True)

        claimed: list[int] = []

        def lose(data: bytes) -> bytes | None:
            query = (
                "SELECT token FROM task_lock WHERE started_at IS NOT NULL AND finished_at IS NULL"
            )
            if row := connection.execute(query).fetchone():
                proxy.accepting = False
                claimed.append(row[0])
                return None
            return data

        proxy.to_client = lose
        due = now() + timedelta(hours=hours)
        options = {"args": [key], "id": key, "next_run_time": due}
        replica.scheduler.add_job(note, "interval", hours=3, **options)
        eventually(lambda: claimed)
        other.scheduler.resume()
        run_time, token, _ = other.runs(key)[0]
        assert (run_time, token) == (due, LaterThan(claimed[0]))


class TestReads:
    """What is read is nobody's until it is claimed."""

    def test_a_drained_replica_reads_nothing(
        self, make: Make, key: str, database_url: str, connection: Connection
    ) -> None:
        drained = make()
        drained.scheduler.add_executor(TaskLockExecutor(database_url), "other")
        assert drained.executor.drain(5)
        drained.run_at(note, key)
        drained.run_at(note, f"{key}-other", args=[f"{key}-other"], executor="other", after=0.2)
        drained.runs(f"{key}-other")
        assert ran[key] == []
        make().runs(key)

    def test_what_waits_for_a_worker_here_is_run_where_one_is_free(
        self, make: Make, key: str, gate: Gate
    ) -> None:
        replica = make(max_workers=2)
        wait_for_a_worker(replica, key, gate)
        make().runs(key)
        gate.open()
        replica.idle()
        assert len(ran[key]) == 1

    @pytest.mark.parametrize("is_free", [False, True])
    def test_what_waits_for_a_worker_is_not_run_where_the_executor_is_drained(
        self, is_free: bool, make: Make, key: str, gate: Gate
    ) -> None:
        """Whether its worker becomes free or not."""
        drained = make(max_workers=2)
        wait_for_a_worker(drained, key, gate)
        drained.executor.drain(0)
        if is_free:
            gate.open()
        make().runs(key)
        gate.open()
        drained.idle()
        assert len(ran[key]) == 1

    def test_nor_where_the_scheduler_is_paused(self, make: Make, key: str, gate: Gate) -> None:
        replica = make(max_workers=2)
        wait_for_a_worker(replica, key, gate)
        replica.scheduler.pause()
        gate.open()
        replica.idle()
        assert ran[key] == []
        make().runs(key)
        assert len(ran[key]) == 1

    def test_what_is_refused_although_it_was_read_is_read_again_a_moment_later(
        self, make: Make, key: str, database_url: str
    ) -> None:
        replica, reads = make(), []
        with closing(TaskLocks(database_url)) as locks, ExitStack() as held:

            def hold(found: DueRows) -> None:
                if any(each.row.id == key for each in found.jobs):
                    reads.append(found)
                    if len(reads) == 1:
                        held.enter_context(locks.hold(key, min_lock=0, max_lock=60))

            after_each_read(replica, hold)
            replica.run_at(note, key)
            refused = replica.one(EVENT_TASK_LOCK_REFUSED, key)
            assert (refused.reason, ran[key]) == ("running", [])
            held.close()
            replica.runs(key)
        assert len(reads) == 2

    def test_a_scheduler_that_is_blocked_keeps_none_from_running(
        self, make: Make, key: str
    ) -> None:
        """As by another job store that hangs."""
        replica, other = make(), make(start=False)
        other.scheduler.start(paused=True)
        with jobs_lock(replica.scheduler):
            other.run_at(note, key)
            replica.runs(key)

    def test_what_is_read_during_a_shutdown_is_run_by_others(self, make: Make, key: str) -> None:
        replica, began = make(), threading.Event()

        def wait_for_shutdown(found: DueRows) -> None:
            if found.jobs:
                began.set()
                eventually(lambda: replica.store.user.closed)

        after_each_read(replica, wait_for_shutdown)
        replica.run_at(note, key)
        assert began.wait(60)
        replica.shutdown()
        assert ran[key] == []
        make().runs(key)

    def test_after_a_restart_of_the_scheduler_it_goes_on(self, make: Make, key: str) -> None:
        replica = make()
        replica.run_at(note, key)
        replica.runs(key)
        replica.shutdown()
        replica.scheduler.start()
        replica.run_at(note, key)
        replica.runs(key, 2)


class TestOperators:
    def test_see_a_job_that_was_added_and_can_have_it_run_by_hand(
        self, make: Make, key: str, database_url: str, connection: Connection
    ) -> None:
        replica = make(poll_interval=0.3)
        replica.scheduler.add_job(note, "cron", year=2099, args=[key], id=key)
        locks = TaskLocks(database_url)
        try:
            [task] = eventually(locks.tasks)
            assert (task.name, task.due_at.year) == (key, 2099)
            eventually(lambda: any(key in seen.tasks for seen in locks.replicas()))
            before = job_row(connection, key)
            locks.request_run(key)
            replica.runs(key)
            [run] = eventually(lambda: ended_runs(locks, key))
            assert run.kind == "manual"
            assert job_row(connection, key) == before
        finally:
            locks.close()


def test_every_replica_has_a_recurring_job_whoever_has_added_it(
    make: Make, key: str, database_url: str
) -> None:
    """So it is neither gone when that replica stops, nor without anybody to run it by hand."""
    often = replace(PATIENT, report_interval=0.1)
    adding, other = (
        make(replica_id=name, poll_interval=0.3, timings=often) for name in ("adding", "other")
    )
    other.scheduler.add_job(note, "cron", year=2099, args=["other"], id=f"{key}-other")
    adding.scheduler.add_job(note, "cron", year=2099, args=[key], id=key)
    later = now() + timedelta(days=1)
    adding.scheduler.add_job(note, "date", run_date=later, args=["once"], id=f"{key}-once")
    with closing(TaskLocks(database_url)) as locks:

        def tasks() -> list[list[str]]:
            return [list(seen.tasks) for seen in locks.replicas() if seen.alive]

        eventually(lambda: tasks() == [[key, f"{key}-other"]] * 2)
        adding.shutdown()
        eventually(lambda: tasks() == [[key, f"{key}-other"]])
        [task] = eventually(lambda: locks.tasks(key))
        assert (task.gone, task.due_at.year) == (False, 2099)
        locks.request_run(key)
        other.runs(key)
        other.scheduler.remove_job(key)
        eventually(lambda: locks.tasks(key)[0].gone)


def test_a_change_of_a_replica_that_runs_nothing_is_registered_by_those_that_do(
    make: Make, key: str, database_url: str
) -> None:
    """As of an application whose web processes add jobs, and whose workers run them."""
    web = make(start=False)
    worker = make(poll_interval=0.2, timings=replace(PATIENT, report_interval=0.5))
    web.scheduler.start(paused=True)
    web.scheduler.add_job(note, "cron", year=2099, args=[key], id=key)
    with closing(TaskLocks(database_url)) as locks:

        def due_at() -> datetime | None:
            return locks.tasks()[0].due_at

        eventually(locks.tasks)
        assert eventually(due_at).year == 2099
        web.scheduler.pause_job(key)
        eventually(lambda: due_at() is None)
        web.scheduler.resume_job(key)
        eventually(due_at)
        web.scheduler.modify_job(key, next_run_time=datetime(2222, 1, 1, tzinfo=timezone.utc))
        eventually(lambda: due_at().year == 2222)
        locks.request_run(key)
        worker.runs(key)


def test_a_replica_without_the_function_does_not_say_what_the_task_is(
    make: Make, key: str, database_url: str, connection: Connection
) -> None:
    """The function's decorator may name it."""
    web = make(start=False)
    web.scheduler.start(paused=True)
    web.scheduler.add_job(note, "cron", year=2099, args=[key], id=key)
    elsewhere = {"functions": ["elsewhere."]}
    make(poll_interval=0.1, store=elsewhere, timings=replace(PATIENT, report_interval=0.2))
    seen: set[datetime] = set()

    def reports() -> int:
        seen.update(row[0] for row in connection.execute("SELECT seen_at FROM task_lock_replica"))
        return len(seen)

    eventually(lambda: reports() >= 4)
    with closing(TaskLocks(database_url)) as locks:
        assert locks.tasks() == []


def test_that_a_job_is_overdue_is_told_also_where_its_function_is_missing(
    make: Make, key: str, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a deployment that has broken its import."""
    before = make()
    before.scheduler.add_job(note, "cron", year=2099, args=[key], id=key)
    due = "UPDATE task_lock SET due_at = now() - interval '1 h', overdue_at = now()"
    eventually(lambda: connection.execute(due).rowcount)
    before.shutdown()
    make(poll_interval=0.2, store={"functions": ["elsewhere."]})
    line = f"Task {key!r} is overdue"
    eventually(lambda: [each for each in caplog.messages if each.startswith(line)])


def test_a_job_whose_trigger_is_pickled_comes_again_too(make: Make, key: str) -> None:
    replica = make(store={"serializer": "pickle", "secret": "a secret of ours"})
    replica.scheduler.add_job(note, OwnTrigger(hour=3), args=[key], id=key)
    replica.run_at(note, f"{key}-once", after=3600)
    assert [task.job_id for task in replica.store.shared_jobs.recurring_tasks()] == [key]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "change",
    [
        lambda scheduler, key: scheduler.pause_job(key),
        lambda scheduler, key: scheduler.modify_job(key, misfire_grace_time=7),
        lambda scheduler, key: scheduler.remove_job(key),
        lambda scheduler, key: scheduler.add_job(
            note, "interval", hours=2, args=[key], id=key, replace_existing=True
        ),
    ],
    ids=["pause", "modify", "remove", "replace"],
)
def test_a_change_of_a_locked_row_names_the_lock_and_is_no_outage(
    make: Make,
    key: str,
    database_url: str,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Any, str], object],
) -> None:
    replica = make(timings=Timings(call_timeout=5.0))
    replica.scheduler.add_job(note, "interval", hours=1, args=[key], id=key)
    with psycopg.connect(database_url) as blocker:
        blocker.execute("SELECT FROM task_lock_job WHERE id = %s FOR UPDATE", [key])
        with pytest.raises(TaskLockDatabaseError, match="another session has a row of"):
            change(replica.scheduler, key)
    assert "unavailable" not in caplog.text
    change(replica.scheduler, key)


@pytest.mark.nightly
def test_an_event_loop_is_not_held_up_while_the_database_does_not_answer(
    proxy: Proxy, key: str
) -> None:
    """The longest time between two steps of the loop is shown if it is too long."""

    async def longest_step() -> float:
        scheduler = AsyncIOScheduler(
            jobstores={"default": TaskLockJobStore(proxy.url, functions=["tests."])},
            executors={"default": TaskLockExecutor(proxy.url, claim_timeout=3)},
        )
        scheduler.start()
        scheduler.add_job(
            note_on_the_loop, "interval", seconds=0.2, args=[key], id=key, misfire_grace_time=None
        )
        held = threading.Event()
        loop = asyncio.get_running_loop()
        try:
            while not ran[key]:
                await asyncio.sleep(0.01)
            proxy.to_server = lambda data: data if held.wait(60) else None
            longest, end = 0.0, loop.time() + 4
            while (before := loop.time()) < end:
                await asyncio.sleep(0.005)
                longest = max(longest, loop.time() - before)
            return longest
        finally:
            held.set()
            proxy.to_server = pass_on
            await asyncio.to_thread(held.wait)
            scheduler.shutdown()

    # A second: any wait for an answer takes as long. What it is to be is measured elsewhere.
    assert asyncio.run(longest_step()) < 1.0


@pytest.mark.nightly
def test_a_replica_whose_event_loop_was_closed_takes_no_more_jobs_and_says_so_once(
    make: Make, key: str, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As of an application that ends its loop without a shutdown, and goes on."""
    store = store_class(Timings())(database_url, functions=["tests."])
    executor = TaskLockExecutor(database_url)
    scheduler = AsyncIOScheduler(jobstores={"default": store}, executors={"default": executor})

    async def start() -> None:
        scheduler.start()
        scheduler.add_job(note, "date", args=[f"{key}-0"], id=f"{key}-0", misfire_grace_time=None)
        while not ran[f"{key}-0"]:
            await asyncio.sleep(0.01)

    loop = abandoned_loop()
    loop.run_until_complete(start())
    loop.close()
    eventually(lambda: "runs no more jobs here" in caplog.text)
    other = make(start=False)
    for number in range(1, 6):
        other.run_at(note, f"{key}-{number}")
    other.start()
    for number in range(1, 6):
        other.runs(f"{key}-{number}")
    store.shutdown()
    abandon(executor)
    assert caplog.text.count("runs no more jobs here") == 1
    assert "Traceback" not in caplog.text


def test_a_run_time_that_was_set_right_before_another_has_the_maximum_lock_of_others(
    make: Make, key: str, connection: Connection
) -> None:
    replica, at = make(), now() + timedelta(minutes=2)
    daily = {"hour": at.hour, "minute": at.minute, "timezone": "UTC"}
    replica.scheduler.add_job(note, "cron", args=[key], id=key, **daily)
    replica.scheduler.modify_job(key, next_run_time=now())
    replica.runs(key)
    lock = "SELECT run_until - started_at FROM task_lock WHERE task_name = %s"
    assert connection.execute(lock, [key]).fetchone() == (timedelta(days=5),)
