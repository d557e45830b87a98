"""Rows that cannot be run: any number of them starves no good job, and fills no log."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger

from apscheduler_tasklock import TaskLockOptionError
from apscheduler_tasklock.jobstore import bad_rows, store
from apscheduler_tasklock.jobstore.bad_rows import MOST_GOOD
from apscheduler_tasklock.jobstore.stored_triggers import encode_trigger
from apscheduler_tasklock.schema.table import LARGEST_DEFINITION, LARGEST_VALUE
from tests.support import claims
from tests.support.outages import UNAVAILABLE
from tests.support.polling import eventually
from tests.support.stored_jobs import StoreReplica, note, ran, store_replicas
from tests.support.waist import LockClient

Make = Callable[..., StoreReplica]
Connection = psycopg.Connection[Any]

SECRET = "a secret of ours"  # of this test
# More than a replica remembers by their names; and as many as could starve all others for minutes.
MANY, MOST = 2_000, 12_000
# So many rows are told of by a line each, and one line has the number of the others.
MOST_LINES = 11

# What is wrong with each of many rows; `n` is another number in each.
BAD = {
    "nobody signed it": 'arguments = \'{"args": ["other"], "kwargs": {}}\'',
    "its function is not allowed": "func = 'os.path:join' || n",
    "it cannot be read": "trigger = jsonb_build_object('type', 'moon' || n)",
    "its function cannot be imported": "func = 'tests.gone' || n || ':away'",
    "its function is gone from its module": "func = 'tests.support.stored_jobs:gone' || n",
    "its lock options are impossible": (
        "arguments = jsonb_set(arguments, '{kwargs}', '{\"task_lock\": {\"lease\": -1}}')"
    ),
    "its executor is not here": "executor = 'gone' || n",
    "its function has a long name": "func = 'tests.' || repeat('x', 2000) || n || ':f'",
}
SAYS = {
    "nobody signed it": "somebody else wrote or changed it",
    "its function is not allowed": "is not allowed here",
    "it cannot be read": "a trigger of an unknown type",
    "its function cannot be imported": "cannot be imported here",
    "its function is gone from its module": "cannot be imported here",
    "its lock options are impossible": "lease",
    "its function has a long name": "its function has more than 1,000 characters",
}


def write_rows(connection: Connection, job_id: str, count: int, bad: str) -> None:
    """Write copies of a job's row that are due, the first a day ago, and have this wrong."""
    connection.execute(
        "CREATE TEMP TABLE written AS SELECT job.*, n FROM task_lock_job AS job,"
        " generate_series(1, %s) AS n WHERE id = %s",
        [count, job_id],
    )
    connection.execute(
        "UPDATE written SET id = id || '-' || n, added_id = gen_random_uuid(),"
        " next_run_time = now() - interval '1 day' + n * interval '1 s',"
        f" task_name = task_name || n, {bad}"
    )
    connection.execute("ALTER TABLE written DROP COLUMN n")
    connection.execute("INSERT INTO task_lock_job SELECT * FROM written; DROP TABLE written")


@pytest.fixture
def key() -> str:
    """An id that no other test uses."""
    return f"job-{uuid4().hex[:8]}"


@pytest.fixture
def make(database_url: str) -> Iterator[Make]:
    """Make a replica with the job store, whose scheduler is paused; it is shut down afterwards."""
    with store_replicas(database_url, paused=True) as make:
        yield make


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the job store has logged that somebody is to see."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("apscheduler_tasklock")
        and record.levelno >= logging.WARNING
        # An answer may come too late on a slow machine.
        and not record.getMessage().startswith(UNAVAILABLE)
    ]


