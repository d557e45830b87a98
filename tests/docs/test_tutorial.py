"""The tutorial, from its first step to its last, on the database that it starts itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run_process
from tests.support.polling import eventually
from tests.support.snippets import ROOT, snippets_of

PAGE = ROOT / "docs/tutorial.md"
NAMES = ("one", "two", "three")

# Runs a program as a terminal does, where Ctrl-C is not ignored.
AS_ON_A_TERMINAL = (
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    " sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)

# What is another one each time, in the lines that the tutorial shows.
VARIES = (
    r"'laptop:\d+:\w+'|(?<=tasklock-postgres-)\w+"
    r"|\d+-\d+-\d+ \d+:\d+:\d+\+00:00|\d+:\d+:\d+|\d{4,}|\d+\.\d+(?= sec)"
)


class Program:
    """A program of the tutorial, whose output goes to a file."""

    def __init__(self, folder: Path, url: str, *arguments: str) -> None:
        self.log = folder / f"{'-'.join(arguments)}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", AS_ON_A_TERMINAL, *arguments],
                cwd=folder,
                env={**os.environ, "TASKLOCK_DATABASE_URL": url, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def press_enter(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until it has printed a line."""

        def printed() -> re.Match[str] | None:
            found = re.search(pattern, self.text, re.MULTILINE)
            assert found or self.process.poll() is None, self.text
            return found

        found: re.Match[str] = eventually(printed)
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Save the files of the tutorial, and start one of them with arguments."""
    for name, code in re.findall(
        r"Save this as `([\w.]+)`:\n\n```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.M
    ):
        (tmp_path / name).write_text(code)
    with ExitStack() as ending:

        def start_one(url: str, *arguments: str) -> Program:
            program = Program(tmp_path, url, *arguments)
            ending.callback(program.close)
            return program

        yield start_one


def shown_lines(first_words: str) -> list[str]:
    """Return patterns of the lines of the block that begins so, without the command."""
    [block] = [one.text for one in snippets_of(PAGE) if one.text.startswith(first_words)]
    lines = [line for line in block.splitlines() if not line.startswith("$ ")]
    return ["^" + ".+".join(map(re.escape, re.split(VARIES, line))) + "$" for line in lines]


def command(url: str, line: str) -> str:
    """Run a command line that the tutorial shows."""
    assert f"\n$ {line}\n" in PAGE.read_text()
    answer = run_process(
        {**os.environ, "TASKLOCK_DATABASE_URL": url, "PYTHONPATH": str(ROOT)}, *line.split()[1:]
    )
    assert answer.status == 0, answer.err
    return answer.out


@pytest.mark.nightly
@pytest.mark.own_server
@pytest.mark.timeout(500)
def test_the_tutorial_from_its_first_step_to_its_last(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    database = start("", "database.py")
    [export] = shown_lines("$ python database.py")
    url = database.wait_for(export)[0].partition("=")[2]
    [migrated] = shown_lines("$ apscheduler-tasklock upgrade")
    assert re.search(migrated, command(url, "apscheduler-tasklock upgrade"), re.MULTILINE)

    replicas = {"one": start(url, "replica.py", "one")}
    for line in shown_lines("$ python replica.py one"):
        replicas["one"].wait_for(line)
    for name in ("two", "three"):
        replicas[name] = start(url, "replica.py", name)
    for replica in replicas.values():
        replica.wait_for("Task locks are on")

    # They say that they are there a moment after their start.
    listed = "apscheduler-tasklock replicas"
    eventually(lambda: len(command(url, listed).splitlines()) == 1 + len(NAMES))
    assert "report" in command(url, "apscheduler-tasklock status")

    killed, pid, run_time = begun_now(replicas)
    os.kill(pid, signal.SIGKILL)
    replicas.pop(killed)

    again = shown_lines("two: Task 'report': runs the window")
    heir = printed(replicas, "(?m)" + again[0].replace("two", r"(\w+)", 1))[1]
    # In this order: it may have run other reports before.
    taken_over = "\n".join(again).replace("$\n^", "\n(?:.*\n)*?").replace("two", heir)
    replicas[heir].wait_for(taken_over)
    assert f"begins the report of {run_time}" in replicas[heir].text

    # The run is in the history when its lock is released, which is after its last line.
    asked = "apscheduler-tasklock runs report --limit 3"
    history = eventually(
        lambda: re.search(r"^.* ok +takeover .*\n.* died ", command(url, asked), re.M)
    )
    assert history[0].startswith("report ")

    surviving, _, run_time = begun_now(replicas)
    database.press_enter()
    database.wait_for("The database is stopped")
    replicas[surviving].wait_for(f"ends the report of {run_time}")
    [skipped] = shown_lines("two: Task 'report': not run")
    # Of the next run time: a slow replica may still have asked for this one.
    following = datetime.strptime(run_time, "%H:%M:%S") + timedelta(seconds=20)
    for replica in replicas.values():
        replica.wait_for(r"The task lock database is unavailable")
        replica.wait_for(skipped.replace("two", r"\w+", 1))
        replica.wait_for(rf"not run for the run time \S+ {following:%H:%M:%S}\b")
    database.press_enter()
    database.wait_for("The database runs again")
    for replica in replicas.values():
        replica.wait_for("The task lock database is back")

    stopped, _, run_time = begun_now(replicas)
    program = replicas.pop(stopped)
    program.process.send_signal(signal.SIGINT)
    assert program.process.wait(60) == 0, program.text
    assert f"{stopped} ends the report of {run_time}" in program.text
    begun_now(replicas)
    each_run_once(tmp_path)
    missed = "apscheduler-tasklock runs report --outcome missed"
    eventually(lambda: "the database did not answer" in command(url, missed), timeout=120)
    database.process.send_signal(signal.SIGINT)
    assert database.process.wait(60) == 0


def begun_now(replicas: dict[str, Program]) -> tuple[str, int, str]:
    """Wait until one begins the report; return its name, its process and the run time."""
    seen = {name: len(program.text) for name, program in replicas.items()}

    def begun() -> re.Match[str] | None:
        news = "\n".join(program.text[seen[name] :] for name, program in replicas.items())
        return re.search(r"^(\w+) \(pid (\d+)\) begins the report of (\S+),", news, re.MULTILINE)

    found = eventually(begun)
    return found[1], int(found[2]), found[3]


def printed(replicas: dict[str, Program], pattern: str) -> Any:
    """Wait until one of them has printed a line."""
    return eventually(
        lambda: next(
            (found for one in replicas.values() if (found := re.search(pattern, one.text))), None
        )
    )


def each_run_once(folder: Path) -> None:
    """Check what the job has written, as the tutorial does."""
    [count] = [
        line.removeprefix("$ ") for line in PAGE.read_text().splitlines() if "reports.txt |" in line
    ]
    assert len((folder / "reports.txt").read_text().splitlines()) > 1
    assert subprocess.check_output(["sh", "-c", count], cwd=folder) == b""
