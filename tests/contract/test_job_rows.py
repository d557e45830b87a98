"""The statements of the job store, on a clock that travels: what is due, and what users change.

What is claimed and moved on is in ``test_stored_claims.py``.

Each mutation that would lose or double a run time has a test here that fails by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import takewhile
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from apscheduler_tasklock._lock.job_rows import JobChange, JobRow
from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock._lock.outcomes import RunOutcome
from apscheduler_tasklock.errors import TaskLockStateError
from apscheduler_tasklock.schema.table import EARLIEST, LATEST, task_lock_table
from tests.contract.store_replica import PERIOD, StoreReplica, step
from tests.support.job_rows import change_job, job_row
from tests.support.waist import ReleaseRequest

# The job store has its rows in PostgreSQL only.
pytestmark = pytest.mark.postgresql

Connection = psycopg.Connection[Any]
Travel = Callable[[float], None]


class JobReplica(StoreReplica):
    """A replica whose users change jobs."""

    def adds(self, job_id: str = "job", *, due_in: float = 0.0, **change: Any) -> bool:
        return self.jobs.add(self.cursor, job_id, self.changed(due_in, **change), uuid4())

    def changed(self, due_in: float | None = 0.0, **change: Any) -> JobChange:
        return change_job(self.now, due_in, **change)

    def changes(
        self,
        *,
        due_in: float | None = 0,
        version: int = 1,
        moves: bool = True,
        changed_id: UUID | None = None,
        found: JobRow | None = None,
        **change: Any,
    ) -> bool:
        return self.jobs.change(
            self.cursor,
            "job",
            version,
            self.changed(due_in, **change),
            changed_id or uuid4(),
            moves=moves,
            found=found,
        )


@pytest.fixture
def one(replicas_connection: Connection) -> JobReplica:
    return JobReplica("one", replicas_connection)


@pytest.fixture
def other(replicas_connection: Connection) -> JobReplica:
    return JobReplica("other", replicas_connection)


class TestPages:
    """Of what is due, while many rows of it cannot be run."""

    def test_have_what_has_come_due_since_and_what_is_named(self, one: JobReplica) -> None:
        for number in range(4):
            one.add(f"job {number}", due_in=number - 4)
        assert one.ids(since=one.now - timedelta(seconds=2), among=["job 0"]) == ["job 0", "job 3"]

    def test_have_all_that_may_be_claimed(self, one: JobReplica) -> None:
        """Also where many are due at the same time."""
        for number in range(1203):
            one.add(f"job {number}", due_in=-1 - number // 600)
        one.add("elsewhere", due_in=-5, executor="elsewhere")
        one.add("gone", due_in=-5, func="gone:away")
        one.add("runs", due_in=-5)
        assert one.claims_job(one.one(among=["runs"], since=one.now), period=timedelta(0))
        one.add("later", due_in=1)
        pages: list[int] = []
        found: list[str] = []
        after = None
        while page := one.jobs.due(one.cursor, ["default"], one.now, after, not_here=["gone:away"]):
            pages.append(len(page))
            found += [row.id for row in page]
            assert page[-1].next_run_time is not None
            after = page[-1].next_run_time, page[-1].id
        assert pages == [100] * 12 + [3]
        assert sorted(found) == sorted(f"job {number}" for number in range(1203))
        assert found[:3] == ["job 1200", "job 1201", "job 1202"]

    def test_have_the_oldest_of_more_than_can_be_run(self, one: JobReplica) -> None:
        """However they are called."""
        for number in range(4):
            one.add(f"job {number}", due_in=-number)
        assert one.ids(most=2) == ["job 3", "job 2"]

    def test_end_after_large_rows(self, one: JobReplica) -> None:
        """Also where PostgreSQL has compressed them to few bytes."""
        for number in range(5):
            one.add(f"job {number}", due_in=number - 5, arguments={"args": ["x" * 490_000]})
        found = one.jobs.due(one.cursor, ["default"], one.now, None)
        assert [row.id for row in found] == ["job 0", "job 1", "job 2"]

    def test_have_long_names_cut_or_not_at_all(self, one: JobReplica) -> None:
        """Under its whole id a job can be removed."""
        one.add("x" * 1001, due_in=-1)
        one.add("long", due_in=-1, func="x" * 5000, signature="x" * 5000, task_name="x" * 1001)
        found = one.one()
        assert found.row.id == "long"
        names = found.row.func, found.row.signature, found.row.task_name
        assert [len(name or "") for name in names] == [1001, 1001, 1001]
        assert one.jobs.recurring(one.cursor) == []
        assert sorted(len(row.id) for row in one.jobs.read_all(one.cursor)) == [4, 1001]
        assert one.jobs.remove(one.cursor, "x" * 1001)


class TestWhenATaskRan:
    """From which it is told how late a run time is."""

    def test_of_one_that_has_not_there_is_nothing(self, one: JobReplica) -> None:
        one.add()
        found = one.one()
        assert (found.ran_since, found.ran_until, found.runs_again) == (None, None, False)
        assert found.changed_at == one.now

    def test_it_is_told_from_when_to_when(self, one: JobReplica, travel: Travel) -> None:
        one.add()
        began, claim_id = one.now, uuid4()
        assert one.claims_job(one.one(), period=timedelta(seconds=1), claim_id=claim_id)
        travel(5)
        one.release(claim_id, "task of job")
        ended = one.now
        travel(5)
        found = one.one()
        assert (found.ran_since, found.ran_until, found.runs_again) == (began, ended, False)
        assert found.changed_at == began

    def test_a_dead_run_has_ended_with_its_lease(self, one: JobReplica, travel: Travel) -> None:
        one.add()
        began = one.now
        assert one.claims_job(one.one(), period=timedelta(seconds=1))
        travel(20)
        assert one.one().ran_until == began + timedelta(seconds=10)


class TestStaleTasks:
    """Tasks whose rows do not know when the job is due, since nobody told them."""

    @staticmethod
    def is_stale(replica: JobReplica) -> bool:
        [task] = replica.jobs.recurring(replica.cursor)
        return task.is_stale

    def test_are_those_without_a_row(self, one: JobReplica) -> None:
        one.add(task_name="task of job")
        assert self.is_stale(one)
        assert one.claims_job(one.one(), grace=10)
        assert not self.is_stale(one)

    @pytest.mark.parametrize("due_in", [None, 1000])
    def test_are_those_of_jobs_that_were_paused_or_put_off(
        self, one: JobReplica, due_in: float | None
    ) -> None:
        self.ran(one)
        assert not self.is_stale(one)
        assert one.changes(due_in=due_in)
        assert self.is_stale(one)

    def test_are_not_those_whose_run_time_was_missed(self, one: JobReplica, travel: Travel) -> None:
        """They are overdue."""
        self.ran(one)
        travel(200)
        missed = one.one()
        move = step(missed, timedelta(seconds=600))
        assert one.jobs.move_on(one.cursor, [move])
        assert not self.is_stale(one)

    @pytest.mark.parametrize("later", [95, 150])
    def test_are_those_of_jobs_that_were_put_off_late_or_while_they_ran(
        self, one: JobReplica, travel: Travel, later: float
    ) -> None:
        one.add(due_in=-200, task_name="task of job")
        claim_id = uuid4()
        period = timedelta(seconds=300)
        found = one.one()
        assert one.claims_job(found, period=period, next_in=300, claim_id=claim_id, grace=10)
        if later == 95:  # while it runs
            travel(5)
            assert one.changes(due_in=1000)
            travel(later - 5)
            one.release(claim_id, "task of job")
            travel(10)
        else:
            one.release(claim_id, "task of job")
            travel(90)
            assert one.changes(due_in=1000)
            travel(later - 90)
        assert self.is_stale(one)

    def test_are_those_that_had_ended_and_were_added_again(self, one: JobReplica) -> None:
        one.add(task_name="task of job")
        claim_id = uuid4()
        assert one.claims_job(one.one(), period=None, is_last=True, claim_id=claim_id, grace=10)
        one.release(claim_id, "task of job")
        one.add(due_in=60, task_name="task of job")
        assert self.is_stale(one)

    @staticmethod
    def ran(replica: JobReplica) -> None:
        replica.add(due_in=-200, task_name="task of job")
        claim_id = uuid4()
        assert replica.claims_job(
            replica.one(), period=timedelta(seconds=300), next_in=300, claim_id=claim_id, grace=10
        )
        replica.release(claim_id, "task of job")


class TestFree:
    """An operator ends a run, and has it run again."""

    @pytest.mark.parametrize("period", [PERIOD, None], ids=["recurring", "one-off"])
    def test_makes_the_job_due_at_the_same_run_time(
        self, one: JobReplica, other: JobReplica, travel: Travel, period: timedelta | None
    ) -> None:
        token = self.dead(one, travel, period=period)
        self.free(one, token)
        again = other.one()
        assert again.row.next_run_time == again.row.last_run_time
        assert again.runs_again
        assert again.ran_until == other.now, "it is due from then on"
        assert again.row.version == 2
        assert other.claims_job(again, period=period)
        assert job_row(one.connection)["ended"] == (period is None)

    def test_without_running_it_again_leaves_the_job(self, one: JobReplica, travel: Travel) -> None:
        token = self.dead(one, travel)
        before = job_row(one.connection)
        self.free(one, token, run_again=False)
        assert job_row(one.connection) == before

    def test_is_no_misfire_however_long_it_takes_until_a_worker_is_free(
        self, one: JobReplica, other: JobReplica, travel: Travel
    ) -> None:
        self.free(one, self.dead(one, travel))
        freed_at = other.now
        travel(1000)
        assert (other.one().runs_again, other.one().ran_until) == (True, freed_at)

    def test_lets_nobody_claim_it_who_has_read_it_before(
        self, one: JobReplica, other: JobReplica, travel: Travel
    ) -> None:
        one.add()
        found = other.one()
        answer = one.claim_job(one.one())
        travel(11)
        self.free(one, answer.token)
        assert not other.claims_job(found)
        assert other.claims_job(other.one())

    def test_leaves_a_job_that_users_have_paused(self, one: JobReplica, travel: Travel) -> None:
        token = self.dead(one, travel)
        one.connection.execute("UPDATE task_lock_job SET next_run_time = NULL")
        self.free(one, token)
        assert job_row(one.connection)["next_run_time"] is None

    def test_leaves_a_job_whose_run_it_does_not_end(self, one: JobReplica, travel: Travel) -> None:
        token = self.dead(one, travel)
        before = job_row(one.connection)
        with pytest.raises(TaskLockStateError):
            self.free(one, token - 1)
        assert job_row(one.connection) == before

    @staticmethod
    def dead(replica: JobReplica, travel: Travel, **claim: Any) -> int:
        """Let a run die, and return its token."""
        replica.add()
        answer = replica.claim_job(replica.one(), **claim)
        travel(11)
        return answer.token

    @staticmethod
    def free(replica: JobReplica, token: int, *, run_again: bool = True) -> None:
        operations = Operations(task_lock_table())
        operations.free(
            replica.cursor, "task of job", token, "me", force=False, run_again=run_again
        )


class TestDeadRuns:
    def test_are_found_also_of_a_job_that_has_run_for_the_last_time(
        self, one: JobReplica, other: JobReplica, travel: Travel
    ) -> None:
        one.add(trigger={"type": "date"})
        assert one.claims_job(one.one(), period=None, is_last=True, failover=True)
        assert other.jobs.dead_runs(other.cursor) == []
        travel(11)
        [dead] = other.jobs.dead_runs(other.cursor)
        assert (dead.job_id, dead.task_name) == ("job", "task of job")

    def test_are_found_whatever_became_of_the_job(self, one: JobReplica, travel: Travel) -> None:
        one.add("recurring")
        one.add("one-off")
        one.add("without")
        for found in one.due():
            period = None if found.row.id == "one-off" else PERIOD
            assert one.claims_job(found, period=period, failover=found.row.id != "without")
        assert one.jobs.dead_runs(one.cursor) == []
        travel(11)
        dead = {(run.job_id, run.task_name) for run in one.jobs.dead_runs(one.cursor)}
        assert dead == {
            ("recurring", "task of recurring"),
            ("one-off", "task of one-off"),
        }

    def test_that_were_handed_over_are_found_at_once(self, one: JobReplica) -> None:
        one.add()
        claim_id = uuid4()
        assert one.claims_job(one.one(), claim_id=claim_id)
        one.hand_over(claim_id, "task of job")
        assert [run.job_id for run in one.jobs.dead_runs(one.cursor)] == ["job"]

    def test_keep_a_job_that_has_ended_until_they_are_over(
        self, one: JobReplica, other: JobReplica, travel: Travel
    ) -> None:
        one.add()
        dead, again = uuid4(), uuid4()
        assert one.claims_job(one.one(), period=None, claim_id=dead, failover=True)
        travel(11)
        assert one.jobs.sweep(one.cursor) == 0
        assert other.takes_over(dead, "task of job", claim_id=again)
        assert one.jobs.sweep(one.cursor) == 0
        other.release(again, "task of job")
        assert one.jobs.sweep(one.cursor) == 1

    def test_keep_a_job_that_has_ended_until_no_retry_is_to_come(
        self, one: JobReplica, travel: Travel
    ) -> None:
        one.add()
        claim_id = uuid4()
        assert one.claims_job(one.one(), period=None, claim_id=claim_id)
        failed = RunOutcome(outcome="error", retry_in=30.0, is_last=True)
        one.ask(ReleaseRequest("task of job", claim_id, failed))
        travel(20)
        assert (one.jobs.sweep(one.cursor), one.jobs.dead_runs(one.cursor)) == (0, [])
        travel(11)
        assert [run.job_id for run in one.jobs.dead_runs(one.cursor)] == ["job"]
        assert one.jobs.sweep(one.cursor) == 0
        travel(24 * 3600)  # a retry that has not begun within a day never begins
        assert (one.jobs.sweep(one.cursor), one.jobs.dead_runs(one.cursor)) == (1, [])

    def test_whose_retry_is_to_come_end_with_the_job_if_a_user_removes_it(
        self, one: JobReplica
    ) -> None:
        one.add()
        claim_id = uuid4()
        assert one.claims_job(one.one(), period=None, claim_id=claim_id)
        failed = RunOutcome(outcome="error", retry_in=30.0, is_last=True)
        one.ask(ReleaseRequest("task of job", claim_id, failed))
        assert one.jobs.remove(one.cursor, "job")
        assert not one.jobs.remove(one.cursor, "job")


class TestUsersChanges:
    def test_an_added_job_is_read_as_it_was_added(self, one: JobReplica) -> None:
        signed = {"definition_id": uuid4(), "signature": "s"}
        assert one.adds(arguments={"args": [1.0, "é"]}, task_name="task", **signed)
        assert one.jobs.read(one.cursor, "job") == JobRow(
            "job",
            "jobs:job",
            {"type": "interval"},
            {},
            {"args": [1.0, "é"]},
            "default",
            signed["definition_id"],
            "s",
            1,
            one.now,
            None,
            False,
            "task",
            one.jobs.place(one.cursor),
            token=0,
        )

    def test_a_job_is_read_with_the_token_of_its_task(self, one: JobReplica) -> None:
        """So that its registration writes no due time that a claim has replaced since."""

        def token() -> int | None:
            read = one.jobs.read(one.cursor, "job")
            assert read is not None
            return read.token

        one.add(task_name=None)
        assert token() is None  # another task may have the row of its name
        assert one.claims_job(one.one(), period=PERIOD)
        claimed = one.connection.execute("SELECT token FROM task_lock").fetchone()
        assert claimed == (token(),)

    def test_an_id_that_is_taken_is_a_conflict_except_for_a_repeated_call(
        self, one: JobReplica
    ) -> None:
        added_id = uuid4()
        assert one.jobs.add(one.cursor, "job", one.changed(), added_id)
        assert one.jobs.add(one.cursor, "job", one.changed(), added_id)
        assert not one.adds()
        assert job_row(one.connection)["version"] == 1

    def test_a_job_that_has_ended_and_still_runs_can_be_added_anew(self, one: JobReplica) -> None:
        one.add()
        assert one.claims_job(one.one(), period=None)
        assert not one.jobs.remove(one.cursor, "job"), "for users it is gone"
        assert one.adds(due_in=9)
        assert one.jobs.sweep(one.cursor) == 0
        added = job_row(one.connection)
        assert (added["ended"], added["version"], added["last_run_time"]) == (False, 2, None)

    def test_a_change_of_an_old_version_changes_nothing(self, one: JobReplica) -> None:
        one.add()
        assert one.changes(executor="a", moves=False)
        before = job_row(one.connection)
        assert not one.changes(executor="b", moves=False)
        assert job_row(one.connection) == before
        assert (before["version"], before["executor"]) == (2, "a")

    def test_a_change_of_something_else_leaves_the_run_time_to_the_runs(
        self, one: JobReplica
    ) -> None:
        one.add()
        assert one.claims_job(one.one())
        stale = replace(one.changed(), next_run_time=one.now)
        assert one.jobs.change(one.cursor, "job", 1, stale, uuid4(), moves=False)
        assert job_row(one.connection)["next_run_time"] == one.now + PERIOD

    def test_an_addition_whose_answer_was_lost_is_not_repeated_once_the_job_has_run(
        self, one: JobReplica
    ) -> None:
        added_id, change = uuid4(), one.changed()
        assert one.jobs.add(one.cursor, "job", change, added_id)
        assert one.claims_job(one.one(), period=None, is_last=True)
        assert one.jobs.add(one.cursor, "job", change, added_id)
        assert job_row(one.connection)["ended"]
        assert one.jobs.add(one.cursor, "job", change, uuid4()), "another one is one"
        assert not job_row(one.connection)["ended"]

    def test_a_change_whose_answer_was_lost_is_not_repeated_once_the_job_has_run(
        self, one: JobReplica
    ) -> None:
        one.add(due_in=60)
        changed_id = uuid4()
        assert one.changes(changed_id=changed_id)
        assert one.claims_job(one.one())
        before = job_row(one.connection)
        assert one.changes(changed_id=changed_id)
        assert job_row(one.connection) == before

    @pytest.mark.parametrize(
        ("column", "value"),
        [
            ("next_run_time", EARLIEST),
            ("last_run_time", LATEST),
            ("arguments", f"'{'[' * 4000}{']' * 4000}'"),
            ("arguments", f"'{'9' * 5000}'"),
        ],
        ids=["early", "far away", "deep", "long"],
    )
    def test_a_row_that_python_cannot_read_keeps_nobody_from_reading_the_others(
        self, one: JobReplica, column: str, value: str
    ) -> None:
        one.add("bad")
        one.add("good")
        one.connection.execute(f"UPDATE task_lock_job SET {column} = {value} WHERE id = 'bad'")
        assert {row.id for row in one.jobs.read_all(one.cursor)} == {"bad", "good"}
        assert {found.row.id for found in one.due()} == {"bad", "good"}

    @pytest.mark.parametrize("value", [EARLIEST, LATEST])
    @pytest.mark.parametrize("change", ["next_run_time", "paused_until"])
    def test_a_time_at_the_limits_keeps_nobody_from_a_second_look(
        self, one: JobReplica, change: str, value: str
    ) -> None:
        one.add("bad", task_name="task of bad")
        one.add("good")
        bad = next(each for each in one.due() if each.row.id == "bad")
        assert one.claims_job(bad)
        one.connection.execute("UPDATE task_lock SET finished_at = now()")
        one.connection.execute("UPDATE task_lock_job SET next_run_time = now()")
        table = "task_lock_job" if change == "next_run_time" else "task_lock"
        one.connection.execute(f"UPDATE {table} SET {change} = {value} WHERE task_name IS NOT NULL")
        assert "good" in {found.row.id for found in one.due()}

    def test_the_latest_run_time_keeps_nobody_from_waiting_for_it(self, one: JobReplica) -> None:
        one.add()
        one.connection.execute("UPDATE task_lock_job SET next_run_time = " + LATEST)
        found = one.look()
        assert found.jobs == []
        assert found.next_in is not None

    def test_a_run_time_that_was_computed_from_one_that_has_run_changes_nothing(
        self, one: JobReplica
    ) -> None:
        one.add()
        found = one.jobs.read(one.cursor, "job")
        assert one.claims_job(one.one())
        before = job_row(one.connection)
        assert not one.changes(found=found)
        assert job_row(one.connection) == before
        found = one.jobs.read(one.cursor, "job")
        assert one.changes(due_in=9, found=found)
        assert job_row(one.connection)["next_run_time"] == one.now + timedelta(seconds=9)

    def test_all_are_read_by_their_run_times_and_removed(self, one: JobReplica) -> None:
        one.jobs.add(one.cursor, "paused", one.changed(None), uuid4())
        one.add("later", due_in=9)
        one.add("job")
        assert [each.id for each in one.jobs.read_all(one.cursor)] == ["job", "later", "paused"]
        assert one.jobs.remove(one.cursor, "later")
        assert not one.jobs.remove(one.cursor, "later")
        assert one.jobs.remove_all(one.cursor) == 2
        assert one.jobs.read_all(one.cursor) == []

    @pytest.mark.direct("a pooler tells nobody")
    def test_are_told_to_who_listens_and_runs_are_not(
        self, one: JobReplica, direct_url: str
    ) -> None:
        with psycopg.connect(direct_url, autocommit=True) as listening:
            listening.execute(f'LISTEN "{one.jobs.channel}"')

            def told() -> int:
                # Notifications come in the order of their commits, so what was told is before this.
                listening.execute("SELECT pg_notify(%s, 'end')", [one.jobs.channel])
                payloads = (each.payload for each in listening.notifies())
                return len(list(takewhile(lambda payload: payload != "end", payloads)))

            one.add()
            assert told() == 1
            assert not one.adds()
            assert one.claims_job(one.one())
            assert told() == 0
            one.changes(moves=False)
            assert told() == 1
            one.jobs.remove(one.cursor, "job")
            assert told() == 1
