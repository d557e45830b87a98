"""What operators see and steer, against the statements that ship, in travelled time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from apscheduler_tasklock import TaskLockNotFoundError, TaskLockStateError, TaskState, TaskStatus
from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock._lock.outcomes import WindowAfter
from apscheduler_tasklock.schema.table import task_lock_table
from apscheduler_tasklock.status import Freed, Pause, ReplicaState, RunningRun
from tests.contract.conftest import database_now, row
from tests.support.rows import resumed, tasks_of
from tests.support.waist import (
    ReleaseRequest,
    Replica,
    Retire,
    RunOutcome,
    Stop,
    like_of,
    raw_cursor,
)

# Operators ask by SQL.
pytestmark = pytest.mark.postgresql

Travel = Callable[[float], None]
Connection = psycopg.Connection[Any]

# A job every 10 s, whose lease is 30 s and whose grace time is 20 s.
JOB: dict[str, Any] = {
    "schedule": '{"type":"interval","length":[0,10,0]}',
    "next_in": 10,
    "grace": 20,
    "max_lock": 300,
    "lease": 30,
    "max_runtime": 100,
}


class Operator:
    """An operator at a connection of their own."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.operations = Operations(task_lock_table())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self.operations, name)
        return lambda *arguments, **named: operation(
            raw_cursor(self.connection), *arguments, **named
        )

    def task(self, name: str = "task") -> TaskStatus:
        [found] = self.operations.tasks(raw_cursor(self.connection), [like_of(name)])
        return found

    def state(self, name: str = "task") -> TaskState:
        return self.task(name).state

    def freed(self, token: int, task: str = "task", **options: Any) -> Freed:
        freed: Freed = self.free(
            task, token, "me", **{"force": False, "run_again": False, **options}
        )
        return freed

    def has_replica(self, *tasks: str, replica: str = "one", seen: float = 0) -> None:
        """Let a replica have said so many seconds ago that it has these tasks."""
        self.connection.execute(
            "INSERT INTO task_lock_replica VALUES (%s, 'host', '1.0', now(),"
            " now() - %s * interval '1 second', %s)",
            [replica, seen, list(tasks)],
        )


@pytest.fixture
def operator(connection: Connection) -> Operator:
    return Operator(connection)


def run(replica: Replica, task: str = "task", **end: Any) -> None:
    replica.end(replica.claim(task, **JOB)[0], task, **{"outcome": "ok", **end})


def report(
    replica: Replica,
    *tasks: str,
    dropped: Sequence[str] = (),
    running: Sequence[RunningRun] = (),
) -> None:
    replica.alive(tasks, running=running)
    replica.ask(Retire(tasks, dropped))


