"""The demo's judgement, on ledgers made by hand with each fault in them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from apscheduler_tasklock.demo import history
from apscheduler_tasklock.demo.fires import Fires
from apscheduler_tasklock.demo.fleet import ReplicaEvent
from apscheduler_tasklock.demo.judgement import DemoTask, Judgement, Takeover, judged
from apscheduler_tasklock.demo.views import (
    compare_with_no_lock,
    describe_event,
    describe_takeovers,
    explain_summary,
    summary,
)

BASE = 1_800_000_000.123456
TASK = DemoTask("task", 3, about="")

# The events of a run.
Run = list[history.Event]


def run(
    token: int,
    replica: int,
    time: float,
    took: float | None = 0.5,
    *,
    late: float = 0.0,
    takeover: bool = False,
) -> Run:
    """Return the events of a run.

    :param time: the run time
    :param took: ``None`` if it did not end
    :param late: how long after its run time it started
    """
    started = BASE + time + late
    told = [("begin", started)] + [("end", started + (took or 0.0))] * (took is not None)
    return [
        history.Event(at, kind, str(replica), "task", token, BASE + time, takeover=takeover)
        for kind, at in told
    ]


def judge_deaths(runs: Sequence[Run], deaths: dict[int, float]) -> Judgement:
    """Judge runs, with replicas that were killed at these times."""
    events = [event for run in runs for event in run]
    events += [history.Event(BASE + at, "killed", str(replica)) for replica, at in deaths.items()]
    return judged(events, [], TASK)


# Run times, fires, and windows, runs, doubled and missed.
GRID: dict[str, tuple[list[float], list[float], tuple[int, int, int, int]]] = {
    "nothing": ([], [], (0, 0, 0, 0)),
    "clean": ([0, 3, 6], [0, 0, 3, 6], (3, 3, 0, 0)),
    "tripled": ([0, 3, 3, 3], [0, 3], (2, 4, 2, 0)),
    "missed by all, not even fired": ([0, 9], [0, 9], (4, 2, 0, 2)),
    "first missed": ([3, 6], [0, 3, 6], (3, 2, 0, 1)),
    "last missed": ([0, 3], [0, 3, 6], (3, 2, 0, 1)),
    "all missed": ([], [0, 3, 6], (3, 0, 0, 3)),
    "doubled does not make up for missed": ([0, 0, 6], [0, 3, 6], (3, 3, 1, 1)),
    "any order, runs whose event was lost": ([6, 0, 3], [], (3, 3, 0, 0)),
}


@pytest.mark.parametrize("case", GRID)
def test_judgement_on_a_grid(case: str) -> None:
    runs, fires, expected = GRID[case]
    events = [event for token, time in enumerate(runs, 1) for event in run(token, 1, time)]
    found = judged(events, [BASE + time for time in fires], TASK)
    assert found.takeovers == []
    assert (found.windows, found.runs, found.doubled, found.missed) == expected


def test_judgement_counts_the_runs_of_each_replica() -> None:
    runs = [run(n + 1, replica, 3.0 * n) for n, replica in enumerate([1, 3, 3, 1, 1])]
    assert judge_deaths(runs, {}).by_replica == {1: 3, 3: 2}


def counts(found: Judgement) -> tuple[int, int, int, int, int, int]:
    """Return windows, runs, doubled, missed, takeovers and unfounded takeovers."""
    numbers = found.windows, found.runs, found.doubled, found.missed
    return (*numbers, len(found.takeovers), found.unfounded)


BEFORE, AFTER = run(1, 1, 0), run(4, 1, 6)
DIED = run(2, 2, 3, None)


def again(replica: int = 3, token: int = 3, took: float | None = 0.5) -> Run:
    """Return a run of the window of ``DIED`` that is said to be a takeover."""
    return run(token, replica, 3, took, late=2.3, takeover=True)


# Runs, when replicas were killed, and the counts.
DEATHS: dict[str, tuple[list[Run], dict[int, float], tuple[int, ...]]] = {
    "died and run again": ([DIED, again()], {2: 4}, (3, 3, 0, 0, 1, 0)),
    "run only by the dead": ([DIED], {2: 4}, (3, 2, 0, 1, 0, 0)),
    "not run to the end": ([DIED], {}, (3, 2, 0, 1, 0, 0)),
    "run twice, nobody died": ([run(2, 2, 3), run(3, 3, 3)], {}, (3, 4, 1, 0, 0, 0)),
    "takeover of a whole run": ([run(2, 2, 3), again()], {}, (3, 4, 1, 0, 0, 1)),
    "takeover without a death": ([DIED, again()], {}, (3, 3, 0, 0, 0, 1)),
    "takeover of nothing": ([again()], {}, (3, 3, 0, 0, 0, 1)),
    "takeover while another had died": ([DIED, again()], {1: 4}, (3, 3, 0, 0, 0, 1)),
    "takeover before the death": ([DIED, again()], {2: 5.5}, (3, 3, 0, 0, 0, 1)),
    "takeover before a death of nobody's": ([again()], {2: 5.5}, (3, 3, 0, 0, 0, 1)),
    "died well after the run": ([run(2, 2, 3, 1), again()], {2: 5.2}, (3, 4, 1, 0, 0, 1)),
    "died before its release": ([run(2, 2, 3, 1), again()], {2: 4.01}, (3, 3, 0, 0, 1, 0)),
    "died between the claim and the run": ([again()], {2: 4}, (3, 3, 0, 0, 1, 0)),
    "run again, not as a takeover": ([DIED, run(3, 3, 3)], {2: 4}, (3, 3, 0, 0, 0, 0)),
    "the heir of the heir has another's token": (
        [DIED, again(took=None), again(4, token=5)],
        {2: 4, 3: 5.25},
        (3, 3, 0, 0, 1, 1),
    ),
    "run again twice": ([DIED, again(), run(5, 4, 3)], {2: 4}, (3, 4, 1, 0, 1, 0)),
}


@pytest.mark.parametrize("case", DEATHS)
def test_judgement_on_deaths(case: str) -> None:
    runs, deaths, expected = DEATHS[case]
    assert counts(judge_deaths([BEFORE, *runs, AFTER], deaths)) == expected


def test_a_heir_may_die_too() -> None:
    heir = again(took=None)
    last = run(4, 4, 3, late=4.6, takeover=True)
    found = judge_deaths([BEFORE, DIED, heir, last], {2: 4, 3: 5.4})
    assert counts(found) == (2, 2, 0, 0, 2, 0)
    assert [(one.died, one.replica) for one in found.takeovers] == [(2, 3), (3, 4)]


def test_the_summary_says_which_windows_were_run_again() -> None:
    found = judge_deaths([BEFORE, DIED, again()], {2: 4})
    assert found.takeovers == [Takeover("task", BASE + 3, died=2, replica=3)]
    (described,) = describe_takeovers([found])
    at = described.removeprefix("task of ").partition(": ")[0]
    assert described.endswith(": replica 2 was killed in mid-run, replica 3 ran it again")
    line = f"windows=2 runs=2 doubled=0 missed=0 takeovers=1 run_again=task@{at}"
    assert summary([found]) == line
    assert summary([found, found]).endswith(f"takeovers=2 run_again=task@{at},task@{at}")


def test_the_last_line_is_explained_field_by_field() -> None:
    clean = judge_deaths([BEFORE], {})
    again_too = judge_deaths([BEFORE, DIED, again()], {2: 4})
    for found in (clean, again_too):
        _heading, *explained, empty = explain_summary([found]).split("\n")
        fields = [field.partition("=")[0] for field in summary([found]).split()]
        assert [line.split()[0] for line in explained] == fields
        assert max(map(len, explained)) <= 80
        assert empty == ""


@pytest.mark.parametrize(
    ("runs", "deaths", "expected"),
    [
        pytest.param([], {}, "each of the 2 windows ran once.", id="clean"),
        pytest.param(
            [DIED, again()],
            {2: 4},
            "each of the 3 windows ran once (task of @3 began twice, because its holder was"
            " killed).",
            id="one was run again",
        ),
        pytest.param(
            [DIED, again(took=None), run(4, 4, 3, late=4.6, takeover=True)],
            {2: 4, 3: 5.4},
            "each of the 3 windows ran once (task of @3 began 3 times, because its holder was"
            " killed).",
            id="one was run again, and again",
        ),
        pytest.param(
            [again()],
            {2: 4},
            "each of the 3 windows ran once.",
            id="died before it began",
        ),
        pytest.param(
            [run(2, 1, 3), run(3, 2, 3), run(5, 1, 12)],
            {},
            "there were 5 runs for 5 windows: 1 doubled, 1 missed.",
            id="faults",
        ),
    ],
)
def test_it_is_said_what_would_have_been_without_the_lock(
    runs: list[Run], deaths: dict[int, float], expected: str
) -> None:
    found = judge_deaths([BEFORE, *runs, run(9, 1, 6 if runs else 3)], deaths)
    at = summary([found]).rpartition("@")[2]
    without, *lines = compare_with_no_lock([found], 96).split("\n")
    assert without == "Without the lock, every replica would have run every job: 96 runs."
    assert " ".join(lines) == f"With it, {expected.replace('@3', at)}"
    assert max(map(len, lines)) <= 80


def test_two_windows_that_began_twice_are_described_in_their_order() -> None:
    runs = [
        run(1, 1, 0, None),
        run(2, 2, 0, late=2.3, takeover=True),
        run(3, 2, 3, None),
        run(4, 3, 3, late=2.3, takeover=True),
    ]
    found = judge_deaths(runs, {1: 0.5, 2: 3.5})
    first, second = summary([found]).rpartition("run_again=")[2].split(",")
    compared = " ".join(compare_with_no_lock([found], 6).split("\n"))
    begun = ", ".join(f"task of {at.removeprefix('task@')} began twice" for at in (first, second))
    assert compared.endswith(f"ran once ({begun}, because their holders were killed).")


def fired(replica: int, kind: str, time: float, reason: str | None = None) -> ReplicaEvent:
    return ReplicaEvent(replica, kind, BASE + time + 0.1, "task", BASE + time, reason=reason)


@pytest.mark.parametrize(("kind", "reason"), [("granted", "takeover"), ("released", "handed over")])
def test_a_line_of_a_claim_says_what_is_special_about_it(kind: str, reason: str) -> None:
    assert describe_event(fired(1, kind, 0, reason)).endswith(f", token None, {reason})")


def test_the_fires_of_all_replicas_are_the_runs_that_there_would_be_without_the_lock() -> None:
    fires = Fires()
    assert not fires
    for event in (
        ReplicaEvent(1, "ready", BASE),
        fired(1, "granted", 0),
        fired(2, "refused", 0, "running"),
        fired(1, "released", 0),
        fired(2, "granted", 3),
        fired(1, "refused", 3, "running"),
        ReplicaEvent(2, "killed", BASE + 4, "task", BASE + 3, 2),
        fired(1, "granted", 3, "takeover"),
        fired(3, "granted", 3, "takeover"),
        fired(1, "raised", 3),
        fired(3, "released", 3),
    ):
        fires.take_in(event)
    assert len(fires) == 4
    assert sorted(set(fires.run_times("task"))) == [BASE, BASE + 3]
    assert fires.run_times("another") == []


def test_what_the_end_hands_over_is_not_due_unless_another_replica_takes_it() -> None:
    fires = Fires()
    for event in (
        fired(1, "granted", 0),
        fired(1, "released", 0),
        fired(2, "refused", 2, "running"),
        fired(1, "granted", 2),
        fired(1, "released", 2, "handed over"),
    ):
        fires.take_in(event)
    assert fires.run_times("task") == [BASE]
    fires.take_in(fired(2, "granted", 2, "takeover"))
    assert fires.run_times("task") == [BASE, BASE + 2]


@pytest.mark.parametrize("second", ["refused", "granted"])
def test_a_fire_that_is_refused_and_asked_again_is_one(second: str) -> None:
    fires = Fires()
    fires.take_in(fired(1, "refused", 0, "running"))
    fires.take_in(fired(1, second, 0))
    assert len(fires) == 1
