"""Reads and claims of stored jobs, deaths, lost answers and users' changes, in any order.

A model goes through all of it. Seeded ways through it are gone by the real statements as well,
whose answers and rows have to be the model's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from apscheduler_tasklock._lock.jobs import DueRow
from apscheduler_tasklock._lock.messages import ClaimRequest, ReadTimes, Renewal
from tests.contract.conftest import row
from tests.contract.interleavings import (
    LAST_RUN_TIME,
    MUTATIONS,
    ClaimId,
    Replica,
    Rule,
    Step,
    World,
    WrongError,
    explore,
)
from tests.contract.store_replica import StoreReplica, requested

Connection = psycopg.Connection[Any]
Travel = Callable[[float], None]
TICK, LEASE = 11.0, 20.0
WAYS = 40
# How often what seldom comes is chosen, where it can be; what else there is has 2.
WEIGHTS = {"take over": 20, "arrives": 6, "ask again": 1, "rename": 1, "remove": 1}
TASK = "task of job"


@pytest.mark.parametrize("failover", [True, False])
@pytest.mark.parametrize(
    ("replicas", "faults", "user", "paths"), [(2, 1, 1, 10**8), (3, 1, 0, 10**9)]
)
def test_nothing_is_lost_or_doubled_in_any_order(
    replicas: int, faults: int, user: int, paths: int, failover: bool
) -> None:
    explored = explore(Rule(failover=failover), replicas, faults, user)
    assert explored.paths > paths


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("replicas", "faults", "user"), [(2, 2, 1), (3, 1, 1)])
def test_nothing_is_lost_or_doubled_with_more_faults(replicas: int, faults: int, user: int) -> None:
    explore(Rule(), replicas, faults, user)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_part_is_needed(mutation: str) -> None:
    with pytest.raises(WrongError):
        explore(MUTATIONS[mutation], replicas=2, faults=1, user=1)


class Rows:
    """The rows of the database, with which the same is done as in the model."""

    def __init__(self, connection: Connection, travel: Travel, names: list[str]) -> None:
        self._connection = connection
        self._travel = travel
        self._replicas = [StoreReplica(name, connection) for name in names]
        self._start = self._replicas[0].now
        self._found: dict[int, DueRow] = {}
        self._asked: dict[ClaimId, ClaimRequest] = {}
        self._ids: dict[ClaimId, UUID] = {}
        self._replicas[0].add()

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
            answer = self._send(flying.claim, not_after=flying.not_after)
            assert step.answer in ("late", answer)
        elif step.name != "claim, held up":
            assert self._send(claim) == step.answer

    def _do_alone(self, step: Step, before: World) -> None:
        replica, number = self._replicas[step.replica], before.replicas[step.replica].claims
        claim = (step.replica, number)
        match step.name:
            case "read":
                self._found[step.replica] = found = replica.one()
                assert found.row.next_run_time == self.at(int(step.answer))
            case "hand over":
                replica.hand_over(self._ids[claim], TASK)
            case "release":
                replica.release(self._ids[claim], TASK)
            case "take over":
                assert before.lock is not None
                dead, mine = self._ids[before.lock.claim], uuid4()
                assert replica.takes_over(dead, TASK, claim_id=mine, lease=LEASE)
                self._ids[step.replica, number + 1] = mine

    def _ask(self, claim: ClaimId) -> None:
        found = self._found[claim[0]]
        is_last = found.row.next_run_time == self.at(LAST_RUN_TIME)
        assert found.row.next_run_time is not None
        is_last = is_last or found.row.next_run_time > self._start + timedelta(seconds=TICK)
        period = None if is_last else timedelta(seconds=TICK)
        asked = requested(found, period=period, failover=True, lease=LEASE)
        self._asked[claim], self._ids[claim] = asked, asked.claim_id

    def _send(self, claim: ClaimId, not_after: int | None = None) -> str:
        asked, replica = self._asked[claim], self._replicas[claim[0]]
        end = self.at(not_after)
        times = ReadTimes(not_after=None if end is None else end + timedelta(seconds=5))
        [answer] = replica.protocol.claim_and_move(replica.cursor, [asked], times, 1).values()
        if answer.granted:
            return "granted"
        return "withdrawn" if answer.withdrawn else "refused"

    def _do_to_all(self, step: Step, before: World) -> None:
        user = self._replicas[0]
        match step.name:
            case "tick":
                self._travel(TICK)
                self._renew(before)
            case "add":
                user.add()
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

    def compare(self, world: World) -> None:
        """Compare the rows with those of the model."""
        read = "SELECT next_run_time, last_run_time, ended FROM task_lock_job"
        jobs = self._connection.execute(read).fetchall()
        job = world.job
        assert jobs == ([] if job is None else [(self.at(job.next), self.at(job.last), job.ended)])
        lock = world.lock
        tasks = self._connection.execute("SELECT FROM task_lock").rowcount
        assert tasks == (lock is not None)
        if lock is None:
            return
        found = row(self._connection, TASK)
        assert found["claim_id"] == self._ids[lock.claim]
        assert found["window_start"] == self.at(lock.run_time)
        is_finished, is_handed_over = found["finished_at"] is not None, found["handed_over"]
        assert (is_finished, is_handed_over) == (lock.finished, lock.handed_over)
        is_over = found["locked_until"] <= self._replicas[0].now
        assert lock.finished or is_over == (lock.lease <= world.clock)


@pytest.mark.postgresql
@pytest.mark.parametrize("replicas", [2, 3])
def test_the_statements_do_what_the_model_does(
    connection: Connection, travel: Travel, rng: random.Random, replicas: int
) -> None:
    rule = Rule()
    done: set[str] = set()
    for _ in range(WAYS):
        connection.execute("TRUNCATE task_lock, task_lock_job, task_lock_run")
        rows = Rows(connection, travel, [f"replica {number}" for number in range(replicas)])
        world = World(tuple(Replica() for _ in range(replicas)), faults=2, user=2)
        while ways := list(rule.steps(world)):
            weights = [WEIGHTS.get(step.name, 2) for step, _ in ways]
            [(step, after)] = rng.choices(ways, weights)
            rows.do(step, world, after)
            rows.compare(after)
            done.add(step.name)
            world = after
    assert done >= {"claim, answer lost", "ask again", "arrives", "hand over", "take over", "pause"}
