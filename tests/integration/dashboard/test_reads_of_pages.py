"""What the tests of pages take for read is what the database selects of the same rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import product
from typing import Any

import psycopg
import pytest
from psycopg import Cursor

from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock._words.stories import story_of
from apscheduler_tasklock.dashboard.screens import BAD_OUTCOMES
from apscheduler_tasklock.schema.table import task_lock_table
from apscheduler_tasklock.status import ORDERS, Lane, TaskState
from tests.support import rows
from tests.support.pages import Known
from tests.support.waist import WatchedRows, raw_cursor, with_findings

Connection = psycopg.Connection[Any]

OPERATIONS = Operations(task_lock_table())


@dataclass(frozen=True)
class Both:
    """The same rows in the database, and as they are read.

    :ivar cursor: of one transaction, whose time stands still
    """

    cursor: Cursor[Any]
    known: Known

    def ago(self, minutes: float) -> datetime:
        return self.known.now - timedelta(minutes=minutes)


@pytest.fixture
def both(connection: Connection) -> Any:
    with connection.transaction():
        for name, columns in rows.ROWS.items():
            rows.add_task(connection, name, **columns)
        for number, outcome in enumerate(("ok", "ok", "error", "died")):
            began = f"now() - interval '{30 * number + 1} min'"
            rows.add_run(
                connection,
                ("sync", "mail")[number % 2],
                number,
                outcome=f"'{outcome}'",
                replica=f"'web-{number}'",
                **({"error_type": "'KeyError'", "error": "'no 100%'"} if number == 2 else {}),
                scheduled_at=began,
                started_at=began,
                ended_at=f"{began} + interval '{number % 3 + 5} min'",
            )
        rows.add_miss(connection, "mail", 1)
        rows.add_miss(connection, "sync", 1, scheduled_at="now() - interval '3 h'")
        rows.add_action(connection, "mail", 1)
        rows.add_action(connection, "shop:*", 2, until="NULL::timestamptz")
        rows.add_action(connection, "mail", 3, outcome="'run'")
        rows.add_replica(connection, "one", ["ok"])
        rows.add_replica(connection, "two", seen_at="now() - interval '2 days'")
        rows.add_replica(connection, "gone", seen_at="now() - interval '2 h'")
        rows.add_job(connection, "later")
        rows.add_job(connection, "paused", next_run_time="NULL")
        past = "now() - interval '1 h'"
        rows.add_job(connection, "overdue", next_run_time=past, changed_at=past)
        cursor = raw_cursor(connection)
        known = Known(
            OPERATIONS.tasks(cursor),
            OPERATIONS.runs(cursor, limit=1000),
            OPERATIONS.replicas(cursor),
            OPERATIONS.jobs(cursor),
            # No entry of the history tells of the tasks' last runs.
            known_since={
                task.name: task.succeeded_at
                for task in OPERATIONS.tasks(cursor)
                if task.succeeded_at is not None
            },
            now=OPERATIONS.overview(cursor, None, 0).overview.now,
        )
        yield Both(cursor, known)


def test_an_overview(both: Both) -> None:
    for limit, pattern in product((4, 100), ("*", "*late*", "nothing")):
        like = [pattern.replace("*", "%")]
        read = OPERATIONS.overview(both.cursor, like, limit)
        jobs = {job.id: job for job in OPERATIONS.jobs(both.cursor, overdue=True)}
        rows = WatchedRows(
            read.overview.now,
            read.watched,
            read.more,
            replicas=OPERATIONS.fleet(both.cursor, like),
            silences=OPERATIONS.silences(both.cursor, like),
            jobs={name: job for name, job in jobs.items() if pattern == "*"},
            pauses_of_all=read.pauses_of_all,
            all_paused=read.overview.paused if read.all_paused else (),
            unmatched=[each.replace("%", "*") for each in read.unmatched],
        )
        found = with_findings(read.overview, rows)
        assert both.known.overview(pattern, limit=limit) == found, (limit, pattern)


def test_tasks(both: Both) -> None:
    for order in ORDERS:
        for states, limit, offset in (
            ((), None, 0),
            (("late", "new", "dead"), None, 0),
            ((), 7, 9),
        ):
            asked = {"order": order, "offset": offset}
            found = OPERATIONS.tasks(both.cursor, ["%a%"], limit, states=states or None, **asked)
            chosen = [TaskState(state) for state in states]
            assert both.known.tasks("*a*", states=chosen, limit=limit, **asked) == found, order


def test_runs(both: Both) -> None:
    for wanted in (
        {},
        {"outcomes": ("error",)},
        {"outcomes": BAD_OUTCOMES},
        {"kind": "operator"},
        {"replica": "web-1"},
        {"error": "eRRor: NO 1"},
        {"error": "1%0"},
        {"since": both.ago(50)},
        {"until": both.ago(50)},
        {"limit": 2, "offset": 1},
        {"order": "name", "limit": 3},
        {"order": "name"},
        {"order": "duration", "offset": 2},
        {"order": "duration", "outcomes": ("ok", "missed"), "limit": 2},
    ):
        found = OPERATIONS.runs(both.cursor, like=["%m%", "sync"], **wanted)
        asked = {name.removesuffix("s"): value for name, value in wanted.items()}
        assert both.known.runs("*m*", "sync", **asked) == found, wanted


def test_lanes(both: Both) -> None:
    """The parts are so short that no entries are one."""
    for since, until in ((60, 0), (59, 32), (500, 100), (10, 5)):
        for patterns in ((), ("mail",), ("s*",), ("shop:*",), ("*o*",)):
            for by, limit, offset in (("task", 50, 0), ("task", 7, 3), ("replica", 20, 0)):
                asked = {"by": by, "parts": 10_000, "limit": limit, "offset": offset}
                span = both.ago(since), both.ago(until)
                like = [pattern.replace("*", "%") for pattern in patterns] or None
                found = OPERATIONS.lanes(both.cursor, like, *span, **asked)
                known = both.known.lanes(*span, *patterns, **asked)
                case = span, patterns, asked
                assert _in_order(known.lanes) == _in_order(found.lanes), case
                assert replace(known, lanes=()) == replace(found, lanes=()), case


def _in_order(lanes: tuple[Lane, ...]) -> list[Lane]:
    """Return lanes in which entries of the same time have an order."""
    return [replace(lane, entries=tuple(sorted(lane.entries, key=repr))) for lane in lanes]


def test_the_last_runs_of_tasks(both: Both) -> None:
    names = ("mail", "sync", "nothing")
    assert both.known.recent_runs(*names, limit=2) == OPERATIONS.recent_runs(both.cursor, names, 2)


def test_stored_jobs(both: Both) -> None:
    for asked in ({}, {"overdue": True}, {"limit": 2}, {"order": "name", "offset": 1}):
        assert both.known.jobs(**asked) == OPERATIONS.jobs(both.cursor, **asked), asked


def test_a_story(both: Both) -> None:
    assert both.known.why("late") == story_of(*OPERATIONS.why(both.cursor, "late", None))
