"""Runs that were asked for by hand, beside the schedule's own, in travelled time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest

from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock._lock.outcomes import WindowAfter
from apscheduler_tasklock.schema.table import task_lock_table
from apscheduler_tasklock.status import Run, TaskState
from tests.contract.conftest import row
from tests.support.waist import ClaimAnswer, Replica, raw_cursor

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
}
# Of the schedule's own run, which a manual one leaves alone.
WINDOW = ("window_start", "window_until")


@pytest.fixture
def ask(connection: Connection) -> Callable[[], UUID]:
    """Ask for a run of the task, on a replica that has it."""
    operations = Operations(task_lock_table())

    def ask() -> UUID:
        connection.execute(
            "INSERT INTO task_lock_replica VALUES ('one', 'host', '1.0', now(), now(), %s)"
            " ON CONFLICT (replica_id) DO UPDATE SET seen_at = now()",
            [["task"]],
        )
        cursor = raw_cursor(connection)
        return operations.request_run(cursor, "task", "me", 3600.0).request_id

    return ask


def runs(connection: Connection) -> list[Run]:
    """Return the history of the task's runs, the oldest first."""
    cursor = raw_cursor(connection)
    found = Operations(task_lock_table()).runs(cursor, "task")[::-1]
    return [run for run in found if run.kind != "operator"]


def ran(replica: Replica, **job: Any) -> None:
    """Let the schedule's own run of the task have ended."""
    replica.end(replica.claim(**{**JOB, **job})[0], outcome="ok")


def told(connection: Connection) -> tuple[TaskState, float | None]:
    """Return the task's state, and by how many seconds it is late."""
    [task] = Operations(task_lock_table()).tasks(raw_cursor(connection))
    return task.state, task.late_by


class TestDueTimes:
    def test_one_that_came_meanwhile_is_due_when_the_run_by_hand_ends(
        self, one: Replica, travel: Travel, connection: Connection, ask: Callable[[], UUID]
    ) -> None:
        ran(one, grace=12)
        claim_id, _ = one.run_by_hand(ask())
        travel(30)
        assert told(connection) == (TaskState.RUNNING, None)
        one.end(claim_id, outcome="ok")
        # It follows, and if nobody runs it, it is overdue as any other.
        travel(11)
        assert told(connection) == (TaskState.LATE, 11.0)
        travel(2)
        assert told(connection) == (TaskState.OVERDUE, 13.0)
        assert one.read("task")["task"].overdue
        assert one.granted(lag=33, **JOB)

    def test_the_grace_is_no_shorter_than_a_poll_takes(
        self, one: Replica, travel: Travel, connection: Connection, ask: Callable[[], UUID]
    ) -> None:
        ran(one, grace=1)
        claim_id, _ = one.run_by_hand(ask())
        travel(30)
        one.end(claim_id, outcome="ok")
        travel(9)
        assert told(connection)[0] is TaskState.LATE
        travel(2)
        assert told(connection)[0] is TaskState.OVERDUE

    @pytest.mark.parametrize("when", ["overdue before", "not due yet", "in a pause"])
    def test_any_other_stays_what_it_is(
        self,
        one: Replica,
        travel: Travel,
        connection: Connection,
        ask: Callable[[], UUID],
        when: str,
    ) -> None:
        ran(one)
        if when == "overdue before":
            travel(31)
        elif when == "in a pause":
            pause = """UPDATE task_lock SET paused_at = now(),
                           paused_until = now() + interval '20 s'"""
            connection.execute(pause)
        before = {name: row(connection)[name] for name in ("due_at", "overdue_at")}
        claim_id, _ = one.run_by_hand(ask())
        travel(9 if when == "not due yet" else 30)
        one.end(claim_id, outcome="ok")
        assert {name: row(connection)[name] for name in before} == before

    @pytest.mark.parametrize(
        ("waits", "outcome", "state"),
        [
            (31, "ok", TaskState.OK),
            (31, "error", TaskState.OVERDUE),
            (29, "ok", TaskState.OVERDUE),
        ],
        ids=["overdue", "overdue, and it failed", "not overdue yet"],
    )
    def test_one_that_makes_up_for_an_overdue_run_time_ends_the_alarm(
        self,
        one: Replica,
        travel: Travel,
        connection: Connection,
        ask: Callable[[], UUID],
        waits: float,
        outcome: str,
        state: TaskState,
    ) -> None:
        """As an operator does who comes upon a daily job that nobody ran in the night."""
        ran(one)
        travel(waits)
        claim_id, _ = one.run_by_hand(ask())
        one.end(claim_id, outcome=outcome, next_in=3600.0)
        travel(60)
        assert told(connection)[0] is state

    def test_a_release_that_is_sent_twice_moves_it_once(
        self, one: Replica, travel: Travel, connection: Connection, ask: Callable[[], UUID]
    ) -> None:
        ran(one)
        claim_id, _ = one.run_by_hand(ask())
        travel(30)
        one.end(claim_id, outcome="ok")
        before = row(connection)["due_at"]
        travel(5)
        one.end(claim_id, outcome="ok")
        assert row(connection)["due_at"] == before


