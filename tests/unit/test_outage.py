"""When the rows are believed: after a start, an outage and a step of the clock."""

from __future__ import annotations

import logging

import psycopg
import pytest

from apscheduler_tasklock import TaskLockDatabaseError
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.sqlstates import (
    ServerFullError,
    TableLockedError,
    UnconfirmedError,
)
from apscheduler_tasklock._database.timings import Timings

NO_ROUTE = TaskLockDatabaseError("no route")
FULL = ServerFullError("too many clients")
ATTEMPT = 4.0
TIMINGS = Timings(recovery_grace=2.5, doubt_interval=120.0)
GRACE = ATTEMPT + TIMINGS.recovery_grace
UNLOCKED_AFTER = TIMINGS.unlocked_after


class Seen:
    """What a replica has seen of its database, on a clock that goes on only when a test says so."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self.outage = Outage("db", ATTEMPT, TIMINGS)

    @property
    def stable(self) -> bool:
        return self.outage.stable

    def go_on(self, seconds: float) -> None:
        self._clock[0] += seconds

    def answer(self, *, took: float = 0.0) -> None:
        """Answer a request as the replica's thread sends it: after a probe, if there is one."""
        if self.outage.is_probed:
            self.outage.prove()
        self.go_on(took)
        self.outage.end(took)

    def fail(self, *, full: bool = False) -> None:
        self.outage.begin(FULL if full else NO_ROUTE)

    def becomes_stable_after_the_grace(self) -> None:
        assert not self.stable
        self.go_on(GRACE - 0.1)
        assert not self.stable
        self.go_on(0.2)
        assert self.stable


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    clock = [1000.0]
    monkeypatch.setattr("apscheduler_tasklock._database.outage.time.monotonic", lambda: clock[0])
    return Seen(clock)


def test_nothing_is_believed_before_the_first_answer(seen: Seen) -> None:
    seen.go_on(3600)
    assert not seen.stable


def test_rows_are_believed_some_time_after_the_first_answer(seen: Seen) -> None:
    seen.answer()
    assert seen.outage.grace == GRACE
    seen.becomes_stable_after_the_grace()


def test_a_large_fleet_has_a_longer_grace(seen: Seen) -> None:
    """Its replicas come back all at once, and each takes its time at the server."""
    seen.answer()
    seen.outage.live_replicas = 250
    assert seen.outage.grace == GRACE
    seen.outage.live_replicas = 1000  # as the first look tells, when the grace has begun
    assert seen.outage.grace == ATTEMPT + 10.0
    seen.go_on(ATTEMPT + 9.9)
    assert not seen.stable
    seen.go_on(0.2)
    assert seen.stable


def test_a_statement_that_took_longer_than_a_third_of_a_lease_is_doubted(seen: Seen) -> None:
    """Others could not renew such a lease meanwhile."""
    for lease in (60.0, 6.0, None, 30.0):
        seen.outage.note_lease(lease)
    seen.answer()
    seen.go_on(GRACE)
    seen.answer(took=1.9)
    assert seen.stable
    seen.answer(took=2.1)
    seen.becomes_stable_after_the_grace()


def test_a_database_that_always_answers_late_is_believed_now_and_then(seen: Seen) -> None:
    """Else a dead run would stand against its task for as long as that goes on."""
    seen.outage.note_lease(6.0)
    seen.answer()
    seen.go_on(GRACE)
    believed = []
    for _ in range(8):
        seen.answer(took=2.1)
        seen.go_on(1.0)
        believed.append(seen.stable)
    assert True in believed
    assert False in believed


def test_without_a_lease_a_late_answer_is_no_reason_to_doubt(seen: Seen) -> None:
    seen.answer()
    seen.go_on(GRACE)
    seen.answer(took=60.0)
    assert seen.stable


def test_further_answers_do_not_move_that(seen: Seen) -> None:
    seen.answer()
    for _ in range(10):
        seen.go_on(GRACE / 10 + 0.01)
        seen.answer()
    assert seen.stable


def test_nothing_is_believed_in_an_outage_and_until_some_time_after_it(seen: Seen) -> None:
    seen.answer()
    seen.go_on(GRACE)
    seen.fail()
    assert not seen.stable
    seen.go_on(3600)
    assert not seen.stable
    seen.answer()
    seen.becomes_stable_after_the_grace()


