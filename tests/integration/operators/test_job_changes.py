"""What operators change of stored jobs: ``TaskLocks.pause_job()``, ``jobs pause`` and the like."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from apscheduler.triggers.combining import AndTrigger
from apscheduler.triggers.cron import CronTrigger
from psycopg import sql

from apscheduler_tasklock import (
    JobState,
    JobStatus,
    TaskLockDatabaseError,
    TaskLockNotFoundError,
    TaskLockOptionError,
    TaskLocks,
    TaskLockStateError,
    TaskState,
)
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.job_changes import JobChanges
from apscheduler_tasklock._lock.job_rows import JobRow
from tests.support.claims import ended_runs
from tests.support.commands import Command, PatientTaskLocks
from tests.support.polling import eventually
from tests.support.roles import role
from tests.support.rows import add_job, add_task
from tests.support.schedulers import NO_DATABASE
from tests.support.stored_jobs import Gate, OwnTrigger, StoreReplica, note, note_and_wait, ran
from tests.support.waist import LockClient

Connection = psycopg.Connection[Any]

UTC = timezone.utc
LATER = datetime(2100, 1, 1, tzinfo=UTC)
BERLIN = CronTrigger(hour=3, timezone="Europe/Berlin")
# Without a notification, a replica would read the jobs next after an hour.
NEVER_LOOKS = {"poll_interval": 3600}
# A JSON document that PostgreSQL stores, and that Python does not read.
TOO_MANY_DIGITS = '{"type": ' + "9" * 5000 + "}"


@pytest.fixture
def operator(make_task_locks: Callable[..., TaskLocks]) -> TaskLocks:
    return make_task_locks(replica_id="operator")


@pytest.fixture
def start_replica(database_url: str) -> Iterator[Callable[..., StoreReplica]]:
    with ExitStack() as closing:

        def make(**options: Any) -> StoreReplica:
            replica = StoreReplica(database_url, **options)
            closing.callback(replica.shutdown)
            replica.start()
            return replica

        yield make


def is_reported(operator: TaskLocks) -> bool:
    """Return whether there is one task, and a replica has reported that it has the task."""
    names = [task.name for task in operator.tasks()]
    return len(names) == 1 and any(names[0] in seen.tasks for seen in operator.replicas())


@pytest.fixture
def replica(start_replica: Callable[..., StoreReplica]) -> StoreReplica:
    return start_replica(replica_id="web-1")


@pytest.fixture
def key() -> str:
    return f"job-{uuid4().hex[:8]}"


def add(replica: StoreReplica, *job_ids: str, **options: Any) -> None:
    for job_id in job_ids:
        given = {"args": [job_id], "id": job_id, "run_date": LATER, **options}
        replica.scheduler.add_job(note, "date", **given)


def set_columns(connection: Connection, job_id: str, **columns: Any) -> None:
    for name, value in columns.items():
        change = sql.SQL("UPDATE task_lock_job SET {} = %s WHERE id = %s")
        connection.execute(change.format(sql.Identifier(name)), [value, job_id])


def one(operator: TaskLocks, job_id: str) -> JobStatus:
    [job] = operator.jobs(job_id)
    return job


def has_read(connection: Connection) -> bool:
    """Return whether a replica that was just started reads no more jobs by itself."""
    idle = """
        SELECT bool_and(state = 'idle' AND state_change < clock_timestamp() - interval '1 second')
        FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()
              AND backend_type = 'client backend'
    """
    [[is_idle]] = connection.execute(idle).fetchall()
    return bool(is_idle)


def states(operator: TaskLocks) -> dict[str, str]:
    return {job.id: job.state.value for job in operator.jobs()}


@pytest.mark.direct("a pooler passes no notifications on")
class TestReplicasSeeItAtOnce:
    def test_a_job_that_is_moved(
        self,
        start_replica: Callable[..., StoreReplica],
        operator: TaskLocks,
        connection: Connection,
        key: str,
    ) -> None:
        replica = start_replica(store=NEVER_LOOKS)
        add(replica, key)
        eventually(lambda: has_read(connection))
        operator.move_job(key, datetime.now(UTC))
        [(run_time, _, _)] = replica.runs(key)
        assert run_time < LATER

    def test_a_job_that_is_resumed_after_its_date(
        self,
        start_replica: Callable[..., StoreReplica],
        operator: TaskLocks,
        connection: Connection,
        key: str,
    ) -> None:
        replica = start_replica(store=NEVER_LOOKS, job_defaults={})
        past = datetime.now(UTC) - timedelta(hours=1)
        add(replica, key, run_date=past, next_run_time=None)
        eventually(lambda: has_read(connection))
        assert operator.resume_job(key).next_run_time == past
        replica.runs(key)

    def test_a_one_off_job_that_is_run(
        self,
        start_replica: Callable[..., StoreReplica],
        operator: TaskLocks,
        connection: Connection,
        key: str,
    ) -> None:
        replica = start_replica(store=NEVER_LOOKS)
        add(replica, key, next_run_time=None)
        eventually(lambda: has_read(connection))
        assert operator.run_job(key) is None
        replica.runs(key)
        assert [job.state for job in operator.jobs()] in ([JobState.ENDED], [])

    def test_jobs_that_are_paused_or_removed(
        self, start_replica: Callable[..., StoreReplica], operator: TaskLocks, key: str
    ) -> None:
        replica = start_replica(store=NEVER_LOOKS)
        for name in (f"{key}-paused", f"{key}-removed"):
            every = {"seconds": 0.1, "args": [name], "id": name, "misfire_grace_time": None}
            replica.scheduler.add_job(note, "interval", **every)
            replica.runs(name)
        operator.pause_job(f"{key}-paused")
        operator.remove_job(f"{key}-removed")
        counts = {name: len(ran[name]) for name in (f"{key}-paused", f"{key}-removed")}
        replica.run_at(note, key, after=1.0)
        replica.runs(key)
        for name, count in counts.items():  # a run that was claimed before may still have begun
            assert len(ran[name]) <= count + 1
        assert one(operator, f"{key}-paused").state is JobState.PAUSED
        assert operator.jobs(f"{key}-removed") == []


class TestPause:
    def test_users_see_the_job_paused_and_can_resume_it(
        self, replica: StoreReplica, operator: TaskLocks, key: str
    ) -> None:
        add(replica, key)
        operator.pause_job(key)
        assert one(operator, key).state is JobState.PAUSED
        assert replica.scheduler.get_job(key).next_run_time is None
        replica.scheduler.resume_job(key)
        assert one(operator, key).next_run_time == LATER

    def test_a_paused_job_is_not_written_again(
        self, replica: StoreReplica, operator: TaskLocks, connection: Connection, key: str
    ) -> None:
        add(replica, key, next_run_time=None)
        version = "SELECT version, changed_at FROM task_lock_job"
        before = connection.execute(version).fetchone()
        operator.pause_job(key)
        assert connection.execute(version).fetchone() == before


class TestResume:
    def test_the_next_run_time_is_the_triggers_first_one_from_now_on(
        self, replica: StoreReplica, operator: TaskLocks, connection: Connection, key: str
    ) -> None:
        replica.scheduler.add_job(note, BERLIN, args=[key], id=key, next_run_time=None)
        set_columns(connection, key, func="gone.away:send")  # no function is imported
        now = datetime.now(UTC)
        first = operator.resume_job(key).next_run_time
        assert first in {BERLIN.get_next_fire_time(None, at) for at in (now, datetime.now(UTC))}
        assert one(operator, key).next_run_time == first

    def test_a_job_that_is_not_paused_is_not_changed(
        self, replica: StoreReplica, operator: TaskLocks, key: str
    ) -> None:
        moved = LATER + timedelta(days=1)
        add(replica, key, next_run_time=moved)
        assert operator.resume_job(key).next_run_time == moved
        assert one(operator, key).next_run_time == moved

    def test_a_job_without_a_further_run_time_stays_paused(
        self, replica: StoreReplica, operator: TaskLocks, key: str
    ) -> None:
        yesterday = datetime.now(UTC) - timedelta(days=1)
        over = {"hours": 1, "start_date": yesterday - timedelta(days=1), "end_date": yesterday}
        replica.scheduler.add_job(note, "interval", args=[key], id=key, next_run_time=None, **over)
        with pytest.raises(TaskLockStateError, match=r"no run time from now on; .*jobs move"):
            operator.resume_job(key)
        assert one(operator, key).state is JobState.PAUSED

    def test_a_search_for_a_run_time_has_a_limit(
        self, replica: StoreReplica, operator: TaskLocks, key: str
    ) -> None:
        never = AndTrigger(
            [CronTrigger(hour=3, timezone="UTC"), CronTrigger(hour=4, timezone="UTC")]
        )
        replica.scheduler.add_job(note, never, args=[key], id=key, next_run_time=None)
        with pytest.raises(TaskLockStateError, match="do not agree"):
            operator.resume_job(key)

    def test_what_a_user_does_meanwhile_wins(
        self, replica: StoreReplica, make_locks: Callable[..., LockClient], key: str
    ) -> None:
        add(replica, key, next_run_time=None)
        moved = LATER + timedelta(days=1)

        def computed(row: JobRow, now: datetime) -> datetime:
            replica.scheduler.modify_job(key, next_run_time=moved)
            return LATER

        assert JobChanges(make_locks().database, "ann").resume(key, computed).next_run_time == moved

    def test_an_other_change_meanwhile_stays(
        self, replica: StoreReplica, make_locks: Callable[..., LockClient], key: str
    ) -> None:
        add(replica, key, next_run_time=None)

        def computed(row: JobRow, now: datetime) -> datetime:
            if row.version == 1:
                replica.scheduler.modify_job(key, name="another")
            return LATER

        assert JobChanges(make_locks().database, "ann").resume(key, computed).next_run_time == LATER
        job = replica.scheduler.get_job(key)
        assert (job.name, job.next_run_time) == ("another", LATER)


class TestRun:
    @pytest.mark.nightly
    def test_a_recurring_job_runs_once_and_keeps_its_schedule(
        self, replica: StoreReplica, operator: TaskLocks, key: str
    ) -> None:
        replica.scheduler.add_job(note, BERLIN, args=[key], id=key)
        before = one(operator, key)
        eventually(lambda: is_reported(operator))
        request = operator.run_job(key, by="alice")
        assert request is not None
        assert (request.task, request.requested_by) == (before.task, "alice")
        assert len(replica.runs(key)) == 1
        eventually(lambda: [run.kind for run in ended_runs(operator, before.task)] == ["manual"])
        assert one(operator, key) == replace(before, has_replica=True, has_task=True)

    @pytest.mark.nightly
    def test_a_paused_recurring_job_runs_and_stays_paused(
        self, replica: StoreReplica, operator: TaskLocks, key: str
    ) -> None:
        replica.scheduler.add_job(note, BERLIN, args=[key], id=key)
        eventually(lambda: is_reported(operator))
        operator.pause_job(key)
        operator.run_job(key)
        replica.runs(key)
        assert one(operator, key).state is JobState.PAUSED

    def test_a_job_whose_task_no_replica_has_is_an_error(
        self, replica: StoreReplica, operator: TaskLocks, connection: Connection, key: str
    ) -> None:
        elsewhere = {"args": [key], "id": key, "executor": "elsewhere"}
        replica.scheduler.add_job(note, BERLIN, **elsewhere)
        for task in (None, "elsewhere"):
            set_columns(connection, key, task_name=task)
            with pytest.raises(TaskLockStateError, match=r"no (live )?replica has "):
                operator.run_job(key)
        set_columns(connection, key, trigger=TOO_MANY_DIGITS)
        with pytest.raises(TaskLockStateError, match="its row cannot be read"):
            operator.run_job(key)


class TestMove:
    def test_a_paused_job_is_resumed(
        self, replica: StoreReplica, operator: TaskLocks, key: str
    ) -> None:
        replica.scheduler.add_job(note, BERLIN, args=[key], id=key, next_run_time=None)
        operator.move_job(key, LATER)
        assert replica.scheduler.get_job(key).next_run_time == LATER

    def test_a_time_without_a_zone_is_an_error(self) -> None:
        with (
            TaskLocks(NO_DATABASE) as operator,
            pytest.raises(TaskLockOptionError, match="move_job: to must be a time with a zone"),
        ):
            operator.move_job("job", datetime(2100, 1, 2))  # the mistake under test


def changes(operator: TaskLocks, job_id: str) -> list[Callable[[], object]]:
    return [
        lambda: operator.pause_job(job_id),
        lambda: operator.resume_job(job_id),
        lambda: operator.run_job(job_id),
        lambda: operator.move_job(job_id, LATER),
        lambda: operator.remove_job(job_id),
    ]


@pytest.mark.parametrize("job_id", ["none", "n*ne", "a\0b"])
def test_a_job_that_there_is_not_is_an_error(
    replica: StoreReplica, operator: TaskLocks, job_id: str
) -> None:
    add(replica, "other")
    for change in changes(operator, job_id):
        with pytest.raises(TaskLockNotFoundError, match="no such job"):
            change()
    assert states(operator) == {"other": "waiting"}


@pytest.mark.nightly
def test_a_job_that_has_ended_is_not_changed(
    replica: StoreReplica, operator: TaskLocks, command: Command, key: str
) -> None:
    gate = Gate(key)
    try:
        replica.run_at(note_and_wait, key)
        replica.runs(key)
        for change in changes(operator, key):
            with pytest.raises(TaskLockStateError, match="has ended"):
                change()
        assert command("jobs pause", key).status == 4
        assert command("jobs pause", f"{key}*").status == 3
        assert states(operator) == {key: "ended"}
    finally:
        gate.open()
    eventually(lambda: operator.jobs() == [])
    assert len(ran[key]) == 1


@pytest.mark.parametrize(
    "trigger", ['{"pickle": "gASVAAA="}', '{"type": "moonrise"}', "[]", TOO_MANY_DIGITS]
)
def test_an_unreadable_job_can_be_paused_moved_and_removed(
    replica: StoreReplica, operator: TaskLocks, connection: Connection, key: str, trigger: str
) -> None:
    add(replica, key)
    set_columns(connection, key, trigger=trigger, arguments="[]", options="[]")
    operator.pause_job(key)
    with pytest.raises(TaskLockStateError, match=rf"{key}' is not resumed: its run times are unk"):
        operator.resume_job(key)
    operator.move_job(key, LATER)
    assert one(operator, key).next_run_time == LATER
    operator.remove_job(key)
    assert operator.jobs() == []


def test_signed_and_pickled_jobs_run_after_they_were_steered(
    start_replica: Callable[..., StoreReplica], operator: TaskLocks, key: str
) -> None:
    replica = start_replica(store={"secret": "s" * 16, "serializer": "pickle"})
    own = OwnTrigger(hour=3, timezone="UTC")
    add(replica, key, next_run_time=None)
    replica.scheduler.add_job(note, own, args=[f"{key}-own"], id=f"{key}-own")
    operator.pause_job(f"{key}-own")
    assert operator.resume_job(key).next_run_time == LATER
    for name in (key, f"{key}-own"):
        operator.move_job(name, datetime.now(UTC))
        replica.runs(name)
    assert one(operator, f"{key}-own").state is JobState.WAITING


def test_a_locked_row_is_said(
    replica: StoreReplica,
    connection: Connection,
    make_task_locks: Callable[..., TaskLocks],
    key: str,
) -> None:
    add(replica, key)
    operator = make_task_locks(replica_id="operator", claim_timeout=1)
    with connection.transaction():
        connection.execute("SELECT FROM task_lock_job FOR UPDATE")

        def said() -> str:
            with pytest.raises(TaskLockDatabaseError) as raised:
                operator.pause_job(key)
            return str(raised.value)

        # On a slow machine an answer may come later than this client waits for it.
        eventually(lambda: "a row of task_lock_job locked" in said(), instead=said)


def actions(operator: TaskLocks, task: str | None) -> list[tuple[str, str | None, str | None]]:
    """Return what operators did with a task, the oldest first."""
    assert task is not None
    entries = operator.runs(task, kind="operator")
    return [(each.outcome, each.by, each.reason) for each in reversed(entries)]


class TestHistory:
    def test_what_operators_do_is_in_it(
        self, replica: StoreReplica, operator: TaskLocks, key: str
    ) -> None:
        replica.scheduler.add_job(note, BERLIN, args=[key], id=key)
        eventually(lambda: is_reported(operator))
        task = one(operator, key).task
        operator.pause_job(key, by="ann")
        operator.pause_job(key, by="bob")  # which changes nothing
        first = operator.resume_job(key, by="bob").next_run_time
        assert first is not None
        operator.move_job(key, LATER, by="carl")
        operator.run_job(key, by="dan")
        operator.remove_job(key, by="eve")
        due = f"next run time {first.astimezone(UTC):%Y-%m-%d %H:%M:%S UTC}"
        assert actions(operator, task) == [
            ("job-paused", "ann", None),
            ("job-resumed", "bob", due),
            ("job-moved", "carl", "next run time 2100-01-01 00:00:00 UTC"),
            ("run", "dan", None),
            ("job-removed", "eve", None),
        ]

    def test_what_the_application_does_is_not(
        self, replica: StoreReplica, operator: TaskLocks, key: str
    ) -> None:
        replica.scheduler.add_job(note, BERLIN, args=[key], id=key)
        eventually(lambda: is_reported(operator))
        task = one(operator, key).task
        replica.scheduler.pause_job(key)
        replica.scheduler.resume_job(key)
        replica.scheduler.remove_job(key)
        assert actions(operator, task) == []

    def test_a_one_off_job_that_is_run_in_place_of_its_date_is_in_it(
        self, operator: TaskLocks, connection: Connection, key: str
    ) -> None:
        add_task(connection, "task", one_off="true")
        date = {"type": "date", "run_date": LATER.isoformat(), "timezone": "UTC"}
        add_job(connection, key, task_name="'task'", trigger=f"'{json.dumps(date)}'::jsonb")
        operator.run_job(key, by="ann")
        assert actions(operator, "task") == [("run", "ann", None)]

    def test_a_job_whose_task_has_no_row_is_changed_without_an_entry(
        self, replica: StoreReplica, operator: TaskLocks, connection: Connection, key: str
    ) -> None:
        add(replica, key)
        operator.pause_job(key)
        assert one(operator, key).state is JobState.PAUSED
        assert connection.execute("SELECT FROM task_lock_run").rowcount == 0

    def test_a_locked_row_of_the_task_keeps_nobody_from_pausing_the_job(
        self, replica: StoreReplica, operator: TaskLocks, connection: Connection, key: str
    ) -> None:
        replica.scheduler.add_job(note, BERLIN, args=[key], id=key)
        eventually(lambda: is_reported(operator))
        with connection.transaction():
            connection.execute("SELECT FROM task_lock FOR UPDATE")
            operator.pause_job(key)
        assert one(operator, key).state is JobState.PAUSED

    def test_without_a_right_on_it_jobs_are_changed_all_the_same(
        self,
        replica: StoreReplica,
        operator: TaskLocks,
        direct_url: str,
        connection: Connection,
        key: str,
    ) -> None:
        replica.scheduler.add_job(note, BERLIN, args=[key], id=key)
        eventually(lambda: is_reported(operator))
        with role(direct_url) as (name, url):
            on_all = "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {}"
            connection.execute(sql.SQL(on_all).format(sql.Identifier(name)))
            with PatientTaskLocks(url) as unlucky:
                assert one(unlucky, key).state is JobState.WAITING
                revoke = sql.SQL("REVOKE INSERT ON task_lock_run FROM {}")
                connection.execute(revoke.format(sql.Identifier(name)))
                unlucky.pause_job(key)
                assert one(unlucky, key).state is JobState.PAUSED
                unlucky.remove_job(key)
        assert operator.jobs(key) == []

    @pytest.mark.parametrize("change", ["pause_job", "remove_job"])
    def test_the_task_is_not_due_any_more_although_no_replica_is_there(
        self,
        replica: StoreReplica,
        operator: TaskLocks,
        connection: Connection,
        key: str,
        change: str,
    ) -> None:
        replica.scheduler.add_job(note, BERLIN, args=[key], id=key)
        eventually(lambda: is_reported(operator))
        [name] = [task.name for task in operator.tasks()]
        replica.scheduler.shutdown()
        past = "now() - interval '1 h'"
        connection.execute(f"UPDATE task_lock SET due_at = {past}, overdue_at = {past}")
        assert operator.tasks(name)[0].state is TaskState.OVERDUE
        getattr(operator, change)(key)
        [task] = operator.tasks(name)
        assert (task.due_at, task.overdue_at) == (None, None)
        assert task.state is (TaskState.PAUSED if change == "pause_job" else TaskState.NEW)

    def test_a_change_without_an_entry_does_not_end_its_rejection(
        self,
        replica: StoreReplica,
        operator: TaskLocks,
        database_url: str,
        connection: Connection,
        key: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level("INFO")
        replica.scheduler.add_job(note, BERLIN, args=[key], id=key)
        eventually(lambda: is_reported(operator))
        add(replica, f"{key}-rowless")
        connection.execute("ALTER TABLE task_lock_run ADD CONSTRAINT none CHECK (false) NOT VALID")

        class Unlucky(PatientTaskLocks):
            timings = Timings(longest_answer=60.0, rejected_interval=0.0)

        with Unlucky(database_url) as unlucky:
            unlucky.pause_job(key)
            eventually(lambda: "history: PostgreSQL does not take its entries" in caplog.text)
            unlucky.pause_job(f"{key}-rowless")
            assert "No longer rejected" not in caplog.text
            connection.execute("ALTER TABLE task_lock_run DROP CONSTRAINT none")
            unlucky.remove_job(key)
            eventually(lambda: "No longer rejected" in caplog.text)

    def test_a_name_that_is_too_long_is_an_error(self) -> None:
        with TaskLocks(NO_DATABASE) as operator:
            for change in (operator.pause_job, operator.resume_job, operator.remove_job):
                with pytest.raises(TaskLockOptionError, match="by has 4,001 characters"):
                    change("job", by="x" * 4001)

    def test_commands_tell_it(
        self, command: Command, replica: StoreReplica, operator: TaskLocks, key: str
    ) -> None:
        replica.scheduler.add_job(note, BERLIN, args=[key], id=key)
        eventually(lambda: is_reported(operator))
        task = one(operator, key).task
        assert task is not None
        command("jobs pause", key, "--as", "ann")
        shown = command("show", task).out
        assert "  its job paused by ann until resumed\n" in shown
        story = command("why", task).out
        assert "its job paused by ann until resumed" in story
        command("jobs move", key, "--to", "2100-01-01T00:00:00Z", "--as", "bob")
        moved = "by bob (next run time 2100-01-01 00:00:00 UTC)"
        assert f"its job moved {moved}\n" in command("show", task).out
        [newest, _] = command("runs", task, "--kind", "operator", "--json").json
        assert (newest["outcome"], newest["by"]) == ("job-moved", "bob")
        listed = command("runs", "--outcome", "job-moved").out
        assert moved in listed


WITHOUT_APSCHEDULER = """
import sys
sys.modules["apscheduler"] = None  # as where it is not installed
from apscheduler_tasklock import TaskLocks
from apscheduler_tasklock._database.timings import Timings
TaskLocks.timings = Timings(longest_answer=60.0)  # however slow the machine is
with TaskLocks(sys.argv[1], claim_timeout=180) as locks:
    with locks.hold("job", min_lock=1, max_lock=60):
        pass
    [job] = locks.jobs()
    locks.pause_job(job.id)
    locks.remove_job(job.id)
    print([task.name for task in locks.tasks("job")])
