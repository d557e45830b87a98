"""What operators see and steer, with real replicas."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_ERROR
from psycopg import sql
from sqlalchemy import create_engine

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    TaskLockExecutor,
    TaskLockOptionError,
    TaskLockRefusedError,
    TaskLocks,
    TaskLockStateError,
    TaskState,
    TaskStatus,
    migrate,
)
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._database.url import parse_url
from tests.integration.conftest import Job
from tests.support.claims import RENEWS_OFTEN, ended_runs
from tests.support.commands import PatientTaskLocks
from tests.support.internals import deferred_run_times
from tests.support.polling import eventually
from tests.support.roles import role
from tests.support.rows import (
    STAYS_RUNNING,
    add_action,
    add_replica,
    add_run,
    add_task,
    resumed,
    tasks_of,
)
from tests.support.schedulers import DAILY, DAILY_LATER, NO_DATABASE, Replica
from tests.support.waist import MemoryTaskLocks

MakeReplica = Callable[..., Replica]
Connection = psycopg.Connection[Any]

FAST: dict[str, Any] = {"poll_interval": 0.2}


@pytest.fixture
def operator(make_task_locks: Callable[..., TaskLocks]) -> TaskLocks:
    return make_task_locks(replica_id="operator")


@pytest.fixture
def nowhere() -> Iterator[TaskLocks]:
    """Task locks that find what they are given invalid before they ask a database."""
    with TaskLocks(NO_DATABASE) as locks:
        yield locks


def task(operator: TaskLocks, name: str = "job") -> TaskStatus:
    [found] = operator.tasks(name)
    return found


def registered(operator: TaskLocks, *names: str, replicas: int = 1) -> None:
    """Wait until so many replicas have said that they have these tasks."""

    def all_have() -> bool:
        known = [set(replica.tasks) for replica in operator.replicas() if replica.alive]
        return len([tasks for tasks in known if tasks >= set(names)]) >= replicas

    eventually(all_have)
    eventually(lambda: len(operator.tasks(*names)) == len(names))


def test_an_outcome_that_there_is_none_of_is_refused(nowhere: TaskLocks) -> None:
    with pytest.raises(TaskLockOptionError, match=r"no outcome 'eror'; give one of ok, error, "):
        nowhere.runs(outcome="eror")


def counted() -> tuple[list[int], Callable[[], None]]:
    """Return runs as they are counted, and a job that counts."""
    runs: list[int] = []
    return runs, lambda: runs.append(1)


def is_near(moment: datetime | None, other: datetime | None) -> bool:
    """Tell whether two times are the same, told by clocks of two kinds."""
    assert moment is not None
    assert other is not None
    return abs((moment - other).total_seconds()) < 5


def grants(replica: Replica, reason: str | None = None) -> list[Any]:
    return [
        event
        for event in replica.of()
        if event.code == EVENT_TASK_LOCK_GRANTED and event.reason == reason
    ]


def due_at(connection: Connection, ago: float, task: str = "job") -> None:
    """Let a task have been due so many seconds ago, and its window be over."""
    connection.execute(
        "UPDATE task_lock SET due_at = now() - %(ago)s * interval '1 second',"
        " overdue_at = now() - (%(ago)s - 60) * interval '1 second' WHERE task_name = %(task)s",
        {"ago": ago, "task": task},
    )


def due_in_memory(memory: MemoryTaskLocks, ago: float, task: str = "job") -> None:
    """Let a task of rows in memory have been due so many seconds ago, and its window be over."""
    with memory.lock:
        due = memory.now() - timedelta(seconds=ago)
        late = due + timedelta(seconds=60)
        memory.rows[task] = replace(memory.rows[task], due_at=due, overdue_at=late)


def registered_in(memory: MemoryTaskLocks, *names: str) -> None:
    """Wait until a replica has said that it has these tasks, whose rows are in memory."""
    eventually(lambda: any(tasks >= set(names) for tasks in list(memory.tasks_of.values())))
    eventually(lambda: set(memory.rows) >= set(names))


def told_overdue(caplog: pytest.LogCaptureFixture, task: str) -> int:
    """Return how often the log tells that a task is overdue."""
    return sum(line.startswith(f"Task {task!r} is overdue") for line in caplog.messages)


def drop_and_create(database_url: str) -> None:
    """Make the tables anew, in one transaction."""
    engine = create_engine(parse_url(database_url))
    with engine.begin() as connection:
        migrate(connection, revision="base")
        migrate(connection)
    engine.dispose()


class TestRegistration:
    def test_tasks_are_registered_again_where_the_tables_were_made_anew(
        self, make_replica: MakeReplica, operator: TaskLocks, database_url: str
    ) -> None:
        replica = make_replica(**FAST)
        for name in ("nightly", "weekly"):
            replica.scheduler.add_job(print, "cron", **DAILY, id=name)
        registered(operator, "nightly", "weekly")
        before = task(operator, "nightly")
        drop_and_create(database_url)
        eventually(lambda: {found.name for found in operator.tasks()} == {"nightly", "weekly"})
        after = task(operator, "nightly")
        assert (after.state, after.schedule) == (TaskState.NEW, before.schedule)
        assert is_near(after.due_at, before.due_at)

    def test_a_task_whose_row_alone_is_gone_is_registered_again(
        self, make_replica: MakeReplica, operator: TaskLocks, connection: Connection
    ) -> None:
        """Also one that was registered long ago, and has run since."""
        replica = make_replica(**FAST)
        names = ["a", "b", "c"]
        for name in names:
            replica.scheduler.add_job(print, "cron", **DAILY, id=name)
        registered(operator, *names)
        connection.execute("UPDATE task_lock SET token = token + 1")  # none is looked at as new
        for name in names:
            connection.execute("DELETE FROM task_lock WHERE task_name = %s", [name])
            eventually(lambda: {found.name for found in operator.tasks()} == set(names))

    def test_one_that_was_removed_is_not_registered_again(
        self, make_replica: MakeReplica, operator: TaskLocks, connection: Connection
    ) -> None:
        replica = make_replica(**FAST)
        for name in ("removed", "stays"):
            replica.scheduler.add_job(print, "cron", **DAILY, id=name)
        registered(operator, "removed", "stays")
        replica.scheduler.remove_job("removed")
        connection.execute("DELETE FROM task_lock")
        eventually(operator.tasks)
        assert [found.name for found in operator.tasks()] == ["stays"]

    def test_a_task_that_has_never_run_is_seen(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        replica = make_replica(**FAST)
        replica.scheduler.add_job(print, "cron", **DAILY, id="job")
        registered(operator, "job")
        found = task(operator)
        assert (found.state, found.started_at, found.took) == (TaskState.NEW, None, None)
        assert found.schedule["fields"]["hour"] == str(DAILY["hour"])
        assert is_near(found.due_at, replica.scheduler.get_job("job").next_run_time)

    def test_a_job_of_one_date_is_not_registered(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        replica = make_replica(**FAST)
        tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
        replica.scheduler.add_job(print, "date", run_date=tomorrow, id="once")
        replica.scheduler.add_job(print, "cron", **DAILY, id="job")
        registered(operator, "job")
        assert [found.name for found in operator.tasks()] == ["job"]

    def test_another_schedule_is_told_and_its_first_run_not_swallowed(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        runs, job = counted()
        replica = make_replica(**FAST)
        replica.run_once(job)
        eventually(lambda: runs)
        eventually(lambda: task(operator).finished_at)
        replica.scheduler.reschedule_job("job", trigger="interval", seconds=2)
        eventually(lambda: task(operator).schedule["length"] == [0, 2, 0])
        eventually(lambda: len(runs) >= 2)

    @pytest.mark.nightly
    def test_an_old_version_that_runs_once_more_does_not_swallow_the_new_ones_first_run(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        """As in a rolling deployment, where the old replica is stopped after the new one began."""
        close = {**FAST, "min_factor": 0.99999}  # so that run times a second apart are two
        old, new = make_replica(**close), make_replica(**close)
        daily = {"trigger": "cron", "timezone": timezone.utc, "id": "job", "misfire_grace_time": 60}
        hour = (datetime.now(timezone.utc).hour + 12) % 24
        old.scheduler.add_job(print, hour=hour, **daily)
        registered(operator, "job")
        soon = datetime.now(timezone.utc) + timedelta(seconds=5)
        at = {"hour": soon.hour, "minute": soon.minute, "second": soon.second}
        new.scheduler.add_job(print, **at, **daily)
        old.scheduler.modify_job("job", next_run_time=datetime.now(timezone.utc))
        eventually(lambda: len(ended_runs(operator)) == 2)
        later, earlier = ended_runs(operator)
        assert later.scheduled_at == soon.replace(microsecond=0)
        assert earlier.replica != later.replica

    @pytest.mark.nightly
    def test_an_old_version_that_looks_after_the_new_one_has_registered_leaves_that(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        old, new = make_replica(poll_interval=5), make_replica(**FAST)
        old.scheduler.add_job(print, "cron", **DAILY, id="job")
        eventually(lambda: operator.tasks("job"))
        new.scheduler.add_job(print, "interval", hours=12, id="job")
        eventually(lambda: task(operator).schedule["type"] == "interval")
        old.scheduler.add_job(print, "cron", **DAILY_LATER, id="other")
        eventually(lambda: operator.tasks("other"))
        assert task(operator).schedule["type"] == "interval"

    @pytest.mark.parametrize(
        ("job", "grace"),
        [
            ({"trigger": "cron", "minute": 7}, 360),
            ({"trigger": "cron", "hour": 3}, 600),
            ({"trigger": "cron", "hour": 3, "misfire_grace_time": 7200}, 7200),
            ({"trigger": "cron", "hour": 3, "misfire_grace_time": None}, 600),
            ({"trigger": "cron", "hour": 3, "jitter": 30}, 630),
            ({"trigger": "cron", "hour": 3, "kwargs": {"task_lock": {"grace": 5}}}, 5),
            ({"trigger": "interval", "seconds": 30}, 60),
        ],
    )
    def test_it_is_overdue_after_a_tenth_of_its_period_and_ten_minutes_at_most(
        self,
        make_replica_in_memory: MakeReplica,
        memory: MemoryTaskLocks,
        job: dict[str, Any],
        grace: float,
    ) -> None:
        replica = make_replica_in_memory(**FAST)
        replica.scheduler.add_job(lambda **_: None, id="job", **job)
        found = eventually(lambda: memory.rows.get("job"))
        assert found.overdue_at == found.due_at + timedelta(seconds=grace)

    def test_the_replicas_are_seen_with_what_they_have_and_run(
        self, make_replica: MakeReplica, operator: TaskLocks, job: Job
    ) -> None:
        replica = make_replica(replica_id="one", timings=Timings(report_interval=0.3), **FAST)
        replica.run_once(job.run)
        eventually(job.begun.is_set)
        registered(operator, "job")
        eventually(lambda: operator.replicas()[0].running)  # an earlier sign of life has none
        [seen] = operator.replicas()
        assert (seen.replica_id, seen.alive) == ("one", True)
        assert (seen.tasks, [run.task for run in seen.running]) == (("job",), ["job"])
        assert seen.version

    @pytest.mark.parametrize("told", ["option", "environment"])
    def test_the_release_is_seen_with_the_replica_and_its_runs(
        self,
        make_replica: MakeReplica,
        operator: TaskLocks,
        monkeypatch: pytest.MonkeyPatch,
        told: str,
    ) -> None:
        monkeypatch.setenv("TASKLOCK_RELEASE", "1.4" if told == "environment" else "1.3")
        given = {"release": "1.4"} if told == "option" else {}
        replica = make_replica(**given, **FAST)
        replica.run_once(print)
        [run] = eventually(lambda: operator.runs("job"))
        assert (run.outcome, run.release) == ("ok", "1.4")
        registered(operator, "job")
        assert [seen.release for seen in operator.replicas()] == ["1.4"]

    def test_a_replica_whose_job_store_hangs_gives_signs_of_life(
        self, make_replica: MakeReplica, operator: TaskLocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And so one whose trigger does: none of the application's code is needed for that."""
        timings = Timings(report_interval=0.3, longest_turn=3600.0)
        replica = make_replica(timings=timings, **FAST)
        replica.scheduler.add_job(print, "cron", **DAILY, id="job")
        registered(operator, "job")
        hung, go_on = threading.Event(), threading.Event()
        get_job = replica.scheduler.get_job

        def hang(*arguments: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                hung.set()
                assert go_on.wait(60)
            return get_job(*arguments)

        monkeypatch.setattr(replica.scheduler, "get_job", hang)
        operator.request_run("job")
        assert hung.wait(60)
        for _ in range(3):
            [before] = operator.replicas()
            eventually(lambda before=before: operator.replicas()[0].seen_at > before.seen_at)
        go_on.set()

    def test_a_new_process_with_the_id_of_one_before_writes_its_own_row(
        self, make_replica: MakeReplica, operator: TaskLocks, connection: Connection
    ) -> None:
        connection.execute(
            "INSERT INTO task_lock_replica VALUES"
            " ('one', 'old host', '0.0', '2026-01-01', '2026-01-01', '{}')"
        )
        before = datetime.now(timezone.utc) - timedelta(minutes=5)
        make_replica(replica_id="one", **FAST).scheduler.add_job(print, "cron", **DAILY, id="job")
        registered(operator, "job")
        [seen] = operator.replicas()
        assert seen.started_at > before
        assert seen.host != "old host"
        assert seen.version != "0.0"

    @pytest.mark.direct("the pooler keeps connections for a role, and has no login for it")
    def test_without_the_right_to_delete_the_line_names_it(
        self,
        make_replica: MakeReplica,
        database_url: str,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        tables = sql.SQL("task_lock, task_lock_run, task_lock_replica")
        with role(database_url) as (name, url):
            grant = sql.SQL("GRANT SELECT, INSERT, UPDATE ON {} TO {}")
            connection.execute(grant.format(tables, sql.Identifier(name)))
            with caplog.at_level(logging.INFO, logger="apscheduler_tasklock"):
                replica = make_replica(url, **FAST)
                eventually(lambda: "old replicas: " in caplog.text)
            replica.shutdown()
        assert f'GRANT DELETE ON task_lock_replica TO "{name}"' in caplog.text


class TestPause:
    def test_what_others_are_shown_of_it_is_not_too_long(self, nowhere: TaskLocks) -> None:
        operator, long = nowhere, "x" * 4001
        for named in ({"by": long}, {"reason": long}):
            with pytest.raises(TaskLockOptionError, match=r"has 4,001 characters, and at most"):
                operator.pause("job", **named)
        with pytest.raises(TaskLockOptionError, match=r"request_run\(\): by has 4,001 char"):
            operator.request_run("job", by=long)

    def test_what_is_no_name_is_refused(self, nowhere: TaskLocks) -> None:
        for change in (nowhere.pause, nowhere.resume):
            with pytest.raises(TaskLockOptionError, match=r"name must be a text, not datetime"):
                change("job", timedelta(minutes=5))  # type: ignore[arg-type]  # as by mistake

    @pytest.mark.parametrize("given", ["job", "j*"])
    def test_no_claim_is_granted_once_it_has_returned(
        self, make_replica: MakeReplica, operator: TaskLocks, connection: Connection, given: str
    ) -> None:
        runs: list[datetime] = []

        def job() -> None:
            found = connection.execute("SELECT started_at FROM task_lock").fetchone()
            assert found is not None
            runs.append(found[0])

        for _ in range(3):
            # The default maximum lock of 0.25 s would end before a slow machine runs the job.
            replica = make_replica(jobs={"job": {"min_lock": 0, "max_lock": 600}}, **FAST)
            replica.scheduler.add_job(job, "interval", seconds=0.05, id="job", max_instances=5)
        eventually(lambda: len(runs) > 10)
        assert tasks_of(operator.pause(given, by="me", reason="why")) == ["job"]
        found = connection.execute("SELECT clock_timestamp()").fetchone()
        assert found is not None
        eventually(lambda: task(operator).state is TaskState.PAUSED)
        before = len(runs)
        with pytest.raises(TaskLockRefusedError, match="is paused"):
            operator.hold("job", min_lock=0, max_lock=600).__enter__()
        assert len(runs) <= before + 1
        assert all(run < found[0] for run in runs)
        assert resumed(operator.resume(given, by="you")) == []
        assert resumed(operator.resume(given, by="me")) == ["job"]
        assert resumed(operator.resume(given, by="me")) == []
        eventually(lambda: len(runs) > before + 3)

    def test_a_refused_claim_says_so(self, make_replica: MakeReplica, operator: TaskLocks) -> None:
        replica = make_replica(**FAST)
        replica.scheduler.add_job(print, "cron", **DAILY, id="job", misfire_grace_time=60)
        registered(operator, "job")
        operator.pause("job")
        replica.scheduler.modify_job("job", next_run_time=datetime.now(timezone.utc))
        assert replica.one(EVENT_TASK_LOCK_REFUSED).reason == "paused"


class TestRunNow:
    def test_one_replica_runs_it_once_however_often_it_is_asked(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        runs, job = counted()
        replicas = [make_replica(replica_id=f"replica {n}", **FAST) for n in range(3)]
        for replica in replicas:
            replica.scheduler.add_job(job, "cron", **DAILY, id="job")
        registered(operator, "job", replicas=3)
        before = task(operator)
        with ThreadPoolExecutor(5) as pool:
            asked = list(pool.map(lambda _: operator.request_run("job"), range(5)))
        # It is one, unless a replica has run it before the last of them asked.
        requests = len({request.request_id for request in asked})
        eventually(lambda: len(ended_runs(operator)) >= requests)
        ended = ended_runs(operator)
        assert {(r.kind, r.outcome, r.scheduled_at) for r in ended} == {("manual", "ok", None)}
        assert ended[-1].token > min(request.token for request in asked)
        assert sum(len(grants(replica, "manual")) for replica in replicas) == len(runs) == requests
        after = task(operator)
        assert (after.due_at, after.requested_by) == (before.due_at, None)

    def test_it_runs_while_the_task_is_paused(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        runs, job = counted()
        make_replica(**FAST).scheduler.add_job(job, "cron", **DAILY, id="job")
        registered(operator, "job")
        operator.pause("job")
        operator.request_run("job")
        eventually(lambda: runs)

    def test_it_waits_while_the_task_runs(
        self, make_replica: MakeReplica, operator: TaskLocks, job: Job
    ) -> None:
        replica = make_replica(**FAST)
        replica.run_once(job.run)
        eventually(job.begun.is_set)
        registered(operator, "job")
        operator.request_run("job")
        eventually(lambda: task(operator).requested_by)
        assert not grants(replica, "manual")
        job.go_on.set()
        eventually(lambda: grants(replica, "manual"))
        eventually(lambda: [run.kind for run in ended_runs(operator)] == ["manual", "schedule"])

    @pytest.mark.parametrize("where", ["on the same replica", "on another"])
    def test_a_run_time_that_it_stood_against_follows_it(
        self, make_replica: MakeReplica, operator: TaskLocks, job: Job, where: str
    ) -> None:
        replica = make_replica(**FAST)
        replica.scheduler.add_job(job.run, "cron", **DAILY, id="job", misfire_grace_time=60)
        registered(operator, "job")
        operator.request_run("job")
        eventually(job.begun.is_set)
        due = replica if where == "on the same replica" else make_replica(**FAST)
        if due is not replica:
            due.scheduler.add_job(job.run, "cron", **DAILY, id="job", misfire_grace_time=60)
        due.scheduler.modify_job("job", next_run_time=datetime.now(timezone.utc))
        eventually(lambda: deferred_run_times(due.executor))
        due.finish_pass()
        assert EVENT_TASK_LOCK_REFUSED not in due.codes()
        job.go_on.set()
        eventually(lambda: [run.kind for run in ended_runs(operator)] == ["schedule", "manual"])

    def test_nobody_can_run_a_task_whose_replicas_are_gone(
        self, make_replica: MakeReplica, operator: TaskLocks, connection: Connection
    ) -> None:
        # No sign of life after the first one.
        replica = make_replica(**FAST, timings=Timings(report_interval=3600.0))
        replica.scheduler.add_job(print, "cron", **DAILY, id="job")
        registered(operator, "job")
        connection.execute("UPDATE task_lock_replica SET seen_at = now() - interval '100 s'")
        with pytest.raises(TaskLockStateError, match="no live replica has it"):
            operator.request_run("job")


class TestFree:
    def test_a_holder_that_is_alive_is_told_that_its_lock_is_lost(
        self, make_replica: MakeReplica, operator: TaskLocks, connection: Connection, job: Job
    ) -> None:
        replica = make_replica(lease=600, timings=RENEWS_OFTEN, **FAST)
        replica.run_once(job.run)
        eventually(job.begun.is_set)
        # A renewal makes no lease shorter, so that this one lasts, however late a renewal comes.
        connection.execute("UPDATE task_lock SET locked_until = now() + interval '10 min'")
        token = task(operator).token
        with pytest.raises(TaskLockStateError, match="may be alive"):
            operator.free("job", token)
        operator.free("job", token, force=True)
        replica.one(EVENT_TASK_LOCK_LOST)
        assert ended_runs(operator)[0].outcome == "freed"
        job.go_on.set()
        eventually(lambda: ended_runs(operator)[0].outcome == "overtaken")

    def test_a_holder_that_is_silent_is_not_said_to_be_alive(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        add_replica(connection, "two", seen_at="now() - interval '2 days'")
        add_task(connection, "job", **STAYS_RUNNING, locked_by="'two'")
        said = "has died or is silent, .+; if you know that it is dead, use --force"
        with pytest.raises(TaskLockStateError, match=said):
            operator.free("job", 7)
        assert operator.free("job", 7, force=True).holder == "two"

    def test_it_needs_no_history(
        self, make_replica: MakeReplica, operator: TaskLocks, connection: Connection, job: Job
    ) -> None:
        """Which is a convenience, as when an operator may not write to it."""
        replica = make_replica(**FAST)
        replica.run_once(job.run)
        eventually(job.begun.is_set)
        connection.execute("DROP TABLE task_lock_run")
        operator.free("job", task(operator).token, force=True)
        job.go_on.set()
        replica.one(EVENT_TASK_LOCK_LOST)


@pytest.mark.parametrize(("history", "left"), [(5, [0, 4]), (6, [0, 4, 5]), (0, [0, 4, 5, 99])])
def test_a_history_that_is_made_shorter_loses_its_older_entries(
    make_replica: MakeReplica, connection: Connection, history: int, left: list[int]
) -> None:
    """Where it is switched off, the runs from before stay. So does what operators did."""
    for slot in (0, 4, 5, 99):
        for name in ("job", "another replica's"):
            add_run(connection, name, slot)
        add_run(connection, "job", slot, outcome="'error'")
    for slot in range(20):
        add_action(connection, "job", slot)
    replica = make_replica(history=history, start=False, **FAST)
    replica.scheduler.add_job(print, "cron", **DAILY, id="job")
    replica.scheduler.start()

    def slots(name: str, ring: str = "runs") -> list[int]:
        query = "SELECT slot FROM task_lock_run WHERE task_name = %s AND ring = %s ORDER BY slot"
        return [slot for (slot,) in connection.execute(query, [name, ring])]

    eventually(lambda: connection.execute("SELECT FROM task_lock_replica").rowcount)
    eventually(lambda: slots("job") == left)
    replica.shutdown()
    assert slots("job") == slots("job", "failures") == left
    assert slots("job", "actions") == list(range(20))
    assert slots("another replica's") == [0, 4, 5, 99]


class TestOverdue:
    def test_it_is_told_once_until_the_task_runs_and_is_overdue_again(
        self,
        make_replica: MakeReplica,
        operator: TaskLocks,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        replica = make_replica(**FAST)
        replica.scheduler.add_job(print, "cron", **DAILY, id="job")
        replica.scheduler.add_job(print, "cron", **DAILY, id="marker")
        registered(operator, "job", "marker")
        due_at(connection, ago=100)
        assert task(operator).state is TaskState.OVERDUE
        eventually(lambda: told_overdue(caplog, "job"))
        due_at(connection, 100, "marker")
        eventually(lambda: told_overdue(caplog, "marker"))  # so a look later
        assert told_overdue(caplog, "job") == 1
        operator.request_run("job")
        eventually(lambda: operator.runs("job"))
        eventually(lambda: replica.executor.health().degraded == ("overdue tasks: marker",))
        due_at(connection, ago=100)
        eventually(lambda: told_overdue(caplog, "job") == 2)

    def test_where_the_row_has_an_old_schedule_ours_is_written_instead(
        self,
        make_replica: MakeReplica,
        operator: TaskLocks,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        replica = make_replica(**FAST)
        replica.scheduler.add_job(print, "cron", **DAILY, id="job")
        registered(operator, "job")
        expected = task(operator).due_at
        with connection.transaction():  # a look between the two would write ours
            connection.execute("""UPDATE task_lock SET schedule = '{"type":"cron"}'""")
            due_at(connection, ago=100)
        eventually(lambda: is_near(task(operator).due_at, expected))
        assert not told_overdue(caplog, "job")

    def test_what_was_due_before_a_start_is_not_told_at_once(
        self,
        make_replica: MakeReplica,
        operator: TaskLocks,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Replicas run it then, as far as they make up for it."""
        replica = make_replica(**FAST, timings=Timings(recovery_grace=600.0))
        replica.scheduler.add_job(print, "cron", **DAILY, id="job")
        registered(operator, "job")
        due_at(connection, ago=100)
        for marker in ("looked", "looked again"):
            replica.scheduler.add_job(print, "cron", **DAILY, id=marker)
            registered(operator, marker)
        assert not told_overdue(caplog, "job")
        replica.executor.user.outage.believe()
        eventually(lambda: told_overdue(caplog, "job"))

    @pytest.mark.parametrize("how", ["removed", "deployed"])
    def test_a_task_that_was_removed_is_gone_and_no_alarm(
        self,
        make_replica: MakeReplica,
        operator: TaskLocks,
        how: str,
    ) -> None:
        # From then on a replica has all of its jobs: they are added one by one after the start.
        timings = Timings(report_interval=0.5)
        replica = make_replica(**FAST, timings=timings)
        replica.scheduler.add_job(print, "cron", **DAILY, id="job")
        replica.scheduler.add_job(print, "cron", **DAILY, id="another")
        registered(operator, "job", "another")
        if how == "removed":
            replica.scheduler.remove_job("job")
        else:
            replica.shutdown()
            eventually(lambda: not any(seen.alive for seen in operator.replicas()))
            new = make_replica(**FAST, timings=timings)
            new.scheduler.add_job(print, "cron", **DAILY, id="another")
        found = eventually(lambda: [found for found in operator.tasks("job") if found.gone])[0]
        assert (found.due_at, found.state) == (None, TaskState.GONE)

    def test_a_job_that_is_added_again_and_again_is_due_as_before(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        """As by a process that is killed over and over: its job would never be missed."""
        due = set()
        for _ in range(3):
            replica = make_replica(**FAST)
            replica.scheduler.add_job(print, "interval", hours=1, id="job")
            registered(operator, "job")
            due.add(task(operator).due_at)
            replica.shutdown()
        assert len(due) == 1

    @pytest.mark.parametrize("how", ["paused", "put off", "removed", "all removed"])
    def test_a_job_that_is_not_to_run_is_not_overdue(
        self,
        make_replica_in_memory: MakeReplica,
        memory: MemoryTaskLocks,
        caplog: pytest.LogCaptureFixture,
        how: str,
    ) -> None:
        replica = make_replica_in_memory(**FAST)
        replica.scheduler.add_job(print, "cron", **DAILY, id="job")
        replica.scheduler.add_job(print, "cron", **DAILY, id="marker")
        registered_in(memory, "job", "marker")
        due_in_memory(memory, ago=1)  # long before it is overdue, however slow the machine is
        if how == "paused":
            replica.scheduler.pause_job("job")
        elif how == "put off":
            later = datetime.now(timezone.utc) + timedelta(days=3)
            replica.scheduler.modify_job("job", next_run_time=later)
        elif how == "removed":
            replica.scheduler.remove_job("job")
        else:
            replica.scheduler.remove_all_jobs()
            replica.scheduler.add_job(print, "cron", **DAILY_LATER, id="marker")
            later_on = f'"hour":"{DAILY_LATER["hour"]}"'
            eventually(lambda: later_on in (memory.rows["marker"].schedule or ""))
        due_in_memory(memory, 100, "marker")
        eventually(lambda: told_overdue(caplog, "marker"))
        with memory.lock:
            for name, row in memory.rows.items():
                if row.due_at is not None and row.due_at < memory.now():
                    memory.rows[name] = replace(row, overdue_at=memory.now())
        replica.scheduler.add_job(print, "cron", **DAILY, id="later")
        registered_in(memory, "later")
        due_in_memory(memory, 100, "later")
        eventually(lambda: told_overdue(caplog, "later"))
        assert not told_overdue(caplog, "job")

    def test_a_minimum_lock_above_the_period_is_waited_for(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        replica = make_replica(jobs={"job": {"min_lock": 3600}}, **FAST)
        replica.scheduler.add_job(print, "interval", seconds=1, id="job")
        found = eventually(lambda: [t for t in operator.tasks("job") if t.succeeded_at])[0]
        assert found.due_at - found.scheduled_at == timedelta(hours=1)


class TestStandby:
    @pytest.mark.parametrize("holder", ["stopped", "died"])
    def test_an_interval_job_that_is_due_is_run_in_another_replicas_place(
        self, make_replica: MakeReplica, operator: TaskLocks, connection: Connection, holder: str
    ) -> None:
        runs, job = counted()
        replica = make_replica(**FAST)
        replica.scheduler.add_job(job, "interval", hours=1, id="job")
        registered(operator, "job")
        replica.executor.user.outage.believe()
        if holder == "died":
            connection.execute(
                "UPDATE task_lock SET finished_at = NULL, locked_until = now() - interval '1 min',"
                " run_until = now() + interval '1 h'"
            )
        due_at(connection, ago=10)
        eventually(lambda: runs)
        run = eventually(lambda: [run for run in operator.runs("job") if run.outcome == "ok"])[0]
        assert run.scheduled_at is not None
        assert 9 < (run.started_at - run.scheduled_at).total_seconds() < 100

    @pytest.mark.parametrize("why", ["cron", "paused here", "not due for long enough", "too late"])
    def test_but_not(
        self, make_replica_in_memory: MakeReplica, memory: MemoryTaskLocks, why: str
    ) -> None:
        runs, job = counted()
        replica = make_replica_in_memory(**FAST)
        trigger = {"trigger": "cron", "hour": 3} if why == "cron" else {"trigger": "interval"}
        if why != "cron":
            trigger["hours"] = 1
        replica.scheduler.add_job(job, id="job", **trigger)
        registered_in(memory, "job")
        replica.executor.user.outage.believe()
        if why == "paused here":
            replica.scheduler.pause_job("job")
        due_in_memory(memory, {"not due for long enough": -3600, "too late": 4000}.get(why, 10))
        looked = threading.Event()
        replica.scheduler.add_job(looked.set, "interval", hours=1, id="marker")
        registered_in(memory, "marker")
        due_in_memory(memory, 10, "marker")
        assert looked.wait(60)
        assert not runs


class TestHistoryOptions:
    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"history": -1}, "history must be"),
            ({"history": 1.5}, "history must be a whole number from 0"),
            ({"history": 10_001}, "history must be a whole number from 0 to 10000"),
            ({"redact": "no function"}, "redact must be a function"),
            ({"tracebacks": "perhaps"}, "tracebacks must be True or False"),
        ],
    )
    def test_impossible_ones_are_refused_at_once(self, options: dict[str, Any], told: str) -> None:
        for make in (TaskLocks, TaskLockExecutor):
            with pytest.raises(TaskLockOptionError, match=told):
                make(NO_DATABASE, **options)

    def test_an_error_is_redacted_before_it_is_stored(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        def job() -> None:
            raise ValueError("password=hunter2")

        replica = make_replica(history="5", redact=lambda error: type(error).__name__.lower())
        replica.run_once(job)
        [run] = eventually(lambda: operator.runs("job"))
        assert (run.outcome, run.error_type, run.error) == ("error", "ValueError", "valueerror")

    @pytest.mark.parametrize("tracebacks", [True, False])
    def test_a_traceback_is_kept_on_request_and_redacted(
        self, make_replica_in_memory: MakeReplica, memory: MemoryTaskLocks, *, tracebacks: bool
    ) -> None:
        def connect() -> None:
            raise OSError("password=hunter2")

        def job() -> None:
            try:
                connect()
            except OSError as error:
                raise ValueError("no report") from error

        def redact(error: BaseException) -> str | None:
            return None if "password" in str(error) else str(error)

        make_replica_in_memory(redact=redact, tracebacks=tracebacks).run_once(job)
        [run] = eventually(lambda: memory.runs("job"))
        assert run.error == "no report"
        if not tracebacks:
            assert run.traceback is None
            return
        assert run.traceback is not None
        lines = run.traceback.splitlines()
        assert [line.rpartition(", in ")[2] for line in lines if line.startswith("  File")] == [
            "job",
            "connect",
            "job",
        ]
        assert lines[2] == "OSError"
        assert lines[-1] == "ValueError: no report"

    def test_a_hold_keeps_a_traceback_on_request(self, database_url: str) -> None:
        with PatientTaskLocks(database_url, tracebacks=True) as locks:
            with suppress(ValueError), locks.hold("held", min_lock=0, max_lock=600):
                raise ValueError("no")
            [run] = locks.runs("held")
        assert run.traceback is not None
        assert f'File "{__file__}"' in run.traceback
        assert run.traceback.endswith("ValueError: no")

    @pytest.mark.parametrize("where", ["redact", "str"])
    def test_what_exits_in_place_of_redacting_an_error_keeps_no_task(
        self, make_replica_in_memory: MakeReplica, memory: MemoryTaskLocks, where: str
    ) -> None:
        class ExitingError(Exception):
            def __str__(self) -> str:
                raise SystemExit("str")

        def job() -> None:
            raise ExitingError if where == "str" else ValueError

        replica = make_replica_in_memory(redact=sys.exit if where == "redact" else None)
        replica.run_once(job)
        [run] = eventually(lambda: memory.runs("job"))
        assert (run.outcome, run.error) == ("error", None)
        replica.one(EVENT_JOB_ERROR)
        assert memory.rows["job"].finished_at is not None

    @pytest.mark.parametrize(
        ("leaves", "outcome"), [(None, "ok"), (ValueError("no"), "error")], ids=["ok", "error"]
    )
    def test_a_hold_is_in_it(
        self, operator: TaskLocks, leaves: Exception | None, outcome: str
    ) -> None:
        with suppress(ValueError), operator.hold("held", min_lock=0, max_lock=600):
            if leaves is not None:
                raise leaves
        [run] = operator.runs("held")
        assert (run.kind, run.outcome, run.scheduled_at) == ("hold", outcome, None)
