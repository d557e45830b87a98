"""The statements of the job store, on a clock that travels: what is handed out, claimed, changed.

Each mutation that would lose or double a run time has a test here that fails by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.jobs import (
    MOST_RECURRING,
    Fetched,
    HandedOutRow,
    JobChange,
    JobRow,
    JobRows,
)
from apscheduler_tasklock._lock.messages import ClaimAnswer, ClaimRequest, HandOut
from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock.errors import TaskLockStateError
from apscheduler_tasklock.schema.table import EARLIEST, LATEST, task_lock_table
from tests.contract.conftest import Replica, database_now, row
from tests.support.job_rows import change_job, job_row, wal_bytes

# The job store has its rows in PostgreSQL only.
pytestmark = pytest.mark.postgresql

Connection = psycopg.Connection[Any]
Travel = Callable[[float], None]
PERIOD = timedelta(seconds=60)


class JobReplica(Replica):
    """A replica that has the job store as well."""

    def __init__(self, name: str, connection: Connection) -> None:
        super().__init__(name, connection)
        self.jobs = JobRows(task_lock_table(), name)

    @property
    def now(self) -> datetime:
        return database_now(self.connection)

    def add(self, job_id: str = "job", *, due_in: float = 0.0, **change: Any) -> bool:
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

    def fetch(self, free: Mapping[str, int] | int = 10, **options: Any) -> Fetched:
        free = {"default": free} if isinstance(free, int) else free
        return self.jobs.fetch(self.cursor, free, **options)

    def one(self, **options: Any) -> HandedOutRow:
        """Fetch, and return the one job that is handed out."""
        [found] = self.fetch(**options).jobs
        return found

    def claim_job(
        self,
        found: HandedOutRow,
        *,
        period: timedelta | None = PERIOD,
        claim_id: UUID | None = None,
        stable: bool = True,
        task: str | None = None,
        **request: Any,
    ) -> ClaimAnswer | None:
        hand_out = handed(found, period)
        asked = ClaimRequest(
            task or f"task of {found.row.id}",
            min_lock=0,
            max_lock=50,
            run_time=hand_out.run_time,
            exact=True,
            claim_id=claim_id or uuid4(),
            hand_out=hand_out,
            **{"runs": "jobs:job", "lease": 10, "next_in": 60, **request},
        )
        return self.protocol.claim_handed_out(self.cursor, asked, stable=stable)

    def claims_job(self, found: HandedOutRow, **request: Any) -> bool:
        answer = self.claim_job(found, **request)
        return answer is not None and answer.granted

    def pause_task(self, task: str) -> None:
        self.connection.execute(
            "UPDATE task_lock SET paused_at = now(), paused_until = NULL WHERE task_name = %s",
            [task],
        )

    def resume_task(self, task: str) -> None:
        self.connection.execute(
            "UPDATE task_lock SET paused_until = now() WHERE task_name = %s", [task]
        )


def handed(found: HandedOutRow, period: timedelta | None = PERIOD) -> HandOut:
    run_time = found.row.next_run_time
    assert run_time is not None
    following = None if period is None else run_time + period
    return HandOut(found.row.id, found.handed_id, run_time, following, due_at=0.0)


@pytest.fixture
def one(replicas_connection: Connection) -> JobReplica:
    return JobReplica("one", replicas_connection)


@pytest.fixture
def other(replicas_connection: Connection) -> JobReplica:
    return JobReplica("other", replicas_connection)


class TestFetch:
    def test_hands_out_what_is_due_to_one_replica(self, one: JobReplica, other: JobReplica) -> None:
        one.add("job", due_in=-1)
        one.add("later", due_in=30)
        fetched = one.fetch()
        assert [each.row.id for each in fetched.jobs] == ["job"]
        assert fetched.next_in == 30
        assert fetched.database_time == one.now
        assert other.fetch().jobs == []
        assert job_row(one.connection)["handed_to"] == "one"

    def test_hands_it_out_again_when_the_hand_out_has_ended(
        self, one: JobReplica, other: JobReplica, travel: Travel
    ) -> None:
        one.add()
        first = one.one()
        travel(4.9)
        assert other.fetch().jobs == []
        travel(0.2)
        again = other.one()
        assert (first.first_late_by, again.first_late_by) == (None, 0)
        assert again.handed_id != first.handed_id

    def test_is_not_late_by_nature_what_nobody_was_there_for(
        self, one: JobReplica, travel: Travel
    ) -> None:
        one.add()
        one.fetch()
        travel(100)
        assert one.one().first_late_by is None

    @pytest.mark.parametrize(
        ("kind", "due_in"), [("manual", 10), ("manual", -10), ("schedule", 10)]
    )
    def test_counts_what_came_due_while_its_task_ran_by_hand_as_handed_out_in_time(
        self, one: JobReplica, travel: Travel, kind: str, due_in: float
    ) -> None:
        one.add(due_in=due_in, task_name="task of job")
        claim_id, _ = one.claim("task of job", lease=None)
        one.connection.execute("UPDATE task_lock SET kind = %s", [kind])
        travel(20)
        one.release(claim_id, "task of job")
        assert one.one().first_late_by == (0 if (kind, due_in) == ("manual", 10) else None)

    def test_begins_with_what_is_due_for_longest_and_takes_no_more_than_there_are_workers(
        self, one: JobReplica, other: JobReplica
    ) -> None:
        for number in range(5):
            one.add(f"job {number}", due_in=-10 + number)
        assert [each.row.id for each in one.fetch(free=2).jobs] == ["job 0", "job 1"]
        assert [each.row.id for each in other.fetch(free=9).jobs] == ["job 2", "job 3", "job 4"]

    def test_counts_workers_by_executor_and_leaves_others_executors_alone(
        self, one: JobReplica
    ) -> None:
        for number in range(2):
            one.add(f"a{number}", due_in=-2, executor="a")
            one.add(f"b{number}", due_in=-2, executor="b")
            one.add(f"gone{number}", due_in=-2, executor="gone")
        found = one.fetch(free={"a": 1, "b": 5}).jobs
        assert sorted(each.row.id for each in found) == ["a0", "b0", "b1"]
        assert one.fetch(free={}).next_in is None

    def test_leaves_alone_what_cannot_be_imported_or_runs_here(self, one: JobReplica) -> None:
        one.add("job", func="gone:away")
        assert one.fetch(not_here=["gone:away"]).jobs == []
        assert one.fetch(not_these=["job"]).jobs == []
        assert one.fetch(since=one.now).jobs == []
        assert one.one().row.func == "gone:away"

    def test_hands_out_what_has_come_due_since_and_what_is_named(self, one: JobReplica) -> None:
        for number in range(4):
            one.add(f"job {number}", due_in=number - 4)
        found = one.fetch(since=one.now - timedelta(seconds=2), among=["job 0"]).jobs
        assert [each.row.id for each in found] == ["job 0", "job 3"]

    def test_reads_pages_of_what_is_due_and_free(self, one: JobReplica) -> None:
        """Also where many are due at the same time."""
        for number in range(1203):
            one.add(f"job {number}", due_in=-1 - number // 600)
        one.add("elsewhere", due_in=-5, executor="elsewhere")
        one.add("gone", due_in=-5, func="gone:away")
        one.add("handed out", due_in=-5)
        one.one(among=["handed out"], since=one.now)
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

    def test_a_page_ends_after_large_rows(self, one: JobReplica) -> None:
        """Also where PostgreSQL has compressed them to few bytes."""
        for number in range(5):
            one.add(f"job {number}", due_in=number - 5, arguments={"args": ["x" * 490_000]})
        found = one.jobs.due(one.cursor, ["default"], one.now, None)
        assert [row.id for row in found] == ["job 0", "job 1", "job 2"]

    def test_what_has_a_long_name_is_read_cut_or_not_at_all(self, one: JobReplica) -> None:
        """Under its whole id a job can be removed."""
        one.add("x" * 1001, due_in=-1)
        one.add("long", due_in=-1, func="x" * 5000, signature="x" * 5000, task_name="x" * 1001)
        [found] = one.fetch().jobs
        assert found.row.id == "long"
        names = found.row.func, found.row.signature, found.row.task_name
        assert [len(name or "") for name in names] == [1001, 1001, 1001]
        assert one.jobs.recurring(one.cursor) == []
        assert sorted(len(row.id) for row in one.jobs.read_all(one.cursor)) == [4, 1001]
        assert one.jobs.remove(one.cursor, "x" * 1001)

    def test_leaves_alone_a_job_whose_task_runs_until_it_is_released(
        self, one: JobReplica, other: JobReplica, travel: Travel
    ) -> None:
        one.add()
        claim_id = uuid4()
        assert one.claims_job(one.one(), claim_id=claim_id, lease=500, period=timedelta(0))
        assert other.fetch().jobs == []
        one.release(claim_id, "task of job")
        assert other.one().row.id == "job"

    def test_leaves_alone_a_job_whose_task_is_paused(self, one: JobReplica) -> None:
        one.add(task_name="task")
        one.granted("task", lease=1)
        one.connection.execute("UPDATE task_lock SET finished_at = now()")
        one.pause_task("task")
        assert one.fetch().jobs == []
        one.resume_task("task")
        assert one.one().paused_until == one.now

    def test_of_nothing_that_is_due_writes_nothing(self, one: JobReplica) -> None:
        one.add(due_in=60)
        one.fetch()
        assert wal_bytes(one.connection, one.fetch) == 0

    def test_leaves_alone_what_is_paused_or_has_ended(self, one: JobReplica) -> None:
        one.jobs.add(one.cursor, "paused", one.changed(None), uuid4())
        one.add("ended")
        assert one.claims_job(one.one(), period=None)
        one.connection.execute("UPDATE task_lock SET finished_at = now()")
        assert one.fetch().jobs == []


class TestHandOut:
    def test_stands_for_longer_when_it_is_renewed(
        self, one: JobReplica, other: JobReplica, travel: Travel
    ) -> None:
        one.add()
        found = one.one()
        travel(4)
        assert one.jobs.renew(one.cursor, [found.handed_id, uuid4()]) == {found.handed_id}
        travel(4)
        assert other.fetch().jobs == []

    @pytest.mark.parametrize("waits", [False, True])
    def test_that_is_given_back_is_handed_out_again_at_once(
        self, one: JobReplica, other: JobReplica, waits: bool
    ) -> None:
        """It was handed out in time before, unless it has waited for the end of a run."""
        one.add(due_in=-3)
        found = one.one()
        one.jobs.give_back(one.cursor, [found.handed_id], waits=waits)
        again = other.one()
        assert again.first_late_by == (None if waits else 3)
        assert not one.claims_job(found)
        assert other.claims_job(again)

    def test_keeps_when_it_came_first_while_replicas_die_and_give_it_back(
        self, one: JobReplica, other: JobReplica, travel: Travel
    ) -> None:
        one.add(due_in=-3)
        found = one.one()
        travel(50)  # it died
        found = other.one()
        assert found.first_late_by == 3
        other.jobs.give_back(other.cursor, [found.handed_id])
        travel(50)
        found = one.one()
        assert found.first_late_by == 3
        assert one.changes(due_in=None, moves=False)  # its name, say
        travel(50)
        assert other.one().first_late_by == 3

    def test_begins_anew_with_a_run_time_that_a_user_has_moved(self, one: JobReplica) -> None:
        one.add(due_in=-3)
        one.one()
        assert one.changes(due_in=-2)
        assert one.one().first_late_by is None

    @pytest.mark.parametrize("by", ["claim", "settle"])
    def test_begins_anew_with_the_next_run_time(
        self, one: JobReplica, travel: Travel, by: str
    ) -> None:
        one.add()
        found = one.one()
        if by == "claim":
            claim_id = uuid4()
            assert one.claims_job(found, claim_id=claim_id)
            one.release(claim_id, "task of job")
        else:
            assert one.jobs.settle(one.cursor, handed(found))
        travel(61)
        assert one.one().first_late_by is None

    def test_of_a_missed_run_time_is_settled_once(self, one: JobReplica) -> None:
        one.add()
        found = one.one()
        assert one.jobs.settle(one.cursor, handed(found))
        assert not one.jobs.settle(one.cursor, handed(found))
        settled = job_row(one.connection)
        assert settled["next_run_time"] == one.now + PERIOD
        assert (settled["last_run_time"], settled["handed_id"], settled["ended"]) == (
            None,
            None,
            False,
        )

    @pytest.mark.parametrize("has_run", [False, True])
    def test_of_the_last_run_time_that_is_missed_is_in_the_history(
        self, one: JobReplica, travel: Travel, has_run: bool
    ) -> None:
        one.add()
        if has_run:
            claim_id = uuid4()
            assert one.claims_job(one.one(), claim_id=claim_id, period=timedelta(0))
            one.end(claim_id, "task of job", outcome="ok")
        missed = handed(one.one(), period=None)
        assert one.jobs.settle_missed(one.cursor, missed, "task of job")
        assert not one.jobs.settle_missed(one.cursor, missed, "task of job")
        read = "SELECT outcome, token, scheduled_at, replica FROM task_lock_run ORDER BY token"
        *_, entry = one.connection.execute(read).fetchall()
        assert (entry[0], entry[2:]) == ("missed", (one.now, "one"))
        tokens = "SELECT token, recorded FROM task_lock"
        recorded = 2 if has_run else 1
        assert one.connection.execute(tokens).fetchall() == [(entry[1], recorded)]
        assert one.connection.execute(read).rowcount == recorded
        travel(Timings().ended_kept + 1)
        assert one.jobs.sweep(one.cursor) == 1

    def test_of_a_run_time_that_is_missed_and_not_the_last_is_told_elsewhere(
        self, one: JobReplica
    ) -> None:
        one.add()
        assert one.jobs.settle_missed(one.cursor, handed(one.one()), "task of job")
        assert one.connection.execute("SELECT FROM task_lock_run").rowcount == 0
        assert job_row(one.connection)["next_run_time"] == one.now + PERIOD

    def test_that_is_missed_ends_the_job_also_where_no_history_can_be_written(
        self, one: JobReplica
    ) -> None:
        one.add()
        missed = handed(one.one(), period=None)
        one.connection.execute("DROP TABLE task_lock_run")
        assert one.jobs.settle_missed(one.cursor, missed, "task of job")
        assert job_row(one.connection)["ended"]

    def test_of_a_job_without_a_lock_notes_its_run(self, one: JobReplica) -> None:
        one.add()
        assert one.jobs.settle(one.cursor, handed(one.one()), runs=True)
        assert job_row(one.connection)["last_run_time"] == one.now

    def test_that_has_ended_settles_nothing(
        self, one: JobReplica, other: JobReplica, travel: Travel
    ) -> None:
        one.add()
        found = one.one()
        travel(6)
        other.fetch()
        assert not one.jobs.settle(one.cursor, handed(found))


class TestClaim:
    def test_takes_the_task_and_moves_the_job_on(self, one: JobReplica) -> None:
        one.add()
        answer = one.claim_job(one.one())
        assert answer is not None
        assert (answer.granted, answer.holder, answer.window_start) == (True, "one", one.now)
        moved, lock = job_row(one.connection), row(one.connection, "task of job")
        assert moved["next_run_time"] == one.now + PERIOD == lock["due_at"]
        assert (moved["last_run_time"], moved["task_name"]) == (one.now, "task of job")
        assert (moved["handed_id"], moved["handed_to"], moved["handed_until"]) == (None,) * 3
        assert lock["finished_at"] is None
        assert moved["version"] == 1

    def test_takes_a_task_that_has_a_row(self, one: JobReplica) -> None:
        one.add()
        first, second = uuid4(), uuid4()
        assert one.claims_job(one.one(), claim_id=first, period=timedelta(0))
        token = row(one.connection, "task of job")["token"]
        one.release(first, "task of job")
        answer = one.claim_job(one.one(), claim_id=second)
        assert answer is not None
        assert (answer.granted, answer.token) == (True, token + 1)

    def test_of_the_last_run_time_ends_the_job(self, one: JobReplica, travel: Travel) -> None:
        one.add()
        claim_id = uuid4()
        assert one.claims_job(one.one(), period=None, is_last=True, claim_id=claim_id)
        assert job_row(one.connection)["ended"]
        assert one.jobs.read(one.cursor, "job") is None
        assert one.jobs.read(one.cursor, "job", ended=True) is not None
        travel(9)
        assert one.jobs.sweep(one.cursor) == 0
        one.release(claim_id, "task of job")
        assert one.jobs.sweep(one.cursor) == 0, "its addition may be asked for again"
        travel(2)
        assert one.jobs.sweep(one.cursor) == 1
        assert one.connection.execute("SELECT FROM task_lock").rowcount == 1

    def test_that_is_asked_again_under_its_id_was_granted_once(self, one: JobReplica) -> None:
        """Its answer was lost."""
        one.add()
        found, claim_id = one.one(), uuid4()
        first = one.claim_job(found, claim_id=claim_id)
        before = job_row(one.connection)
        again = one.claim_job(found, claim_id=claim_id)
        assert first is not None
        assert again is not None
        assert (again.granted, again.token) == (True, first.token)
        assert job_row(one.connection) == before

    def test_that_arrives_late_after_its_release_is_not_granted(self, one: JobReplica) -> None:
        one.add()
        found, claim_id = one.one(), uuid4()
        assert one.claims_job(found, claim_id=claim_id)
        one.release(claim_id, "task of job")
        assert not one.claims_job(found, claim_id=claim_id)
        assert row(one.connection, "task of job")["finished_at"] is not None

    def test_of_a_hand_out_that_has_ended_and_went_to_another_is_withdrawn(
        self, one: JobReplica, other: JobReplica, travel: Travel
    ) -> None:
        one.add()
        found = one.one()
        travel(6)
        again = other.one()
        assert one.claim_job(found) is None
        assert other.claims_job(again)
        answer = one.claim_job(found)
        assert answer is not None
        assert (answer.granted, answer.withdrawn, answer.running) == (False, True, True)

    @pytest.mark.parametrize("change", ["change", "pause", "remove", "remove all", "replace"])
    def test_after_a_users_change_has_returned_is_withdrawn(
        self, one: JobReplica, other: JobReplica, change: str
    ) -> None:
        one.add()
        found = one.one()
        if change == "change":
            other.changes(executor="a", moves=False)
        elif change == "pause":
            other.changes(due_in=None)
        elif change == "remove all":
            other.jobs.remove_all(other.cursor)
        else:
            other.jobs.remove(other.cursor, "job")
            if change == "replace":
                other.add()
        assert one.claim_job(found) is None
        assert one.connection.execute("SELECT FROM task_lock").rowcount == 0

    def test_that_is_refused_leaves_the_job_where_it_is(
        self, one: JobReplica, other: JobReplica
    ) -> None:
        """As when the task was claimed by hand meanwhile."""
        one.add()
        found = one.one()
        assert other.granted("task of job", lease=30)
        before = job_row(one.connection)
        answer = one.claim_job(found)
        assert answer is not None
        assert (answer.granted, answer.running, answer.withdrawn) == (False, True, False)
        assert job_row(one.connection) == before

    def test_of_a_task_that_is_paused_is_refused(self, one: JobReplica) -> None:
        one.add()
        claim_id = uuid4()
        assert one.claims_job(one.one(), claim_id=claim_id, period=timedelta(0))
        one.release(claim_id, "task of job")
        found = one.one()
        one.pause_task("task of job")
        answer = one.claim_job(found)
        assert answer is not None
        assert (answer.granted, answer.paused) == (False, True)
        one.resume_task("task of job")
        assert one.claims_job(found), "a run time of before the resumption is the store's to judge"

    def test_waits_for_a_dead_run_that_is_run_again_first(
        self, one: JobReplica, other: JobReplica, travel: Travel
    ) -> None:
        one.add()
        dead = uuid4()
        assert one.claims_job(one.one(), claim_id=dead, failover=True)
        travel(61)
        one.connection.execute("UPDATE task_lock SET run_until = now() + interval '1 min'")
        found = other.one()
        answer = other.claim_job(found, failover=True)
        assert answer is not None
        assert (answer.granted, answer.waits) == (False, True)
        assert other.takes_over(dead, "task of job")

    def test_follows_a_dead_run_that_is_not_run_again_once_rows_are_believed(
        self, one: JobReplica, other: JobReplica, travel: Travel
    ) -> None:
        one.add()
        assert one.claims_job(one.one())
        travel(61)
        one.connection.execute("UPDATE task_lock SET run_until = now() + interval '1 min'")
        found = other.one()
        assert not other.claims_job(found, stable=False)
        assert other.claims_job(found)
        history = one.connection.execute("SELECT outcome, replica FROM task_lock_run").fetchall()
        assert history == [("died", "one")]

    def test_is_of_no_window(self, one: JobReplica) -> None:
        """Run times a second apart, on a task whose last window would last for an hour."""
        one.add(task_name="task of job")
        claim_id, _ = one.claim("task of job", min_lock=3600)
        one.release(claim_id, "task of job")
        assert one.claims_job(one.one())

    def test_of_two_at_once_only_one_is_granted(self, one: JobReplica, direct_url: str) -> None:
        """The second waits for the first one's row, and then looks at what that made of it."""
        one.add()
        found = one.one()
        with psycopg.connect(direct_url) as connection:
            other = JobReplica("other", connection)
            assert other.claims_job(found)  # not committed yet
            with pytest.raises(psycopg.errors.LockNotAvailable):
                JobReplicaInAHurry("one", one.connection).claim_job(found)
        assert not one.claims_job(found)
        assert row(one.connection, "task of job")["locked_by"] == "other"


