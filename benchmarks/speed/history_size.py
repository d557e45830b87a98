"""How large the table and its run history are after very many runs."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import psycopg
from psycopg.rows import class_row

from apscheduler_tasklock import upgrade
from apscheduler_tasklock._lock.outcomes import RunOutcome
from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.report import Goal, Section, table
from tests.support.waist import (
    HISTORY,
    Claim,
    ClaimRequest,
    ReleaseRequest,
    protocol_of,
    raw_cursor,
)

TASKS = 100
WORKERS = 4
STEPS = 20
# Bytes of all, and of the task lock table alone.
MOST, MOST_LOCK = 5 * 10**6, 10**6

SCHEDULE = '{"type":"interval","length":[0,60,0]}'
# One run in 16 fails, with a message of 100 characters, so that entries differ in length. 16 has no
# divisor in common with a process's 25 tasks, so that all tasks fail equally often.
FAILS = 16
MESSAGE = 100

# The steps of the 20 that have a line in the table of results.
SHOWN = (1, 2, 5, 10, 15, 20)


@dataclass(frozen=True)
class Size:
    """Bytes on disk after some runs, and counts of updates.

    :ivar runs: how many runs have ended
    :ivar lock: of the task lock table, with its index
    :ivar history: of the run history's table
    :ivar history_index: of its index
    :ivar entries: how many rows the history has
    :ivar updates: how many entries were overwritten
    :ivar hot: how many of those needed no new entry in the index
    """

    lock: int
    history: int
    history_index: int
    entries: int
    updates: int
    hot: int
    runs: int = 0

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.lock + self.history + self.history_index


def run(effort: Effort) -> Section:
    """Claim and release, and look at the tables now and then."""
    runs = effort.of(1_000_000, 50_000)
    section = Section(
        "Size of the table and its run history",
        f"{runs:,} runs of {TASKS} tasks, by {WORKERS} processes, with the {HISTORY} newest "
        "of each task kept, autovacuum as PostgreSQL has it, and synchronous_commit off (which "
        f"saves time and does not matter to the size). One run in {FAILS} fails, with a message of "
        f"{MESSAGE} characters. The share of HOT updates is that since the line before.",
    )
    with EmbeddedServer(loopback=True) as server:
        upgrade(server.url)
        begun = time.monotonic()
        sizes = _sizes(server.url, runs)
        seconds = time.monotonic() - begun
    shown = [sizes[step - 1] for step in SHOWN]
    rows = [_row(size, before) for before, size in zip([None, *shown], shown, strict=False)]
    section.tables.append(table(HEADER, rows))
    section.tables.append(f"It took {seconds:.0f} s.")
    largest = max(size.total for size in sizes)
    what = f"table and history after {runs:,} runs of {TASKS} tasks, {HISTORY} kept of each"
    section.goals.append(Goal(what, "at most 5 MB", _megabytes(largest), largest <= MOST))
    lock = max(size.lock for size in sizes)
    what = f"table alone after {runs:,} claims over {TASKS} tasks"
    section.goals.append(Goal(what, "under 1 MB", _megabytes(lock), lock < MOST_LOCK))
    return section


HEADER = ["runs", "in all", "task_lock", "task_lock_run", "its index", "entries", "HOT updates"]


def _row(size: Size, before: Size | None) -> list[str]:
    updates = size.updates - (before.updates if before else 0)
    hot = size.hot - (before.hot if before else 0)
    return [
        f"{size.runs:,}",
        *(_megabytes(each) for each in (size.total, size.lock, size.history, size.history_index)),
        f"{size.entries:,}",
        f"{hot / updates:.1%}" if updates else "-",
    ]


def _sizes(url: str, runs: int) -> list[Size]:
    """Make all runs, and return the sizes after each step."""
    sizes = []
    shares = [range(worker, TASKS, WORKERS) for worker in range(WORKERS)]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        for step in range(STEPS):
            each = runs // STEPS // WORKERS
            list(pool.map(work, [url] * WORKERS, shares, [each] * WORKERS))
            sizes.append(replace(_size(url), runs=(step + 1) * each * WORKERS))
            progress(f"{sizes[-1].runs:,} runs, {_megabytes(sizes[-1].total)}")
    return sizes


def work(url: str, tasks: range, runs: int) -> None:
    """Claim and release one task after the other."""
    protocol = protocol_of("bench")
    failed = RunOutcome(outcome="error", error_type="ValueError", error="x" * MESSAGE)
    options = "-c synchronous_commit=off"
    with psycopg.connect(url, autocommit=True, options=options) as connection:
        cursor = raw_cursor(connection)
        for number in range(runs):
            request = ClaimRequest(
                f"task {tasks[number % len(tasks)]}",
                min_lock=0.0,
                max_lock=50.0,
                runs="benchmark:job",
                schedule=SCHEDULE,
                next_in=60.0,
            )
            answer = protocol.execute(cursor, Claim(request))
            assert answer.granted
            end = failed if number % FAILS == 0 else RunOutcome(outcome="ok")
            protocol.execute(
                cursor, ReleaseRequest(request.task_name, request.claim_id, end, answer.token)
            )


def _size(url: str) -> Size:
    with psycopg.connect(url, row_factory=class_row(Size)) as connection:
        size = connection.execute(
            "SELECT pg_total_relation_size('task_lock')::bigint AS lock,"
            " pg_table_size('task_lock_run')::bigint AS history,"
            " pg_indexes_size('task_lock_run')::bigint AS history_index,"
            " (SELECT count(*) FROM task_lock_run) AS entries,"
            " n_tup_upd AS updates, n_tup_hot_upd AS hot"
            " FROM pg_stat_user_tables WHERE relname = 'task_lock_run'"
        ).fetchone()
    assert size is not None
    return size


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f} MB"
