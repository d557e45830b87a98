"""Due jobs of the store: read, and then claimed and moved on in one statement.

On a clock that travels. Each mutation that would lose or double a run time has a test here that
fails by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from apscheduler_tasklock._database.sqlstates import RowLockedError
from apscheduler_tasklock._lock.job_rows import DueRow
from tests.contract.conftest import row, token_at
from tests.contract.store_replica import PERIOD, StoreReplica, requested, step
from tests.support.job_rows import job_row, wal_bytes
from tests.support.polling import eventually
from tests.support.waist import (
    ClaimAnswer,
    ClaimTimes,
    GrantLimitError,
    JobMove,
    StoredClaims,
    TimedAnswer,
    attempt,
    believing,
    send_together,
)

# The job store has its rows in PostgreSQL only.
pytestmark = pytest.mark.postgresql

Connection = psycopg.Connection[Any]
Travel = Callable[[float], None]
# Not in the order of the names, in which rows are inserted.
JOBS = ("m", "z", "a")


@pytest.fixture
def one(replicas_connection: Connection) -> StoreReplica:
    return StoreReplica("one", replicas_connection)


@pytest.fixture
def other(replicas_connection: Connection) -> StoreReplica:
    return StoreReplica("other", replicas_connection)


class TestRead:
    def test_finds_what_is_due_in_the_order_of_run_times_and_ids(self, one: StoreReplica) -> None:
        one.add("b", due_in=-1)
        one.add("a", due_in=-1)
        one.add("first", due_in=-2)
        one.add("later", due_in=30)
        one.add("paused", due_in=None)
        found = one.look()
        assert [each.row.id for each in found.jobs] == ["first", "a", "b"]
        assert (found.next_in, found.database_time) == (30, one.now)
        assert one.ids(most=2) == ["first", "a"]
        assert one.ids(most=2, newest_first=True) == ["b", "a"]
        assert one.ids(most=0) == []

    def test_leaves_out_what_cannot_run_here(self, one: StoreReplica) -> None:
        one.add("gone", func="gone:away")
        one.add("elsewhere", executor="elsewhere")
        one.add("x" * 1001)
        one.add("job")
        assert one.ids(not_here=["gone:away"]) == ["job"]
        assert one.ids(not_here=["gone:away"], not_these=["job"]) == []
        assert one.jobs.read_due(one.cursor, {}).jobs == []

    def test_of_several_executors_has_each_ones_own_limit(self, one: StoreReplica) -> None:
        for number in range(2):
            one.add(f"a{number}", due_in=-2, executor="a")
            one.add(f"b{number}", due_in=-2, executor="b")
        found = one.jobs.read_due(one.cursor, {"a": 1, "b": 5}).jobs
        assert [each.row.id for each in found] == ["a0", "b0", "b1"]

    def test_writes_nothing_and_locks_nothing(self, one: StoreReplica, direct_url: str) -> None:
        one.add()
        # The server's own processes write now and then; a look that writes does so every time.
        eventually(lambda: wal_bytes(one.connection, one.look) == 0)
        with psycopg.connect(direct_url) as blocker:
            blocker.execute("SELECT FROM task_lock_job FOR UPDATE")
            assert one.ids() == ["job"]

    def test_ends_after_large_rows(self, one: StoreReplica) -> None:
        """Also where PostgreSQL has compressed them to few bytes."""
        for number in range(5):
            one.add(f"job {number}", due_in=number - 5, arguments={"args": ["x" * 490_000]})
        assert one.ids() == ["job 0", "job 1", "job 2"]
        assert one.ids(newest_first=True) == ["job 4", "job 3", "job 2"]


class TestClaim:
    def test_takes_the_lock_and_moves_the_job_on(
        self, one: StoreReplica, other: StoreReplica
    ) -> None:
        one.add()
        found, others = one.one(), other.one()
        claim_id = uuid4()
        answer = one.claim_job(found, claim_id=claim_id)
        assert (answer.granted, answer.holder, answer.claim_id) == (True, "one", claim_id)
        assert answer.window_start == one.now
        job, task = job_row(one.connection), row(one.connection, "task of job")
        assert (job["next_run_time"], job["last_run_time"]) == (one.now + PERIOD, one.now)
        assert (job["ended"], job["task_name"]) == (False, "task of job")
        assert (task["locked_by"], task["finished_at"]) == ("one", None)
        refused = other.claim_job(others)
        assert (refused.granted, refused.withdrawn, refused.running) == (False, True, True)
        assert row(one.connection, "task of job") == task

    def test_of_the_last_run_time_ends_the_job(self, one: StoreReplica) -> None:
        one.add()
        assert one.claims_job(one.one(), period=None)
        job = job_row(one.connection)
        assert (job["next_run_time"], job["ended"]) == (None, True)

    def test_of_a_task_that_has_run_before_gets_a_later_token(
        self, one: StoreReplica, other: StoreReplica, travel: Travel
    ) -> None:
        one.add()
        first = one.claim_job(one.one())
        one.release(first.claim_id, "task of job")
        travel(60)
        second = other.claim_job(other.one())
        assert (second.granted, second.token) == (True, token_at(other.now))

    def test_refused_writes_nothing(
        self, one: StoreReplica, other: StoreReplica, travel: Travel
    ) -> None:
        one.add()
        first = one.claim_job(one.one(), period=timedelta(seconds=1))
        travel(2)
        assert one.ids() == []
        found = other.due(stable=True)
        assert found == []
        one.release(first.claim_id, "task of job")
        found = [one.one()]
        assert one.claims_job(found[0], period=timedelta(seconds=1))
        refuse = [requested(each) for each in found]
        eventually(lambda: wal_bytes(other.connection, lambda: other.claim_jobs(refuse)) == 0)

    def test_sent_again_after_a_lost_answer_is_granted_as_before(self, one: StoreReplica) -> None:
        """The job has moved on, so the claim's own id is looked for before the fence."""
        one.add()
        request = requested(one.one())
        [first] = one.claim_jobs([request]).values()
        before = job_row(one.connection)
        [again] = one.claim_jobs([request]).values()
        assert again._replace(due_at=first.due_at) == first
        assert job_row(one.connection) == before

    @pytest.mark.parametrize("then", ["released", "handed over"])
    def test_that_is_over_is_not_granted_again(self, one: StoreReplica, then: str) -> None:
        """It was held up on its way, and nobody would know of what it got."""
        one.add()
        request = requested(one.one())
        one.claim_jobs([request])
        end = one.release if then == "released" else one.hand_over
        end(request.claim_id, "task of job")
        [again] = one.claim_jobs([request]).values()
        assert (again.granted, again.withdrawn) == (False, True)

    def test_that_nobody_waits_for_any_more_is_not_granted(
        self, one: StoreReplica, travel: Travel
    ) -> None:
        one.add()
        request = requested(one.one())
        times = ClaimTimes(not_after=one.now)
        travel(1)
        [answer] = one.ask(StoredClaims([request], times, 9)).values()
        assert answer.looks_free
        assert one.ids() == ["job"]

    @pytest.mark.parametrize("has_row", [False, True])
    def test_of_two_jobs_of_one_task_moves_the_one_that_it_grants(
        self, one: StoreReplica, has_row: bool
    ) -> None:
        """Their name option is the same. A batch is not to have both; if it has, no job is lost."""
        if has_row:
            one.release(one.claim("both")[0], "both")
        for job_id in ("a", "b"):
            one.add(job_id, task_name="both")
        granted = one.claim_jobs(requested(found, task="both") for found in one.due())
        assert [answer.granted for answer in granted.values()].count(True) == 1
        moved = [job_row(one.connection, each)["last_run_time"] for each in ("a", "b")]
        assert moved.count(None) == 1


