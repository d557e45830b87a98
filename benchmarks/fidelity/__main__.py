"""Compare the rules on the same traces: ``make fidelity``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.fidelity.account import Account, account
from benchmarks.fidelity.clock import TravellingDatabase, travelling_database
from benchmarks.fidelity.report import Results, goal_reached, markdown
from benchmarks.fidelity.rules import RULES
from benchmarks.fidelity.simulation import Simulation
from benchmarks.fidelity.trace import TRACES, Trace

FOLDER = Path(__file__).parent


def measure(
    database: TravellingDatabase, windows: int, seed: int
) -> Iterator[tuple[str, str, Account]]:
    """Yield what came of each trace under each rule."""
    for conditions in TRACES:
        trace = Trace(conditions, windows, seed)
        for kind in RULES:
            history = Simulation(trace, kind(database), database).live()
            yield conditions.name, kind.name, account(trace, history)


def main() -> int:
    """Print the figures; fail if this library with failover did anything wrong."""
    options = _parser().parse_args()
    results: Results = {}
    with travelling_database() as database, Progress(console=Console(stderr=True)) as progress:
        steps = progress.add_task("", total=len(TRACES) * len(RULES))
        for trace, rule, figures in measure(database, options.windows, options.seed):
            results.setdefault(trace, {})[rule] = figures
            progress.update(steps, description=trace, advance=1)
    text = markdown(results, options.windows, options.seed)
    print(text)
    if options.write:
        from benchmarks.fidelity.chart import draw

        (FOLDER / "RESULTS.md").write_text(text)
        draw(results, FOLDER / "results.svg")
    return 0 if goal_reached(results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__)
    parser.add_argument("--windows", type=int, default=2000, help="per trace (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the traces (%(default)s)")
    parser.add_argument(
        "--write", action="store_true", help="write RESULTS.md and the chart; needs matplotlib"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
