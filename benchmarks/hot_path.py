"""Claim and release against bare psycopg, on one server and in one run.

    make bench

Every round measures each operation once, in turn, so that what else the machine does falls on all
of them alike. Printed are medians, and their ratios to the bare statement of the same kind.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import psycopg

from apscheduler_tasklock import upgrade
from apscheduler_tasklock.context import HeldLock
from apscheduler_tasklock.demo.server import EmbeddedServer
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.messages import ClaimRequest
from apscheduler_tasklock.protocol import TaskLockProtocol
from apscheduler_tasklock.table import task_lock_table

ROUNDS = int(os.environ.get("ROUNDS", "2000"))
WARM_UP = ROUNDS // 40
THREADS = 8

BARE_UPDATE = """
    UPDATE task_lock SET started_at = now(), locked_until = now() + interval '50 s',
        window_start = now(), window_until = now(), locked_by = %s, claim_id = %s,
        token = token + 1, finished_at = NULL
    WHERE task_name = %s AND (finished_at IS NOT NULL OR locked_until <= now())
    RETURNING token, locked_until
"""
BARE_RELEASE = """
    UPDATE task_lock SET finished_at = now(), locked_until = now()
    WHERE task_name = %s AND claim_id = %s RETURNING locked_until
"""

Samples = dict[str, list[float]]


def measure(database_url: str, task: str, rounds: int) -> Samples:
    """Return the seconds that each operation took, round by round."""
    samples: Samples = {}
    locks = TaskLocks(database_url, replica_id="bench")
    protocol = TaskLockProtocol(task_lock_table())
    with psycopg.connect(database_url, autocommit=True) as connection:

        def timed(what: str, operation: Callable[..., Any], *arguments: Any) -> Any:
            begun = time.perf_counter()
            result = operation(*arguments)
            samples.setdefault(what, []).append(time.perf_counter() - begun)
            return result

        def statement(query: str, *parameters: Any) -> Any:
            return connection.execute(query, parameters).fetchall()

        def claim(claim_id: UUID) -> Any:
            request = ClaimRequest(task, 0.0, None, 0.0, 50.0, "bench", claim_id)
            return protocol.claim(connection.cursor(), request)

        def release(claim_id: UUID) -> Any:
            return protocol.release(connection.cursor(), task, claim_id, keep_window=True)

        def library_claim() -> Any:
            return locks.claim(task, min_lock=0.0, max_lock=50.0)

        locks.release(_held(library_claim()))
        for _ in range(rounds):
            bare, mine, others = uuid4(), uuid4(), uuid4()
            timed("SELECT 1", statement, "SELECT 1")
            timed("bare granted", statement, BARE_UPDATE, "bench", bare, task)
            timed("bare refused", statement, BARE_UPDATE, "bench", others, task)
            timed("bare release", statement, BARE_RELEASE, task, bare)
            assert timed("protocol granted", claim, mine).granted
            assert not timed("protocol refused", claim, others).granted
            timed("protocol release", release, mine)
            held = _held(timed("library granted", library_claim))
            timed("library refused", library_claim)
            timed("library release", locks.release, held)
    locks.close()
    return {what: taken[WARM_UP:] for what, taken in samples.items()}


def _held(claimed: Any) -> HeldLock:
    assert isinstance(claimed, HeldLock)
    return claimed


def report(title: str, samples: Samples) -> None:
    """Print medians in microseconds, and their ratios to the bare operation."""
    median = {what: statistics.median(taken) * 1e6 for what, taken in samples.items()}
    print(f"\n{title}")
    print(f"  {'':12}{'bare':>10}{'protocol':>16}{'library':>16}")
    for kind in ("granted", "refused", "release"):
        bare = median[f"bare {kind}"]
        cells = "".join(
            f"{median[f'{who} {kind}']:9.0f} us{median[f'{who} {kind}'] / bare:5.2f}"
            for who in ("protocol", "library")
        )
        print(f"  {kind:12}{bare:7.0f} us{cells}")
    select = median["SELECT 1"]
    print(
        f"  SELECT 1    {select:7.0f} us; a refused claim is "
        f"{median['protocol refused'] / select:.2f} x that on the same connection, "
        f"{median['library refused'] / select:.2f} x with the library around it"
    )


def main() -> int:
    """Measure in one thread and in several, each on its own task."""
    with EmbeddedServer() as server:
        upgrade(server.url)
        print(f"PostgreSQL embedded, fsync on, TCP on loopback; {ROUNDS} rounds")
        report("1 thread", measure(server.url, "single", ROUNDS))
        with ThreadPoolExecutor(THREADS) as pool:
            tasks = [f"task {number}" for number in range(THREADS)]
            parts = list(pool.map(measure, [server.url] * THREADS, tasks, [ROUNDS // 4] * THREADS))
        together = {what: [t for part in parts for t in part[what]] for what in parts[0]}
        report(f"{THREADS} threads", together)
    return 0


if __name__ == "__main__":
    sys.exit(main())
