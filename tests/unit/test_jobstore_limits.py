"""Limits of what is read of a job's row, and of what its trigger is asked in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock import TaskLockOptionError
from apscheduler_tasklock._runs.trigger_times import (
    FEW_STEPS,
    MOST_SEARCHED,
    MOST_STEPS,
    EndlessTriggerError,
    OutOfStepsError,
    few_steps,
    first_run_time,
    following_run_time,
    has_next_run,
    is_shared,
    next_after,
    nominal_time,
    period_after,
)
from apscheduler_tasklock.jobstore.definition import Definition, JobCodec
from apscheduler_tasklock.jobstore.next_run_time import due_run_time
from apscheduler_tasklock.jobstore.stored_triggers import decode_trigger, encode_trigger
from apscheduler_tasklock.jobstore.stored_values import (
    UnreadableError,
    UnstorableError,
    decode,
)
from apscheduler_tasklock.jobstore.trust import AllowedFunctions

NOW = datetime(2026, 3, 2, 12, 0, 30, tzinfo=timezone.utc)
CALENDAR = {
    "type": "calendarinterval",
    "length": [0, 1, 0, 0],
    "time": [3, 0, 0],
    "start_date": "2026-01-31",
    "end_date": None,
    "timezone": "UTC",
    "jitter": None,
}
INTERVAL = encode_trigger(IntervalTrigger(hours=1, timezone="UTC"))
OPTIONS = {"name": "job", "misfire_grace_time": 60, "coalesce": True, "max_instances": 1}


def cron(**fields: Any) -> CronTrigger:
    return CronTrigger(timezone="UTC", **fields)


def daily(first: datetime) -> IntervalTrigger:
    """Return a trigger that is asked in a tenth of a cron trigger's time."""
    return IntervalTrigger(days=1, start_date=first, timezone="UTC")


def nested(depth: int, kind: Any = OrTrigger) -> Any:
    """Return a trigger within so many combinations."""
    trigger: Any = cron(hour=3)
    for _ in range(depth):
        trigger = kind([trigger])
    return trigger


def nested_json(depth: int) -> Any:
    data: Any = encode_trigger(cron(hour=3))
    for _ in range(depth):
        data = {"type": "or", "triggers": [data], "jitter": None}
    return data


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The cron triggers that are made."""
    triggers: list[Any] = []
    make = CronTrigger.__init__

    def note(self: Any, *arguments: Any, **named: Any) -> None:
        triggers.append(self)
        make(self, *arguments, **named)

    monkeypatch.setattr(CronTrigger, "__init__", note)
    yield triggers
    monkeypatch.undo()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The triggers that are asked for a run time, each time, but for combinations."""
    triggers: list[Any] = []

    def noted(ask: Any) -> Any:
        def note(self: Any, *arguments: Any) -> Any:
            triggers.append(self)
            return ask(self, *arguments)

        return note

    for kind in (CronTrigger, IntervalTrigger):
        monkeypatch.setattr(kind, "get_next_fire_time", noted(kind.get_next_fire_time))
    yield triggers
    monkeypatch.undo()


