"""The slow machine: it stops what a command has started, and nothing that was stopped before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.polling import eventually
from tests.support.slow_machine import Stops

# Starts a process in a session of its own, tells its id, and waits.
STARTS = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
sys.stdin.read()
"""

# A slow machine in a process of its own, because it becomes the parent of orphans.
SLOW = [sys.executable, "-m", "tests.support.slow_machine", "--stops", "1", "--"]


def state(pid: int) -> str:
    """Return the state of a process as ``ps`` has it; empty if it is gone."""
    found = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], check=False, capture_output=True, text=True
    )
    return found.stdout.strip()[:1]


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process, which is killed after the test."""
    with ExitStack() as closing:

        def start(*command: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            closing.enter_context(process)
            closing.callback(process.kill)
            return process

        yield start


@pytest.fixture
def family(start: Callable[..., subprocess.Popen[str]]) -> Iterator[tuple[int, int]]:
    """A process and its child in another session."""
    parent = start(sys.executable, "-c", STARTS)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    yield parent.pid, child
    os.kill(child, signal.SIGKILL)


@contextmanager
def stopped(root: int) -> Iterator[None]:
    """Stop the descendants of a process meanwhile; the server may be one of the tests' own."""
    stops = Stops(root)
    stops.stop()
    try:
        yield
    finally:
        stops.go_on()


def test_a_stop_stops_children_in_other_sessions_too_and_lets_them_go_on(
    family: tuple[int, int],
) -> None:
    with stopped(os.getpid()):
        eventually(lambda: [state(pid) for pid in family] == ["T", "T"])
    eventually(lambda: [state(pid) for pid in family] == ["S", "S"])


def test_what_was_stopped_before_stays_stopped(family: tuple[int, int]) -> None:
    parent, child = family
    os.kill(child, signal.SIGSTOP)
    eventually(lambda: state(child) == "T")
    with stopped(os.getpid()):
        pass
    eventually(lambda: state(parent) == "S")
    assert state(child) == "T"


def test_a_process_that_is_no_descendant_is_left_alone(family: tuple[int, int]) -> None:
    parent, child = family
    with stopped(parent):
        eventually(lambda: [state(parent), state(child)] == ["S", "T"])


def test_a_child_whose_parent_has_ended_is_stopped_and_goes_on(
    start: Callable[..., subprocess.Popen[str]], checkout: Path
) -> None:
    orphan = "import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    command = f'pid=$({sys.executable} -c "{orphan}" | head -1); echo $pid; read line; kill -9 $pid'
    machine = start(*SLOW, "sh", "-c", command)
    assert machine.stdout is not None
    machine.stdout.readline()  # the seed
    pid = int(machine.stdout.readline())
    eventually(lambda: state(pid) == "T")
    eventually(lambda: state(pid) == "S")
    machine.communicate("go on\n")
    assert machine.returncode == 0


@pytest.mark.parametrize(("command", "code"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_it_ends_as_its_command_does(command: str, code: int) -> None:
    assert subprocess.run([*SLOW, "sh", "-c", command], check=False).returncode == code


def test_a_termination_is_passed_on(start: Callable[..., subprocess.Popen[str]]) -> None:
    machine = start(*SLOW, "sh", "-c", "echo $$; exec sleep 600")
    assert machine.stdout is not None
    machine.stdout.readline()
    pid = int(machine.stdout.readline())
    machine.terminate()
    assert machine.wait(60) == 128 + signal.SIGTERM
    assert state(pid) == ""
