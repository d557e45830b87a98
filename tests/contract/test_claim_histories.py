"""Random histories of claims, on what ships, compared with the rule step by step.

All numbers are few and small halves of seconds, so that claims meet each other's limits exactly.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta, timezone
from itertools import count
from typing import Any, TypeVar
from uuid import UUID

import pytest
from hypothesis import event, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock.schema.table import task_lock_table
from apscheduler_tasklock.testing import rule as the_rule
from apscheduler_tasklock.testing.rule import DatedClaim, Row, Ruling
from tests.contract import situations
from tests.support.waist import (
    ACTION_SLOTS,
    IN_TIME,
    LOCK_TIMEOUT,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    Claims,
    ClaimTimes,
    EndLease,
    Extend,
    GiveUp,
    Memory,
    PruneOneOffs,
    ReadTasks,
    ReleaseAnswer,
    ReleaseRequest,
    Renewal,
    Renewals,
    Replica,
    RerunRequest,
    Reruns,
    Rows,
    raw_cursor,
    takeover_of,
)

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
# Made once, because that takes longer than several steps.
OPERATIONS = Operations(task_lock_table())

tasks = st.sampled_from(["first", "first", "first", "second"])
replicas = st.sampled_from(["one", "two", "three"])
limits = st.sampled_from(["locked_until", "locked_until", "window_until", "run_until"])
half_seconds = st.integers(0, 16).map(lambda halves: halves / 2)
# Which of a task's claims, from the last one back.
back = st.sampled_from([0, 0, 0, 0, 1, 99])
# How the database's clock looked to the replica: unknown, or off by so many seconds.
bounds = st.sampled_from([None, 0.0, 1.0, -1.5, -4.0])
# Whether the run time is the same on every replica, and how far it is from the replica's own.
exact = st.sampled_from([None, None, None, 0.0, 0.0, 0.5, -1.0, 302.0, -302.0])
leases = st.none() | st.integers(1, 4).map(float)
# What is run: a hold, or one of two jobs.
runs = st.sampled_from(["", "f", "f", "f", "g"])
operators = st.sampled_from(["me", "you"])
mostly = st.sampled_from([True, True, True, False])
# The schedule, and since when before its run time a replica has had it.
schedules = st.sampled_from([None, "s", "s", "t"])
schedule_ages = st.sampled_from([None, 0.0, 8.0, 100.0])
# What becomes of the question: nothing, if the connection breaks before or after it was answered.
fates = st.sampled_from(["answered", "answered", "answer lost", "answer lost", "never sent"])

MOST_ROUNDS = 50

F = TypeVar("F", bound=Callable[..., None])

COLUMNS = [each.name for each in fields(Row)]
ROWS = f"SELECT {', '.join(COLUMNS)}, xmin::text, ctid::text FROM task_lock"


@dataclass(frozen=True)
class Wish:
    """A claim as a replica remembers it, to ask again after an answer that was lost.

    :ivar run_time: by the replica's clock, which is the database's
    """

    replica: str
    run_time: float
    request: ClaimRequest

    @property
    def task(self) -> str:
        return self.request.task_name

    @property
    def claim_id(self) -> UUID:
        return self.request.claim_id


@dataclass(frozen=True)
class Takeover:
    replica: str
    request: RerunRequest


@dataclass
class Table:
    """The real table, or the rows in memory, read in the rule's terms."""

    connection: Rows
    rows: dict[str, Row] = field(default_factory=dict)
    versions: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def clear(self) -> None:
        if isinstance(self.connection, Memory):
            self.connection.locks.rows.clear()
        else:
            self.connection.execute("DELETE FROM task_lock; DELETE FROM task_lock_run")
        self.set_clock(0.0)
        self.read()

    def set_clock(self, now: float) -> None:
        if isinstance(self.connection, Memory):
            self.connection.time = as_time(now)
            return
        self.connection.execute("UPDATE travel.clock SET time = %s", [as_time(now)])

    def read(self) -> None:
        self.rows, self.versions = {}, {}
        if isinstance(self.connection, Memory):
            self.rows = dict(self.connection.locks.rows)
            self.versions = {name: (str(row),) for name, row in self.rows.items()}
            return
        for *columns, xmin, ctid in self.connection.execute(ROWS).fetchall():
            row = Row(*columns)
            self.rows[row.task_name], self.versions[row.task_name] = row, (xmin, ctid)

    def pause(
        self, task: str, seconds: float | None, by: str, pause_id: UUID, by_rule: Row
    ) -> None:
        if isinstance(self.connection, Memory):
            self.connection.locks.rows[task] = by_rule
            return
        cursor = raw_cursor(self.connection)
        OPERATIONS.pause(cursor, [task], seconds, by, None, pause_id)

    def resume(self, task: str, by: str, *, force: bool) -> None:
        if isinstance(self.connection, Memory):
            rows, now = self.connection.locks.rows, self.connection.time
            rows[task] = the_rule.resume(rows[task], now, by, force=force)
            return
        cursor = raw_cursor(self.connection)
        OPERATIONS.resume(cursor, [task], by, force=force)


