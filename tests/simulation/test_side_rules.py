"""The rules of the database's side, one by one: renewals, answers, releases, the grace, stops.

`test_side_faults.py` looks for what goes wrong in the end. Here are the rules that another rule may
cover up there, and the numbers that nobody would miss in a scenario.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from math import inf
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock._runs.known_tasks import KnownTasks
from apscheduler_tasklock._runs.presence import Presence
from apscheduler_tasklock._shutdown import Shutdown
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockRefusedError,
)
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.locks import Hold
from tests.simulation.faults import Place
from tests.simulation.stage import LEASE, Call, Stage, claim_of, slow, then
from tests.simulation.world import BEGIN, START
from tests.support.waist import (
    ClaimOutcome,
    ClaimRequest,
    Extend,
    LockClient,
    Refusal,
    Registration,
    RowLockedError,
    Stop,
    rule,
    send_registrations,
    takeover_of,
)

pytestmark = pytest.mark.usefixtures("simulation")

ENDED_WELL = RunOutcome(WindowAfter.KEEP, "ok")
HANDED_OVER = RunOutcome(WindowAfter.HAND_OVER)
# The limit of the wait for an answer, and the grace of a small fleet.
ATTEMPT = 3.3
GRACE = ATTEMPT + 2.5
IDLE_TOO_LONG = psycopg.errors.IdleSessionTimeout.sqlstate
SHUT_DOWN = psycopg.errors.AdminShutdown.sqlstate


@pytest.fixture
def stage(simulation: None) -> Iterator[Stage]:
    """A world without replicas."""
    made = Stage()
    yield made
    made.close()


def ask(stage: Stage, client: LockClient) -> Call:
    """Send a statement that changes nothing."""
    return stage.call(client, lambda: client.ask(client.reading(["none"])))


def grown_up(stage: Stage, name: str = "A") -> LockClient:
    """Return the client of a replica whose start was so long ago that it believes the rows."""
    client = stage.replica(name)
    ask(stage, client)
    stage.go_on(GRACE + 1)
    assert client.stable
    return client


def enter_hold(stage: Stage, client: LockClient, wait: float = 0.0) -> Call:
    """Enter a hold.

    :param wait: how long it waits while the task runs
    """

    def request() -> ClaimRequest:
        return claim_of("t", runs="", run_time=None, exact=False, claim_id=uuid4())

    return stage.call(client, Hold(lambda: client, "t", request, wait).__enter__)


def fail_in_the_thread(place: Place) -> Any:
    """Carry a statement out, and let a mistake of the library follow."""
    place.send()
    raise SystemExit("a mistake in the library")


def hang_until_its_limit(place: Place) -> Any:
    """Give no answer until the limit of the wait, which a stop brings nearer."""
    wire = place.process.connection.wire
    while place.at + place.limit > place.world.now - BEGIN and wire.limit() > 0:
        place.world.sleep(0.1)
    place.limit = 0.0
    place.answer_in(inf)


def answer_late(place: Place) -> Any:
    """Answer after 2.5 s, if the wait has not ended by then."""
    wire = place.process.connection.wire
    while place.world.now - BEGIN < place.at + 2.5:
        if wire.limit() <= 0:
            place.limit = 0.0
            place.answer_in(inf)
        place.world.sleep(0.1)
    return place.send()


def reject_what_is_bad(place: Place) -> Any:
    """Reject a statement about a task of this name."""
    if "bad" in place.what:
        raise psycopg.errors.CheckViolation("no such task")
    return place.send()


def stand_still_and_find_the_row_locked(place: Place) -> Any:
    place.pause(15.0)
    raise psycopg.errors.LockNotAvailable("the row is locked")


def full(_place: Place) -> Any:
    raise psycopg.errors.TooManyConnections("sorry, too many clients already")


class TestRenewals:
    def test_a_claim_is_renewed_after_each_third_of_its_lease(self, stage: Stage) -> None:
        stage.claim(stage.replica())
        stage.go_to(21)
        assert stage.sent("renew t") == pytest.approx([5, 10, 15, 20], abs=0.1)

    def test_a_lease_counts_from_what_is_left_of_it_when_its_answer_comes(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        stage.faults.plan("claim t", slow(3.2), times=1)
        call = stage.call(client, client.claim, claim_of("t", lease=4.0))
        stage.go_to(6)
        assert stage.sent("renew t")[0] == pytest.approx(3.2 + 0.8 / 3, abs=0.02)
        assert not call.held.lost

    def test_claims_that_are_nearly_due_are_renewed_in_the_same_statement(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        stage.claim(client, "first")
        stage.go_to(2.4)
        stage.claim(client, "second")
        stage.go_to(2.6)
        stage.claim(client, "third")
        stage.go_to(7)
        assert [each for each in stage.statements() if "renew" in each] == ["renew first, second"]

    @pytest.mark.parametrize(("lease", "soon"), [(15.0, 0.5), (60.0, 0.5), (3.0, 0.3)])
    def test_a_renewal_that_failed_is_sent_again_soon(
        self, stage: Stage, lease: float, soon: float
    ) -> None:
        stage.claim(stage.replica(), lease=lease)
        stage.faults.plan("renew t", "lost before", times=1)
        stage.go_to(lease / 3 + 1)
        first, second = stage.sent("renew t")[:2]
        assert soon * 0.75 < second - first < soon * 1.25

    def test_a_claim_without_a_lease_is_renewed_once_right_before_its_maximum_lock_ends(
        self, stage: Stage
    ) -> None:
        held = stage.claim(stage.replica(), lease=None, max_lock=100.0)
        stage.go_to(99.5)
        assert stage.sent("renew t") == pytest.approx([99], abs=0.1)
        assert stage.row().overran
        assert not held.lost
        stage.go_to(102)
        assert held.lost
        assert len(stage.sent("renew t")) == 1

    def test_the_last_renewal_tells_an_overrun_from_a_death(self, stage: Stage) -> None:
        client, other = stage.replica(), grown_up(stage, "B")
        held = stage.claim(client, max_lock=20.0)
        stage.go_on(18.5)
        assert not stage.row().overran
        stage.go_on(0.7)
        assert stage.row().overran
        assert not held.lost
        stage.go_on(1)
        assert held.lost
        stage.go_on(10)
        state = stage.look(other)
        assert state is not None
        assert state.dead
        assert stage.row().overran

    def test_the_last_renewal_of_a_short_maximum_lock_is_after_four_fifths_of_it(
        self, stage: Stage
    ) -> None:
        stage.claim(stage.replica(), lease=None, max_lock=2.0)
        stage.go_to(3)
        assert stage.sent("renew t") == pytest.approx([1.6], abs=0.05)

    def test_a_lock_that_was_extended_before_its_last_renewal_is_renewed_at_once(
        self, stage: Stage
    ) -> None:
        """A worker process extends locks on a connection of its own."""
        client = stage.replica()
        held = stage.claim(client, max_lock=20.0)

        def extend() -> None:
            stage.change(client, Extend("t", held.claim_id, 100.0, LEASE))

        stage.faults.plan("renew t", then(extend), since=18.5, times=1)
        stage.go_to(19.5)
        assert not stage.row().overran
        assert not held.lost
        assert held.seconds_left > 90

    @pytest.mark.parametrize("fault", [None, "lost before", "hung"])
    def test_a_lock_is_lost_at_the_end_of_its_maximum_lock_whatever_the_database_answers(
        self, stage: Stage, fault: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("apscheduler_tasklock.lock.call_application", lambda told: told())
        held = stage.claim(stage.replica(), max_lock=20.0)
        told: list[float] = []
        held.on_lost(lambda: told.append(stage.now))
        if fault is not None:
            stage.faults.plan("renew t", fault, since=4.0)
        stage.go_to(19.9)
        assert told == []
        stage.go_to(30)
        assert told == [pytest.approx(20.0, abs=0.5)]

    def test_a_lost_lock_is_told_at_the_next_renewal_and_renewed_no_more(
        self, stage: Stage
    ) -> None:
        held, kept = (stage.claim(client := stage.replica()), stage.claim(client, "kept"))
        stage.database.rows.forget("t")
        stage.go_to(5.3)
        assert (held.lost, kept.lost) == (True, False)
        stage.go_to(20)
        renewals = [each for each in stage.statements(6.0) if "renew" in each]
        assert renewals
        assert set(renewals) == {"renew kept"}

    def test_a_claim_whose_event_loop_was_closed_is_not_renewed(self, stage: Stage) -> None:
        held = stage.claim(stage.replica())
        held.runs_on(SimpleNamespace(is_closed=lambda: True))  # type: ignore[arg-type]  # a stand-in
        stage.go_to(20)
        assert stage.sent("renew") == []

    def test_a_renewal_goes_before_all_that_waits(self, stage: Stage) -> None:
        client = stage.replica()
        held = stage.claim(client)
        stage.faults.plan("read", slow(1.0), since=4.0)
        stage.go_to(4.5)
        for _ in range(20):
            ask(stage, client)
        stage.go_to(20)
        assert stage.sent("renew t")[0] < 6.2
        assert not held.lost

    def test_no_answer_is_waited_for_beyond_the_time_of_an_urgent_renewal(
        self, stage: Stage
    ) -> None:
        client = grown_up(stage)
        begun = stage.now
        stage.claim(client, lease=7.0, run_time=None, exact=False)
        stage.faults.plan("read", "hung", times=1)
        stage.go_to(begun + 2.0)
        call = ask(stage, client)
        stage.go_to(begun + 2.29)
        assert call.error is None
        stage.go_to(begun + 2.4)
        assert isinstance(call.error, TaskLockDatabaseError)
        assert stage.sent("renew t") == pytest.approx([begun + 7 / 3], abs=0.1)
        assert client.stable  # because so short a wait tells nothing of an outage

    def test_renewals_go_on_after_an_error_of_the_thread(self, stage: Stage) -> None:
        held = stage.claim(stage.replica())
        stage.faults.plan("renew t", fail_in_the_thread, times=1)
        stage.go_to(20)
        assert stage.sent("renew t")[:2] == pytest.approx([5.0, 5.6], abs=0.3)
        assert not held.lost

    def test_a_renewal_that_the_database_rejects_is_told_to_operators_until_one_succeeds(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        held = stage.claim(client)
        stage.faults.plan("renew t", "rejected", until=6.0)
        stage.go_to(5.5)
        [told] = client.rejections.reported()
        assert told.startswith("renewals: ")
        stage.go_to(7)
        assert client.rejections.reported() == ()
        assert not held.lost

    def test_renewals_go_on_after_claiming_is_stopped(self, stage: Stage) -> None:
        client = stage.replica()
        held = stage.claim(client)
        client.stop_claiming()
        stage.go_to(60)
        assert len(stage.sent("renew t")) == 11
        assert not held.lost

    def test_after_closing_a_claim_without_a_lease_is_not_renewed_and_one_with_a_lease_is(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        stage.claim(client, lease=None, max_lock=30.0)
        stage.claim(client, "leased")
        stage.call(client, lambda: client.close(blocking=True))
        stage.go_to(31)
        assert set(stage.statements(1.0)) == {"renew leased"}


class TestExtensions:
    def test_a_lock_is_extended_after_a_stop_also_if_the_database_answers_late(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        held = stage.claim(client, max_lock=30.0)
        client.stop_claiming()
        stage.go_to(10)
        stage.faults.plan("extend", slow(2.0), times=1)
        call = stage.call(client, held.extend, 100.0)
        stage.go_to(13)
        assert call.error is None
        assert held.seconds_left == pytest.approx(130 - 13, abs=0.1)

    def test_an_extension_is_tried_again_after_a_stop_too(self, stage: Stage) -> None:
        client = stage.replica()
        held = stage.claim(client, max_lock=30.0)
        client.stop_claiming()
        stage.faults.plan("extend", "lost before", times=2)
        call = stage.call(client, held.extend, 100.0)
        stage.go_on(1)
        assert call.error is None
        assert held.seconds_left == pytest.approx(130 - stage.now, abs=0.1)

    def test_an_extension_is_tried_for_two_seconds(self, stage: Stage) -> None:
        client = stage.replica()
        held = stage.claim(client, max_lock=30.0)
        stage.faults.plan("extend", "lost before", times=3)
        call = stage.call(client, held.extend, 100.0)
        stage.go_on(1)
        assert call.error is None
        stage.faults.plan("extend", "lost before")
        call = stage.call(client, held.extend, 100.0)
        begun = stage.now
        stage.go_on(5)
        assert isinstance(call.error, TaskLockDatabaseError)
        assert 0.8 < call.ended - begun <= 2.1
        assert not held.lost

    def test_an_extension_says_if_the_row_stays_locked(self, stage: Stage) -> None:
        client = stage.replica()
        held = stage.claim(client)
        until = held.run_until
        stage.faults.plan("extend", "locked")
        call = stage.call(client, held.extend, 100.0)
        stage.go_on(5)
        assert isinstance(call.error, TaskLockDatabaseError)
        assert "the row is locked" in str(call.error)
        assert held.run_until == until
        assert not held.lost

    def test_a_lock_that_was_freed_is_lost_and_not_extended(self, stage: Stage) -> None:
        client = stage.replica()
        held = stage.claim(client)
        stage.database.rows.forget("t")
        call = stage.call(client, held.extend, 100.0)
        stage.go_on(1)
        assert isinstance(call.error, TaskLockError)
        assert held.lost


class TestAnswers:
    @pytest.mark.parametrize(
        ("timeout", "answer"), [(10.0, 3.3), (60.0, 3.3), (6.0, 2.0), (1.5, 1.0)]
    )
    def test_an_answer_is_waited_for_a_third_of_the_claim_timeout_within_limits(
        self, stage: Stage, timeout: float, answer: float
    ) -> None:
        client = stage.replica(claim_timeout=timeout)
        stage.faults.plan("claim t", "no answer", times=1)
        call = stage.call(client, client.claim, claim_of("t"))
        stage.go_on(5)
        first, second = stage.sent("claim t")
        assert second - first == pytest.approx(answer + 0.05, abs=0.02)
        assert isinstance(call.result, HeldLock)

    def test_a_claim_is_tried_for_the_claim_timeout(self, stage: Stage) -> None:
        client = stage.replica()
        stage.faults.plan("claim t", "lost before")
        call = stage.call(client, client.claim, claim_of("t"))
        stage.go_on(20)
        assert isinstance(call.error, TaskLockDatabaseError)
        assert 8.5 < call.ended <= 10.1

    def test_the_pauses_between_the_tries_grow_to_a_second(self, stage: Stage) -> None:
        client = stage.replica()
        stage.faults.plan("claim t", "lost before")
        stage.call(client, client.claim, claim_of("t"))
        stage.go_on(20)
        sent = stage.sent("claim t")
        pauses = [later - earlier for earlier, later in pairwise(sent)]
        expected = [0.05, 0.1, 0.25, 0.5, 1.0, 1.0, 1.0]
        assert pauses[:7] == pytest.approx(expected, rel=0.25)
        assert len({round(pause, 3) for pause in pauses[4:]}) > 1  # they are jittered

    def test_while_a_row_is_locked_a_claim_is_tried_soon_again(self, stage: Stage) -> None:
        client = stage.replica()
        stage.faults.plan("claim t", "locked", times=7)
        stage.call(client, client.claim, claim_of("t"))
        stage.go_on(5)
        sent = stage.sent("claim t")
        pauses = [later - earlier for earlier, later in pairwise(sent)]
        expected = [0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25]
        assert pauses == pytest.approx(expected, rel=0.25, abs=0.003)
        assert client.outage.reason is None

    def test_a_row_that_stays_locked_is_an_error_after_the_claim_timeout_and_no_outage(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        stage.faults.plan("claim t", "locked")
        call = stage.call(client, client.claim, claim_of("t"))
        stage.go_on(20)
        assert isinstance(call.error, RowLockedError)
        assert 8.5 < call.ended <= 10.1
        assert client.outage.reason is None

    @pytest.mark.parametrize(
        ("wanted", "then"),
        [
            ({}, "open"),
            ({"keep_window_if_in_doubt": True}, "taken"),
            ({"runs": "app:job"}, "handed over"),
        ],
    )
    def test_a_claim_that_was_given_up_but_granted_is_ended_and_its_window_as_asked_for(
        self, stage: Stage, wanted: dict[str, Any], then: str
    ) -> None:
        """The window of a job that then runs nowhere is handed over."""
        client, other = grown_up(stage), grown_up(stage, "B")
        stage.faults.plan("claim t", "lost after", until=stage.now + 15)
        asked = claim_of("t", **{"min_lock": 900.0, "runs": None, **wanted})
        call = stage.call(client, client.claim, asked)
        stage.go_on(20)
        assert isinstance(call.error, TaskLockDatabaseError)
        assert len(stage.sent("claim t")) > 2
        row = stage.row()
        assert row.finished == (then != "handed over")
        assert row.handed_over == (then == "handed over")
        claimed = stage.call(other, other.claim, claim_of("t", min_lock=900.0))
        stage.go_on(1)
        assert isinstance(claimed.result, HeldLock if then == "open" else Refusal)

    def test_a_grant_is_not_forgotten_if_the_statement_after_it_fails(self, stage: Stage) -> None:
        """Tasks without a row take a second statement, and the first one is committed by then."""
        client = stage.replica()
        before = stage.claim(client, "known", run_time=START - timedelta(hours=1))
        stage.release(client, before, ENDED_WELL)
        stage.faults.plan("read", slow(1.0), times=1)
        ask(stage, client)
        stage.faults.plan("first_claim_many", "locked")
        stage.faults.plan("claim new", "locked")
        known, new = (stage.call(client, client.claim, claim_of(each)) for each in ("known", "new"))
        stage.go_on(20)
        assert stage.statements(0.9)[:2] == ["claim_many known, new", "first_claim_many new"]
        assert stage.row("known").token == known.held.token
        assert isinstance(new.error, RowLockedError)

    def test_after_a_stop_a_claim_that_fails_is_not_tried_again(self, stage: Stage) -> None:
        client = stage.replica()
        stage.faults.plan("claim t", "lost before")
        call = stage.call(client, client.claim, claim_of("t"))
        stage.go_to(4)
        client.stop_claiming()
        stage.go_to(6)
        assert isinstance(call.error, TaskLockDatabaseError)
        assert call.ended <= 4.1
        with pytest.raises(TaskLockError, match="these locks are closed"):
            client.claim(claim_of("t"))

    def test_an_answer_that_is_waited_for_at_a_stop_has_a_second_and_a_half(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        stage.faults.plan("claim t", "hung")
        call = stage.call(client, client.claim, claim_of("t"))
        stage.go_to(0.2)
        client.stop_claiming()
        stage.go_to(6)
        assert isinstance(call.error, TaskLockDatabaseError)
        assert 1.7 <= call.ended <= 2.6  # it looks every half second whether its time is over
        assert len(stage.sent("claim t")) == 1

    def test_a_claim_that_is_granted_when_claiming_was_stopped_is_handed_over(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        stage.faults.plan("claim t", slow(0.8))
        call = stage.call(client, client.claim, claim_of("t"))
        stage.go_to(0.5)
        client.stop_claiming()
        stage.go_to(2)
        assert isinstance(call.error, TaskLockError)
        assert "closed" in str(call.error)
        assert stage.row().handed_over

    @pytest.mark.parametrize(
        ("runs", "is_handed_over"), [("job of t", True), ("", False)], ids=["job", "hold"]
    )
    def test_a_grant_whose_answer_comes_after_its_lease_is_undone(
        self, stage: Stage, runs: str, is_handed_over: bool
    ) -> None:
        """A hold is granted anew. A job's window is taken over, here or elsewhere."""
        client = stage.replica()
        stage.faults.plan("claim t", slow(3.0), times=1)
        rows: list[Any] = []
        stage.faults.plan("claim t", then(lambda: rows.append(stage.row())), times=1)
        call = stage.call(
            client, client.claim, claim_of("t", lease=2.0, runs=runs, run_time=None, exact=False)
        )
        stage.go_to(6)
        [undone] = rows
        assert undone.handed_over is is_handed_over
        assert (undone.finished_at is None) is is_handed_over
        assert isinstance(call.result, HeldLock) is not is_handed_over

    def test_an_error_of_the_thread_fails_what_is_under_way_as_in_doubt_and_the_thread_goes_on(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        stage.faults.plan("claim t", fail_in_the_thread, times=1)
        call = stage.call(client, client.claim, claim_of("t"))
        stage.go_to(1)
        assert isinstance(call.error, TaskLockError)
        assert not isinstance(call.error, TaskLockDatabaseError)
        assert stage.row().handed_over  # because it was in doubt
        assert stage.claim(client, "another")

    def test_a_turn_that_does_not_come_in_nine_seconds_sends_nothing_and_is_no_outage(
        self, stage: Stage
    ) -> None:
        client = stage.replica(claim_timeout=1.5)
        stage.faults.plan("read", slow(0.8))
        reads = [ask(stage, client) for _ in range(15)]
        stage.go_to(20)
        failed = [each for each in reads if each.error is not None]
        assert len(failed) == 3
        assert all("its turn on the connection did not come" in str(e.error) for e in failed)
        assert all(each.ended == pytest.approx(9.6, abs=0.7) for each in failed)
        assert client.outage.reason is None

    def test_without_a_connection_all_that_wait_are_told_at_once(self, stage: Stage) -> None:
        client = stage.replica()
        stage.process_of(client).cut_until = stage.world.now + 5.0
        reads = [ask(stage, client) for _ in range(3)]
        claim = stage.call(client, client.claim, claim_of("t"))
        stage.go_on(0.1)
        assert all(isinstance(each.error, TaskLockDatabaseError) for each in reads)
        assert len({each.ended for each in reads}) == 1  # after one attempt to connect
        assert client.outage.reason is not None
        stage.go_on(8)
        assert isinstance(claim.result, HeldLock)  # which was tried again

    def test_a_clock_that_drifts_breaks_no_bound(self, stage: Stage) -> None:
        client = grown_up(stage)
        stage.go_on(1000)
        stage.world.step_database(0.5)
        stage.claim(client, run_time=None, exact=False)
        assert stage.statements()[1:] == ["claim t"]

    def test_when_a_clock_has_jumped_the_claim_is_decided_again(self, stage: Stage) -> None:
        client = grown_up(stage)
        stage.faults.plan("claim t", then(lambda: stage.world.step_database(5.0)), times=1)
        call = stage.call(client, client.claim, claim_of("t", run_time=None, exact=False))
        stage.go_on(1)
        assert [each for each in stage.statements() if each.endswith(" t")] == [
            "claim t",
            "release t",
            "claim t",
        ]
        assert stage.database.rows.now() - call.held.window_start < timedelta(seconds=2)

    def test_clocks_that_jump_before_each_answer_are_an_error(self, stage: Stage) -> None:
        client = grown_up(stage)
        stage.faults.plan("claim t", then(lambda: stage.world.step_database(5.0)))
        call = stage.call(client, client.claim, claim_of("t", run_time=None, exact=False))
        stage.go_on(20)
        assert isinstance(call.error, TaskLockDatabaseError)
        assert "jumps back and forth" in str(call.error)
        assert stage.row().handed_over


class TestBatches:
    def test_a_statement_claims_at_most_256_tasks(self, stage: Stage) -> None:
        client = stage.replica()
        stage.faults.plan("read", slow(1.0), times=1)
        ask(stage, client)
        stage.go_to(0.5)
        calls = [stage.call(client, client.claim, claim_of(f"t{n}")) for n in range(300)]
        stage.go_to(2)
        claims = [each.split(", ") for each in stage.statements() if each.startswith("claim_many")]
        assert [len(each) for each in claims] == [256, 44]
        assert all(isinstance(each.result, HeldLock) for each in calls)

    def test_two_claims_of_a_task_are_sent_one_after_the_other(self, stage: Stage) -> None:
        client = stage.replica()
        stage.faults.plan("read", slow(1.0), times=1)
        ask(stage, client)
        stage.go_to(0.5)
        calls = [stage.call(client, client.claim, claim_of(each)) for each in "aab"]
        stage.go_to(2)
        assert [each for each in stage.statements(0.9) if "claim" in each] == [
            "claim_many a, b",
            "first_claim_many a, b",
            "claim a",
        ]
        assert [isinstance(each.result, HeldLock) for each in calls] == [True, False, True]

    def test_a_rejected_batch_is_sent_again_in_halves_until_one_fails_alone(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        stage.faults.plan("read", slow(1.0), times=1)
        stage.faults.plan("claim", reject_what_is_bad)
        ask(stage, client)
        stage.go_to(0.5)
        tasks = ["a", "b", "bad", "d", "e"]
        calls = [stage.call(client, client.claim, claim_of(each)) for each in tasks]
        stage.go_to(2)
        assert [isinstance(each.result, HeldLock) for each in calls] == [
            True,
            True,
            False,
            True,
            True,
        ]
        assert isinstance(calls[2].error, TaskLockError)
        assert not isinstance(calls[2].error, TaskLockDatabaseError)

    def test_the_oldest_goes_first_with_all_of_its_kind(self, stage: Stage) -> None:
        client = stage.replica()
        first, second = stage.claim(client, "r1"), stage.claim(client, "r2")
        stage.faults.plan("read", slow(1.0), since=0.2, times=1)
        stage.go_to(0.3)
        ask(stage, client)
        stage.go_to(0.4)
        stage.call(client, client.claim, claim_of("a"))
        stage.go_to(0.5)
        stage.release(client, first, ENDED_WELL)
        stage.go_to(0.6)
        stage.call(client, client.claim, claim_of("b"))
        stage.release(client, second, ENDED_WELL)
        stage.go_to(2)
        assert stage.statements(0.9) == [
            "claim_many a, b",
            "first_claim_many a, b",
            "release_many r1, r2",
        ]

    def test_of_several_claims_no_more_are_granted_than_workers_are_free(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        results: dict[str, Any] = {}
        attempts = [client.attempt(claim_of(each)) for each in "abc"]

        def report(claimed: Any) -> None:
            results.update((attempt.task_name, result) for attempt, result in claimed)

        stage.faults.plan("first_claim_many", "lost after", times=1)
        stage.call(client, lambda: client.begin_claims(attempts, 2, report))
        stage.go_to(2)
        assert [isinstance(results[each], HeldLock) for each in "abc"] == [True, True, False]
        assert results["c"] is ClaimOutcome.BEYOND
        assert set(stage.database.rows.rows) == {"a", "b"}

    def test_an_ask_of_a_queue_is_answered_in_an_outage_after_one_and_a_half_seconds(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        told: list[float] = []
        results: list[Any] = []

        def report(claimed: Any) -> None:
            told.append(stage.now)
            results.extend(result for _, result in claimed)

        stage.faults.plan("claim t", "lost before")
        attempts = [client.attempt(claim_of("t"))]
        stage.call(client, lambda: client.begin_claims(attempts, 2, report))
        stage.go_to(12)
        assert results == [ClaimOutcome.UNANSWERED]
        assert told[0] <= 1.6

    def test_an_ask_during_an_outage_tries_as_rarely_as_one_that_has_gone_on_for_long(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        stage.faults.plan("", "lost before")
        ask(stage, client)
        stage.go_on(0.1)
        attempts = [client.attempt(claim_of("t"))]
        stage.call(client, lambda: client.begin_claims(attempts, 2, lambda _claimed: None))
        stage.go_on(3)
        assert len(stage.sent("probe")) == 2

    @pytest.mark.parametrize(
        ("fault", "outcome"),
        [("lost before", ClaimOutcome.UNANSWERED), ("locked", ClaimOutcome.LOCKED)],
    )
    def test_a_claim_of_a_queue_that_is_asked_for_again_and_again_fails_after_its_timeout(
        self, stage: Stage, fault: str, outcome: ClaimOutcome
    ) -> None:
        client = stage.replica()
        stage.faults.plan("claim t", fault)
        attempt = client.attempt(claim_of("t"))
        results: list[Any] = []
        ended: list[float] = []

        def begin() -> None:
            client.begin_claims([attempt], 2, report)

        def report(claimed: Any) -> None:
            [(_, result)] = claimed
            results.append(result)
            ended.append(stage.now)
            if result is outcome:
                stage.world.start(stage.process_of(client), begin, after=0.1)

        stage.call(client, begin)
        stage.go_to(30)
        assert len(results) > 5
        assert isinstance(results[-1], TaskLockDatabaseError)
        assert ended[-1] == pytest.approx(10, abs=1.3)

    def test_a_lone_claim_whose_row_is_locked_is_told_so_at_once(self, stage: Stage) -> None:
        client = stage.replica()
        stage.faults.plan("claim t", "locked")
        results: list[Any] = []
        attempt = client.attempt(claim_of("t"))
        stage.call(client, lambda: client.begin_claims([attempt], 1, results.extend))
        stage.go_to(1)
        assert results == [(attempt, ClaimOutcome.LOCKED)]
        assert len(stage.sent("claim t")) == 1

    def test_a_claim_of_a_process_that_stood_still_after_it_found_the_row_locked_is_sent_again(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        stage.faults.plan("claim t", stand_still_and_find_the_row_locked, times=1)
        results: list[Any] = []
        attempt = client.attempt(claim_of("t"))

        def begin() -> None:
            client.begin_claims([attempt], 1, lambda told: results.extend(each for _, each in told))

        stage.call(client, begin)
        stage.go_to(20)
        assert results == [ClaimOutcome.LOCKED]
        stage.call(client, begin)
        stage.go_to(21)
        assert isinstance(results[-1], HeldLock)

    def test_of_several_claims_of_a_queue_the_rejected_one_fails_alone(self, stage: Stage) -> None:
        client = stage.replica()
        stage.faults.plan("claim", reject_what_is_bad)
        results: dict[str, Any] = {}

        def report(claimed: Any) -> None:
            results.update((attempt.task_name, result) for attempt, result in claimed)

        attempts = [client.attempt(claim_of(each)) for each in ("a", "bad", "c")]
        stage.call(client, lambda: client.begin_claims(attempts, 3, report))
        stage.go_to(1)
        assert isinstance(results["a"], HeldLock)
        assert isinstance(results["c"], HeldLock)
        assert isinstance(results["bad"], TaskLockError)
        assert not isinstance(results["bad"], TaskLockDatabaseError)

    def test_of_several_takeovers_of_a_queue_the_rejected_one_fails_alone(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        for name in ("a", "c"):
            stage.call(client, lambda name=name: client.claim(claim_of(name)))
        stage.go_to(1)
        dead = {name: stage.database.rows.rows[name].claim_id for name in ("a", "c")}
        stage.faults.plan("rerun", reject_what_is_bad)
        results: dict[str, Any] = {}

        def report(claimed: Any) -> None:
            results.update((attempt.task_name, result) for attempt, result in claimed)

        wanted = [("a", dead["a"]), ("bad", uuid4()), ("c", dead["c"])]
        attempts = [client.attempt(takeover_of(*each)) for each in wanted]
        stage.call(client, lambda: client.begin_claims(attempts, None, report))
        stage.go_to(2)
        assert isinstance(results["a"], Refusal)  # because the run goes on
        assert isinstance(results["c"], Refusal)
        assert isinstance(results["bad"], TaskLockError)
        assert not isinstance(results["bad"], TaskLockDatabaseError)

    def test_a_registration_that_is_rejected_is_sent_task_by_task(self, stage: Stage) -> None:
        client = stage.replica()
        stage.faults.plan("register", reject_what_is_bad)
        tasks = [Registration(name, "", None, 60.0, 0.0, "") for name in ("a", "bad", "c")]
        call = stage.call(client, lambda: client.ask_all(send_registrations(client, tasks)))
        stage.go_to(1)
        assert {each.task_name: each.again for each in call.result} == {
            "a": False,
            "bad": True,
            "c": False,
        }
        assert set(stage.database.rows.rows) == {"a", "c"}


class TestReleases:
    def test_a_release_that_fails_keeps_its_waiter_for_a_fifth_of_a_second_and_arrives_later(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        held = stage.claim(client)
        stage.faults.plan("release t", "lost before", until=3.0)
        begun = stage.now
        call = stage.release(client, held, ENDED_WELL)
        stage.go_to(2.9)
        assert isinstance(call.error, TaskLockDatabaseError)
        assert call.ended - begun <= 0.25
        assert stage.row().finished_at is None
        stage.go_to(5)
        assert stage.row().finished_at is not None

    @pytest.mark.parametrize("end", [ENDED_WELL, HANDED_OVER], ids=["ended", "never began"])
    def test_a_failed_release_is_sent_each_second_until_the_database_answers(
        self, stage: Stage, end: RunOutcome
    ) -> None:
        """Also long after the end of the maximum lock."""
        client = stage.replica()
        held = stage.claim(client, max_lock=20.0)
        stage.faults.plan("release t", "lost before", until=400.0)
        stage.release(client, held, end)
        stage.go_to(420)
        sent = stage.sent("release t")
        assert sent[-1] == pytest.approx(400, abs=1.3)
        pauses = [later - earlier for earlier, later in pairwise(sent[4:-1])]
        assert len(pauses) > 300
        assert pauses == pytest.approx([1.0] * len(pauses), rel=0.25)
        assert stage.row().finished or stage.row().handed_over

    def test_a_release_whose_row_is_locked_waits_for_it_beyond_the_maximum_lock(
        self, stage: Stage
    ) -> None:
        """A session that waits for a synchronous standby may have the row locked for an outage."""
        client = stage.replica()
        held = stage.claim(client, max_lock=20.0)
        stage.faults.plan("release t", "locked", until=60.0)
        stage.release(client, held, ENDED_WELL)
        stage.go_to(62)
        assert stage.row().finished

    def test_the_first_answer_after_the_maximum_lock_ends_a_release(self, stage: Stage) -> None:
        client = stage.replica()
        held = stage.claim(client, max_lock=20.0)
        stage.faults.plan("release t", "rejected")
        stage.release(client, held, ENDED_WELL)
        stage.go_to(100)
        *before, last = stage.sent("release t")
        assert len(before) > 2
        assert before[-1] < 20 <= last < 27

    @pytest.mark.parametrize("ended", [0.8, 50.0])
    @pytest.mark.parametrize("step", [0.0, -30.0, -56.0, 30.0])
    def test_a_run_that_ended_well_in_an_outage_has_not_died_and_is_not_run_again(
        self, stage: Stage, step: float, ended: float
    ) -> None:
        """Of a job that runs each second; the new server's clock is off by so much."""
        one, other = stage.replica(), stage.replica("B")
        runs = {"runs": "r", "failover": True, "min_lock": 0.9, "max_lock": 5.0, "lease": 1.5}
        runs |= {"run_time": None, "exact": False}
        held = stage.claim(one, **runs)
        stage.faults.plan("", "lost before", since=0.7, until=60.0)
        stage.go_to(ended)
        stage.release(one, held, ENDED_WELL)
        stage.go_to(59)
        stage.world.step_database(step)
        takeovers, claims = [], []
        for second in range(60, 80):
            stage.go_to(second + 0.01)
            # Both as soon as the database answers, which may be before the release arrives.
            dead = takeover_of("t", held.claim_id, "A", 1.5, failover=True)
            takeovers.append(stage.call(other, other.claim, dead))
            claims.append(stage.call(other, other.claim, claim_of("t", **runs)))
        stage.go_on(5)
        assert not any(isinstance(call.result, HeldLock) for call in takeovers)
        assert any(isinstance(call.result, HeldLock) for call in claims)
        told = {run.token: run.outcome for run in stage.database.rows.runs("t")}
        assert told[held.token] == "ok"

    def test_a_rejected_release_is_sent_again_after_five_seconds(self, stage: Stage) -> None:
        client = stage.replica()
        held = stage.claim(client)
        stage.faults.plan("release t", "rejected", times=1)
        call = stage.release(client, held, ENDED_WELL)
        stage.go_to(1)
        assert isinstance(call.error, TaskLockError)
        stage.go_to(7)
        first, second = stage.sent("release t")
        assert 3.9 < second - first < 6.1
        assert stage.row().finished_at is not None

    def test_a_released_claim_is_renewed_no_more_although_its_release_waits(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        held = stage.claim(client)
        stage.faults.plan("release t", "lost before")
        stage.release(client, held, ENDED_WELL)
        stage.go_to(20)
        assert stage.sent("renew") == []

    def test_after_a_stop_the_limit_of_a_release_counts_from_its_own_begin(
        self, stage: Stage
    ) -> None:
        """As of a job that goes on for a minute while its scheduler waits for it."""
        client = stage.replica()
        held = stage.claim(client)
        client.stop_claiming()
        stage.go_to(60)
        stage.faults.plan("release t", slow(2.4), times=1)
        call = stage.release(client, held, ENDED_WELL)
        stage.go_to(64)
        assert call.result is not None
        assert stage.sent("release t") == [60.0]  # its answer came, although it was late

    def test_after_a_stop_a_release_is_not_waited_for_longer_than_three_seconds(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        held = stage.claim(client)
        client.stop_claiming()
        stage.go_to(60)
        stage.faults.plan("release t", "hung", times=1)
        stage.release(client, held, ENDED_WELL)
        stage.go_to(64)
        first, second = stage.sent("release t")
        assert second - first < 2.7
        assert stage.row().finished_at is not None


class TestGrace:
    def test_the_rows_are_believed_some_time_after_the_first_answer(self, stage: Stage) -> None:
        client = stage.replica()
        stage.go_to(100)
        assert not client.stable  # because there was no answer
        ask(stage, client)
        stage.go_on(GRACE - 0.1)
        assert not client.stable
        stage.go_on(0.2)
        assert client.stable

    def test_an_outage_is_followed_by_a_grace(self, stage: Stage) -> None:
        client = grown_up(stage)
        self.have_an_outage(stage, client)
        assert not client.stable
        stage.go_on(GRACE - 0.1)
        assert not client.stable
        stage.go_on(0.2)
        assert client.stable

    def test_who_is_to_believe_at_the_start_does_not_believe_after_an_outage(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        ask(stage, client)
        stage.go_on(0.1)
        client.outage.believe()
        assert client.stable
        self.have_an_outage(stage, client)
        client.outage.believe()
        assert not client.stable

    def test_in_an_outage_nothing_is_believed(self, stage: Stage) -> None:
        client = grown_up(stage)
        stage.faults.plan("read", "lost before")
        ask(stage, client)
        stage.go_on(100)
        assert not client.stable
        client.outage.believe()
        assert not client.stable

    def test_a_dead_run_is_not_seen_as_dead_in_the_grace_by_a_claim(self, stage: Stage) -> None:
        dying, client = stage.replica(), grown_up(stage, "B")
        stage.claim(dying)
        stage.process_of(dying).killed_at = stage.world.now
        stage.go_on(LEASE + 1)
        self.have_an_outage(stage, client)
        refused = stage.call(client, client.claim, claim_of("t", run_time=None, exact=False))
        stage.go_on(0.1)
        assert refused.result.waits
        stage.go_on(GRACE)
        assert stage.claim(client, run_time=None, exact=False)

    def test_a_hold_waits_for_the_end_of_a_dead_run_and_of_the_grace(self, stage: Stage) -> None:
        dying = stage.replica()
        stage.claim(dying, runs="")
        stage.process_of(dying).killed_at = stage.world.now
        stage.go_on(LEASE + 1)
        client = stage.replica("B")
        call = enter_hold(stage, client)
        stage.go_on(GRACE)
        assert call.error is None
        stage.go_on(1)
        assert call.held.name == "t"

    def test_a_hold_that_waits_is_refused_at_a_stop(self, stage: Stage) -> None:
        dying = stage.replica()
        stage.claim(dying, runs="")
        stage.process_of(dying).killed_at = stage.world.now
        stage.go_on(LEASE + 1)
        client = stage.replica("B")
        call = enter_hold(stage, client)
        stage.go_on(1)
        client.stop_claiming()
        stage.go_on(0.1)
        assert isinstance(call.error, TaskLockRefusedError)

    def test_a_hold_with_wait_is_claimed_again_every_five_seconds_until_the_run_is_over(
        self, stage: Stage
    ) -> None:
        one, client = stage.replica(), grown_up(stage, "B")
        held = stage.claim(one, run_time=None, exact=False)
        since = stage.now
        call = enter_hold(stage, client, wait=100)
        stage.go_on(18)
        stage.release(one, held)
        stage.go_on(10)
        asked = [at for at in stage.sent("claim", client) if at >= since]
        assert len(asked) == 5
        assert all(4 <= later - earlier <= 6.1 for earlier, later in pairwise(asked))
        assert call.held.name == "t"

    def test_a_hold_with_wait_is_claimed_again_when_the_lock_of_the_run_ends(
        self, stage: Stage
    ) -> None:
        dying, client = stage.replica(), grown_up(stage, "B")
        stage.claim(dying, run_time=None, exact=False, runs="", max_lock=3, lease=None)
        stage.process_of(dying).killed_at = stage.world.now
        since = stage.now
        call = enter_hold(stage, client, wait=100)
        stage.go_on(10)
        assert call.held.name == "t"
        assert 2.8 <= call.ended - since <= 3.1

    @pytest.mark.parametrize("wait", [0.0, 12.0])
    def test_a_hold_is_refused_when_its_wait_has_passed(self, stage: Stage, wait: float) -> None:
        one, client = stage.replica(), grown_up(stage, "B")
        stage.claim(one, run_time=None, exact=False)
        since = stage.now
        call = enter_hold(stage, client, wait=wait)
        stage.go_on(100)
        assert isinstance(call.error, TaskLockRefusedError)
        assert call.error.reason == "running"
        assert wait <= call.ended - since <= wait + 0.1

    @pytest.mark.parametrize("reason", ["window", "paused"])
    def test_a_hold_with_wait_is_refused_at_once_by_a_window_and_a_pause(
        self, stage: Stage, reason: str
    ) -> None:
        one, client = stage.replica(), grown_up(stage, "B")
        min_lock = 60.0 if reason == "window" else 0.0
        held = stage.claim(one, run_time=None, exact=False, min_lock=min_lock)
        stage.release(one, held)
        stage.go_on(0.1)
        if reason == "paused":
            rows, now = stage.database.rows.rows, stage.world.database_time()
            rows["t"] = rule.pause(rows["t"], None, now, "ann", None, "the pause")
        call = enter_hold(stage, client, wait=100)
        stage.go_on(0.1)
        assert isinstance(call.error, TaskLockRefusedError)
        assert call.error.reason == reason

    def test_a_hold_is_claimed_again_if_a_later_one_came_first_and_its_lock_is_over(
        self, stage: Stage
    ) -> None:
        one, client = stage.replica(), grown_up(stage, "B")
        stage.faults.plan("read", slow(2.0), times=1)
        ask(stage, client)  # what the hold's claim waits behind
        call = enter_hold(stage, client)
        stage.go_on(1)
        held = stage.claim(one, run_time=None, exact=False, min_lock=0.0)
        stage.release(one, held)
        stage.go_on(5)
        assert call.held.name == "t"

    def test_a_hold_of_a_row_that_looks_over_for_ever_is_refused(self, stage: Stage) -> None:
        """Somebody has edited the row: no library writes a window beyond its lock."""
        one, client = stage.replica(), grown_up(stage, "B")
        stage.release(one, stage.claim(one, run_time=None, exact=False, min_lock=0.0))
        stage.go_on(1)
        rows, now = stage.database.rows.rows, stage.world.database_time()
        rows["t"] = replace(rows["t"], window_until=now + timedelta(days=365))
        call = enter_hold(stage, client)
        stage.go_on(1000)
        assert isinstance(call.error, TaskLockRefusedError)

    def test_a_stop_ends_the_wait_of_a_hold(self, stage: Stage) -> None:
        one, client = stage.replica(), grown_up(stage, "B")
        stage.claim(one, run_time=None, exact=False)
        call = enter_hold(stage, client, wait=100)
        stage.go_on(1)
        client.stop_claiming()
        stage.go_on(0.1)
        assert isinstance(call.error, TaskLockRefusedError)

    @pytest.mark.parametrize(("replicas", "grace"), [(200, GRACE), (1000, ATTEMPT + 10.0)])
    def test_a_large_fleet_has_a_longer_grace(
        self, stage: Stage, replicas: int, grace: float
    ) -> None:
        client = self.in_a_fleet(stage, replicas)
        self.have_an_outage(stage, client)
        stage.go_on(grace - 0.1)
        assert not client.stable
        stage.go_on(0.2)
        assert client.stable

    @pytest.mark.parametrize(("took", "is_believed"), [(1.9, True), (2.1, False)])
    def test_an_answer_that_took_longer_than_a_third_of_a_lease_begins_a_grace(
        self, stage: Stage, took: float, is_believed: bool
    ) -> None:
        client = grown_up(stage)
        stage.claim(client, lease=6.0)
        stage.go_on(0.5)
        stage.faults.plan("read", slow(took), times=1)
        ask(stage, client)
        stage.go_on(took + 0.1)
        assert client.stable is is_believed

    @pytest.mark.parametrize("step", [30.0, -30.0, 2.0])
    def test_a_step_of_the_clock_begins_a_grace(self, stage: Stage, step: float) -> None:
        client = grown_up(stage)
        stage.world.step_database(step)
        ask(stage, client)
        stage.go_on(0.1)
        assert not client.stable
        stage.go_on(GRACE)
        assert client.stable

    def test_a_clock_that_drifts_has_not_stepped(self, stage: Stage) -> None:
        client = grown_up(stage)
        for _ in range(5):
            stage.world.step_database(0.9)
            ask(stage, client)
            stage.go_on(0.1)
            assert client.stable
            stage.go_on(100)

    @pytest.mark.parametrize(
        ("ended_by", "is_believed"),
        [("", False), (SHUT_DOWN, False), (IDLE_TOO_LONG, True)],
        ids=["in silence", "by the server", "because it was idle"],
    )
    def test_a_connection_that_was_ended_while_it_was_idle_begins_a_grace(
        self, stage: Stage, ended_by: str, is_believed: bool
    ) -> None:
        client = grown_up(stage)
        self.end_connection(stage, client, ended_by)
        assert client.stable is is_believed
        assert client.outage.reason is None

    def test_connections_that_end_in_silence_begin_a_grace_every_two_minutes_at_most(
        self, stage: Stage
    ) -> None:
        client = grown_up(stage)
        self.end_connection(stage, client)
        assert not client.stable
        stage.go_on(118)
        self.end_connection(stage, client)
        assert client.stable
        stage.go_on(3)
        self.end_connection(stage, client)
        assert not client.stable

    def test_each_end_that_the_server_tells_begins_a_grace(self, stage: Stage) -> None:
        client = grown_up(stage)
        for _ in range(3):
            self.end_connection(stage, client, SHUT_DOWN)
            assert not client.stable
            stage.go_on(GRACE + 0.1)
            assert client.stable

    def test_a_server_that_is_full_again_and_again_is_believed_now_and_then(
        self, stage: Stage
    ) -> None:
        """Else dead runs would block their tasks for as long as that goes on."""
        client = grown_up(stage)
        believed = []
        for _ in range(8):
            stage.faults.plan("read", full, times=1)
            ask(stage, client)
            stage.go_on(0.1)
            ask(stage, client)
            stage.go_on(0.9)
            believed.append(client.stable)
        assert not any(believed[:5])
        assert True in believed

    def test_a_database_that_always_answers_late_is_believed_now_and_then(
        self, stage: Stage
    ) -> None:
        client = grown_up(stage)
        stage.claim(client, lease=6.0)
        stage.faults.plan("read", slow(2.1))
        believed = []
        for _ in range(8):
            ask(stage, client)
            stage.go_on(2.2)
            believed.append(client.stable)
            stage.go_on(2.8)
            believed.append(client.stable)
        assert True in believed
        assert False in believed

    def test_in_a_very_large_fleet_two_thirds_of_the_time_are_left_without_a_grace(
        self, stage: Stage
    ) -> None:
        """Its grace is so long that every two minutes would be too often."""
        client = self.in_a_fleet(stage, 6000)
        grace = ATTEMPT + 60.0
        self.end_connection(stage, client)
        stage.go_on(grace + 1)
        assert client.stable
        stage.go_on(2 * grace - 5)
        self.end_connection(stage, client)
        assert client.stable
        stage.go_on(10)
        self.end_connection(stage, client)
        assert not client.stable

    def in_a_fleet(self, stage: Stage, replicas: int) -> LockClient:
        """Return the client of a replica that knows of so many others, itself included."""
        client = stage.replica()
        others = {f"replica {n}": frozenset[str]() for n in range(replicas - 1)}
        stage.database.rows.tasks_of.update(others)
        stage.call(client, lambda: client.ask_all(Presence(client, KnownTasks()).send()))
        stage.go_on(200)
        assert client.stable
        return client

    def have_an_outage(self, stage: Stage, client: LockClient) -> None:
        """Let a statement fail, and the next one be answered."""
        stage.faults.plan("read none", "lost before", times=1)
        failed = ask(stage, client)
        stage.go_on(0.01)
        assert isinstance(failed.error, TaskLockDatabaseError)
        ask(stage, client)
        stage.go_on(0.01)
        assert client.outage.reason is None

    def end_connection(self, stage: Stage, client: LockClient, ended_by: str = "") -> None:
        """End the idle connection of a replica, and let it notice."""
        stage.process_of(client).connection.ended_by = ended_by
        ask(stage, client)
        stage.go_on(0.01)


class TestStops:
    def test_a_replica_that_closes_sends_its_releases_for_three_seconds(self, stage: Stage) -> None:
        client = stage.replica()
        held = stage.claim(client)
        stage.faults.plan("release t", "lost before")
        stage.release(client, held, ENDED_WELL)
        stage.go_to(10)
        call = stage.call(client, lambda: client.close(blocking=True))
        stage.go_to(20)
        assert 12.5 <= call.ended <= 13.1
        assert stage.sent("release t")[-1] <= 13

    def test_a_close_sends_what_waits_at_once_and_tries_each_fifth_of_a_second(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        held = stage.claim(client)
        stage.faults.plan("release t", "rejected", times=1)
        stage.faults.plan("release t", "lost before", times=3)
        stage.release(client, held, ENDED_WELL)
        stage.go_to(1)
        stage.call(client, lambda: client.close(blocking=True))
        stage.go_to(5)
        assert stage.sent("release t")[1:] == pytest.approx([1.0, 1.2, 1.4, 1.6], abs=0.12)
        assert stage.row().finished_at is not None

    def test_the_probe_of_an_outage_leaves_time_for_the_releases_of_a_close(
        self, stage: Stage
    ) -> None:
        """As where commits hang. Else their runs look dead, and are run again."""
        client = stage.replica()
        held = stage.claim(client)
        stage.faults.plan("read", "lost before", times=1)
        stage.faults.plan("probe", hang_until_its_limit)
        ask(stage, client)
        stage.go_to(0.15)
        stage.release(client, held, ENDED_WELL)
        stage.go_to(0.3)
        assert stage.sent("probe")
        assert not stage.sent("release t")
        stage.call(client, lambda: client.close(blocking=True))
        stage.go_on(5)
        assert stage.row().finished_at is not None

    def test_at_the_interpreters_end_releases_are_sent_for_three_seconds(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        held = stage.claim(client)
        stage.faults.plan("release t", "lost before", until=12.0)
        stage.release(client, held, ENDED_WELL)
        stage.go_to(10)
        call = stage.end_interpreter(client)
        stage.go_to(20)
        assert 12 <= call.ended <= 13.1
        assert stage.row().finished_at is not None

    def test_at_the_interpreters_end_releases_that_cannot_arrive_are_given_up(
        self, stage: Stage
    ) -> None:
        client = stage.replica()
        held = stage.claim(client)
        stage.faults.plan("release t", "lost before")
        stage.release(client, held, ENDED_WELL)
        stage.go_to(10)
        call = stage.end_interpreter(client)
        stage.go_to(20)
        assert call.ended == pytest.approx(13, abs=0.1)

    def test_a_close_of_a_shutdown_ends_with_it(self, stage: Stage) -> None:
        client = stage.replica()
        held = stage.claim(client)
        stage.faults.plan("release t", "lost before")
        stage.release(client, held, ENDED_WELL)
        stage.go_to(10)
        shutdown = Shutdown()
        stage.go_to(12.5)
        call = stage.call(client, lambda: client.close(blocking=True, shutdown=shutdown))
        stage.go_to(20)
        assert call.ended == pytest.approx(14.3, abs=0.1)

    def test_the_wait_for_running_jobs_is_no_time_of_the_shutdown(self, stage: Stage) -> None:
        client = stage.replica()
        held = stage.claim(client)
        shutdown = Shutdown()
        stage.go_to(60)
        shutdown.note_waited(60.0)
        stage.faults.plan("release t", "lost before", until=62.0)
        stage.release(client, held, ENDED_WELL)
        stage.call(client, lambda: client.close(blocking=True, shutdown=shutdown))
        stage.go_to(70)
        assert stage.row().finished_at is not None

    def test_a_release_has_some_time_although_the_shutdown_is_over(self, stage: Stage) -> None:
        client = stage.replica()
        held = stage.claim(client)
        shutdown = Shutdown()
        stage.faults.plan("release t", "lost before", until=30.0)
        stage.release(client, held, ENDED_WELL)
        stage.go_to(30)
        call = stage.call(client, lambda: client.close(blocking=True, shutdown=shutdown))
        stage.go_to(40)
        assert stage.row().finished_at is not None
        assert call.ended < 30.8

    @pytest.mark.parametrize(("users", "seconds"), [(1, 3.8), (2, 2.8), (3, 1.8), (9, 1.4)])
    def test_each_user_of_a_shutdown_leaves_a_second_to_those_after_it(
        self, stage: Stage, users: int, seconds: float
    ) -> None:
        """As the stop of a replica is told while the database hangs."""
        client = stage.replica(claim_timeout=60.0)
        stage.go_to(10)
        shutdown = Shutdown(users)
        stage.faults.plan("stop_replica", "hung")
        call = stage.call(client, lambda: client.ask(client.carrying_out(Stop()), shutdown.last_at))
        stage.go_to(20)
        assert isinstance(call.error, TaskLockDatabaseError)
        limit = min(seconds - 0.5, ATTEMPT)
        assert call.ended == pytest.approx(10 + limit, abs=0.1)

    def test_what_one_user_leaves_the_next_one_has(self, stage: Stage) -> None:
        shutdown = Shutdown(3)
        begun = stage.world.now
        ends = []
        for _ in range(3):
            ends.append(round(shutdown.over_at - begun, 3))
            shutdown.leave()
        assert ends == [2.8, 3.8, 4.8]

    def test_only_the_last_of_several_users_waits_for_the_releases(self, stage: Stage) -> None:
        first = stage.replica()
        second = stage.replica(beside=first)
        held = stage.claim(first)
        stage.faults.plan("release t", "lost before", times=2)
        stage.release(first, held, ENDED_WELL)
        stage.go_to(0.2)
        shutdown = Shutdown(2)
        for each in (first, second):
            each.stop_claiming()

        def close() -> None:
            first.close(blocking=True, shutdown=shutdown)
            closed_first.append(stage.now)
            shutdown.leave()
            second.close(blocking=True, shutdown=shutdown)

        closed_first: list[float] = []
        stage.call(first, close)
        stage.go_to(2)
        assert closed_first == pytest.approx([0.2])
        assert stage.row().finished_at is not None

    def test_a_user_that_leaves_others_behind_waits_for_its_own_releases(
        self, stage: Stage
    ) -> None:
        first = stage.replica()
        second = stage.replica(beside=first)
        held, other = stage.claim(first), stage.claim(second, "of the other")
        stage.faults.plan("release", "lost before", until=1.0)
        stage.release(first, held, ENDED_WELL)
        stage.release(second, other, ENDED_WELL)
        presence = Presence(second, KnownTasks())
        stage.call(second, presence.start)
        call = stage.call(first, lambda: first.close(blocking=True))
        stage.go_to(2)
        assert 1.0 <= call.ended < 1.5
        presence.note_look(has_listed=True)
        stage.go_to(40)
        assert len(stage.sent("report_replica")) == 2  # the work of the other one goes on

    def test_a_stop_of_one_user_fails_nothing_of_another_one(self, stage: Stage) -> None:
        """It ends the probe before its own claim, and that says nothing of the database."""
        first = stage.replica()
        second = stage.replica(beside=first)
        stage.faults.plan("read", "lost before", times=1)
        stage.faults.plan("probe", answer_late, times=1)
        ask(stage, first)
        stage.go_to(0.2)
        stage.call(first, lambda: first.claim(claim_of("t")))
        other = ask(stage, second)
        stage.go_to(0.3)
        assert stage.sent("probe")
        first.stop_claiming()
        stage.go_to(20)
        assert other.ended < inf
        assert other.error is None

    def test_what_a_user_has_not_released_when_it_leaves_others_behind_is_released_later(
        self, stage: Stage
    ) -> None:
        first = stage.replica()
        stage.replica(beside=first)
        held = stage.claim(first)
        stage.faults.plan("release", "lost before", until=20.0)
        stage.release(first, held, ENDED_WELL)
        call = stage.call(first, lambda: first.close(blocking=True))
        stage.go_to(19)
        assert call.ended < 5.0
        stage.go_to(25)
        assert stage.row().last_outcome == "ok"

    def test_a_user_that_leaves_others_behind_sends_what_waits_at_once(self, stage: Stage) -> None:
        first = stage.replica()
        stage.replica(beside=first)
        held = stage.claim(first)
        stage.faults.plan("release", "rejected", times=1)
        stage.release(first, held, ENDED_WELL)
        stage.go_to(1)
        call = stage.call(first, lambda: first.close(blocking=True))
        stage.go_to(4)
        assert call.ended < 1.5
        assert stage.row().last_outcome == "ok"

    def test_a_user_that_leaves_others_behind_does_not_wait_for_what_is_sent_again_later(
        self, stage: Stage
    ) -> None:
        """A release of a claim in doubt goes again when the claim cannot be granted any more."""
        first = stage.replica()
        stage.replica(beside=first)
        stage.faults.plan("claim t", "lost before", until=2.0)
        attempt = first.attempt(claim_of("t"))
        told: list[Any] = []
        stage.call(first, lambda: first.begin_claims([attempt], 1, told.extend))
        stage.go_to(2)
        assert told == [(attempt, ClaimOutcome.UNANSWERED)]
        stage.call(first, lambda: first.withdraw(attempt))
        stage.go_to(3)
        call = stage.call(first, lambda: first.close(blocking=True))
        stage.go_to(10)
        assert call.ended < 3.5


class TestSignsOfLife:
    def presence(self, stage: Stage, tasks: KnownTasks) -> tuple[LockClient, Presence]:
        client = stage.replica()
        presence = Presence(client, tasks)
        stage.call(client, presence.start)
        stage.go_on(0.1)
        return client, presence

    def test_a_replica_tells_of_itself_every_thirty_seconds(self, stage: Stage) -> None:
        _, presence = self.presence(stage, KnownTasks())
        stage.go_to(0.5)
        presence.note_look(has_listed=True)
        stage.go_to(95)
        assert stage.sent("report_replica") == pytest.approx([0.5, 30.5, 60.5, 90.5], abs=0.1)

    def test_a_change_of_its_tasks_is_told_with_the_next_look(self, stage: Stage) -> None:
        tasks = KnownTasks()
        _, presence = self.presence(stage, tasks)
        presence.note_look(has_listed=True)
        stage.go_to(3)
        tasks.add("t", ("job", "default"), None)
        presence.note_look(has_listed=True)
        stage.go_to(7)
        assert len(stage.sent("report_replica")) == 2
        assert stage.database.rows.tasks_of["A"] == {"t"}

    def test_one_that_fails_is_sent_again_after_five_seconds(self, stage: Stage) -> None:
        _, presence = self.presence(stage, KnownTasks())
        stage.faults.plan("report_replica", "lost before", times=1)
        presence.note_look(has_listed=True)
        stage.go_to(8)
        first, second = stage.sent("report_replica")
        assert second - first == pytest.approx(5.0, abs=0.1)

    def test_tasks_of_stopped_replicas_are_left_alone_until_all_jobs_may_have_been_added(
        self, stage: Stage
    ) -> None:
        """Else a replica that has half of its jobs would call the other half removed."""
        tasks = KnownTasks()
        tasks.add("first half", ("first", "default"), None)
        _, presence = self.presence(stage, tasks)
        stage.go_to(1)
        presence.note_look(has_listed=True)
        stage.go_to(29)
        tasks.add("second half", ("second", "default"), None)
        presence.note_look(has_listed=True)
        stage.go_to(30)
        successor_of = [retired[0] for _, retired in stage.retired]
        assert successor_of
        assert not any(successor_of)
        stage.go_to(70)
        assert stage.retired[-1][1][0] == ["first half", "second half"]

    def test_before_the_jobs_are_listed_a_replica_is_nobodys_successor(self, stage: Stage) -> None:
        tasks = KnownTasks()
        tasks.add("t", ("job", "default"), None)
        _, presence = self.presence(stage, tasks)
        presence.note_look(has_listed=False)
        stage.go_to(100)
        assert stage.retired
        assert not any(retired[0] for _, retired in stage.retired)

    def test_a_removed_task_is_retired_for_ten_minutes(self, stage: Stage) -> None:
        tasks = KnownTasks()
        tasks.add("t", ("job", "default"), None)
        _, presence = self.presence(stage, tasks)
        presence.note_look(has_listed=True)
        stage.go_to(5)
        tasks.forget(("job", "default"))
        presence.note_look(has_listed=True)
        stage.go_to(700)
        retired = [at for at, (_, dropped) in stage.retired if dropped == ["t"]]
        assert retired[0] < 5.2
        assert 570 < retired[-1] < 636

    def test_a_task_whose_job_has_come_back_is_retired_no_more(self, stage: Stage) -> None:
        tasks = KnownTasks()
        tasks.add("t", ("job", "default"), None)
        _, presence = self.presence(stage, tasks)
        presence.note_look(has_listed=True)
        stage.go_to(5)
        tasks.forget(("job", "default"))
        presence.note_look(has_listed=True)
        stage.go_to(11)
        assert stage.retired[-1][1][1] == ["t"]
        tasks.add("t", ("job", "default"), None)
        presence.note_look(has_listed=True)
        stage.go_to(20)
        assert stage.retired[-1][1][1] == []
