"""Reads and claims of stored jobs, deaths, lost answers and users' changes, in any order.

A model goes through all of it. Seeded ways through it are gone by the real statements as well,
whose answers and rows have to be the model's.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import patch
from uuid import UUID, uuid4

import psycopg
import pytest

from apscheduler_tasklock._lock.job_rows import DueRow, JobRows
from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock._lock.statements import CHANGE_ID, Statement
from apscheduler_tasklock._lock.statements.conditions import IS_PAUSED, IS_WANTED, STANDS
from apscheduler_tasklock._lock.statements.deaths import NOT_RUNNING
from apscheduler_tasklock.schema.table import task_lock_table
from tests.contract.conftest import row
from tests.contract.interleavings import (
    LAST_RUN_TIME,
    MUTATIONS,
    RARE,
    ClaimId,
    Mutation,
    Rule,
    Step,
    World,
    WrongError,
    begin,
    explore,
    way_to,
)
from tests.contract.interleavings import LEASE as OUTAGE
from tests.contract.store_replica import StoreReplica, requested
from tests.contract.store_replica import step as due_step
from tests.support.waist import ClaimRequest, ClaimTimes, JobMove, Renewal, StoredClaims

Connection = psycopg.Connection[Any]
Travel = Callable[[float], None]
TICK, LEASE = 11.0, 20.0
# Seconds, longer than all ticks and outages of a way.
MAX_LOCK = 1000.0
WAYS = 20
# How often what seldom comes is chosen, where it can be; what else there is has 2.
WEIGHTS = {
    "take over": 20,
    "run by hand": 40,
    "arrives": 6,
    "claim, answer lost": 4,
    "claim, held up": 4,
    "ask again": 1,
    "pause": 1,
    "rename": 1,
    "remove": 1,
    "pause task": 1,
    "die": 1,
}
TASK = "task of job"


@pytest.mark.parametrize("failover", [True, False])
@pytest.mark.parametrize(
    ("replicas", "faults", "user", "paths"),
    [
        (2, 1, 0, 10**6),
        pytest.param(2, 0, 2, 10**8, marks=pytest.mark.nightly),
        pytest.param(2, 1, 1, 10**8, marks=pytest.mark.nightly),
        pytest.param(3, 1, 0, 10**9, marks=pytest.mark.nightly),
    ],
)
def test_nothing_is_lost_or_doubled_in_any_order(
    replicas: int, faults: int, user: int, paths: int, failover: bool
) -> None:
    explored = explore(Rule(failover=failover), begin(replicas, faults, user))
    assert explored.paths > paths


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("replicas", "faults", "user"), [(2, 2, 1), (3, 1, 1)])
def test_nothing_is_lost_or_doubled_with_more_faults(replicas: int, faults: int, user: int) -> None:
    explore(Rule(), begin(replicas, faults, user))


def find(mutation: Mutation) -> None:
    with pytest.raises(WrongError):
        explore(mutation.rule, begin(2, mutation.faults, mutation.user, unable=1))


@pytest.mark.nightly  # a test of the tests
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_part_is_needed(mutation: str) -> None:
    find(MUTATIONS[mutation])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutation", RARE)
def test_each_part_is_needed_that_takes_long_to_be_seen(mutation: str) -> None:
    find(RARE[mutation])


class Rows:
    """The rows of the database, with which the same is done as in the model."""

    def __init__(
        self, connection: Connection, travel: Travel, replicas: int, *, failover: bool = True
    ) -> None:
        self._connection = connection
        self._travel = travel
        self._failover = failover
        self._replicas = [StoreReplica(f"replica {n}", connection) for n in range(replicas)]
        for replica in self._replicas:  # an entry in the history has a row of the task
            replica.jobs = JobRows(task_lock_table(), replica.name, history=0)
        self._start = self._replicas[0].now
        self._found: dict[int, DueRow] = {}
        self._asked: dict[ClaimId, ClaimRequest] = {}
        self._ids: dict[ClaimId, UUID] = {}
        self._replicas[0].add(task_name=TASK)
        self._requests = Operations(task_lock_table())

    def at(self, tick: int | None) -> datetime | None:
        return None if tick is None else self._start + timedelta(seconds=tick * TICK)

    def do(self, step: Step, before: World, after: World) -> None:
        """Do what the model has done, and compare the answers."""
        if step.replica < 0:
            self._do_to_all(step, before)
        elif "claim" in step.name or step.name in ("ask again", "arrives"):
            self._claim(step, before, after)
        else:
            self._do_alone(step, before)

    def _claim(self, step: Step, before: World, after: World) -> None:
        claim = (step.replica, before.replicas[step.replica].claims)
        if "claim" in step.name:
            self._ask(claim)
        if step.name == "arrives":
            [flying] = set(before.flying) - set(after.flying)
            answer = self._send(flying.claim, before, not_after=flying.not_after)
            assert step.answer in ("late", answer)
        elif step.name != "claim, held up":
            assert self._send(claim, before) == step.answer

    def _do_alone(self, step: Step, before: World) -> None:
        replica, number = self._replicas[step.replica], before.replicas[step.replica].claims
        claim, mine = (step.replica, number), uuid4()
        match step.name:
            case "read":
                found = self._read(step.replica, before)
                assert found is not None
                assert found.row.next_run_time == self.at(int(step.answer))
                self._found[step.replica] = found
            case "move on":
                moved = replica.jobs.move_on(replica.cursor, [self._move(step.replica)])
                assert bool(moved) == (step.answer == "moved")
            case "hand over":
                replica.hand_over(self._ids[claim], TASK)
            case "release":
                replica.release(self._ids[claim], TASK)
            case "take over":
                assert before.lock is not None
                dead, stable = self._ids[before.lock.claim], before.believed
                asked: dict[str, Any] = {"lease": LEASE, "stable": stable}
                asked["failover"] = self._failover
                assert replica.takes_over(dead, TASK, claim_id=mine, **asked)
                self._ids[step.replica, number + 1] = mine
            case "run by hand":
                asked = {"max_lock": MAX_LOCK, "lease": LEASE, "failover": self._failover}
                request_id = self._request()
                _, answer = replica.run_by_hand(request_id, TASK, claim_id=mine, **asked)
                assert answer is not None
                assert answer.granted
                self._ids[step.replica, number + 1] = mine

    def _request(self) -> UUID:
        self._connection.execute(
            "INSERT INTO task_lock_replica VALUES ('one', 'host', '1.0', now(), now(), %s)"
            " ON CONFLICT (replica_id) DO UPDATE SET seen_at = now()",
            [[TASK]],
        )
        cursor = self._replicas[0].cursor
        return self._requests.request_run(cursor, TASK, "me", 3600.0).request_id

    def _read(self, number: int, world: World) -> DueRow | None:
        not_here = [] if world.replicas[number].able else ["jobs:job"]
        found = self._replicas[number].due(stable=world.believed, not_here=not_here)
        return found[0] if found else None

    def _move(self, number: int) -> JobMove:
        found = self._found[number]
        assert found.row.next_run_time is not None
        is_last = found.row.next_run_time == self.at(LAST_RUN_TIME)
        is_last = is_last or found.row.next_run_time > self._start + timedelta(seconds=TICK)
        return due_step(found, None if is_last else timedelta(seconds=TICK))

    def _ask(self, claim: ClaimId) -> None:
        self._asked[claim] = self._request_for(claim[0])
        self._ids[claim] = self._asked[claim].claim_id

    def _request_for(self, number: int) -> ClaimRequest:
        asked = requested(
            self._found[number], failover=self._failover, lease=LEASE, max_lock=MAX_LOCK
        )
        return replace(asked, move=self._move(number))

    def _send(self, claim: ClaimId, world: World, not_after: int | None = None) -> str:
        end = self.at(not_after)
        times = ClaimTimes(
            stable=world.believed,
            not_after=None if end is None else end + timedelta(seconds=5),
        )
        return self._answer(claim[0], self._asked[claim], times)

    def _answer(self, number: int, asked: ClaimRequest, times: ClaimTimes) -> str:
        replica = self._replicas[number]
        [answer] = replica.ask(StoredClaims([asked], times, 1)).values()
        if answer.granted:
            return "granted"
        return "withdrawn" if answer.withdrawn else "refused"

    def _do_to_all(self, step: Step, before: World) -> None:
        match step.name:
            case "tick":
                self._travel(TICK)
                self._renew(before)
            case "outage":
                self._travel(OUTAGE * TICK)
            case "recover":
                self._renew(before)
            case "pause task":
                self._replicas[0].pause_task(TASK)
            case "resume task":
                resume = "UPDATE task_lock SET paused_until = now() WHERE task_name = %s"
                self._connection.execute(resume, [TASK])
            case change:
                self._change_job(change, before)

    def _change_job(self, change: str, before: World) -> None:
        user = self._replicas[0]
        match change:
            case "add":
                user.add(task_name=TASK)
            case "remove":
                user.jobs.remove(user.cursor, "job")
            case "pause":
                user.change(due_in=None)
            case "resume":
                user.change(due_in=0)
            case "rename":
                assert before.job is not None
                due = self.at(before.job.next)
                user.change(due_in=None if due is None else (due - user.now).total_seconds())

    def _renew(self, world: World) -> None:
        lock = world.lock
        if lock is None:
            return
        holder = world.replicas[lock.claim[0]]
        if holder.phase in ("runs", "ended") and holder.claims == lock.claim[1]:
            replica = self._replicas[lock.claim[0]]
            replica.renew(Renewal(TASK, self._ids[lock.claim], LEASE))

    def compare(self, world: World, rule: Rule) -> None:
        """Compare the rows with those of the model, and what replicas read of them."""
        read = "SELECT next_run_time, last_run_time, ended FROM task_lock_job"
        jobs = self._connection.execute(read).fetchall()
        job = world.job
        assert jobs == ([] if job is None else [(self.at(job.next), self.at(job.last), job.ended)])
        lock = world.lock
        tasks = self._connection.execute("SELECT FROM task_lock").rowcount
        assert tasks == (lock is not None)
        for number in (0, -1):  # of whom all others are alike
            is_read = rule.read(world, world.replicas[number]) is not None
            self._compare_read(number, world, is_read)
        if lock is None:
            return
        found = row(self._connection, TASK)
        assert found["claim_id"] == self._ids[lock.claim]
        assert found["window_start"] == self.at(lock.run_time)
        is_finished, is_handed_over = found["finished_at"] is not None, found["handed_over"]
        assert (is_finished, is_handed_over) == (lock.finished, lock.handed_over)
        is_over = found["locked_until"] <= self._replicas[0].now
        assert lock.finished or is_over == (lock.lease <= world.clock)

    def _compare_read(self, number: int, world: World, is_read: bool) -> None:
        """Compare what a replica reads; a claim right after that is granted."""
        found = self._read(number, world)
        assert (found is not None) == is_read
        if found is None:
            return
        kept, self._found[number] = self._found.get(number), found
        asked, times = self._request_for(number), ClaimTimes(stable=world.believed)
        with self._connection.transaction(force_rollback=True):
            assert self._answer(number, asked, times) == "granted"
        if kept is not None:
            self._found[number] = kept


def go_ways(
    connection: Connection, travel: Travel, rng: random.Random, beginning: World, ways: int
) -> set[str]:
    """Go random ways through the model, and do the same by the statements; return what was done."""
    rule = Rule()
    done: set[str] = set()
    for _ in range(ways):
        connection.execute("TRUNCATE task_lock, task_lock_job, task_lock_run")
        rows = Rows(connection, travel, len(beginning.replicas))
        world = beginning
        while steps := list(rule.steps(world)):
            weights = [WEIGHTS.get(step.name, 2) for step, _ in steps]
            [(step, after)] = rng.choices(steps, weights)
            rows.do(step, world, after)
            rows.compare(after, rule)
            done.add(step.name)
            world = after
    return done


@pytest.mark.postgresql
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_the_statements_do_what_the_model_does(
    connection: Connection, travel: Travel, rng: random.Random, replicas: int
) -> None:
    done = go_ways(connection, travel, rng, begin(replicas, 3, 3, unable=1), WAYS)
    assert done >= {"claim, answer lost", "ask again", "arrives", "hand over", "take over", "pause"}
    assert done >= {"move on", "outage", "recover", "pause task", "run by hand"}


# How each statement is known, and the parts of them that can be broken.
CLAIM, MOVE, READ = "fenced AS MATERIALIZED", "RETURNING job.id AS job_id", "AS next_in"
RUN_TIME, CHANGE = "job.next_run_time = asked.found", f"{CHANGE_ID} = asked.change_id"
DOUBT = "NOT (lock.handed_over OR %(stable)s::boolean)"
OWN_DEATH = "(lock.handed_over OR lock.failover)"
NOT_HERE = "NOT job.func = ANY(%(not_here)s::text[])"
OWN = f"{STANDS}) AS granted,"
ALL_PARTS = f"{RUN_TIME} AND {CHANGE}"
# What is broken: in which statement, what is there, and what there is in its place; and the same in
# the model, which tells where that makes a difference.
MISTAKES = {
    "a claim's own id is not looked for": (CLAIM, OWN, f"false AND {OWN}"),
    "the fence goes before a claim's own id": (CLAIM, OWN, f"job.claim_id IS NOT NULL AND {OWN}"),
    "the fence has no run time": (CLAIM, RUN_TIME, "true"),
    "the fence has no change": (CLAIM, CHANGE, "true"),
    "what is missed is moved on without a fence": (MOVE, ALL_PARTS, "true"),
    "a claim can be granted when nobody waits for it": (CLAIM, IS_WANTED, "true"),
    "the read does not mind runs": (READ, NOT_RUNNING, "true"),
    "the read does not mind deaths": (READ, OWN_DEATH, "false"),
    "the read does not mind doubts": (READ, DOUBT, "false"),
    "the read does not mind pauses": (READ, IS_PAUSED, "false"),
    "the read does not mind what cannot be run here": (READ, NOT_HERE, "true"),
    "the claim does not mind runs": (CLAIM, NOT_RUNNING, "true"),
    "the claim does not mind deaths": (CLAIM, OWN_DEATH, "false"),
    "the claim does not mind doubts": (CLAIM, DOUBT, "false"),
    "the claim does not mind pauses": (CLAIM, IS_PAUSED, "false"),
}
# The steps on the way to where one makes a difference.
ON_THE_WAY = frozenset(
    {
        *("read", "claim", "claim, answer lost", "claim, held up", "end", "release", "die"),
        *("tick", "outage", "recover", "rename", "pause task", "run by hand"),
    }
)


@contextmanager
def mistaken(which: str, there: str, instead: str) -> Iterator[None]:
    """Let a statement be with a mistake."""
    as_it_is = Statement.__init__
    found = 0

    def in_one_line(text: str) -> str:
        return re.sub(r"\s*\n\s*", " ", text.strip())

    def init(statement: Statement, template: str, *more: Any) -> None:
        nonlocal found
        if which in template:
            template = in_one_line(template)
            found += template.count(in_one_line(there))
            template = template.replace(in_one_line(there), instead)
        as_it_is(statement, template, *more)

    with patch.object(Statement, "__init__", init):
        yield
    assert found, "it is in no statement"


@pytest.mark.nightly  # a test of the tests
@pytest.mark.postgresql
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_statements_is_found(
    connection: Connection, travel: Travel, mistake: str
) -> None:
    mutation = {**MUTATIONS, **RARE}[mistake]
    rule = Rule(failover=mutation.rule.failover)
    beginning = begin(2, mutation.faults, mutation.user, unable=1)
    way, there = way_to(rule, mutation.rule, beginning, ON_THE_WAY)

    def go() -> None:
        connection.execute("TRUNCATE task_lock, task_lock_job, task_lock_run")
        rows = Rows(connection, travel, len(beginning.replicas), failover=rule.failover)
        rows.compare(beginning, rule)
        for step, before, after in [*way, *there[:1]]:
            rows.do(step, before, after)
            rows.compare(after, rule)

    go()
    with mistaken(*MISTAKES[mistake]), pytest.raises((AssertionError, ValueError)):
        go()