ACTIONS: list[st.SearchStrategy[tuple[str, dict[str, Any]]]] = []


def action(**arguments: st.SearchStrategy[Any]) -> Callable[[F], F]:
    """Make a method a step of the histories.

    Not each a rule: Hypothesis leaves most rules out of any one history, and then rare situations
    never come about, in whole rounds of histories.
    """

    def note(method: F) -> F:
        ACTIONS.append(st.tuples(st.just(method.__name__), st.fixed_dictionaries(dict(arguments))))
        return method

    return note


class ClaimHistory(RuleBasedStateMachine):
    def __init__(
        self,
        connection: Rows,
        table: Table,
        seen: Counter[str],
        *,
        together: bool,
    ) -> None:
        super().__init__()
        names = ("one", "two", "three")
        self.replicas = {name: Replica(name, connection, LOCK_TIMEOUT) for name in names}
        self.one = self.replicas["one"]
        self.together = together
        self.table = table
        self.seen = seen
        self.now = 0.0
        self.expected: dict[str, Row] = {}
        self.wishes: dict[str, list[Wish]] = {"first": [], "second": []}
        self.takeovers: dict[str, list[Takeover]] = {"first": [], "second": []}
        # Every id that was ever granted, the last one at the end.
        self.ids: dict[str, list[UUID]] = {"first": [], "second": []}
        # What the replicas believe to hold, by the answers that they got: until when.
        self.held: dict[str, dict[UUID, datetime]] = {"first": {}, "second": {}}
        self.tokens: dict[str, int] = {}
        # Whether the last statement must have left every row as it was, down to its version.
        self.nothing_written = False
        self.numbers = count(1)
        self.pause_id = UUID(int=0)
        # The pauses in the run history, by the slots of its ring of actions.
        self.actions: dict[str, dict[int, UUID | None]] = {"first": {}, "second": {}}

    @property
    def time(self) -> datetime:
        return as_time(self.now)

    @initialize()
    def begin(self) -> None:
        self.table.clear()

    @action(seconds=st.sampled_from([0.5, 1.0, 2.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 6)
        self.table.set_clock(self.now)

    @action(task=tasks, limit=limits, more=st.sampled_from([0.0, 0.0, 0.5]))
    def time_passes_until(self, task: str, limit: str, more: float) -> None:
        row = self.expected.get(task)
        if row is not None and getattr(row, limit) is not None:  # a pause may have no end
            self.time_passes(max(0.0, as_seconds(getattr(row, limit)) + more - self.now))

    @action(
        task=tasks,
        replica=replicas,
        late=half_seconds,
        min_lock=half_seconds,
        max_lock=st.integers(1, 12).map(float),
        lease=leases,
        exact=exact,
        runs=runs,
        schedule=schedules,
        schedule_for=schedule_ages,
        least_gap=st.sampled_from([None, 0.0, 1.0]),
        one_off=st.booleans(),
        failover=mostly,
        bound=bounds,
        stable=mostly,
        fate=fates,
    )
    def claim(
        self,
        task: str,
        replica: str,
        late: float,
        exact: float | None,
        bound: Any,
        stable: bool,
        fate: str,
        **wish: Any,
    ) -> None:
        run_time = self.now - late
        request = ClaimRequest(
            task,
            run_time=None if exact is None else as_time(run_time + exact),
            exact=exact is not None,
            claim_id=UUID(int=next(self.numbers)),
            grace=1.0,
            **wish,
        )
        self.wishes[task].append(Wish(replica, run_time, request))
        self.ask(self.wishes[task][-1], bound, stable, fate)

    @action(task=tasks, back=back, bound=bounds, stable=mostly, fate=fates)
    def claim_again(self, task: str, back: int, bound: Any, stable: bool, fate: str) -> None:
        if back < len(self.wishes[task]):
            self.ask(self.wishes[task][-1 - back], bound, stable, fate)

    def ask(self, wish: Wish, bound: float | None, stable: bool, fate: str) -> None:
        if fate == "never sent":
            return
        asked = [wish]
        if self.together:
            # What a replica asked for another task once, or asks again, travels with it.
            asked += [
                replace(past[-1], replica=wish.replica)
                for task, past in self.wishes.items()
                if task != wish.task and past
            ]
        latest = None if bound is None else as_time(self.now + bound)
        answers = self.send(asked, latest, stable)
        quiet = []
        for each in asked:
            self.check(each, answers[each.claim_id], latest, stable, fate)
            quiet.append(self.nothing_written)
        self.nothing_written = all(quiet)

    def send(
        self, asked: list[Wish], latest: datetime | None, stable: bool
    ) -> dict[UUID, ClaimAnswer]:
        requests = [wish.request for wish in asked]
        lags = [self.lag(wish) for wish in asked]
        replica = self.replicas[asked[0].replica]
        times = ClaimTimes(lags[0], latest, stable)
        if self.together:
            answers = replica.ask(Claims(requests, lags, times))
            new = [n for n, request in enumerate(requests) if request.claim_id not in answers]
            requests, lags = [requests[n] for n in new], [lags[n] for n in new]
            return answers | replica.ask(Claims(requests, lags, times, are_first=True))
        return {requests[0].claim_id: replica.ask(Claim(requests[0], times))}

    def check(
        self, wish: Wish, answer: ClaimAnswer, latest: datetime | None, stable: bool, fate: str
    ) -> None:
        before, times = self.expected.get(wish.task), ClaimTimes(self.lag(wish), latest, stable)
        decision = the_rule.claim(before, wish.request, times, wish.replica, self.time)
        after = decision.row
        assert after is not None
        claim = DatedClaim.of(wish.request, times, self.time)
        unbound = as_time(wish.run_time)
        self.note(situations.of_claim(before, after, claim, unbound))
        if before is None and wish.task in self.tokens:
            self.note("first claim after the row was pruned")
        assert answer == decision.answer
        self.happened(wish.task, after, wrote=after is not before)
        self.granted(wish.task, before, answer, fate)

    def lag(self, wish: Wish) -> float:
        return self.now - wish.run_time

    @action(task=tasks, back=back, replica=replicas, lease=leases, failover=mostly, fate=fates)
    def take_over(self, task: str, back: int, replica: str, fate: str, **wish: Any) -> None:
        claim_id = UUID(int=next(self.numbers))
        request = takeover_of(task, self.id_of(task, back), "dead", claim_id=claim_id, **wish)
        self.takeovers[task].append(Takeover(replica, request))
        self.ask_to_take_over(task, self.takeovers[task][-1], fate)

    @action(task=tasks, replica=replicas, lease=leases, failover=mostly, fate=fates)
    def holder_dies_and_is_taken_over(self, task: str, **takeover: Any) -> None:
        row = self.expected.get(task)
        if row is not None and row.finished_at is None:
            self.time_passes_until(task, "locked_until", 0.0)
            self.take_over(task, 0, **takeover)
            if takeover["fate"] == "answer lost":
                self.the_table_is_as_the_rule_says()
                self.take_over_again(task, 0, "answered")

    @action(
        task=tasks,
        handed_over=st.booleans(),
        replica=replicas,
        runs=st.sampled_from([None, None, None, "g"]),
        failover=mostly,
        stable=mostly,
    )
    def next_window_comes_while_a_run_is_dead(
        self, task: str, handed_over: bool, runs: str | None, **claim: Any
    ) -> None:
        self.somebody_runs(task)
        row = self.expected[task]
        if handed_over:
            self.hand_over(task, 0)
        else:
            self.time_passes_until(task, "locked_until", 0.0)
        self.the_table_is_as_the_rule_says()
        self.time_passes_until(task, "window_until", 0.0)
        self.claim_for(task, self.now, runs=runs or row.runs, min_lock=1.0, **claim)

    @action(
        task=tasks,
        replica=replicas,
        runs=st.sampled_from(["f", ""]),
        shorter=st.sampled_from([0.5, 1.0, 2.0]),
        failover=mostly,
    )
    def next_claim_has_a_shorter_minimum_lock(
        self, task: str, shorter: float, **claim: Any
    ) -> None:
        row = self.expected.get(task)
        if row is not None and shorter < (row.window_until - row.window_start).total_seconds():
            self.release(task, 0, True)
            self.the_table_is_as_the_rule_says()
            fired = as_seconds(row.window_start) + shorter
            self.claim_for(task, fired, min_lock=shorter, **claim)

    @action(task=tasks, replica=replicas, exact=st.sampled_from([0.0, 0.0, None]), is_newer=mostly)
    def next_claim_has_another_schedule(self, task: str, is_newer: bool, **claim: Any) -> None:
        self.somebody_runs(task)
        self.release(task, 0, True)
        self.the_table_is_as_the_rule_says()
        self.time_passes_until(task, "window_until", 0.0)
        self.claim_for(task, self.now, schedule="s", schedule_for=50.0, min_lock=8.0, **claim)
        self.the_table_is_as_the_rule_says()
        self.release(task, 0, True)
        self.the_table_is_as_the_rule_says()
        age = 2.0 if is_newer else 500.0
        changed = {"schedule": "t", "schedule_for": age, "least_gap": 1.0}
        self.claim_for(task, self.now + 1.0, min_lock=8.0, **changed, **claim)

    @action(task=tasks, replica=replicas, failover=mostly)
    def one_run_time_is_asked_for_twice_without_a_minimum_lock(
        self, task: str, **claim: Any
    ) -> None:
        self.release(task, 0, True)
        self.the_table_is_as_the_rule_says()
        for _ in range(2):
            self.claim_for(task, self.now, min_lock=0.0, exact=0.0, **claim)
            self.the_table_is_as_the_rule_says()
            self.release(task, 0, True)
            self.the_table_is_as_the_rule_says()

    @action(task=tasks, replica=replicas, failover=mostly)
    def clock_of_the_database_seems_ahead_of_a_new_window(self, task: str, **claim: Any) -> None:
        row = self.expected.get(task)
        if row is not None:
            self.release(task, 0, True)
            self.the_table_is_as_the_rule_says()
            fired = as_seconds(row.window_until) + 0.5
            self.claim_for(task, fired, min_lock=8.0, bound=-4.0, **claim)

    def somebody_runs(self, task: str) -> None:
        row = self.expected.get(task)
        if row is None or not row.is_running(self.time):
            self.time_passes_until(task, "run_until", 0.0)
            self.time_passes_until(task, "window_until", 0.0)
            if row is not None and row.is_paused(self.time):
                self.resume(task, "me", True)
                self.the_table_is_as_the_rule_says()
            self.claim_for(task, self.now, replica="one", min_lock=1.0, failover=True)
            self.the_table_is_as_the_rule_says()

    def claim_for(self, task: str, fired: float, **claim: Any) -> None:
        """Claim for a run time, not before it."""
        self.time_passes(max(0.0, fired - self.now))
        usual = {
            "runs": "f",
            "max_lock": 8.0,
            "lease": 2.0,
            "exact": None,
            "one_off": False,
            "bound": None,
            "stable": True,
            "fate": "answered",
        }
        self.claim(task=task, late=self.now - fired, **{**usual, **claim})

    @action(
        task=tasks,
        until=st.sampled_from(["handed over", "locked_until", "locked_until", "run_until"]),
        then=st.sampled_from(["claim", "renew", "extend", "end lease", "give up"]),
    )
    def holder_is_heard_of_after_its_lease(self, task: str, until: str, then: str) -> None:
        self.somebody_runs(task)
        if until == "handed over":
            self.hand_over(task, 0)
            self.the_table_is_as_the_rule_says()
        else:
            self.time_passes_until(task, until, 0.0)
        if then == "claim":
            self.claim_again(task, 0, None, True, "answered")
        elif then == "renew":
            self.renew([(task, 0, 9)])
        elif then == "extend":
            self.extend(task, 0, 1.0, 4.0)
        elif then == "end lease":
            self.hand_over(task, 0)
        else:
            self.give_up(task, 0)

    @action(task=tasks, replica=replicas, failover=mostly)
    def takeover_comes_shortly_before_the_maximum_lock(self, task: str, **takeover: Any) -> None:
        self.somebody_runs(task)
        row = self.expected[task]
        if row.locked_until < row.run_until:
            self.time_passes(max(0.0, as_seconds(row.run_until) - 0.5 - self.now))
            self.take_over(task, 0, lease=4.0, fate="answered", **takeover)

    @action(task=tasks, back=back, fate=fates)
    def take_over_again(self, task: str, back: int, fate: str) -> None:
        if back < len(self.takeovers[task]):
            self.ask_to_take_over(task, self.takeovers[task][-1 - back], fate)

    def ask_to_take_over(self, task: str, ask: Takeover, fate: str) -> None:
        if fate == "never sent":
            return
        before, request = self.expected.get(task), ask.request
        decision = the_rule.rerun(before, request, IN_TIME, ask.replica, self.time)
        replica = self.replicas[ask.replica]
        if self.together:
            # One of a task that has no row travels with it.
            requests = [takeover_of("nobody's", request.cause, "dead"), request]
            answer = replica.ask(Reruns(requests)).get(request.claim_id)
        else:
            answer = replica.rerun(request)
        after = decision.row
        self.note(situations.of_takeover(before, after, request, self.time))
        self.happened(task, after, wrote=after is not before)
        assert answer == decision.answer
        if answer is not None:
            self.granted(task, before, answer, fate)

    def granted(self, task: str, before: Row | None, answer: ClaimAnswer, fate: str) -> None:
        """Remember a claim if it was granted, and let its replica believe it if it was told."""
        if not answer.granted:
            return
        if before is None or before.claim_id != answer.claim_id:
            self.ids[task].append(answer.claim_id)
        if fate == "answered":
            self.held[task][answer.claim_id] = answer.locked_until

    @action(task=tasks, back=back, keep_window=st.booleans())
    def release(self, task: str, back: int, keep_window: bool) -> None:
        window = WindowAfter.KEEP if keep_window else WindowAfter.OPEN
        before, request = self.expected.get(task), self.release_request(task, back, window)
        decision = the_rule.release(before, request, self.time)
        stood = None if decision.answer is None else decision.row
        self.note(situations.of_release(before, stood, self.time, keep_window=keep_window))
        answer = self.one.released(request, together=self.together)
        self.ended(request.claim_id, decision, answer, task)

    @action(task=tasks, back=back)
    def hand_over(self, task: str, back: int) -> None:
        before = self.expected.get(task)
        request = self.release_request(task, back, WindowAfter.HAND_OVER)
        decision = the_rule.release(before, request, self.time)
        stood = None if decision.answer is None else decision.row
        self.note(situations.of_end_of_lease(before, stood, request.claim_id, handed_over=True))
        answer = self.one.released(request, together=self.together)
        self.ended(request.claim_id, decision, answer, task)

    def release_request(self, task: str, back: int, window: WindowAfter) -> ReleaseRequest:
        return ReleaseRequest(task, self.id_of(task, back), RunOutcome(window))

    @action(
        task=tasks, back=back, holders=st.sampled_from([["one"], ["one", "two", "three"], ["four"]])
    )
    def end_lease(self, task: str, back: int, holders: list[str]) -> None:
        before, claim_id = self.expected.get(task), self.id_of(task, back)
        asked = EndLease(task, claim_id, holders)
        decision = the_rule.end_lease(before, asked, self.time)
        stood = None if decision.answer is None else decision.row
        self.note(situations.of_end_of_lease(before, stood, claim_id, handed_over=False))
        self.ended(claim_id, decision, self.one.ask(asked), task)

    def ended(
        self,
        claim_id: UUID,
        decision: Ruling[ReleaseAnswer | None],
        answer: ReleaseAnswer | None,
        task: str,
    ) -> None:
        assert answer == decision.answer
        if answer is not None:
            self.held[task].pop(claim_id, None)
        self.happened(task, decision.row, wrote=answer is not None)

    @action(task=tasks, back=back)
    def give_up(self, task: str, back: int) -> None:
        before, claim_id = self.expected.get(task), self.id_of(task, back)
        asked = GiveUp(task, claim_id)
        decision = the_rule.give_up(before, asked, self.time)
        self.note(
            situations.of_giving_up(before, claim_id, is_given_up=decision.answer is not None)
        )
        assert self.one.ask(asked) == decision.answer
        self.happened(task, decision.row, wrote=decision.answer is not None)

    @action(
        which=st.lists(
            st.tuples(tasks, back, st.sampled_from([1, 4, 9])),
            min_size=1,
            max_size=4,
            unique_by=lambda renewal: renewal[:2],
        )
    )
    def renew(self, which: list[tuple[str, int, int]]) -> None:
        renewals, expected = {}, {}
        for task, back, lease in which:
            before, renewal = self.expected.get(task), Renewal(task, self.id_of(task, back), lease)
            renewals[renewal.claim_id] = renewal
            decision = the_rule.renew(before, renewal, self.time)
            stood = None if decision.answer is None else decision.row
            self.note(situations.of_renewal(before, stood, renewal, self.time))
            if decision.row is not None and decision.answer is not None:
                expected[renewal.claim_id] = decision.answer
                self.expected[task] = decision.row
                self.stands_until(task, renewal.claim_id, decision.row.locked_until)
        assert self.one.ask(Renewals(list(renewals.values()))) == expected
        self.nothing_written = not expected

    @action(task=tasks, back=back, by=half_seconds, lease=leases)
    def extend(self, task: str, back: int, by: float, lease: float | None) -> None:
        before, claim_id = self.expected.get(task), self.id_of(task, back)
        asked = Extend(task, claim_id, by, lease)
        decision = the_rule.extend(before, asked, self.time)
        stood = None if decision.answer is None else decision.row
        self.note(situations.of_extension(before, stood, self.time))
        assert self.one.ask(asked) == decision.answer
        if stood is not None:
            self.stands_until(task, claim_id, stood.locked_until)
        self.happened(task, decision.row, wrote=stood is not None)

    @action(
        task=tasks,
        seconds=st.sampled_from([None, 1.0, 4.0, 30.0]),
        by=operators,
        is_sent_again=st.booleans(),
    )
    def pause(
        self, task: str, seconds: float | None, by: str = "me", is_sent_again: bool = False
    ) -> None:
        row = self.expected.get(task)
        if row is not None:
            if not is_sent_again:
                self.pause_id = UUID(int=self.pause_id.int + 1)
            paused = the_rule.pause(row, seconds, self.time, by, None, str(self.pause_id))
            if self.pause_id in self.actions[task].values():  # it was done, and is not done again
                if paused != row:
                    self.note("not paused: sent again after the pause has ended")
                paused = row
            self.table.pause(task, seconds, by, self.pause_id, paused)
            self.operated(task, paused, self.pause_id)

    @action(task=tasks, by=operators, force=st.booleans())
    def resume(self, task: str, by: str, force: bool) -> None:
        row = self.expected.get(task)
        if row is not None:
            self.table.resume(task, by, force=force)
            self.operated(task, the_rule.resume(row, self.time, by, force=force))

    @action(
        task=tasks,
        replica=replicas,
        failover=mostly,
        before=st.sampled_from([0.0, 1.0]),
        after=st.sampled_from([0.0, 1.0]),
    )
    def run_time_comes_in_a_pause_or_before(
        self, task: str, before: float, after: float, **claim: Any
    ) -> None:
        self.somebody_runs(task)
        self.release(task, 0, True)
        self.time_passes_until(task, "window_until", 1.0)
        run_time = self.now
        self.time_passes(before)
        self.pause(task, 2.0)
        self.the_table_is_as_the_rule_says()
        self.claim_for(task, run_time, min_lock=1.0, **claim)
        self.the_table_is_as_the_rule_says()
        self.time_passes_until(task, "paused_until", after)
        self.claim_for(task, run_time, min_lock=1.0, **claim)

    @action(task=tasks, replica=replicas, lease=leases, failover=mostly, fate=fates)
    def holder_dies_in_a_pause(self, task: str, **takeover: Any) -> None:
        self.somebody_runs(task)
        self.pause(task, 4.0)
        self.time_passes_until(task, "locked_until", 0.0)
        self.the_table_is_as_the_rule_says()
        self.take_over(task, 0, **takeover)

    @action(age=st.sampled_from([1.0, 4.0]))
    def prune(self, age: float) -> None:
        pruned = {
            task for task, row in self.expected.items() if the_rule.is_over(row, age, self.time)
        }
        for task, row in self.expected.items():
            if task in pruned:
                self.note("pruned")
            elif not row.one_off:
                self.note("not pruned: recurring")
            else:
                self.note("not pruned: not old enough")
        assert self.one.ask(PruneOneOffs(age)) == len(pruned)
        for task in pruned:
            del self.expected[task]
            self.actions[task].clear()
        self.nothing_written = not pruned

    @action(always=st.sampled_from([[], ["first"], ["first", "second", "third"]]))
    def read(self, always: list[str]) -> None:
        self.nothing_written = True
        found, database_time = self.one.ask(ReadTasks(["first", "second", "third"], always))
        assert database_time == self.time
        expected = {
            task: the_rule.state_of(row, self.time)
            for task, row in self.expected.items()
            if the_rule.calls_for_something(row, self.time) or task in always
        }
        for state in expected.values():
            for situation in situations.of_state(state):
                self.note(situation)
        assert {state.task_name: state for state in found} == expected

    @action(task=tasks, replica=replicas, failover=mostly)
    def one_off_task_is_pruned_and_comes_back(self, task: str, **claim: Any) -> None:
        self.somebody_runs(task)
        self.release(task, 0, True)
        self.the_table_is_as_the_rule_says()
        self.time_passes_until(task, "window_until", 0.0)
        self.claim_for(task, self.now, min_lock=1.0, one_off=True, **claim)
        self.the_table_is_as_the_rule_says()
        self.release(task, 0, True)
        self.the_table_is_as_the_rule_says()
        self.time_passes(12.5)  # just longer than its maximum lock and the age
        self.prune(4.0)
        self.the_table_is_as_the_rule_says()
        self.claim_for(task, self.now, min_lock=1.0, **claim)

    @rule(action=st.one_of(ACTIONS))
    def step(self, action: tuple[str, dict[str, Any]]) -> None:
        name, arguments = action
        getattr(self, name)(**arguments)

    @invariant()
    def the_table_is_as_the_rule_says(self) -> None:
        before = self.table.versions
        self.table.read()
        assert self.table.rows == self.expected
        if self.nothing_written:
            assert self.table.versions == before

    @invariant()
    def a_token_never_falls_not_even_after_its_row_was_deleted(self) -> None:
        tokens = {task: row.token for task, row in self.table.rows.items()}
        assert all(token >= self.tokens.get(task, 0) for task, token in tokens.items())
        self.tokens.update(tokens)

    @invariant()
    def nobody_believes_to_hold_what_another_holds(self) -> None:
        for held in self.held.values():
            assert sum(until > self.time for until in held.values()) <= 1

    def id_of(self, task: str, back: int) -> UUID:
        """Return an id that was granted, or one that never was."""
        ids = self.ids[task]
        return ids[-1 - back] if back < len(ids) else UUID(int=10**6 + back)

    def stands_until(self, task: str, claim_id: UUID, until: datetime) -> None:
        """Let a replica believe it, if it knows of the claim at all."""
        if claim_id in self.held[task]:
            self.held[task][claim_id] = until

    def happened(self, task: str, after: Row | None, *, wrote: bool = True) -> None:
        if after is not None:
            self.expected[task] = after
        self.nothing_written = not wrote

    def operated(self, task: str, after: Row, pause_id: UUID | None = None) -> None:
        if after.recorded_actions > self.expected[task].recorded_actions:
            self.actions[task][after.recorded_actions % ACTION_SLOTS] = pause_id
        self.happened(task, after)

    def note(self, situation: str) -> None:
        self.seen[situation] += 1
        event(situation)


def as_time(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def as_seconds(time: datetime) -> float:
    return (time - START).total_seconds()


# A busy machine, or the thorough profile; and when it fails, up to 300 s to find a short history.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("rows", "together"),
    [
        pytest.param("postgresql", True, id="postgresql-together"),
        pytest.param("postgresql", False, id="postgresql-alone", marks=pytest.mark.nightly),
        pytest.param("memory", True, id="memory-together", marks=pytest.mark.nightly),
        pytest.param("memory", False, id="memory-alone", marks=pytest.mark.nightly),
    ],
    indirect=["rows"],
)
def test_every_history_of_claims_goes_as_the_rule_says(
    together: bool,
    connection: Rows,
    replicas_connection: Rows,
    rng: random.Random,
) -> None:
    seen: Counter[str] = Counter()
    table = Table(connection)
    long = settings(max_examples=settings.default.max_examples // 20, stateful_step_count=60)

    # A round may by chance miss a rare situation.
    for _ in range(MOST_ROUNDS):
        histories = seed(rng.getrandbits(64))(
            lambda: ClaimHistory(replicas_connection, table, seen, together=together)
        )
        run_state_machine_as_test(histories, settings=long)
        if seen.keys() >= situations.EXPECTED:
            break

    print(*(f"{number:6} {situation}" for situation, number in seen.most_common()), sep="\n")
    assert seen.keys() >= situations.EXPECTED
