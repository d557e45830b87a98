"""Stored jobs in every time zone that a user can write: their next run times, and their rows.

That triggers and arguments come back is tested in ``tests/unit/test_jobstore_zones.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import psycopg
import pytest
from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.cron import CronTrigger

from apscheduler_tasklock import TaskLockOptionError
from apscheduler_tasklock._lock.database_clock import LATEST
from tests.support.commands import COMMAND, ROOT, environment
from tests.support.postgres import Server
from tests.support.stored_jobs import StoreReplica, note
from tests.support.zones import (
    HOSTILE,
    MOMENTS,
    SPELLINGS_OF_AN_OFFSET,
    SPELLINGS_OF_BERLIN,
    SPELLINGS_OF_UTC,
    TIMES,
    UNKNOWN,
    ZONES,
    Summertime,
    has_triggers_in,
    in_zone,
    triggers_in,
)

Connection = psycopg.Connection[Any]

# The moments that are times in the tables.
NEXT = {name: moment for name, moment in MOMENTS.items() if 2 < moment.year < 8000}


@pytest.fixture
def paused(database_url: str) -> Iterator[StoreReplica]:
    """A replica with the job store that runs nothing."""
    replica = StoreReplica(database_url)
    replica.scheduler.start(paused=True)
    yield replica
    replica.scheduler.remove_all_jobs()  # else those that are due would be run by the shutdown
    replica.shutdown()


def stored(replica: StoreReplica, trigger: Any, *args: Any, **options: Any) -> Any:
    """Add a job, and return it as another replica gets it."""
    job_id = uuid4().hex
    replica.scheduler.add_job(note, trigger, args=["key", *args], id=job_id, **options)
    return replica.scheduler.get_job(job_id)


@pytest.fixture(scope="module")
def shared(server: Server, template: str) -> Iterator[StoreReplica]:
    """One such replica for many tests, whose jobs have names that no other test uses."""
    with server.database(template) as url:
        replica = StoreReplica(url)
        replica.scheduler.start(paused=True)
        yield replica
        replica.scheduler.remove_all_jobs()
        replica.shutdown()


@pytest.mark.parametrize("zone", ZONES.values(), ids=ZONES)
class TestEveryZone:
    @pytest.fixture
    def paused(self, shared: StoreReplica) -> StoreReplica:
        return shared

    def test_what_a_user_passes_to_add_job_is_the_next_run_time(
        self, paused: StoreReplica, zone: Any
    ) -> None:
        when = in_zone(TIMES[0], zone)
        named = {"timezone": zone} if has_triggers_in(zone) else {}
        by_time = stored(paused, "interval", hours=1, next_run_time=when, **named)
        by_date = stored(paused, "date", run_date=when)
        assert [by_time.next_run_time, by_date.next_run_time] == [when, when]
        again = paused.scheduler.modify_job(by_time.id, next_run_time=in_zone(TIMES[1], zone))
        assert again.next_run_time == TIMES[1]
        moved = paused.scheduler.reschedule_job(by_time.id, trigger="date", run_date=when)
        assert moved.next_run_time == when

    def test_a_job_has_its_next_run_time_in_the_zone_of_its_trigger(
        self, paused: StoreReplica, zone: Any
    ) -> None:
        for name, trigger in triggers_in(zone).items():
            job = stored(paused, trigger)
            found = job.trigger.get_next_fire_time(None, job.next_run_time)
            assert (name, job.next_run_time.utcoffset()) == (name, found.utcoffset())


def row_of(connection: Connection, job_id: str) -> Any:
    """Return all that the table has of a job."""
    read = "SELECT to_jsonb(job) FROM task_lock_job AS job WHERE id = %s"
    found = connection.execute(read, [job_id]).fetchone()
    return found and found[0]


SAME_ZONES = {
    "UTC": SPELLINGS_OF_UTC,
    "Berlin": SPELLINGS_OF_BERLIN,
    "-03": SPELLINGS_OF_AN_OFFSET,
    "renamed": {"old": "Asia/Calcutta", "new": ZoneInfo("Asia/Kolkata")},
}


class TestDeclaredInAnotherSpelling:
    """``replace_existing=True``, where replicas write a time zone differently."""

    @pytest.mark.parametrize("spellings", SAME_ZONES.values(), ids=SAME_ZONES)
    def test_a_job_stays_as_it_is(
        self, paused: StoreReplica, connection: Connection, spellings: dict[str, Any]
    ) -> None:
        first, *others = spellings.values()
        for name, trigger in triggers_in(first).items():
            options = {"id": name, "args": [name], "replace_existing": True}
            paused.scheduler.add_job(note, trigger, **options)
            if name == "date":
                paused.scheduler.pause_job(name)
            elif name != "now":  # that it is another moment is another schedule
                paused.scheduler.modify_job(name, next_run_time=TIMES[0] + timedelta(minutes=1))
            before = row_of(connection, name)
            for other in map(triggers_in, others if name != "now" else []):
                if name in other:
                    paused.scheduler.add_job(note, other[name], **options)
                    assert row_of(connection, name) == before

    def test_an_intervals_zone_changes_nothing(
        self, paused: StoreReplica, connection: Connection
    ) -> None:
        options = {"id": "job", "args": ["job"], "replace_existing": True}
        paused.scheduler.add_job(note, "interval", hours=1, timezone="UTC", **options)
        before = row_of(connection, "job")
        paused.scheduler.add_job(note, "interval", hours=1, timezone="Asia/Tokyo", **options)
        assert row_of(connection, "job") == before

    @pytest.mark.parametrize("zone", ["Europe/Athens", "America/New_York", "Etc/GMT-1"])
    def test_another_zone_is_another_schedule(
        self, paused: StoreReplica, connection: Connection, zone: str
    ) -> None:
        options = {"id": "job", "args": ["job"], "replace_existing": True}
        paused.scheduler.add_job(note, "cron", hour=3, timezone="Europe/Chisinau", **options)
        before = row_of(connection, "job")
        paused.scheduler.add_job(note, "cron", hour=3, timezone=zone, **options)
        after = row_of(connection, "job")
        assert after["trigger"] != before["trigger"]


@pytest.mark.parametrize("make_zone", UNKNOWN.values(), ids=UNKNOWN)
class TestZonesThatNobodyElseKnows:
    def test_a_date_is_a_moment_all_the_same(
        self, paused: StoreReplica, make_zone: Callable[[], tzinfo]
    ) -> None:
        at = datetime(2027, 7, 1, 12, tzinfo=make_zone())
        job = stored(paused, "date", run_date=at)
        assert job.next_run_time == job.trigger.run_date == at
        assert job.trigger.run_date.isoformat() == at.isoformat()


@pytest.mark.parametrize("never", [datetime.max, datetime(9999, 12, 31)])
def test_a_run_date_at_the_end_of_time_is_the_last_one_that_the_tables_take(
    paused: StoreReplica, never: datetime
) -> None:
    job = stored(paused, "date", run_date=never.replace(tzinfo=timezone.utc))
    assert job.next_run_time == LATEST


@pytest.mark.parametrize("moment", NEXT.values(), ids=NEXT)
def test_the_next_run_time_of_a_moment_that_a_clock_shows_twice_or_never(
    shared: StoreReplica, moment: datetime
) -> None:
    assert stored(shared, "date", run_date=moment).next_run_time.timestamp() == moment.timestamp()


def test_a_job_in_a_zone_that_nobody_else_knows_is_not_stored(paused: StoreReplica) -> None:
    zone = Summertime()
    for options in (
        {"trigger": CronTrigger(hour=3, timezone=zone), "args": ["key"]},
        {"args": ["key", datetime(2027, 7, 1, tzinfo=zone)]},
    ):
        with pytest.raises(TaskLockOptionError, match="cannot be stored: its time zone"):
            paused.scheduler.add_job(note, id="job", **options)
    assert paused.scheduler.get_jobs() == []


# Which names are none is tested in tests/unit/test_jobstore_zones.py.
@pytest.mark.parametrize("name", HOSTILE[:1])
@pytest.mark.parametrize("place", ["trigger", "part", "argument"])
def test_a_row_with_no_zone_is_unreadable_and_nothing_else(
    database_url: str, connection: Connection, name: str, place: str
) -> None:
    replica, key = StoreReplica(database_url), uuid4().hex
    replica.scheduler.start(paused=True)
    at = datetime(2026, 1, 1, tzinfo=ZoneInfo("Asia/Tokyo"))
    cron = CronTrigger(hour=3, timezone="Asia/Tokyo")
    trigger = OrTrigger([cron]) if place == "part" else cron
    options = {"args": [key, at], "next_run_time": datetime.now(timezone.utc)}
    replica.scheduler.add_job(note, trigger, id="bad", **options)
    column = "arguments" if place == "argument" else "trigger"
    connection.execute(
        f"UPDATE task_lock_job SET {column} = replace({column}::text, 'Asia/Tokyo', %s)::jsonb",
        [name],
    )
    try:
        [job] = replica.scheduler.get_jobs()
        assert (job.id, str(job.trigger)[:12]) == ("bad", "unreadable: ")
        assert replica.scheduler.pause_job("bad").next_run_time is None
        replica.scheduler.modify_job("bad", next_run_time=datetime.now(timezone.utc))
        replica.run_at(note, key)
        replica.scheduler.resume()
        assert replica.runs(key)
        assert replica.scheduler.add_job(note, cron, id="bad", args=[key], replace_existing=True)
        assert str(replica.scheduler.get_job("bad").trigger) == str(cron)
    finally:
        replica.shutdown()


PROGRAM = """
import json, os
from datetime import datetime, timedelta
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger
from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore
from tests.support.polling import eventually
from tests.support.stored_jobs import note, ran
import dateutil.tz, pytz, zoneinfo