# What a user does between the read and the claim.
CHANGES: dict[str, Callable[[StoreReplica], object]] = {
    "pauses it": lambda user: user.change(due_in=None),
    "moves it": lambda user: user.change(due_in=5),
    "gives it another name and keeps its run time": lambda user: user.change(options={"name": "x"}),
    "removes it": lambda user: user.jobs.remove(user.cursor, "job"),
    "removes it and adds it again": lambda user: (
        user.jobs.remove(user.cursor, "job"),
        user.add(due_in=0),
    ),
}


class TestFence:
    @pytest.mark.parametrize("change", CHANGES)
    def test_nothing_is_claimed_of_a_job_that_a_user_has_changed(
        self, one: StoreReplica, other: StoreReplica, change: str
    ) -> None:
        one.add()
        found = one.one()
        CHANGES[change](other)
        before = other.jobs.read(other.cursor, "job")
        answer = one.claim_job(found)
        assert (answer.granted, answer.withdrawn) == (False, True)
        assert other.jobs.read(other.cursor, "job") == before

    def test_nor_of_one_that_was_moved_on_since(
        self, one: StoreReplica, other: StoreReplica
    ) -> None:
        one.add()
        found = one.one()
        claimed = other.claim_job(other.one(), period=timedelta(0))
        other.release(claimed.claim_id, "task of job")
        assert one.claims_job(found)  # with a period of 0 it is as it was read
        one.release(row(one.connection, "task of job")["claim_id"], "task of job")
        assert not one.claims_job(found)

    def test_a_job_that_was_added_again_after_it_ended_has_another_fence(
        self, one: StoreReplica
    ) -> None:
        """Its ``version`` is as of any other change, and its run time may be the same."""
        one.add()
        found = one.one()
        claimed = one.claim_job(found, period=None)
        one.release(claimed.claim_id, "task of job")
        one.add()
        assert not one.claims_job(found)
        assert one.claims_job(one.one())