assert not [name for name in sys.modules if name.startswith("apscheduler.")]
"""


def test_all_but_resuming_works_without_apscheduler(
    database_url: str, replica: StoreReplica, operator: TaskLocks, key: str
) -> None:
    add(replica, key)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_APSCHEDULER, database_url],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "['job']\n", "")
    assert operator.jobs(key) == []


# What is said of what is done with a job that has never run.
UNNOTED = " (not in the run history, which its task has from the job's first run on)"


class TestCommand:
    def test_pause_and_resume_take_ids_and_patterns(
        self, command: Command, replica: StoreReplica, operator: TaskLocks
    ) -> None:
        add(replica, "r-1", "r-2", "other", "left")
        answer = command("jobs pause", "other", "r-*", "r-1")
        assert (answer.status, answer.err) == (0, "")
        assert answer.out.splitlines() == [
            f"{name}: paused until it is resumed{UNNOTED}" for name in ("other", "r-1", "r-2")
        ]
        assert [name for name, state in states(operator).items() if state != "paused"] == ["left"]
        answer = command("jobs resume", "r-?", "left")
        assert answer.status == 0
        assert answer.out.splitlines() == [
            f"r-1: resumed, due 2100-01-01T00:00:00Z{UNNOTED}",
            f"r-2: resumed, due 2100-01-01T00:00:00Z{UNNOTED}",
            "left: was not paused",
        ]
        assert [name for name, state in states(operator).items() if state == "paused"] == ["other"]

    def test_run_move_and_remove_say_what_they_do(
        self, command: Command, replica: StoreReplica, operator: TaskLocks
    ) -> None:
        add(replica, "a", next_run_time=None)
        add(replica, "b")
        replica.scheduler.add_job(note, BERLIN, args=["every"], id="every")
        eventually(lambda: is_reported(operator))
        task = one(operator, "every").task
        assert command("jobs run", "every").out == f"every: a run of its task {task} is asked for\n"
        moved = command("jobs move", "a", "--to", "2100-01-02T00:00:00Z").out
        assert moved == f"a: moved to 2100-01-02T00:00:00Z, and no longer paused{UNNOTED}\n"
        moved = command("jobs move", "a", "--to", "2100-01-03T00:00:00Z").out
        assert moved == f"a: moved to 2100-01-03T00:00:00Z{UNNOTED}\n"
        removed = f"a: removed{UNNOTED}\nb: removed{UNNOTED}\n"
        assert command("jobs remove", "a", "b").out == removed
        assert list(states(operator)) == ["every"]
