"""The replica's thread where its process ends, or forks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.support.claims import row
from tests.support.polling import eventually

Connection = psycopg.Connection[Any]

BEGIN = """
import atexit, json, os, sys, threading, time
import psycopg
from apscheduler_tasklock import TaskLocks
from apscheduler_tasklock._database import thread as module
from apscheduler_tasklock._database.timings import Timings

url = sys.argv[1]
# No limit is reached while a slow machine stops.
module.ENDING_LIMIT = 60.0
TaskLocks.timings = Timings(longest_answer=60.0)
locks = TaskLocks(url, replica_id="script", claim_timeout=180)
TIMES = {"min_lock": 0, "max_lock": 600}

def threads():
    return [each for each in threading.enumerate() if each.name == module.NAME]

def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""

AT_EXIT = """
held = locks.hold("job", **TIMES)
held.__enter__()
atexit.register(held.__exit__, None, None, None)
"""
AFTER_THE_MAIN_THREAD = """
def work():
    with locks.hold("job", **TIMES):
        threading.main_thread().join()
        time.sleep(0.1)  # the interpreter has begun to end

threading.Thread(target=work).start()
"""
WITHOUT_A_THREAD = """
class Hasty(TaskLocks):
    timings = Timings(linger=0.0, longest_answer=60.0)

locks = Hasty(url, replica_id="script", claim_timeout=180)
locks.check()
until(lambda: threads() == [])

def late():
    with locks.hold("job", lease=None, **TIMES):
        pass

atexit.register(late)
"""
# What is left over is finalized when no thread goes on any more.
LEFT_OVER = """
class LeftOver:
    def __del__(self, os=os):
        try:
            with self.hold:
                pass
        except Exception as error:
            os.write(1, str(error).encode())

def holding():
    with locks.hold("job", **TIMES):
        yield

LeftOver.hold = locks.hold("another", **TIMES)
LeftOver.itself = LeftOver()
generator = holding()
next(generator)
"""
# Another session has the row locked, so that it has to be sent again.
LOCKED = """
def leave():
    held.__exit__(None, None, None)
    print("ending", flush=True)

held = locks.hold("job", **TIMES)
held.__enter__()
print("held", flush=True)
sys.stdin.readline()
"""
FORKS = """
def pids():
    with psycopg.connect(url) as connection:
        found = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'tasklock %'"
        )
        return sorted(pid for (pid,) in found)

def hold(name):
    with locks.hold(name, **TIMES):
        return pids()

with locks.hold("parents", **TIMES):
    before = pids()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        inherited = len(threads())
        seen = hold("childs")
        told = {"inherited": inherited, "threads": len(threads()), "pids": seen}
        locks.close()
        os.write(writing, json.dumps(told).encode())
        sys.exit(0)
    os.waitpid(child, 0)
    told = json.loads(os.read(reading, 10000))
    with locks.hold("again", **TIMES):
        until(lambda: len(pids()) == 1)  # the child's is ended by the server after the child
        after = pids()
print(json.dumps({"before": before, "child": told, "after": after}))
locks.close()
"""

# With the mistake that the child waits for its parent's thread, it would wait for an hour.
CHILD_ENDS = """
held = locks.hold("job", **TIMES)
held.__enter__()
assert threads()
child = os.fork()
if child == 0:
    module.ENDING_LIMIT = 3600
    sys.exit(0)
until(lambda: os.waitpid(child, os.WNOHANG) != (0, 0))
held.__exit__(None, None, None)
locks.close()
"""


@pytest.fixture
def run(database_url: str, tmp_path: Any) -> Callable[[str], subprocess.Popen[str]]:
    def run(script: str) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(BEGIN + script)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, str(path), database_url]
        return subprocess.Popen(command, **pipes, stderr=subprocess.PIPE, text=True)

    return run


def ended(process: subprocess.Popen[str]) -> str:
    """Return what it has written, when it has ended by itself and without a complaint."""
    try:
        written, complaints = process.communicate(timeout=90)
    finally:
        process.kill()
    assert (process.returncode, complaints) == (0, "")
    return written


@pytest.mark.parametrize("script", [AT_EXIT, AFTER_THE_MAIN_THREAD, WITHOUT_A_THREAD])
def test_a_release_arrives_while_the_interpreter_ends(
    run: Callable[[str], subprocess.Popen[str]], connection: Connection, script: str
) -> None:
    ended(run(script))
    assert row(connection)["finished_at"] is not None


def test_what_is_left_over_does_not_keep_the_interpreter_from_ending(
    run: Callable[[str], subprocess.Popen[str]],
) -> None:
    process = run(LEFT_OVER)
    try:
        process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 0


@pytest.mark.parametrize("leaves", ["leave()", "atexit.register(leave)"])
def test_an_interpreter_that_ends_waits_for_a_release_that_is_sent_again(
    run: Callable[[str], subprocess.Popen[str]],
    connection: Connection,
    database_url: str,
    leaves: str,
) -> None:
    process = run(LOCKED + leaves)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with psycopg.connect(database_url) as session:
        session.execute("SELECT FROM task_lock FOR UPDATE")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ending\n"
        assert row(connection)["finished_at"] is None
    ended(process)
    assert row(connection)["finished_at"] is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
def test_a_forked_child_ends_without_waiting_for_its_parents_thread(
    run: Callable[[str], subprocess.Popen[str]], connection: Connection
) -> None:
    """As each worker of a pool of processes, for which a shutdown waits."""
    ended(run(CHILD_ENDS))
    assert row(connection)["finished_at"] is not None


@pytest.mark.direct("it counts the library's connections in the server")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
def test_a_forked_child_has_a_thread_of_its_own_and_leaves_its_parents_connection_alone(
    run: Callable[[str], subprocess.Popen[str]], connection: Connection
) -> None:
    found = json.loads(ended(run(FORKS)))
    [parents] = found["before"]
    assert (found["child"]["inherited"], found["child"]["threads"]) == (0, 1)
    assert len(found["child"]["pids"]) == 2
    assert parents in found["child"]["pids"]
    assert found["after"] == [parents]
    for task in ("parents", "childs", "again"):
        assert eventually(lambda task=task: row(connection, task)["finished_at"])
