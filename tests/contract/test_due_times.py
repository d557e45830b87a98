"""When a task is due: to the second, and never a false alarm. Real triggers, travelled time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import apscheduler
import psycopg
import pytest
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock import TaskState
from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock.options import DEFAULTS
from apscheduler_tasklock.schema.table import task_lock_table
from benchmarks.fidelity.executor import OneJob, ReplicaExecutor, TravellingClient, request_of
from benchmarks.fidelity.trace import Fire
from tests.contract.conftest import database_now, row
from tests.support.waist import ClaimTimes, Replica, raw_cursor

# Its states are read as operators read them, by SQL.
pytestmark = pytest.mark.postgresql

Connection = psycopg.Connection[Any]
SetClock = Callable[[datetime], None]

BERLIN, CAIRO = ZoneInfo("Europe/Berlin"), ZoneInfo("Africa/Cairo")
UTC = timezone.utc
HOUR = timedelta(hours=1)
# Long after whatever is due.
MUCH_LATER = timedelta(days=30)


@dataclass
class Job:
    """The job on one replica: what its scheduler and its executor do with it."""

    replica: Replica
    trigger: Any
    next_run_time: datetime | None = None
    alarms: list[datetime] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.next_run_time is None:
            self.next_run_time = self.trigger.get_next_fire_time(None, self.now)
        self.executor = ReplicaExecutor(
            DEFAULTS,
            OneJob("task", self.trigger, lambda: self.next_run_time),
            TravellingClient(lambda: self.replica.cursor, self.replica.protocol, lambda: True),
            lambda _submission, not_now: not_now(),
            lambda: self.alarms.append(self.now),
            self._clock,
        )

    @property
    def now(self) -> datetime:
        return database_now(self.replica.connection)

    def _clock(self) -> float:
        return self.now.timestamp()

    def fire(self) -> bool:
        """Let the next run time come, now, and run it if it is granted."""
        run_time = self.next_run_time
        assert run_time is not None
        self.next_run_time = self.trigger.get_next_fire_time(run_time, self.now)
        submission = self.executor.submission(run_time)
        request = request_of(Fire(0.0, 0.0, 0.0, False, submission))
        lag = self.now.timestamp() - run_time.timestamp()
        answer = self.replica.send(request, ClaimTimes(lag))
        if answer.granted:
            self.replica.end(request.claim_id, outcome="ok")
        return answer.granted


@pytest.fixture
def set_clock(connection: Connection, travel: object) -> SetClock:
    def set_clock(moment: datetime) -> None:
        connection.execute("UPDATE travel.clock SET time = %s", [moment])

    return set_clock


def state(connection: Connection) -> tuple[TaskState, datetime | None]:
    [task] = Operations(task_lock_table()).tasks(raw_cursor(connection))
    return task.state, task.due_at


def cron(zone: ZoneInfo, **fields: Any) -> CronTrigger:
    return CronTrigger(timezone=zone, **fields)


# The library tells an interval in elapsed time, as APScheduler 3.11 counts it.
ELAPSED = pytest.mark.skipif(
    apscheduler.version_info < (3, 11),
    reason="APScheduler 3.10 counts an interval by the wall clock, also across a clock change",
)
ACROSS_CLOCK_CHANGES = [
    pytest.param(cron(BERLIN, hour=4), datetime(2026, 3, 27, tzinfo=BERLIN), id="23 hours"),
    pytest.param(cron(BERLIN, hour=4), datetime(2026, 10, 23, tzinfo=BERLIN), id="25 hours"),
    pytest.param(
        cron(BERLIN, hour=2, minute=30), datetime(2026, 3, 27, tzinfo=BERLIN), id="in the lost hour"
    ),
    pytest.param(
        cron(BERLIN, hour=2, minute=30),
        datetime(2026, 10, 23, tzinfo=BERLIN),
        id="in the repeated hour",
    ),
    pytest.param(
        cron(BERLIN, minute="*/30"), datetime(2026, 10, 25, 1, tzinfo=BERLIN), id="every half hour"
    ),
    pytest.param(cron(CAIRO, hour=0), datetime(2026, 4, 22, tzinfo=CAIRO), id="at a lost midnight"),
    pytest.param(
        cron(CAIRO, hour=23, minute=30),
        datetime(2026, 10, 28, tzinfo=CAIRO),
        id="before a repeated midnight",
    ),
    pytest.param(
        IntervalTrigger(hours=5, start_date=datetime(2026, 3, 1, tzinfo=BERLIN), timezone=BERLIN),
        datetime(2026, 3, 28, tzinfo=BERLIN),
        id="an interval",
        marks=ELAPSED,
    ),
    pytest.param(
        IntervalTrigger(
            hours=5, start_date=datetime(2026, 3, 27, 1, 2, 3, 456789, BERLIN), timezone=BERLIN
        ),
        datetime(2026, 3, 28, tzinfo=BERLIN),
        id="an interval without a common start",
        marks=ELAPSED,
    ),
]


@pytest.mark.parametrize(("trigger", "start"), ACROSS_CLOCK_CHANGES)
def test_it_is_due_at_the_triggers_next_run_time_across_a_clock_change(
    one: Replica, connection: Connection, set_clock: SetClock, trigger: Any, start: datetime
) -> None:
    set_clock(start)
    job = Job(one, trigger)
    job.executor.look()
    for _ in range(6):
        due = job.next_run_time
        assert due is not None
        found = row(connection)
        assert found["due_at"].timestamp() == pytest.approx(due.timestamp(), abs=1e-3)
        assert found["overdue_at"] - found["due_at"] >= timedelta(seconds=60)
        set_clock(due.astimezone(UTC) + timedelta(seconds=0.3))
        assert job.fire()
    assert job.alarms == []


@pytest.mark.parametrize("jitter", [None, 600])
def test_it_is_overdue_a_tenth_of_the_period_and_the_jitter_after_that(
    one: Replica, connection: Connection, set_clock: SetClock, jitter: int | None
) -> None:
    set_clock(datetime(2026, 3, 28, tzinfo=BERLIN))
    job = Job(one, cron(BERLIN, hour=4, jitter=jitter))
    nominal = datetime(2026, 3, 28, 4, tzinfo=BERLIN)
    if jitter:  # what it drew
        job.next_run_time = nominal + timedelta(seconds=234.5)
    assert job.next_run_time is not None
    set_clock(job.next_run_time)
    assert job.fire()
    found = row(connection)
    # 23 hours later, whatever this replica and the next one draw.
    due_at = datetime(2026, 3, 29, 4, tzinfo=BERLIN).astimezone(UTC)
    assert found["due_at"] == due_at
    assert found["overdue_at"] == due_at + timedelta(minutes=10) + timedelta(seconds=jitter or 0)
    set_clock(found["overdue_at"])
    job.executor.look()
    assert job.alarms == []
    set_clock(found["overdue_at"] + timedelta(milliseconds=1))
    job.executor.look()
    job.executor.look()
    assert len(job.alarms) == 1


ENDS = datetime(2026, 3, 30, 12, tzinfo=BERLIN)


@pytest.mark.parametrize(
    "trigger",
    [
        cron(BERLIN, hour=4, end_date=ENDS),
        cron(BERLIN, hour=4, end_date=ENDS, jitter=60),
        IntervalTrigger(hours=24, start_date=datetime(2026, 3, 1, 4, tzinfo=BERLIN), end_date=ENDS),
    ],
    ids=["cron", "jitter", "interval"],
)
def test_a_job_that_has_ended_is_due_no_more(
    one: Replica, connection: Connection, set_clock: SetClock, trigger: Any
) -> None:
    set_clock(datetime(2026, 3, 29, 1, tzinfo=BERLIN))
    job = Job(one, trigger)
    last = None
    while job.next_run_time is not None:
        last = job.next_run_time
        set_clock(last)
        assert job.fire()
        if job.next_run_time is not None:
            assert state(connection)[1] is not None
    assert last is not None
    assert last.date() == ENDS.date()
    set_clock(ENDS + MUCH_LATER)
    assert state(connection) == (TaskState.OK, None)


def test_what_was_due_in_a_pause_is_no_alarm_and_it_is_due_anew_after_it(
    one: Replica, connection: Connection, set_clock: SetClock
) -> None:
    set_clock(datetime(2026, 3, 28, 3, tzinfo=BERLIN))
    job = Job(one, cron(BERLIN, hour=4))
    job.executor.look()
    operations, cursor = Operations(task_lock_table()), raw_cursor(connection)
    operations.pause(cursor, ["task"], None, "me", None)
    set_clock(datetime(2026, 3, 29, 12, tzinfo=BERLIN))
    assert not job.fire()
    job.next_run_time = datetime(2026, 3, 30, 4, tzinfo=BERLIN)
    job.executor.look()
    assert state(connection) == (TaskState.PAUSED, None)
    operations.resume(raw_cursor(connection), ["task"], "me")
    assert state(connection)[1] is None
    job.executor.look()
    assert state(connection) == (TaskState.NEW, job.next_run_time)
    assert job.alarms == []


@pytest.mark.parametrize("offset", [5, 25, 45], ids=lambda minutes: f"{minutes} min")
def test_a_replica_at_an_offset_is_refused_and_tells_nothing(
    one: Replica, other: Replica, connection: Connection, set_clock: SetClock, offset: int
) -> None:
    start = datetime(2026, 3, 1, 0, 0, 0, 1, UTC)

    def job(replica: Replica, after: timedelta) -> Job:
        trigger = IntervalTrigger(hours=1, start_date=start + after, timezone=UTC)
        return Job(replica, trigger)

    set_clock(start)
    first, second = job(one, timedelta()), job(other, timedelta(minutes=offset))
    for each in (first, second):
        each.executor.look()
    for _ in range(4):
        for each, granted in ((first, True), (second, False)):
            assert each.next_run_time is not None
            set_clock(each.next_run_time)
            assert each.fire() is granted
            for looking in (first, second):
                looking.executor.look()
            assert state(connection)[0] is TaskState.OK
    assert first.alarms == second.alarms == []


@pytest.mark.parametrize(
    ("old_fields", "new_fields"),
    [
        ({"hour": "*"}, {"hour": 4}),
        ({"hour": 4}, {"hour": "*"}),
        ({"hour": 4}, {"hour": 12}),
        ({"hour": 12}, {"hour": 4}),
    ],
    ids=["longer", "shorter", "later", "earlier"],
)
def test_a_deployment_of_another_schedule_makes_no_false_alarm(
    one: Replica,
    other: Replica,
    connection: Connection,
    set_clock: SetClock,
    old_fields: dict[str, Any],
    new_fields: dict[str, Any],
) -> None:
    """The old version runs once more after the new one has registered, and is gone then."""
    set_clock(datetime(2026, 3, 28, 3, 30, tzinfo=BERLIN))
    old = Job(one, cron(BERLIN, **old_fields))
    old.executor.look()
    new = Job(other, cron(BERLIN, **new_fields))
    new.executor.look()
    assert old.next_run_time is not None
    set_clock(old.next_run_time)
    old.fire()
    for _ in range(2):
        new.next_run_time = new.trigger.get_next_fire_time(None, new.now)
        set_clock(row(connection)["overdue_at"] + timedelta(seconds=1))
        if new.next_run_time is not None and new.next_run_time <= new.now:
            new.fire()
        new.next_run_time = new.trigger.get_next_fire_time(None, new.now)
        for _ in range(2):
            new.executor.look()
        found = row(connection)
        assert found["schedule"] == new.executor.submission(new.now).schedule.text
        assert found["due_at"] == new.next_run_time
    assert old.alarms == new.alarms == []