def test_of_very_many_recurring_jobs_those_due_next_are_listed(
    one: JobReplica, connection: psycopg.Connection[Any]
) -> None:
    one.add("later", due_in=3 * 10**6, task_name="later")
    one.add("soon", due_in=1, task_name="soon")
    connection.execute(
        """
        INSERT INTO task_lock_job (id, func, trigger, options, arguments, executor, version,
                                   added_id, next_run_time, ended, task_name)
        SELECT 'many ' || n, func, trigger, options, arguments, executor, version, added_id,
               now() + interval '1 day', false, 'many ' || n
        FROM task_lock_job, generate_series(1, %s) AS n WHERE id = 'later'
        """,
        [MOST_RECURRING],
    )
    found = [task.job_id for task in one.jobs.recurring(one.cursor)]
    assert (found.count("soon"), found.count("later")) == (1, 0)
    assert len(found) == MOST_RECURRING + 1


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
        assert one.jobs.settle(one.cursor, handed(missed, timedelta(seconds=600)))
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
        assert again.first_late_by == 0, "it is no misfire"
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
        travel(1000)
        assert other.one().first_late_by == 0

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
        assert answer is not None
        travel(11)
        return answer.token

    @staticmethod
    def free(replica: JobReplica, token: int, *, run_again: bool = True) -> None:
        operations = Operations(task_lock_table())
        operations.free(
            replica.cursor, "task of job", token, force=False, run_again=run_again, slots=100
        )