class TestDeadRuns:
    """What the read passes, the claim grants; what the claim refuses, the read leaves out."""

    def dead(
        self, one: StoreReplica, travel: Travel, *, failover: bool = True, runs: str = "jobs:job"
    ) -> ClaimAnswer:
        one.add()
        request = requested(one.one(), period=timedelta(seconds=1), failover=failover)
        request = replace(request, runs=runs)
        [answer] = one.claim_jobs([request]).values()
        travel(11)
        return answer

    def agree(self, other: StoreReplica, *, stable: bool = True) -> bool:
        """Tell whether a job is read and granted, or neither."""
        read = other.due(stable=stable)
        job = other.jobs.read(other.cursor, "job")
        assert job is not None
        found = job_row(other.connection)
        change_id = found["changed_id"] or found["added_id"]
        granted = other.claims_job(
            DueRow(job, change_id, other.now, (), None, None, False), stable=stable
        )
        assert bool(read) == granted
        return granted

    def test_with_failover_it_is_run_again_first(
        self, one: StoreReplica, other: StoreReplica, travel: Travel
    ) -> None:
        dead = self.dead(one, travel)
        assert not self.agree(other)
        claim_id, _ = other.take_over(dead.claim_id, "task of job", lease=10)
        assert not self.agree(other)
        other.release(claim_id, "task of job")
        assert self.agree(other)

    def test_without_it_is_followed_at_once(
        self, one: StoreReplica, other: StoreReplica, travel: Travel
    ) -> None:
        self.dead(one, travel, failover=False)
        assert self.agree(other)
        history = other.connection.execute("SELECT outcome, replica FROM task_lock_run")
        assert history.fetchall() == [("died", "one")]

    @pytest.mark.parametrize("failover", [False, True])
    def test_where_rows_are_not_believed_it_stands(
        self, one: StoreReplica, other: StoreReplica, travel: Travel, failover: bool
    ) -> None:
        self.dead(one, travel, failover=failover)
        assert not self.agree(other, stable=False)
        travel(40)  # its maximum lock has ended
        assert self.agree(other, stable=False)

    def test_that_was_handed_over_is_run_again_first(
        self, one: StoreReplica, other: StoreReplica, travel: Travel
    ) -> None:
        dead = self.dead(one, travel, failover=False)
        one.hand_over(dead.claim_id, "task of job")
        assert not self.agree(other)
        assert not self.agree(other, stable=False)

    def test_of_another_function_stands_against_nothing(
        self, one: StoreReplica, other: StoreReplica, travel: Travel
    ) -> None:
        self.dead(one, travel, runs="jobs:other")
        assert self.agree(other)

    def test_of_a_one_off_job_that_was_under_this_id_before_does_not_either(
        self, one: StoreReplica, other: StoreReplica, travel: Travel
    ) -> None:
        one.add()
        request = requested(one.one(), period=None, failover=True)
        one.claim_jobs([replace(request, runs=f"jobs:job at {one.now.isoformat()}")])
        travel(11)
        one.add(task_name="task of job")
        assert self.agree(other)

    def test_of_a_one_off_job_that_repeats_stands(
        self, one: StoreReplica, other: StoreReplica, travel: Travel
    ) -> None:
        self.dead(one, travel, runs="jobs:job at 2026-01-01T00:00:00+00:00")
        assert not self.agree(other)

    def test_a_run_that_goes_on_stands(
        self, one: StoreReplica, other: StoreReplica, travel: Travel
    ) -> None:
        one.add()
        first = one.claim_job(one.one(), period=timedelta(seconds=1), lease=30)
        travel(2)
        assert not self.agree(other)
        one.release(first.claim_id, "task of job")
        assert self.agree(other)

    def test_a_pause_of_the_task_stands(
        self, one: StoreReplica, other: StoreReplica, travel: Travel
    ) -> None:
        one.add()
        first = one.claim_job(one.one(), period=timedelta(seconds=1))
        one.release(first.claim_id, "task of job")
        travel(2)
        one.pause_task("task of job")
        assert not self.agree(other)
        travel(1)
        one.connection.execute("UPDATE task_lock SET paused_until = now()")
        assert [pause.upper for pause in one.one().pauses] == [one.now]
        assert self.agree(other)


