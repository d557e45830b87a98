"""Random histories of requests, by the statements and by the rule: rows and answers are the same.

Those of ``test_claim_histories.py`` are about claims, at their limits. These are about the run
history as well, and about all else that is asked: registrations, due times, looks, pauses, manual
runs and retries. The rule decides on rows in memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from apscheduler_tasklock._database.connection import raw_cursor
from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock._lock.protocol import HISTORY, TaskLockProtocol
from apscheduler_tasklock._lock.protocol_messages import (
    IN_TIME,
    ClaimRequest,
    ManualRequest,
    ReadTimes,
    Registration,
    ReleaseRequest,
    Renewal,
    RetryRequest,
    TakeoverRequest,
)
from apscheduler_tasklock.errors import TaskLockStateError
from apscheduler_tasklock.schema.table import task_lock_table
from apscheduler_tasklock.testing import rule
from apscheduler_tasklock.testing.rule import Row
from tests.contract.conftest import Memory

STEPS = 600
# A history may by chance be without a rare situation, and goes on then.
MOST_STEPS = 6000
# What a history must have come across, or it has shown nothing.
EXPECTED = {
    "manual run: of a task that nobody runs",
    "manual run: after a run whose maximum lock has passed",
    "manual run: after a dead run that nobody runs again",
    "manual run: after a dead run, in a pause",
    "manual run: in the place of a dead run that nobody has run again",
    "manual run: taken over",
    "manual run: a run time follows it",
    "manual run: makes up for an overdue run time",
    "manual run: the due time stays",
    "retry: noted",
    "retry: not noted, because the next run time comes first",
    "retry: begun",
    "retry: taken over",
    "retry: has failed and is retried again",
    "retry: has failed, and no failure is counted",
    "retry: over, and a run time follows it",
    "retry: void because of another claim",
    "a run has overrun",
    "a run has overrun, and was handed over",
    "a task was due in a pause",
}
TASKS = ("first", "second")
REPLICAS = ("one", "two", "three")
SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)

Ask = Callable[[Any], Any]

OPERATIONS = Operations(task_lock_table())


@dataclass
class Requests:
    """Makes requests at random, which refer to the claims before them."""

    rng: random.Random
    memory: Memory
    claims: dict[str, list[UUID]] = field(default_factory=lambda: {task: [] for task in TASKS})
    # What is asked next, and after how many seconds.
    following: list[tuple[float, Callable[[], Ask]]] = field(default_factory=list)
    turns: Iterator[int] = field(default_factory=count)

    def next(self) -> tuple[float, Ask]:
        """Return a request, and after how many seconds it comes."""
        if self.following:
            seconds, make = self.following.pop(0)
            return seconds, make()
        if self.chance(0.15):
            self.following = list(self.chosen())
        # Always later: what ends in the microsecond in which another ended is nobody's case.
        return self.rng.choice([0.001, 0.5, 1, 3, 9, 10, 30]), self.make()

    def chosen(self) -> Iterator[tuple[float, Callable[[], Ask]]]:
        return self.manual_run() if self.chance(0.6) else self.failed_run()

    def failed_run(self) -> Iterator[tuple[float, Callable[[], Ask]]]:
        """Yield the steps of a run that fails and is retried, as they seldom come."""
        task, choice = self.task(), self.rng.choice
        yield 0.5, partial(self.resume, task)
        yield 0.5, partial(self.finish, task)
        yield 400.0, partial(self.claim_surely, task, is_to_die=self.chance(0.3))
        for _ in range(3):
            yield choice([0.5, 1.0]), partial(self.fail, task)
            if self.chance(0.2):
                yield 0.5, partial(self.pause, task, choice([1.0, 5.0]))
            yield choice([0.5, 6.0]), partial(self.retry, task)
        if self.chance(0.4):
            yield choice([3.5, 11.0]), partial(self.take_over, task)
        yield choice([1.0, 9.0, 60.0]), partial(self.finish, task)

    def manual_run(self) -> Iterator[tuple[float, Callable[[], Ask]]]:
        """Yield the steps of a manual run beside one of the schedule's, as they seldom come."""
        task, choice, turn = self.task(), self.rng.choice, next(self.turns) % 4
        is_dead = turn in (1, 2)
        yield 0.5, partial(self.resume, task)
        yield 0.5, partial(self.finish, task)
        yield 400.0, partial(self.claim_surely, task, is_to_die=is_dead)
        if turn == 0:
            yield choice([1.0, 9.0]), partial(self.finish, task)
        yield 1.0, partial(self.request_run, task, 100.0)
        if turn == 1:
            yield 0.5, partial(self.pause, task, 60.0)
        claim = partial(self.claim_manual, task, surely=turn < 3)
        yield {1: 5.0, 2: 30.0}.get(turn, choice([0.5, 5.0, 30.0])), claim
        if self.chance(0.4):
            yield choice([11.0, 30.0]), partial(self.take_over, task)
        yield choice([1.0, 9.0, 30.0, 60.0]), partial(self.finish, task)

    def make(self) -> Ask:
        """Return a request at random; it is called with a protocol."""
        kinds = [
            *[self.claim] * 6,
            self.claim_many,
            *[self.take_over] * 3,
            self.take_over_many,
            *[self.retry] * 2,
            *[self.claim_manual] * 2,
            *[self.request_run] * 2,
            *[self.pause] * 2,
            self.resume,
            *[self.release] * 4,
            self.release_many,
            self.end_lease,
            self.give_up,
            self.extend,
            self.renew,
            self.read,
            *[self.register] * 2,
            self.prune,
        ]
        return self.rng.choice(kinds)()

    def seconds(self, *others: Any) -> Any:
        return self.rng.choice([*SECONDS, *others])

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def task(self) -> str:
        return self.rng.choice([*TASKS, TASKS[0]])

    def claim_of(self, task: str) -> UUID:
        row = self.memory.locks.rows.get(task)
        if row is not None and self.chance(0.8):
            return row.claim_id
        return self.rng.choice([*self.claims[task][-3:], uuid4()])

    def new_claim(self, task: str) -> UUID:
        claim_id = uuid4()
        self.claims[task].append(claim_id)
        return claim_id

    def claim_request(self, task: str) -> ClaimRequest:
        is_exact = self.chance(0.4)
        away = timedelta(seconds=self.rng.choice([0, 0, -1, -5, 2, 400, -400]))
        return ClaimRequest(
            task,
            self.seconds(),
            self.rng.choice([2.0, 10.0, 50.0, 300.0]),
            run_time=self.memory.time + away if is_exact else None,
            exact=is_exact,
            lease=self.rng.choice([None, 1.0, 3.0, 10.0]),
            failover=self.chance(0.6),
            runs=self.rng.choice(["f", "f", "f", "g", ""]),
            one_off=self.chance(0.1),
            schedule=self.rng.choice([None, "s", "t"]),
            schedule_for=self.seconds(None, -1.0, 400.0),
            least_gap=self.seconds(None),
            next_in=self.seconds(None),
            is_last=self.chance(0.1),
            grace=self.seconds(),
            max_runtime=self.seconds(None),
            claim_id=self.claim_of(task) if self.chance(0.15) else self.new_claim(task),
        )

    def times(self) -> ReadTimes:
        latest = self.memory.time + timedelta(seconds=self.rng.choice([-3, 0, 3]))
        return ReadTimes(
            self.seconds(400.0),
            latest if self.chance(0.3) else None,
            self.chance(0.8),
            self.not_after(),
        )

    def not_after(self) -> datetime | None:
        not_after = self.memory.time + timedelta(seconds=self.rng.choice([-1, 0, 1]))
        return not_after if self.chance(0.2) else None

    def claim(self) -> Ask:
        request, times = self.claim_request(self.task()), self.times()
        return lambda protocol: protocol.claim(protocol.cursor, request, times)

    def claim_surely(self, task: str, *, is_to_die: bool) -> Ask:
        """Claim a run that is likely to be granted, with a short lease."""
        request = ClaimRequest(
            task,
            1.0,
            300.0 if is_to_die else self.rng.choice([2.0, 300.0]),
            lease=3.0,
            failover=is_to_die or self.chance(0.5),
            runs="f",
            schedule="s",
            next_in=self.rng.choice([10.0, 40.0, 100.0]),
            grace=self.rng.choice([1.0, 12.0, 60.0]),
            claim_id=self.new_claim(task),
        )
        return lambda protocol: protocol.claim(protocol.cursor, request, ReadTimes())

    def claim_many(self) -> Ask:
        requests, times = [self.claim_request(task) for task in TASKS], self.times()
        self.rng.shuffle(requests)
        most = self.rng.choice([None, None, 0, 1, 2])

        def ask(protocol: Any) -> Any:
            known = protocol.claim_many(protocol.cursor, requests, [0.0, 1.0], times, most)
            new = [request for request in requests if request.claim_id not in known]
            asked = (protocol.cursor, new, [0.0] * len(new), times, most)
            return known, protocol.first_claim_many(*asked)

        return ask

    def takeover_request(self, task: str) -> TakeoverRequest:
        dead, lease = self.claim_of(task), self.rng.choice([None, 1.0, 5.0])
        return TakeoverRequest(task, dead, "", lease, self.chance(0.7), self.new_claim(task))

    def take_over(self, task: str | None = None) -> Ask:
        request = self.takeover_request(task or self.task())
        times = IN_TIME if task else self.takeover_times()
        return lambda protocol: protocol.take_over_many(protocol.cursor, [request], times).get(
            request.claim_id
        )

    def take_over_many(self) -> Ask:
        requests, times = [self.takeover_request(task) for task in TASKS], self.takeover_times()
        return lambda protocol: protocol.take_over_many(protocol.cursor, requests, times)

    def takeover_times(self) -> ReadTimes:
        return ReadTimes(stable=self.chance(0.8), not_after=self.not_after())

    def retry_request(self, task: str) -> RetryRequest:
        return RetryRequest(
            task,
            self.claim_of(task),
            self.rng.choice([2.0, 10.0, 300.0]),
            lease=self.rng.choice([None, 1.0, 3.0]),
            failover=self.chance(0.6),
            max_runtime=self.seconds(None),
            claim_id=self.new_claim(task),
        )

    def retry(self, task: str | None = None) -> Ask:
        request, not_after = self.retry_request(task or self.task()), self.not_after()
        if task is not None:
            row, not_after = self.memory.locks.rows.get(task), None
            failed = uuid4() if row is None else row.claim_id
            request = replace(request, failed_claim_id=failed)
        times = ReadTimes(not_after=not_after)
        return lambda protocol: protocol.retry_many(protocol.cursor, [request], times)

    def claim_manual(self, task: str | None = None, *, surely: bool = False) -> Ask:
        task, stable = task or self.task(), self.chance(0.8)
        row = self.memory.locks.rows.get(task)
        asked_for = None if row is None else row.request_id
        request = ManualRequest(
            task,
            asked_for if asked_for and (surely or self.chance(0.9)) else uuid4(),
            self.rng.choice([2.0, 10.0, 50.0, 300.0]),
            lease=self.rng.choice([None, 1.0, 3.0, 10.0]),
            failover=self.chance(0.6),
            runs=self.rng.choice(["f", "f", "g"]),
            max_runtime=self.seconds(None),
            claim_id=self.claim_of(task) if self.chance(0.1) else self.new_claim(task),
        )
        not_after = None if surely else self.not_after()
        return lambda protocol: protocol.claim_manual(
            protocol.cursor, request, stable=stable, not_after=not_after
        )

    def release_request(self, task: str) -> ReleaseRequest:
        row, window = self.memory.locks.rows.get(task), self.rng.choice(list(WindowAfter))
        if row is not None and row.handed_over:
            window = WindowAfter.KEEP  # who hands over twice says the same both times
        end = RunOutcome(
            window,
            self.rng.choice(["", "ok", "ok", "error", "cancelled", "overran"]),
            self.rng.choice([None, "Error"]),
            self.rng.choice([None, "why"]),
            self.seconds(None),
            self.chance(0.1),
            self.chance(0.2),
            retry_in=self.seconds(None),
        )
        token = None if row is None else self.rng.choice([None, row.token, row.token - 1])
        ended_ago = self.rng.choice([None, 0.25, 7.5, -1.0])
        ended_at = ended_ago and self.memory.time - timedelta(seconds=ended_ago)
        return ReleaseRequest(task, self.claim_of(task), end, token, ended_at)

    def finish(self, task: str) -> Ask:
        """Release the last run, if there is one."""
        row, next_in = self.memory.locks.rows.get(task), self.rng.choice([None, 10.0])
        end = RunOutcome(outcome=self.rng.choice(["ok", "ok", "error"]), next_in=next_in)
        request = ReleaseRequest(task, uuid4() if row is None else row.claim_id, end)
        return lambda protocol: protocol.release(protocol.cursor, request)

    def fail(self, task: str) -> Ask:
        """Release the last run as failed, if there is one, so that it is retried."""
        row, retry_in = self.memory.locks.rows.get(task), self.rng.choice([0.0, 0.5, 1.0, 50.0])
        window = self.rng.choice([WindowAfter.KEEP, WindowAfter.OPEN])
        end = RunOutcome(window, "error", "Error", next_in=10.0, retry_in=retry_in)
        request = ReleaseRequest(task, uuid4() if row is None else row.claim_id, end)
        return lambda protocol: protocol.release(protocol.cursor, request)

    def release(self) -> Ask:
        request = self.release_request(self.task())
        return lambda protocol: protocol.release(protocol.cursor, request)

    def release_many(self) -> Ask:
        requests = [self.release_request(task) for task in TASKS]
        return lambda protocol: protocol.release_many(protocol.cursor, requests)

    def end_lease(self) -> Ask:
        task, holders = self.task(), self.rng.sample(REPLICAS, 2)
        claim_id = self.claim_of(task)
        return lambda protocol: protocol.end_lease(protocol.cursor, task, claim_id, holders)

    def give_up(self) -> Ask:
        task = self.task()
        claim_id = self.claim_of(task)
        return lambda protocol: protocol.give_up(protocol.cursor, task, claim_id)

    def extend(self) -> Ask:
        task, by, lease = self.task(), self.seconds(), self.rng.choice([None, 1.0, 5.0])
        claim_id = self.claim_of(task)
        return lambda protocol: protocol.extend(protocol.cursor, task, claim_id, by, lease)

    def renew(self) -> Ask:
        renewals = [
            Renewal(task, self.claim_of(task), self.seconds(), self.chance(0.3)) for task in TASKS
        ]
        return lambda protocol: protocol.renew(protocol.cursor, renewals)

    def read(self) -> Ask:
        always = self.rng.choice([(), TASKS])

        def ask(protocol: Any) -> Any:
            states, now = protocol.read(protocol.cursor, TASKS, always)
            return {state.task_name: state for state in states}, now

        return ask

    def register(self) -> Ask:
        tasks = [
            Registration(
                task,
                self.rng.choice(["s", "t"]),
                self.seconds(None),
                self.seconds(),
                self.rng.choice([0.0, 1.0, 5.0]),
                "f",
                self.chance(0.3),
                self.rng.choice([None, 5.0, 60.0]),
            )
            for task in self.rng.sample(TASKS, self.rng.randint(1, 2))
        ]
        return lambda protocol: protocol.register(protocol.cursor, tasks)

    def prune(self) -> Ask:
        age = self.seconds(100.0)
        return lambda protocol: protocol.prune(protocol.cursor, age)

    # What operators do, by a statement of theirs or by the rule.

    def pause(self, task: str | None = None, seconds: float | None = None) -> Ask:
        task, seconds = task or self.task(), seconds or self.seconds(None)
        pause_id, by = uuid4(), self.operator()
        return self.operate(
            task,
            lambda cursor: OPERATIONS.pause(cursor, [task], seconds, by, "why", pause_id),
            lambda row, now: rule.pause(row, seconds, now, by, "why", str(pause_id)),
        )

    def resume(self, task: str | None = None) -> Ask:
        task, by, force = task or self.task(), self.operator(), self.rng.random() < 0.3
        return self.operate(
            task,
            lambda cursor: OPERATIONS.resume(cursor, [task], by, force=force),
            lambda row, now: rule.resume(row, now, by, force=force),
        )

    def operator(self) -> str:
        return self.rng.choice(["me", "me", "you"])

    def request_run(self, task: str | None = None, seconds: float | None = None) -> Ask:
        task, seconds = task or self.task(), seconds or self.seconds(100.0)
        request_id = uuid4()

        def by_statement(cursor: Any) -> None:
            nonlocal request_id
            with suppress(TaskLockStateError):  # of a hold
                request_id = OPERATIONS.request_run(cursor, task, "me", seconds).request_id

        return self.operate(
            task,
            by_statement,
            lambda row, now: rule.request_run(row, request_id, "me", seconds, now),
        )

    def operate(
        self,
        task: str,
        by_statement: Callable[[Any], object],
        by_rule: Callable[[Row, datetime], Row],
    ) -> Ask:
        rows = self.memory.locks.rows

        def ask(protocol: Any) -> None:
            if task not in rows:
                return
            if protocol.cursor is not None:
                by_statement(raw_cursor(protocol.cursor.connection))
            else:
                rows[task] = by_rule(rows[task], self.memory.time)

        return ask


