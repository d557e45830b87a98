"""The judge's questions, each with a table of histories made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from apscheduler_tasklock.demo import history
from apscheduler_tasklock.demo.history import Event, JudgedRun
from apscheduler_tasklock.demo.judge import (
    gaps,
    overlaps,
    repeats,
    unreported,
    went_back,
)


def made(*told: str) -> list[JudgedRun]:
    """Return runs, each told as ``due begun..ended``, with words after it.

    There is no end where the run did not end. The words: ``died@5``, ``lost``, ``takeover``,
    ``token@3``, ``attempt@2``.
    """
    found = []
    for number, each in enumerate(told, 1):
        due, times, *words = each.split()
        begun, _, ended = times.partition("..")
        given = dict(word.partition("@")[::2] for word in words)
        run = JudgedRun("task", "abc"[number % 3], float(due), float(begun))
        run.ended = float(ended) if ended else None
        run.died = float(given["died"]) if "died" in given else None
        run.lost, run.takeover = "lost" in given, "takeover" in given
        run.token, run.attempt = int(given.get("token", number)), int(given.get("attempt", 1))
        found.append(run)
    return found


def numbers(
    runs: list[JudgedRun], found: list[tuple[JudgedRun, JudgedRun]]
) -> list[tuple[int, int]]:
    """Return which runs were found, counted from 1."""
    return [(runs.index(earlier) + 1, runs.index(later) + 1) for earlier, later in found]


OVERLAPS = {
    "one after the other": (["0 0..1", "2 2..3"], []),
    "at the moment of the end": (["0 0..2", "2 2..3"], []),
    "during another": (["0 0..3", "2 2..3"], [(1, 2)]),
    "two during one": (["0 0..9", "2 2..3", "4 4..5"], [(1, 2), (1, 3)]),
    "three at once": (["0 0..9", "2 2..9", "4 4..5"], [(1, 2), (1, 3)]),
    "after a death": (["0 0 died@1", "0 2..3"], []),
    "before a death": (["0 0 died@3", "0 2..3"], [(1, 2)]),
    "after one that never ended": (["0 0", "2 2..3"], [(1, 2)]),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_a_run_that_begins_while_another_goes_on_overlaps(case: str) -> None:
    told, expected = OVERLAPS[case]
    runs = made(*told)
    assert numbers(runs, list(overlaps(runs))) == expected
    assert not list(overlaps(runs, lambda _earlier, _later: True))


def test_an_overlap_counts_until_the_earlier_run_knows_of_it() -> None:
    runs = made("0 0..9", "2 2..3", "4 4..5")
    assert numbers(runs, list(overlaps(runs, until=lambda _run: 3.0))) == [(1, 2)]
    excused = overlaps(runs, lambda earlier, _later: earlier is runs[0])
    assert not list(excused)


UNREPORTED = {
    "lost, and knows it": (["0 0..9 lost", "0 2..3"], []),
    "lost, and does not know it": (["0 0..9", "0 2..3"], [1]),
    "ended before it had to know": (["0 0..4", "0 2..3"], []),
    "killed": (["0 0 died@9", "0 2..3"], []),
    "alone": (["0 0..9", "9 9..10"], []),
}


@pytest.mark.parametrize("case", UNREPORTED)
def test_a_run_has_to_know_that_another_one_took_its_place(case: str) -> None:
    told, expected = UNREPORTED[case]
    runs = made(*told)
    found = unreported(runs, lambda _run, other_begun: other_begun + 2.5)
    assert [runs.index(run) + 1 for run in found] == expected


REPEATS = {
    "two windows": (["0 0..1", "2 2..3"], []),
    "twice": (["0 0..1", "0 2..3"], [(1, 2)]),
    "three times": (["0 0..1", "0 2..3", "0 4..5"], [(1, 2), (2, 3)]),
    "less than a window apart": (["0 0..1", "0.7 2..3"], [(1, 2)]),
    "late": (["0 0..1", "2 2..3", "0.1 4..5"], [(1, 3)]),
    "another attempt": (["0 0..1", "0 2..3 attempt@2"], []),
    "an attempt twice": (["0 0..1", "0 2..3 attempt@2", "0 4..5"], [(1, 3)]),
}


@pytest.mark.parametrize("case", REPEATS)
def test_a_window_that_is_run_twice_is_found(case: str) -> None:
    told, expected = REPEATS[case]
    runs = made(*told)

    def same(earlier: JudgedRun, later: JudgedRun) -> bool:
        return later.due - earlier.due < 0.8 and earlier.attempt == later.attempt

    assert numbers(runs, list(repeats(runs, same))) == expected
    assert not list(repeats(runs, same, lambda _earlier, _later: True))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([1, 2, 5], []),
        ([1, 1], ["01"]),
        ([2, 1, 2, 3], ["01", "02"]),
    ],
)
def test_a_token_that_does_not_grow_is_found(tokens: list[int], expected: list[str]) -> None:
    told = [(token, str(place)) for place, token in enumerate(tokens)]
    assert ["".join(pair) for pair in went_back(told)] == expected


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        pytest.param([0, 1, 2, 3], [], id="all"),
        pytest.param([0, 2, 3], [1], id="one in the middle"),
        pytest.param([1, 2], [0, 3], id="the first and the last"),
        pytest.param([], [0, 1, 2, 3], id="none"),
        pytest.param([0, 0, 3], [1, 2], id="run twice makes up for nothing"),
        pytest.param([0, 1.85, 2.85], [], id="another replica's run times"),
        pytest.param([0, 1.95, 2.95], [1], id="nearly two periods"),
    ],
)
def test_windows_that_nobody_ran_are_found(served: list[float], expected: list[float]) -> None:
    assert list(gaps(served, -1.0, 4.0, lambda _due: 1.0)) == expected


def test_a_history_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    events = [
        Event(1.0, "begin", "a", "task", 3, 0.5, takeover=True),
        Event(2.0, "end", "a", "task", 3, lost=True),
        Event(0.5, "killed", "b", kept=False, detail="alone"),
    ]
    path = tmp_path / "history.jsonl"
    history.write(events, path)
    assert history.read(path) == events
    assert path.read_text().splitlines()[1] == (
        '{"at": 2.0, "kind": "end", "replica": "a", "task": "task", "token": 3, "lost": true}'
    )


def test_events_make_up_runs() -> None:
    events = [
        Event(3.0, "end", "a", "task", 1, lost=True),
        Event(1.0, "begin", "a", "task", 1, 0.5),
        Event(4.0, "begin", "b", "task", 2, 0.5, takeover=True),
        Event(4.5, "begin", "b", "another", 2, 0.5),
        Event(5.0, "killed", "b"),
    ]
    first, second = history.runs(events, "task")
    assert (first.due, first.begun, first.ended, first.died, first.lost) == (0.5, 1, 3, None, True)
    assert (second.token, second.takeover, second.ended, second.died) == (2, True, None, 5.0)
    assert (first.over, second.over) == (3.0, 5.0)
