"""The dashboard's drawings: which shapes runs become."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from apscheduler_tasklock import Run
from apscheduler_tasklock.dashboard.drawings import (
    CHART_HEIGHT,
    CHART_WIDTH,
    Block,
    Lane,
    chart_of,
    class_of,
    lanes_of,
    marks_of,
    strip_of,
)

BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)
END = BEGIN + timedelta(hours=1)


def run(took: float = 1.0, outcome: str = "ok", kind: str = "schedule") -> Run:
    ended_at = BEGIN + timedelta(seconds=took)
    return Run("a", 1, BEGIN, BEGIN, ended_at, "web-1", kind, outcome, None, None)


def block(
    since: float, until: float | None, name: str = "ok", lane: str = "web-1", task: str = "a"
) -> Block:
    """Return a block between two minutes of the hour."""
    end = None if until is None else BEGIN + timedelta(minutes=until)
    return Block(lane, task, BEGIN + timedelta(minutes=since), end, name, f"{task} {since} {name}")


def lanes(blocks: Sequence[Block]) -> list[Lane]:
    return lanes_of(blocks, BEGIN, END)


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
        ("freed", "schedule", "other"),
    ],
)
def test_the_class_of_a_shape(outcome: str, kind: str, name: str) -> None:
    assert class_of(run(outcome=outcome, kind=kind)) == name


class TestStrip:
    def test_the_newest_run_is_at_the_right_and_the_longest_the_highest(self) -> None:
        strip = strip_of([run(4.0), run(1.0, "error")], room=3)
        assert strip.width == 9
        assert strip.paths == {"ok": "M6 20v-20h2v20z", "bad": "M3 20v-10h2v10z"}
        assert strip.summary == "2 runs, 1 failed"

    def test_a_missed_run_time_is_as_high_as_the_strip(self) -> None:
        strip = strip_of([run(0.0, "missed"), run(2.0)], room=2)
        assert strip.paths == {"ok": "M0 20v-20h2v20z", "missed": "M3 20v-20h2v20z"}
        assert strip.summary == "1 run, 1 missed"

    def test_runs_that_took_no_time_are_seen(self) -> None:
        assert strip_of([run(0.0)], room=1).paths == {"ok": "M0 20v-3h2v3z"}

    def test_without_runs_it_is_empty(self) -> None:
        assert (strip_of([]).paths, strip_of([]).summary) == ({}, "no runs")

    def test_it_has_room_for_its_bars_alone(self) -> None:
        assert strip_of([run()] * 70, room=60).summary == "60 runs"


class TestChart:
    def test_the_highest_bar_reaches_the_upper_edge(self) -> None:
        chart = chart_of([run(2.0), run(8.0, "error")], room=4)
        assert chart is not None
        [failed, newest] = chart.bars
        assert (failed.name, failed.height, failed.y) == ("bad", CHART_HEIGHT, 0)
        assert newest.height == CHART_HEIGHT / 4
        assert newest.x + newest.width <= CHART_WIDTH
        assert newest.x == CHART_WIDTH * 3 / 4
        assert (chart.longest, chart.usual, chart.band) == (8.0, None, None)

    def test_the_usual_range_leaves_out_the_longest_and_the_failed(self) -> None:
        chart = chart_of([run(100.0), *[run(10.0 + n) for n in range(10)], run(500.0, "error")])
        assert chart is not None
        assert chart.usual == (11.0, 19.0)
        assert chart.band is not None
        upper, height = chart.band
        assert upper == pytest.approx(CHART_HEIGHT * (1 - 19 / 500), abs=0.01)
        assert height == pytest.approx(CHART_HEIGHT * 8 / 500, abs=0.01)

    def test_a_run_that_died_does_not_make_the_others_low(self) -> None:
        chart = chart_of([run(60.0, "died"), run(4.0), run(900.0, "overran"), run(2.0)])
        assert chart is not None
        assert chart.longest == 4.0
        assert [bar.height for bar in chart.bars] == [
            CHART_HEIGHT / 2,
            CHART_HEIGHT,
            CHART_HEIGHT,
            CHART_HEIGHT,
        ]

    def test_of_dead_runs_alone_the_longest_lease_is_the_highest(self) -> None:
        chart = chart_of([run(60.0, "died"), run(30.0, "died")])
        assert chart is not None
        assert chart.longest == 60.0

    def test_there_is_none_without_runs(self) -> None:
        assert chart_of([]) is None

    def test_runs_that_took_no_time_are_seen(self) -> None:
        chart = chart_of([run(0.0)])
        assert chart is not None
        assert chart.bars[0].height == 2


class TestLanes:
    def test_a_run_lies_where_it_ran(self) -> None:
        [lane] = lanes([block(15, 30)])
        [shape] = lane.shapes
        assert (lane.name, lane.rows, shape.x, shape.width) == ("web-1", 1, 25.0, 25.0)

    def test_lanes_come_by_name_and_what_nobody_ran_last(self) -> None:
        found = lanes([block(1, 2, lane=name) for name in ("web-2", "", "web-1")])
        assert [lane.name for lane in found] == ["web-1", "web-2", ""]

    def test_runs_at_the_same_time_lie_in_rows_of_their_own(self) -> None:
        [lane] = lanes([block(0, 30), block(10, 40), block(35, 50)])
        assert lane.rows == 2
        assert [(shape.row, shape.x) for shape in lane.shapes] == [
            (0, 0.0),
            (0, 58.33),
            (1, 16.67),
        ]

    def test_a_run_that_goes_on_reaches_the_right_edge(self) -> None:
        [lane] = lanes([block(45, None, "running")])
        assert (lane.shapes[0].x, lane.shapes[0].width) == (75.0, 25.0)

    def test_a_run_that_began_before_is_cut_at_the_left_edge(self) -> None:
        [lane] = lanes([block(-30, 30)])
        assert (lane.shapes[0].x, lane.shapes[0].width) == (0.0, 50.0)

    def test_short_runs_that_nobody_could_tell_apart_are_one_shape(self) -> None:
        [lane] = lanes([block(10 + n / 1000, 10 + n / 1000) for n in range(20)])
        [shape] = lane.shapes
        assert shape.title == "a: 20 runs"
        assert lane.summary == "20 runs"

    def test_a_failed_run_is_not_hidden_behind_one_that_ended_well(self) -> None:
        [lane] = lanes([block(10, 10), block(10.001, 10.001, "bad"), block(10.002, 10.002)])
        [shape] = lane.shapes
        assert (shape.name, shape.title) == ("bad", "a: 3 runs, 1 failed; the worst: a 10.001 bad")
        assert lane.summary == "3 runs, 1 failed"

    def test_missed_run_times_are_not_counted_as_runs(self) -> None:
        [lane] = lanes([block(10, 10, "missed"), block(10.001, 10.001, "missed"), block(50, 51)])
        assert lane.shapes[0].title == "a: 2 missed; the worst: a 10 missed"
        assert lane.summary == "1 run, 2 missed"

    def test_runs_one_after_the_other_lie_in_one_row(self) -> None:
        blocks = [block(n / 6, n / 6 + 0.01, "bad" if n % 3 else "ok") for n in range(360)]
        [lane] = lanes(blocks)
        assert (lane.rows, len(lane.shapes)) == (1, 360)

    def test_more_runs_at_a_time_than_rows_keep_the_worst(self) -> None:
        blocks = [block(n, 50 + n, task=f"t{n}") for n in range(6)]
        [lane] = lanes([*blocks, block(10, 30, "bad", task="worst")])
        assert lane.rows == 4
        bad = [shape for shape in lane.shapes if shape.name == "bad"]
        assert len(bad) == 1
        assert "the worst: worst 10 bad" in bad[0].title

    def test_a_page_has_a_limited_number_of_shapes(self) -> None:
        blocks = [
            block(1.5 * n, 1.5 * n + 0.001, lane=f"web-{lane}")
            for lane in range(60)
            for n in range(40)
        ]
        assert sum(len(lane.shapes) for lane in lanes(blocks)) <= 900

    def test_a_page_has_a_limited_number_of_lanes_and_the_worst_are_kept(self) -> None:
        blocks = [block(1, 2, lane=f"web-{number:03}") for number in range(100)]
        found = lanes([*blocks, block(1, 2, "bad", lane="web-999")])
        assert [lane.name for lane in found] == [
            *(f"web-{number:03}" for number in range(59)),
            "web-999",
        ]

    def test_without_blocks_there_are_no_lanes(self) -> None:
        assert lanes([]) == []


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
