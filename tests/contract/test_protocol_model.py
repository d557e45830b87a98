"""Random histories of claims, on the statements that ship, compared with a model step by step.

All numbers are few and small halves of seconds, so that claims meet each other's limits exactly.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import astuple, dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import count
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import event, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from apscheduler_tasklock.messages import ClaimRequest, Renewal, takeover_id
from apscheduler_tasklock.protocol import TaskLockProtocol
from apscheduler_tasklock.table import task_lock_table
from tests.contract import model, situations
from tests.contract.model import Ask, Row

START = datetime(2026, 1, 1, tzinfo=timezone.utc)

tasks = st.sampled_from(["first", "first", "first", "second"])
replicas = st.sampled_from(["one", "two", "three"])
limits = st.sampled_from(["locked_until", "locked_until", "window_until"])
dead_runs = st.sampled_from(["forget", "take over", "take over", "leave"])
half_seconds = st.integers(0, 16).map(lambda halves: halves / 2)
# Which of a task's claims, from the last one back.
back = st.sampled_from([0, 0, 0, 0, 1, 99])
# How the database's clock looked to the replica: unknown, or off by so many seconds.
bounds = st.sampled_from([None, 0.0, 1.0, -1.5, -4.0])
# What becomes of the question: nothing, if the connection breaks before or after it was answered.
fates = st.sampled_from(["answered", "answered", "answer lost", "answer lost", "never sent"])

MOST_ROUNDS = 8

ROWS = """
    SELECT task_name, started_at, locked_until, window_start, window_until, locked_by, claim_id,
           token, finished_at, xmin::text, ctid::text
    FROM task_lock
"""


@dataclass(frozen=True)
class Wish:
    """A claim as a replica remembers it, to ask again after an answer that was lost."""

    task: str
    claim_id: UUID
    replica: str
    run_time: float
    min_lock: float
    max_lock: float
    lease: float | None


@dataclass
class Table:
    """The real table, read in the model's terms."""

    connection: psycopg.Connection[Any]
    rows: dict[str, Row] = field(default_factory=dict)
    versions: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def clear(self) -> None:
        self.connection.execute("DELETE FROM task_lock")
        self.set_clock(0.0)
        self.read()

    def set_clock(self, now: float) -> None:
        self.connection.execute("UPDATE travel.clock SET time = %s", [as_time(now)])

    def read(self) -> None:
        self.rows, self.versions = {}, {}
        for name, *columns, xmin, ctid in self.connection.execute(ROWS).fetchall():
            self.rows[name] = Row(*map(as_seconds, columns))
            self.versions[name] = (xmin, ctid)


def anything_was_asked(history: ClaimHistory) -> bool:
    return any(history.wishes.values())


