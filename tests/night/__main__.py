"""``python -m tests.night``: lives through the night, and compares what is told with the ledger."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.night.conductor import conduct
from tests.night.judge import KNOWN, judge
from tests.night.recording import FILE, LARGEST, Night
from tests.night.sentences import report

# Exit statuses. 143 is what shells give a process that SIGTERM ended.
OK, UNTRUE, INTERRUPTED = 0, 1, 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if all that was told is true."""
    parser = argparse.ArgumentParser(prog="python -m tests.night", description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write {FILE.name} anew")
    parser.add_argument("--keep", type=Path, help="a new folder for the ledger and the logs")
    parser.add_argument(
        "--recorded", type=Path, nargs="?", const=FILE, help="judge a recorded night alone"
    )
    options = parser.parse_args(arguments)
    # So that SIGTERM ends all processes and removes the folder, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))
    began = time.monotonic()

    def say(words: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s: {words}", flush=True)

    if options.recorded:
        return told(Night.load(options.recorded), say)
    with tempfile.TemporaryDirectory(prefix="tasklock-night-") as scratch:
        folder = Path(options.keep or scratch)
        night = conduct(folder, say)
        night.save(folder / FILE.name)
        if options.record:
            night.save(FILE)
            print(f"{FILE} has {FILE.stat().st_size} bytes, of {LARGEST} at most")
    return told(night, say)


def told(night: Night, say: Callable[[str], None]) -> int:
    """Print what is untrue of all that is told of a night, and return the exit status."""
    found = judge(night, say)
    for each in found.untrue:
        print(f"\n{'' if each in found.unknown else 'known: '}{each}")
    print()
    for line in report(text for texts in found.texts.values() for text in texts.values()):
        print(line)
    for name in found.mended:
        print(f"{KNOWN.name}: {name!r} has found nothing, so its line can go")
    print(
        f"\n{len(night.moments)} moments, {len(found.untrue)} untrue, of which "
        f"{len(found.unknown)} were not known"
    )
    return UNTRUE if found.unknown else OK


if __name__ == "__main__":
    sys.exit(main())
