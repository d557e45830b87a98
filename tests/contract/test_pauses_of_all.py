"""Pauses of all tasks: which statements mind them, which do not, and what is void afterwards."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from apscheduler_tasklock import TaskLockStateError, TaskState
from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock.schema.table import task_lock_table
from apscheduler_tasklock.status import Pause, PauseChange
from tests.contract.conftest import database_now
from tests.contract.store_replica import StoreReplica
from tests.contract.test_operations import JOB, Operator, run
from tests.support.rows import resumed, tasks_of
from tests.support.waist import (
    IN_TIME,
    ClaimAnswer,
    ClaimRequest,
    Claims,
    Registration,
    Registrations,
    Replica,
    raw_cursor,
)

# Operators ask by SQL.
pytestmark = pytest.mark.postgresql

Travel = Callable[[float], None]
Connection = psycopg.Connection[Any]


class AllPauses(Operator):
    """An operator who pauses all tasks."""

    def pause_all(
        self,
        seconds: float | None = None,
        namespace: str = "",
        by: str = "me",
        reason: str | None = None,
        pause_id: Any = None,
    ) -> Pause | None:
        cursor, pause_id = raw_cursor(self.connection), pause_id or uuid4()
        return self.operations.pause_all(cursor, namespace, seconds, by, reason, pause_id, 1.0)

    def resume_all(
        self, namespace: str = "", by: str = "me", action_id: Any = None, *, force: bool = False
    ) -> PauseChange:
        cursor = raw_cursor(self.connection)
        return self.operations.resume_all(cursor, namespace, by, action_id, force=force)

    def left(self) -> list[tuple[str, str | None]]:
        found = self.operations.pauses_of_all(raw_cursor(self.connection))
        return [(pause.by, pause.namespace) for pause in found]


@pytest.fixture
def operator(connection: Connection) -> AllPauses:
    return AllPauses(connection)


@pytest.fixture
def store(replicas_connection: Connection) -> StoreReplica:
    return StoreReplica("one", replicas_connection)


def requested(task: str, **asked: Any) -> ClaimRequest:
    return ClaimRequest(task, 9.0, 50.0, runs="jobs:job", **asked)


def claim(replica: Replica) -> ClaimAnswer:
    return replica.claim(**JOB)[1]


def claim_with_others(replica: Replica) -> ClaimAnswer:
    request = requested("task")
    return replica.claim_many(request)[request.claim_id]


def claim_some(replica: Replica) -> ClaimAnswer:
    request = requested("task")
    return replica.claim_many(request, most=5)[request.claim_id]


def first_claim(replica: Replica) -> ClaimAnswer:
    return replica.claim("new")[1]


def first_claims(replica: Replica) -> ClaimAnswer:
    request = requested("new")
    found = replica.ask(Claims([request], [0.0], IN_TIME, 3, are_first=True))
    return found[request.claim_id]


def takeover(replica: Replica) -> ClaimAnswer:
    found = replica.connection.execute("SELECT claim_id FROM task_lock WHERE task_name = 'dead'")
    [dead] = found.fetchone() or [None]
    answer = replica.take_over(dead, "dead", lease=30.0)[1]
    assert answer is not None
    return answer


CLAIMS = [claim, claim_with_others, claim_some, first_claim, first_claims, takeover]


@pytest.fixture
def tasks(one: Replica, travel: Travel) -> None:
    """A task whose next run time has come, and a dead run."""
    one.claim("dead", lease=1, failover=True)
    run(one)
    travel(10)


@pytest.mark.usefixtures("tasks")
class TestClaims:
    @pytest.mark.parametrize("how", CLAIMS)
    def test_none_is_granted_until_all_are_resumed(
        self, one: Replica, operator: AllPauses, how: Callable[[Replica], ClaimAnswer]
    ) -> None:
        operator.pause_all()
        answer = how(one)
        assert (answer.granted, answer.paused, answer.looks_free) == (False, True, False)
        operator.resume_all()
        # The run time of this moment was in the pause.
        operator.connection.execute("UPDATE travel.clock SET time = time + interval '1 s'")
        assert how(one).granted

    @pytest.mark.parametrize("how", CLAIMS)
    def test_a_pause_ends_by_itself(
        self,
        one: Replica,
        operator: AllPauses,
        how: Callable[[Replica], ClaimAnswer],
        travel: Travel,
    ) -> None:
        operator.pause_all(5.0)
        travel(4)
        assert how(one).paused
        travel(1)
        assert how(one).granted

    @pytest.mark.parametrize("namespace", ["t", "task", "tasks"])
    def test_it_is_for_the_names_that_begin_with_its_namespace(
        self, one: Replica, operator: AllPauses, namespace: str
    ) -> None:
        operator.pause_all(namespace=namespace)
        assert claim(one).granted is (namespace == "tasks")
        assert first_claim(one).granted

    def test_holds_and_runs_by_hand_go_on(self, one: Replica, operator: AllPauses) -> None:
        operator.has_replica("task")
        one.release(one.hold("held", min_lock=0)[0], "held")
        asked = operator.request_run("task", "me", 60.0)
        operator.pause_all()
        assert one.hold("held")[1].granted
        assert one.hold("new hold")[1].granted
        assert one.run_by_hand(asked.request_id)[1].granted
        assert operator.state("held") is TaskState.RUNNING

    def test_a_claim_of_a_taken_window_is_refused_because_of_that(
        self, one: Replica, operator: AllPauses
    ) -> None:
        assert claim(one).granted
        operator.pause_all()
        assert (claim(one).paused, claim(one).running) == (False, True)

    def test_a_run_time_in_a_pause_is_void_and_it_is_due_anew(
        self, one: Replica, operator: AllPauses, travel: Travel
    ) -> None:
        operator.pause_all(5.0)
        travel(6)
        for lag in (2, 6):
            answer = one.claim(**JOB, lag=lag)[1]
            assert (answer.granted, answer.paused) == (False, True)
        assert one.granted(**JOB, lag=1)

    def test_a_run_time_before_a_pause_may_be_run_after_it(
        self, one: Replica, operator: AllPauses, travel: Travel
    ) -> None:
        operator.pause_all(5.0)
        assert claim(one).paused
        travel(6)
        assert one.granted(**JOB, lag=6.5)


class TestLooks:
    def test_a_dead_run_and_what_is_overdue_are_left_alone(
        self, one: Replica, operator: AllPauses, travel: Travel
    ) -> None:
        run(one)
        operator.pause_all(100.0)
        travel(50)
        assert one.read("task") == {}
        state = one.read("task", always=("task",))["task"]
        assert (state.paused, state.due_in_pause, state.overdue) == (True, True, False)
        travel(51)
        state = one.read("task")["task"]
        assert (state.paused, state.due_in_pause, state.overdue) == (False, True, False)
        task = Registration("task", JOB["schedule"], 10.0, 20.0, 9.0, "jobs:job")
        one.ask(Registrations([task]))
        state = one.read("task", always=("task",))["task"]
        assert (state.due_in_pause, state.overdue) == (False, False)

    def test_what_was_overdue_before_is_overdue_after_it(
        self, one: Replica, operator: AllPauses, travel: Travel
    ) -> None:
        run(one)
        travel(31)
        operator.pause_all(10.0)
        assert operator.state() is TaskState.PAUSED
        travel(10)
        assert operator.state() is TaskState.OVERDUE
        assert one.read("task")["task"].overdue

    def test_what_was_due_in_it_stays_void_after_a_run_by_hand(
        self, one: Replica, operator: AllPauses, travel: Travel
    ) -> None:
        run(one)
        operator.has_replica("task")
        travel(5)
        asked = operator.request_run("task", "me", 60.0)
        operator.pause_all()
        claim_id = one.run_by_hand(asked.request_id)[0]
        travel(10)
        one.end(claim_id, outcome="ok")
        state = one.read("task", always=("task",))["task"]
        assert (state.due_in_pause, state.overdue) == (True, False)


class TestStoredJobs:
    def test_none_is_read_or_claimed(self, store: StoreReplica, operator: AllPauses) -> None:
        for job in ("known", "unknown"):
            store.add(job)
        known = store.due()[0]
        assert store.claims_job(known)
        read_before = store.due()
        operator.pause_all()
        assert store.ids() == []
        for found in read_before:
            answer = store.claim_job(found)
            assert (answer.granted, answer.paused, answer.looks_free) == (False, True, False)

    def test_a_run_time_in_it_is_told_when_it_has_ended(
        self, store: StoreReplica, operator: AllPauses, travel: Travel
    ) -> None:
        store.add()
        ends = database_now(operator.connection) + timedelta(seconds=60)
        operator.pause_all(60.0)
        travel(61)
        assert [pause.upper for pause in store.one().pauses] == [ends]


class TestStatus:
    def test_every_task_tells_its_pauses_and_those_of_all(
        self, one: Replica, operator: AllPauses, travel: Travel
    ) -> None:
        began = database_now(operator.connection)
        for task in ("shop:a", "b"):
            run(one, task)
        operator.pause_all(60.0, by="ann", reason="a move")
        operator.pause_all(None, "shop:", by="bob")
        operator.pause(["shop:a"], 90.0, "me", None)
        anns = Pause("ann", began, began + timedelta(seconds=60), "a move", "")
        bobs = Pause("bob", began, None, None, "shop:")
        mine = Pause("me", began, began + timedelta(seconds=90), None)
        assert operator.task("shop:a").pauses == (mine, anns, bobs)
        assert operator.task("shop:a").paused_until is None
        assert (operator.task("b").pauses, operator.task("b").paused_until) == ((anns,), anns.until)
        assert resumed(operator.resume(["b"], "me", force=True)) == []
        assert operator.left() == [("ann", ""), ("bob", "shop:")]
        travel(61)
        assert (operator.task("b").paused, operator.task("shop:a").paused) == (False, True)
        operator.resume_all("shop:", "ann")
        assert operator.left() == [("bob", "shop:")]
        operator.resume_all("shop:", "ann", force=True)
        assert operator.task("shop:a").pauses == (mine,)

    def test_the_row_of_the_pauses_is_no_task(self, one: Replica, operator: AllPauses) -> None:
        run(one)
        operator.pause_all()
        assert [task.name for task in operator.tasks()] == ["task"]
        assert tasks_of(operator.pause(["*"], None, "me", None)) == ["task"]
        assert one.prune(0.0) == 0
        assert operator.left() == [("me", "")]

    def test_it_is_in_the_history(self, operator: AllPauses, travel: Travel) -> None:
        began = database_now(operator.connection)
        again = uuid4()
        for _ in range(2):
            operator.pause_all(60.0, "shop:", "ann", "a move", again)
        travel(1)
        operator.pause_all(by="bob")
        operator.resume_all()  # changes nothing
        travel(1)
        operator.resume_all(force=True)
        done = operator.runs(kind="operator")[::-1]
        assert [(each.task, each.outcome, each.by, each.until, each.reason) for each in done] == [
            ("shop:*", "paused", "ann", began + timedelta(seconds=60), "a move"),
            ("*", "paused", "bob", None, None),
            ("*", "resumed", "me", None, "with the pauses of others"),
        ]

    def test_a_resumption_that_is_sent_again_tells_that_they_were_paused(
        self, operator: AllPauses
    ) -> None:
        again = uuid4()
        operator.pause_all()
        first, second = (operator.resume_all(action_id=again) for _ in range(2))
        assert (len(first.ended), first.is_resumed) == (1, True)
        assert (second.ended, second.is_resumed) == ((), True)
        assert not operator.resume_all().was_paused
        operator.pause_all()
        operator.resume_all(action_id=again)  # changes nothing
        assert operator.left() == [("me", "")]

    def test_without_the_history_it_works(self, one: Replica, operator: AllPauses) -> None:
        operator.connection.execute("ALTER TABLE task_lock_run RENAME TO elsewhere")
        assert operator.pause_all() is not None
        assert first_claim(one).paused
        operator.resume_all()
        assert operator.left() == []

    def test_the_same_one_becomes_longer_and_there_are_20_at_most(
        self, operator: AllPauses, travel: Travel
    ) -> None:
        began = database_now(operator.connection)
        for seconds in (60.0, 10.0):
            made = operator.pause_all(seconds)
            assert made == Pause("me", began, began + timedelta(seconds=60), None, "")
        for number in range(19):
            operator.pause_all(30.0, by=f"operator {number}")
        with pytest.raises(TaskLockStateError, match="there are 20 pauses of all tasks"):
            operator.pause_all(by="you")
        travel(30)
        assert operator.pause_all(by="you") is not None
        travel(86431)
        operator.pause_all(by="you")
        kept = "SELECT jsonb_array_length(pauses) FROM task_lock"
        assert operator.connection.execute(kept).fetchone() == (1,)


def test_nothing_is_paused_while_a_claim_is_under_way(
    one: Replica, operator: AllPauses, direct_url: str
) -> None:
    run(one)
    with psycopg.connect(direct_url) as other, other.transaction():
        other.execute("UPDATE task_lock SET token = token")
        cursor = raw_cursor(operator.connection)
        assert (
            Operations(task_lock_table()).pause_all(cursor, "", None, "me", None, uuid4(), 0.01)
            is False
        )
        assert operator.left() == []
    assert operator.pause_all() is not None
