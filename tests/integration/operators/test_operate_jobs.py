"""What operators see of the job store: ``TaskLocks.jobs()`` and the command ``jobs``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger
from psycopg import sql

from apscheduler_tasklock import JobState, TaskLocks, TaskLockSchemaError
from tests.support.commands import PATIENT, Command, OnTerminal
from tests.support.polling import eventually
from tests.support.roles import role
from tests.support.rows import STAYS_OK, add_job, add_task
from tests.support.stored_jobs import Gate, StoreReplica, note, note_and_wait

Connection = psycopg.Connection[Any]

LATER = datetime(2100, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def operator(make_task_locks: Callable[..., TaskLocks]) -> TaskLocks:
    return make_task_locks(replica_id="operator")


@pytest.fixture
def replica(database_url: str) -> Iterator[StoreReplica]:
    with ExitStack() as closing:
        replica = StoreReplica(database_url, replica_id="web-1")
        closing.callback(replica.shutdown)
        replica.start()
        yield replica


def add(replica: StoreReplica, job_id: str, run_date: datetime = LATER, **options: Any) -> None:
    given = {"args": [job_id], "id": job_id, **options}
    replica.scheduler.add_job(note, "date", run_date=run_date, **given)


def set_columns(connection: Connection, job_id: str, **columns: Any) -> None:
    for name, value in columns.items():
        change = sql.SQL("UPDATE task_lock_job SET {} = %s WHERE id = %s")
        connection.execute(change.format(sql.Identifier(name)), [value, job_id])


class TestInPython:
    @pytest.mark.nightly
    def test_each_state_is_told(
        self, replica: StoreReplica, operator: TaskLocks, connection: Connection
    ) -> None:
        past = datetime.now(timezone.utc) - timedelta(seconds=5)
        key = f"runs-{uuid4().hex[:8]}"
        gate = Gate(key)
        try:
            replica.run_at(note_and_wait, key)
            replica.runs(key)
            add(replica, "waits")
            add(replica, "is paused", next_run_time=None)
            add(replica, "is due", past, executor="elsewhere")
            found = {job.id: job for job in operator.jobs()}
            assert {name: job.state for name, job in found.items()} == {
                key: JobState.ENDED,
                "waits": JobState.WAITING,
                "is paused": JobState.PAUSED,
                "is due": JobState.DUE,
            }
            running = found[key]
            assert (running.holder, running.next_run_time) == ("web-1", None)
            assert running.last_run_time is not None
            assert found["is due"].holder is None
        finally:
            gate.open()
        eventually(lambda: key not in [job.id for job in operator.jobs()])

    def test_a_paused_task_is_told(
        self, replica: StoreReplica, operator: TaskLocks, connection: Connection
    ) -> None:
        replica.scheduler.add_job(note, "interval", hours=1, args=["job"], id="job")
        [before] = operator.jobs()
        assert before.task is not None
        assert not before.task_paused
        eventually(lambda: before.task in [task.name for task in operator.tasks()])
        operator.pause(before.task)
        [job] = operator.jobs()
        assert job.state is JobState.WAITING
        assert job.task_paused
        assert job.task_paused_until is None
        operator.resume(before.task)
        [job] = operator.jobs()
        assert not job.task_paused

    def test_they_come_by_their_run_times_and_are_chosen_by_ids(
        self, replica: StoreReplica, operator: TaskLocks
    ) -> None:
        add(replica, "a_paused", next_run_time=None)
        add(replica, "b", LATER + timedelta(days=1))
        add(replica, "c", LATER)
        assert [job.id for job in operator.jobs()] == ["c", "b", "a_paused"]
        assert [job.id for job in operator.jobs(limit=2)] == ["c", "b"]
        assert [job.id for job in operator.jobs("?", "a-*")] == ["c", "b"]
        assert [job.id for job in operator.jobs("a_*")] == ["a_paused"]

    def test_what_cannot_be_imported_or_read_here_is_told_all_the_same(
        self, replica: StoreReplica, operator: TaskLocks, connection: Connection
    ) -> None:
        add(replica, "job")
        unknown = json.dumps({"type": "moonrise"})
        set_columns(
            connection, "job", func="gone.away:send", trigger=unknown, arguments="[]", options="[]"
        )
        [job] = operator.jobs()
        assert (job.function, job.trigger) == ("gone.away:send", {"type": "moonrise"})
        assert job.name is None

    def test_a_missing_table_is_an_error_that_names_the_remedy(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        connection.execute("DROP TABLE task_lock_job")
        with pytest.raises(TaskLockSchemaError) as error:
            operator.jobs()
        assert "task_lock_job does not exist" in str(error.value)
        assert "apscheduler-tasklock upgrade" in str(error.value)

    @pytest.mark.direct("roles log in by themselves")
    def test_a_missing_right_is_an_error_that_names_the_jobs_table(
        self, direct_url: str, connection: Connection, make_task_locks: Callable[..., TaskLocks]
    ) -> None:
        with role(direct_url) as (name, url):
            connection.execute(
                sql.SQL("GRANT SELECT, INSERT, UPDATE ON task_lock TO {}").format(
                    sql.Identifier(name)
                )
            )
            with pytest.raises(TaskLockSchemaError, match="DELETE ON task_lock_job TO"):
                make_task_locks(url, given=PATIENT, claim_timeout=180).jobs()


# Its row is older than its run time.
MINUTES_AGO = {
    "next_run_time": "now() - interval '5 min'",
    "changed_at": "now() - interval '1 h'",
}
# Another pause of all tasks, in which the run time fell, came before the one that there is.
PAUSED_BEFORE = """UPDATE task_lock SET pauses = jsonb_build_array(
    pauses -> 0 || jsonb_build_object('since', extract(epoch FROM now() - interval '1 day'),
    'until', extract(epoch FROM now() - interval '3 min')), pauses -> 0)"""


ENDED = {"finished_at": "now() - interval '80 s'"}


class TestOverdue:
    def test_jobs_check_doctor_and_why_name_a_job_that_no_replica_claims(
        self,
        replica: StoreReplica,
        operator: TaskLocks,
        command: Command,
        connection: Connection,
    ) -> None:
        past = datetime.now(timezone.utc) - timedelta(minutes=5)
        add(replica, "waits")
        add(replica, "sent", past, executor="elsewhere")
        assert operator.jobs(overdue=True) == []  # because it was added a moment ago
        set_columns(connection, "sent", changed_at=past)
        assert {job.id: job.state for job in operator.jobs()} == {
            "sent": JobState.OVERDUE,
            "waits": JobState.WAITING,
        }
        assert [job.id for job in operator.jobs(overdue=True)] == ["sent"]
        assert operator.jobs("w*", overdue=True) == []
        told = command("check")
        assert told.status == 2
        says = r"1 overdue \(sent by \d+ s, a stored job that no replica claims(.*)\); 0 tasks"
        assert re.search(says, told.out)
        assert command("check", "sent").status == 2
        other = command("check", "w*")
        assert (other.status, "overdue" in other.out.partition("|")[0]) == (3, False)
        doctor = command("doctor")
        assert doctor.status == 1
        says = r'wrong +jobs +"sent" is overdue by \d+ s, a stored job that no replica claims'
        assert re.search(says, doctor.out)
        why = command("why", "sent")
        assert why.status == 3
        assert "the job store has a job 'sent', which is overdue, with the run time " in why.err
        assert command("why", "nothing").err.count("\n") == 1

    def test_all_tasks_may_be_paused_before_its_first_claim(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        for task_name, namespace, state in (
            ("NULL", "", JobState.DUE),
            ("NULL", "web.", JobState.DUE),  # it may be one of this namespace
            ("'web.sent'", "web.", JobState.DUE),
            ("'mail.sent'", "web.", JobState.OVERDUE),
        ):
            add_job(connection, "sent", task_name=task_name, **MINUTES_AGO)
            operator.pause_all(duration=None, namespace=namespace, by="ann")
            assert [job.state for job in operator.jobs()] == [state]
            operator.resume_all(namespace=namespace, by="ann")
            # Nobody has claimed it before the pause either.
            assert [job.state for job in operator.jobs()] == [JobState.OVERDUE]
            connection.execute(PAUSED_BEFORE)
            # Nobody could claim it a moment ago.
            assert [job.state for job in operator.jobs()] == [state]
            connection.execute("DELETE FROM task_lock_job")
            connection.execute("DELETE FROM task_lock")

    def test_a_namespace_has_the_jobs_whose_namespace_is_not_known_yet(
        self, command: Command, connection: Connection
    ) -> None:
        add_job(connection, "sent", **MINUTES_AGO)
        add_task(connection, "mail.task", **ENDED)
        add_job(connection, "known", task_name="'mail.task'", **MINUTES_AGO)
        told = command("check", "--namespace", "web.", "--json").json
        assert [each["task"] for each in told["findings"]] == ["web.sent"]

        assert re.findall(r'jobs +"(.*?)"', command("doctor", "--namespace", "web.").out) == [
            "web.sent"
        ]

    def test_jobs_that_cannot_be_read_are_unknown(
        self, command: Command, connection: Connection, direct_url: str
    ) -> None:
        add_task(connection, "sync", **STAYS_OK)
        add_job(connection, "sent", **MINUTES_AGO)
        with psycopg.connect(direct_url) as other:
            other.execute("LOCK TABLE task_lock_job")
            told = command("check")
        assert told.status == 3
        assert "AccessExclusiveLock on task_lock_job" in told.out

    def test_a_missing_column_is_told_once(self, command: Command, connection: Connection) -> None:
        connection.execute("ALTER TABLE task_lock DROP COLUMN retry_of")
        assert "jobs  " not in command("doctor").out

    def test_many_are_named_up_to_a_limit(self, command: Command, connection: Connection) -> None:
        for number in range(7):
            add_job(connection, f"jöb-{number}", **MINUTES_AGO)
        told = command("doctor").out
        assert re.findall(r'jobs +"(.*?)" is overdue', told) == [f"jöb-{each}" for each in range(5)]
        assert re.search(r"wrong +jobs +2 more are overdue\n", told)

    def test_a_monitor_may_have_no_rights_on_the_jobs(
        self, direct_url: str, connection: Connection, command: Command
    ) -> None:
        add_task(connection, "sync", **STAYS_OK)
        with role(direct_url) as (name, url):
            for table in ("task_lock", "task_lock_replica"):
                connection.execute(f'GRANT SELECT, INSERT, UPDATE ON {table} TO "{name}"')
            told = command("check", database=url)
        assert (told.status, told.err) == (0, "")


class TestCommand:
    def test_a_row_has_what_an_operator_asks_for(
        self, command: Command, replica: StoreReplica, connection: Connection
    ) -> None:
        nightly = CronTrigger(hour=3, timezone="Europe/Berlin")
        replica.scheduler.add_job(note, nightly, args=["x"], id="nightly", next_run_time=LATER)
        add(replica, "once", LATER + timedelta(days=1), executor="slow")
        set_columns(connection, "nightly", last_run_time=LATER - timedelta(days=1))
        answer = command("jobs")
        assert (answer.status, answer.err) == (0, "")
        function = "tests.support.stored_jobs:note"
        assert [[cell.strip() for cell in row] for row in answer.cells] == [
            [
                *("nightly", "waiting", "cron hour=3 minute=0 Europe/Berlin"),
                *("2100-01-01T00:00:00Z", "2099-12-31T00:00:00Z", function, "default", "-"),
            ],
            [
                *("once", "waiting", "once at 2100-01-02T00:00:00Z"),
                *("2100-01-02T00:00:00Z", "-", function, "slow", "-"),
            ],
        ]
        for job in command("jobs", "--json").json:
            assert "is_one_off" not in job

    def test_a_missing_table_is_one_line_that_names_the_remedy(
        self, command: Command, connection: Connection
    ) -> None:
        connection.execute("DROP TABLE task_lock_job")
        answer = command("jobs")
        assert (answer.status, answer.out) == (1, "")
        assert "task_lock_job does not exist" in answer.err
        assert "apscheduler-tasklock upgrade" in answer.err

    @pytest.mark.nightly
    def test_on_a_terminal_it_is_a_table_with_colours(
        self, database_url: str, replica: StoreReplica
    ) -> None:
        every = IntervalTrigger(minutes=5)
        replica.scheduler.add_job(note, every, args=["x"], id="job", next_run_time=LATER)
        with OnTerminal(database_url, "jobs") as terminal:
            shown = terminal.wait_for("default")
            assert "\x1b[32mwaiting" in shown
            assert "every 5 min" in shown
            assert "notes" not in shown
            assert terminal.status() == 0