class ClaimHistory(RuleBasedStateMachine):
    def __init__(
        self, connection: psycopg.Connection[Any], table: Table, seen: Counter[str]
    ) -> None:
        super().__init__()
        self.cursor = connection.cursor()
        self.protocol = TaskLockProtocol(task_lock_table())
        self.table = table
        self.seen = seen
        self.now = 0.0
        self.expected: dict[str, Row] = {}
        self.wishes: dict[str, list[Wish]] = {"first": [], "second": []}
        # Every id that was ever granted, the last one at the end.
        self.ids: dict[str, list[UUID]] = {"first": [], "second": []}
        # What the replicas believe to hold, by the answers that they got: until when.
        self.held: dict[str, dict[UUID, float]] = {"first": {}, "second": {}}
        self.tokens: dict[str, int] = {}
        # Whether the last statement must have left every row as it was, down to its version.
        self.nothing_written = False
        self.numbers = count(2, 2)  # even: the next number is the id of a takeover

    @initialize()
    def begin(self) -> None:
        self.table.clear()

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.table.set_clock(self.now)

    @precondition(anything_was_asked)
    @rule(task=tasks, limit=limits, more=st.sampled_from([0.0, 0.0, 0.5]))
    def time_passes_until(self, task: str, limit: str, more: float) -> None:
        row = self.expected.get(task)
        if row is not None:
            self.time_passes(max(0.0, getattr(row, limit) + more - self.now))

    @rule(
        task=tasks,
        replica=replicas,
        late=half_seconds,
        min_lock=half_seconds,
        max_lock=st.integers(1, 12).map(float),
        lease=st.none() | st.integers(1, 4).map(float),
        bound=bounds,
        dead_run=dead_runs,
        fate=fates,
    )
    def claim(self, bound: Any, dead_run: Any, fate: str, late: float, **wish: Any) -> None:
        claim_id = UUID(int=next(self.numbers))
        self.wishes[wish["task"]].append(Wish(claim_id=claim_id, run_time=self.now - late, **wish))
        self.ask(self.wishes[wish["task"]][-1], bound, dead_run, fate)

    @precondition(anything_was_asked)
    @rule(task=tasks, back=back, bound=bounds, dead_run=dead_runs, fate=fates)
    def claim_again(self, task: str, back: int, bound: Any, dead_run: Any, fate: str) -> None:
        if back < len(self.wishes[task]):
            self.ask(self.wishes[task][-1 - back], bound, dead_run, fate)

    def ask(self, wish: Wish, bound: float | None, dead_run: Any, fate: str) -> None:
        if fate == "never sent":
            return
        lag = self.now - wish.run_time
        latest = None if bound is None else self.now + bound
        fired = (self.now if latest is None else min(self.now, latest)) - lag
        lock = min(wish.max_lock, wish.lease or wish.max_lock)
        ask = Ask(wish.replica, wish.claim_id, fired, wish.min_lock, lock, dead_run)
        before = self.expected.get(wish.task)
        after = model.claim(before, ask, self.now)
        answer = self.protocol.claim(
            self.cursor,
            ClaimRequest(
                wish.task,
                lag,
                None if latest is None else as_time(latest),
                wish.min_lock,
                wish.max_lock,
                wish.replica,
                wish.claim_id,
                wish.lease,
                dead_run,
            ),
        )
        self.note(situations.of_claim(before, after, ask, self.now, lag))
        assert in_seconds(answer) == expected_answer(before, after, ask, self.now)
        self.happened(wish.task, after, wrote=after is not before)
        if after is not before:
            self.ids[wish.task].append(after.claim_id)
        if answer.granted and fate == "answered":
            self.held[wish.task][answer.claim_id] = as_seconds(answer.locked_until)

    @precondition(anything_was_asked)
    @rule(task=tasks, back=back, keep_window=st.booleans())
    def release(self, task: str, back: int, keep_window: bool) -> None:
        before, claim_id = self.expected.get(task), self.id_of(task, back)
        after = model.release(before, claim_id, self.now, keep_window=keep_window)
        self.note(situations.of_release(before, after, self.now, keep_window=keep_window))
        answer = self.protocol.release(self.cursor, task, claim_id, keep_window=keep_window)
        self.held[task].pop(claim_id, None)
        if after is None:
            assert answer is None
        else:
            assert in_seconds(answer) == (after.locked_until, self.now)
        self.happened(task, after)

    @precondition(anything_was_asked)
    @rule(
        which=st.lists(
            st.tuples(tasks, back, st.sampled_from([1, 4, 9]), st.integers(1, 12)),
            min_size=1,
            max_size=4,
            unique_by=lambda renewal: renewal[:2],
        )
    )
    def renew(self, which: list[tuple[str, int, int, int]]) -> None:
        renewals, expected = {}, {}
        for task, back, lease, max_lock in which:
            claim_id, before = self.id_of(task, back), self.expected.get(task)
            after = model.renew(before, claim_id, self.now, lease=lease, max_lock=max_lock)
            renewals[claim_id] = Renewal(task, claim_id, lease, max_lock)
            self.note(situations.of_renewal(before, after, claim_id, self.now + lease))
            if after is not None:
                expected[claim_id] = (after.locked_until, self.now)
                self.expected[task] = after
                self.stands_until(task, claim_id, after.locked_until)
        answer = self.protocol.renew(self.cursor, list(renewals.values()))
        assert {key: tuple(map(as_seconds, value)) for key, value in answer.items()} == expected
        self.nothing_written = not expected

    @precondition(anything_was_asked)
    @rule(task=tasks, back=back, by=half_seconds)
    def extend(self, task: str, back: int, by: float) -> None:
        claim_id = self.id_of(task, back)
        after = model.extend(self.expected.get(task), claim_id, self.now, by)
        answer = self.protocol.extend(self.cursor, task, claim_id, by)
        assert (answer and as_seconds(answer)) == (after and after.locked_until)
        self.note("extended" if after else "not extended")
        if after is not None:
            self.stands_until(task, claim_id, after.locked_until)
        self.happened(task, after)

    @rule()
    def read(self) -> None:
        self.nothing_written = True
        states = {
            state.task_name: state
            for state in self.protocol.read(self.cursor, ["first", "second", "third"])
        }
        assert states.keys() == self.expected.keys()
        for task, row in self.expected.items():
            finished, dead = row.finished_at is not None, row.dead(self.now)
            self.note("read: " + ("finished" if finished else "dead" if dead else "running"))
            assert in_seconds(states[task]) == (
                task, finished, dead, row.window_start, row.locked_by, row.locked_until, self.now
            )  # fmt: skip

    @invariant()
    def the_table_is_as_the_model_says(self) -> None:
        before = self.table.versions
        self.table.read()
        assert self.table.rows == self.expected
        if self.nothing_written:
            assert self.table.versions == before

    @invariant()
    def a_token_never_falls(self) -> None:
        tokens = {task: row.token for task, row in self.table.rows.items()}
        assert all(tokens[task] >= token for task, token in self.tokens.items())
        self.tokens = tokens

    @invariant()
    def nobody_believes_to_hold_what_another_holds(self) -> None:
        for held in self.held.values():
            assert sum(until > self.now for until in held.values()) <= 1

    def id_of(self, task: str, back: int) -> UUID:
        """Return an id that was granted, or one that never was."""
        ids = self.ids[task]
        return ids[-1 - back] if back < len(ids) else UUID(int=10**6 + back)

    def stands_until(self, task: str, claim_id: UUID, until: float) -> None:
        """Let a replica believe it, if it knows of the claim at all."""
        if claim_id in self.held[task]:
            self.held[task][claim_id] = until

    def happened(self, task: str, after: Row | None, *, wrote: bool = True) -> None:
        if after is not None:
            self.expected[task] = after
        self.nothing_written = after is None or not wrote

    def note(self, situation: str) -> None:
        self.seen[situation] += 1
        event(situation)


