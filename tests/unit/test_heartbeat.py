"""When claims are renewed, and which: on a clock that goes on only when a test says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from math import inf
from typing import Any
from uuid import UUID, uuid4

import pytest

from apscheduler_tasklock import HeldLock, TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock._database.rejections import RENEWALS, Rejections
from apscheduler_tasklock._database.requests import Outcome
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.heartbeat import LAST_RENEWAL, RETRY_INTERVAL, Heartbeat

ATTEMPT = 3.0
LEASE = 60.0
UNAVAILABLE = TaskLockDatabaseError("no route to host")
REJECTED = TaskLockError("permission denied")


class Renewing:
    """A heartbeat, and a database that renews what it is asked to."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self.rejections = Rejections(clock=lambda: clock[0])
        self.heartbeat = Heartbeat(self._renew, ATTEMPT, Timings(), self.rejections)
        self.renewed: list[list[str]] = []
        self.last: list[str] = []
        self.gone: set[str] = set()
        self.locked: set[str] = set()

    def go_on_until(self, when: float) -> None:
        self._clock[0] = max(self._clock[0], when)

    def hold(self, name: str, lease: float | None = LEASE, max_lock: float = 600.0) -> HeldLock:
        claimed = datetime.now(timezone.utc)
        held = HeldLock(
            name=name,
            token=1,
            claim_id=uuid4(),
            run_time=None,
            window_start=claimed,
            locked_until=claimed + timedelta(seconds=min(lease or max_lock, max_lock)),
            run_until=claimed + timedelta(seconds=max_lock),
            ends_at=time.monotonic() + max_lock,
            extender=lambda *_: False,
            lease=lease,
        )
        self.heartbeat.add(held)
        return held

    def _renew(
        self, _cursor: Any, held: Sequence[HeldLock], last: frozenset[UUID]
    ) -> dict[UUID, bool]:
        self.renewed.append([each.name for each in held])
        self.last += [each.name for each in held if each.claim_id in last]
        now = time.monotonic()
        for each in held:
            left = timedelta(seconds=each.seconds_left)
            until = each.run_until - left + timedelta(seconds=each.lease or 0.0)
            each.note_renewal(min(until, each.run_until), each.run_until, now + each.seconds_left)
        return {
            each.claim_id: each.name not in self.locked
            for each in held
            if each.name not in self.gone
        }

    def turn(self, error: Exception | None = None) -> None:
        """Go on until a renewal is due, and let it be sent."""
        self.go_on_until(self.heartbeat.due_at)
        request = self.heartbeat.request(time.monotonic())
        assert request is not None
        answer = None if error is not None else request.send(None)
        request.finish(Outcome(answer, error))


@pytest.fixture
def renewing(monkeypatch: pytest.MonkeyPatch) -> Renewing:
    clock = [1000.0]
    monkeypatch.setattr("apscheduler_tasklock._lock.heartbeat.time.monotonic", lambda: clock[0])
    return Renewing(clock)


def test_a_claim_is_renewed_after_a_third_of_its_lease_each_time(renewing: Renewing) -> None:
    renewing.hold("a")
    for number in range(1, 4):
        assert renewing.heartbeat.due_at == pytest.approx(1000.0 + number * LEASE / 3)
        renewing.turn()
    assert renewing.renewed == [["a"]] * 3


def test_what_is_nearly_due_is_renewed_with_it(renewing: Renewing) -> None:
    renewing.hold("a")
    renewing.go_on_until(1009.0)
    renewing.hold("b")
    renewing.go_on_until(1015.0)
    renewing.hold("c")
    renewing.turn()
    assert renewing.renewed == [["a", "b"]]


def test_a_renewal_goes_before_all_else_and_alone(renewing: Renewing) -> None:
    renewing.hold("a")
    renewing.go_on_until(renewing.heartbeat.due_at)
    request = renewing.heartbeat.request(time.monotonic())
    assert request is not None
    assert request.by == -inf
    assert request.goes_alone


def test_while_one_is_under_way_no_other_is_due(renewing: Renewing) -> None:
    renewing.hold("a")
    renewing.go_on_until(renewing.heartbeat.due_at)
    request = renewing.heartbeat.request(time.monotonic())
    renewing.hold("b", lease=1)
    assert request is not None
    assert renewing.heartbeat.due_at > request.over_at
    request.finish(Outcome(request.send(None)))
    assert renewing.heartbeat.due_at < inf


def test_one_that_is_lost_on_its_way_keeps_no_other_from_being_sent(renewing: Renewing) -> None:
    """As if the replica's thread failed before it sent it."""
    renewing.hold("a")
    renewing.go_on_until(renewing.heartbeat.due_at)
    assert renewing.heartbeat.request(time.monotonic()) is not None
    renewing.turn()
    assert renewing.renewed == [["a"]]
    assert time.monotonic() < 1000.0 + LEASE