# A text as long as the table takes, in each place of a row where it may be. An id and an executor
# are in an index, which takes no longer ones than these.
LONG = "repeat('x', 200000)"
LONGEST = f"repeat('x', {LARGEST_VALUE - 100})"
IN_A_ROW = {
    "function": f"func = 'tests.' || {LONGEST} || ':f'",
    "id": "id = repeat('x', 100000)",
    "executor": "executor = repeat('x', 100000)",
    "task": f"task_name = {LONGEST}",
    "signature": f"signature = {LONGEST}",
    "name": f"options = jsonb_set(options, '{{name}}', to_jsonb({LONG}))",
    "an option": f"options = jsonb_set(options, '{{coalesce}}', to_jsonb({LONG}))",
    "type of the trigger": f"trigger = jsonb_build_object('type', {LONG})",
    "fields of the trigger": (
        "trigger = jsonb_set(trigger, '{fields}',"
        f" jsonb_build_object('hour', {LONG}, {LONG}, '1'))"
    ),
    "hours of the trigger": (
        "trigger = jsonb_set(trigger, '{fields}',"
        " jsonb_build_object('minute', '*' || repeat(',1', 20000)))"
    ),
    "zone of the trigger": f"trigger = jsonb_set(trigger, '{{timezone}}', to_jsonb({LONG}))",
    "start of the trigger": f"trigger = jsonb_set(trigger, '{{start_date}}', to_jsonb({LONG}))",
    "type of an argument": (
        f"arguments = jsonb_set(arguments, '{{args,0}}', jsonb_build_object('$', {LONG}))"
    ),
    "an argument": (
        "arguments = jsonb_set(arguments, '{args,0}',"
        f" jsonb_build_object('$', 'UUID', 'value', {LONG}))"
    ),
    "zone of an argument": (
        "arguments = jsonb_set(arguments, '{args,0}', jsonb_build_object('$', 'datetime', 'value',"
        f" '2026-01-01T00:00:00', 'zone', {LONG}))"
    ),
    "lock option": (
        "arguments = jsonb_set(arguments, '{kwargs}', jsonb_build_object('task_lock',"
        f" jsonb_build_object('lease', {LONG})))"
    ),
    "name of a lock option": (
        "arguments = jsonb_set(arguments, '{kwargs}', jsonb_build_object('task_lock',"
        f" jsonb_build_object({LONG}, 1)))"
    ),
    "name of the task": (
        "arguments = jsonb_set(arguments, '{kwargs}', jsonb_build_object('task_lock',"
        f" jsonb_build_object('name', {LONG})))"
    ),
}
# No log line has more characters, a traceback included.
LONGEST_LINE = 20_000


