"""From the moment at which a job is due until it begins, on one replica."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from apscheduler_tasklock import TaskLockExecutor, upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed import apscheduler4
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.fires import TooLateError, fire
from benchmarks.speed.report import Section, median, milliseconds, p99, table

# Python of an environment with APScheduler 4 (see the Makefile).
APSCHEDULER_4 = Path(os.environ.get("APSCHEDULER_4_PYTHON", ".venv-apscheduler4/bin/python"))
AT_ONCE = 200
LONE = 20
APART = 0.1

# Seconds to set up the jobs in; more are tried if they were not enough.
LEADS = (2.0, 6.0, 30.0, 120.0)

Fires = list[tuple[float, float]]
Way = Callable[[Sequence[float]], Fires]


def run(effort: Effort) -> Section:
    """Fire on each of them in turn."""
    rounds = effort.of(5, 1)
    section = Section(
        "From due to begun",
        f"One replica, a pool of 10 threads: {LONE} jobs due {APART} s apart, and {AT_ONCE} due at "
        f"once, each a task's first claim; {rounds} rounds in a shuffled order. Jobs a second are "
        f"those of the {AT_ONCE}, from when they were due until the last one began, in the median "
        "round. APScheduler 4 is an alpha that its authors advise against in production; its jobs "
        "run in its default executor, and its store and event broker use asyncpg.",
    )
    with EmbeddedServer({"max_connections": "100"}, loopback=True) as server:
        upgrade(server.url)
        ways: dict[str, Way] = {
            "APScheduler 3, no lock": lambda dues: fire(None, dues),
            "with the task lock": lambda dues: fire(TaskLockExecutor(server.url), dues),
        }
        if APSCHEDULER_4.exists():
            ways["APScheduler 4.0.0a6"] = lambda dues: _fire_4(server.url, dues)
        else:
            section.tables.append("**Not installed, and not measured: APScheduler 4.**")
        lone: dict[str, list[Fires]] = {name: [] for name in ways}
        burst: dict[str, list[Fires]] = {name: [] for name in ways}
        rng = effort.rng()
        for number in range(rounds):
            progress(f"round {number + 1}")
            for name in rng.sample(list(ways), len(ways)):
                lone[name].append(_one_by_one(ways[name]))
                burst[name].append(_at_once(ways[name]))
    rows = [_row(name, lone[name], burst[name]) for name in ways]
    section.tables.append(
        table(["", "alone", "p99", f"{AT_ONCE} at once", "last one", "jobs a second"], rows)
    )
    return section


def _one_by_one(way: Way) -> Fires:
    return _in_time(lambda begin: way([begin + each * APART for each in range(LONE)]))


def _at_once(way: Way) -> Fires:
    return _in_time(lambda begin: way([begin] * AT_ONCE))


def _in_time(fires: Callable[[float], Fires]) -> Fires:
    """Fire so long from now that all jobs are set up by then. APScheduler 4 takes its time."""
    for lead in LEADS:
        try:
            return fires(time.time() + lead)
        except TooLateError as late:
            progress(f"set up {late} s after the jobs were due; once more")
    raise TooLateError(f"{LEADS[-1]} s are not enough to set up the jobs")


def _row(name: str, lone: list[Fires], burst: list[Fires]) -> list[str]:
    alone = [began - due for fires in lone for due, began in fires]
    together = [began - due for fires in burst for due, began in fires]
    last = median([max(began - due for due, began in fires) for fires in burst])
    return [
        name,
        *(milliseconds(value) for value in (median(alone), p99(alone), median(together), last)),
        f"{AT_ONCE / last:,.0f}",
    ]


def _fire_4(url: str, dues: Sequence[float]) -> Fires:
    output = subprocess.run(
        [str(APSCHEDULER_4), apscheduler4.__file__, url, *(repr(due) for due in dues)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    late, fires = json.loads(output)
    if late:
        raise TooLateError(f"{late:.1f}")
    return [(due, began) for due, began in fires]
