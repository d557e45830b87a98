"""Run times that nobody has begun and no entry tells of: rows and a time, and what `why` says."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.combining import AndTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock import MissCause, Pause, Story, Verdict
from apscheduler_tasklock._lock.schedules import with_exact_times
from apscheduler_tasklock._runs.task_names import canonical_schedule, exact_schedule
from apscheduler_tasklock._runs.trigger_times import zone_of
from apscheduler_tasklock._words.due_times import MOST_DUE
from apscheduler_tasklock._words.json_text import as_json
from apscheduler_tasklock._words.stories import StoryLines, story_lines, story_of
from apscheduler_tasklock.status import OptionSource, ReplicaState, Run, RunningRun, TaskState
from tests.support.rows import action_read, miss_read, replica_status, run_read, task_status

UTC, BERLIN = timezone.utc, ZoneInfo("Europe/Berlin")
DAY = datetime(2026, 1, 31, tzinfo=UTC)


class OwnTrigger:
    """A trigger of the application."""


class Clock:
    """Writes times as hours and minutes, with seconds if there are some."""

    def moment(self, moment: datetime | None) -> str:
        return "" if moment is None else f"{moment:%d. %H:%M:%S}".removeprefix("31. ")[:8]

    def seconds(self, seconds: float | None) -> str:
        return f"{seconds:g}s"


def at(text: str) -> datetime:
    """Return a time of the day, such as ``"00:40"``."""
    hours, minutes, seconds = (*map(int, text.split(":")), 0)[:3]
    return DAY + timedelta(hours=hours, minutes=minutes, seconds=seconds)


def schedule(trigger: Any) -> dict[str, Any]:
    """Return what a row has of a trigger."""
    canonical = json.loads(canonical_schedule(trigger))
    exact = {"schedule": exact_schedule(trigger)}
    return {"schedule": with_exact_times(canonical, exact), "zone": zone_of(trigger)}


EVERY_20 = CronTrigger(minute="*/20", timezone=UTC)
STARTED = IntervalTrigger(minutes=20, start_date=DAY, timezone=UTC)
# Such an interval counts from when each replica has made it.
OWN_START = IntervalTrigger(minutes=20, start_date=at("00:00") + timedelta(microseconds=5))
# The job's run of 00:20 is over. It is due at 00:40, and overdue at 00:41.
ROW: dict[str, Any] = {
    "state": TaskState.LATE,
    "scheduled_at": at("00:20"),
    "started_at": at("00:20"),
    "finished_at": at("00:20:02"),
    "window_until": at("00:38"),
    "due_at": at("00:40"),
    "overdue_at": at("00:41"),
}
RUNS_ON = {"finished_at": None, "state": TaskState.RUNNING, "locked_until": at("23:00")}
DIED = {
    "finished_at": None,
    "state": TaskState.DEAD,
    "outcome": "died",
    "locked_until": at("00:21"),
}
MOMENT = timedelta(milliseconds=16)
LIVE = replica_status("web-1", tasks=("job",), started_at=at("00:00"), seen_at=at("23:00"))
SILENT = replica_status(
    "web-1",
    tasks=("job",),
    started_at=at("00:00"),
    seen_at=at("00:39:50"),
    state=ReplicaState.SILENT,
)
STOPPING = replace(LIVE, replica_id="web-2", stopping_since=at("00:39:55"))
LATER = replica_status("web-9", tasks=("job",), started_at=at("00:50"), seen_at=at("23:00"))
NEW = replace(LATER, started_at=at("01:05"))
PAUSED = {"pauses": (Pause("ann", at("00:30"), None, "move"),), "paused": True, "due_at": None}


def ran(text: str, **changes: Any) -> Run:
    """Return a run that took two seconds."""
    values = {"scheduled_at": at(text), "started_at": at(text), "replica": "web-1", "token": 6}
    return run_read(
        task="job", **{**values, "ended_at": at(text) + timedelta(seconds=2), **changes}
    )


def missed(first: str, last: str, **changes: Any) -> Run:
    span = {"scheduled_at": at(first), "last_scheduled_at": at(last), "run_times": 2}
    return miss_read(task="job", **{**span, **changes})


def did(text: str, outcome: str, by: str = "ann", **changes: Any) -> Run:
    """Return an entry of what an operator did."""
    values = {"started_at": at(text), "outcome": outcome, "by": by, "until": None, "reason": None}
    return action_read(task="job", **{**values, **changes})


def story(
    now: str,
    *entries: Run,
    trigger: Any = EVERY_20,
    of: str | None = None,
    replicas: tuple[Any, ...] = (LIVE,),
    has_history: bool = True,
    kept_since: str | None = None,
    **row: Any,
) -> Story:
    """Return the story of the job, whose run of 00:20 is in the history, if nothing else is.

    :param of: the moment that the story is about; ``None``: now
    :param kept_since: since when all of its runs are kept; ``None``: none was overwritten
    """
    task = task_status("job", **{**ROW, **schedule(trigger), **row})
    entries = entries or (ran("00:20"),) * has_history
    kept = None if kept_since is None else at(kept_since)
    return story_of(task, entries, replicas, at(of or now), at(now), kept)


def lines(*args: Any, **more: Any) -> StoryLines:
    return story_lines(story(*args, **more), Clock())


def told(*args: Any, **more: Any) -> list[str]:
    """Return the lines that tell what nobody has begun, and what is not known."""
    found = lines(*args, **more).verdict
    return [each for each in found if "nobody" in each or "not known" in each]


WHY = "a reason is noted from 00:41:00 on"
NONE = "no reason is noted so far"
IS_RUNNING = "its run of 00:20:00 on one (token 7) is in the way"


@pytest.mark.parametrize(
    ("now", "more", "expected"),
    [
        ("00:39", {}, []),
        ("00:40", {}, [f"due 00:40:00, begun by nobody; {WHY}"]),
        ("00:40:59", {}, [f"due 00:40:00, begun by nobody; {WHY}"]),
        ("00:41", {}, [f"due 00:40:00, begun by nobody; {NONE}"]),
        ("01:25", {}, [f"due 3 run times from 00:40:00 to 01:20:00, begun by nobody; {NONE}"]),
        (
            "01:25",
            {"trigger": STARTED},
            [f"due 3 run times from 00:40:00 to 01:20:00, begun by nobody; {NONE}"],
        ),
        ("00:40:30", {"overdue_at": None}, [f"due 00:40:00, begun by nobody; {NONE}"]),
        # An interval without a common start: the row says when it is due, and the rest is near it.
        (
            "00:40:30",
            {"trigger": OWN_START},
            ["due 00:40:00, begun by nobody; a reason is noted from 01:01:00 on"],
        ),
        (
            "01:25",
            {"trigger": OWN_START},
            [f"due about 3 run times from 00:40:00 to 01:20:00, begun by nobody; {NONE}"],
        ),
        # Of a trigger of the application the row's due time is known, and no later one.
        (
            "01:25",
            {"trigger": OwnTrigger()},
            [
                f"due 00:40:00, begun by nobody; {NONE}",
                "its run times after 00:40:00 are not known, because its trigger is the "
                "application's own",
            ],
        ),
        (
            "00:30",
            {"trigger": OwnTrigger()},
            [
                "its run times after 00:20:00 are not known, because its trigger is the "
                "application's own"
            ],
        ),
        # A run in the way, and a pause.
        (
            "00:40:30",
            RUNS_ON,
            [f"due 00:40:00, begun by nobody: {IS_RUNNING}; {WHY}"],
        ),
        (
            "00:40:30",
            {**RUNS_ON, "kind": "manual", "scheduled_at": None},
            [
                "due 00:40:00, begun by nobody: its manual run on one (token 7) is in the way; "
                f"{WHY}"
            ],
        ),
        (
            "00:40:30",
            PAUSED,
            ["by its schedule 00:40:00, begun by nobody: paused by ann since 00:30:00: move"],
        ),
        # Nobody is there.
        (
            "00:40:30",
            {"replicas": (SILENT,)},
            [
                "due 00:40:00, begun by nobody: no live replica had it (web-1 is silent, last seen "
                "at 00:39:50)"
            ],
        ),
        (
            "00:40:30",
            {"replicas": (replace(SILENT, state=ReplicaState.DIED),)},
            [
                "due 00:40:00, begun by nobody: no live replica had it (web-1 has died, last seen "
                "at 00:39:50)"
            ],
        ),
        (
            "00:51",
            {"replicas": (LATER,)},
            ["due 00:40:00, begun by nobody: no live replica had it (web-9 started at 00:50:00)"],
        ),
        (
            "00:51",
            {"replicas": (LATER, SILENT)},
            [
                "due 00:40:00, begun by nobody: no live replica had it (web-1 is silent, last seen "
                "at 00:39:50)"
            ],
        ),
        # A replica that stops begins no run. Before its stop it does.
        (
            "00:40:30",
            {"replicas": (STOPPING, SILENT)},
            [
                "due 00:40:00, begun by nobody: each live replica that had it was stopping (web-2 "
                "started at 00:00:00, stopping since 00:39:55); "
                f"{WHY}"
            ],
        ),
        (
            "00:40:30",
            {"replicas": (replace(STOPPING, stopping_since=at("00:40:10")),)},
            [f"due 00:40:00, begun by nobody; {WHY}"],
        ),
        # The replica that knows the reason has stopped, or there is no history.
        (
            "00:40:30",
            {**RUNS_ON, "replicas": (SILENT,)},
            [f"due 00:40:00, begun by nobody: {IS_RUNNING}"],
        ),
        ("00:40:30", {"has_history": False}, [f"due 00:40:00, begun by nobody; {NONE}"]),
        # The lock of a dead run is over, and its run is in the way no more.
        (
            "00:40:30",
            {**RUNS_ON, "state": TaskState.DEAD, "outcome": "died", "locked_until": at("00:30")},
            [f"due 00:40:00, begun by nobody; {WHY}"],
        ),
        # Also of one that still goes on after its maximum lock.
        (
            "01:25",
            {**RUNS_ON, "state": TaskState.TOO_LONG, "locked_until": at("00:50")},
            [
                f"due 00:40:00, begun by nobody: {IS_RUNNING}",
                f"due 2 run times from 01:00:00 to 01:20:00, begun by nobody; {NONE}",
            ],
        ),
        # Of replicas that were not seen for an hour nothing is known.
        (
            "01:55",
            {"replicas": (replica_status("web-9", tasks=("job",), started_at=at("01:54")),)},
            [
                f"due 00:40:00, begun by nobody; {NONE}",
                "due 3 run times from 01:00:00 to 01:40:00, begun by nobody: no live replica had "
                "it (web-9 started at 01:54:00)",
            ],
        ),
        # A stored job that an application has paused.
        (
            "00:50",
            {"pauses": (Pause("", at("00:30"), None, None, job="job"),)},
            [
                "due 00:40:00, begun by nobody: its stored job is paused, changed last at 00:30:00",
                "its stored job 'job' paused until resumed, by whom is not known, changed last at "
                "00:30:00",
            ],
        ),
        # Jitter: that of an interval moves all later run times.
        (
            "01:25",
            {"trigger": CronTrigger(minute="*/20", jitter=9, timezone=UTC)},
            [f"due 3 run times from 00:40:00 to 01:20:00, begun by nobody; {NONE}"],
        ),
        (
            "01:25",
            {"trigger": IntervalTrigger(minutes=20, start_date=DAY, jitter=9, timezone=UTC)},
            [f"due about 3 run times from 00:40:00 to 01:20:00, begun by nobody; {NONE}"],
        ),
        # A job that was moved, and one that was removed.
        ("00:50", {"due_at": at("09:00")}, [f"by its schedule 00:40:00, begun by nobody; {NONE}"]),
        ("00:50", {"due_at": None}, []),
        # A minimum lock that is longer than the time until the next run time.
        ("00:50", {"due_at": at("01:20"), "window_until": at("01:19")}, []),
        ("00:30", {"schedule": None}, []),
        ("00:50", {"kind": "hold"}, []),
    ],
)
def test_what_is_due_is_told_at_once(now: str, more: dict[str, Any], expected: list[str]) -> None:
    assert told(now, **more) == expected


@pytest.mark.parametrize(
    ("now", "more", "headline"),
    [
        ("00:39", {}, "its last run time until then was 00:20:00, whose run ended well"),
        ("00:40:30", {}, "its last run time until then was 00:40:00, which nobody has begun"),
        (
            "01:25",
            {"trigger": OWN_START},
            "its last run time until then was about 01:20:00, which nobody has begun",
        ),
        (
            "00:30",
            {"trigger": OwnTrigger()},
            "its last known run time until then was 00:20:00, whose run ended well",
        ),
        (
            "00:40:30",
            RUNS_ON,
            "its run of 00:20:00 goes on, begun at 00:20:00 on one, and its last run time until "
            "then was 00:40:00, which nobody has begun",
        ),
        (
            "00:39",
            {**RUNS_ON, "kind": "takeover", "started_at": at("00:30")},
            "its last run time until then was 00:20:00, whose run goes on",
        ),
    ],
)
def test_the_headline_is_about_the_last_run_time_and_first_about_what_goes_on(
    now: str, more: dict[str, Any], headline: str
) -> None:
    assert lines(
        now, ran("00:00"), *[ran("00:20")] * ("finished_at" not in more), **more
    ).headline == (f"job at {Clock().moment(at(now))}: {headline}")


LOST = RunningRun("job", 5, "web-2", at("00:00"), lost=True)
OVERTAKER = replica_status("web-2", tasks=("job",), seen_at=at("23:00"), running=(LOST,))


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_run_that_was_overtaken_and_goes_on_is_told_first(is_stuck: bool) -> None:
    more = {"stuck": (LOST,)} if is_stuck else {"replicas": (OVERTAKER,)}
    found = lines("00:39", ran("00:00", outcome="died", token=5), ran("00:20"), **more)
    goes_on = "a run that began at 00:00:00 on web-2 goes on although its lock is lost"
    assert found.headline == (
        f"job at 00:39:00: {goes_on}, and its last run time until then was 00:20:00, whose run "
        "ended well"
    )
    assert found.verdict[0] == f"{goes_on} (token 5)"


def test_a_dead_run_is_told_with_a_later_run_time_that_nobody_has_begun() -> None:
    found = lines("00:45", **{**DIED, "due_at": at("00:40") + MOMENT})
    assert found.headline == (
        "job at 00:45:00: its run of 00:20:00 has not renewed its lease (it died, or its end has "
        "not been written yet), and its last run time until then was 00:40:00, which nobody has "
        "begun"
    )
    assert found.verdict[0] == (
        "00:20:00 began at 00:20:00 on one, and has not renewed its lease, which ended at 00:21:00"
        ": it died, or its end has not been written yet (token 7)"
    )
    closed = lines("00:45", ran("00:20", token=7, outcome="died"), **DIED)
    assert closed.headline.startswith("job at 00:45:00: its last run time")


@pytest.mark.parametrize("row", [{}, {"finished_at": at("00:20:02"), "state": TaskState.LATE}])
@pytest.mark.parametrize("trigger", [EVERY_20, STARTED, OWN_START])
def test_a_run_time_that_is_a_moment_later_than_asked_for_is_the_one(
    trigger: Any, row: dict[str, Any]
) -> None:
    """A run time by the database's clock is off the schedule's by what a statement took."""
    off = {"scheduled_at": at("00:20") + MOMENT, "started_at": at("00:20") + MOMENT}
    entries = [ran("00:10", token=6), ran("00:00", token=5, outcome="died")]
    if row:
        entries.append(ran("00:20", token=7, **off))
    found = lines("00:45", *entries, trigger=trigger, of="00:20", **{**DIED, **row, **off})
    assert "its last run time until then was 00:20:00, whose run" in found.headline
    assert found.verdict[0].startswith("00:20:00 began at 00:20:00 on ")
    assert not [each for each in found.verdict if "not known" in each or "nobody" in each]


def test_a_run_that_goes_on_is_told_before_run_times_that_were_missed_by_it() -> None:
    found = lines("01:10", ran("00:00"), missed("00:40", "01:00"), **RUNS_ON, due_at=at("01:20"))
    assert found.headline.startswith("job at 01:10:00: its run of 00:20:00 goes on, begun at")
    assert found.verdict[0].startswith("00:20:00 began at 00:20:00 on one, and goes on (token 7")
    assert found.verdict[1].startswith("no replica ran 2 run times from 00:40:00 to 01:00:00")


@pytest.mark.parametrize(
    ("outcome", "of", "goes_on"),
    [("overtaken", None, True), ("ok", None, False), ("overtaken", "00:10", False)],
)
def test_a_run_that_has_ended_or_began_later_does_not_go_on(
    outcome: str, of: str | None, goes_on: bool
) -> None:
    """The history is read after the row, so a run may have ended between."""
    entries = [ran("00:00", token=5), ran("00:20", token=7, outcome=outcome)]
    assert bool(story("00:39", *entries, of=of, **RUNS_ON).running) is goes_on


BY_ANN = "paused by ann since 00:30:00"


@pytest.mark.parametrize(
    ("entries", "more", "expected"),
    [
        # Piece by piece over a pause that is over.
        (
            [ran("00:20"), did("00:30", "paused"), did("01:10", "resumed")],
            {"due_at": at("01:40")},
            [
                f"by its schedule 2 run times from 00:40:00 to 01:00:00, begun by nobody: {BY_ANN}",
                f"by its schedule 01:20:00, begun by nobody; {NONE}",
            ],
        ),
        # Over a run that has ended by now, which its release has moved the due time past.
        (
            [ran("00:20", ended_at=at("01:25"))],
            {"due_at": at("01:40"), "overdue_at": at("01:41"), "finished_at": at("01:25")},
            [
                "by its schedule 3 run times from 00:40:00 to 01:20:00, begun by nobody: its run "
                "of 00:20:00 on web-1 (token 6) was in the way"
            ],
        ),
        # After a change of the schedule nothing before the due time is told.
        ([ran("00:20"), did("01:05", "rescheduled")], {"due_at": at("01:40")}, []),
        (
            [ran("00:20"), did("01:05", "rescheduled")],
            {"due_at": at("01:20"), "overdue_at": at("01:21")},
            [f"due 01:20:00, begun by nobody; {NONE}"],
        ),
        ([ran("00:20"), did("01:05", "job-moved")], {"due_at": at("01:40")}, []),
        # Nor before the oldest of many actions, which may have overwritten such a change.
        (
            [ran("00:20"), *(did(f"01:{n}", "acknowledged") for n in range(2, 22))],
            {"due_at": at("01:40")},
            [],
        ),
        # Nor if the last run time is not one of the schedule: it had another time zone then.
        ([ran("00:25")], {"due_at": at("01:40"), "scheduled_at": at("00:25")}, []),
        # A missed run time that is told, and those after it.
        (
            [ran("00:20"), missed("00:40", "01:00")],
            {},
            [f"due 01:20:00, begun by nobody; {NONE}"],
        ),
        # A manual run is no run of a run time.
        (
            [ran("00:20"), ran("01:22", kind="manual", scheduled_at=None)],
            {},
            [f"due 3 run times from 00:40:00 to 01:20:00, begun by nobody; {NONE}"],
        ),
    ],
)
def test_times_without_an_entry_are_told_piece_by_piece(
    entries: list[Run], more: dict[str, Any], expected: list[str]
) -> None:
    assert told("01:25", *entries, **more) == expected


@pytest.mark.parametrize(
    ("of", "entries", "more", "expected"),
    [
        (
            "00:50",
            [ran("00:20"), ran("01:00")],
            {},
            [f"by its schedule 00:40:00, begun by nobody; {NONE}"],
        ),
        ("00:50", [ran("00:20"), ran("00:40", started_at=at("00:55"))], {}, []),
        # The next run of such an interval came within two periods: another replica's run time.
        ("00:50", [ran("00:20"), ran("00:58")], {"trigger": OWN_START}, []),
        (
            "00:50",
            [ran("00:20"), ran("01:00")],
            {"trigger": OWN_START},
            [f"by its schedule about 00:40:00, begun by nobody; {NONE}"],
        ),
        # Its schedule was another one then.
        (
            "00:50",
            [ran("00:20"), did("00:55", "rescheduled"), ran("01:00")],
            {},
            [
                "its run times after 00:20:00 are not known, because its schedule is not that of "
                "then, or has no common times"
            ],
        ),
        # Other runs may have been overwritten: an entry of the other ring is older than what is
        # kept, for example that of a run that was taken for dead, and has ended well since.
        (
            "00:50",
            [ran("00:20"), *(ran(f"01:{n}") for n in ("00", "20", "40"))],
            {"kept_since": "01:00"},
            ["its run times after 00:20:00 are not known, because its history begins later"],
        ),
        (
            "00:50",
            [ran("00:20"), ran("01:00")],
            {"options": {"min_lock": OptionSource(1500.0, "job")}},
            [],
        ),
    ],
)
def test_of_a_moment_in_the_past(
    of: str, entries: list[Run], more: dict[str, Any], expected: list[str]
) -> None:
    row = {"scheduled_at": at("02:00"), "started_at": at("02:00"), "due_at": at("02:20")}
    assert told("02:01", *entries, ran("02:00"), of=of, **{**row, **more}) == expected


def test_of_a_moment_before_the_last_change_of_the_schedule_nothing_is_known() -> None:
    entries = [ran("00:20"), did("00:55", "rescheduled")]
    assert told("00:56", *entries, of="00:50", due_at=at("01:20")) == [
        "its run times after 00:20:00 are not known, because its schedule is not that of then, or "
        "has no common times"
    ]


def test_a_task_that_has_never_run_is_due_from_its_first_run_time_on() -> None:
    new = dict.fromkeys(("scheduled_at", "started_at", "finished_at", "window_until"))
    task = task_status("job", **{**ROW, **schedule(EVERY_20), **new, "token": 0})
    found = story_of(task, [], (LIVE,), at("00:40:30"))
    assert story_lines(found, Clock()).verdict == [f"due 00:40:00, begun by nobody; {WHY}"]


def test_very_many_are_not_counted() -> None:
    each_second = CronTrigger(second="*", timezone=UTC)
    row = {"due_at": at("00:20:01"), "overdue_at": None, "window_until": None}
    found = lines("23:00", trigger=each_second, **row)
    assert "nobody has begun its run times since 00:20:02, which are many" in found.headline
    # The first one came while the run before went on.
    counts = [due.run_times for due in story("00:30", trigger=each_second, **row).due]
    assert counts == [1, 599]
    assert [due.run_times for due in story("23:00", trigger=each_second, **row).due] == [1, None]
    most = at("00:20:00") + timedelta(seconds=MOST_DUE)
    found_until = [
        story_of(task_status("job", **{**ROW, **schedule(each_second), **row}), [], (), most + more)
        for more in (timedelta(0), timedelta(seconds=1))
    ]
    assert [found.due[0].run_times for found in found_until] == [MOST_DUE, None]


def test_for_programs_a_cause_has_the_words_of_misses() -> None:
    causes = [
        story("00:40:30", **more).due[0].cause
        for more in (RUNS_ON, PAUSED, {"replicas": (SILENT,)}, {})
    ]
    assert causes == [MissCause.RUNNING.value, "paused", "unasked", None]
    found = story("00:40:30")
    assert (found.verdict, found.scheduled_at, found.miss) == (Verdict.DUE, at("00:40"), None)
    assert found.due[0].noted_from == at("00:41")
    assert '"noted_from": "2026-01-31T00:41:00Z"' in as_json(found)
    assert (found.before and found.before.scheduled_at, found.read_at) == (
        at("00:20"),
        at("00:40:30"),
    )


@pytest.mark.parametrize(
    ("cause", "replicas", "more"),
    [
        (
            "unasked",
            (NEW, SILENT),
            "; no live replica had it (web-1 is silent, last seen at 00:39:50)",
        ),
        (
            "unasked",
            (NEW, STOPPING),
            "; each live replica that had it was stopping (web-2 started at 00:00:00, stopping "
            "since 00:39:55)",
        ),
        ("unasked", (NEW, LIVE), ""),
        # A replica that started within the missed run times could have asked for the last ones.
        ("unasked", (replace(NEW, started_at=at("00:55")),), ""),
        ("unasked", (), ""),
        ("misfire", (NEW, SILENT), ""),
    ],
)
def test_of_run_times_that_nobody_asked_for_it_is_told_that_no_replica_could(
    cause: str, replicas: tuple[Any, ...], more: str
) -> None:
    """The replica that has noted them started later, so its reason cannot tell that."""
    miss = missed("00:40", "01:00", cause=cause, reason="nobody", replica="")
    found = lines("01:10", ran("00:20"), miss, replicas=replicas, due_at=at("01:20"))
    [line] = [each for each in found.verdict if each.startswith("no replica ran")]
    assert line.startswith(
        f"no replica ran 2 run times from 00:40:00 to 01:00:00: nobody{more} (noted at "
    )


@pytest.mark.parametrize(
    ("of", "row", "waits"),
    [
        ("00:45", {}, True),
        ("00:45", RUNS_ON, True),
        ("00:45", {"requested_by": None}, False),
        ("00:40", {}, False),
    ],
)
def test_a_run_that_was_asked_for_and_waits_is_told_first(
    of: str, row: dict[str, Any], waits: bool
) -> None:
    asked = {"requested_by": "ann@ops", "requested_at": at("00:44:10"), **row}
    headline = lines("00:45", of=of, replicas=(SILENT,), **asked).headline
    first = f"job at {of}:00: the run that ann@ops asked for at 00:44:10 still waits, and "
    assert headline.startswith(first) is waits


def test_where_the_kept_misses_end_is_told() -> None:
    many = [missed(f"{n:02}:00", f"{n:02}:00") for n in range(1, 21)]
    assert lines("22:00", *many).sections["history"] == [
        "begins at 01:00:00",
        "missed run times are kept from 01:00:00 on",
    ]
    found = lines("22:00", ran("00:00"), *many, of="00:45").sections["history"]
    assert found == [
        "begins at 00:00:00",
        "missed run times are kept from 01:00:00 on; which ones were missed before it is not known",
    ]
    assert told("22:00", ran("00:20"), *many, of="00:45", due_at=at("22:20")) == [
        "by its schedule 00:40:00, begun by nobody; the reasons of that time are no longer kept"
    ]
    assert len(lines("22:00", ran("00:00"), *many[1:]).sections["history"]) == 1


def due_in_berlin(trigger: Any, last: datetime, now: datetime, **row: Any) -> list[str]:
    """Return the due times of a job in Berlin, as its clocks show them."""
    run = run_read(task="job", token=6, scheduled_at=last, started_at=last, ended_at=last)
    times = {"scheduled_at": last, "started_at": last, "finished_at": last, "window_until": last}
    task = task_status("job", **{**ROW, **times, "due_at": None, **schedule(trigger), **row})
    later = run_read(task="job", token=7, scheduled_at=now + timedelta(1), started_at=now)
    found = story_of(task, [run, later], (), now)
    return [
        f"{each.astimezone(BERLIN):%d. %H:%M %z}"
        for due in found.due
        for each in sorted({due.first, due.last})
    ]


AT_0230 = CronTrigger(hour=2, minute=30, timezone=BERLIN)
WINTER, SUMMER = (
    datetime(2026, 3, 28, 2, 30, tzinfo=BERLIN),
    datetime(2026, 10, 24, 2, 30, tzinfo=BERLIN),
)


@pytest.mark.parametrize(
    ("trigger", "last", "hours", "times"),
    [
        # Clocks go forward: there is no 02:30. They go back: there are two.
        (AT_0230, WINTER, 30, ["29. 03:30 +0200"]),
        (AT_0230, SUMMER, 30, ["25. 02:30 +0200", "25. 02:30 +0100"]),
        (
            CronTrigger(minute=0, timezone=BERLIN),
            WINTER.replace(day=29, hour=1, minute=0),
            1,
            ["29. 03:00 +0200"],
        ),
        (DateTrigger(WINTER), WINTER - timedelta(days=1), 30, []),
        # No such day, ever: the search has an end.
        (CronTrigger(month=2, day=30, timezone=BERLIN), WINTER, 1, []),
    ],
)
def test_times_are_those_of_the_time_zone_when_its_clocks_change(
    trigger: Any, last: datetime, hours: float, times: list[str]
) -> None:
    if last is SUMMER:  # APScheduler 3.10 has one run time in that hour
        pytest.importorskip("apscheduler.triggers.calendarinterval")
    last = last.astimezone(UTC)
    assert due_in_berlin(trigger, last, last + timedelta(hours=hours)) == times


def test_a_calendar_interval_counts_from_its_start() -> None:
    module = pytest.importorskip("apscheduler.triggers.calendarinterval")
    trigger = module.CalendarIntervalTrigger(
        days=2, hour=2, start_date=date(2026, 1, 1), timezone=BERLIN
    )
    last = datetime(2026, 3, 26, 2, tzinfo=BERLIN)
    found = due_in_berlin(trigger, last, last + timedelta(days=5))
    assert found == ["28. 02:00 +0100", "30. 02:00 +0200"]


@pytest.mark.parametrize(
    ("trigger", "not_known_after"),
    [
        # Its parts never agree, so the application has set the due time.
        (AndTrigger([CronTrigger(hour=hour, timezone=UTC) for hour in (1, 2)]), None),
        (AndTrigger([IntervalTrigger(hours=1), CronTrigger(hour=2, timezone=UTC)]), at("00:40")),
    ],
)
def test_the_due_time_of_the_row_is_told_if_the_schedule_does_not_have_it(
    trigger: Any, not_known_after: datetime | None
) -> None:
    found = story("01:25", trigger=trigger)
    assert [each.first for each in found.due] == [at("00:40")]
    assert found.not_known_after == not_known_after


def test_jitter_makes_no_second_run_time_of_a_due_time() -> None:
    jittered = CronTrigger(minute="*/20", jitter=300, timezone=UTC)
    for now, expected in (("00:42", []), ("00:43", [(at("00:40"), True)])):
        found = story(now, trigger=jittered, due_at=at("00:43"))
        assert [(due.first, due.is_due) for due in found.due] == expected


def test_without_apscheduler_only_the_due_time_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "apscheduler_tasklock._runs.trigger_times", raising=False)
    monkeypatch.setitem(sys.modules, "apscheduler.triggers.combining", None)
    found = story("01:25")
    assert [each.first for each in found.due] == [at("00:40")]
    assert found.not_known_after == at("00:40")


EVERY: dict[str, Any] = {"type": "interval", "start": None, "end": None, "jitter": 0.0}


@pytest.mark.parametrize(
    "row",
    [
        *(
            {"schedule": {**EVERY, "length": length, "jitter": jitter}}
            for length in ([0, 0, 0], [-1, 0, 0], [999_999_999, 0, 0], [0, 10**30, 0], "x")
            for jitter in (0.0, 1e300, "x", None)
        ),
        {"schedule": "x"},
        {"schedule": {"type": "calendarinterval", "start": "x"}},
        {"options": {"min_lock": OptionSource(1e300, "job")}, "scheduled_at": None},
        {"due_at": datetime.max.replace(tzinfo=UTC)},
        {
            "due_at": datetime.min.replace(tzinfo=UTC),
            "overdue_at": datetime.max.replace(tzinfo=UTC),
        },
    ],
)
def test_a_row_that_no_replica_writes_is_no_error(row: dict[str, Any]) -> None:
    assert "job at 01:25:00" in lines("01:25", **row).headline
