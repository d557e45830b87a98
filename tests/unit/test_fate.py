"""What becomes of a run that is refused: kept until the run in its way has ended, or final.

The backlogs are enumerated: every order in which replicas ask and runs end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest

from apscheduler_tasklock._lock.messages import (
    ClaimAnswer,
    ClaimRequest,
    ManualRequest,
    ReadTimes,
    ReleaseRequest,
    RunEnd,
)
from apscheduler_tasklock.testing import rule
from apscheduler_tasklock.testing.rule import Fate, Row, fate_of

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
PERIOD = 100.0


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def request_of(run_time: float, number: int, **more: Any) -> ClaimRequest:
    """Return a claim of a job that comes every 100 s."""
    asked = {"min_lock": 0.9 * PERIOD, "max_lock": 5 * PERIOD, "runs": "f", **more}
    return ClaimRequest(
        "task", run_time=at(run_time), exact=True, claim_id=UUID(int=number), **asked
    )


def ask(
    row: Row | None,
    run_time: float,
    now: float,
    number: int = 2,
    *,
    stable: bool = True,
    **more: Any,
) -> tuple[Row | None, ClaimAnswer]:
    times = ReadTimes(now - run_time, stable=stable)
    decision = rule.claim(row, request_of(run_time, number, **more), times, "one", at(now))
    return decision.row, decision.answer


def finished(row: Row | None, now: float) -> Row:
    assert row is not None
    done = rule.release(row, ReleaseRequest("task", row.claim_id, RunEnd(outcome="ok")), at(now))
    assert done.row is not None
    return done.row


# What runs when another run time is refused: from when on, for which run time, and how.
RUNS = {"run_time": 0.0, "now": 0.0, "number": 1}
LATE = {"run_time": 0.0, "now": 250.0, "number": 1}
CASES = [
    pytest.param(LATE, {"run_time": 100.0, "now": 251.0}, Fate.BACKLOG, id="of a backlog"),
    pytest.param(LATE, {"run_time": 0.0, "now": 251.0}, Fate.TAKEN, id="the same run time"),
    pytest.param(RUNS, {"run_time": 0.0, "now": 1.0}, Fate.TAKEN, id="an ordinary loser"),
    pytest.param(RUNS, {"run_time": 100.0, "now": 100.0}, Fate.OVERLAPS, id="a run that lasts"),
    pytest.param(LATE, {"run_time": 300.0, "now": 300.0}, Fate.OVERLAPS, id="after a late one"),
    pytest.param(
        {**RUNS, "lease": 30.0, "failover": True},
        {"run_time": 100.0, "now": 100.0, "failover": True},
        Fate.AFTER_DEATH,
        id="after a dead run that is run again",
    ),
    pytest.param(
        {**RUNS, "lease": 30.0},
        {"run_time": 100.0, "now": 100.0, "stable": False},
        Fate.AFTER_DEATH,
        id="the rows are not believed",
    ),
    pytest.param(
        {**RUNS, "one_off": True, "failover": True},
        {"run_time": 0.0, "now": 1.0, "one_off": True, "failover": True},
        Fate.OWN_RUN,
        id="a one-off that runs with failover",
    ),
    pytest.param(
        {**RUNS, "one_off": True},
        {"run_time": 0.0, "now": 1.0, "one_off": True, "failover": True},
        Fate.TAKEN,
        id="a one-off that runs without",
    ),
    pytest.param(
        {**RUNS, "one_off": True, "failover": True},
        {"run_time": 5.0, "now": 5.0, "one_off": True, "failover": True, "runs": "f later"},
        Fate.TAKEN,
        id="a one-off of another date",
    ),
]


@pytest.mark.parametrize(("first", "second", "fate"), CASES)
def test_why_a_run_is_kept_or_not(
    first: dict[str, Any], second: dict[str, Any], fate: Fate
) -> None:
    row, answer = ask(None, **first)
    assert answer.granted
    after, answer = ask(row, **second)
    assert after is row
    assert fate_of(answer) is fate
    assert fate.is_kept is fate.value.startswith("kept")


def test_a_one_off_whose_run_has_ended_is_not_kept() -> None:
    one_off = {"one_off": True, "failover": True}
    row, _ = ask(None, 0.0, 0.0, 1, **one_off)
    _, answer = ask(finished(row, 1.0), 0.0, 2.0, **one_off)
    assert fate_of(answer) is Fate.TAKEN


def test_a_run_time_that_a_manual_run_is_in_the_way_of_follows_it() -> None:
    row, _ = ask(None, 0.0, 0.0, 1)
    row = rule.request_run(finished(row, 1.0), UUID(int=9), "me", 60.0, at(90.0))
    manual = ManualRequest("task", UUID(int=9), 500.0, runs="f", claim_id=UUID(int=8))
    row = rule.claim_manual(row, manual, "one", at(91.0), stable=True).row
    _, answer = ask(row, 100.0, 100.0)
    assert fate_of(answer) is Fate.AFTER_MANUAL
    _, answer = ask(row, 0.0, 100.0, 3)
    assert fate_of(answer) is Fate.TAKEN


def test_a_run_time_in_a_pause_and_one_that_has_moved_on_are_final() -> None:
    row, _ = ask(None, 0.0, 250.0, 1)
    assert row is not None
    _, answer = ask(rule.pause(row, None, at(251.0)), 100.0, 252.0)
    assert fate_of(answer) is Fate.PAUSED
    assert fate_of(answer._replace(withdrawn=True)) is Fate.WITHDRAWN


@dataclass(frozen=True)
class Fleet:
    """Replicas with the run times that each has yet to run, and the one that runs.

    :ivar left: by replica, in their order; a kept one stays at the head
    :ivar kept: whether the head waits for the end of the run in its way
    :ivar runs: the replica whose run goes on
    """

    row: Row | None
    left: tuple[tuple[float, ...], ...]
    kept: tuple[bool, ...]
    runs: int | None = None
    ran: tuple[float, ...] = ()

    @property
    def key(self) -> Any:
        """What its future depends on: not which claims there were, nor when."""
        window = None if self.row is None else self.row.window_start
        return window, self.left, self.kept, self.runs, self.ran

    def following(self, now: float, number: int) -> Iterator[Fleet]:
        """Yield what may come next: a replica asks, or the run that goes on ends."""
        if self.runs is not None:
            row = finished(self.row, now)
            yield replace(self, row=row, runs=None, kept=(False,) * len(self.kept))
        for replica, left in enumerate(self.left):
            if left and not self.kept[replica] and replica != self.runs:
                yield self._asked(replica, now, number)

    def _asked(self, replica: int, now: float, number: int) -> Fleet:
        run_time, *rest = self.left[replica]
        row, answer = ask(self.row, run_time, now, number)
        if answer.granted:
            left = self._with(replica, tuple(rest))
            return replace(self, row=row, left=left, runs=replica, ran=(*self.ran, run_time))
        if fate_of(answer).is_kept:
            kept = tuple(is_kept or n == replica for n, is_kept in enumerate(self.kept))
            return replace(self, kept=kept)
        return replace(self, left=self._with(replica, tuple(rest)))

    def _with(self, replica: int, left: tuple[float, ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(left if n == replica else each for n, each in enumerate(self.left))


def histories(backlogs: Sequence[Sequence[float]], begin: float) -> Iterator[tuple[float, ...]]:
    """Yield which run times ran, for every order in which replicas ask and runs end."""
    first = Fleet(None, tuple(map(tuple, backlogs)), (False,) * len(backlogs))
    waiting, seen = [(first, 0)], set()
    while waiting:
        fleet, steps = waiting.pop()
        if fleet.key in seen:
            continue
        seen.add(fleet.key)
        following = list(fleet.following(begin + steps / 1000, steps + 1))
        if not following:
            yield fleet.ran
        waiting += [(each, steps + 1) for each in following]


@pytest.mark.parametrize("windows", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_each_window_of_a_backlog_is_run_once_in_every_order(windows: int, replicas: int) -> None:
    """A run ends at any time: so lengths are the same or not."""
    backlog = [PERIOD * number for number in range(windows)]
    found = set(histories([backlog] * replicas, PERIOD * windows))
    assert found == {tuple(backlog)}


def test_what_some_replicas_never_had_is_run_once_or_was_overtaken_by_a_later_window() -> None:
    """As where one has joined later, or has coalesced: nothing is run twice, or out of order."""
    backlog = [PERIOD * number for number in range(4)]
    for parts in ([backlog, backlog[2:], backlog], [backlog, backlog[3:], backlog[1:3]]):
        for ran in histories(parts, 4 * PERIOD):
            assert list(ran) == sorted(set(ran))
            assert ran[-1] == backlog[-1]


@pytest.mark.parametrize("lasts", [(5,), (30,), (5, 30), (30, 5, 80), (5, 80, 45)])
def test_a_backlog_is_run_while_further_run_times_come(lasts: Sequence[int]) -> None:
    """Runs of these lengths, in turn; who asks first of three replicas takes turns as well.

    A run time that comes while a run goes on is that run's overlap, and no more than that is lost.
    """
    run_times = [PERIOD * number for number in range(8)]
    late = 3 * PERIOD  # so long nobody had a free worker
    left = [list(run_times) for _ in range(3)]
    row: Row | None = None
    ran: Counter[float] = Counter()
    went_on: list[tuple[float, float]] = []
    kept, number, now, ends = [False] * 3, 1, late, None
    while any(left) and now < 10 * PERIOD:
        if ends is not None and now >= ends:
            row, ends, kept = finished(row, now), None, [False] * 3
        for replica in (n % 3 for n in range(int(now), int(now) + 3)):
            while left[replica] and left[replica][0] <= now and not kept[replica]:
                number += 1
                row, answer = ask(row, left[replica][0], now, number)
                if answer.granted:
                    ran[left[replica][0]] += 1
                    ends = now + lasts[sum(ran.values()) % len(lasts)]
                    went_on.append((now, ends))
                kept[replica] = not answer.granted and fate_of(answer).is_kept
                if not kept[replica]:
                    left[replica].pop(0)
        now += 1.0
    overlapped = {time for time in run_times if any(begin <= time < end for begin, end in went_on)}
    assert set(ran.values()) == {1}
    assert set(run_times) - set(ran) <= overlapped
    assert set(run_times[:4]) <= set(ran)