url = os.environ["TASKLOCK_DATABASE_URL"]
name = os.environ["TZ"]
# By the library that has made it.
zones = {
    "default": None,
    "name": name,
    "zoneinfo": zoneinfo.ZoneInfo(name),
    "pytz": pytz.timezone(name),
    "dateutil": dateutil.tz.gettz(name),
}

"""
RUNS = """
def add_jobs(name, zone):
    timezone = {} if zone is None else {"timezone": zone}

    def add(kind, *trigger, **options):
        keys.append(f"{kind} {name}")
        scheduler.add_job(note, *trigger, args=[keys[-1]], id=keys[-1], **options)

    now = datetime.now()
    here = datetime.now(scheduler.timezone)
    add("now")
    add("date", "date", run_date=now + timedelta(seconds=0.1), **timezone)
    add("date here", "date", run_date=here)
    add("interval", "interval", seconds=0.3, **timezone)
    add("start", "interval", seconds=0.3, start_date=now, **timezone)
    add("cron", "cron", second="*", **timezone)
    add("tab", CronTrigger.from_crontab("* * * * *", **timezone), next_run_time=here)
    every_second = CronTrigger(second="*", **timezone)
    add("and", AndTrigger([every_second, every_second]))
    add("or", OrTrigger([every_second, IntervalTrigger(hours=1, **timezone)], jitter=1))
    add("late", "cron", hour=3, next_run_time=None, **timezone)
    scheduler.modify_job(keys[-1], next_run_time=here)
    try:
        add("days", "calendarinterval", days=1, next_run_time=here, **timezone)
    except LookupError:  # APScheduler 3.10 has none
        keys.pop()

