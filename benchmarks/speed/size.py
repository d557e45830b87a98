"""How large the table is after very many claims."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import psycopg

from apscheduler_tasklock import upgrade
from apscheduler_tasklock._database.connection import raw_cursor
from apscheduler_tasklock._lock.messages import ClaimRequest, ReleaseRequest
from apscheduler_tasklock._lock.protocol import TaskLockProtocol
from apscheduler_tasklock.demo.server import EmbeddedServer
from apscheduler_tasklock.schema.table import task_lock_table
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.report import Goal, Section, table

TASKS = 100
WORKERS = 4
STEPS = 20
MOST = 2**20


def run(effort: Effort) -> Section:
    """Claim and release, and look at the table now and then."""
    claims = effort.of(1_000_000, 20_000)
    section = Section(
        "Size of the table",
        f"{claims:,} claims over {TASKS} tasks, each released, by {WORKERS} processes, with "
        "autovacuum as PostgreSQL has it and synchronous_commit off (which saves time and does not "
        "matter to the size). Table and index together.",
    )
    with EmbeddedServer(loopback=True) as server:
        upgrade(server.url)
        begun = time.monotonic()
        sizes = _claim(server.url, claims)
        seconds = time.monotonic() - begun
        table_bytes, index_bytes, hot = _details(server.url)
    section.tables.append(
        table(
            ["claims", "largest seen", "at the end", "table", "index", "HOT updates", "took"],
            [
                [
                    f"{claims:,}",
                    *(_kib(size) for size in (max(sizes), sizes[-1], table_bytes, index_bytes)),
                    f"{hot:.1%}",
                    f"{seconds:.0f} s",
                ]
            ],
        )
    )
    what = f"table after {claims:,} claims over {TASKS} tasks"
    section.goals.append(Goal(what, "under 1 MiB", _kib(max(sizes)), max(sizes) < MOST))
    return section


def _claim(url: str, claims: int) -> list[int]:
    """Make all claims, and return the sizes that the table had on the way."""
    sizes = []
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        for step in range(STEPS):
            each = claims // STEPS // WORKERS
            shares = [range(worker, TASKS, WORKERS) for worker in range(WORKERS)]
            list(pool.map(work, [url] * WORKERS, shares, [each] * WORKERS))
            with psycopg.connect(url) as connection:
                row = connection.execute(
                    "SELECT pg_total_relation_size('task_lock')::bigint"
                ).fetchone()
            assert row is not None
            sizes.append(int(row[0]))
            progress(f"{(step + 1) * claims // STEPS:,} claims, {_kib(sizes[-1])}")
    return sizes


def work(url: str, tasks: range, claims: int) -> None:
    """Claim and release one task after the other."""
    protocol = TaskLockProtocol(task_lock_table(), "bench")
    options = "-c synchronous_commit=off"
    with psycopg.connect(url, autocommit=True, options=options) as connection:
        cursor = raw_cursor(connection)
        for number in range(claims):
            task = f"task {tasks[number % len(tasks)]}"
            request = ClaimRequest(task, min_lock=0.0, max_lock=50.0)
            assert protocol.claim(cursor, request).granted
            protocol.release(cursor, ReleaseRequest(task, request.claim_id))


def _details(url: str) -> tuple[int, int, float]:
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT pg_table_size('task_lock')::bigint, pg_indexes_size('task_lock')::bigint,"
            " n_tup_hot_upd::float8 / n_tup_upd FROM pg_stat_user_tables"
            " WHERE relname = 'task_lock'"
        ).fetchone()
    assert row is not None
    return row[0], row[1], row[2]


def _kib(size: int) -> str:
    return f"{size / 1024:,.0f} KiB"
