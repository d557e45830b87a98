"""Random faults on real replicas, and whether they were survived: ``make chaos``."""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from apscheduler_tasklock.demo import history
from apscheduler_tasklock.demo.history import Event
from apscheduler_tasklock.demo.run import InterruptedDemo
from tests.chaos.checker import check
from tests.chaos.fleet import find_faketime
from tests.chaos.plan import PEACE_AFTER, PEACE_BEFORE, draw
from tests.chaos.report import describe, mixed, summary, surroundings
from tests.chaos.run import ClockSetError, unleash
from tests.chaos.tasks import TASKS

# Exit statuses. 130 is what shells give a process that SIGINT ended.
OK, FAULTS, NO_CHAOS, INTERRUPTED = 0, 1, 2, 130

# The most findings whose surroundings are shown.
_SHOWN = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chaos, or check the history of one; return the exit status."""
    options = _parser().parse_args(arguments)
    if options.check:
        return _judge(history.read(options.check))
    if not options.no_faketime and find_faketime() is None:
        print(
            "faketime is not installed: apt-get install faketime, or --no-faketime", file=sys.stderr
        )
        return NO_CHAOS
    seed = random.randrange(1_000_000) if options.seed is None else options.seed  # noqa: S311  # no secret
    repeat = f"--seed {seed} --seconds {options.seconds:g} --replicas {options.replicas}"
    repeat += " --no-faketime" if options.no_faketime else ""
    print(f"Chaos: {repeat}", flush=True)
    # So that SIGTERM removes the folder, too. Within `unleash` there are other handlers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))
    with tempfile.TemporaryDirectory(prefix="tasklock-chaos-") as scratch:
        folder = Path(options.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        status = _unleash(options, seed, folder)
    if status == FAULTS:
        print(f"To repeat the plan: make chaos CHAOS_ARGS='{repeat} --keep FOLDER'")
    return status


def _unleash(options: argparse.Namespace, seed: int, folder: Path) -> int:
    plan = draw(seed, options.seconds, options.replicas, skewed=not options.no_faketime)
    (folder / "plan.json").write_text(json.dumps(asdict(plan), indent=1))
    try:
        outcome = unleash(plan, options.seconds, folder)
    except InterruptedDemo:
        print("\nInterrupted; all processes are gone.", file=sys.stderr)
        return INTERRUPTED
    except ClockSetError:
        print("The machine's clock was set meanwhile: there is no verdict.", file=sys.stderr)
        return NO_CHAOS
    history.write(outcome.events, folder / "history.jsonl")
    print(summary(outcome.events, outcome.done))
    print(f"times are the machine's monotonic clock's; the plan began at {outcome.started:.3f}")
    return _judge(outcome.events)


def _judge(events: Sequence[Event]) -> int:
    findings = mixed(check(events, TASKS))
    for finding in findings[:_SHOWN]:
        print(surroundings(finding, events))
    print(describe(findings))
    return FAULTS if findings else OK


def _parser() -> argparse.ArgumentParser:
    least = PEACE_BEFORE + PEACE_AFTER
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=180.0, help=f"above {least:g} (%(default)s)"
    )
    parser.add_argument("--seed", type=int, help="of the plan (by default another one each time)")
    parser.add_argument("--replicas", type=int, default=5, help="at a time (%(default)s)")
    parser.add_argument("--no-faketime", action="store_true", help="leave the clocks as they are")
    parser.add_argument("--keep", metavar="FOLDER", help="keep plan, history and logs there")
    parser.add_argument("--check", metavar="HISTORY", type=Path, help="only check such a history")
    return parser


if __name__ == "__main__":
    sys.exit(main())