class TestATrigger:
    def test_is_read_again_once_however_deep_it_is_nested(self, made: list[Any]) -> None:
        trigger, data = nested(10), nested_json(10)
        made.clear()
        assert encode_trigger(trigger) == data
        assert len(made) == 1

    @pytest.mark.parametrize("kind", [AndTrigger, OrTrigger])
    def test_that_is_nested_deeper_is_not_stored(self, kind: Any) -> None:
        with pytest.raises(UnstorableError, match="nested more than 10 deep"):
            encode_trigger(nested(11, kind))

    @pytest.mark.parametrize("depth", [11, 30, 5000])
    def test_that_is_nested_deeper_is_unreadable(self, depth: int) -> None:
        with pytest.raises(UnreadableError, match="nested more than 10 deep"):
            decode_trigger(nested_json(depth))

    def test_that_is_in_itself_is_not_stored(self) -> None:
        trigger = OrTrigger([])
        trigger.triggers.append(trigger)
        with pytest.raises(UnstorableError, match="nested more than 10 deep"):
            encode_trigger(trigger)
        for _ in range(40):
            trigger = OrTrigger([trigger, trigger])
        with pytest.raises(UnstorableError, match="nested more than 10 deep"):
            encode_trigger(trigger)

    def test_of_very_many_parts_is_not_stored(self) -> None:
        part = cron(hour=3)
        assert len(encode_trigger(OrTrigger([part] * 999))["triggers"]) == 999
        shared = part
        for _ in range(10):
            shared = OrTrigger([shared] * 10)
        listed = OrTrigger([cron(minute=",".join(map(str, range(60))))] * 20)
        for trigger in (OrTrigger([part] * 1000), shared, listed):
            with pytest.raises(UnstorableError, match="more than 1000 parts"):
                encode_trigger(trigger)

    def test_of_very_many_parts_is_unreadable(self) -> None:
        part = encode_trigger(cron(hour=3))
        with pytest.raises(UnreadableError, match="more than 1000 parts"):
            decode_trigger({"type": "and", "triggers": [part] * 1000, "jitter": None})

    @pytest.mark.parametrize("field", ["*," * 500 + "*", " " * 1001, 3, ["3"], None])
    def test_whose_field_is_none_is_unreadable(self, field: Any) -> None:
        with pytest.raises(UnreadableError, match="fields are no texts of up to 1000 characters"):
            decode_trigger({**encode_trigger(cron(hour=3)), "fields": {"hour": field}})

    @pytest.mark.parametrize("jitter", ["x", -1, 1e300, float("nan"), True, [], "5"])
    @pytest.mark.parametrize("data", [INTERVAL, nested_json(0), nested_json(1), CALENDAR])
    def test_whose_jitter_is_no_time_is_unreadable(self, data: Any, jitter: Any) -> None:
        with pytest.raises(UnreadableError):
            decode_trigger({**data, "jitter": jitter})

    @pytest.mark.parametrize("jitter", ["x", -1, 10**10, timedelta(seconds=3)])
    def test_whose_jitter_is_no_time_is_not_stored(self, jitter: Any) -> None:
        for trigger in (cron(hour=3, jitter=jitter), OrTrigger([cron(hour=3)], jitter=jitter)):
            with pytest.raises(UnstorableError, match="whose jitter is neither None nor a number"):
                encode_trigger(trigger)

    @pytest.mark.parametrize(
        "length", [[0, -1, 0], [36501, 0, 0], [0, 0, 0], [1, 2], [0.5, 0, 0], "100", [True, 0, 0]]
    )
    def test_whose_interval_is_none_is_unreadable(self, length: Any) -> None:
        with pytest.raises(UnreadableError):
            decode_trigger({**INTERVAL, "length": length})

    @pytest.mark.parametrize(
        "change",
        [
            {"length": [8000, 0, 0, 0]},
            {"length": [0, -1, 0, 0]},
            {"length": [0, 0, 0, 0]},
            {"length": [0, 0.5, 0, 0]},
            {"start_date": "9999-12-31"},
            # With which APScheduler would find no time, without an end.
            {"timezone": "53"},
        ],
    )
    def test_whose_calendar_interval_is_none_is_unreadable(self, change: dict[str, Any]) -> None:
        pytest.importorskip("apscheduler.triggers.calendarinterval")
        with pytest.raises(UnreadableError):
            decode_trigger({**CALENDAR, **change})

    @pytest.mark.parametrize("zone", ["Europe", "x" * 300, "../etc/passwd", 3, None, ["UTC"]])
    def test_whose_zone_is_none_is_unreadable(self, zone: Any) -> None:
        with pytest.raises(UnreadableError):
            decode_trigger({**INTERVAL, "timezone": zone})


class TestValues:
    def test_that_cannot_be_stored_are_unreadable(self) -> None:
        deep: Any = 1
        for _ in range(51):
            deep = [deep]
        offset = "+01:00:00.500000"
        moment = {"$": "datetime", "value": f"2026-01-01T03:00:00{offset}"}
        for data in (deep, 10**4000, moment, {"$": "time", "value": f"03:00:00{offset}"}):
            with pytest.raises(UnreadableError):
                decode(data)

    @pytest.mark.parametrize("zone", ["Europe", "x" * 300, "", "/etc/localtime"])
    def test_of_no_zone_are_unreadable(self, zone: str) -> None:
        with pytest.raises(UnreadableError):
            decode([{"$": "datetime", "value": "2026-01-01T00:00:00", "zone": zone}])


class TestOptions:
    @pytest.mark.parametrize(
        "change",
        [
            {"misfire_grace_time": -1},
            {"misfire_grace_time": 10**30},
            {"misfire_grace_time": {"$": "float", "value": "nan"}},
            {"max_instances": 0},
            {"name": {"$": "time", "value": "x"}},
            {"coalesce": [[[]]]},
        ],
    )
    def test_that_cannot_be_are_unreadable(self, change: dict[str, Any]) -> None:
        arguments = {"args": [], "kwargs": {}}
        definition = Definition("a:b", INTERVAL, {**OPTIONS, **change}, arguments, "default")
        with pytest.raises(UnreadableError):
            JobCodec(AllowedFunctions(["a"])).decode(definition)