class Claims:
    """The claims of all jobs that are due, as a replica sends them."""

    def __init__(self, replica: StoreReplica) -> None:
        context = believing(replica.protocol)
        by_id = {found.row.id: found for found in replica.due()}
        self._replica = replica
        self._attempts = [attempt(requested(by_id[each]), context) for each in JOBS]

    def send(self, most: int) -> list[str]:
        """Return what became of each."""
        return [
            told(each) for each in send_together(self._replica.cursor, self._attempts, most=most)
        ]


def told(decided: Any) -> str:
    if isinstance(decided, TimedAnswer):
        assert decided.answer is not None
        answer = decided.answer
        return "granted" if answer.granted else "withdrawn" if answer.withdrawn else "refused"
    return {GrantLimitError: "beyond", RowLockedError: "locked"}[type(decided)]


@pytest.fixture(params=["rows", "no rows", "some rows"])
def jobs_are_due(request: pytest.FixtureRequest, one: StoreReplica, travel: Travel) -> None:
    """Three jobs are due, whose tasks have rows, or none."""
    for job_id in JOBS:
        one.add(job_id)
    for found in one.due() if request.param != "no rows" else ():
        if request.param == "rows" or found.row.id == "z":
            claimed = one.claim_job(found)
            one.release(claimed.claim_id, f"task of {found.row.id}")
    travel(60)