class TestStates:
    def test_of_a_failed_task_that_no_replica_has_any_more(
        self, one: Replica, operator: Operator
    ) -> None:
        run(one, outcome="error", retry_in=5.0)
        assert operator.state() is TaskState.RETRYING
        report(one, dropped=["task"])
        assert operator.state() is TaskState.FAILING

    def test_of_a_job_whose_last_run_time_is_to_be_retried(
        self, one: Replica, operator: Operator
    ) -> None:
        """The scheduler has dropped the job, and the replica keeps it for the retry."""
        claim_id, _ = one.claim(**{**JOB, "is_last": True})
        one.end(claim_id, outcome="error", retry_in=5.0)
        report(one, dropped=["task"])
        assert operator.state() is TaskState.RETRYING

    def test_of_a_task_that_runs_on_time(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(**JOB)
        assert operator.state() is TaskState.RUNNING
        travel(4)
        one.end(claim_id, outcome="ok")
        assert operator.state() is TaskState.OK
        assert operator.task().took == 4.0
        travel(6)
        assert operator.state() is TaskState.OK

    def test_of_one_that_nobody_runs_any_more(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one)
        travel(15)
        assert (operator.state(), operator.task().late_by) == (TaskState.LATE, 5.0)
        travel(16)
        assert (operator.state(), operator.task().late_by) == (TaskState.OVERDUE, 21.0)
        travel(20)
        run(one)
        assert (operator.state(), operator.task().late_by) == (TaskState.OK, None)

    def test_of_one_that_has_run_for_the_last_time(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        one.end(one.claim(**{**JOB, "is_last": True})[0], outcome="ok")
        travel(10_000)
        assert (operator.state(), operator.task().due_at) == (TaskState.OK, None)

    def test_of_one_that_takes_too_long_and_is_overdue_meanwhile(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(**{**JOB, "lease": None})
        travel(99)
        assert operator.state() is TaskState.RUNNING
        travel(2)
        assert operator.state() is TaskState.TOO_LONG
        one.end(claim_id, outcome="ok", next_in=9)
        assert operator.state() is TaskState.OK
        assert operator.task().due_at == database_now(operator.connection) + timedelta(seconds=9)

    def test_of_one_that_outlives_its_maximum_lock(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        job = {**JOB, "max_lock": 50, "max_runtime": None}
        claim_id, answer = one.claim(**job)
        travel(20)
        assert one.renewed(claim_id)
        assert operator.state() is TaskState.RUNNING
        travel(29)
        assert one.renewed(claim_id, is_last=True)
        assert operator.state() is TaskState.RUNNING
        travel(2)  # nobody can renew it any more, and it goes on
        task = operator.task()
        assert (task.state, task.took, task.outcome) == (TaskState.TOO_LONG, 51.0, None)
        one.claim(**job)
        [run] = operator.runs("task")
        assert (run.outcome, run.took) == ("overran", 50.0)
        found = row(operator.connection)
        assert (found["deaths"], found["failures"], found["overran"]) == (0, 1, False)
        one.end(claim_id, token=answer.token, outcome="ok")
        assert operator.runs("task")[0].outcome == "overran"

    def test_of_one_that_outlives_its_maximum_lock_on_a_replica_that_is_gone_by_now(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        report(one, "task")
        claim_id, _ = one.claim(**{**JOB, "max_lock": 50, "max_runtime": None})
        assert one.renewed(claim_id, is_last=True)
        travel(51)
        task = operator.task()
        assert (task.state, task.outcome) == (TaskState.DEAD, "overran")
        report(one, "task")
        assert operator.state() is TaskState.TOO_LONG

    def test_of_one_that_was_extended_after_its_last_renewal(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(**{**JOB, "max_lock": 50, "lease": 10})
        assert one.renewed(claim_id, is_last=True, lease=10)
        one.extend(claim_id, 100, lease=10)
        travel(51)
        assert operator.task().outcome == "died"

    @pytest.mark.parametrize("lease", [None, 30])
    def test_of_one_that_died_in_its_last_lease(
        self, one: Replica, operator: Operator, travel: Travel, lease: float | None
    ) -> None:
        claim_id, answer = one.claim(**{**JOB, "lease": lease, "max_lock": 30})
        travel(31)
        assert operator.state() is TaskState.DEAD
        one.claim(**JOB)
        assert operator.runs("task")[0].outcome == "died"
        assert row(operator.connection)["deaths"] == 1
        one.end(claim_id, token=answer.token, outcome="ok")  # it lived, without the database
        assert operator.runs("task")[0].outcome == "overtaken"

    def test_of_one_that_overran_and_is_not_run_again(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(**{**JOB, "max_lock": 50, "failover": True})
        assert one.renewed(claim_id, is_last=True)
        travel(51)
        assert one.give_up(claim_id)
        assert (operator.task().outcome, operator.runs("task")[0].outcome) == ("overran", "overran")
        assert row(operator.connection)["deaths"] == 0

    def test_of_one_whose_thread_hangs_while_another_replica_runs_it(
        self, one: Replica, other: Replica, operator: Operator, travel: Travel
    ) -> None:
        job = {**JOB, "max_lock": 50, "max_runtime": None}
        claim_id, answer = one.claim(**job)
        began = answer.database_time
        assert one.renewed(claim_id, is_last=True)
        travel(51)
        hangs = RunningRun("task", answer.token, "one", began, lost=True)
        report(one, "task", running=[hangs])
        newer, _ = other.claim(**job)
        task = operator.task()
        assert (task.state, task.holder, task.stuck) == (TaskState.TOO_LONG, "other", (hangs,))
        other.end(newer, outcome="ok")
        assert operator.state() is TaskState.TOO_LONG
        assert [each.running for each in operator.replicas()] == [(hangs,)]
        report(one, "task")
        assert (operator.state(), operator.replicas()[0].running) == (TaskState.OK, ())

    def test_of_one_whose_hanging_thread_is_gone_with_its_process(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        _, answer = one.claim(**{**JOB, "max_lock": 5, "max_runtime": None})
        travel(6)
        hangs = RunningRun("task", answer.token, "one", answer.database_time, lost=True)
        report(one, "task", running=[hangs])
        assert operator.state() is TaskState.TOO_LONG
        travel(46)
        assert operator.state() is TaskState.DEAD
        assert operator.replicas()[0].running == ()

    def test_of_one_that_a_stop_has_cut(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(**JOB)
        travel(3)
        one.end(claim_id, outcome="cancelled", cut=True)
        travel(5)
        task = operator.task()
        assert (task.state, task.outcome, task.cut_for) == (TaskState.CUT, "cut", 5.0)
        assert [each.outcome for each in operator.runs("task")] == ["cancelled"]
        travel(10)
        one.claim(**JOB)
        task = operator.task()
        assert (task.state, task.outcome, task.cut_for) == (TaskState.RUNNING, None, None)

    def test_of_one_that_its_own_code_has_cancelled(self, one: Replica, operator: Operator) -> None:
        run(one, outcome="cancelled")
        task = operator.task()
        assert (task.state, task.outcome, task.cut_for) == (TaskState.OK, "cancelled", None)

    def test_of_one_that_is_known_to_have_died_without_a_lease(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(**{**JOB, "lease": None})
        one.end_lease(claim_id, holders=["one"])
        travel(1)
        assert operator.state() is TaskState.DEAD

    def test_of_one_whose_holder_died(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        one.claim(**JOB)
        travel(31)
        assert (operator.state(), operator.task().took) == (TaskState.DEAD, 30.0)

    def test_of_one_that_was_handed_over_and_not_begun_again(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(**JOB)
        travel(4)
        one.end(claim_id, window=WindowAfter.HAND_OVER, outcome="cancelled", cut=True)
        travel(5)
        task = operator.task()
        assert (task.state, task.outcome, task.took) == (TaskState.OK, "cut", 4.0)
        travel(5)  # two looks
        assert (operator.state(), operator.task().cut_for) == (TaskState.LATE, 10.0)
        travel(17)
        assert operator.state() is TaskState.OVERDUE

    def test_of_one_that_was_handed_over_and_is_run_again(
        self, one: Replica, other: Replica, operator: Operator, travel: Travel
    ) -> None:
        claim_id, _ = one.claim(**{**JOB, "next_in": 1000, "failover": True})
        one.end(claim_id, window=WindowAfter.HAND_OVER, outcome="cancelled", cut=True)
        travel(11)
        assert operator.state() is TaskState.CUT
        again, _ = other.take_over(claim_id)
        other.end(again, outcome="ok")
        assert (operator.state(), operator.task().cut_for) == (TaskState.OK, None)

    def test_of_one_that_fails(self, one: Replica, operator: Operator) -> None:
        run(one, outcome="error", error_type="ValueError")
        task = operator.task()
        assert (task.state, task.failures, task.error_type) == (TaskState.FAILING, 1, "ValueError")

    def test_of_one_that_is_paused(self, one: Replica, operator: Operator, travel: Travel) -> None:
        run(one)
        operator.pause(["task"], 60.0, "me", "why")
        travel(50)
        assert operator.state() is TaskState.PAUSED
        travel(11)
        # What was due in the pause is not made up for; about a period later it is due again.
        found = operator.task()
        assert (found.state, found.late_by) == (TaskState.OK, None)
        travel(10)
        assert (operator.state(), operator.task().late_by) == (TaskState.LATE, 1.0)
        travel(20)
        assert operator.state() is TaskState.OVERDUE  # its replicas died in the pause

    def test_of_one_that_was_overdue_before_a_pause(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one)
        travel(31)
        operator.pause(["task"], None, "me", None)
        assert operator.state() is TaskState.PAUSED
        travel(100)
        operator.resume(["task"], "me")
        assert (operator.state(), operator.task().late_by) == (TaskState.OVERDUE, 121.0)

    def test_of_one_whose_pause_was_made_longer(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one)
        operator.pause(["task"], 30.0, "me", None)
        travel(20)
        operator.pause(["task"], None, "me", "for longer")
        travel(20)
        operator.resume(["task"], "me")
        assert operator.state() is TaskState.OK  # it was due in the pause


class TestGone:
    """A task that was removed has no due time; one whose replicas died is overdue."""

    def test_not_when_another_application_uses_the_table(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one)
        operator.has_replica("task", replica="killed", seen=100)
        report(one, "another")
        travel(31)
        assert (operator.task().gone, operator.state()) == (False, TaskState.OVERDUE)

    def test_not_when_its_holder_was_killed(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        """As one of two services that have a task in common."""
        run(one)
        operator.has_replica("task", "common", replica="killed", seen=100)
        report(one, "common")
        travel(31)
        assert (operator.task().gone, operator.state()) == (False, TaskState.OVERDUE)

    def test_after_a_deployment_without_it(
        self, one: Replica, other: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one)
        report(one, "task", "common")
        report(other, "common")
        assert not operator.task().gone
        one.ask(Stop())
        report(other, "common")
        travel(31)
        found = operator.task()
        assert (found.gone, found.state, found.due_at) == (True, TaskState.GONE, None)
        report(other, "common", "task")  # as after a roll-back
        assert not operator.task().gone

    @pytest.mark.parametrize(
        ("before", "after"),
        [(["task"], ["another"]), (["task"], []), (["task", "common"], ["common", "task"])],
        ids=["another application", "nothing", "it is still there"],
    )
    def test_not_when_the_replicas_that_live_may_not_be_its_own(
        self,
        one: Replica,
        other: Replica,
        operator: Operator,
        travel: Travel,
        before: list[str],
        after: list[str],
    ) -> None:
        run(one)
        report(one, *before)
        one.ask(Stop())
        report(other, *after)
        travel(31)
        assert (operator.task().gone, operator.state()) == (False, TaskState.OVERDUE)

    def test_when_the_last_replica_has_dropped_it(
        self, one: Replica, other: Replica, operator: Operator
    ) -> None:
        run(one)
        report(one, "task")
        report(other, "task")
        report(one, dropped=["task"])
        assert not operator.task().gone
        report(other, dropped=["task"])
        assert operator.task().gone

    def test_a_task_that_runs_is_not(
        self, one: Replica, other: Replica, operator: Operator
    ) -> None:
        claim_id, _ = one.claim(**JOB)
        report(one, dropped=["task"])
        assert not operator.task().gone
        one.end(claim_id, outcome="ok")
        report(one, dropped=["task"])
        assert operator.task().gone


class TestPause:
    def test_a_run_that_goes_on_ends_by_itself(self, one: Replica, operator: Operator) -> None:
        claim_id, _ = one.claim(**JOB)
        operator.pause(["task"], None, "me", None)
        assert operator.state() is TaskState.RUNNING
        assert one.renewed(claim_id)
        assert one.end(claim_id, outcome="ok") is not None
        assert operator.state() is TaskState.PAUSED

    def test_pauses_do_not_replace_each_other(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one)
        began = database_now(operator.connection)
        operator.pause(["task"], 60.0, "ann", "a deployment")
        travel(10)
        operator.pause(["task"], 20.0, "bob", None)
        anns = Pause("ann", began, began + timedelta(seconds=60), "a deployment")
        bobs = Pause("bob", *(began + timedelta(seconds=each) for each in (10, 30)), None)
        task = operator.task()
        assert (task.pauses, task.paused_until) == ((anns, bobs), anns.until)
        travel(5)
        assert resumed(operator.resume(["task"], "ann")) == []
        task = operator.task()
        assert (task.pauses, task.paused_until) == ((bobs,), bobs.until)
        assert resumed(operator.resume(["task"], "ann")) == []
        done = [(each.outcome, each.by) for each in operator.runs(kind="operator")][::-1]
        assert done == [("paused", "ann"), ("paused", "bob"), ("resumed", "ann")]
        assert not one.granted(**JOB)
        travel(15)
        assert (operator.task().pauses, operator.task().paused) == ((), False)
        assert one.granted(**JOB)

    def test_one_that_is_sent_twice_is_one(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one)
        operator.pause(["task"], 60.0, "me", "why", UUID(int=1))
        before = row(operator.connection)
        travel(1)
        assert tasks_of(operator.pause(["task"], 60.0, "me", "why", UUID(int=1))) == ["task"]
        assert row(operator.connection) == before
        assert len(operator.runs(kind="operator")) == 1

    def test_force_takes_all_of_them_out(self, one: Replica, operator: Operator) -> None:
        run(one)
        for by in ("ann", "bob", "carl"):
            operator.pause(["task"], None, by, None)
        assert resumed(operator.resume(["task"], "ann", force=True)) == ["task"]
        assert (operator.task().paused, operator.task().pauses) == (False, ())
        done = [(each.outcome, each.by) for each in operator.runs(kind="operator")]
        assert done.count(("resumed", "ann")) == 1

    def test_one_that_is_in_no_list_is_anybodys(self, one: Replica, operator: Operator) -> None:
        run(one)
        operator.connection.execute("UPDATE task_lock SET paused_at = now()")
        assert operator.state() is TaskState.PAUSED
        assert resumed(operator.resume(["task"], "me")) == ["task"]
        assert operator.state() is TaskState.OK

    def test_a_task_has_20_at_most(self, one: Replica, operator: Operator, travel: Travel) -> None:
        for task in ("more", "task"):
            run(one, task)
        for number in range(20):
            operator.pause(["task"], 60.0, f"operator {number}", None)
        with pytest.raises(TaskLockStateError, match="'task' is not paused again: it has 20"):
            operator.pause(["more", "task"], None, "me", None)
        assert operator.state("more") is TaskState.OK
        operator.pause(["more", "task"], 90.0, "operator 7", None)
        assert operator.state("more") is TaskState.PAUSED
        travel(61)
        operator.pause(["task"], None, "me", None)
        assert [each.by for each in operator.task().pauses] == ["operator 7", "me"]

    def test_what_was_due_in_an_ended_pause_stays_void_in_another_one(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one)
        operator.pause(["task"], 11.0, "ann", None)
        travel(12)  # due at 10, and nobody registers it anew
        operator.pause(["task"], 60.0, "bob", None)
        travel(61)
        assert operator.state() is TaskState.OK

    @pytest.mark.parametrize("operation", ["pause", "resume"])
    def test_a_mistyped_name_changes_nothing(
        self, one: Replica, operator: Operator, operation: str
    ) -> None:
        run(one)
        more = (None, "me", None) if operation == "pause" else ("me",)
        with pytest.raises(TaskLockNotFoundError, match="no such task: 'tusk'"):
            getattr(operator, operation)(["task", "tusk"], *more)
        assert operator.state() is TaskState.OK


class TestRequests:
    def test_however_often_it_is_asked_it_is_one_request(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one)
        operator.has_replica("task")
        first = operator.request_run("task", "me", 3600.0)
        travel(10)
        assert operator.request_run("task", "you", 3600.0) == replace(first, is_new=False)
        assert operator.task().requested_by == "me"
        travel(3600)
        assert operator.task().requested_by is None
        operator.has_replica("task", replica="two")
        assert operator.request_run("task", "you", 3600.0).request_id != first.request_id

    def test_nobody_is_asked_who_cannot_run_it(self, one: Replica, operator: Operator) -> None:
        with pytest.raises(TaskLockNotFoundError):
            operator.request_run("task", "me", 3600.0)
        run(one)
        operator.has_replica("task", replica="dead", seen=100)
        with pytest.raises(TaskLockStateError, match="no live replica has it"):
            operator.request_run("task", "me", 3600.0)
        one.end(one.hold("held")[0], "held")
        operator.has_replica("held")
        with pytest.raises(TaskLockStateError, match="`hold`"):
            operator.request_run("held", "me", 3600.0)


class TestFreeing:
    def test_a_dead_run_is_ended_and_its_window_stays(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        claim_id, answer = one.claim(min_lock=200, **JOB)
        travel(31)
        operator.freed(answer.token)
        assert one.end(claim_id, outcome="ok", token=answer.token) is None
        [entry] = operator.runs("task", kind="schedule")
        assert (entry.token, entry.outcome) == (answer.token, "overtaken")
        assert not one.granted(min_lock=200, **JOB)

    def test_a_run_that_ended_before_it_was_freed_has_its_own_outcome(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        claim_id, answer = one.claim(min_lock=200, **JOB)
        ended_at = database_now(operator.connection)
        travel(31)
        operator.freed(answer.token)
        late = ReleaseRequest("task", claim_id, RunOutcome(outcome="ok"), answer.token, ended_at)
        assert one.ask(late) is None
        [entry] = operator.runs("task", kind="schedule")
        assert (entry.outcome, entry.ended_at) == ("ok", ended_at)

    @pytest.mark.parametrize("lease", [30, 90], ids=["dead", "may be alive"])
    def test_a_freed_run_is_a_failure_until_a_run_ends_well(
        self, one: Replica, operator: Operator, travel: Travel, lease: float
    ) -> None:
        answer = one.claim(**{**JOB, "lease": lease})[1]
        travel(31)
        failed_at = min(operator.task().locked_until, database_now(operator.connection))
        operator.freed(answer.token, force=True)
        task = operator.task()
        assert (task.state, task.failures, task.failure) == (TaskState.FAILING, 1, "freed")
        assert task.failed_at == failed_at
        travel(20)
        run(one)
        assert (operator.state(), operator.task().failures) == (TaskState.OK, 0)

    def test_its_window_can_be_opened(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        _, answer = one.claim(min_lock=200, **JOB)
        travel(31)
        operator.freed(answer.token, run_again=True)
        assert operator.runs("task")[0].outcome == "freed"
        assert one.granted(min_lock=200, lag=31, **JOB)

    def test_of_a_run_by_hand_has_no_window_that_could_be_opened(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        _, answer = one.claim(**JOB)
        travel(31)
        operator.connection.execute("UPDATE task_lock SET kind = 'manual'")
        with pytest.raises(TaskLockStateError, match="is a manual run"):
            operator.freed(answer.token, run_again=True)
        operator.freed(answer.token)

    def test_works_where_there_are_no_stored_jobs(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        _, answer = one.claim(**JOB)
        travel(31)
        operator.connection.execute("DROP TABLE task_lock_job")
        operator.freed(answer.token, run_again=True)

    @pytest.mark.parametrize("lease", [30, None], ids=["a lease", "no lease"])
    def test_one_that_may_be_alive_only_if_forced(
        self, one: Replica, operator: Operator, lease: float | None
    ) -> None:
        claim_id, answer = one.claim(**{**JOB, "lease": lease})
        said = r"may be alive, .+; if its run hangs, use --force"
        with pytest.raises(TaskLockStateError, match=said):
            operator.freed(answer.token)
        operator.freed(answer.token, force=True)
        assert not one.renewed(claim_id)

    def test_no_other_run_than_the_one_that_was_meant(
        self, one: Replica, operator: Operator
    ) -> None:
        claim_id, answer = one.claim(**JOB)
        with pytest.raises(TaskLockStateError, match=f"has the token {answer.token}"):
            operator.freed(answer.token - 1, force=True)
        one.release(claim_id)
        with pytest.raises(TaskLockStateError, match="its run has ended"):
            operator.freed(answer.token, force=True)
        with pytest.raises(TaskLockNotFoundError):
            operator.freed(answer.token, "tusk")


class TestForgetting:
    def test_its_row_and_its_history_go_and_its_tokens_still_grow(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one)
        travel(10)
        before = operator.task().token
        operator.forget("task")
        assert (operator.tasks(), operator.runs("task")) == ([], [])
        assert one.claim(**JOB)[1].token > before

    def test_not_one_that_runs_or_that_a_replica_has(
        self, one: Replica, operator: Operator
    ) -> None:
        claim_id, _ = one.claim(**JOB)
        with pytest.raises(TaskLockStateError, match="it is running"):
            operator.forget("task")
        one.release(claim_id)
        operator.has_replica("task")
        with pytest.raises(TaskLockStateError, match="a replica that is alive has it"):
            operator.forget("task")
        with pytest.raises(TaskLockNotFoundError):
            operator.forget("tusk")


class TestRuns:
    def test_the_newest_of_all_tasks_come_first(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        for _ in range(3):
            for task in ("a", "b", "c"):
                run(one, task)
                travel(1)
            travel(10)
        one.claim("a", **JOB)
        everything = operator.runs(limit=9)
        assert [run.task for run in everything] == ["c", "b", "a"] * 3
        assert operator.runs(limit=4) == everything[:4]
        assert [run.task for run in operator.runs("b")] == ["b"] * 3
        assert {run.task for run in operator.runs(like=["a", "c"])} == {"a", "c"}

    def test_the_newest_are_found_where_the_last_runs_of_tasks_left_no_entry(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one, "a")
        travel(10)
        for task in ("b", "c"):
            run(one, task, outcome="")
        assert [run.task for run in operator.runs(limit=2)] == ["a"]

    def test_the_newest_are_found_in_a_long_history(self, operator: Operator) -> None:
        operator.connection.execute("""
            INSERT INTO task_lock_run
            SELECT 'task ' || number % 500, 'runs', number / 500, number,
                   now(), now() - number * 7919 % 50000 * interval '1 second', now(), 'one',
                   'schedule', CASE WHEN number % 10 = 0 THEN 'error' ELSE 'ok' END
            FROM generate_series(0, 49999) AS number
        """)
        everything = operator.runs(limit=100_000)
        assert len(everything) == 50_000
        assert everything == sorted(everything, key=lambda run: run.started_at, reverse=True)
        for limit in (0, 1, 30, 300):
            assert operator.runs(limit=limit) == everything[:limit]
        errors = [run for run in everything if run.outcome == "error"]
        assert operator.runs(outcomes=["error"], limit=30) == errors[:30]

    def test_by_outcome_and_time(self, one: Replica, operator: Operator, travel: Travel) -> None:
        run(one, outcome="error", error_type="E")
        travel(10)
        since = database_now(operator.connection)
        run(one)
        assert [run.outcome for run in operator.runs(outcomes=["error"])] == ["error"]
        assert [run.outcome for run in operator.runs(since=since)] == ["ok"]
        assert [run.outcome for run in operator.runs("task", since=since)] == ["ok"]
        assert operator.runs("task", outcomes=["died"]) == []


class TestAcknowledging:
    def test_a_later_failure_alarms_again(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one, outcome="error", error_type="ValueError")
        assert not operator.task().acknowledged
        operator.acknowledge("task", operator.task().token, "ann")
        task = operator.task()
        assert (task.acknowledged, task.state, task.failures) == (True, TaskState.FAILING, 1)
        travel(10)
        claim_id = one.claim(**JOB)[0]
        assert operator.task().acknowledged
        one.end(claim_id, outcome="error", error_type="ValueError")
        assert not operator.task().acknowledged
        travel(10)
        run(one)
        assert not operator.task().acknowledged
        done = operator.runs(kind="operator")
        assert [(each.outcome, each.by) for each in done] == [("acknowledged", "ann")]

    @pytest.mark.parametrize("ended", ["cut", "handed over", "died"])
    def test_of_one_that_a_stop_has_cut_or_that_died(
        self, one: Replica, operator: Operator, travel: Travel, ended: str
    ) -> None:
        claim_id = one.claim(**JOB)[0]
        if ended == "cut":
            one.end(claim_id, outcome="cancelled", cut=True)
        elif ended == "handed over":
            one.hand_over(claim_id, begun=True)
            travel(20)
        else:
            travel(31)
            one.give_up(claim_id)
        task = operator.task()
        assert (task.cut_for is not None) is (ended != "died")
        operator.acknowledge("task", task.token, "ann")
        assert operator.task().acknowledged

    def test_one_that_was_not_shown_is_not(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        """Also not while the next run goes on: its token is shown by then."""
        run(one, outcome="error")
        shown = operator.task().token
        travel(10)
        claim_id, going_on = one.claim(**JOB)
        for _ in range(2):
            said = f"last run has the token {going_on.token}"
            with pytest.raises(TaskLockStateError, match=said):
                operator.acknowledge("task", shown, "ann")
            assert not operator.task().acknowledged
            one.end(claim_id, outcome="error")

    def test_one_is_while_the_next_run_goes_on(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one, outcome="error")
        travel(10)
        one.claim(**JOB)
        operator.acknowledge("task", operator.task().token, "ann")
        assert operator.task().acknowledged

    def test_twice_is_once_and_nothing_cannot_be(self, one: Replica, operator: Operator) -> None:
        run(one, "good")
        run(one, outcome="error")
        for by in ("ann", "bob"):
            operator.acknowledge("task", operator.task().token, by)
        assert [each.by for each in operator.runs("task", kind="operator")] == ["ann"]
        with pytest.raises(TaskLockStateError, match="it has no failure, no cut, and no miss"):
            operator.acknowledge("good", operator.task("good").token, "ann")
        with pytest.raises(TaskLockNotFoundError):
            operator.acknowledge("missing", 1, "ann")

    def test_of_a_one_off_job_a_day_does_it(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        for task, one_off in (("one-off", True), ("recurring", False)):
            claim_id = one.claim(task, **JOB, one_off=one_off)[0]
            one.end(claim_id, task, outcome="error")
        travel(86400)
        assert not operator.task("one-off").acknowledged
        travel(1)
        assert operator.task("one-off").acknowledged
        assert not operator.task("recurring").acknowledged


class TestActions:
    def test_what_operators_did_is_in_the_history(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        operator.has_replica("task")
        claim_id, answer = one.claim(**JOB, runs="job")
        began = database_now(operator.connection)
        operator.pause(["task"], 60.0, "ann", "closed")
        travel(1)
        operator.resume(["task"], "bob", force=True)
        travel(1)
        operator.pause(["task"], None, "ann", None)
        travel(1)
        operator.request_run("task", "bob", 3600.0)
        travel(1)
        operator.freed(answer.token, force=True)
        done = operator.runs("task", kind="operator")[::-1]
        assert [(each.outcome, each.by, each.until, each.reason) for each in done] == [
            ("paused", "ann", began + timedelta(seconds=60), "closed"),
            ("resumed", "bob", None, "with the pauses of others"),
            ("paused", "ann", None, None),
            ("run", "bob", began + timedelta(seconds=3603), None),
            ("freed", "me", None, None),
        ]
        assert [each.started_at for each in done] == [
            began + timedelta(seconds=second) for second in range(5)
        ]
        assert {(each.token, each.scheduled_at, each.replica) for each in done} == {
            (None, None, "")
        }
        assert len(operator.runs()) == 6
        assert [each.by for each in operator.runs(outcomes=["freed"])].count(None) == 1
        one.end(claim_id, outcome="ok", token=answer.token)
        ended = [each for each in operator.runs("task") if each.kind != "operator"]
        assert [each.outcome for each in ended] == ["overtaken"]

    def test_what_changes_nothing_leaves_no_entry(self, one: Replica, operator: Operator) -> None:
        operator.has_replica("task")
        run(one)
        operator.resume(["task"], "me")
        for by in ("ann", "bob"):
            operator.request_run("task", by, 3600.0)
        with pytest.raises(TaskLockStateError):
            operator.freed(operator.task().token)
        with pytest.raises(TaskLockNotFoundError):
            operator.pause(["task", "tusk"], None, "me", None)
        [asked] = operator.runs(kind="operator")
        assert (asked.outcome, asked.by) == ("run", "ann")

    def test_each_task_has_entries_of_its_own_which_overwrite_no_run(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        for task in ("a", "b"):
            run(one, task)
        for number in range(25):
            operator.pause(["a", "b"] if number < 2 else ["a"], 1.0, f"operator {number}", None)
            travel(1)
        done = operator.runs("a", kind="operator")
        assert [each.by for each in done] == [f"operator {number}" for number in range(24, 4, -1)]
        assert [each.by for each in operator.runs("b", kind="operator")] == [
            "operator 1",
            "operator 0",
        ]
        assert [each.outcome for each in operator.runs(outcomes=["ok"])] == ["ok", "ok"]

    def test_they_work_without_the_history(self, one: Replica, operator: Operator) -> None:
        operator.has_replica("task")
        answer = one.claim(**JOB, runs="job")[1]
        operator.connection.execute("ALTER TABLE task_lock_run RENAME TO elsewhere")
        assert tasks_of(operator.pause(["task"], None, "me", None)) == ["task"]
        assert resumed(operator.resume(["task"], "me")) == ["task"]
        assert operator.request_run("task", "me", 3600.0).requested_by == "me"
        operator.freed(answer.token, force=True)
        assert operator.task().outcome == "freed"

    def test_a_history_of_no_runs_has_no_actions(self, one: Replica, operator: Operator) -> None:
        answer = one.claim(**JOB)[1]
        operator.operations = Operations(task_lock_table(), history=0)
        operator.pause(["task"], None, "me", None)
        operator.freed(answer.token, force=True)
        assert operator.runs() == []


class TestReplicas:
    def test_those_that_live_and_what_they_run(self, one: Replica, operator: Operator) -> None:
        operator.has_replica("task", "other")
        operator.has_replica(replica="two", seen=91)
        one.claim(**JOB)
        now = database_now(operator.connection)
        first, second = operator.replicas()
        assert (first.replica_id, first.state) == ("one", ReplicaState.ALIVE)
        [runs] = first.running
        assert (runs.task, runs.since, runs.lost) == ("task", now, False)
        assert first.tasks == ("task", "other")
        assert (second.replica_id, second.state) == ("two", ReplicaState.SILENT)
        assert second.running == ()

    @pytest.mark.parametrize(
        ("seen", "state"), [(44, ReplicaState.ALIVE), (46, ReplicaState.SILENT)]
    )
    def test_one_is_silent_after_45_seconds(
        self, operator: Operator, seen: float, state: ReplicaState
    ) -> None:
        operator.has_replica(seen=seen)
        assert [each.state for each in operator.replicas()] == [state]

    def test_one_whose_run_died_has_died_until_it_is_heard_again(
        self, one: Replica, other: Replica, operator: Operator, travel: Travel
    ) -> None:
        report(one, "task")
        job = {**JOB, "lease": 3}
        one.claim(**job)
        travel(46)
        report(other, "task")
        # In an outage, no replica can renew a lease, and one of them is heard first.
        assert operator.replicas()[0].state is ReplicaState.SILENT
        other.claim(**{**job, "lag": -10})
        assert operator.runs("task")[0].outcome == "died"
        assert operator.replicas()[0].state is ReplicaState.DIED
        report(one, "task")
        assert operator.replicas()[0].state is ReplicaState.ALIVE

    def test_one_that_hands_over_or_overruns_has_not_died(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        report(one, "task")
        one.end(one.claim(**JOB)[0], window=WindowAfter.HAND_OVER, outcome="cancelled")
        overruns, _ = one.claim("more", **{**JOB, "max_lock": 3})
        assert one.renewed(overruns, "more", is_last=True)
        travel(4)
        assert operator.replicas()[0].state is ReplicaState.ALIVE

    def test_one_that_was_shut_down_says_so_at_once(self, one: Replica, operator: Operator) -> None:
        report(one, "task")
        one.ask(Stop())
        assert operator.replicas()[0].state is ReplicaState.STOPPED

    def test_one_that_was_killed_while_it_stopped_has_died(
        self, one: Replica, other: Replica, operator: Operator, travel: Travel
    ) -> None:
        report(one, "task")
        _, granted = one.claim(**JOB)
        since = database_now(operator.connection)
        one.ask(Stop([RunningRun("task", granted.token, "one", since)]))
        assert operator.replicas()[0].state_in_words == "alive, stopping"
        travel(46)
        report(other, "task")
        assert operator.replicas()[0].state_in_words == "silent while it was stopping"
        other.claim(**{**JOB, "lag": -10})
        for found in (operator.replicas(), operator.fleet(None)):
            assert (found[0].state, found[0].stopping_since) == (ReplicaState.DIED, since)
            assert found[0].state_in_words == "died while it was stopping"

    def test_a_run_whose_lease_has_ended_is_told_as_unfinished(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        report(one, "task")
        _, granted = one.claim(**{**JOB, "lease": 30})
        travel(31)
        [found] = operator.replicas()
        assert (found.alive, found.running) == (True, ())
        [run] = found.unfinished
        assert (run.task, run.token, run.lost) == ("task", granted.token, False)
        travel(31)
        [found] = operator.replicas()
        assert (found.state, found.unfinished) == (ReplicaState.SILENT, (run,))
        operator.freed(granted.token)
        assert operator.replicas()[0].unfinished == ()

    @pytest.mark.parametrize(
        ("like", "tells"),
        [(None, ["a", "a", "other/a"]), (["other/%"], ["", "", "other/a"])],
    )
    def test_each_of_a_fleet_tells_the_first_of_its_tasks(
        self, operator: Operator, like: list[str] | None, tells: list[str]
    ) -> None:
        operator.has_replica("a", "old", replica="1")
        operator.has_replica("a", "new", replica="2")
        operator.has_replica("other/a", "other/b", replica="3")
        found = sorted(operator.fleet(like), key=lambda each: each.replica_id)
        assert ["".join(each.tasks) for each in found] == tells


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("a_b", ["a_b"]),
        ("a?b", ["a%b", "a_b", "axb"]),
        ("a%*", ["a%b"]),
        ("*\\*", ["c\\d"]),
        ("*", ["a%b", "a_b", "axb", "c\\d"]),
    ],
)
def test_patterns_have_two_characters_that_stand_for_others(
    one: Replica, operator: Operator, pattern: str, matches: list[str]
) -> None:
    for task in ("a_b", "axb", "a%b", "c\\d"):
        run(one, task)
    assert sorted(task.name for task in operator.tasks([like_of(pattern)])) == matches


def test_a_name_and_a_limit_are_values_and_never_sql(operator: Operator) -> None:
    odd = "'; DROP TABLE task_lock; --"
    with pytest.raises(TaskLockNotFoundError):
        operator.pause([odd], None, odd, odd)
    assert operator.tasks([like_of(odd)], 1) == []
    assert operator.runs(outcomes=[odd], since=datetime.now(timezone.utc), limit=1) == []
    assert str(uuid4()) not in str(operator.replicas())


@pytest.mark.nightly  # 20 MB of names
def test_of_very_many_tasks_a_replica_tells_as_many_as_its_row_takes(
    one: Replica, connection: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"{number:05}" + '"' * 995 for number in range(10_001)]
    for _ in range(2):
        one.alive(names)
    found = connection.execute("SELECT cardinality(tasks) FROM task_lock_replica").fetchone()
    assert found == (4000,)
    [warning] = [each for each in caplog.records if "of this replica" in each.getMessage()]
    assert "Of 10001 tasks of this replica, operators see only 4000" in warning.getMessage()


class TestSentTwice:
    """An action that is sent again under its id, because its answer was lost."""

    def test_is_not_done_again_if_somebody_has_undone_it(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one)
        pause, resume = UUID(int=1), UUID(int=2)
        operator.pause(["task"], None, "me", None, pause)
        travel(1)
        operator.resume(["task"], "me", resume)
        travel(1)
        operator.pause(["task"], None, "me", None, pause)
        assert not operator.task().paused
        operator.pause(["task"], None, "me", None)
        operator.resume(["task"], "me", resume)
        assert operator.task().paused

    @pytest.mark.parametrize(
        ("before", "act"),
        [
            (
                "finished_at = now()",
                lambda it: it.pause(["task"], None, "me", None, UUID(int=1))[0].left,
            ),
            ("paused_at = now()", lambda it: it.resume(["task"], "me", UUID(int=1))),
            (
                "finished_at = now()",
                lambda it: it.request_run("task", "me", 60.0, action_id=UUID(int=1)),
            ),
            ("finished_at = NULL", lambda it: it.freed(7, force=True, action_id=UUID(int=1))),
            (
                "failures = 1, failed_at = now()",
                lambda it: it.acknowledge("task", 7, "me", None, UUID(int=1)),
            ),
        ],
        ids=["pause", "resume", "run", "free", "ack"],
    )
    def test_writes_its_entry_anew_so_that_the_entry_is_confirmed(
        self,
        one: Replica,
        operator: Operator,
        travel: Travel,
        before: str,
        act: Callable[[Operator], object],
    ) -> None:
        """A read would also find an entry whose commit waits for a synchronous standby."""
        found = "SELECT xmin::text, started_at FROM task_lock_run WHERE ring = 'actions'"
        run(one)
        operator.has_replica("task")
        operator.connection.execute(f"UPDATE task_lock SET token = 7, {before}")
        first = act(operator)
        [(version, at)] = operator.connection.execute(found).fetchall()
        travel(1)
        assert act(operator) == first
        [(later, still)] = operator.connection.execute(found).fetchall()
        assert (later != version, still) == (True, at)

    def test_says_what_the_first_one_has_done(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one)
        operator.pause(["task"], None, "me", None)
        for _ in range(2):
            [change] = operator.resume(["task"], "me", UUID(int=1))
            assert change.is_resumed
            travel(1)
        assert not operator.resume(["task"], "me")[0].was_paused

    def test_a_request_whose_run_has_begun_is_no_second_one(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        run(one)
        operator.has_replica("task")
        travel(1)
        first = operator.request_run("task", "me", 3600.0, action_id=UUID(int=1))
        travel(1)
        assert one.run_by_hand(first.request_id)[1].granted
        travel(1)
        again = operator.request_run("task", "me", 3600.0, action_id=UUID(int=1))
        assert operator.task().requested_by is None
        assert (again.request_id, again.is_new) == (first.request_id, True)
        assert first.token <= again.token < operator.task().token
        assert len(operator.runs(kind="operator")) == 1

    def test_what_is_freed_is_told_also_if_another_run_has_begun(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        _, answer = one.claim(**JOB)
        travel(31)
        first = operator.freed(answer.token, action_id=UUID(int=1))
        assert operator.freed(answer.token, action_id=UUID(int=1)) == first
        with pytest.raises(TaskLockStateError, match="its run has ended"):
            operator.freed(answer.token)
        assert len(operator.runs(kind="operator")) == 1

    def test_without_a_history_the_row_tells_of_a_pause(
        self, one: Replica, operator: Operator
    ) -> None:
        operator.operations = Operations(task_lock_table(), history=0)
        run(one)
        for _ in range(2):
            operator.pause(["task"], None, "me", None, UUID(int=1))
        assert len(operator.task().pauses) == 1


class TestFreed:
    """When a freed task is due, and what is told of it."""

    def freed(self, one: Replica, operator: Operator, travel: Travel, **options: Any) -> Any:
        """Return what is told of a run whose holder died and that is freed after 31 s."""
        _, answer = one.claim(**JOB)
        began = operator.task()
        travel(31)
        freed = operator.freed(answer.token, **options)
        assert (freed.token, freed.holder, freed.since) == (
            answer.token,
            began.holder,
            began.started_at,
        )
        task = operator.task()
        assert (freed.due_at, freed.overdue_at) == (task.due_at, task.overdue_at)
        assert freed.window_until == task.window_until
        return freed

    def test_a_time_that_has_passed_is_skipped_and_the_next_one_counts(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        freed = self.freed(one, operator, travel)
        now = database_now(operator.connection)
        assert freed.due_at == now + timedelta(seconds=10)  # a period
        assert freed.overdue_at == now + timedelta(seconds=30)
        assert operator.state() is not TaskState.OVERDUE
        travel(31)
        assert operator.state() is TaskState.OVERDUE

    def test_an_exact_schedule_says_when(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        was_due_at = database_now(operator.connection) + timedelta(seconds=10)
        due_at = was_due_at + timedelta(seconds=25)
        known = {"was_due_at": was_due_at, "due_at": due_at}
        freed = self.freed(one, operator, travel, **known)
        assert (freed.due_at, freed.overdue_at) == (due_at, due_at + timedelta(seconds=20))

    def test_of_a_schedule_that_has_changed_meanwhile_nothing_is_believed(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        now = database_now(operator.connection)
        known = {"was_due_at": now, "due_at": now + timedelta(hours=1)}
        freed = self.freed(one, operator, travel, **known)
        assert freed.due_at == now + timedelta(seconds=41)

    def test_to_be_run_again_it_stays_due(
        self, one: Replica, operator: Operator, travel: Travel
    ) -> None:
        due_at = database_now(operator.connection) + timedelta(seconds=10)
        freed = self.freed(one, operator, travel, run_again=True)
        assert (freed.due_at, freed.run_again) == (due_at, True)
        assert operator.state() is TaskState.OVERDUE
