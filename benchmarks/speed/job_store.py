"""What the job store costs that all replicas share."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from datetime import datetime, timedelta, timezone

import psycopg

from apscheduler_tasklock import upgrade
from apscheduler_tasklock._lock.job_rows import JobRows
from apscheduler_tasklock.demo.server import EmbeddedServer
from apscheduler_tasklock.schema.table import task_lock_table
from benchmarks.speed.counters import Count, in_server
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.report import Goal, Section, median, microseconds, milliseconds, p99, table
from benchmarks.speed.store_fires import fires_in_fleets
from benchmarks.speed.store_loop import held_up
from benchmarks.speed.store_replica import (
    WORKERS,
    Begun,
    job,
    make_scheduler,
    store_replicas,
)
from tests.support.waist import raw_cursor

REPLICAS = 3
JOBS = 10_000

# The goals, in seconds, times `SELECT 1`, and seconds.
BEGUN_WITHIN = 0.02
LOOK = 3.0
HELD_UP = 0.05
# What counts as an even share: the busiest replica's runs beside those of the idlest.
EVEN = 1.5

# Seconds from one job to the next that is added. A replica looks once in 50 ms at most, for which a
# job that comes sooner after another has to wait.
APART = (0.1, 0.2)

# Copies of a job that was added as any other.
_COPIES = """
    INSERT INTO task_lock_job (id, func, trigger, options, arguments, executor, signature, version,
                               added_id, next_run_time, ended)
    SELECT 'copy ' || number, func, trigger, options, arguments, executor, signature, version,
           gen_random_uuid(), now() + %(after)s * interval '1 second', false
    FROM task_lock_job, generate_series(1, %(copies)s) AS number
