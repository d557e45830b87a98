"""The upper bound of the database's time. All readings are made up: there is no waiting."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from apscheduler_tasklock._lock.database_clock import DRIFT, DatabaseClock

T = datetime(2025, 6, 6, 10, tzinfo=timezone.utc)


def after(seconds: float) -> datetime:
    return T + timedelta(seconds=seconds)


def learnt(sent: float, answered: float, database: float) -> DatabaseClock:
    """Return a clock with one answer; the database's time is in seconds after T."""
    clock = DatabaseClock()
    assert learn(clock, sent, answered, database)
    return clock


def learn(clock: DatabaseClock, sent: float, answered: float, database: float) -> bool:
    return clock.learn(
        sent=sent,
        answered=answered,
        database_time=after(database),
        bound=clock.latest(sent),
    )


def test_nothing_is_known_before_the_first_answer() -> None:
    assert DatabaseClock().latest(100) is None


def test_first_answer_bounds_from_when_it_was_asked() -> None:
    # The database read its clock somewhere between 100 and 104: at the earliest at 100.
    clock = learnt(100, 104, 0)
    assert clock.latest(100) == after(0)
    assert clock.latest(110) == after(10 * (1 + DRIFT))


def test_bound_relaxes_by_drift_only() -> None:
    clock = learnt(0, 0, 0)
    assert clock.latest(1000) == after(1001)
    assert clock.latest(1_000_000) == after(1_001_000)


def test_quicker_answer_tightens_the_bound() -> None:
    clock = learnt(0, 5, 5)  # true offset 0, but it took 5 s to be read
    assert learn(clock, 10, 10, 10)
    assert clock.latest(10) == after(10)


def test_slower_answer_does_not_loosen_the_bound() -> None:
    clock = learnt(0, 0, 0)
    assert learn(clock, 10, 14, 14)
    assert clock.latest(14) == after(14 * (1 + DRIFT))


def test_each_tight_answer_takes_the_drift_back() -> None:
    clock = learnt(0, 0, 0)
    for second in range(1000, 10_000, 1000):
        assert learn(clock, second, second, second)
    assert clock.latest(9000) == after(9000)


@pytest.mark.parametrize("rate", [1 - DRIFT / 2, 1, 1 + DRIFT / 2])
def test_clock_that_drifts_is_no_jump(rate: float) -> None:
    clock = learnt(0, 0.01, 0)
    for second in range(60, 36_000, 60):
        assert learn(clock, second, second + 0.01, second * rate)
        latest = clock.latest(second)
        assert latest is not None
        assert after(second * rate) <= latest


def test_jump_ahead_is_noticed_once_and_learnt() -> None:
    clock = learnt(0, 1, 1)
    assert not learn(clock, 10, 11, 3600)
    assert clock.latest(10) == after(3600)
    assert learn(clock, 20, 21, 3611)


def test_jump_ahead_by_less_than_the_answer_took_is_none() -> None:
    clock = learnt(0, 0, 0)
    assert learn(clock, 10, 12, 12)
    assert not learn(clock, 20, 22, 22.5)


def test_jump_is_noticed_by_every_statement_that_was_under_way() -> None:
    clock = learnt(0, 0, 0)
    bounds = [clock.latest(10), clock.latest(10)]
    for bound in bounds:  # two threads: the first answer mends the clock for later statements
        assert not clock.learn(sent=10, answered=11, database_time=after(3600), bound=bound)
    assert learn(clock, 20, 21, 3611)


def test_jump_back_moves_the_bound_back() -> None:
    clock = learnt(0, 1, 1)
    assert learn(clock, 10, 11, -3600)
    assert clock.latest(10) == after(-3600)
    assert not learn(clock, 20, 21, 10)  # and ahead again


def test_stall_between_reading_and_sending_is_seen() -> None:
    # A claim reads its clocks at 100, stalls, and reaches the database at 130.
    clock = learnt(0, 0.1, 0)
    claimed = clock.latest(100)
    assert claimed is not None
    assert claimed < after(130)
    # Answers of other threads meanwhile do not excuse it either.
    assert learn(clock, 129.9, 130, 130)
    again = clock.latest(100)
    assert again is not None
    assert again < after(101)


def test_bound_of_an_earlier_moment_is_no_lower_than_the_database_was() -> None:
    # Two threads: one reads its clocks at 100, the other learns at 130 before it can ask.
    clock = learnt(130, 130, 130)
    latest = clock.latest(100)
    assert latest is not None
    assert after(100) <= latest <= after(100.1)


def test_answers_may_arrive_out_of_order() -> None:
    clock = learnt(100, 100.1, 100)
    assert learn(clock, 50, 120, 80)
    assert clock.latest(100) == after(100)


# Steps of the clock


class Stepped:
    """A clock, and the steps that it reported."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.clock = DatabaseClock(self.steps.append)

    def learn(self, sent: float, answered: float, database: float) -> None:
        learn(self.clock, sent, answered, database)


@pytest.mark.parametrize(
    ("database", "step"),
    [(3600.0, 3590.0), (-3600.0, -3610.0), (12.0, 2.0), (8.0, -2.0), (10.9, None), (9.1, None)],
)
def test_a_step_is_reported_once_with_its_length(database: float, step: float | None) -> None:
    stepped = Stepped()
    stepped.learn(0, 0, 0)
    stepped.learn(10, 10, database)
    assert stepped.steps == ([] if step is None else [pytest.approx(step)])
    stepped.learn(20, 20, database + 10)
    assert len(stepped.steps) == (step is not None)


def test_the_first_answer_is_no_step() -> None:
    stepped = Stepped()
    stepped.learn(0, 0, 1_000_000)
    assert not stepped.steps


@pytest.mark.parametrize("rate", [1 - DRIFT / 2, 1 + DRIFT / 2])
def test_a_drift_is_no_step_after_any_time(rate: float) -> None:
    stepped = Stepped()
    for second in (0, 60, 36_000, 1_000_000):
        stepped.learn(second, second, second * rate)
    assert not stepped.steps


@pytest.mark.parametrize("database", [10.0, 15.0, 20.0])
def test_an_answer_that_took_long_is_no_step(database: float) -> None:
    stepped = Stepped()
    stepped.learn(0, 0, 0)
    stepped.learn(10, 20, database)  # read at any moment of these ten seconds
    stepped.learn(30, 30, 30)
    assert not stepped.steps


def test_answers_out_of_order_are_no_step() -> None:
    stepped = Stepped()
    stepped.learn(100, 100.1, 100)
    stepped.learn(50, 120, 80)
    stepped.learn(121, 121, 121)
    assert not stepped.steps
