"""How long the poll of a replica takes: one read for all of its tasks, every few seconds."""

from __future__ import annotations

from typing import Any

from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.filled import SETTINGS, fill, name
from benchmarks.speed.reads import HEADER, measure
from benchmarks.speed.report import Goal, Section, milliseconds, table
from tests.support.waist import ReadTasks, protocol_of

TASKS = 200
MOST = 0.001


def run(effort: Effort) -> Section:
    """Read 200 tasks, alone in their table and among many others."""
    often = effort.of(300, 100)
    others = effort.of(10_000, 2000)
    section = Section(
        "The poll",
        f"A replica looks for dead runs among its {TASKS} tasks, which are all that the table has, "
        f"or some of {others:,}. {often} times on one connection; the times are medians, and the "
        "slowest.",
    )
    protocol = protocol_of("bench")
    rows = []
    for tasks in (TASKS, others):
        names = [name(number) for number in range(0, tasks, tasks // TASKS)]

        def read(cursor: Any, names: list[str] = names) -> list[Any]:
            dead, _ = protocol.execute(cursor, ReadTasks(names))
            return dead

        with EmbeddedServer(SETTINGS, loopback=True) as server:
            progress(f"{TASKS} of {tasks:,} tasks")
            fill(server, tasks, runs=1, replicas=1)
            measured = measure(server.url, read, often)
        what = f"{TASKS} of {tasks:,} tasks"
        rows.append([what, *measured.cells()])
        section.goals.append(
            Goal(
                f"the poll's read, {what}",
                "under 1 ms in the database",
                f"{milliseconds(measured.execution)} ({milliseconds(measured.planning)} more to "
                "plan it; it is prepared)",
                measured.execution < MOST,
            )
        )
    section.tables.append(table(["", *HEADER], rows))
    return section
