"""What the lock adds to the memory of a replica."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from apscheduler.schedulers.background import BackgroundScheduler

from benchmarks.speed.effort import Effort
from benchmarks.speed.report import Section, median, table

KINDS = {
    "APScheduler alone": "plain",
    "and SQLAlchemy with psycopg, connected": "connected",
    "with the task lock": "locked",
}


def run(effort: Effort) -> Section:
    """Start a process of each kind in turn, and read its memory when its job has run."""
    rounds = effort.of(5, 1)
    section = Section(
        "Memory of a replica",
        f"A process with a `BackgroundScheduler` after its first job has run; the median of "
        f"{rounds} processes each. The second line has what most applications with a database have "
        "loaded anyway: an SQLAlchemy engine with one connection.",
    )
    # Not loaded in the processes that are measured without it.
    from apscheduler_tasklock import upgrade
    from apscheduler_tasklock.demo.server import EmbeddedServer

    if not Path("/proc/self/smaps_rollup").exists():
        section.tables.append("Not measured: there is no /proc/self/smaps_rollup here.")
        return section
    used: dict[str, list[tuple[int, int]]] = {name: [] for name in KINDS}
    with EmbeddedServer(loopback=True) as server:
        upgrade(server.url)
        for _ in range(rounds):
            for name, kind in KINDS.items():
                command = [sys.executable, "-m", "benchmarks.speed.memory", kind, server.url]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                resident, proportional = output.split()
                used[name].append((int(resident), int(proportional)))
    section.tables.append(
        table(
            ["", "resident (RSS)", "proportional (PSS)"],
            [
                [name, *(f"{median(column) / 1024:.1f} MiB" for column in zip(*each, strict=True))]
                for name, each in used.items()
            ],
        )
    )
    return section


def _replica(kind: str, url: str) -> None:
    """Be a process that is measured."""
    executor: dict[str, Any] = {}
    keep: Any = None
    if kind == "locked":
        from apscheduler_tasklock import TaskLockExecutor

        executor = {"executors": {"default": TaskLockExecutor(url)}}
    elif kind == "connected":
        from sqlalchemy import create_engine

        keep = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        with keep.connect() as connection:
            connection.exec_driver_sql("SELECT 1")
    ran: list[float] = []
    scheduler = BackgroundScheduler(**executor)
    scheduler.add_job(ran.append, "interval", seconds=0.2, args=[0.0], id="job")
    scheduler.start()
    deadline = time.monotonic() + 30
    while not ran and time.monotonic() < deadline:
        time.sleep(0.02)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    print(sizes["Rss"], sizes["Pss"])
    scheduler.shutdown()


if __name__ == "__main__":
    _replica(*sys.argv[1:3])
