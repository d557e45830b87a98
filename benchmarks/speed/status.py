"""How long operators wait for the tasks and their runs, in a large installation."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock.demo.server import EmbeddedServer
from apscheduler_tasklock.schema.table import task_lock_table
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.filled import SETTINGS, fill, name
from benchmarks.speed.reads import HEADER, ReadTime, measure
from benchmarks.speed.report import Goal, Section, milliseconds, table

RUNS = 100
# The goals: seconds in the database, and those of what reads all entries of the history.
MOST, MOST_OF_ALL = 0.2, 1.0
# Limits the seconds of a read here.
LONGEST_READ = 60.0


def run(effort: Effort) -> Section:
    """Read the tasks, and their runs in several ways."""
    tasks, replicas, often = effort.of((10_000, 64, 20), (1000, 8, 5))
    section = Section(
        "Status",
        f"{tasks:,} tasks with {RUNS} runs in the history each, and {replicas} replicas that have "
        f"all of them. Each read is made {often} times on one connection; the times are medians, "
        "and the slowest. In the database: what EXPLAIN (ANALYZE, TIMING OFF, SERIALIZE) says. End "
        "to end: from the call to the list of objects.",
    )
    rows = []
    with EmbeddedServer(SETTINGS, loopback=True) as server:
        progress(f"filling the tables with {tasks * RUNS:,} runs")
        fill(server, tasks, RUNS, replicas)
        for what, read in _reads(tasks).items():
            progress(what)
            measured = measure(server.url, read, often)
            rows.append([what, *measured.cells()])
            section.goals.append(_goal(what, measured))
    section.tables.append(table(["", *HEADER], rows))
    return section


def _reads(tasks: int) -> dict[str, Callable[[Any], list[Any]]]:
    # The benchmark measures what the server would end, too.
    operations = Operations(task_lock_table(), read_limit=LONGEST_READ)
    hour = datetime.now(timezone.utc) - timedelta(hours=1)
    one = name(tasks // 2)
    tenth = [name(0)[:-3] + "%"]

    def runs(*arguments: Any, **wanted: Any) -> Callable[[Any], list[Any]]:
        return lambda cursor: operations.runs(cursor, *arguments, **wanted)

    return {
        "all tasks": operations.tasks,
        "the 50 most urgent tasks": lambda cursor: operations.tasks(
            cursor, None, 50, order="urgency"
        ),
        "an overview": lambda cursor: [operations.overview(cursor, None, 20)],
        "60 runs of each of 50 tasks": lambda cursor: list(
            operations.recent_runs(cursor, [name(number) for number in range(50)], 60).items()
        ),
        **{
            f"the lanes of {hours} h, by {by}": _lanes(operations, hour, hours, by)
            for hours in (1, 24)
            for by in ("task", "replica")
        },
        "the tenth page of runs": runs(limit=100, offset=900),
        "the newest 100 runs": runs(),
        "of one task": runs(one),
        "of one task, errors": runs(one, outcomes=["error"]),
        "errors": runs(outcomes=["error"]),
        "died": runs(outcomes=["died"]),
        "an outcome that none has": runs(outcomes=["freed"]),
        "since an hour ago": runs(since=hour),
        "since an hour ago, errors": runs(since=hour, outcomes=["error"]),
        "of the tasks of a pattern": runs(like=tenth),
        "of a pattern, errors": runs(like=tenth, outcomes=["error"]),
    }


def _lanes(
    operations: Operations, hour: datetime, hours: int, by: str
) -> Callable[[Any], list[Any]]:
    since, until = hour - timedelta(hours=hours - 1), hour + timedelta(hours=1)
    span: dict[str, Any] = {"by": by, "parts": 500, "limit": 50}
    return lambda cursor: [operations.lanes(cursor, None, since, until, **span)]


def _goal(what: str, measured: ReadTime) -> Goal:
    seconds = measured.planning + measured.execution
    said = milliseconds(seconds)
    most = MOST_OF_ALL if what.startswith("the lanes") else MOST
    goal = f"under {most * 1000:.0f} ms in the database"
    return Goal(f"status: {what}", goal, said, seconds < most)