keys = []
scheduler = BackgroundScheduler(
    jobstores={"default": TaskLockJobStore(url, functions=["tests."])},
    executors={"default": TaskLockExecutor(url)},
    job_defaults={"misfire_grace_time": None},  # of a busy machine, all of them are due at once
)
scheduler.start()
scheduler.add_job(note, args=["without an id"])
for at in (datetime.now(dateutil.tz.tzlocal()), datetime.now(dateutil.tz.gettz())):
    keys.append(f"argument {len(keys)}")
    scheduler.add_job(note, "date", run_date=at, args=[keys[-1], {"at": at}])
for each in zones.items():
    add_jobs(*each)
eventually(lambda: all(ran[key] for key in [*keys, "without an id"]))
scheduler.shutdown()
print(len(keys))
"""
OLD = """
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore

def add_jobs(name, zone):
    timezone = {} if zone is None else {"timezone": zone}

    def add(kind, *trigger, **options):
        job_id = f"{kind} {name}"
        scheduler.add_job(note, *trigger, id=job_id, **{"args": [job_id], **options})

    later = datetime(2100, 1, 1)
    options = {"next_run_time": here + timedelta(days=300)}
    add("date", "date", run_date=later, **timezone)
    add("interval", "interval", hours=1, **options, **timezone)
    add("cron", "cron", hour=3, **options, **timezone)
    add("start", "interval", weeks=1, start_date=later, **timezone)
    add("argument", "date", run_date=later, args=[[here]], **timezone)
    add("and", AndTrigger([CronTrigger(hour=hour, **timezone) for hour in (3, "*")]), **options)

store = SQLAlchemyJobStore(url.replace("postgresql://", "postgresql+psycopg://"))
scheduler = BackgroundScheduler(jobstores={"default": store})
scheduler.start(paused=True)
here = datetime.now(scheduler.timezone)
for each in zones.items():
    add_jobs(*each)
times = {job.id: job.next_run_time.timestamp() for job in scheduler.get_jobs()}
scheduler.shutdown()
print(json.dumps(times))
"""


def run_in(zone: str, program: str, url: str) -> str:
    """Run a program on a machine that is in a time zone, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM + program],
        env=environment(url, TZ=zone),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_jobs_of_each_kind_run_on_a_machine_in_a_zone(database_url: str, zone: str) -> None:
    assert int(run_in(zone, RUNS, database_url)) >= 50


@pytest.mark.nightly
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_jobs_of_another_store_are_taken_over_on_a_machine_in_a_zone(
    direct_url: str, connection: Connection, zone: str
) -> None:
    times = json.loads(run_in(zone, OLD, direct_url))
    done = subprocess.run(
        [*COMMAND, "import-jobs", "--functions", "tests."],
        env=environment(direct_url, TZ=zone),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert sorted(done.stdout.splitlines()) == [f"{job_id}: added" for job_id in sorted(times)]
    assert done.returncode == 0
    read = "SELECT id, extract(epoch FROM next_run_time)::float FROM task_lock_job"
    assert dict(connection.execute(read).fetchall()) == pytest.approx(times, abs=1e-5)
