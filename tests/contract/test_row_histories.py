"""Random histories of requests, by the statements and by the rule: rows and answers are the same.

Those of ``test_claim_histories.py`` are about claims, at their limits. These are about the run
history as well, and about all else that is asked: registrations, due times, looks, pauses, manual
runs, retries, batches with a limit, leaders and signs of life. The rule decides on rows in memory.

What seldom comes by chance is drawn on purpose: see ``Requests.chosen``. Missed run times and
changed schedules are not asked about, because the rule has none in its run history:
``test_misses.py`` and ``test_changed_schedules.py`` are about them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import cycle
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from apscheduler_tasklock import Run
from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock._lock.statements import LEADER
from apscheduler_tasklock.errors import TaskLockStateError
from apscheduler_tasklock.schema.table import task_lock_table
from apscheduler_tasklock.testing import rule
from apscheduler_tasklock.testing.rule import Row
from tests.contract.signs_of_life import SIGNS, Fleet, Sign
from tests.support.waist import (
    HISTORY,
    IN_TIME,
    Claim,
    ClaimRequest,
    Claims,
    ClaimTimes,
    EndLease,
    Extend,
    GiveUp,
    Lead,
    Memory,
    PruneOneOffs,
    ReadTasks,
    Registration,
    Registrations,
    ReleaseRequest,
    Releases,
    RemoveReplicas,
    Renewal,
    Renewals,
    Replica,
    RerunRequest,
    Reruns,
    Resign,
    Retire,
    RunOutcome,
    Stop,
    WindowAfter,
    manual_run_of,
    retry_of,
    takeover_of,
)

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
    "retry: too late by a day",
    "retry: its run's release is sent again",
    "a run that was handed over is taken over",
    "a run that was handed over is given up",
    "extended after its last renewal",
    "manual run: has failed, and the task stays overdue",
    "a batch grants as many as its limit",
    "a batch that is sent again grants the rest",
    "a leader follows another one",
    "another one than the leader resigns",
    "a late sign of life after a stop",
    "a task of a stopped replica is retired",
    "a run has overrun",
    "a run has overrun, and was handed over",
    "a task was due in a pause",
    "a late release: ok",
    "a late release: error",
    "a late release: overtaken",
    "a late release: never began",
    "a late release of a run that was given up",
}
# What is drawn on purpose of late releases.
LATE_RELEASES = ("ended before", "ended after", "never began", "given up")
TASKS = ("first", "second", "third")
# What is drawn on purpose of manual runs.
MANUAL_RUNS = (
    "of an overdue task",
    "in a pause",
    "after a death",
    "without failover",
    "after the maximum lock",
    "taken over",
    "that fails",
    "beside a run",
)
REPLICAS = ("one", "two", "three")
LEADERS = LEADER + "shop:"
# Seconds between a failure and its retry, which is due after one second, and not for longer than a
# day.
ABOUT_A_DAY = (86_400.5, 86_401.0, 86_401.5, 300_000.0)
SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)

Ask = Callable[[Replica], Any]
# Requests that follow each other, each after so many seconds.
Steps = Iterator[tuple[float, Callable[[], Ask]]]

OPERATIONS = Operations(task_lock_table())


@dataclass
class Requests:
    """Makes requests at random, which refer to the claims before them."""

    rng: random.Random
    memory: Memory
    # Those that send statements.
    replicas: dict[str, Replica]
    claims: dict[str, list[UUID]] = field(default_factory=lambda: {task: [] for task in TASKS})
    fleet: Fleet = field(default_factory=Fleet)
    # The last releases, to send them again; and what requests came across, in a few words.
    released: list[ReleaseRequest] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    # What is asked next, and after how many seconds.
    following: list[tuple[float, Callable[[], Ask]]] = field(default_factory=list)
    turns: Iterator[Callable[[], Steps]] = field(init=False)

    def __post_init__(self) -> None:
        self.turns = cycle(self.kinds())

    def next(self) -> tuple[float, Ask]:
        """Return a request, and after how many seconds it comes."""
        if self.following:
            seconds, make = self.following.pop(0)
            return seconds, make()
        if self.chance(0.25):
            self.following = list(self.chosen())
        # Always later: what ends in the microsecond in which another ended is nobody's case.
        return self.rng.choice([0.001, 0.5, 1, 3, 9, 10, 30]), self.make()

    def chosen(self) -> Steps:
        """Return steps that seldom come by chance in this order: each kind in its turn."""
        return next(self.turns)()

    def kinds(self) -> list[Callable[[], Steps]]:
        """Return the kinds of steps that ``chosen`` goes through."""
        return [
            *[partial(self.manual_run, how) for how in MANUAL_RUNS],
            partial(self.failed_run, dies=True),
            partial(self.failed_run, dies=False),
            *[partial(self.overrun, what) for what in ("told", "extended", "unseen")],
            partial(self.handed_over, is_given_up=True),
            partial(self.handed_over, is_given_up=False),
            *[partial(self.late_release, how) for how in LATE_RELEASES],
            self.limited_batch,
            self.late_retry,
            self.removed_task,
            self.leadership,
        ]

    def failed_run(self, *, dies: bool) -> Steps:
        """Yield the steps of a run that fails and is retried, or whose retry becomes void."""
        task, choice, again = self.task(), self.rng.choice, partial(self.release_again, -1)
        yield 0.5, partial(self.resume, task)
        yield 0.5, partial(self.finish, task)
        yield 400.0, partial(self.claim_surely, task, is_to_die=self.chance(0.3), next_in=100.0)
        for retry_in in (None, None, 0.0):
            yield choice([0.5, 1.0]), partial(self.fail, task, retry_in=retry_in)
            if retry_in is None and self.chance(0.2):
                yield 0.5, partial(self.pause, task, choice([1.0, 5.0]))
            if self.chance(0.3):
                yield 0.5, again
            yield choice([0.5, 6.0]), partial(self.retry, task, is_to_die=dies)
            if self.chance(0.5):
                yield 0.5, again
        if dies:
            yield choice([3.5, 11.0]), partial(self.take_over, task)
        yield choice([9.0, 120.0]) if dies else 120.0, partial(self.finish, task)
        yield 400.0, partial(self.claim_surely, task, is_to_die=True, next_in=100.0)
        yield 1.0, partial(self.fail, task, retry_in=5.0)
        yield 2.0, partial(self.claim_surely, task, is_to_die=False)
        yield 0.5, again
        yield choice([1.0, 9.0]), partial(self.finish, task)

    def handed_over(self, *, is_given_up: bool) -> Steps:
        """Yield the steps of a run that a shutdown cuts."""
        task = self.task()
        cut = RunOutcome(WindowAfter.HAND_OVER, "cancelled", cut=True)
        yield 0.5, partial(self.resume, task)
        yield 0.5, partial(self.finish, task)
        yield 400.0, partial(self.claim_surely, task, is_to_die=True)
        yield 1.0, partial(self.end, task, cut)
        yield 1.0, partial(self.give_up if is_given_up else self.take_over, task)
        yield 1.0, partial(self.finish, task)

    def overrun(self, what: str) -> Steps:
        """Yield the steps of a run that lasts for longer than its maximum lock."""
        task = self.task()
        yield 0.5, partial(self.resume, task)
        yield 0.5, partial(self.finish, task)
        yield 400.0, partial(self.claim_surely, task, is_to_die=True)
        yield 2.0, partial(self.renew, is_last=True)
        if what == "extended":
            yield 0.5, partial(self.extend, task)
        if what == "told":
            yield 1.0, partial(self.overran, task)
        yield 400.0, partial(self.claim_surely, task, is_to_die=False)
        yield 1.0, partial(self.finish, task)

    def late_release(self, how: str) -> Steps:
        """Yield the steps of a run that is taken for dead, and whose replica lives."""
        task, kept = self.task(), list[ReleaseRequest]()
        follow = partial(self.claim_surely, is_to_die=self.chance(0.5))
        yield 0.5, partial(self.resume, task)
        yield 0.5, partial(self.finish, task)
        yield 400.0, partial(self.claim_surely, task, is_to_die=True)
        yield 1.0, partial(self.keep_release, task, how, kept)
        yield 400.0, partial(self.give_up if how == "given up" else follow, task)
        if self.chance(0.5):
            yield 5.0, partial(self.finish, task)
        if self.chance(0.5):
            yield 400.0, partial(follow, task)
        for _ in range(2):
            yield self.rng.choice([0.5, 10.0]), partial(self.release_late, how, kept)

    def late_retry(self) -> Steps:
        """Yield the steps of a retry that nobody begins for about a day."""
        task = self.task()
        yield 0.5, partial(self.resume, task)
        yield 0.5, partial(self.finish, task)
        yield 400.0, partial(self.claim_surely, task, is_to_die=False, is_the_last=True)
        yield 0.5, partial(self.fail, task, is_the_last=True)
        yield self.rng.choice(ABOUT_A_DAY), self.read
        yield 0.0, partial(self.retry, task)
        yield 1.0, partial(self.finish, task)

    def limited_batch(self) -> Steps:
        """Yield the steps of a batch of claims which all could be granted, with a limit."""
        for task in TASKS:
            yield 0.5, partial(self.resume, task)
            yield 0.5, partial(self.finish, task)
        requests = [self.sure_claim(task, is_to_die=False) for task in TASKS]
        self.rng.shuffle(requests)
        yield 400.0, partial(self.claim_batch, requests, ClaimTimes(), self.rng.choice([1, 2]))
        for _ in range(2):
            most = self.rng.choice([1, 2, 3])
            yield 0.5, partial(self.claim_batch, requests, ClaimTimes(), most, is_again=True)
        for task in TASKS:
            yield 0.5, partial(self.finish, task)

    def leadership(self) -> Steps:
        """Yield the steps of replicas that lead and resign, whoever leads."""
        for _ in range(3):
            yield 1.0, self.lead
            yield 1.0, self.resign
        yield self.rng.choice([1.0, 10.0]), self.lead

    def removed_task(self) -> Steps:
        """Yield the steps of a replica that stops, and whose successor has a task less."""
        yield 0.5, partial(self.resume, "third")
        yield 0.5, partial(self.finish, "third")
        yield 0.5, partial(self.register, ["third"])
        yield 0.5, partial(self.report, "one", list(TASKS), is_first=True)
        for name in ("two", "three"):
            yield 0.5, partial(self.report, name, ["first"])
        yield 0.5, partial(self.stop, "one")
        yield 0.5, partial(self.report, "one", list(TASKS), is_first=False)
        yield self.rng.choice([0.5, 90.0]), partial(self.retire, ["first"], [])

    def manual_run(self, how: str) -> Steps:
        """Yield the steps of a manual run, beside one of the schedule's."""
        # Only a live replica's task can be asked for.
        task, choice = self.rng.choice(TASKS[:2]), self.rng.choice
        is_overdue = how in ("of an overdue task", "that fails")
        changes: dict[str, Any] = {
            "without failover": {"failover": False},
            "beside a run": {"failover": False},
            "after the maximum lock": {"max_lock": 2.0},
        }.get(how, {})
        is_dead = how in ("in a pause", "after a death", "without failover", "beside a run")
        yield 0.5, partial(self.resume, task)
        yield 0.5, partial(self.finish, task)
        yield 400.0, partial(self.claim_surely, task, is_to_die=is_dead, **changes)
        if is_overdue or how == "taken over":
            yield choice([1.0, 9.0]), partial(self.finish, task)
            yield 200.0 if is_overdue else choice([1.0, 9.0, 200.0]), self.read
        yield 1.0, partial(self.request_run, task, 100.0)
        if how == "in a pause":
            yield 0.5, partial(self.pause, task, 60.0)
        by_how = {"beside a run": 1.0, "in a pause": 5.0, "without failover": 5.0}
        seconds = choice([0.5, 5.0, 30.0]) if is_overdue or how == "taken over" else 30.0
        yield by_how.get(how, seconds), partial(self.claim_manual, task, surely=True)
        if how == "taken over":
            yield 11.0, partial(self.take_over, task)
        outcome = {"of an overdue task": "ok", "that fails": "error"}.get(how)
        yield choice([1.0, 9.0, 30.0, 60.0]), partial(self.finish, task, outcome)

    def make(self) -> Ask:
        """Return a request at random; it is called with a replica."""
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
            *[self.release_again] * 2,
            self.end_lease,
            self.give_up,
            self.extend,
            self.renew,
            self.read,
            *[self.register] * 2,
            self.prune,
            *[self.lead] * 2,
            self.resign,
            *[self.report] * 2,
            self.stop,
            self.retire,
            self.remove_replicas,
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

    def last_claim_of(self, task: str) -> UUID:
        row = self.memory.locks.rows.get(task)
        return uuid4() if row is None else row.claim_id

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

    def times(self) -> ClaimTimes:
        latest = self.memory.time + timedelta(seconds=self.rng.choice([-3, 0, 3]))
        return ClaimTimes(
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
        return lambda replica: replica.ask(Claim(request, times))

    def claim_surely(
        self,
        task: str,
        *,
        is_to_die: bool,
        is_the_last: bool = False,
        **changes: Any,
    ) -> Ask:
        """Claim a run that is likely to be granted.

        :param changes: what differs from a claim that is drawn
        """
        request = replace(self.sure_claim(task, is_to_die=is_to_die), **changes)
        if is_the_last:  # so that no due time ends its retries
            request = replace(request, next_in=None, is_last=self.chance(0.5))
        return lambda replica: replica.ask(Claim(request, ClaimTimes()))

    def sure_claim(self, task: str, *, is_to_die: bool) -> ClaimRequest:
        """Return a claim that is likely to be granted, with a short lease."""
        return ClaimRequest(
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

    def claim_many(self) -> Ask:
        requests = [self.claim_request(task) for task in TASKS]
        self.rng.shuffle(requests)
        return self.claim_batch(requests, self.times(), self.rng.choice([None, None, 0, 1, 2]))

    def claim_batch(
        self,
        requests: list[ClaimRequest],
        times: ClaimTimes,
        most: int | None,
        *,
        is_again: bool = False,
    ) -> Ask:
        lags = [0.5 * place for place in range(len(requests))]

        def ask(replica: Replica) -> Any:
            known = replica.ask(Claims(requests, lags, times, most))
            new = [request for request in requests if request.claim_id not in known]
            granted = sum(answer.granted for answer in known.values())
            if most is not None and granted == most < len(requests):
                self.seen.add("a batch grants as many as its limit")
            if is_again and granted > 1:
                self.seen.add("a batch that is sent again grants the rest")
            first = Claims(new, [0.0] * len(new), times, most, are_first=True)
            return known, replica.ask(first)

        return ask

    def takeover_request(self, task: str) -> RerunRequest:
        dead, lease = self.claim_of(task), self.rng.choice([None, 1.0, 5.0])
        return takeover_of(task, dead, "", lease, self.chance(0.7), self.new_claim(task))

    def take_over(self, task: str | None = None) -> Ask:
        request, times = self.takeover_request(task or self.task()), self.takeover_times()
        if task is not None:
            request, times = replace(request, cause=self.last_claim_of(task)), IN_TIME
        return lambda replica: replica.rerun(request, times)

    def take_over_many(self) -> Ask:
        requests, times = [self.takeover_request(task) for task in TASKS], self.takeover_times()
        return lambda replica: replica.ask(Reruns(requests, times))

    def takeover_times(self) -> ClaimTimes:
        return ClaimTimes(stable=self.chance(0.8), not_after=self.not_after())

    def retry_request(self, task: str) -> RerunRequest:
        return retry_of(
            task,
            self.claim_of(task),
            self.rng.choice([2.0, 10.0, 300.0]),
            lease=self.rng.choice([None, 1.0, 3.0]),
            failover=self.chance(0.6),
            max_runtime=self.seconds(None),
            claim_id=self.new_claim(task),
        )

    def retry(self, task: str | None = None, *, is_to_die: bool = False) -> Ask:
        request, not_after = self.retry_request(task or self.task()), self.not_after()
        if task is not None:
            request, not_after = replace(request, cause=self.last_claim_of(task)), None
        if is_to_die:
            request = replace(request, max_lock=300.0, lease=3.0, failover=True)
        times = ClaimTimes(not_after=not_after)
        return lambda replica: replica.ask(Reruns([request], times))

    def claim_manual(self, task: str | None = None, *, surely: bool = False) -> Ask:
        task, stable = task or self.task(), self.chance(0.8)
        row = self.memory.locks.rows.get(task)
        asked_for = None if row is None else row.request_id
        request = manual_run_of(
            task,
            asked_for if asked_for and (surely or self.chance(0.9)) else uuid4(),
            self.rng.choice([2.0, 10.0, 50.0, 300.0]),
            lease=self.rng.choice([None, 1.0, 3.0, 10.0]),
            failover=self.chance(0.6),
            runs=self.rng.choice(["f", "f", "g"]),
            max_runtime=self.seconds(None),
            claim_id=self.claim_of(task) if self.chance(0.1) else self.new_claim(task),
        )
        if surely:
            request = replace(request, max_lock=300.0, lease=10.0, failover=True)
            stable = True
        times = ClaimTimes(stable=stable, not_after=None if surely else self.not_after())
        return lambda replica: replica.rerun(request, times)

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
        if window is WindowAfter.HAND_OVER:  # else the entry says another time if it is sent again
            ended_ago = self.rng.choice([0.25, 7.5])
        ended_at = ended_ago and self.memory.time - timedelta(seconds=ended_ago)
        return self.remembered(ReleaseRequest(task, self.claim_of(task), end, token, ended_at))

    def remembered(self, request: ReleaseRequest) -> ReleaseRequest:
        self.released = [*self.released[-5:], request]
        return request

    def keep_release(self, task: str, how: str, kept: list[ReleaseRequest]) -> Ask:
        """Keep the release of the last run, which does not arrive."""
        never_began = how == "never began"
        end = RunOutcome(
            WindowAfter.HAND_OVER if never_began else WindowAfter.KEEP,
            "" if never_began else self.rng.choice(["ok", "error"]),
            self.rng.choice([None, "Error"]),
            self.rng.choice([None, "why"]),
            retry_in=self.seconds(None),
        )
        row = self.memory.locks.rows.get(task)
        if row is not None:
            ended_at = None if how == "ended after" else self.memory.time
            kept.append(ReleaseRequest(task, row.claim_id, end, row.token, ended_at))
        return self.read()

    def release_late(self, how: str, kept: Sequence[ReleaseRequest]) -> Ask:
        if not kept:
            return self.read()
        [request], is_batch = kept, self.chance(0.5)

        def told() -> str:
            runs = self.memory.locks.runs(request.task_name)
            return next((run.outcome for run in runs if run.token == request.token), "no entry")

        def ask(replica: Replica) -> Any:
            before = told()
            answer = replica.released(request, together=is_batch)
            if before == "died" != told():
                self.seen.add(f"a late release: {how if how == 'never began' else told()}")
                if how == "given up":
                    self.seen.add("a late release of a run that was given up")
            return answer

        return ask

    def release_again(self, place: int | None = None) -> Ask:
        """Send a release again, as after an answer that was lost."""
        if not self.released:
            return self.read()
        request = self.rng.choice(self.released) if place is None else self.released[place]
        row = self.memory.locks.rows.get(request.task_name)
        if row is not None and row.retry_at is not None and row.retry_of is None:
            return self.read()  # the entry is written again, without a retry that is void now
        is_batch = self.chance(0.5)

        def ask(replica: Replica) -> Any:
            row = self.memory.locks.rows.get(request.task_name)
            if row is not None and row.claim_id != request.claim_id == row.retry_of:
                self.seen.add("retry: its run's release is sent again")
            return replica.released(request, together=is_batch)

        return ask

    def finish(self, task: str, outcome: str | None = None) -> Ask:
        """Release the last run, if there is one."""
        outcome = outcome or self.rng.choice(["ok", "ok", "error"])
        next_in, is_last = self.rng.choice([None, 10.0]), self.chance(0.3)
        return self.end(task, RunOutcome(outcome=outcome, next_in=next_in, is_last=is_last))

    def fail(self, task: str, *, is_the_last: bool = False, retry_in: float | None = None) -> Ask:
        """Release the last run as failed, if there is one, so that it is retried."""
        window = self.rng.choice([WindowAfter.KEEP, WindowAfter.OPEN])
        if retry_in is None:
            retry_in = 1.0 if is_the_last else self.rng.choice([0.0, 0.5, 1.0, 50.0])
        next_in = None if is_the_last else 10.0
        end = RunOutcome(window, "error", "Error", next_in=next_in, retry_in=retry_in)
        return self.end(task, end)

    def overran(self, task: str) -> Ask:
        """Hand the last run over, because it has lasted for longer than its maximum lock."""
        row = self.memory.locks.rows.get(task)
        is_again = row is not None and row.handed_over
        window = WindowAfter.KEEP if is_again else WindowAfter.HAND_OVER
        return self.end(task, RunOutcome(window, "overran"), self.memory.time)

    def end(self, task: str, end: RunOutcome, ended_at: datetime | None = None) -> Ask:
        request = ReleaseRequest(task, self.last_claim_of(task), end, ended_at=ended_at)
        self.remembered(request)
        return lambda replica: replica.ask(request)

    def release(self) -> Ask:
        request = self.release_request(self.task())
        return lambda replica: replica.ask(request)

    def release_many(self) -> Ask:
        requests = [self.release_request(task) for task in TASKS]
        return lambda replica: replica.ask(Releases(requests))

    def end_lease(self) -> Ask:
        task, holders = self.task(), self.rng.sample(REPLICAS, 2)
        claim_id = self.claim_of(task)
        return lambda replica: replica.ask(EndLease(task, claim_id, holders))

    def give_up(self, task: str | None = None) -> Ask:
        claim_id = self.last_claim_of(task) if task else self.claim_of(task := self.task())
        return lambda replica: replica.ask(GiveUp(task, claim_id))

    def extend(self, task: str | None = None) -> Ask:
        claim_id = self.last_claim_of(task) if task else self.claim_of(task := self.task())
        by, lease = self.seconds(), self.rng.choice([None, 1.0, 5.0])
        return lambda replica: replica.ask(Extend(task, claim_id, by, lease))

    def renew(self, *, is_last: bool = False) -> Ask:
        renewals = [
            Renewal(task, self.claim_of(task), self.seconds(), is_last or self.chance(0.3))
            for task in TASKS
        ]
        return lambda replica: replica.ask(Renewals(renewals))

    def read(self) -> Ask:
        always = self.rng.choice([(), TASKS])

        def ask(replica: Replica) -> Any:
            states, now = replica.ask(ReadTasks(TASKS, always))
            return {state.task_name: state for state in states}, now

        return ask

    def register(self, names: Sequence[str] = ()) -> Ask:
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
                token=self.token_before_registering(task),
            )
            for task in names or self.rng.sample(TASKS, self.rng.randint(1, 2))
        ]
        return lambda replica: replica.ask(Registrations(tasks))

    def token_before_registering(self, task: str) -> int | None:
        """Return the token that was read before a registration: the row's, or an older one."""
        row = self.memory.locks.rows.get(task)
        return self.rng.choice([None, 0, *([] if row is None else [row.token, row.token - 1])])

    def prune(self) -> Ask:
        age = self.seconds(100.0)
        return lambda replica: replica.ask(PruneOneOffs(age))

    # Who leads, and who is alive.

    def lead(self) -> Ask:
        lease = self.rng.choice([3.0, 10.0, 30.0])

        def ask(replica: Replica) -> Any:
            before = self.memory.locks.rows.get(LEADERS)
            leads = replica.ask(Lead(LEADERS, replica.name, lease))
            if before is not None and leads and before.locked_by != replica.name:
                self.seen.add("a leader follows another one")
            return leads

        return ask

    def resign(self) -> Ask:
        def ask(replica: Replica) -> None:
            row = self.memory.locks.rows.get(LEADERS)
            if row is not None and not row.finished and row.locked_by != replica.name:
                self.seen.add("another one than the leader resigns")
            replica.ask(Resign(LEADERS, replica.name))

        return ask

    def report(
        self, name: str | None = None, tasks: list[str] | None = None, is_first: bool | None = None
    ) -> Ask:
        """Report a sign of life, with the start that the first one of the process was told."""
        if tasks is None:
            tasks = self.rng.sample(TASKS, self.rng.randint(0, 3))
        known = self.fleet.signs.get(name := name or self.rng.choice(REPLICAS))
        is_first = self.chance(0.3) if is_first is None else is_first
        started_at = None if is_first or known is None else known.started_at
        if known is not None and known.stopped_at is not None and not is_first:
            self.seen.add("a late sign of life after a stop")
        return self.in_the_fleet(
            name,
            lambda replica: replica.alive(tasks, started_at),
            lambda now: self.fleet.report(name, tasks, started_at, now),
        )

    def stop(self, name: str | None = None) -> Ask:
        name = name or self.rng.choice(REPLICAS)
        return self.in_the_fleet(
            name, lambda replica: replica.ask(Stop()), lambda now: self.fleet.stop(name, now)
        )

    def remove_replicas(self) -> Ask:
        age = self.seconds(100.0)
        return self.in_the_fleet(
            "one",
            lambda replica: replica.ask(RemoveReplicas(age)),
            lambda now: self.fleet.remove(age, now),
        )

    def in_the_fleet(
        self,
        name: str,
        by_statement: Callable[[Replica], object],
        by_rule: Callable[[datetime], object],
    ) -> Ask:
        def ask(replica: Replica) -> Any:
            if isinstance(replica.connection, Memory):
                answer = by_rule(self.memory.time)
            else:
                answer = by_statement(self.replicas[name])
            # Of how many rows were changed, the rule of the replicas says nothing.
            return None if isinstance(answer, int) else answer

        return ask

    def retire(
        self, successor_of: list[str] | None = None, dropped: list[str] | None = None
    ) -> Ask:
        if successor_of is None or dropped is None:
            successor_of, dropped = self.rng.sample(TASKS, 1), self.rng.sample(TASKS, 1)

        def ask(replica: Replica) -> None:
            if not isinstance(replica.connection, Memory):
                replica.ask(Retire(successor_of, dropped))
                return
            rows, now = self.memory.locks.rows, self.memory.time
            for task in self.fleet.retired(successor_of, dropped, now) & rows.keys():
                if rows[task].due_at is not None and rule.retire(rows[task]).due_at is None:
                    self.seen.add("a task of a stopped replica is retired")
                rows[task] = rule.retire(rows[task])

        return ask

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
            lambda row, now: (
                rule.request_run(row, request_id, "me", seconds, now)
                if self.fleet.has(task, now)
                else row
            ),
        )

    def operate(
        self,
        task: str,
        by_statement: Callable[[Any], object],
        by_rule: Callable[[Row, datetime], Row],
    ) -> Ask:
        rows = self.memory.locks.rows

        def ask(replica: Replica) -> None:
            if task not in rows:
                return
            if isinstance(replica.connection, Memory):
                rows[task] = by_rule(rows[task], self.memory.time)
            else:
                by_statement(replica.cursor)

        return ask


