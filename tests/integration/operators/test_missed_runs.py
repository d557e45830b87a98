"""A run time that no replica has run leaves an entry in the history, which tells why.

What replicas note, and when, is in ``tests/simulation/test_missed_runs.py``.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_MISSED

from apscheduler_tasklock import TaskLocks
from apscheduler_tasklock.status import Run, TaskState, Verdict
from tests.support.commands import Command
from tests.support.internals import executors_of, missed_tasks, runs_of
from tests.support.polling import eventually
from tests.support.roles import role
from tests.support.schedulers import Replica
from tests.support.stored_jobs import PATIENT, Gate, StoreReplica, note, note_and_wait

MakeReplica = Callable[..., Replica]
Connection = psycopg.Connection[Any]

# So that nothing of a test waits for seconds.
QUICK = replace(
    PATIENT, report_interval=0.2, rejected_interval=0.2, recovery_grace=0.1, unasked_after=0.2
)
OFTEN: dict[str, Any] = {
    "poll_interval": 0.2,
    "timings": QUICK,
    "jobs": {"job": {"grace": 0.1}, "other": {"grace": 0.1}},
}


def now() -> datetime:
    return datetime.now(timezone.utc)


def last_second() -> datetime:
    """Return the last whole second: all replicas compute the run times of an interval from it."""
    return now().replace(microsecond=0)


@pytest.fixture
def operator(make_task_locks: Callable[..., TaskLocks]) -> TaskLocks:
    return make_task_locks()


def add(replica: Replica, function: Callable[..., Any], at: datetime, **changes: Any) -> None:
    """Add an hourly job that is due at this time, and overdue soon after that."""
    job = {
        "id": "job",
        "trigger": "interval",
        "hours": 1,
        "start_date": at,
        "next_run_time": at,
        "misfire_grace_time": None,
    }
    replica.scheduler.add_job(function, **{**job, **changes})


def add_frequent(
    replica: Replica, function: Callable[..., Any], start: datetime, **changes: Any
) -> None:
    """Add a job that is due each second.

    Its claims may take many seconds on a busy machine, so the scheduler skips no run time for it.
    """
    following = last_second() + timedelta(seconds=1)
    every = {"hours": 0, "seconds": 1, "next_run_time": following, "max_instances": 60}
    add(replica, function, start, **{**every, **changes})


def misses(operator: TaskLocks, task: str = "job") -> list[Run]:
    return operator.runs(task, outcome="missed")


def one_miss(operator: TaskLocks, task: str = "job", run_times: int = 1) -> Run:
    """Wait until so many run times are told as missed, and return their entry, which may grow."""
    eventually(lambda: sum(miss.run_times or 0 for miss in misses(operator, task)) >= run_times)
    [miss] = misses(operator, task)
    return miss


class TestReasons:
    @pytest.mark.parametrize("paused", [False, True], ids=["late", "paused"])
    def test_of_a_stored_job(
        self, database_url: str, operator: TaskLocks, connection: Connection, paused: bool
    ) -> None:
        replica = StoreReplica(database_url, **OFTEN)
        replica.scheduler.start()
        try:
            later = now() + timedelta(hours=2)
            limits = {"misfire_grace_time": None if paused else 1}
            add(replica, note, later, args=["job"], **limits)
            eventually(lambda: operator.tasks("job"))
            if paused:
                operator.pause("job", by="ann")
                due = last_second() + timedelta(seconds=1)  # after the pause has begun
            else:
                due = last_second() - timedelta(seconds=60)
            replica.scheduler.modify_job("job", next_run_time=due)
            eventually(lambda: now() > due)
            if paused:
                operator.resume("job", by="ann")
            miss = one_miss(operator)
        finally:
            replica.shutdown()
        assert miss.scheduled_at == due
        assert miss.cause == ("paused" if paused else "misfire")
        assert miss.reason is not None
        assert miss.reason.startswith("paused by ann since " if paused else "late by ")


def stored(database_url: str) -> StoreReplica:
    replica = StoreReplica(database_url, **OFTEN)
    replica.scheduler.start()
    return replica


def add_stored(replica: StoreReplica, first: datetime, **options: Any) -> None:
    """Add a job to the shared store that is due each minute, and first at this time."""
    given = {"minutes": 1, "id": "job", "args": ["job"], "misfire_grace_time": None, **options}
    replica.scheduler.add_job(note, "interval", next_run_time=first, **given)


class TestStretchesOfStoredJobs:
    """Each of these tests has a stored job of which nobody ran many run times in a row."""

    def test_a_pause_over_many_run_times_is_one_entry(
        self, database_url: str, operator: TaskLocks, connection: Connection
    ) -> None:
        replica = stored(database_url)
        try:
            add_stored(replica, now() + timedelta(hours=2))
            eventually(lambda: operator.tasks("job"))
            operator.pause("job", by="ann", reason="the supplier moves")
            first = last_second() - timedelta(minutes=59, seconds=5)
            connection.execute("UPDATE task_lock_run SET started_at = %s", [first])
            connection.execute("UPDATE task_lock SET paused_at = %s", [first])
            replica.scheduler.modify_job("job", next_run_time=first)
            operator.resume("job", by="ann")
            miss = one_miss(operator, run_times=60)
        finally:
            replica.shutdown()
        last = first + timedelta(minutes=59)
        assert (miss.scheduled_at, miss.last_scheduled_at, miss.run_times) == (first, last, 60)
        assert (miss.cause, miss.kind) == ("paused", "schedule")
        assert miss.reason is not None
        assert miss.reason.startswith("paused by ann since ")
        assert miss.reason.endswith(": the supplier moves")

    @pytest.mark.parametrize("grace", [None, 1], ids=["made up for", "missed"])
    def test_an_absence_of_all_replicas_is_one_entry(
        self, database_url: str, operator: TaskLocks, connection: Connection, grace: int | None
    ) -> None:
        before = stored(database_url)
        add_stored(before, now() + timedelta(hours=2), misfire_grace_time=grace)
        eventually(lambda: operator.tasks("job"))
        before.shutdown()
        first = last_second() - timedelta(minutes=59, seconds=5)
        connection.execute("UPDATE task_lock_job SET next_run_time = %s", [first])
        replica = stored(database_url)
        try:
            miss = one_miss(operator, run_times=60 if grace else 59)
        finally:
            replica.shutdown()
        last = first + timedelta(minutes=59 if grace else 58)
        assert (miss.scheduled_at, miss.last_scheduled_at) == (first, last)
        assert miss.run_times == (60 if grace else 59)
        assert miss.reason is not None
        if grace:
            assert miss.cause == "misfire"
            late = re.match(r"late by (\d+(?:\.\d)?) s, ", miss.reason)
            assert late is not None
            assert 5 <= float(late[1]) < 60  # counted from the last one
            since = f"{first:%Y-%m-%d %H:%M:%S} UTC"
            assert (
                f" s, over its grace time of 1 s: no replica claimed it between {since} and "
                in (miss.reason)
            )
        else:
            assert miss.cause == "unasked"
            assert miss.reason.startswith("no replica claimed it between ")

    def test_those_of_a_task_without_a_row_are_told_when_it_has_one(
        self, database_url: str, operator: TaskLocks, connection: Connection
    ) -> None:
        """As of a job that a process without a scheduler has added."""
        before = stored(database_url)
        add_stored(before, now() + timedelta(hours=2), misfire_grace_time=1)
        eventually(lambda: operator.tasks("job"))
        before.shutdown()
        first = last_second() - timedelta(minutes=9, seconds=5)
        connection.execute("DELETE FROM task_lock")
        connection.execute("UPDATE task_lock_job SET next_run_time = %s", [first])
        replica = stored(database_url)
        try:
            assert one_miss(operator, run_times=10).scheduled_at == first
        finally:
            replica.shutdown()

    def test_workers_that_were_not_seen_busy_are_no_reason(
        self, database_url: str, operator: TaskLocks, connection: Connection
    ) -> None:
        """The run time came before a pause, and the worker was used again only at its end."""
        replica = StoreReplica(database_url, max_workers=1, **OFTEN)
        replica.scheduler.start()
        try:
            add_stored(replica, now() + timedelta(hours=2), misfire_grace_time=3, minutes=60)
            eventually(lambda: operator.tasks("job"))
            operator.pause("job", by="ann")
            first = now()
            later = [first + timedelta(milliseconds=100)]
            connection.execute("UPDATE task_lock SET paused_at = %s", later)
            connection.execute("UPDATE task_lock_run SET started_at = %s", later)
            replica.scheduler.modify_job("job", next_run_time=first)
            eventually(lambda: now() > first + timedelta(seconds=3.5))
            replica.run_at(note, "after it")
            replica.runs("after it")
            operator.resume("job", by="ann")
            miss = one_miss(operator)
        finally:
            replica.shutdown()
        assert (miss.scheduled_at, miss.cause) == (first, "misfire")
        assert miss.reason is not None
        late, _, why = miss.reason.partition(", over its grace time of 3 s: ")
        assert late.startswith("late by ")
        assert why.startswith(f"no replica claimed it between {first:%Y-%m-%d %H:%M:%S} UTC and ")

    @pytest.mark.parametrize("minutes", [0, 59], ids=["busy over all", "an absence before"])
    def test_busy_workers_are_the_reason_if_they_were_busy_over_all_run_times(
        self, database_url: str, operator: TaskLocks, minutes: int
    ) -> None:
        slow = f"busy {minutes}"  # runs of one name are counted over all tests
        replica, gate = StoreReplica(database_url, max_workers=1, **OFTEN), Gate(slow)
        replica.scheduler.start()
        try:
            add_stored(replica, now() + timedelta(hours=2), misfire_grace_time=1)
            eventually(lambda: operator.tasks("job"))
            added = now()
            replica.run_at(note_and_wait, slow)
            replica.runs(slow)
            claimed_in = now() - added  # which makes nothing late, however slow the machine is
            last = last_second() + timedelta(seconds=2)
            first = last - timedelta(minutes=minutes)
            replica.scheduler.modify_job("job", next_run_time=first)
            eventually(lambda: now() > last + timedelta(seconds=1.1) + claimed_in)
            gate.open()
            miss = one_miss(operator, run_times=minutes + 1)
        finally:
            gate.open()
            replica.shutdown()
        assert (miss.scheduled_at, miss.last_scheduled_at, miss.cause) == (first, last, "misfire")
        assert miss.reason is not None
        _, _, why = miss.reason.partition(", over its grace time of 1 s: ")
        if minutes:
            since = f"{first:%Y-%m-%d %H:%M:%S} UTC"
            assert why.startswith(f"no replica claimed it between {since} and ")
        else:
            assert why == f"all 1 workers were busy (`{slow}` 1)"

    def test_a_long_run_in_the_way_is_one_entry(
        self, database_url: str, operator: TaskLocks, connection: Connection
    ) -> None:
        replica, gate = stored(database_url), Gate("slow")
        try:
            replica.scheduler.add_job(
                note_and_wait,
                "interval",
                minutes=1,
                id="job",
                args=["slow"],
                next_run_time=now(),
                misfire_grace_time=None,
            )
            replica.runs("slow")
            first = last_second() - timedelta(minutes=9, seconds=5)
            # As if that run had begun ten minutes ago.
            connection.execute("UPDATE task_lock SET started_at = %s", [first])
            connection.execute("UPDATE task_lock_job SET next_run_time = %s", [first])
            gate.open()
            miss = one_miss(operator, run_times=9)
        finally:
            gate.open()
            replica.shutdown()
        last = first + timedelta(minutes=8)
        assert (miss.scheduled_at, miss.last_scheduled_at, miss.run_times) == (first, last, 9)
        began = f"a run that began at {first:%Y-%m-%d %H:%M:%S} UTC was not known to be over"
        assert (miss.cause, miss.reason) == ("running", began)

    def test_of_a_job_that_ends_with_them_they_are_told_with_the_last(
        self, database_url: str, operator: TaskLocks, connection: Connection
    ) -> None:
        before = stored(database_url)
        first = last_second() - timedelta(hours=1)
        end = first + timedelta(minutes=9, seconds=1)
        add_stored(before, now() + timedelta(hours=2), end_date=end, misfire_grace_time=60)
        eventually(lambda: operator.tasks("job"))
        before.shutdown()
        connection.execute("UPDATE task_lock_job SET next_run_time = %s", [first])
        replica = stored(database_url)
        try:
            miss = one_miss(operator, run_times=10)
        finally:
            replica.shutdown()
        last = first + timedelta(minutes=9)
        assert (miss.scheduled_at, miss.last_scheduled_at, miss.run_times) == (first, last, 10)
        assert miss.cause == "misfire"


class TestTrueOrNotAtAll:
    @pytest.mark.direct("the pooler keeps connections for a role, and has no login for it")
    @pytest.mark.parametrize("right", ["SELECT", "INSERT", "UPDATE"])
    def test_a_right_on_the_history_that_is_revoked_for_a_moment_loses_nothing(
        self,
        make_replica: MakeReplica,
        operator: TaskLocks,
        database_url: str,
        connection: Connection,
        right: str,
    ) -> None:
        with role(database_url) as (name, url):
            tables = "task_lock, task_lock_run, task_lock_replica"
            connection.execute(f'GRANT SELECT, INSERT, UPDATE ON {tables} TO "{name}"')
            replica = make_replica(url, **OFTEN)
            connection.execute(f'REVOKE {right} ON task_lock_run FROM "{name}"')
            due = last_second() - timedelta(minutes=5)
            add(replica, lambda: None, due, misfire_grace_time=60)
            replica.one(EVENT_JOB_MISSED)
            add_frequent(replica, lambda: None, due, id="other")
            ran = operator.tasks
            eventually(lambda: ran("other") and ran("other")[0].succeeded_at)
            eventually(lambda: any(each.rejected for each in operator.replicas()))
            assert misses(operator) == []
            connection.execute(f'GRANT {right} ON task_lock_run TO "{name}"')
            assert one_miss(operator).scheduled_at == due
            replica.shutdown()


def add_one_off(replica: Replica, at: datetime, function: Callable[..., Any], **job: Any) -> None:
    """Add a one-off job, which is overdue soon after this time."""
    changes = {"id": "job", "misfire_grace_time": 60, **job}
    replica.scheduler.add_job(function, "date", run_date=at, **changes)


def nothing() -> None:
    """Do nothing: the function of a job that is not to run."""


class TestOneOffs:
    def test_that_all_replicas_have_missed_alarms_until_it_is_acknowledged(
        self, make_replica: MakeReplica, operator: TaskLocks, command: Command
    ) -> None:
        replicas = [make_replica(**OFTEN) for _ in range(3)]
        due = last_second() - timedelta(minutes=5)
        for replica in replicas:
            add_one_off(replica, due, nothing)
        miss = one_miss(operator)
        for replica in replicas:
            eventually(lambda replica=replica: not missed_tasks(replica.executor))
        assert one_miss(operator) == miss
        assert (miss.scheduled_at, miss.run_times, miss.cause) == (due, 1, "misfire")
        [task] = operator.tasks()
        assert (task.state, task.missed_at, task.started_at) == (TaskState.MISSED, due, None)
        answer = command("check")
        assert answer.status == 1
        at = f"{due:%Y-%m-%dT%H:%M:%SZ}"
        assert f"WARNING - 1 missed (job at {at}); 1 task | " in answer.out
        shown = command("show", "job").out
        assert f"state        missed: no replica has run it at {at}" in shown
        ack = f"apscheduler-tasklock ack --token {task.token} job"
        assert ack in shown
        assert command(*ack.split()[1:]).status == 0
        assert command("check").status == 0
        assert "its miss alarms no more" in command("show", "job").out
        operator.pause("job", by="ann")
        assert "its miss alarms no more" in command("show", "job").out
        operator.resume("job", by="ann")
        story = operator.why("job")
        assert story.verdict is Verdict.MISSED
        assert story.actions[0].outcome == "acknowledged"

    def test_that_is_missed_again_alarms_again(
        self, make_replica: MakeReplica, operator: TaskLocks, command: Command
    ) -> None:
        """A later job has the same id, and another run date."""
        replica = make_replica(**OFTEN)
        first = last_second() - timedelta(minutes=5)
        add_one_off(replica, first, nothing)
        eventually(lambda: command("check").status == 1)
        assert command("ack", "job").status == 0
        assert command("check").status == 0
        second = first + timedelta(seconds=30)
        add_one_off(replica, second, nothing)
        assert one_miss(operator, run_times=2).last_scheduled_at == second
        assert command("check").status == 1

    @pytest.mark.parametrize("is_first", [True, False], ids=["before", "afterwards"])
    def test_that_another_replica_runs_alarms_nobody(
        self, make_replica: MakeReplica, operator: TaskLocks, command: Command, is_first: bool
    ) -> None:
        due = last_second() - timedelta(minutes=5)
        one, other = (make_replica(**OFTEN) for _ in range(2))
        if is_first:
            add_one_off(other, due, nothing, misfire_grace_time=None)
            eventually(lambda: operator.runs("job", outcome="ok"))
            add_one_off(one, due, nothing)
            one.one(EVENT_JOB_MISSED)
            eventually(lambda: not missed_tasks(one.executor))
        else:
            add_one_off(one, due, nothing)
            one_miss(operator)
            add_one_off(other, due, nothing, misfire_grace_time=None)
        eventually(lambda: [run.outcome for run in operator.runs("job")] == ["ok"])
        assert command("check").status == 0
        [task] = operator.tasks()
        assert (task.state, task.missed_at) == (TaskState.OK, None)

    @pytest.mark.parametrize("is_first", [True, False], ids=["before", "afterwards"])
    def test_whose_run_date_each_replica_has_computed_is_run_by_any_later_run(
        self, make_replica: MakeReplica, operator: TaskLocks, command: Command, is_first: bool
    ) -> None:
        one, other = (make_replica(**OFTEN) for _ in range(2))
        # A miss that was told before a later run is hidden if the run date has microseconds,
        # because users do not write such dates.
        computed = last_second() - timedelta(minutes=5, microseconds=not is_first)
        later = computed + timedelta(seconds=30)
        if is_first:
            add_one_off(other, later, nothing, misfire_grace_time=None)
            eventually(lambda: operator.runs("job", outcome="ok"))
            add_one_off(one, computed, nothing)
            one.one(EVENT_JOB_MISSED)
            eventually(lambda: not missed_tasks(one.executor))
        else:
            add_one_off(one, computed, nothing)
            assert one_miss(operator).scheduled_at == computed
            add_one_off(other, later, nothing, misfire_grace_time=None)
        eventually(lambda: [run.outcome for run in operator.runs("job")] == ["ok"])
        assert command("check").status == 0

    def test_of_an_earlier_run_date_stays_in_the_history_and_alarms_no_more_after_a_run(
        self, make_replica: MakeReplica, operator: TaskLocks, command: Command
    ) -> None:
        replica = make_replica(**OFTEN)
        missed = last_second() - timedelta(minutes=5)
        add_one_off(replica, missed, nothing)
        assert one_miss(operator).scheduled_at == missed
        add_one_off(replica, last_second(), nothing, misfire_grace_time=None)
        eventually(lambda: operator.runs("job", outcome="ok"))
        assert command("check").status == 0
        assert one_miss(operator).scheduled_at == missed

    def test_that_fell_into_a_pause_of_all_tasks_tells_the_pause(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        operator.pause_all(duration=None, by="bob", reason="a move")
        replica = make_replica(**OFTEN)
        due = last_second()
        add_one_off(replica, due, nothing, misfire_grace_time=None)
        miss = one_miss(operator)
        assert (miss.scheduled_at, miss.cause) == (due, "paused")
        assert miss.reason is not None
        assert miss.reason.startswith("paused with all tasks by bob since ")

    def test_of_the_shared_store_alarms_until_it_is_acknowledged(
        self, database_url: str, operator: TaskLocks, command: Command
    ) -> None:
        replica = StoreReplica(database_url, **OFTEN)
        due = last_second() - timedelta(minutes=5)
        replica.scheduler.add_job(
            note, "date", run_date=due, id="job", args=["job"], misfire_grace_time=60
        )
        replica.scheduler.start()
        try:
            assert one_miss(operator).scheduled_at == due
            eventually(lambda: not missed_tasks(replica.executor))
            one_miss(operator)
        finally:
            replica.shutdown()
        answer = command("check")
        assert answer.status == 1
        assert "1 missed (job at " in answer.out
        assert command("ack", "job").status == 0
        assert command("check").status == 0

    def test_of_the_shared_store_whose_run_date_is_long_past_is_told(
        self, database_url: str, operator: TaskLocks
    ) -> None:
        """Its own row tells that it has not run, however long ago its run date is."""
        replica = StoreReplica(database_url, **OFTEN)
        due = last_second() - timedelta(days=9)
        replica.scheduler.add_job(
            note, "date", run_date=due, id="job", args=["job"], misfire_grace_time=60
        )
        replica.scheduler.start()
        try:
            assert one_miss(operator).scheduled_at == due
        finally:
            replica.shutdown()

    def test_of_the_shared_store_is_moved_on_although_the_row_of_its_task_is_locked(
        self, database_url: str, direct_url: str, operator: TaskLocks, connection: Connection
    ) -> None:
        replica = StoreReplica(database_url, job_defaults={}, **OFTEN)
        due = last_second() - timedelta(minutes=5)
        replica.scheduler.add_job(
            note, "date", run_date=due - timedelta(seconds=9), id="job", args=["job"]
        )
        replica.scheduler.start()
        try:
            replica.runs("job")
            eventually(lambda: operator.runs("job", outcome="ok"))
            with psycopg.connect(direct_url) as blocker:
                blocker.execute("SELECT FROM task_lock FOR UPDATE")
                for job_id in ("job", "other"):
                    replica.scheduler.add_job(
                        note,
                        "date",
                        run_date=due,
                        id=job_id,
                        args=[job_id],
                        misfire_grace_time=60,
                        replace_existing=True,
                    )
                eventually(lambda: not replica.scheduler.get_jobs())
            for task in ("job", "other"):
                assert one_miss(operator, task).scheduled_at == due
        finally:
            replica.shutdown()


HOURLY_TO_2_HOURS = "from every 1 h to every 2 h"


def changes(operator: TaskLocks) -> list[tuple[str | None, str | None]]:
    """Return who has changed the schedule, and how, the newest first."""
    done = operator.runs("job", kind="operator")
    return [(each.by, each.reason) for each in done if each.outcome == "rescheduled"]


def is_near(due_at: datetime | None, at: datetime) -> bool:
    """Return whether a task is due then. A registered due time is not exact."""
    return due_at is not None and abs(due_at - at) < timedelta(seconds=30)


class TestMovedSchedules:
    def test_the_schedule_of_a_new_version_moved_past_it(
        self, make_replica: MakeReplica, operator: TaskLocks, command: Command
    ) -> None:
        old = make_replica(replica_id="web-1", **OFTEN)
        due = last_second() + timedelta(seconds=10)
        add(old, nothing, due)
        eventually(lambda: operator.tasks("job"))
        old.shutdown()
        new = make_replica(replica_id="web-2", **OFTEN)
        following = due + timedelta(hours=1)
        add(new, nothing, following, hours=2)
        miss = one_miss(operator)
        assert (miss.scheduled_at, miss.cause, miss.replica) == (due, "moved", "web-2")
        assert miss.reason == f"the schedule was moved {HOURLY_TO_2_HOURS} by web-2"
        story = operator.why("job")
        assert (story.verdict, story.miss) == (Verdict.MISSED, miss)
        assert [each.outcome for each in story.actions] == ["rescheduled"]
        assert f"rescheduled by web-2 ({HOURLY_TO_2_HOURS})" in command("why", "job").out
        assert f"rescheduled by web-2 ({HOURLY_TO_2_HOURS})" in command("show", "job").out
        told = command("runs", "--kind", "operator").out
        assert f"by web-2 ({HOURLY_TO_2_HOURS})" in told

    # Its parts are found by tests/unit/test_missed_runs.py and tests/contract/test_misses.py.
    @pytest.mark.nightly
    def test_a_stored_job_that_is_changed_while_it_is_scheduled(
        self, database_url: str, operator: TaskLocks
    ) -> None:
        replica = StoreReplica(database_url, replica_id="web-1", **OFTEN)
        replica.scheduler.start()
        try:
            due = last_second() + timedelta(seconds=3)
            add(replica, note, due, args=["job"])
            eventually(lambda: operator.tasks("job"))
            following = due + timedelta(hours=1)
            replica.scheduler.reschedule_job(
                "job", trigger="interval", hours=2, start_date=following
            )
            miss = one_miss(operator)
        finally:
            replica.shutdown()
        assert (miss.scheduled_at, miss.cause) == (due, "moved")
        assert changes(operator) == [("web-1", HOURLY_TO_2_HOURS)]

    # Its parts are found by tests/unit/test_missed_runs.py and tests/contract/test_misses.py.
    @pytest.mark.nightly
    def test_a_replica_of_the_old_version_still_runs_it(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        old, new = (make_replica(replica_id=name, **OFTEN) for name in ("web-1", "web-2"))
        due = last_second() + timedelta(seconds=3)
        add(old, nothing, due)
        eventually(lambda: operator.tasks("job"))
        add(new, nothing, due + timedelta(hours=1), hours=2)
        eventually(lambda: changes(operator) == [("web-2", HOURLY_TO_2_HOURS)])
        assert missed_tasks(new.executor) == {"job"}
        eventually(lambda: operator.runs("job", outcome="ok"))
        eventually(lambda: not missed_tasks(new.executor))
        assert misses(operator) == []

    @pytest.mark.nightly
    def test_versions_that_run_side_by_side_tell_no_wrong_miss(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        """The old version runs each second, and writes its schedule with each claim."""
        old, new = (make_replica(replica_id=name, **OFTEN) for name in ("web-1", "web-2"))
        start = last_second()
        add_frequent(old, nothing, start)
        eventually(lambda: operator.runs("job", outcome="ok"))
        later = start + timedelta(hours=1)
        add(new, nothing, later)
        for seconds in (10, 20, 30, 40):  # each registers the new version's schedule again
            later += timedelta(seconds=seconds)
            new.scheduler.modify_job("job", next_run_time=later)
            runs = len(operator.runs("job", outcome="ok"))
            eventually(lambda runs=runs: len(operator.runs("job", outcome="ok")) > runs + 1)
        old.shutdown()
        eventually(lambda: not missed_tasks(new.executor))
        assert changes(operator) == [("web-2", "from every 1 s to every 1 h")]
        assert misses(operator) == []  # a run within the minute before counts as its run


def test_a_run_that_has_just_begun_does_not_wait_for_a_worker(make_replica: MakeReplica) -> None:
    """Nobody wakes the replica's thread when it begins, so that its queue hears of it later."""
    replica = make_replica()
    go_on = threading.Event()
    replica.run_once(lambda: go_on.wait(60))
    runs = runs_of(executors_of(replica.scheduler)["default"])
    eventually(lambda: runs.is_running("job"))
    waits = runs.waits_for_worker("job")
    go_on.set()
    assert not waits
