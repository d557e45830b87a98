"""The dashboard's drawings: which shapes runs become."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from importlib.resources import files
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from apscheduler_tasklock import Lane, LaneEntry, Run, dashboard
from apscheduler_tasklock.dashboard.drawings import (
    CHART_HEIGHT,
    LEGEND,
    Column,
    DrawnLane,
    Span,
    chart_of,
    css_class_of,
    drawn_lane,
    marks_of,
    strip_of,
)
from apscheduler_tasklock.dashboard.formats import Formats
from tests.support.waist import entries_in_words, lane_in_words

BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)
END = BEGIN + timedelta(hours=1)
HOUR = Span(BEGIN, END, END)
FORMATS = Formats(timezone.utc, END)


def run(took: float = 1.0, outcome: str = "ok", kind: str = "schedule") -> Run:
    ended_at = BEGIN + timedelta(seconds=took)
    return Run("a", 1, BEGIN, BEGIN, ended_at, "web-1", kind, outcome, None, None)


def entry(
    since: float, until: float | None, outcome: str = "ok", count: int = 1, **changes: Any
) -> LaneEntry:
    """Return an entry between two minutes of the hour; of several, if ``count`` is above 1."""
    began = BEGIN + timedelta(minutes=since)
    ended = None if until is None else BEGIN + timedelta(minutes=until)
    about = {"task": "a", "replica": "web-1", "kind": "schedule", **changes}
    alone = None
    if ended is not None and count == 1:
        alone = run(outcome=outcome, kind=about["kind"])
        alone = replace(alone, started_at=began, ended_at=ended)
    return LaneEntry(outcome=outcome, since=began, until=ended, count=count, run=alone, **about)


def drawn(*entries: LaneEntry, span: Span = HOUR) -> DrawnLane:
    return drawn_lane(Lane("a", None, entries=entries), span)


def places(lane: DrawnLane) -> list[tuple[str, float, float, int]]:
    """Return the class, left edge, width and row of each shape, from left to right."""
    found = [(shape.name, shape.x, round(shape.width, 2), shape.row) for shape in lane.shapes]
    return sorted(found, key=lambda each: (each[1], each[3]))


@pytest.mark.parametrize(
    ("outcome", "kind", "name"),
    [
        ("ok", "schedule", "ok"),
        ("ok", "manual", "ok"),
        ("ok", "takeover", "again"),
        ("ok", "retry", "again"),
        ("error", "retry", "bad"),
        ("died", "schedule", "bad"),
        ("overran", "schedule", "bad"),
        ("missed", "schedule", "missed"),
        ("cancelled", "schedule", "other"),
        ("freed", "schedule", "bad"),
    ],
)
def test_the_class_of_a_shape(outcome: str, kind: str, name: str) -> None:
    assert css_class_of(run(outcome=outcome, kind=kind)) == name


class TestStrip:
    def test_the_newest_run_is_at_the_right_and_the_longest_the_highest(self) -> None:
        strip = strip_of([run(4.0), run(1.0, "error")], room=3)
        assert strip.width == 9
        assert strip.paths == {"ok": "M6 20v-20h2v20z", "bad": "M3 20v-10h2v10z"}
        assert strip.summary == "2 runs, 1 failed"

    def test_a_missed_run_time_is_as_high_as_the_strip(self) -> None:
        strip = strip_of([run(0.0, "missed"), run(2.0)], room=2)
        assert strip.paths == {"ok": "M0 20v-20h2v20z", "missed": "M3 20v-20h2v20z"}
        assert strip.summary == "1 run, 1 missed run time"

    def test_the_run_times_of_an_entry_are_counted_as_on_lanes(self) -> None:
        missed = [replace(run(0.0, "missed"), run_times=number) for number in (8, 1)]
        assert strip_of([*missed, run(2.0)]).summary == "1 run, 9 missed run times"

    def test_runs_that_took_no_time_are_seen(self) -> None:
        assert strip_of([run(0.0)], room=1).paths == {"ok": "M0 20v-3h2v3z"}

    def test_without_runs_it_is_empty(self) -> None:
        assert (strip_of([]).paths, strip_of([]).summary) == ({}, "no runs")

    def test_it_has_room_for_its_bars_alone(self) -> None:
        assert strip_of([run()] * 70, room=60).summary == "60 runs"


def column(took: float, minutes_ago: float = 0, *, is_known: bool = True) -> Column:
    since = END - timedelta(minutes=minutes_ago)
    return Column(since, took, "ok", f"{took} s", is_known=is_known)


class TestChart:
    def test_the_upper_edge_is_the_next_round_duration(self) -> None:
        edges = {0.003: 0.004, 0.7: 1.0, 8.0: 10, 61.0: 120, 5000.0: 7200, 200_000.0: 259_200}
        for took, top in edges.items():
            chart = chart_of([column(took), column(took / 2)], {}, [])
            assert chart is not None
            assert chart.top == pytest.approx(top)
            assert chart.bars[1].height == pytest.approx(took / top * CHART_HEIGHT)

    def test_the_newest_run_is_at_the_right(self) -> None:
        for number in (1, 40, 130):
            columns = [column(place + 1.0, place) for place in range(number)]
            chart = chart_of(columns, {}, [])
            assert chart is not None
            newest = chart.bars[-1]
            assert (newest.column.took, len(chart.bars)) == (1.0, min(number, 100))
            assert 90 < newest.x + newest.width <= 100
            assert chart.bars[0].x >= 0

    @pytest.mark.parametrize("took", [3600.0, 11.0])
    def test_a_run_without_a_known_end_does_not_make_the_others_low(self, took: float) -> None:
        chart = chart_of([column(took, is_known=False), column(8.0, 1)], {}, [])
        assert chart is not None
        usual, hangs = chart.bars
        assert (chart.top, usual.height, usual.is_cut) == (10, CHART_HEIGHT * 0.8, False)
        assert (hangs.height, hangs.is_cut) == (CHART_HEIGHT, True)

    def test_if_no_end_is_known_the_longest_is_the_highest(self) -> None:
        chart = chart_of([column(60.0, is_known=False), column(30.0, 1, is_known=False)], {}, [])
        assert chart is not None
        assert (chart.top, chart.bars[-1].is_cut) == (60, False)

    def test_usual_durations_are_within_it(self) -> None:
        chart = chart_of([column(5.0)], {"median": 15.0}, [])
        assert chart is not None
        assert (chart.top, chart.levels) == (20, (("median", CHART_HEIGHT * 0.75),))

    def test_changes_lie_before_the_first_run_after_them(self) -> None:
        def at(minutes_ago: float) -> tuple[datetime, str]:
            return END - timedelta(minutes=minutes_ago), f"{minutes_ago}"

        columns = [column(1.0, place) for place in range(10)]
        chart = chart_of(columns, {}, [at(4.5), at(-1), at(30)])
        assert chart is not None
        before, after = chart.bars[4:6]
        [change, last] = chart.changes
        assert before.x + before.width <= change.x <= after.x
        assert (change.title, last.title) == ("4.5", "-1")
        assert last.x > chart.bars[-1].x

    def test_its_axis_tells_when_the_first_and_the_last_runs_began(self) -> None:
        chart = chart_of([column(1.0, place) for place in range(30)], {}, [])
        assert chart is not None
        minutes = [(x, round((END - each).total_seconds() / 60)) for x, each in chart.times]
        middle = chart.bars[15]
        assert minutes == [(0.0, 29), (middle.x, 14), (100.0, 0)]

    @pytest.mark.parametrize(("number", "told"), [(1, [0]), (6, [0]), (7, [6, 0])])
    def test_the_time_of_the_first_of_a_few_runs_is_below_its_bar(
        self, number: int, told: list[int]
    ) -> None:
        """At the left edge it would tell that nothing ran since then."""
        chart = chart_of([column(1.0, place) for place in range(number)], {}, [])
        assert chart is not None
        assert [round((END - each).total_seconds() / 60) for _, each in chart.times] == told
        assert chart.times[0][0] == (chart.bars[0].x if len(told) > 1 else 100.0)

    def test_there_is_none_without_runs(self) -> None:
        assert chart_of([], {"median": 1.0}, []) is None

    def test_runs_that_took_no_time_are_seen(self) -> None:
        chart = chart_of([column(0.0)], {}, [])
        assert chart is not None
        assert chart.bars[0].height == 2


SECOND = 1 / 60


class TestLanes:
    """A lane of an hour, which is 500 parts of 7.2 seconds."""

    @pytest.mark.parametrize(
        ("entries", "expected"),
        [
            pytest.param([entry(15, 30)], [("ok", 25.0, 25.0, 0)], id="where it ran"),
            pytest.param([entry(-30, 30)], [("ok", 0.0, 50.0, 0)], id="began before"),
            pytest.param([entry(45, None, "running")], [("running", 75.0, 25.0, 0)], id="goes on"),
            pytest.param(
                [entry(59.999, None, "running")], [("running", 99.8, 0.2, 0)], id="has just begun"
            ),
            pytest.param(
                [entry(30, 30 + SECOND)], [("ok", 50.0, 0.2, 0)], id="two pixels are seen"
            ),
            pytest.param(
                [entry(0, 30), entry(10, 40, "error"), entry(35, 50)],
                [("ok", 0.0, 50.0, 0), ("bad", 16.67, 50.0, 1), ("ok", 58.33, 25.0, 0)],
                id="a row each at the same time",
            ),
            pytest.param(
                [entry(30, 30.2, "error"), entry(30.2, 30.4), entry(30.4, 32)],
                [("bad", 50.0, 0.33, 0), ("ok", 50.33, 0.33, 0), ("ok", 50.67, 2.67, 0)],
                id="each has its own colour beside a failure",
            ),
            pytest.param(
                [entry(30, 30.01), entry(30.02, 30.03, "error"), entry(30.04, 31)],
                [("bad", 50.0, 0.2, 0), ("ok", 50.07, 1.6, 1)],
                id="only short ones are one",
            ),
            pytest.param(
                [entry(30, 30.01, "error"), entry(30.02, None, "too long")],
                [("bad", 50.0, 0.2, 0), ("stuck", 50.03, 49.97, 1)],
                id="one that goes on is never hidden",
            ),
            pytest.param(
                [entry(59.99, 59.992, "error"), entry(59.995, None, "running")],
                [("running", 99.8, 0.2, 0), ("bad", 99.8, 0.2, 1)],
                id="one that has just begun is none of several",
            ),
        ],
    )
    def test_a_shape_lies_where_its_run_ran(
        self, entries: list[LaneEntry], expected: list[tuple[str, float, float, int]]
    ) -> None:
        assert places(drawn(*entries)) == expected

    @pytest.mark.parametrize(
        ("outcomes", "name", "bars"),
        [
            (["ok"] * 20, "ok", [("ok", 4, 7)]),
            (["ok"] * 19 + ["error"], "bad", [("bad", 0, 4), ("ok", 4, 9)]),
            (["error"] * 19 + ["ok"], "bad", [("bad", 0, 9), ("ok", 9, 4)]),
            (["ok", "missed"], "missed", [("missed", 0, 6), ("ok", 6, 7)]),
            (["cancelled", "missed", "died"], "bad", [("bad", 0, 4), ("missed", 4, 9)]),
        ],
    )
    def test_short_entries_of_one_part_are_one_shape_of_two_pixels(
        self, outcomes: list[str], name: str, bars: list[tuple[str, int, int]]
    ) -> None:
        """Few failures among many runs look neither like failures alone nor like none."""
        lane = drawn(*(entry(30 + n / 1000, 30 + n / 1000, how) for n, how in enumerate(outcomes)))
        [shape] = lane.shapes
        assert (shape.name, shape.x, round(shape.width, 2)) == (name, 50.0, 0.2)
        assert list(shape.bars) == bars
        assert [each.outcome for each in shape.entries] == outcomes

    def test_many_that_the_read_has_counted_are_one_shape_where_they_began(self) -> None:
        lane = drawn(entry(30, 50, "error", count=900), entry(30.01, 30.02, count=80))
        [shape] = lane.shapes
        assert (shape.x, round(shape.width, 2)) == (50.0, 0.2)
        assert entries_in_words(shape.entries, FORMATS) == (
            "a 00:30:00 to 00:50:00: 980 runs (900 error, 80 ok)"
        )

    def test_short_runs_one_after_the_other_lie_in_one_row(self) -> None:
        lane = drawn(*(entry(n / 6, n / 6 + 0.01, "error" if n % 3 else "ok") for n in range(360)))
        assert (lane.rows, len(lane.shapes)) == (1, 360)

    def test_what_does_not_fit_a_row_is_drawn_over_it_and_the_worst_on_top(self) -> None:
        lane = drawn(
            *(entry(n, 40 + n) for n in range(6)),
            entry(10, 30, "error"),
            entry(12, None, "too long"),
        )
        assert lane.rows == 4
        assert len(lane.shapes) == 8
        assert [shape.name for shape in lane.shapes][-2:] == ["bad", "stuck"]
        assert {round(shape.width, 2) for shape in lane.shapes[:6]} == {66.67}

    def test_the_classes_are_told_apart_without_colours(self) -> None:
        """By their forms, or by a pattern, which the style sheet has for three of them."""
        forms = [(top, height) for name, top, height, _ in LEGEND[:7] if name != "stuck"]
        assert len(set(forms)) == 6
        style = files(dashboard).joinpath("static", "dashboard.css").read_text()
        for name in ("again", "running", "stuck", "pause", "outage", "unknown"):
            assert f"fill: url(#fill-{name})" in style

    def test_a_span_that_lasts_longer_than_until_now_shows_nothing_of_the_future(self) -> None:
        span = Span(BEGIN, END, BEGIN + timedelta(minutes=30))
        assert places(drawn(entry(15, None, "running"), span=span)) == [("running", 25.0, 25.0, 0)]

    def test_what_ended_before_a_span_that_has_moved_on_is_left_out(self) -> None:
        assert drawn(entry(-2, -1)).shapes == ()


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([entry(0, 1)], "a 00:00:00, ok after 1 min"),
        ([entry(0, 1, kind="takeover")], "a (takeover) 00:00:00, ok after 1 min"),
        (
            [entry(0, 1, "died")],
            "a 00:00:00, died after at most 1 min: its replica died, or could not",
        ),
        ([entry(0, None, "running")], "a since 00:00:00, goes on"),
        ([entry(0, None, "too long")], "a since 00:00:00, goes on for longer than it may"),
        ([entry(0, 1, "ok", 12)], "a 00:00:00 to 00:01:00: 12 runs"),
        ([entry(0, 0, "missed", 12)], "a 00:00:00: 12 missed run times"),
        ([entry(0, 0, "missed", 20_000)], "a 00:00:00: more than 10,000 missed run times"),
        (
            [entry(0, 0), entry(0, 0, "died"), entry(0, 0, "missed", task="b")],
            "00:00:00: 2 runs (1 died, 1 ok), 1 missed run time",
        ),
    ],
)
def test_what_a_shape_says(entries: list[LaneEntry], words: str) -> None:
    assert entries_in_words(entries, FORMATS).startswith(words)


def test_a_run_whose_lease_has_ended_is_not_said_to_go_on_or_to_have_failed() -> None:
    dead = LaneEntry("a", "web-1", "schedule", "died", BEGIN, BEGIN + timedelta(minutes=1))
    [shape] = drawn(dead).shapes
    assert shape.name == "other"
    assert entries_in_words([dead], FORMATS) == (
        "a 00:00:00, its lease ended at 00:01:00, and it has not reported its end"
    )


@pytest.mark.parametrize(
    ("lane", "by", "words"),
    [
        (Lane("a", None), "task", "nothing ran"),
        (Lane("a", BEGIN), "task", "not kept: runs of the task before 00:00:00"),
        (Lane("w", BEGIN), "replica", "not kept: runs of some of the tasks before 00:00:00"),
        (Lane("", BEGIN), "replica", "not kept: some missed run times before 00:00:00"),
        (
            Lane("a", None, 7, BEGIN, (entry(0, 1), entry(1, 2, "error"))),
            "task",
            "2 runs (1 error, 1 ok); not kept here: 7 more runs that ended well until 00:00:00",
        ),
    ],
)
def test_what_a_lane_says(lane: Lane, by: str, words: str) -> None:
    assert lane_in_words(lane, by, FORMATS).startswith(words)


class TestMarks:
    def test_they_are_at_round_times(self) -> None:
        found = marks_of(BEGIN + timedelta(minutes=7), END + timedelta(minutes=7), timezone.utc)
        assert [mark.text for mark in found] == [
            *("00:10", "00:15", "00:20", "00:25", "00:30", "00:35"),
            *("00:40", "00:45", "00:50", "00:55", "01:00", "01:05"),
        ]
        assert found[0].x == 5.0

    def test_a_week_has_dates(self) -> None:
        found = marks_of(BEGIN, BEGIN + timedelta(days=7), timezone.utc)
        assert [mark.text for mark in found] == [f"01-0{day}" for day in range(2, 8)]

    def test_an_hour_that_clocks_skip_is_left_out(self) -> None:
        berlin = ZoneInfo("Europe/Berlin")
        begin = datetime(2026, 3, 29, 0, 0, tzinfo=berlin)
        found = marks_of(begin, begin.astimezone(timezone.utc) + timedelta(hours=6), berlin)
        assert "02:00" not in [mark.text for mark in found]
        assert "03:00" in [mark.text for mark in found]

    @pytest.mark.parametrize(
        ("zone", "day", "hours", "texts"),
        [
            # The hour after 02:00 comes twice.
            (
                "Europe/Berlin",
                (2026, 10, 24, 18),
                13,
                ["22:00", "00:00", "02:00", "04:00", "06:00"],
            ),
            (
                "Europe/Berlin",
                (2026, 10, 24, 22),
                25,
                ["03:00", "06:00", "09:00", "12:00", "15:00"],
            ),
            (
                "Europe/Berlin",
                (2026, 10, 23, 22),
                73,
                ["12:00", "00:00", "12:00", "00:00", "12:00"],
            ),
            (
                "Europe/Berlin",
                (2026, 10, 22, 22),
                168,
                ["10-24", "10-25", "10-26", "10-27", "10-28"],
            ),
            # Midnight is skipped.
            (
                "America/Sao_Paulo",
                (2018, 11, 2, 3),
                168,
                ["11-03", "11-04", "11-05", "11-06", "11-07"],
            ),
        ],
    )
    def test_they_are_at_round_times_after_the_clocks_have_changed(
        self, zone: str, day: tuple[int, ...], hours: float, texts: list[str]
    ) -> None:
        local = ZoneInfo(zone)
        begin = datetime(*day, tzinfo=timezone.utc)  # type: ignore[misc]  # the numbers of a time
        end = begin + timedelta(hours=hours)
        found = marks_of(begin.astimezone(local), end.astimezone(local), local)
        assert [mark.text for mark in found][:5] == texts
        at = [begin + timedelta(hours=hours * mark.x / 100) for mark in found]
        for mark, moment in zip(found, at, strict=True):
            # Rounded to a hundredth of a percent, the place tells the time to a minute.
            shown = (moment + timedelta(minutes=5)).astimezone(local)
            assert mark.text in (f"{shown:%H}:00", f"{shown:%m-%d}")