class JobReplicaInAHurry(JobReplica):
    def __init__(self, name: str, connection: Connection) -> None:
        super().__init__(name, connection)
        self.protocol = type(self.protocol)(task_lock_table(), name, 0.05)


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
        for found in one.fetch().jobs:
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


class TestUsersChanges:
    def test_an_added_job_is_read_as_it_was_added(self, one: JobReplica) -> None:
        signed = {"definition_id": uuid4(), "signature": "s"}
        assert one.add(arguments={"args": [1.0, "é"]}, task_name="task", **signed)
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
        )

    def test_an_id_that_is_taken_is_a_conflict_except_for_a_repeated_call(
        self, one: JobReplica
    ) -> None:
        added_id = uuid4()
        assert one.jobs.add(one.cursor, "job", one.changed(), added_id)
        assert one.jobs.add(one.cursor, "job", one.changed(), added_id)
        assert not one.add()
        assert job_row(one.connection)["version"] == 1

    def test_a_job_that_has_ended_and_still_runs_can_be_added_anew(self, one: JobReplica) -> None:
        one.add()
        assert one.claims_job(one.one(), period=None)
        assert not one.jobs.remove(one.cursor, "job"), "for users it is gone"
        assert one.add(due_in=9)
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
        assert {found.row.id for found in one.fetch().jobs} == {"bad", "good"}

    @pytest.mark.parametrize("value", [EARLIEST, LATEST])
    @pytest.mark.parametrize("change", ["next_run_time", "paused_until"])
    def test_a_time_at_the_limits_keeps_nobody_from_a_second_look(
        self, one: JobReplica, change: str, value: str
    ) -> None:
        one.add("bad", task_name="task of bad")
        one.add("good")
        bad = next(each for each in one.fetch().jobs if each.row.id == "bad")
        assert one.claims_job(bad)
        one.connection.execute("UPDATE task_lock SET finished_at = now()")
        one.connection.execute(
            "UPDATE task_lock_job SET next_run_time = now(), handed_until = now(),"
            " first_handed_at = now()"
        )
        table = "task_lock_job" if change == "next_run_time" else "task_lock"
        one.connection.execute(f"UPDATE {table} SET {change} = {value} WHERE task_name IS NOT NULL")
        assert "good" in {found.row.id for found in one.fetch().jobs}

    def test_the_latest_run_time_keeps_nobody_from_waiting_for_it(self, one: JobReplica) -> None:
        one.add()
        one.connection.execute("UPDATE task_lock_job SET next_run_time = " + LATEST)
        fetched = one.fetch()
        assert fetched.jobs == []
        assert fetched.next_in is not None

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
                return len(list(listening.notifies(timeout=0.2)))

            one.add()
            assert told() == 1
            assert not one.add()
            assert one.claims_job(one.one())
            assert told() == 0
            one.changes(moves=False)
            assert told() == 1
            one.jobs.remove(one.cursor, "job")
            assert told() == 1
