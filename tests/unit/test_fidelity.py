"""The instrument that compares rules: what it counts, on histories made by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.fidelity.account import Account, account
from benchmarks.fidelity.simulation import History, Run
from benchmarks.fidelity.trace import TRACES, Conditions, Trace

PERIOD = 300.0
WINDOWS = 12

CALM = Trace(Conditions("calm"), WINDOWS, seed=1)


def run(window: float, *, after: float = 1.0, takes: float = 60.0, died: bool = False) -> Run:
    """Return a run of a window, given in periods since the beginning."""
    start = window * PERIOD + after
    return Run(window * PERIOD, PERIOD, start, start + takes, died)


def counted(*changed: Run, without: tuple[float, ...] = (), late: float = 0.5) -> Account:
    """Count a history of one run per window, but for what is changed.

    A worker asked for each of the run times, and another one ``late`` seconds after it.
    """
    windows = [window for window in range(WINDOWS) if window not in without]
    runs = sorted([*map(run, windows), *changed], key=lambda run: run.start)
    due = [window * PERIOD for window in range(WINDOWS)]
    asked = [(run.run_time, run.start) for run in runs] + [(time, time + late) for time in due]
    return account(CALM, History(runs, asked))


RIGHT = Account(
    windows=WINDOWS,
    runs=WINDOWS,
    doubled=0,
    missed=0,
    skipped=0,
    unattended=0,
    overlapping=0,
    silence=pytest.approx(0.8),
)


def test_one_run_per_window_is_right() -> None:
    assert counted() == RIGHT


def test_a_window_run_again_is_doubled() -> None:
    assert counted(run(4, after=100)).doubled == 1


def test_a_run_in_the_middle_of_the_period_is_doubled() -> None:
    assert counted(run(4.7)).doubled == 2  # it is less than a window away from both


def test_a_window_run_again_because_its_holder_died_is_not() -> None:
    figures = counted(run(4, died=True), run(4, after=100), without=(4,))

    assert (figures.doubled, figures.missed) == (0, 0)


def test_a_window_that_was_asked_for_and_not_run_is_missed() -> None:
    assert counted(without=(4,)).missed == 1
    assert counted(without=(4, 5, 6, 9)).missed == 4


def test_a_window_whose_run_died_is_missed() -> None:
    figures = counted(run(4, died=True), without=(4,))

    assert (figures.missed, figures.skipped) == (1, 0)


def test_a_window_that_no_worker_asked_for_in_time_is_unattended() -> None:
    figures = counted(without=(4,), late=PERIOD + 1)

    assert (figures.missed, figures.unattended) == (0, 1)


def test_a_window_that_is_due_during_a_run_is_skipped() -> None:
    figures = counted(run(3, takes=1.5 * PERIOD), without=(3, 4))

    assert (figures.missed, figures.skipped, figures.overlapping) == (0, 1, 0)


def test_a_window_that_is_asked_for_only_during_a_late_run_is_skipped() -> None:
    figures = counted(run(3, after=PERIOD + 10), without=(3, 4), late=30)

    assert (figures.missed, figures.skipped) == (0, 1)


def test_a_window_that_is_due_during_a_run_and_asked_for_too_late_is_skipped() -> None:
    figures = counted(run(3, takes=1.5 * PERIOD), without=(3, 4), late=PERIOD + 1)

    assert (figures.missed, figures.skipped, figures.unattended) == (0, 1, 0)


def test_a_window_that_is_asked_for_after_that_run_is_missed() -> None:
    figures = counted(run(3, takes=1.5 * PERIOD), without=(3, 4), late=0.6 * PERIOD)

    assert (figures.missed, figures.skipped) == (1, 0)


def test_a_run_that_begins_during_another_overlaps() -> None:
    assert counted(run(3, takes=1.5 * PERIOD), without=(3,)).overlapping == 1


def test_a_run_that_died_overlaps_with_nothing_later() -> None:
    assert counted(run(4, died=True), run(4, after=100), without=(4,)).overlapping == 0


def test_a_job_that_moves_to_another_replicas_offset_loses_nothing() -> None:
    later = [run(window + 0.85) for window in range(4, WINDOWS - 1)]

    figures = counted(*later, without=tuple(range(4, WINDOWS)))

    assert (figures.doubled, figures.missed) == (0, 0)


def test_the_last_windows_count_as_well() -> None:
    assert counted(without=(WINDOWS - 2, WINDOWS - 1)).missed == 2


def test_two_versions_share_a_window_by_the_shorter_period() -> None:
    runs = [run(window) for window in range(WINDOWS)]
    for later in runs[4:]:
        later.period = 10 * PERIOD

    assert account(CALM, History(runs)).doubled == WINDOWS - 5  # all but the first of the version


def test_silence_is_told_in_periods() -> None:
    assert counted(without=(4, 5)).silence == pytest.approx(2.8)


def test_a_seed_repeats_its_trace() -> None:
    one, same, another = (Trace(TRACES[-1], 300, seed) for seed in (1, 1, 2))

    assert list(one.lives()) == list(same.lives()) != list(another.lives())
    assert one.job(5, 1, PERIOD) == same.job(5, 1, PERIOD) != another.job(5, 1, PERIOD)


@pytest.mark.parametrize("conditions", TRACES, ids=lambda conditions: conditions.name)
def test_somebody_lives_at_every_moment_of_a_trace(conditions: Conditions) -> None:
    trace = Trace(conditions, 300, seed=1)
    lives = sorted(trace.lives(), key=lambda life: life.joined)
    last, gaps = 0.0, []
    for life in lives:
        gaps.append(life.joined - last)
        last = max(last, life.left)

    assert last >= trace.end
    assert max(gaps) <= 60.0  # that long a deployment may take


def test_windows_are_numbered_across_a_change_of_the_period() -> None:
    trace = Trace(Conditions("changed", deployments=True), 400, seed=1)
    times = [trace.end * part / 10_000 for part in range(10_000)]
    numbers = [trace.window(time) for time in times]

    assert {trace.period(time) for time in times} >= {300.0, 120.0}
    assert numbers[0] == 0
    assert numbers[-1] == 399
    assert all(later - earlier in {0, 1} for earlier, later in pairwise(numbers))