ROW = f"SELECT {', '.join(each.name for each in fields(Row))} FROM task_lock"
ENTRY = """
    SELECT task_name AS task, token, scheduled_at, started_at, ended_at, replica, kind, outcome,
           error_type, error, traceback, by, until, reason, cause, last_scheduled_at, run_times,
           attempt, retry_at
    FROM task_lock_run WHERE kind <> 'operator'
"""


def all_of(connection: Any, query: str) -> list[dict[str, Any]]:
    found = connection.cursor(row_factory=psycopg.rows.dict_row).execute(query)
    return list(found.fetchall())


def columns_of(rows: dict[str, Row]) -> dict[str, dict[str, Any]]:
    return {task: vars(row) for task, row in rows.items()}


def in_order(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # A run that was handed over, and released all the same, has two.
    return sorted(entries, key=lambda entry: (entry["task"], entry["token"], entry["ended_at"]))


@pytest.mark.timeout(600)  # on a busy machine
@pytest.mark.parametrize("history", [HISTORY, 3])
def test_the_rule_decides_as_the_statements_do(
    history: int, direct_url: str, rng: random.Random
) -> None:
    memory = Memory()
    memory.locks.history = history
    requests = Requests(rng, memory)
    seen: set[str] = set()
    with psycopg.connect(direct_url, autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'")
        # Only what a replica that is alive has can be asked for.
        connection.execute(
            "INSERT INTO task_lock_replica VALUES ('one', 'host', '1.0', now(), '2100-01-01', %s)",
            [list(TASKS)],
        )
        for step in range(MOST_STEPS):
            seconds, ask = requests.next()
            memory.time += timedelta(seconds=seconds)
            connection.execute("UPDATE travel.clock SET time = %s", [memory.time])
            name = rng.choice(REPLICAS)
            in_memory: Any = memory.locks.protocol(name)
            in_memory.cursor = None
            statements: Any = TaskLockProtocol(task_lock_table(), name, 10, history)
            statements.cursor = raw_cursor(connection)

            before = dict(memory.locks.rows)
            expected, answer = ask(statements), ask(in_memory)

            where = f"step {step}: {ask.__qualname__}"
            assert answer == expected, where
            rows = {row["task_name"]: Row(**row) for row in all_of(connection, ROW)}
            for task, row in memory.locks.rows.items():
                if not row.locked_by:  # which was registered, and never claimed
                    memory.locks.rows[task] = replace(row, claim_id=rows[task].claim_id)
            assert columns_of(memory.locks.rows) == columns_of(rows), where
            kept = [vars(run) for each in rows for run in memory.locks.runs(each)]
            assert in_order(kept) == in_order(all_of(connection, ENTRY)), where

            for task, row in before.items():
                if task in rows:
                    seen.update(situations(row, rows[task], memory.time))
            if step >= STEPS and seen >= EXPECTED:
                break
    assert seen >= EXPECTED, EXPECTED - seen


def situations(before: Row, after: Row, now: datetime) -> Iterator[str]:
    """Yield what a step came across, in a few words."""
    if after.last_outcome == "overran" != before.last_outcome:
        yield "a run has overrun" + (", and was handed over" if after.handed_over else "")
    if after.due_in_pause:
        yield "a task was due in a pause"
    if after.kind == "manual" and after.claim_id != before.claim_id:
        yield f"manual run: {why_granted(before, after, now)}"
    yield from retries(before, after, now)
    if before.kind == "manual" and after.finished and not before.finished:
        if after.due_at == before.due_at:
            yield "manual run: the due time stays"
        elif after.due_at == now:
            yield "manual run: a run time follows it"
        else:
            yield "manual run: makes up for an overdue run time"


def retries(before: Row, after: Row, now: datetime) -> Iterator[str]:
    """Yield what a step came across of retries."""
    is_new = after.claim_id != before.claim_id
    if after.kind == "retry" and is_new:
        yield "retry: begun"
    if is_new and before.is_retry_pending(now) and after.attempt == 1:
        yield "retry: void because of another claim"
    if is_new and after.attempt > 1 and after.kind == "takeover":
        yield "retry: taken over"
    if after.finished and not before.finished:
        yield from of_end(before, after, now)


def of_end(before: Row, after: Row, now: datetime) -> Iterator[str]:
    """Yield what the end of a run came across of retries."""
    if after.retry_of == after.claim_id:
        yield "retry: noted" if after.attempt == 1 else "retry: has failed and is retried again"
    if after.last_outcome == "error" and after.retry_of != after.claim_id:
        yield "retry: not noted, because the next run time comes first"
    if after.attempt > 1 and after.last_outcome == "error" and after.failures == before.failures:
        yield "retry: has failed, and no failure is counted"
    if after.attempt > 1 and after.due_at == now:
        yield "retry: over, and a run time follows it"


def why_granted(before: Row, after: Row, now: datetime) -> str:
    if after.request_id is not None or before.request_id is None:
        return "taken over"
    if before.finished:
        return "of a task that nobody runs"
    if before.run_until <= now:
        return "after a run whose maximum lock has passed"
    if not (before.failover or before.handed_over):
        return "after a dead run that nobody runs again"
    if before.is_paused(now):
        return "after a dead run, in a pause"
    return "in the place of a dead run that nobody has run again"