ROW = f"SELECT {', '.join(each.name for each in fields(Row))} FROM task_lock"
ENTRY = f"""
    SELECT {", ".join(each.name for each in fields(Run))}
    FROM (SELECT *, task_name AS task FROM task_lock_run) AS run WHERE kind <> 'operator'
"""


def all_of(connection: Any, query: str) -> list[dict[str, Any]]:
    found = connection.cursor(row_factory=psycopg.rows.dict_row).execute(query)
    return list(found.fetchall())


def columns_of(rows: dict[str, Row]) -> dict[str, dict[str, Any]]:
    return {task: vars(row) for task, row in rows.items()}


def in_order(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # A run that was handed over, and released all the same, has two.
    return sorted(
        entries,
        key=lambda entry: (entry["task"], entry["token"], entry["ended_at"], entry["outcome"]),
    )


@pytest.mark.timeout(600)  # on a busy machine
@pytest.mark.parametrize("history", [3, pytest.param(HISTORY, marks=pytest.mark.nightly)])
def test_the_rule_decides_as_the_statements_do(
    history: int, direct_url: str, rng: random.Random
) -> None:
    memory = Memory()
    memory.locks.history = history
    in_memory = {name: Replica(name, memory) for name in REPLICAS}
    with psycopg.connect(direct_url, autocommit=True) as connection:
        replicas = {name: Replica(name, connection, history=history) for name in REPLICAS}
        requests = Requests(rng, memory, replicas)
        seen = requests.seen
        connection.execute("SET timezone = 'UTC'")
        connection.execute(
            "INSERT INTO task_lock_replica VALUES ('all', 'host', '1.0', now(), '2100-01-01', %s)",
            [list(TASKS[:2])],
        )
        for sign in all_of(connection, SIGNS):
            requests.fleet.signs[sign["replica_id"]] = Sign(**sign)
        for step in range(MOST_STEPS):
            seconds, ask = requests.next()
            memory.time += timedelta(seconds=seconds)
            connection.execute("UPDATE travel.clock SET time = %s", [memory.time])
            name = rng.choice(REPLICAS)

            before = dict(memory.locks.rows)
            expected, answer = ask(replicas[name]), ask(in_memory[name])

            where = f"step {step}: {ask.__qualname__}"
            assert answer == expected, where
            rows = {row["task_name"]: Row(**row) for row in all_of(connection, ROW)}
            for task, row in memory.locks.rows.items():
                # Of what nobody has claimed: a task that was registered, and a leader's row.
                if not row.locked_by or task == LEADERS:
                    memory.locks.rows[task] = replace(row, claim_id=rows[task].claim_id)
            assert columns_of(memory.locks.rows) == columns_of(rows), where
            kept = [vars(run) for each in rows for run in memory.locks.runs(each)]
            assert in_order(kept) == in_order(all_of(connection, ENTRY)), where
            assert requests.fleet.columns == all_of(connection, SIGNS), where

            for task, row in before.items():
                if task in rows and task != LEADERS:
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
    yield from of_holder(before, after, now)
    if before.kind == "manual" and after.finished and not before.finished:
        if after.due_at == before.due_at:
            yield "manual run: the due time stays"
            if before.overdue_at and before.overdue_at <= before.started_at:
                yield "manual run: has failed, and the task stays overdue"
        elif after.due_at == now:
            yield "manual run: a run time follows it"
        else:
            yield "manual run: makes up for an overdue run time"


def of_holder(before: Row, after: Row, now: datetime) -> Iterator[str]:
    """Yield what a step came across of a run that was handed over, or lasts for too long."""
    if after.handovers > before.handovers:
        yield "a run that was handed over is taken over"
    is_same = before.claim_id == after.claim_id
    if is_same and before.handed_over and after.finished and after.locked_until == now:
        yield "a run that was handed over is given up"
    if is_same and before.overran and not after.overran and after.stands(now):
        yield "extended after its last renewal"


def retries(before: Row, after: Row, now: datetime) -> Iterator[str]:
    """Yield what a step came across of retries."""
    is_new = after.claim_id != before.claim_id
    if (
        before.retry_of == before.claim_id
        and before.due_at is None
        and not before.is_retry_pending(now)
    ):
        yield "retry: too late by a day"
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
