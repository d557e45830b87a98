"""Compare the rules on the same traces: ``make fidelity``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.fidelity.account import Account, account, account_by_run_time
from benchmarks.fidelity.clock import TravellingDatabase, travelling_database
from benchmarks.fidelity.report import Results, ScheduleResults, goal_reached, markdown
from benchmarks.fidelity.rules import RULES, SHORT_GAP_RULES, TRACE_RULES
from benchmarks.fidelity.schedules import (
    MOVES,
    WANDERS,
    MovedSchedule,
    ScheduleAccount,
    WanderingInterval,
    account_of_moves,
    account_of_wandering,
)
from benchmarks.fidelity.short_gaps import SCHEDULES, ShortGaps
from benchmarks.fidelity.simulation import ScheduledSimulation, Simulation
from benchmarks.fidelity.trace import TRACES, Trace

FOLDER = Path(__file__).parent


def measure(
    database: TravellingDatabase, windows: int, seed: int
) -> Iterator[tuple[str, str, Account]]:
    """Yield the account of each trace under each rule."""
    for conditions in TRACES:
        trace = Trace(conditions, windows, seed)
        for kind in TRACE_RULES:
            history = Simulation(trace, kind(database), database).live()
            yield conditions.name, kind.name, account(trace, history)


def measure_short_gaps(
    database: TravellingDatabase, windows: int, seed: int
) -> Iterator[tuple[str, str, Account]]:
    """Yield the account of each schedule with short gaps under each rule."""
    for schedule in SCHEDULES:
        trace = ShortGaps(schedule, windows, seed)
        for kind in SHORT_GAP_RULES:
            history = Simulation(trace, kind(database), database).live()
            yield schedule.name, kind.name, account_by_run_time(history, trace.run_times)


def measure_schedules(
    database: TravellingDatabase, windows: int, seed: int
) -> Iterator[tuple[str, str, ScheduleAccount]]:
    """Yield the account of each job whose schedule or replica changes, under each rule."""
    for move in MOVES:
        moved = MovedSchedule(move, windows, seed)
        for kind in RULES:
            history = ScheduledSimulation(moved, kind(database), database).live()
            yield move.name, kind.name, account_of_moves(moved, history)
    for wander in WANDERS:
        wandering = WanderingInterval(wander, windows, seed)
        for kind in RULES:
            history = ScheduledSimulation(wandering, kind(database), database).live()
            yield wander.name, kind.name, account_of_wandering(wandering, history)


def main() -> int:
    """Print the figures; fail if this library broke one of its promises."""
    options = _parser().parse_args()
    results: Results = {}
    short_gaps: Results = {}
    schedules: ScheduleResults = {}
    total = len(TRACES) * len(TRACE_RULES) + (len(MOVES) + len(WANDERS)) * len(RULES)
    total += len(SCHEDULES) * len(SHORT_GAP_RULES)
    with travelling_database() as database, Progress(console=Console(stderr=True)) as progress:
        database.in_python = options.in_python
        steps = progress.add_task("", total=total)
        for measured, into in ((measure, results), (measure_short_gaps, short_gaps)):
            for trace, rule, figures in measured(database, options.windows, options.seed):
                into.setdefault(trace, {})[rule] = figures
                progress.update(steps, description=trace, advance=1)
        for trace, rule, counts in measure_schedules(database, options.windows, options.seed):
            schedules.setdefault(trace, {})[rule] = counts
            progress.update(steps, description=trace, advance=1)
    text = markdown(results, short_gaps, schedules, options.windows, options.seed)
    print(text)
    if options.write:
        from benchmarks.fidelity.chart import draw

        (FOLDER / "RESULTS.md").write_text(text)
        draw(results, FOLDER / "results.svg")
    return 0 if goal_reached(results, short_gaps, schedules) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__)
    parser.add_argument("--windows", type=int, default=2000, help="per trace (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the traces (%(default)s)")
    parser.add_argument(
        "--in-python",
        action="store_true",
        help="let this library's rule decide in Python, in place of its statements",
    )
    parser.add_argument(
        "--write", action="store_true", help="write RESULTS.md and the chart; needs matplotlib"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