def test_a_server_that_is_full_again_and_again_is_believed_now_and_then(seen: Seen) -> None:
    """Else a dead run would stand against its task for as long as that goes on."""
    seen.answer()
    seen.go_on(GRACE)
    seen.fail(full=True)
    seen.answer()
    assert not seen.stable
    for _ in range(9):
        seen.go_on(GRACE / 10)
        seen.fail(full=True)
        seen.answer()
        assert not seen.stable
    seen.go_on(GRACE / 10 + 0.1)
    assert seen.stable
    seen.fail(full=True)
    assert not seen.stable
    seen.fail()
    seen.answer()
    seen.becomes_stable_after_the_grace()


def test_a_server_that_was_full_for_longer_than_the_doubt_is_doubted_anew(seen: Seen) -> None:
    """As after a restart, when all come back at once: holders may be among those left out."""
    seen.answer()
    seen.go_on(GRACE)
    seen.outage.idle_connection_ended(by_server=True)
    seen.fail(full=True)
    seen.go_on(GRACE + 1)
    seen.answer()
    seen.becomes_stable_after_the_grace()


def test_an_outage_in_which_the_server_was_also_full_is_one(seen: Seen) -> None:
    seen.answer()
    seen.fail()
    seen.fail(full=True)
    seen.go_on(GRACE)
    seen.answer()
    seen.becomes_stable_after_the_grace()


def test_an_outage_at_the_start_counts_from_its_end(seen: Seen) -> None:
    seen.fail()
    seen.go_on(3600)
    seen.answer()
    seen.becomes_stable_after_the_grace()


def test_the_connection_that_ended_an_outage_may_break_in_the_next_one(seen: Seen) -> None:
    seen.fail()
    seen.answer()
    seen.go_on(GRACE)
    assert seen.stable
    seen.fail()
    seen.answer()
    seen.becomes_stable_after_the_grace()


def test_nothing_is_believed_for_some_time_after_a_step_of_the_clock(
    seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    seen.answer()
    seen.go_on(GRACE)
    assert seen.stable
    seen.outage.clock_stepped(-30)
    seen.answer()
    seen.becomes_stable_after_the_grace()
    [line] = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "has stepped by -30.0 sec" in line.getMessage()


def test_whoever_is_to_believe_does_unless_it_knows_of_an_outage(seen: Seen) -> None:
    seen.outage.believe()
    assert seen.stable
    seen.answer()
    assert seen.stable

    seen.fail()
    seen.outage.believe()
    assert not seen.stable
    seen.answer()
    seen.outage.believe()
    seen.becomes_stable_after_the_grace()


def test_an_outage_is_logged_once_when_it_begins_and_once_when_it_ends(
    seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):
        seen.fail()
    seen.go_on(7)
    for _ in range(3):
        seen.answer()
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in logged] == ["WARNING", "INFO"]
    assert "is unavailable (db): no route" in logged[0][1]
    assert "7.0 sec" in logged[1][1]