@pytest.mark.parametrize("error", [UNAVAILABLE, REJECTED])
def test_one_that_fails_is_tried_again_soon(renewing: Renewing, error: TaskLockError) -> None:
    held = renewing.hold("a")
    for _ in range(3):
        renewing.turn(error)
        assert not held.lost
        assert 0 < renewing.heartbeat.due_at - time.monotonic() <= RETRY_INTERVAL * 1.2
    assert renewing.rejections.has(RENEWALS) is (error is REJECTED)
    renewing.turn()
    assert not renewing.rejections.has(RENEWALS)
    assert renewing.renewed == [["a"]]
    assert renewing.heartbeat.due_at == pytest.approx(time.monotonic() + LEASE / 3)


def test_it_is_tried_sooner_if_the_lease_is_short(renewing: Renewing) -> None:
    renewing.hold("a", lease=1)
    renewing.turn(UNAVAILABLE)
    assert 0 < renewing.heartbeat.due_at - time.monotonic() <= 0.12


def test_one_whose_row_is_locked_is_tried_again_soon_and_the_others_later(
    renewing: Renewing,
) -> None:
    held = renewing.hold("a")
    renewing.hold("b")
    renewing.locked = {"a"}
    renewing.turn()
    assert not held.lost
    renewing.turn()
    assert renewing.renewed == [["a", "b"], ["a"]]


def test_one_that_does_not_stand_is_lost_and_renewed_no_more(renewing: Renewing) -> None:
    lost, held = renewing.hold("a"), renewing.hold("b")
    renewing.gone = {"a"}
    renewing.turn()
    assert (lost.lost, held.lost) == (True, False)
    renewing.turn()
    assert renewing.renewed == [["a", "b"], ["b"]]


def test_what_is_released_while_its_renewal_waits_is_not_renewed(renewing: Renewing) -> None:
    held = renewing.hold("a")
    renewing.go_on_until(renewing.heartbeat.due_at)
    request = renewing.heartbeat.request(time.monotonic())
    assert request is not None
    renewing.heartbeat.remove(held)
    request.finish(Outcome(request.send(None)))
    assert renewing.renewed == []
    assert renewing.heartbeat.due_at == inf
    assert not held.lost


def test_with_the_last_claim_nothing_is_rejected_any_more(renewing: Renewing) -> None:
    held = renewing.hold("a")
    renewing.turn(REJECTED)
    renewing.heartbeat.remove(held)
    assert not renewing.rejections.any


def test_it_is_urgent_two_answers_before_the_first_lease_ends(renewing: Renewing) -> None:
    assert renewing.heartbeat.urgent_at == inf
    renewing.hold("without a lease", lease=None)
    assert renewing.heartbeat.urgent_at == inf
    renewing.hold("later", lease=2 * LEASE)
    renewing.hold("first")
    assert renewing.heartbeat.urgent_at == pytest.approx(1000.0 + LEASE - 2 * ATTEMPT)
    renewing.turn()
    assert renewing.heartbeat.urgent_at == pytest.approx(1020.0 + LEASE - 2 * ATTEMPT)


@pytest.mark.parametrize("lease", [None, LEASE])
def test_right_before_its_maximum_lock_ends_it_is_renewed_for_the_last_time(
    renewing: Renewing, lease: float | None
) -> None:
    held = renewing.hold("a", lease=lease, max_lock=50.0)
    while not renewing.last:
        renewing.turn()
    assert time.monotonic() == pytest.approx(1050.0 - LAST_RENEWAL)
    if lease is not None:
        assert not held.lost
        assert renewing.heartbeat.due_at == pytest.approx(1050.0)
        renewing.go_on_until(1050.0)
        assert renewing.heartbeat.request(time.monotonic()) is None
        assert held.lost
    assert renewing.heartbeat.due_at == inf
    assert renewing.last == ["a"]


def test_what_has_no_lease_is_not_renewed_after_closing(renewing: Renewing) -> None:
    held = [renewing.hold("a", lease=None), renewing.hold("b")]
    renewing.heartbeat.close({each.claim_id for each in held})
    renewing.turn()
    assert renewing.renewed == [["b"]]


def test_what_an_event_loop_held_that_was_closed_is_renewed_no_longer(
    renewing: Renewing, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.new_event_loop()
    renewing.hold("a").runs_on(loop)
    renewing.hold("b")
    loop.close()
    renewing.turn()
    assert renewing.renewed == [["b"]]
    assert "Task 'a': its event loop was closed while the task ran" in caplog.text
