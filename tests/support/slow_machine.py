"""A slow machine: runs a command, and stops all its processes together at random moments.

``python -m tests.support.slow_machine --slow 10 -- .venv/bin/pytest ...`` stops the command, its
children and theirs, and the database servers that they have started, for 0.5 to 3 seconds, about
half of the time. Clocks go on meanwhile, so that what depends on the time of the machine shows.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Seconds of each stop, and of the time between two.
SHORTEST, LONGEST = 0.5, 3.0

# Tells the tests' plugin by how much each timeout of pytest is multiplied.
FACTOR = "TASKLOCK_TEST_SLOW"

# A process in an uninterruptible system call stops when it returns from it.
_LONGEST_CALL = 0.2

_SET_CHILD_SUBREAPER = 36  # of prctl
_STOPPED = "Tt"
_ENDED = "ZX"


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent ends, so that it can be found."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _state_and_parent(pid: int) -> tuple[str, int] | None:
    """Return the state of a process and its parent, or ``None`` if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent = stat.rpartition(")")[2].split()[:2]  # the name may have spaces
    return state, int(parent)


def _children() -> dict[int, list[int]]:
    """Return the processes of the machine by their parents."""
    by_parent: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (found := _state_and_parent(int(entry))):
            by_parent.setdefault(found[1], []).append(int(entry))
    return by_parent


def descendants(root: int) -> Iterator[int]:
    """Yield the descendants of a process, each after its parent."""
    by_parent = _children()
    pending = list(by_parent.get(root, ()))
    while pending:
        yield (pid := pending.pop(0))
        pending += by_parent.get(pid, ())


def _stop(pid: int) -> bool:
    """Stop a process, and return whether it ran until now."""
    found = _state_and_parent(pid)
    if found is None or found[0] in _STOPPED + _ENDED:
        return False
    try:
        os.kill(pid, signal.SIGSTOP)
    except ProcessLookupError:
        return False
    deadline = time.monotonic() + _LONGEST_CALL
    while (found := _state_and_parent(pid)) and found[0] not in _STOPPED + _ENDED:
        if time.monotonic() > deadline:
            break
        time.sleep(0.0005)
    return True


class Stops:
    """Stops the descendants of a process together, and lets them go on together."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._stopped: list[int] = []

    def stop(self) -> None:
        """Stop all descendants.

        One that its parent has stopped stays stopped later, too. So a parent is stopped before the
        state of its children is read. It may have started others until then: look again.
        """
        seen: set[int] = set()
        while new := [pid for pid in descendants(self._root) if pid not in seen]:
            for pid in new:
                seen.add(pid)
                if _stop(pid):
                    self._stopped.append(pid)

    def go_on(self) -> None:
        """Let those go on that :meth:`stop` has stopped. No process ends while it is stopped."""
        for pid in reversed(self._stopped):
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue  # it was killed
        self._stopped.clear()


def _reap(pid: int) -> int | None:
    """Reap what has ended, and return the exit code of a child once it has ended."""
    code = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if not ended:
            return code
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)


def _ended_within(seconds: float, code_of: Callable[[], int | None]) -> int | None:
    """Wait for the end of the command, at most for so long, and return its exit code."""
    deadline = time.monotonic() + seconds
    while (code := code_of()) is None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(0.02, left))
    return code


def run(command: list[str], slow: float, seed: int) -> int:
    """Run a command on the slow machine, and return its exit code."""
    rng = random.Random(seed)  # noqa: S311  # repeatable, not secret
    adopt_orphans()
    # Where there is a Docker engine, tests take their server from it: no process of this run.
    environment = {**os.environ, "DOCKER_HOST": "unix:///nonexistent", FACTOR: str(slow)}
    stops = Stops(os.getpid())
    is_terminated = False

    def note(_which: int, _frame: object) -> None:
        nonlocal is_terminated
        is_terminated = True

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to the command, too
    process = subprocess.Popen(command, env=environment)

    def code() -> int | None:
        """Pass a termination on, and return the exit code of the command once it has ended."""
        nonlocal is_terminated
        if is_terminated:
            is_terminated = False
            os.kill(process.pid, signal.SIGTERM)  # it is not reaped yet
        return _reap(process.pid)

    try:
        while (ended := _ended_within(rng.uniform(SHORTEST, LONGEST), code)) is None:
            stops.stop()
            time.sleep(rng.uniform(SHORTEST, LONGEST))
            stops.go_on()
    finally:
        stops.go_on()
    process.returncode = ended
    return ended if ended >= 0 else 128 - ended


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.slow_machine")
    parser.add_argument("--slow", type=float, default=10, help="multiplies pytest's timeouts")
    parser.add_argument("--stops", type=int, help="seed of the stops; by default one is drawn")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    seed = random.randrange(2**32) if given.stops is None else given.stops  # noqa: S311  # no secret
    print(f"a slow machine: timeouts times {given.slow:g}, stops: --stops={seed}", flush=True)
    return run(given.command, given.slow, seed)


if __name__ == "__main__":
    sys.exit(main())