def test_who_has_a_table_locked_is_told_once_it_is_known(
    seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    """A busy server may not say so the first time."""
    caplog.set_level(logging.INFO)
    locked = TableLockedError("no answer, since pid 7 has it locked")
    for error in (NO_ROUTE, locked, NO_ROUTE, locked):
        seen.outage.begin(error)
        seen.go_on(1)
    seen.answer()
    seen.go_on(UNLOCKED_AFTER)
    seen.answer()
    assert [record.getMessage() for record in caplog.records] == [
        "The task lock database is unavailable (db): no route (each run that is skipped is logged)",
        "A task lock table is locked (db): no answer, since pid 7 has it locked (each run that "
        "is skipped is logged)",
        "The task lock tables are no longer locked (db), 4.0 sec after this replica noticed",
    ]
    caplog.clear()
    seen.go_on(1)
    seen.outage.begin(NO_ROUTE)  # the next outage is one of its own
    assert "is unavailable" in caplog.text


def test_a_locked_table_is_told_once_although_statements_without_it_are_answered(
    seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    locked = TableLockedError("no answer, since pid 7 has it locked")
    for _ in range(4):
        seen.outage.begin(locked)
        seen.go_on(UNLOCKED_AFTER - 1)
        seen.answer()
        assert seen.outage.reason is None
        seen.go_on(UNLOCKED_AFTER - 1)
        seen.answer()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    seen.go_on(2)
    for _ in range(2):
        seen.answer()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert f"{7 * (UNLOCKED_AFTER - 1):.1f} sec after" in caplog.text
    seen.outage.begin(locked)  # another lock
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]


@pytest.mark.parametrize("by_server", [False, True])
def test_the_end_of_an_idle_connection_is_doubted(seen: Seen, by_server: bool) -> None:
    """The server may have crashed: holders that could not renew are given time to."""
    seen.answer()
    seen.go_on(GRACE)
    seen.outage.idle_connection_ended(by_server)
    seen.becomes_stable_after_the_grace()


def test_a_proxy_that_ends_idle_connections_again_and_again_is_not_doubted_each_time(
    seen: Seen,
) -> None:
    """A dead run would stand against its task for as long as it does."""
    seen.answer()
    seen.go_on(GRACE)
    seen.outage.idle_connection_ended(by_server=False)
    believed = []
    for _ in range(4):
        seen.go_on(GRACE + 0.1)
        seen.outage.idle_connection_ended(by_server=False)
        believed.append(seen.stable)
    assert believed == [True] * 4
    seen.go_on(TIMINGS.doubt_interval)
    seen.outage.idle_connection_ended(by_server=False)
    seen.becomes_stable_after_the_grace()


def test_a_server_that_says_that_it_ends_connections_is_doubted_each_time(seen: Seen) -> None:
    seen.answer()
    for _ in range(3):
        seen.go_on(GRACE + 0.1)
        seen.outage.idle_connection_ended(by_server=True)
        seen.becomes_stable_after_the_grace()


def test_an_idle_connection_that_ends_in_doubt_counts_for_nothing(seen: Seen) -> None:
    """As one that was opened before an outage; the next one may be of a crash."""
    seen.answer()
    seen.outage.idle_connection_ended(by_server=False)
    seen.becomes_stable_after_the_grace()
    seen.outage.idle_connection_ended(by_server=False)
    seen.becomes_stable_after_the_grace()


def test_an_answer_ends_no_outage_of_writes(seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    """A read-only server answers reads, also those of a replica that has nothing to write."""
    caplog.set_level(logging.INFO)
    seen.outage.begin(TaskLockDatabaseError("the server is read-only"))
    seen.outage.end()
    assert seen.outage.reason == "the server is read-only"
    seen.outage.begin(UnconfirmedError("commits wait"))
    seen.go_on(7)
    seen.outage.prove()
    assert [record.getMessage() for record in caplog.records] == [
        "The task lock database is unavailable (db): the server is read-only (each run that is "
        "skipped is logged)",
        "The task lock database is back (db), 7.0 sec after this replica noticed: first the server "
        "was read-only, at last commits were not confirmed",
    ]


def test_what_fails_for_some_requests_alone_is_one_outage_until_none_has_failed_for_a_while(
    seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk fails inserts, and answers everything else meanwhile."""
    caplog.set_level(logging.INFO)
    full = TaskLockDatabaseError("no space left on device")
    full.__cause__ = psycopg.errors.DiskFull()
    for _ in range(3):
        seen.outage.begin(full)
        assert not seen.outage.is_probed
        seen.go_on(1)
        seen.answer()
        assert seen.outage.reason is None
    seen.go_on(UNLOCKED_AFTER)
    seen.answer()
    assert [record.getMessage() for record in caplog.records] == [
        "The task lock database is unavailable (db): no space left on device (each run that is "
        "skipped is logged)",
        "The task lock database is back (db), 3.0 sec after this replica noticed",
    ]


def test_a_row_that_stays_locked_lets_the_probe_be_sent(seen: Seen) -> None:
    asked = 1000.0
    seen.outage.note_locked(asked)
    assert not seen.outage.is_probed
    seen.go_on(2)
    seen.outage.note_locked(asked)
    assert seen.outage.is_probed
    seen.outage.prove()
    assert not seen.outage.is_probed
    assert seen.outage.reason is None


def test_a_row_that_stays_locked_ends_no_outage_of_other_requests(seen: Seen) -> None:
    """A probe is confirmed while a disk is too full for what has failed."""
    full = TaskLockDatabaseError("no space left on device")
    full.__cause__ = psycopg.errors.DiskFull()
    seen.outage.begin(full)
    asked = 1000.0
    seen.go_on(2)
    seen.outage.note_locked(asked)
    assert not seen.outage.is_probed


def test_an_outage_covers_what_lies_between_its_begin_and_its_end(seen: Seen) -> None:
    """It began up to an attempt before it was noticed."""
    began = 1000.0 + 50
    seen.answer()
    assert not seen.outage.has_covered(began, began)
    seen.go_on(50)
    seen.fail()
    seen.go_on(20)
    assert seen.outage.has_covered(began - ATTEMPT, began + 20)
    seen.answer()
    covered = [(-ATTEMPT, 20), (0, 1), (-ATTEMPT - 1, 1), (19, 21), (21, 22)]
    told = [seen.outage.has_covered(began + first, began + last) for first, last in covered]
    assert told == [True, True, False, False, False]
