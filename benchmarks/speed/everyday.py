"""What an ordinary application's database and replicas have to do for the lock."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg

from apscheduler_tasklock import upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed.counters import STATEMENT, Count, in_server
from benchmarks.speed.counts import LOGGED
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.everyday_replica import JOBS
from benchmarks.speed.report import Section, table
from benchmarks.speed.store_replica import processes

REPLICA, REPLICAS = "benchmarks.speed.everyday_replica", 3
DAY = 86_400


@dataclass(frozen=True)
class Costs:
    """The costs of a second, on average.

    :ivar statements: that all replicas sent
    :ivar transactions: that wrote something
    :ivar wal: bytes
    :ivar cpu: seconds of the CPU that one replica took
    """

    statements: float
    transactions: float
    wal: float
    cpu: float


def run(effort: Effort) -> Section:
    """Count with the lock, and measure the CPU without it, too."""
    section = Section(
        "An ordinary application",
        f"{REPLICAS} processes, each a replica with the same {JOBS} jobs, which do nothing. A job "
        "is due once a minute, 3 seconds after the one before. The statements are counted in the "
        "server's log, and what is written by the server's own counters, while nothing disturbs "
        "the replicas. The CPU's time is that of a replica's process.",
    )
    if not Path("/proc/self/stat").exists():
        section.tables.append("Not measured: there is no /proc/self/stat here.")
        return section
    seconds = effort.of(180, 20)
    found = {}
    for locked in effort.of((True, False), (True,)):
        kind = "with the task lock" if locked else "APScheduler alone"
        progress(f"{kind}, {seconds} s")
        found[kind] = _measure(seconds, effort.of(60, 5), locked=locked)
    section.tables.append(
        table(
            [
                "",
                "statements a second",
                "writing transactions a second",
                "WAL a day",
                "CPU of a replica",
            ],
            [
                [
                    kind,
                    f"{costs.statements:.1f}",
                    f"{costs.transactions:.2f}",
                    f"{costs.wal * DAY / 1e6:.0f} MB",
                    f"{costs.cpu:.2%}",
                ]
                for kind, costs in found.items()
            ],
        )
    )
    return section


def _measure(seconds: int, warm_up: int, *, locked: bool) -> Costs:
    """Let the jobs come due for so many seconds, and return the costs of a second."""
    with EmbeddedServer(LOGGED, loopback=True) as server:
        upgrade(server.url)
        with (
            processes(REPLICA, REPLICAS, server.url, str(int(locked))) as pids,
            psycopg.connect(server.url, autocommit=True) as own,
        ):
            time.sleep(warm_up)
            count = Count()
            end = in_server(own, count)
            log, cpu = len(server.log), sum(map(_cpu, pids))
            time.sleep(seconds)
            statements = len(STATEMENT.findall(server.log[log:]))
            end()
            cpu = sum(map(_cpu, pids)) - cpu
    return Costs(
        statements / seconds,
        count.transactions / seconds,
        count.wal / seconds,
        cpu / seconds / REPLICAS,
    )


def _cpu(pid: int) -> float:
    """Return how many seconds of the CPU a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
