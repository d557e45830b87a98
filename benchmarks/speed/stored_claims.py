"""A stored job's way from due to begun: hand-out and claim, against read and claim."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg

from apscheduler_tasklock import upgrade
from apscheduler_tasklock._database.connection import raw_cursor
from apscheduler_tasklock._lock.jobs import DueRow, HandedOutRow, JobChange, JobRow, JobRows
from apscheduler_tasklock._lock.messages import (
    IN_TIME,
    ClaimRequest,
    HandOut,
    JobMove,
    ReleaseRequest,
)
from apscheduler_tasklock._lock.protocol import TaskLockProtocol
from apscheduler_tasklock.demo.server import EmbeddedServer
from apscheduler_tasklock.schema.table import task_lock_table
from benchmarks.speed.counters import Count, in_server
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.report import Section, median, microseconds, table

# How many jobs are due at a time, for as many workers that are free.
BATCHES = (1, 10)
# Other jobs, which are not due.
OTHERS = 1_000
AFTER_THAT = timedelta(days=1)


@dataclass
class Way:
    """A way from due to begun.

    :ivar seconds: for each job, of the first statement and of the claims
    """

    name: str
    look: Callable[[Any, int], Sequence[HandedOutRow] | Sequence[DueRow]]
    claim: Callable[[Any, Sequence[Any]], list[ClaimRequest]]
    looks: list[float] = field(default_factory=list)
    claims: list[float] = field(default_factory=list)
    count: Count = field(default_factory=Count)


class Rows:
    """The statements of both ways."""

    def __init__(self) -> None:
        self.protocol = TaskLockProtocol(task_lock_table(), "benchmark")
        self.jobs = JobRows(task_lock_table(), "benchmark")

    def hand_out(self, cursor: Any, number: int) -> Sequence[HandedOutRow]:
        return self.jobs.fetch(cursor, {"default": number}).jobs

    def claim_handed_out(self, cursor: Any, found: Sequence[HandedOutRow]) -> list[ClaimRequest]:
        asked = [_asked(each.row, hand_out=_handed(each)) for each in found]
        for request in asked:
            answer = self.protocol.claim_handed_out(cursor, request, stable=True)
            assert answer is not None
            assert answer.granted
        return asked

    def read(self, cursor: Any, number: int) -> Sequence[DueRow]:
        return self.jobs.read_due(cursor, {"default": 3 * number}).jobs

    def claim_and_move(self, cursor: Any, found: Sequence[DueRow]) -> list[ClaimRequest]:
        asked = [_asked(each.row, move=_move(each)) for each in found]
        answers = self.protocol.claim_and_move(cursor, asked, IN_TIME, len(asked))
        assert all(answer.granted for answer in answers.values())
        return asked


def _asked(row: JobRow, **more: Any) -> ClaimRequest:
    return ClaimRequest(
        row.id,
        0.0,
        300.0,
        run_time=row.next_run_time,
        exact=True,
        lease=60.0,
        runs=row.func,
        schedule='"each day"',
        next_in=86_400.0,
        **more,
    )


def _run_time(row: JobRow) -> datetime:
    assert row.next_run_time is not None
    return row.next_run_time


def _handed(found: HandedOutRow) -> HandOut:
    run_time = _run_time(found.row)
    return HandOut(found.row.id, found.handed_id, run_time, run_time + AFTER_THAT, 0.0)


def _move(found: DueRow) -> JobMove:
    run_time = _run_time(found.row)
    return JobMove(found.row.id, found.change_id, run_time, run_time, run_time + AFTER_THAT)


def run(effort: Effort) -> Section:
    """Measure both ways in turn, for one job that is due, and for several."""
    rounds = effort.of(1000, 100)
    section = Section(
        "A stored job, from due to begun",
        "*Hand-out* is what the job store does now: a statement hands due jobs out, which writes, "
        "and each is claimed by a statement of its own. *Read* is what it is to do: a statement "
        "reads up to three times as many due jobs as workers are free, which writes nothing, and "
        f"one claims them all and moves them on. Of {OTHERS + max(BATCHES):,} recurring jobs so "
        f"many are due; the tasks have run before. The median of {rounds} rounds, in which both "
        "take turns, for each job; WAL is the server's, with full-page images off.",
    )
    settings = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off"}
    rows = []
    for number in BATCHES:
        progress(f"{number} stored jobs that are due")
        with EmbeddedServer(settings, loopback=True) as server:
            rows += _measure(server.url, number, rounds, effort)
    header = ["", "jobs due", "look, us", "claim, us", "a job, us", "WAL bytes a job"]
    section.tables.append(table(header, rows))
    return section


def _measure(url: str, number: int, rounds: int, effort: Effort) -> list[list[str]]:
    upgrade(url)
    statements, rng = Rows(), effort.rng()
    ways = [
        Way("hand-out", statements.hand_out, statements.claim_handed_out),
        Way("read", statements.read, statements.claim_and_move),
    ]
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = raw_cursor(connection)
        names = [f"job {each}" for each in range(OTHERS + number)]
        for name in names:
            statements.jobs.add(cursor, name, _job(name), uuid4())
        connection.execute("VACUUM ANALYZE")
        for each in range(-5, rounds):
            for way in rng.sample(ways, len(ways)):
                _once(connection, statements, way, names[:number], is_warm=each >= 0)
    return [
        [
            way.name,
            f"{number}",
            microseconds(median(way.looks)),
            microseconds(median(way.claims)),
            microseconds(median([a + b for a, b in zip(way.looks, way.claims, strict=True)])),
            f"{way.count.wal / rounds / number:,.0f}",
        ]
        for way in ways
    ]


def _job(name: str) -> JobChange:
    columns = {
        "func": "benchmark:job",
        "trigger": {"type": "interval", "length": [1, 0, 0]},
        "options": {"name": "job", "misfire_grace_time": None, "coalesce": True},
        "arguments": {"args": [name], "kwargs": {}},
        "executor": "default",
        "signature": None,
    }
    return JobChange(columns, datetime.now().astimezone() + AFTER_THAT, name)


def _once(
    connection: psycopg.Connection[Any],
    statements: Rows,
    way: Way,
    due: Sequence[str],
    *,
    is_warm: bool,
) -> None:
    """Let jobs be due, take them the one way, and release them."""
    connection.execute(
        "UPDATE task_lock_job SET next_run_time = now() WHERE id = ANY(%s)", [list(due)]
    )
    cursor, count = raw_cursor(connection), Count()
    end_count = in_server(connection, count)
    begun = time.perf_counter()
    found = way.look(cursor, len(due))
    looked = time.perf_counter()
    asked = way.claim(cursor, found)
    claimed = time.perf_counter()
    end_count()
    assert len(asked) == len(due)
    statements.protocol.release_many(
        cursor, [ReleaseRequest(each.task_name, each.claim_id) for each in asked]
    )
    if is_warm:
        way.looks.append((looked - begun) / len(due))
        way.claims.append((claimed - looked) / len(due))
        way.count.wal += count.wal