def expected_answer(before: Row | None, after: Row, ask: Ask, now: float) -> tuple[Any, ...]:
    granted = model.granted(after, ask, now)
    took_over = granted and after.claim_id == takeover_id(ask.claim_id)
    new_window = before is not None and ask.is_new_after(before) and (not granted or took_over)
    dead_holder = "unknown" if after is before else before and before.locked_by
    return (
        granted,
        after.running(now),
        new_window,
        after.finished_at is None,
        after.window_start,
        dead_holder if took_over else None,
        after.locked_by,
        after.token,
        after.locked_until,
        now,
        after.claim_id,
    )


def as_time(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def as_seconds(value: Any) -> Any:
    return (value - START).total_seconds() if isinstance(value, datetime) else value


def in_seconds(answer: Any) -> tuple[Any, ...]:
    return tuple(map(as_seconds, astuple(answer)))


# A busy machine, or the thorough profile; and when it fails, up to 300 s to find a short history.
@pytest.mark.timeout(1800)
def test_every_history_of_claims_goes_as_the_model_says(
    connection: psycopg.Connection[Any],
    replicas_connection: psycopg.Connection[Any],
    rng: random.Random,
) -> None:
    seen: Counter[str] = Counter()
    table = Table(connection)
    long = settings(max_examples=settings.default.max_examples // 3, stateful_step_count=100)

    # A round may by chance miss a rare situation.
    for _ in range(MOST_ROUNDS):
        histories = seed(rng.getrandbits(64))(
            lambda: ClaimHistory(replicas_connection, table, seen)
        )
        run_state_machine_as_test(histories, settings=long)
        if seen.keys() >= situations.EXPECTED:
            break

    print(*(f"{number:6} {situation}" for situation, number in seen.most_common()), sep="\n")
    assert seen.keys() >= situations.EXPECTED