@pytest.mark.usefixtures("jobs_are_due")
class TestLimit:
    @pytest.mark.parametrize("most", [0, 1, 2, 3, 9])
    def test_those_that_are_asked_for_first_are_granted(self, one: StoreReplica, most: int) -> None:
        expected = ["granted"] * min(most, 3) + ["beyond"] * max(0, 3 - most)
        assert Claims(one).send(most) == expected

    def test_what_is_refused_takes_no_place(self, one: StoreReplica, other: StoreReplica) -> None:
        claims = Claims(one)
        Claims(other).send(1)
        assert claims.send(1) == ["withdrawn", "granted", "beyond"]

    def test_what_is_beyond_the_limit_can_be_claimed(
        self, one: StoreReplica, other: StoreReplica
    ) -> None:
        claims = Claims(other)
        Claims(one).send(1)
        assert claims.send(3) == ["withdrawn", "granted", "granted"]

    @pytest.mark.parametrize("most", [1, 2])
    def test_sent_again_no_more_are_granted(self, one: StoreReplica, most: int) -> None:
        """The answer was lost, and what it granted is in the rows."""
        claims = Claims(one)
        first = claims.send(most)
        assert claims.send(most) == first

    def test_sent_again_with_fewer_workers_what_was_granted_stands(self, one: StoreReplica) -> None:
        claims = Claims(one)
        first = claims.send(2)
        assert claims.send(1) == first

    @pytest.mark.parametrize(
        ("most", "expected"),
        [
            (1, ["beyond", "granted", "beyond"]),
            (2, ["beyond", "granted", "granted"]),
            (3, ["locked", "granted", "granted"]),
        ],
    )
    def test_a_job_that_is_locked_takes_no_place(
        self, one: StoreReplica, direct_url: str, most: int, expected: list[str]
    ) -> None:
        """A user changes it, or another replica claims it."""
        claims = Claims(one)
        with psycopg.connect(direct_url) as blocker:
            blocker.execute("SELECT FROM task_lock_job WHERE id = 'm' FOR UPDATE")
            assert claims.send(most) == expected

    def test_a_task_that_is_locked_is_passed_over(self, one: StoreReplica, direct_url: str) -> None:
        """An operator pauses it, say. Its place is lost for this time."""
        claims = Claims(one)
        with psycopg.connect(direct_url) as blocker:
            locked = blocker.execute("SELECT FROM task_lock FOR UPDATE").rowcount
            blocked = {0: [], 1: ["z"], 3: list(JOBS)}[locked]
            expected = ["locked" if job_id in blocked else "granted" for job_id in JOBS]
            assert claims.send(9) == expected
        assert claims.send(9) == ["granted"] * 3


class TestMissed:
    def moves(self, *found: DueRow, period: timedelta | None = PERIOD) -> list[JobMove]:
        return [step(each, period) for each in found]

    def test_run_times_are_moved_on_in_one_batch(self, one: StoreReplica) -> None:
        for job_id in JOBS:
            one.add(job_id)
        moves = self.moves(*one.due())
        assert one.jobs.move_on(one.cursor, moves) == set(JOBS)
        assert one.jobs.move_on(one.cursor, moves) == set()
        for job_id in JOBS:
            job = job_row(one.connection, job_id)
            assert (job["next_run_time"], job["last_run_time"]) == (one.now + PERIOD, None)
        assert one.connection.execute("SELECT FROM task_lock").rowcount == 0

    @pytest.mark.parametrize("change", CHANGES)
    def test_are_left_alone_if_a_user_has_changed_the_job(
        self, one: StoreReplica, other: StoreReplica, change: str
    ) -> None:
        one.add()
        moves = self.moves(one.one())
        CHANGES[change](other)
        before = other.jobs.read(other.cursor, "job")
        assert one.jobs.move_on(one.cursor, moves) == set()
        assert other.jobs.read(other.cursor, "job") == before

    def test_that_run_without_a_lock_are_noted_in_the_job(self, one: StoreReplica) -> None:
        one.add()
        moves = self.moves(one.one(), period=None)
        assert one.jobs.move_on(one.cursor, moves, run=True) == {"job"}
        job = job_row(one.connection)
        assert (job["last_run_time"], job["ended"]) == (one.now, True)
        assert one.connection.execute("SELECT FROM task_lock_run").rowcount == 0

    def test_a_row_that_another_session_has_locked_delays_no_sweep(
        self, one: StoreReplica, travel: Travel, direct_url: str
    ) -> None:
        for job_id in JOBS:
            one.add(job_id, due_in=-1)
        assert one.jobs.move_on(one.cursor, self.moves(*one.due(), period=None)) == set(JOBS)
        travel(61)
        one.connection.execute("SET statement_timeout = '5s'")
        with psycopg.connect(direct_url) as blocker:
            blocker.execute("SELECT FROM task_lock_job WHERE id = 'm' FOR UPDATE")
            assert one.jobs.sweep(one.cursor) == 2
        assert one.jobs.sweep(one.cursor) == 1