"""


def run(effort: Effort) -> Section:
    """Measure all that there are goals for."""
    section = Section(
        "The shared job store",
        "Replicas are processes with a `BackgroundScheduler` and 10 workers each, on the cores of "
        "the server; those of the large fleet share four processes. *A look* is the statement by "
        "which a replica asks for due jobs, on one connection, in turn with `SELECT 1`. Statements "
        "of a fire are told by the server's log, while one interval job runs: every second, and in "
        "the large fleet every 4.3 s. Jobs are added on A, a replica that runs none, "
        f"{APART[0]:g} to {APART[1]:g} s apart.",
    )
    for part in (_added_until_begun, _look, fires_in_fleets, _burst, _event_loop):
        part(effort, section)
    return section


def _added_until_begun(effort: Effort, section: Section) -> None:
    often, rng = effort.of(300, 60), effort.rng()
    progress(f"{often} jobs added on one replica and begun on another")
    with EmbeddedServer(loopback=True) as server:
        upgrade(server.url)
        scheduler = make_scheduler(server.url)
        scheduler.start()
        taken, adding, commits, selects = [], [], [], []
        try:
            with (
                psycopg.connect(server.url, autocommit=True) as own,
                store_replicas(server.url, 1) as [replica],
            ):
                own.execute("CREATE TABLE bare (number integer)")
                for number in range(often + 5):
                    time.sleep(rng.uniform(*APART))
                    begun = time.perf_counter()
                    own.execute("SELECT 1")
                    selects.append(time.perf_counter() - begun)
                    begun = time.perf_counter()
                    own.execute("INSERT INTO bare VALUES (%s)", [number])
                    commits.append(time.perf_counter() - begun)
                    added = time.time()
                    at = datetime.fromtimestamp(added, timezone.utc)
                    scheduler.add_job(job, "date", run_date=at, id=f"{number}", executor=WORKERS)
                    adding.append(time.time() - added)
                    told = replica.next()
                    assert told is not None
                    taken.append(told["begun"] - added)
        finally:
            scheduler.shutdown()
    taken, adding, commits = taken[5:], adding[5:], commits[5:]
    ratio = statistics.median(a / b for a, b in zip(taken, commits, strict=True))
    section.tables.append(
        table(
            ["", "median", "p99"],
            [
                [
                    "added on A until begun on B",
                    milliseconds(median(taken)),
                    milliseconds(p99(taken)),
                ],
                ["of that, `add_job`", milliseconds(median(adding)), milliseconds(p99(adding))],
                ["a bare `INSERT`", milliseconds(median(commits)), milliseconds(p99(commits))],
                ["`SELECT 1`", milliseconds(median(selects)), milliseconds(p99(selects))],
            ],
        )
    )
    section.goals.append(
        Goal(
            "a job added on A until it begins on B",
            f"median under {BEGUN_WITHIN * 1e3:g} ms",
            f"{milliseconds(median(taken))}, {ratio:.1f} x a bare `INSERT`",
            median(taken) < BEGUN_WITHIN,
        )
    )


def _look(effort: Effort, section: Section) -> None:
    rounds = effort.rounds
    progress(f"{rounds} looks with {JOBS:,} jobs of which none is due")
    rows = JobRows(task_lock_table(), "bench")
    with (
        EmbeddedServer(loopback=True) as server,
        psycopg.connect(server.url, autocommit=True) as own,
    ):
        upgrade(server.url)
        copy_jobs(server.url, JOBS, after=86_400)
        with psycopg.connect(server.url, autocommit=True) as connection:
            cursor = raw_cursor(connection)

            def look() -> None:
                assert rows.read_due(cursor, {WORKERS: 30}).jobs == []

            looks, selects = [], []
            for _ in range(20):
                look()
                cursor.execute("SELECT 1")
            for _ in range(rounds):
                begun = time.perf_counter()
                cursor.execute("SELECT 1").fetchall()
                between = time.perf_counter()
                look()
                looks.append(time.perf_counter() - between)
                selects.append(between - begun)
            batches = [Count() for _ in range(3)]
            for batch in batches:
                end = in_server(own, batch)
                for _ in range(100):
                    look()
                end()
    # The least: the server writes things of its own now and then.
    least = min(batches, key=lambda batch: batch.wal)
    ratio = statistics.median(a / b for a, b in zip(looks, selects, strict=True))
    section.tables.append(
        table(
            ["", "median", "p99"],
            [
                [f"a look, {JOBS:,} jobs", microseconds(median(looks)), microseconds(p99(looks))],
                ["`SELECT 1`", microseconds(median(selects)), microseconds(p99(selects))],
            ],
        )
    )
    section.goals += [
        Goal(
            f"a look with {JOBS:,} jobs of which none is due",
            f"at most {LOOK:g} x `SELECT 1`",
            f"{ratio:.2f} x",
            ratio <= LOOK,
        ),
        Goal(
            "such a look",
            "0 bytes of WAL, 0 transaction ids",
            f"{least.wal:.3g} bytes, {least.transactions:g} for 100",
            least.wal == least.transactions == 0,
        ),
    ]


def _burst(effort: Effort, section: Section) -> None:
    jobs = effort.of(JOBS, 2000)
    progress(f"{jobs:,} one-off jobs due at once on {REPLICAS} replicas")
    with EmbeddedServer(loopback=True) as server:
        upgrade(server.url)
        with store_replicas(server.url, REPLICAS) as replicas:
            begun = Begun(replicas)
            due = copy_jobs(server.url, jobs, after=3)
            begun.wait(jobs)
            time.sleep(1)  # for what would begin twice
    shares = sorted(len(share) for share in begun.by_replica)
    tasks = Counter(run["task"] for share in begun.by_replica for run in share)
    twice = sum(count - 1 for count in tasks.values())
    took = max(run["begun"] for share in begun.by_replica for run in share) - due
    evenness = shares[-1] / max(1, shares[0])
    section.tables.append(
        table(
            ["jobs", "begun", "twice", "took", "jobs a second", "shares", "max / min"],
            [
                [
                    f"{jobs:,}",
                    f"{len(tasks):,}",
                    str(twice),
                    f"{took:.1f} s",
                    f"{jobs / took:.0f}",
                    ", ".join(map(str, shares)),
                    f"{evenness:.2f}",
                ]
            ],
        )
    )
    what = f"{jobs:,} one-off jobs due at once on {REPLICAS} replicas"
    section.goals += [
        Goal(
            what,
            "each begun once",
            f"{len(tasks):,} begun, {twice} twice",
            len(tasks) == jobs and not twice,
        ),
        Goal(
            what, f"evenly shared: max / min at most {EVEN:g}", f"{evenness:.2f}", evenness <= EVEN
        ),
    ]


def _event_loop(effort: Effort, section: Section) -> None:
    seconds = effort.of(10.0, 4.0)
    progress(f"an event loop while the server is stopped for {seconds:g} s")
    phases = held_up(seconds)
    section.tables.append(
        table(
            ["longest delay of the event loop", "median", "p99", "longest"],
            [
                [name, milliseconds(median(d)), milliseconds(p99(d)), milliseconds(max(d))]
                for name, d in phases.items()
            ],
        )
    )
    longest, before = max(phases["server stopped"]), max(phases["no store"])
    section.goals.append(
        Goal(
            "an event loop while the server is stopped",
            f"held for less than {HELD_UP * 1e3:g} ms",
            f"{milliseconds(longest)} ({milliseconds(before)} without a job store)",
            longest < HELD_UP,
        )
    )


def copy_jobs(url: str, count: int, after: float) -> float:
    """Fill the store with one-off jobs; return when they are due, in seconds since 1970.

    :param after: seconds until then
    """
    scheduler = make_scheduler(url)
    scheduler.start()
    at = datetime.now(timezone.utc) + timedelta(days=1)
    scheduler.add_job(job, "date", run_date=at, id="pattern", executor=WORKERS)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_COPIES, {"after": after, "copies": count})
        connection.execute("DELETE FROM task_lock_job WHERE id = 'pattern'")
        connection.execute("VACUUM ANALYZE task_lock_job")
        row = connection.execute(
            "SELECT extract(epoch FROM min(next_run_time))::float8 FROM task_lock_job"
        ).fetchone()
    scheduler.shutdown()
    assert row is not None
    return float(row[0])