class TestOverADeadRun:
    """One that is to be run again, by failover."""

    @pytest.fixture
    def dead(self, one: Replica) -> UUID:
        claim_id, _ = one.claim(failover=True, **JOB)
        return claim_id

    def test_it_waits_for_longer_than_a_takeover_takes_and_takes_its_place(
        self,
        dead: UUID,
        other: Replica,
        travel: Travel,
        connection: Connection,
        ask: Callable[[], UUID],
    ) -> None:
        window = {name: row(connection)[name] for name in WINDOW}
        request = ask()  # before the lease has ended
        travel(39)
        assert not granted(other.run_by_hand(request, runs="jobs:renamed"))
        travel(1)
        assert not granted(other.run_by_hand(request, runs="jobs:renamed", stable=False))
        claim_id, answer = other.run_by_hand(request, runs="jobs:renamed")
        assert granted((claim_id, answer))
        assert not other.takes_over(dead)
        other.end(claim_id, outcome="ok")
        assert {name: row(connection)[name] for name in WINDOW} == window
        assert [(run.kind, run.outcome) for run in runs(connection)] == [
            ("schedule", "died"),
            ("manual", "ok"),
        ]

    def test_that_stood_for_long_before_it_was_asked_for_comes_first(
        self, dead: UUID, other: Replica, travel: Travel, ask: Callable[[], UUID]
    ) -> None:
        travel(200)  # as where the whole fleet was down
        request = ask()
        travel(9)
        assert not granted(other.run_by_hand(request))
        assert other.takes_over(dead)
        travel(30)
        assert not granted(other.run_by_hand(request))

    def test_it_waits_for_nobody_while_the_task_is_paused(
        self,
        dead: UUID,
        other: Replica,
        travel: Travel,
        connection: Connection,
        ask: Callable[[], UUID],
    ) -> None:
        connection.execute("UPDATE task_lock SET paused_at = now()")
        request = ask()
        assert not granted(other.run_by_hand(request))  # its holder may be alive
        travel(31)
        assert not other.takes_over(dead)
        assert granted(other.run_by_hand(request))

    def test_that_was_handed_over_and_that_nobody_runs_it_takes_its_place_as_well(
        self, dead: UUID, one: Replica, other: Replica, travel: Travel, ask: Callable[[], UUID]
    ) -> None:
        one.hand_over(dead)
        request = ask()
        travel(9)
        assert not granted(other.run_by_hand(request))
        travel(1)
        assert granted(other.run_by_hand(request))


def granted(claimed: tuple[UUID, ClaimAnswer | None]) -> bool:
    return claimed[1] is not None and claimed[1].granted


class TestTakeover:
    @pytest.mark.parametrize("how", ["killed", "handed over"])
    def test_of_a_manual_run_is_a_manual_run_however_often_it_is_taken_over(
        self,
        one: Replica,
        other: Replica,
        travel: Travel,
        connection: Connection,
        ask: Callable[[], UUID],
        how: str,
    ) -> None:
        ran(one)
        window = {name: row(connection)[name] for name in WINDOW}
        claim_id, answer = one.run_by_hand(ask(), lease=30, failover=True)
        assert answer is not None
        assert answer.manual
        for _ in range(2):
            if how == "killed":
                travel(31)
            else:
                one.end(claim_id, window=WindowAfter.HAND_OVER, outcome="cancelled")
            assert other.read("task")["task"].manual
            claim_id, answer = other.take_over(claim_id, lease=30)
            assert answer is not None
            assert (answer.granted, answer.manual) == (True, True)
        # A run time that is refused meanwhile follows it, as it follows any run by hand.
        travel(11)
        assert one.claim(**JOB)[1].manual
        other.end(claim_id, outcome="error")
        assert {name: row(connection)[name] for name in WINDOW} == window
        ended = "died" if how == "killed" else "cancelled"
        told = [(run.kind, run.scheduled_at, run.outcome) for run in runs(connection)[1:]]
        assert told == [("manual", None, outcome) for outcome in (ended, ended, "error")]

    def test_of_a_run_of_the_schedule_is_none(
        self, one: Replica, other: Replica, travel: Travel, connection: Connection
    ) -> None:
        dead, _ = one.claim(failover=True, **JOB)
        travel(31)
        assert not other.read("task")["task"].manual
        claim_id, answer = other.take_over(dead)
        assert answer is not None
        assert not answer.manual
        other.end(claim_id, outcome="ok")
        assert [run.kind for run in runs(connection)] == ["schedule", "takeover"]
