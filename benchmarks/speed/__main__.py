"""Run the benchmark: ``python -m benchmarks.speed --help``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import benchmarks.speed
from benchmarks.speed import (
    before_after,
    burst,
    counts,
    end_to_end,
    event_loop,
    everyday,
    forms,
    history,
    history_size,
    hot_path,
    job_store,
    leader,
    machine,
    memory,
    pages,
    pause_all,
    poll,
    pool_job,
    status,
)
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.report import Section, goal_table

PARTS: dict[str, Callable[[Effort], Section]] = {
    "hot-path": hot_path.run,
    "peers": hot_path.run_peers,
    "before-after": before_after.run,
    "counts": counts.run,
    "forms": forms.run,
    "history": history.run,
    "pause-all": pause_all.run,
    "pool-job": pool_job.run,
    "end-to-end": end_to_end.run,
    "event-loop": event_loop.run,
    "memory": memory.run,
    "history-size": history_size.run,
    "status": status.run,
    "pages": pages.run,
    "poll": poll.run,
    "burst": burst.run,
    "job-store": job_store.run,
    "leader": leader.run,
    "everyday": everyday.run,
}


def main() -> int:
    """Measure, print, and write the results down if asked."""
    arguments = _arguments()
    effort = Effort(
        quick=arguments.quick,
        rounds=arguments.rounds or (200 if arguments.quick else 2000),
        seed=arguments.seed,
    )
    begun, load = time.monotonic(), machine.load_average()
    loads = ""
    print(f"{machine.describe()}\nLoad average at the beginning: {load}.", flush=True)
    sections = []
    for name in arguments.only or PARTS:
        progress(f"{name}, after {time.monotonic() - begun:.0f} s")
        sections.append(PARTS[name](effort))
        print(f"\n{sections[-1].markdown()}", flush=True)
        loads = f"Load average at the beginning {load}, at the end {machine.load_average()}."
        if arguments.results is not None:  # each time, for what a run that is cut short has
            arguments.results.write_text(_results(effort, sections, loads))
    print(f"\n{loads} {time.monotonic() - begun:.0f} s in all.")
    return 0


def _results(effort: Effort, sections: list[Section], loads: str) -> str:
    goals = [goal for section in sections for goal in section.goals]
    now = datetime.now(timezone.utc)
    form = "The short form, which shows little" if effort.quick else "The full form"
    parts = [
        "# What was measured",
        f"Written by `make bench-results` on {now:%Y-%m-%d}. {form}; seed {effort.seed}.",
        machine.describe(),
        loads,
        "## Goals",
        goal_table(goals),
        *(Section(each.title, each.notes, each.tables).markdown() for each in sections),
    ]
    return "\n\n".join(parts) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", description=benchmarks.speed.__doc__
    )
    parser.add_argument("--quick", action="store_true", help="the short form, a few minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, help="how often the hot path is measured")
    parser.add_argument("--seed", type=int, default=1, help="for the order within rounds")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write Markdown to FILE, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
