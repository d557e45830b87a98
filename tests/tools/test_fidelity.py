"""The instrument that compares rules: what it counts, on histories made by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.fidelity.account import Account, account, account_by_run_time
from benchmarks.fidelity.clock import (
    TravellingDatabase,
    moment,
    seconds,
)
from benchmarks.fidelity.report import goal_reached
from benchmarks.fidelity.rules import (
    RULES,
    TASK,
    TRACE_RULES,
    Granted,
    Refused,
    Rule,
    ShedLock,
    TaskLockRule,
    TaskLockWithFailover,
    TaskLockWithLeader,
)
from benchmarks.fidelity.schedules import (
    MOVES,
    WANDERS,
    Move,
    MovedSchedule,
    ScheduleAccount,
    WanderingInterval,
    account_of_moves,
    account_of_wandering,
)
from benchmarks.fidelity.short_gaps import SCHEDULES, Schedule, ShortGaps
from benchmarks.fidelity.simulation import (
    History,
    Run,
    ScheduledSimulation,
    Simulation,
)
from benchmarks.fidelity.trace import TRACES, USUAL_LATENCY, Conditions, Fire, Life, Trace

# Tests of the instrument that `make fidelity` measures with. That it works is in the gate, in
# `test_fidelity_in_short.py`.
pytestmark = pytest.mark.nightly

PERIOD = 300.0
WINDOWS = 12

CALM = Trace(Conditions("calm"), WINDOWS, seed=1)


def run(window: float, *, after: float = 1.0, takes: float = 60.0, dies: bool = False) -> Run:
    """Return a run of a window, given in periods since the beginning."""
    return made(window * PERIOD, PERIOD, window * PERIOD + after, takes, dies=dies)


def made(due: float, period: float, begun: float, takes: float, *, dies: bool = False) -> Run:
    end = begun + takes
    ended, died = (None, end) if dies else (end, None)
    return Run(TASK, "", due, begun, ended, died, period=period)


def counted(*changed: Run, without: Sequence[float] = (), late: float = 0.5) -> Account:
    """Count a history of one run per window, but for what is changed.

    A worker asked for each of the run times, and another one ``late`` seconds after it.
    """
    windows = [window for window in range(WINDOWS) if window not in without]
    runs = sorted([*map(run, windows), *changed], key=lambda run: run.begun)
    due = [window * PERIOD for window in range(WINDOWS)]
    asked = [(run.due, run.begun) for run in runs] + [(time, time + late) for time in due]
    return account(CALM, History(runs, asked))


RIGHT = Account(
    windows=WINDOWS,
    runs=WINDOWS,
    doubled=0,
    lost_with_holder=0,
    missed=0,
    skipped=0,
    unattended=0,
    overlapping=0,
    silence=pytest.approx(0.8),
    latest=1.0,
)
COUNTED = ("doubled", "lost_with_holder", "missed", "skipped", "unattended", "overlapping")

LAST = WINDOWS - 1
LONG, LATE = run(3, takes=1.5 * PERIOD), run(3, after=PERIOD + 10)
DIES, AGAIN, DIES_AGAIN = run(4, dies=True), run(4, after=100), run(4, after=100, dies=True)
ON_ANOTHER = [run(window + 0.85) for window in range(4, LAST)]
# The runs, the windows that lack their own, when the second worker asks, and what is counted.
COUNTS: dict[str, tuple[Sequence[Run], Sequence[float], float, dict[str, int]]] = {
    "one run per window": ([], [], 0.5, {}),
    "run again": ([AGAIN], [], 0.5, {"doubled": 1}),
    "in the middle, less than a window from both": ([run(4.7)], [], 0.5, {"doubled": 2}),
    "run again after a death": ([DIES, AGAIN], [4], 0.5, {}),
    "not run": ([], [4], 0.5, {"missed": 1}),
    "four not run": ([], [4, 5, 6, 9], 0.5, {"missed": 4}),
    "the last two not run": ([], [LAST - 1, LAST], 0.5, {"missed": 2}),
    "cut short": ([DIES], [4], 0.5, {"lost_with_holder": 1}),
    "cut short twice": ([DIES, DIES_AGAIN], [4], 0.5, {"lost_with_holder": 1}),
    "two cut short": (
        [DIES, DIES_AGAIN, run(5, dies=True)],
        [4, 5],
        0.5,
        {"lost_with_holder": 2},
    ),
    "cut short, and the next not run": ([DIES], [4, 5], 0.5, {"lost_with_holder": 1, "missed": 1}),
    "cut short, and the job moves": (
        [run(4.1, dies=True), *ON_ANOTHER[1:]],
        range(4, WINDOWS),
        0.5,
        {"lost_with_holder": 1},
    ),
    "cut short at the end, with nobody left": ([run(LAST, dies=True)], [LAST], 0.5, {}),
    "cut short before": ([run(LAST - 1, dies=True)], [LAST - 1], 0.5, {"lost_with_holder": 1}),
    "the job moves to another replica": (ON_ANOTHER, range(4, WINDOWS), 0.5, {}),
    "asked for too late": ([], [4], PERIOD + 1, {"unattended": 1}),
    "due during a run": ([LONG], [3, 4], 0.5, {"skipped": 1}),
    "asked for during a late run": ([LATE], [3, 4], 30, {"skipped": 1}),
    "due during a run, asked for too late": ([LONG], [3, 4], PERIOD + 1, {"skipped": 1}),
    "asked for after that run": ([LONG], [3, 4], 0.6 * PERIOD, {"missed": 1}),
    "a run during another": ([LONG], [3], 0.5, {"overlapping": 1}),
}


@pytest.mark.parametrize("case", COUNTS)
def test_what_goes_wrong_in_a_trace_is_counted(case: str) -> None:
    runs, without, late, expected = COUNTS[case]
    figures = counted(*runs, without=without, late=late)
    assert {what: getattr(figures, what) for what in COUNTED} == {
        **dict.fromkeys(COUNTED, 0),
        **expected,
    }


def test_the_times_of_an_account() -> None:
    assert counted() == RIGHT
    assert counted(DIES, without=(4,)).runs == WINDOWS - 1
    assert counted(without=(4, 5)).silence == pytest.approx(2.8)
    late = run(4, after=40, dies=True), run(4 + 1e-13, after=100)
    assert counted(*late, without=(4,)).latest == 40.0, "that of the first run"


def test_two_versions_share_a_window_by_the_shorter_period() -> None:
    runs = [run(window) for window in range(WINDOWS)]
    for later in runs[4:]:
        later.period = 10 * PERIOD

    assert account(CALM, History(runs)).doubled == WINDOWS - 5  # all but the first of the version


@pytest.mark.parametrize(
    ("skew", "after", "asked", "what"),
    [
        pytest.param(180, 150, [5 * PERIOD + 100], "missed", id="behind, asks in time"),
        pytest.param(0, 150, [5 * PERIOD + 100], "unattended", id="not behind"),
        # The next one runs 200 s before it is due.
        pytest.param(300, -200, [5 * PERIOD - 100], "overtaken", id="ahead"),
        pytest.param(
            300, -200, [5 * PERIOD - 100, 4 * PERIOD + 50], "missed", id="ahead, also before"
        ),
    ],
)
def test_a_window_is_asked_for_by_clocks_that_differ(
    skew: float, after: float, asked: list[float], what: str
) -> None:
    trace = Trace(Conditions("skewed", skew=skew), WINDOWS, seed=1)
    runs = [run(window, after=after) for window in range(WINDOWS) if window != 4]
    figures = account(trace, History(runs, [(4 * PERIOD, time) for time in asked]))
    fates = ("missed", "skipped", "overtaken", "unattended")
    assert [each for each in fates if getattr(figures, each)] == [what]
    assert getattr(figures, what) == 1


SHORT = [0.0, 1.0, 30.0, 60.0]
# Runs as (run time, begun, takes), the run times that were asked for and when, and the counts. A
# run that takes nothing is cut short.
ALL = [(due, due + 0.1, 0.4) for due in SHORT]
EARLY = [(due, due - 5, 0.5) for due in (0.0, 30.0, 60.0)]
ASKED_EARLY = [(0.0, -5.0), (30.0, 25.0), (60.0, 55.0)]
ASKED = [(due, due + late) for due in SHORT for late in (0.0, 10.0)]
AHEAD = [(0.0, 0.0, 20.0), (30.0, 21.0, 1.0), (60.0, 60.0, 1.0)]
BY_RUN_TIME: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "each once": (ALL, ASKED, {}),
    "three times": ([*ALL[:2], ALL[1], ALL[1], *ALL[2:]], ASKED, {"doubled": 2}),
    "two windows in a short gap": (ALL[1:], ASKED, {"missed": 1}),
    "cut short": ([(0.0, 0.1, 0), *ALL[1:]], ASKED, {"lost_with_holder": 1}),
    "cut short and run again": ([(0.0, 0.05, 0), *ALL], ASKED, {}),
    "asked for after a later one ran": (EARLY, [*ASKED_EARLY, (1.0, 26.0)], {"overtaken": 1}),
    "asked for before it, too": (EARLY, [*ASKED_EARLY, (1.0, 24.0), (1.0, 26.0)], {"missed": 1}),
    "asked for only during a run": (
        [(0.0, 0.0, 20.0), (60.0, 60.0, 0.5)],
        [(0.0, 0.0), (1.0, 1.0), (1.0, 11.0), (30.0, 30.0)],
        {"skipped": 1, "missed": 1},
    ),
    "asked for during a run, and too late": (AHEAD, [(1.0, 11.0), (1.0, 25.0)], {"skipped": 1}),
    "asked for between the runs": (
        AHEAD,
        [(1.0, 11.0), (1.0, 20.5), (1.0, 25.0)],
        {"missed": 1},
    ),
    "asked for by nobody": (ALL[:3], ASKED[:6], {"unattended": 1}),
}


@pytest.mark.parametrize("case", BY_RUN_TIME)
def test_what_goes_wrong_with_run_times_that_each_are_a_window_is_counted(case: str) -> None:
    runs, asked, expected = BY_RUN_TIME[case]
    history = [made(due, 1.0, begun, takes, dies=not takes) for due, begun, takes in runs]
    figures = account_by_run_time(History(history, asked), SHORT)
    counts = ("windows", *COUNTED[:-1], "overtaken")
    assert {what: getattr(figures, what) for what in counts} == {
        **dict.fromkeys(counts, 0),
        "windows": len(SHORT),
        **expected,
    }


WRONG = [
    (TaskLockRule, "doubled", False),
    (TaskLockRule, "missed", False),
    (TaskLockRule, "overlapping", False),
    (TaskLockRule, "lost_with_holder", True),
    (TaskLockWithFailover, "doubled", False),
    (TaskLockWithFailover, "missed", False),
    (TaskLockWithFailover, "overlapping", False),
    (TaskLockWithFailover, "lost_with_holder", False),
    (ShedLock, "doubled", True),
]


@pytest.mark.parametrize("short_gaps", [False, True], ids=["traces", "short gaps"])
@pytest.mark.parametrize(("rule", "what", "reached"), WRONG)
def test_the_goal_is_that_only_the_default_loses_windows_and_only_with_their_holders(
    rule: type[Rule], what: str, reached: bool, short_gaps: bool
) -> None:
    right = {kind.name: replace(RIGHT, silence=1.0) for kind in TRACE_RULES}
    wrong = {**right, rule.name: replace(right[rule.name], **{what: 1})}
    traces, gaps = ({"a": right}, {"a": wrong}) if short_gaps else ({"a": wrong}, {"a": right})

    assert goal_reached(traces, gaps, {}) is reached


@pytest.mark.parametrize("what", ["doubled", "missed", "overlapping", "lost_with_holder"])
def test_the_goal_is_that_leader_mode_loses_no_window(what: str) -> None:
    right = {kind.name: replace(RIGHT, silence=1.0) for kind in TRACE_RULES}
    led = TaskLockWithLeader.name
    wrong = {**right, led: replace(right[led], **{what: 1})}

    assert not goal_reached({"a": wrong}, {"a": right}, {})


def test_nothing_wrong_reaches_the_goal() -> None:
    right = {kind.name: replace(RIGHT, silence=1.0) for kind in TRACE_RULES}

    assert goal_reached({"a": right, "b": right}, {"a": right}, {})


GOOD = ScheduleAccount(windows=9, runs=9, doubled=0, missed=0, alarms=0, longest=1.0)


@pytest.mark.parametrize("what", ["doubled", "missed", "alarms"])
@pytest.mark.parametrize("rule", [TaskLockRule, TaskLockWithFailover, ShedLock])
def test_the_goal_is_that_a_changed_schedule_loses_nothing(rule: type[Rule], what: str) -> None:
    good = {kind.name: GOOD for kind in RULES}
    bad = {**good, rule.name: replace(GOOD, **{what: 1})}

    assert goal_reached({}, {}, {"a": good})
    assert goal_reached({}, {}, {"a": bad}) is (rule is ShedLock)


DAILY = MovedSchedule(MOVES[0], 60, seed=1)


def daily(*without: float, also: tuple[Run, ...] = ()) -> ScheduleAccount:
    """Count a history in which each replica's schedule ran, but for some run times.

    Where versions live side by side, none of theirs is in it.
    """
    due = [
        seconds(run_time)
        for begin, end, trigger in DAILY.stretches()
        for run_time in run_times_between(trigger, begin, end)
    ]
    runs = [made(at, 86400.0, at + 1, 59) for at in due if at not in without]
    runs = sorted([*runs, *also], key=lambda run: run.due)
    return account_of_moves(DAILY, History(runs))


def run_times_between(trigger: Any, begin: float, end: float) -> Iterator[Any]:
    run_time = trigger.get_next_fire_time(None, moment(begin))
    while seconds(run_time) < end:
        yield run_time
        run_time = trigger.get_next_fire_time(run_time, run_time)


def test_a_run_time_of_a_schedule_that_all_replicas_have_is_missed_or_doubled() -> None:
    begin, end, trigger = next(DAILY.stretches())
    first, second = (seconds(at) for at in list(run_times_between(trigger, begin, end))[:2])
    again = made(first, 86400.0, first + 100, 60)

    assert (daily().missed, daily().doubled) == (0, 0)
    assert daily(second).missed == 1
    assert daily(also=(again,)).doubled == 1


def wandering(*starts: float) -> ScheduleAccount:
    trace = WanderingInterval(WANDERS[0], 4, seed=1)
    return account_of_wandering(trace, History([made(at, 300.0, at, 9) for at in starts]))


def test_an_interval_jobs_gap_above_a_tenth_of_a_period_and_a_poll_is_missed() -> None:
    assert wandering(290, 590, 925).missed == 0
    assert wandering(290, 628, 925).missed == 1
    assert wandering(290, 590, 800, 925).doubled == 2


def test_every_replica_of_a_moved_schedule_has_its_versions_trigger() -> None:
    lives = list(DAILY.lives())
    hours = {str(life.trigger.fields[5]) for life in lives}

    assert hours <= {"6", "10", "11", "16", "22"}
    assert len(hours) > 2
    for begin, end, trigger in DAILY.stretches():
        present = [life for life in lives if life.joined < end and life.left > begin]
        assert {str(life.trigger) for life in present} == {str(trigger)}


@pytest.mark.parametrize("kind", [TaskLockRule, TaskLockWithFailover], ids=lambda kind: kind.name)
def test_a_daily_job_that_deployments_move_loses_no_run_time(
    kind: type[Rule], database: TravellingDatabase
) -> None:
    figures = account_of_moves(DAILY, ScheduledSimulation(DAILY, kind(database), database).live())

    assert figures.windows > 30
    assert (figures.doubled, figures.missed, figures.alarms) == (0, 0, 0)


def test_a_seed_repeats_its_trace() -> None:
    one, same, another = (Trace(TRACES[-1], 300, seed) for seed in (1, 1, 2))

    assert list(one.lives()) == list(same.lives()) != list(another.lives())
    assert one.job(5, 1, PERIOD) == same.job(5, 1, PERIOD) != another.job(5, 1, PERIOD)


@pytest.mark.parametrize(
    "kind", [TaskLockWithFailover, TaskLockWithLeader], ids=lambda kind: kind.name
)
def test_polls_that_are_left_out_would_have_found_nothing(
    kind: type[TaskLockRule], database: TravellingDatabase
) -> None:
    conditions = next(one for one in TRACES if one.name == "rolling deployments at an offset")
    trace = Trace(replace(conditions, killed=0.2), 12, seed=1)
    rule = kind(database)
    some, every = (
        Simulation(trace, rule, database, every_poll=every_poll).live()
        for every_poll in (False, True)
    )

    assert any(run.ended is None for run in some.runs)
    assert some == every


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


def test_a_rolling_deployment_replaces_one_replica_after_the_other() -> None:
    trace = Trace(Conditions("rolling", rolling=True), 300, seed=1)
    lives: dict[str, list[Life]] = {}
    for life in sorted(trace.lives(), key=lambda life: life.joined):
        lives.setdefault(life.name.split(" of ")[0], []).append(life)
    pauses = [new.joined - old.left for of in lives.values() for old, new in pairwise(of)]
    replaced = [[life for life in of if life.left < trace.end] for of in lives.values()]
    turns = list(zip(*([life.left for life in of] for of in replaced), strict=True))

    assert min(pauses) < 0 < max(pauses)
    assert -30 <= min(pauses) <= max(pauses) <= 30
    assert len(turns) > 10
    assert all(0 < later - earlier < 120 for turn in turns for earlier, later in pairwise(turn))
    assert {life.killed for of in replaced for life in of} == {True, False}
    assert not any(of[-1].killed for of in lives.values())


def test_replicas_that_share_run_times_mean_the_same_by_them() -> None:
    shared = Trace(Conditions("shared", skew=180), 20, seed=1)
    fires = [list(shared.fires(life)) for life in shared.lives()]

    assert len({fire.time for of in fires for fire in of[:1]}) == len(fires)
    assert all(fire.exact and fire.run_time % PERIOD == 0 for of in fires for fire in of)
    own = Trace(Conditions("own", offsets=True), 20, seed=1)
    assert not any(fire.exact for life in own.lives() for fire in own.fires(life))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_some_replica_has_each_run_time_of_a_schedule(schedule: Schedule) -> None:
    trace = ShortGaps(schedule, 200, seed=1)
    lives = list(trace.lives())
    fires = [(life, fire) for life in lives for fire in trace.fires(life)]

    assert {fire.run_time for _, fire in fires} == set(trace.run_times)
    assert all(fire.time + life.skew == pytest.approx(fire.run_time) for life, fire in fires)
    assert all(life.joined <= fire.time < life.left for life, fire in fires)
    assert [trace.window(time) for time in trace.run_times] == list(range(200))
    following = dict(pairwise(trace.run_times))
    assert all(fire.exact for _, fire in fires)
    assert all(
        fire.run_time + fire.period == following[fire.run_time]
        for _, fire in fires
        if fire.run_time in following
    )


def test_the_run_times_of_a_schedule_are_those_of_its_trigger() -> None:
    twice_a_minute = Schedule("short", {"second": "0,1,30"}, skew=5)

    assert ShortGaps(twice_a_minute, 5, seed=1).run_times == [30.0, 60.0, 61.0, 90.0, 120.0]


def test_the_databases_clock_steps_back_and_forward() -> None:
    trace = ShortGaps(Schedule("steps", {"second": "*/5"}, step=30), 500, seed=1)
    ahead = [trace.clock_ahead(time) for time in trace.run_times]

    assert set(ahead) == {0.0, -30.0}
    assert sum(one != other for one, other in pairwise(ahead)) == 4


def test_windows_are_numbered_across_a_change_of_the_period() -> None:
    trace = Trace(Conditions("changed", deployments=True), 400, seed=1)
    times = [trace.end * part / 10_000 for part in range(10_000)]
    numbers = [trace.window(time) for time in times]

    assert {trace.period(time) for time in times} >= {300.0, 120.0}
    assert numbers[0] == 0
    assert numbers[-1] == 399
    assert all(later - earlier in {0, 1} for earlier, later in pairwise(numbers))


@pytest.mark.parametrize("conditions", TRACES, ids=lambda conditions: conditions.name)
def test_in_leader_mode_the_windows_of_a_trace_are_run_as_often_as_without(
    conditions: Conditions, database: TravellingDatabase
) -> None:
    trace = Trace(conditions, 60, seed=1)
    without, led = (
        account(trace, Simulation(trace, kind(database), database).live())
        for kind in (TaskLockWithFailover, TaskLockWithLeader)
    )

    assert led.runs == without.runs
    assert (led.doubled, led.missed, led.lost_with_holder, led.overlapping) == (0, 0, 0, 0)


def test_in_leader_mode_a_run_is_late_by_the_start_of_a_replica_and_a_look_at_most(
    database: TravellingDatabase,
) -> None:
    """A replica that has just started waits as long as one that follows."""
    trace = Trace(Conditions("offsets", offsets=True), 60, seed=1)
    without, led = (
        account(trace, Simulation(trace, kind(database), database).live())
        for kind in (TaskLockWithFailover, TaskLockWithLeader)
    )

    assert without.latest <= USUAL_LATENCY
    a_look = 2.0 + TaskLockWithLeader.poll_interval
    assert 2.0 <= led.latest <= 2 * a_look + USUAL_LATENCY


class CountingClaims(TaskLockWithLeader):
    """Counts the claims."""

    claims = 0

    def claim(self, replica: str, fire: Fire, *, stable: bool) -> Granted | Refused:
        self.claims += 1
        return super().claim(replica, fire, stable=stable)


def test_in_leader_mode_a_window_costs_one_claim(database: TravellingDatabase) -> None:
    rule = CountingClaims(database)
    history = Simulation(CALM, rule, database).live()

    assert len(history.runs) == rule.claims == WINDOWS
    assert len(history.asked) == 3 * WINDOWS  # the followers were refused without a claim


@pytest.mark.parametrize(
    "kind",
    [TaskLockRule, TaskLockWithFailover, TaskLockWithLeader],
    ids=lambda kind: kind.name,
)
@pytest.mark.parametrize(
    "trace",
    [
        *(Trace(conditions, 40, seed=1) for conditions in TRACES),
        *(ShortGaps(schedule, 40, seed=1) for schedule in SCHEDULES),
    ],
    ids=lambda trace: trace.conditions.name,
)
def test_the_rule_in_python_makes_the_same_history_as_the_statements(
    trace: Trace,
    kind: type[Rule],
    database: TravellingDatabase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_statements = Simulation(trace, kind(database), database).live()
    monkeypatch.setattr(database, "in_python", True)
    in_python = Simulation(trace, kind(database), database).live()

    assert by_statements.runs
    assert in_python == by_statements


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_the_rule_in_python_moves_with_a_schedule_as_the_statements_do(
    move: Move, database: TravellingDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = MovedSchedule(move, 20, seed=1)
    by_statements = ScheduledSimulation(moved, TaskLockRule(database), database).live()
    monkeypatch.setattr(database, "in_python", True)
    in_python = ScheduledSimulation(moved, TaskLockRule(database), database).live()

    assert by_statements.runs
    assert in_python == by_statements
