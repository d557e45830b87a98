"""Random histories of requests, by the statements and by the rule: rows and answers are the same.

Those of ``test_claim_histories.py`` are about claims, at their limits. These are about the run
history as well, and about all else that is asked: registrations, due times, looks, pauses and
manual runs. The rule decides on rows in memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from apscheduler_tasklock._database.connection import raw_cursor
from apscheduler_tasklock._lock.messages import (
    ClaimRequest,
    Ending,
    ManualRequest,
    ReadTimes,
    Registration,
    ReleaseRequest,
    Renewal,
    RunEnd,
    TakeoverRequest,
)
from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock._lock.protocol import HISTORY, TaskLockProtocol
from apscheduler_tasklock.errors import TaskLockStateError
from apscheduler_tasklock.schema.table import task_lock_table
from apscheduler_tasklock.status import Run
from apscheduler_tasklock.testing import rule
from apscheduler_tasklock.testing.rule import FOREVER, Row
from tests.contract.conftest import Memory

STEPS = 250
TASKS = ("first", "second")
REPLICAS = ("one", "two", "three")
SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)

Ask = Callable[[Any], Any]


@dataclass
class Requests:
    """Makes requests at random, which refer to the claims before them."""

    rng: random.Random
    memory: Memory
    claims: dict[str, list[UUID]] = field(default_factory=lambda: {task: [] for task in TASKS})

    def make(self) -> Ask:
        """Return a request; it is called with a protocol."""
        kinds = [
            *[self.claim] * 6,
            self.claim_many,
            self.find_taken,
            *[self.take_over] * 3,
            self.take_over_many,
            *[self.claim_requested] * 3,
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
            next_in=self.seconds(None),
            is_last=self.chance(0.1),
            grace=self.seconds(),
            max_runtime=self.seconds(None),
            claim_id=self.claim_of(task) if self.chance(0.15) else self.new_claim(task),
        )

    def times(self) -> ReadTimes:
        latest = self.memory.time + timedelta(seconds=self.rng.choice([-3, 0, 3]))
        return ReadTimes(
            self.seconds(400.0), latest if self.chance(0.3) else None, self.chance(0.8)
        )

    def claim(self) -> Ask:
        request, times = self.claim_request(self.task()), self.times()
        return lambda protocol: protocol.claim(protocol.cursor, request, times)

    def claim_many(self) -> Ask:
        requests, times = [self.claim_request(task) for task in TASKS], self.times()

        def ask(protocol: Any) -> Any:
            known = protocol.claim_many(protocol.cursor, requests, [0.0, 1.0], times)
            new = [request for request in requests if request.claim_id not in known]
            first = protocol.first_claim_many(protocol.cursor, new, [0.0] * len(new), times)
            return known, first

        return ask

    def find_taken(self) -> Ask:
        requests, times = [self.claim_request(task) for task in TASKS], self.times()
        return lambda protocol: protocol.find_taken(protocol.cursor, requests, [0.0, 1.0], times)

    def takeover_request(self, task: str) -> TakeoverRequest:
        dead, lease = self.claim_of(task), self.rng.choice([None, 1.0, 5.0])
        return TakeoverRequest(task, dead, "", lease, self.chance(0.7), self.new_claim(task))

    def take_over(self) -> Ask:
        request = self.takeover_request(self.task())
        return lambda protocol: protocol.take_over(protocol.cursor, request)

    def take_over_many(self) -> Ask:
        requests = [self.takeover_request(task) for task in TASKS]
        return lambda protocol: protocol.take_over_many(protocol.cursor, requests)

    def claim_requested(self) -> Ask:
        task, stable = self.task(), self.chance(0.8)
        row = self.memory.locks.rows.get(task)
        asked_for = None if row is None else row.request_id
        request = ManualRequest(
            task,
            asked_for if asked_for is not None and self.chance(0.9) else uuid4(),
            self.rng.choice([2.0, 10.0, 50.0, 300.0]),
            lease=self.rng.choice([None, 1.0, 3.0, 10.0]),
            failover=self.chance(0.6),
            runs=self.rng.choice(["f", "f", "g"]),
            max_runtime=self.seconds(None),
            claim_id=self.claim_of(task) if self.chance(0.1) else self.new_claim(task),
        )
        return lambda protocol: protocol.claim_requested(protocol.cursor, request, stable=stable)

    def release_request(self, task: str) -> ReleaseRequest:
        row, ending = self.memory.locks.rows.get(task), self.rng.choice(list(Ending))
        if row is not None and row.handed_over:
            ending = Ending.KEEP  # who hands over twice says the same both times
        end = RunEnd(
            ending,
            self.rng.choice(["", "ok", "ok", "error", "cancelled"]),
            self.rng.choice([None, "Error"]),
            self.rng.choice([None, "why"]),
            self.seconds(None),
            self.chance(0.1),
        )
        token = None if row is None else self.rng.choice([None, row.token, row.token - 1])
        return ReleaseRequest(task, self.claim_of(task), end, token)

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
        renewals = [Renewal(task, self.claim_of(task), self.seconds()) for task in TASKS]
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
                self.chance(0.3),
            )
            for task in self.rng.sample(TASKS, self.rng.randint(1, 2))
        ]
        return lambda protocol: protocol.register(protocol.cursor, tasks)

    def prune(self) -> Ask:
        age = self.seconds(100.0)
        return lambda protocol: protocol.prune(protocol.cursor, age)


# Python has no infinite times.
ENDLESS = ("due_at", "overdue_at", "paused_until")
COLUMNS = [
    f"CASE WHEN {each.name} = 'infinity' THEN timestamptz '{FOREVER}' ELSE {each.name} END"
    f" AS {each.name}"
    if each.name in ENDLESS
    else each.name
    for each in fields(Row)
]
ROW = f"SELECT {', '.join(COLUMNS)} FROM task_lock"
ENTRY = """
    SELECT task_name AS task, token, scheduled_at, started_at, ended_at, replica, kind, outcome,
           error_type, error
    FROM task_lock_run