@pytest.mark.parametrize("place", IN_A_ROW)
def test_no_text_of_a_row_is_told_or_remembered_whole(
    make: Make, key: str, connection: Connection, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    caplog.set_level(logging.DEBUG)
    replica = make(poll_interval=0.3)
    replica.scheduler.add_job(note, "cron", minute="*", args=[key], id=key)
    connection.execute(f"UPDATE task_lock_job SET next_run_time = now(), {IN_A_ROW[place]}")
    replica.scheduler.resume()
    replica.run_at(note, f"{key}-next", misfire_grace_time=None)
    replica.runs(f"{key}-next")
    [shown] = [job for job in replica.scheduler.get_jobs() if job.id != f"{key}-next"]
    assert max(len(text) for text in (shown.name, shown.func_ref, str(shown))) < LONGEST_LINE
    replica.scheduler.pause_job(shown.id)
    replica.scheduler.remove_job(shown.id)
    replica.shutdown()  # whatever it does meanwhile was told then
    formatter = logging.Formatter()
    told = [formatter.format(record) for record in caplog.records]
    told.remove(f"Removed job {shown.id}")  # APScheduler's, of the id that it was called with
    assert max(map(len, told)) < LONGEST_LINE


@pytest.mark.parametrize("name", ["id", "executor", "name"])
def test_a_name_that_is_too_long_is_an_error_when_its_job_is_added(
    make: Make, key: str, name: str
) -> None:
    replica = make()
    with pytest.raises(TaskLockOptionError, match="more than 1,000 characters") as raised:
        replica.run_at(note, key, after=3600, **{name: "x" * 1001})
    assert len(str(raised.value)) < 2000
    assert replica.scheduler.get_jobs() == []
    replica.run_at(note, key, after=3600, name="x" * 1000)


def test_of_too_many_recurring_jobs_some_are_not_listed_which_is_told(
    make: Make, key: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MOST_RECURRING", 2)
    replica = make()
    for number in range(3):
        replica.scheduler.add_job(note, "interval", hours=1, args=[key], id=f"{key}-{number}")
    for _ in range(2):
        assert len(replica.store.shared_jobs.recurring_tasks()) == 2
    assert caplog.text.count("has more than 2 recurring jobs") == 1


def test_a_job_that_is_too_large_is_an_error_when_it_is_added_or_changed(
    make: Make, key: str, connection: Connection
) -> None:
    replica = make()
    replica.run_at(note, key, after=3600)
    [bytes_] = connection.execute(
        "SELECT octet_length(trigger::text || options::text || arguments::text) FROM task_lock_job"
    ).fetchone() or (0,)
    fits = key + "x" * (LARGEST_DEFINITION - bytes_)
    replica.scheduler.modify_job(key, args=[fits])
    with pytest.raises(TaskLockOptionError, match=r"500,001 bytes as JSON, and at most 500,000"):
        replica.scheduler.modify_job(key, args=[fits + "x"])
    with pytest.raises(TaskLockOptionError, match=r"'large' cannot be stored: .* bytes as JSON"):
        replica.scheduler.add_job(note, "interval", hours=1, args=[fits + "x" * 99], id="large")
    [job] = replica.scheduler.get_jobs()
    assert job.args == (fits,)


@pytest.mark.parametrize("bad", BAD)
def test_a_flood_of_rows_starves_no_good_job_and_fills_no_log(
    make: Make, key: str, connection: Connection, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    replica = make(store={"secret": SECRET} if bad == "nobody signed it" else None)
    replica.run_at(note, key, after=3600)
    count = MOST if bad == "nobody signed it" else MANY
    write_rows(connection, key, count, BAD[bad])
    # One has come due in the midst of them, and the other after them.
    old = datetime.now(timezone.utc) - timedelta(days=1, seconds=-count / 2 - 0.5)
    replica.scheduler.add_job(
        note, "date", run_date=old, args=[f"{key}-old"], id=f"{key}-old", misfire_grace_time=None
    )
    replica.run_at(note, f"{key}-new", misfire_grace_time=None)
    replica.scheduler.resume()
    # A slow machine reads that many rows for minutes.
    eventually(lambda: ran[f"{key}-old"] and ran[f"{key}-new"], 300)
    replica.run_at(note, f"{key}-next", misfire_grace_time=None)
    replica.runs(f"{key}-next")
    if bad in SAYS:
        told = lines(caplog)
        assert SAYS[bad] in told[0]
        eventually(lambda: any(line.startswith("And ") for line in lines(caplog)), 300)
        told = lines(caplog)
        assert len(told) <= MOST_LINES
        [sum_of_others] = [line for line in told if line.startswith("And ")]
        assert sum_of_others.startswith(f"And {count - MOST_LINES + 1} more jobs are not run here")
        assert max(map(len, told)) < 2000
    assert (ran["other"], ran[key]) == ([], [])


def test_many_good_jobs_among_bad_rows_run(
    make: Make, key: str, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """More than are kept at a time of what was found good."""
    replica = make()
    replica.run_at(note, key, after=3600, misfire_grace_time=None)
    good = "func = CASE WHEN n % 2 = 0 THEN func ELSE 'gone' || n || ':f' END"
    write_rows(connection, key, 2 * MOST_GOOD + 600, good)
    replica.scheduler.resume()
    replica.runs(key, MOST_GOOD + 300)
    eventually(lambda: "And " in caplog.text)
    assert len(ran[key]) == MOST_GOOD + 300
    assert len(lines(caplog)) <= MOST_LINES


def test_a_good_job_waits_for_no_backlog_of_rows_that_take_long(
    make: Make, key: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look is over after a single row, as if that row had taken a second."""
    monkeypatch.setattr(bad_rows, "LOOK_FOR", 0.0)
    replica = make(max_workers=1)
    replica.run_at(note, key, after=3600, misfire_grace_time=None)
    of_each = "arguments = jsonb_set(arguments, '{args,1}', to_jsonb(n), true)"
    write_rows(connection, key, 100, of_each)
    replica.run_at(note, f"{key}-good", args=[key, "good"], misfire_grace_time=None)
    replica.scheduler.resume()
    replica.runs(key, 101)
    order = [value for _, _, value in ran[key]]
    # One worker runs what is read in the order of the reads, but for the few that wait for it.
    assert order.index("good") < 10
    assert set(order) == {"good", *range(1, 101)}


def nested(depth: int) -> Any:
    """Return a trigger of nested combinations, which has a run time each hour."""
    trigger: Any = CronTrigger(minute=0, timezone="Europe/Berlin")
    for _ in range(depth):
        parts = [CronTrigger(minute=f"*/{n % 5 + 1}", timezone="Europe/Berlin") for n in range(50)]
        trigger = AndTrigger([trigger, OrTrigger(parts), *parts[:40]])
    return trigger


@pytest.mark.nightly
@pytest.mark.timeout(700)
def test_a_thousand_due_rows_with_nested_triggers_leave_a_good_job_its_turn(
    make: Make, key: str, connection: Connection
) -> None:
    """The rows are no bad ones, and each takes a second or more."""
    costly = json.dumps(encode_trigger(nested(9)))
    replica = make()
    replica.run_at(note, key, after=3600, args=["other"])
    write_rows(connection, key, 1000, f"trigger = '{costly}'")
    good = {"args": [f"{key}-good"], "id": f"{key}-good", "misfire_grace_time": None}
    replica.scheduler.add_job(note, "interval", seconds=10, **good)
    seen = [time.monotonic()]
    replica.scheduler.resume()
    for count in range(1, 10):
        eventually(lambda number=count: len(ran[f"{key}-good"]) >= number, 120)
        seen.append(time.monotonic())
    assert max(later - earlier for earlier, later in pairwise(seen)) < 60


@pytest.mark.nightly
@pytest.mark.timeout(700)
def test_costly_triggers_starve_no_good_job_and_hold_up_no_takeover(
    make: Make, make_locks: Callable[..., LockClient], key: str, connection: Connection
) -> None:
    """Each takes all steps that a trigger may, so that a minute is less than all of them take."""
    parts = [CronTrigger(minute=number % 60, timezone="Europe/Berlin") for number in range(900)]
    costly = json.dumps(encode_trigger(AndTrigger(parts)))
    dying = make_locks(replica_id="dead")
    what = f"{note.__module__}:{note.__qualname__}"
    hourly: dict[str, Any] = {"min_lock": 3240, "max_lock": 18_000}
    claims.die(dying, claims.held(dying, "memory:own", lease=1, failover=True, runs=what, **hourly))
    replica = make(failover=True)
    replica.run_at(note, key, after=3600)
    write_rows(connection, key, 150, f"trigger = '{costly}'")
    connection.execute("""
        UPDATE task_lock_job SET next_run_time = now() + interval '1 d'
        WHERE next_run_time > now() - interval '1 d' + interval '40 s'
    """)  # the others are due
    replica.scheduler.add_jobstore(MemoryJobStore(), "memory")
    replica.scheduler.add_job(note, "interval", hours=1, args=["own"], id="own", jobstore="memory")
    replica.run_at(note, f"{key}-new", misfire_grace_time=None)
    replica.scheduler.resume()
    eventually(lambda: ran["own"])
    eventually(lambda: ran[f"{key}-new"], 600)  # it is behind all that are due
