"""A deployment changes a job's schedule: which run times are run while both versions are there.

The triggers are real ones, and time is travelled. What each version asks is what ships.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock.options import DEFAULTS, LockOptions
from benchmarks.fidelity.executor import OneJob, ReplicaExecutor, TravellingClient, request_of
from benchmarks.fidelity.trace import Fire
from tests.support.waist import ClaimTimes, Memory, Replica, Rows

UTC = timezone.utc
SetClock = Callable[[datetime], None]
# A run: by which version, and of which run time.
Ran = tuple[str, str]


def at(text: str) -> datetime:
    """Return a moment of the week of Monday, the 2nd of March: ``"Mo 10:00"``."""
    day, time = text.split()
    hours, minutes, *seconds = time.split(":")
    days = ["Mo", "Tu", "We", "Th", "Fr", "Sa", "Su"].index(day)
    passed = timedelta(days=days, hours=int(hours), minutes=int(minutes))
    second = timedelta(seconds=float(seconds[0])) if seconds else timedelta()
    return datetime(2026, 3, 2, tzinfo=UTC) + passed + second


def named(moment: datetime) -> str:
    """Return the reverse, to the second."""
    return f"{moment:%a}"[:2] + f" {moment:%H:%M:%S}".removesuffix(":00")


def cron(**fields: Any) -> CronTrigger:
    return CronTrigger(timezone=UTC, **fields)


def every(start: str, **length: int) -> IntervalTrigger:
    """Return an interval whose run times all replicas share."""
    return IntervalTrigger(start_date=at(start), timezone=UTC, **length)


def own(start: str, **length: int) -> IntervalTrigger:
    """Return an interval that counts from the start of its replica."""
    start_date = at(start) + timedelta(microseconds=123)
    return IntervalTrigger(start_date=start_date, timezone=UTC, **length)


@dataclass
class Version:
    """A replica with a version of the application, for as long as it is there.

    :ivar registers: whether it comes to tell the job's schedule; claims must not depend on it
    """

    name: str
    trigger: Any
    begins: str
    ends: str = "Su 23:00"
    registers: bool = True
    options: LockOptions = DEFAULTS
    next_run_time: datetime | None = None
    executor: ReplicaExecutor = field(init=False)


@dataclass
class Fleet:
    """Replicas of versions side by side, and what they run."""

    replica: Replica
    set_clock: SetClock
    now: datetime = field(default_factory=partial(at, "Mo 00:00"))
    ran: list[Ran] = field(default_factory=list)
    alarms: list[datetime] = field(default_factory=list)

    def live(self, versions: Sequence[Version], until: str = "Su 23:00") -> list[Ran]:
        """Let them join, fire, and leave in the order of time; return what ran."""
        waiting = sorted(versions, key=lambda version: at(version.begins))
        there: list[Version] = []
        while True:
            fires = [(each.next_run_time, n) for n, each in enumerate(there) if each.next_run_time]
            joins = at(waiting[0].begins) if waiting else None
            fire = min(fires, default=None)
            if joins is not None and (fire is None or joins <= fire[0]):
                self._move(joins)
                there.append(self._joined(waiting.pop(0)))
            elif fire is None or fire[0] > at(until):
                return self.ran
            else:
                self._move(fire[0])
                self._fire(there[fire[1]])
            for each in there:
                if self.now > at(each.ends):
                    each.next_run_time = None
                elif each.registers:
                    each.executor.look()

    def _move(self, moment: datetime) -> None:
        self.now = max(self.now, moment)
        self.set_clock(self.now)

    def _joined(self, version: Version) -> Version:
        version.next_run_time = version.trigger.get_next_fire_time(None, self.now)
        replica = self.replica
        version.executor = ReplicaExecutor(
            version.options,
            OneJob("task", version.trigger, lambda: version.next_run_time or self.now),
            TravellingClient(lambda: replica.cursor, replica.protocol, lambda: False),
            lambda _submission, not_now: not_now(),
            lambda: self.alarms.append(self.now),
            self._clock,
        )
        version.executor.submission(self.now)  # by which it knows its schedule
        return version

    def _clock(self) -> float:
        return self.now.timestamp()

    def _fire(self, version: Version) -> None:
        run_time = version.next_run_time
        assert run_time is not None
        version.next_run_time = version.trigger.get_next_fire_time(run_time, self.now)
        if run_time > at(version.ends):
            version.next_run_time = None
            return
        submission = version.executor.submission(run_time)
        request = request_of(Fire(0.0, 0.0, 0.0, False, submission))
        answer = self.replica.send(request, ClaimTimes(self.now.timestamp() - run_time.timestamp()))
        if answer.granted:
            self.replica.end(request.claim_id, outcome="ok")
            self.ran.append((version.name, named(run_time)))


@pytest.fixture
def fleet(one: Replica, connection: Rows) -> Fleet:
    def set_clock(moment: datetime) -> None:
        if isinstance(connection, Memory):
            connection.time = moment
        else:
            connection.execute("UPDATE travel.clock SET time = %s", [moment])

    return Fleet(one, set_clock)


def old(trigger: Any, ends: str, begins: str = "Mo 00:00", **more: Any) -> Version:
    return Version("old", trigger, begins, ends, **more)


def new(trigger: Any, begins: str, **more: Any) -> Version:
    return Version("new", trigger, begins, **more)


# Which runs there are from the day of the deployment to the day after.
DAILY = [
    pytest.param(10, 16, "Tu 12:00", "Tu 13:00", ["Tu 10", "Tu 16", "We 16"], id="later"),
    pytest.param(10, 6, "Tu 12:00", "Tu 13:00", ["Tu 10", "We 06", "Th 06"], id="earlier"),
    pytest.param(
        10, 16, "Tu 09:30", "Tu 10:30", ["Tu 10", "Tu 16", "We 16"], id="old runs once more"
    ),
    # Two run times that are closer than a tenth of the period are one.
    pytest.param(10, 11, "Tu 09:30", "Tu 10:30", ["Tu 10", "We 11", "Th 11"], id="an hour later"),
    pytest.param(10, 11, "Tu 10:30", "Tu 11:30", ["Tu 10", "We 11", "Th 11"], id="has run today"),
    pytest.param(10, 9, "Tu 08:30", "Tu 09:30", ["Tu 09", "We 09"], id="an hour earlier"),
    pytest.param(10, 9, "Tu 08:30", "Tu 23:30", ["Tu 09", "We 09"], id="old does not run again"),
    pytest.param(16, 10, "Tu 09:30", "Th 09:30", ["Tu 10", "We 10"], id="side by side for days"),
]


@pytest.mark.parametrize("registers", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize(("was", "is_", "begins", "ends", "expected"), DAILY)
def test_a_daily_job_is_moved(
    fleet: Fleet,
    was: int,
    is_: int,
    begins: str,
    ends: str,
    expected: list[str],
    registers: bool,
) -> None:
    ran = fleet.live(
        [
            old(cron(hour=was), ends, "Mo 20:00", registers=registers),
            new(cron(hour=is_), begins, registers=registers),
        ]
    )
    times = [run_time for _, run_time in ran]
    assert times[: len(expected)] == [f"{run_time}:00" for run_time in expected]
    days = [run_time[:2] for run_time in times[len(expected) :]]
    assert days == ["Th", "Fr", "Sa", "Su"][-len(days) :]
    assert fleet.alarms == []


def served(ran: Sequence[Ran], run_times: Sequence[datetime]) -> list[int]:
    """Return how often each of these run times was run."""
    return [sum(run_time == named(each) for _, run_time in ran) for each in run_times]


def times_of(trigger: Any, begin: str, end: str) -> list[datetime]:
    found = []
    run_time = trigger.get_next_fire_time(None, at(begin))
    while run_time is not None and run_time < at(end):
        found.append(run_time)
        run_time = trigger.get_next_fire_time(run_time, run_time)
    return found


HOURLY, EACH_MINUTE = cron(minute=0), cron(minute="*")


@pytest.mark.parametrize("new_first", [True, False])
@pytest.mark.parametrize(
    ("was", "is_"),
    [(HOURLY, EACH_MINUTE), (EACH_MINUTE, HOURLY)],
    ids=["from an hour to a minute", "from a minute to an hour"],
)
def test_each_run_time_of_a_new_pace_is_run_once_while_both_versions_live_for_an_hour(
    fleet: Fleet, was: Any, is_: Any, new_first: bool
) -> None:
    """Also one that both schedules have, whoever asks first."""
    versions = [
        new(is_, "Mo 10:05:30"),
        old(was, "Mo 11:05:30", "Mo 08:00" if not new_first else "Mo 08:30"),
    ]
    if new_first:  # so that the old version is asked last
        versions.append(old(was, "Mo 11:05:30", "Mo 10:05:31"))
        versions[0], versions[1] = versions[1], versions[0]
    ran = fleet.live(versions, "Mo 13:30")
    run_times = times_of(is_, "Mo 10:06", "Mo 13:30")
    assert served(ran, run_times) == [1] * len(run_times)
    assert {name for name, run_time in ran if run_time > "Mo 11:06"} == {"new"}


def test_an_interval_that_counts_from_its_replicas_start_takes_its_new_pace_at_once(
    fleet: Fleet,
) -> None:
    ran = fleet.live(
        [old(own("Mo 08:00", hours=1), "Mo 10:30"), new(own("Mo 10:05", minutes=1), "Mo 10:04")],
        "Mo 11:00",
    )
    assert [run_time for _, run_time in ran if run_time > "Mo 10:04"] == [
        named(each) for each in times_of(own("Mo 10:05", minutes=1), "Mo 10:04", "Mo 11:00")
    ]


def test_an_interval_of_its_replicas_own_is_served_by_a_run_of_the_old_version(
    fleet: Fleet,
) -> None:
    """It has no run time that could be lost, so two runs stay a minimum lock apart."""
    ran = fleet.live(
        [
            old(own("Mo 08:00", minutes=5), "Mo 09:31"),
            new(own("Mo 09:06:02", minutes=10), "Mo 09:04"),
        ],
        "Mo 10:00",
    )
    times = [at(run_time) for _, run_time in ran]
    assert min(later - earlier for earlier, later in pairwise(times)) >= timedelta(seconds=270)
    assert max(later - earlier for earlier, later in pairwise(times)) <= timedelta(minutes=11)


# The last run of the old version; the first one of the new version, and when that begins.
GAPS = [
    pytest.param(
        cron(day_of_week="mon-fri", hour=10),
        cron(day_of_week="mon-fri", hour=16),
        "Mo 12:00",
        ["Mo 10:00", "Mo 16:00", "Tu 16:00"],
        id="after a weekend",
    ),
    pytest.param(
        cron(day_of_week="mon-fri", hour=10),
        cron(day_of_week="mon-fri", hour=16),
        "Fr 12:00",
        ["Fr 10:00", "Fr 16:00"],
        id="before a weekend",
    ),
    pytest.param(
        cron(hour="9-17"),
        cron(hour="8-18"),
        "Tu 17:10",
        ["Tu 17:00", "Tu 18:00", "We 08:00"],
        id="one more at the end of the day",
    ),
    pytest.param(
        cron(hour="9-17"),
        cron(hour="9-17", minute=30),
        "Tu 17:10",
        ["Tu 17:00", "Tu 17:30", "We 09:30"],
        id="moved by half an hour after the last of the day",
    ),
    pytest.param(
        cron(hour="9-17"),
        cron(hour="9-17", minute=30),
        "Tu 09:10",
        ["Tu 09:00", "Tu 09:30", "Tu 10:30"],
        id="moved by half an hour after the first of the day",
    ),
    pytest.param(
        cron(hour="9-17"),
        cron(hour="9-17", minute=5),
        "Tu 09:02",
        ["Tu 09:00", "Tu 10:05"],
        id="moved by less than a tenth of an hour",
    ),
]


@pytest.mark.parametrize(("was", "is_", "begins", "expected"), GAPS)
def test_gaps_of_different_lengths_swallow_no_run_time_of_the_new_schedule(
    fleet: Fleet, was: Any, is_: Any, begins: str, expected: list[str]
) -> None:
    ran = fleet.live([old(was, begins), new(is_, begins)])
    times = [run_time for _, run_time in ran]
    first = times.index(expected[0])
    assert times[first : first + len(expected)] == expected
    assert [name for name, _ in ran[first:]] == ["old"] + ["new"] * (len(ran) - first - 1)


@pytest.mark.parametrize("registers", [True, False], ids=["told", "not told"])
def test_an_old_version_runs_nothing_in_the_windows_of_the_new_one(
    fleet: Fleet, registers: bool
) -> None:
    ran = fleet.live(
        [
            old(cron(minute=30), "Mo 20:00", "Mo 09:00", registers=registers),
            new(cron(minute=0), "Mo 11:45", registers=registers),
        ],
        "Mo 14:45",
    )
    assert ran == [
        *[("old", f"Mo {hour}:30") for hour in ("09", "10", "11")],
        *[("new", f"Mo {hour}:00") for hour in (12, 13, 14)],
    ]


def test_a_version_that_is_rolled_back_to_counts_as_the_new_one(fleet: Fleet) -> None:
    ran = fleet.live(
        [
            old(cron(hour=10), "Mo 13:00"),
            new(cron(hour=16), "Mo 12:00", ends="Mo 18:30"),
            Version("rolled back", cron(hour=10), "Mo 18:00"),
        ],
        "We 12:00",
    )
    assert ran == [
        ("old", "Mo 10:00"),
        ("new", "Mo 16:00"),
        ("rolled back", "Tu 10:00"),
        ("rolled back", "We 10:00"),
    ]


def test_a_rollback_that_leaves_some_old_replicas_alone_lasts_whoever_of_them_claims(
    fleet: Fleet,
) -> None:
    """A replica of the version that is taken back must not run in a window of theirs."""
    ran = fleet.live(
        [
            old(cron(hour=22), "Su 23:00"),
            new(cron(hour=6), "Mo 23:00", ends="Th 12:00"),
            Version("rolled back", cron(hour=22), "Tu 12:00", ends="Tu 22:30"),
        ],
        "Th 23:00",
    )
    times = [run_time for _, run_time in ran]
    assert times == ["Mo 22:00", "Tu 06:00", "Tu 22:00", "We 22:00", "Th 22:00"]


def test_an_old_replica_that_starts_again_costs_newer_ones_no_run_time(fleet: Fleet) -> None:
    """As long as the deployment goes on after that."""
    ran = fleet.live(
        [
            new(cron(hour=16), "Mo 09:00"),
            old(cron(hour=10), "Mo 11:00", "Mo 09:30"),
            new(cron(hour=16), "Mo 10:30"),
        ],
        "Tu 17:00",
    )
    assert ran == [("old", "Mo 10:00"), ("new", "Mo 16:00"), ("new", "Tu 16:00")]


def test_a_minimum_lock_of_a_period_keeps_run_times_apart_also_of_two_schedules(
    fleet: Fleet,
) -> None:
    """Whoever sets it wants that."""
    options = replace(DEFAULTS, min_factor=1.0)
    ran = fleet.live(
        [
            old(cron(hour=10), "Mo 13:00", options=options),
            new(cron(hour=16), "Mo 12:00", options=options),
        ],
        "We 12:00",
    )
    assert ran == [("old", "Mo 10:00"), ("new", "Tu 16:00")]


def test_a_schedule_that_a_job_is_given_once_more_is_as_old_as_it_was() -> None:
    """As by an application that adds its jobs again, with ``replace_existing``."""
    now, nobody = at("Mo 10:00"), cast(Any, None)

    def clock() -> float:
        return now.timestamp()

    scheduler = OneJob("task", cron(hour=10), lambda: now)
    client = TravellingClient(nobody, nobody, nobody)
    executor = ReplicaExecutor(DEFAULTS, scheduler, client, nobody, nobody, clock)
    job = scheduler.job("task", "default")
    since = executor.submission(now).schedule.since
    now = at("Mo 11:00")
    job.trigger = cron(hour=10)
    assert executor.submission(now).schedule.since == since == at("Mo 10:00").timestamp()
    job.trigger = cron(hour=16)
    assert executor.submission(now).schedule.since == now.timestamp()


@pytest.mark.parametrize("day", ["Mo", "Tu", "We", "Th", "Fr"])
def test_a_weekend_does_not_count_on_whichever_day_the_schedule_is_first_seen(day: str) -> None:
    weekdays = cron(day_of_week="mon-fri", hour=16)
    job: Any = object()
    seen = at(f"{day} 16:00")
    submission = Submission(job, "default", weekdays, [seen], "task", DEFAULTS, False, "")
    for moment in (seen, at("Fr 16:00")):
        least = submission.least_gap(moment, submission.period(moment))
        assert timedelta(seconds=least) == timedelta(hours=2.4)