"""


def all_of(connection: Any, query: str) -> list[dict[str, Any]]:
    found = connection.cursor(row_factory=psycopg.rows.dict_row).execute(query)
    return list(found.fetchall())


def columns_of(rows: dict[str, Row]) -> dict[str, dict[str, Any]]:
    return {task: vars(row) for task, row in rows.items()}


def entry_of(run: Run) -> dict[str, Any]:
    return {name: value for name, value in vars(run).items() if name != "unreadable"}


def in_order(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # A run that was handed over, and released all the same, has two.
    return sorted(entries, key=lambda entry: (entry["task"], entry["token"], entry["ended_at"]))


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("history", [HISTORY, 3])
def test_the_rule_decides_as_the_statements_do(
    history: int, direct_url: str, rng: random.Random
) -> None:
    memory = Memory()
    memory.locks.history = history
    requests = Requests(rng, memory)
    with psycopg.connect(direct_url, autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'")
        # Only what a replica that is alive has can be asked for.
        connection.execute(
            "INSERT INTO task_lock_replica VALUES ('one', 'host', '1.0', now(), '2100-01-01', %s)",
            [list(TASKS)],
        )
        for step in range(STEPS):
            # Always later: what ends in the microsecond in which another ended is nobody's case.
            memory.time += timedelta(seconds=rng.choice([0.001, 0.5, 1, 3, 9, 10, 30]))
            connection.execute("UPDATE travel.clock SET time = %s", [memory.time])
            task, name = requests.task(), rng.choice(REPLICAS)
            if task in memory.locks.rows and requests.chance(0.2):
                operate(requests, connection, task)
            in_memory: Any = memory.locks.protocol(name)
            in_memory.cursor = None
            statements: Any = TaskLockProtocol(task_lock_table(), name, 10, history)
            statements.cursor = raw_cursor(connection)

            ask = requests.make()
            expected, answer = ask(statements), ask(in_memory)

            where = f"step {step}: {ask.__qualname__}"
            assert answer == expected, where
            rows = {row["task_name"]: Row(**row) for row in all_of(connection, ROW)}
            for task, row in memory.locks.rows.items():
                if not row.locked_by:  # which was registered, and never claimed
                    memory.locks.rows[task] = replace(row, claim_id=rows[task].claim_id)
            assert columns_of(memory.locks.rows) == columns_of(rows), where
            kept = [entry_of(run) for each in rows for run in memory.locks.runs(each)]
            assert in_order(kept) == in_order(all_of(connection, ENTRY)), where


def operate(requests: Requests, connection: Any, task: str) -> None:
    """Pause or resume a task, or ask for a run of it, as operators do."""
    rows, now = requests.memory.locks.rows, requests.memory.time
    operations, cursor = Operations(task_lock_table()), raw_cursor(connection, guest=True)
    what = requests.rng.choice(["pause", "resume", "request", "request"])
    if what == "pause":
        seconds = requests.seconds(None)
        operations.pause(cursor, [task], seconds, "me", "why")
        rows[task] = rule.pause(rows[task], seconds, now, "me", "why")
    elif what == "resume":
        operations.resume(cursor, [task])
        rows[task] = rule.resume(rows[task], now)
    else:
        seconds, request_id = requests.seconds(100.0), uuid4()
        with suppress(TaskLockStateError):  # of a hold
            request_id = operations.request_run(cursor, task, "me", seconds).request_id
        rows[task] = rule.request_run(rows[task], request_id, "me", seconds, now)