def heavy(month: str = "1") -> Any:
    """Return a cron trigger of which APScheduler looks through 8000 years, for minutes."""
    days, always = ",".join(["1-31"] * 200), ",".join(["*"] * 500)
    return cron(day=days, month=month, week="30", day_of_week=always)


ASKS: dict[str, Callable[[Any], Any]] = {
    "following": lambda trigger: following_run_time(trigger, NOW, NOW),
    "first": lambda trigger: first_run_time(trigger, NOW),
    "due": lambda trigger: due_run_time(trigger, NOW - timedelta(days=3), NOW, NOW),
    "period": lambda trigger: period_after(trigger, NOW),
    "shared": lambda trigger: is_shared(trigger, NOW),
    "next": lambda trigger: next_after(trigger, NOW, NOW.timestamp()),
    "nominal": lambda trigger: nominal_time(trigger, NOW),
    "has next": lambda trigger: has_next_run(trigger, NOW),
}


@pytest.mark.timeout(60)
class TestOneCall:
    @pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
    def test_of_many_parts_has_one_budget(
        self, ask: Callable[[Any], Any], asked: list[Any]
    ) -> None:
        """The parts agree nowhere; within APScheduler, this is asked for hours."""
        begin = NOW.replace(hour=0, minute=0, second=0)
        parts = [daily(begin + timedelta(minutes=number)) for number in range(800)]
        trigger = AndTrigger([AndTrigger(parts[:400]), AndTrigger(parts[400:])], jitter=3)
        try:
            ask(trigger)
        except OutOfStepsError as error:
            assert "20000 steps" in str(error)  # noqa: PT017  # some do not raise it
        assert len(asked) <= MOST_STEPS + MOST_SEARCHED

    @pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
    def test_of_a_row_among_a_thousand_has_a_small_budget(
        self, ask: Callable[[Any], Any], asked: list[Any]
    ) -> None:
        trigger = AndTrigger([cron(hour=3), AndTrigger([cron(hour=4), cron(hour=5)])])
        with few_steps(), suppress(OutOfStepsError):
            ask(trigger)
        assert len(asked) <= 2 * FEW_STEPS

    @pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
    def test_of_a_trigger_that_is_hard_to_ask_ends(self, ask: Callable[[Any], Any]) -> None:
        for trigger in (heavy(), OrTrigger([heavy()] * 3), AndTrigger([heavy("2"), heavy()])):
            try:
                ask(trigger)
            except EndlessTriggerError:
                continue

    def test_of_a_trigger_that_never_fires_finds_nothing(self) -> None:
        never = cron(month=2, day=30)
        assert first_run_time(never, NOW) is None
        assert following_run_time(OrTrigger([never, never]), NOW, NOW) is None

    def test_finds_what_is_years_away(self) -> None:
        leap_monday = cron(month=2, day=29, day_of_week="mon")
        assert first_run_time(leap_monday, NOW) == datetime(2044, 2, 29, tzinfo=timezone.utc)
        ends = CronTrigger(month=2, day=29, end_date=datetime(2028, 3, 1), timezone="UTC")
        first = first_run_time(ends, NOW)
        assert first == datetime(2028, 2, 29, tzinfo=timezone.utc)
        assert following_run_time(ends, first, first) is None
        begins = CronTrigger(hour=3, start_date=datetime(2090, 1, 1), timezone="UTC")
        assert first_run_time(begins, NOW) == datetime(2090, 1, 1, 3, tzinfo=timezone.utc)

    @pytest.mark.parametrize("year", [2026, 9500, 9998])
    def test_of_a_calendar_interval_ends_where_years_do(self, year: int) -> None:
        pytest.importorskip("apscheduler.triggers.calendarinterval")
        for length in ([0, 1, 0, 0], [99, 11, 0, 0], [100, 0, 0, 0], [0, 0, 0, 1]):
            trigger = decode_trigger({**CALENDAR, "length": length})
            moment = datetime(year, 12, 31, 3, tzinfo=timezone.utc)
            following = following_run_time(trigger, moment, moment)
            assert (following is not None) == (year == 2026)
            assert (period_after(trigger, moment) is not None) == (year == 2026)


def test_a_job_with_options_that_make_no_sense_is_not_stored() -> None:
    from apscheduler.job import Job
    from apscheduler.schedulers.background import BackgroundScheduler

    job = Job(
        BackgroundScheduler(timezone="UTC"),
        id="job",
        func="tests.support.stored_jobs:note",
        args=["x"],
        kwargs={},
        name="job",
        trigger=cron(hour=3),
        executor="default",
        misfire_grace_time=10**12,
        coalesce=True,
        max_instances=1,
        next_run_time=None,
    )
    with pytest.raises(TaskLockOptionError, match="misfire_grace_time must be above 0"):
        JobCodec(AllowedFunctions(["tests."])).encode(job)
