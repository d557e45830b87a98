"""Runs the command line in this process, or in its own process with pipes or a terminal."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest

from apscheduler_tasklock import TaskLocks
from apscheduler_tasklock.cli import main
from tests.support.pages import Known
from tests.support.polling import eventually

ROOT = Path(__file__).parent.parent.parent

# No machine is so slow that an answer takes longer.
PATIENT = replace(TaskLocks.timings, longest_answer=60.0)


class PatientTaskLocks(TaskLocks):
    """Waits for connections and answers for longer than a slow machine needs."""

    timings = PATIENT

    def __init__(self, *arguments: Any, claim_timeout: float = 180.0, **options: Any) -> None:
        # An answer is waited for for a third of it at most.
        super().__init__(*arguments, claim_timeout=claim_timeout, **options)


# Starts the command line in its own process. The process restores the handler of SIGINT, because
# background processes of a shell and their children ignore the signal.
COMMAND = [
    sys.executable,
    "-u",
    "-c",
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    " runpy.run_module('apscheduler_tasklock.cli', run_name='__main__', alter_sys=True)",
]


def run_pasted(line: str, database_url: str) -> str:
    """Run a command of a log line in a shell, and return its output."""
    program = f'apscheduler-tasklock() {{ {shlex.join(COMMAND)} "$@"; }}'
    return subprocess.run(
        ["bash", "-c", f"{program}; {line}"],
        env={**os.environ, "TASKLOCK_DATABASE_URL": database_url},
        cwd=ROOT,
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@dataclass(frozen=True)
class Answer:
    """The output of a command, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def cells(self) -> list[list[str]]:
        """The rows of the printed table, without its head."""
        return [[cell for cell in line.split("  ") if cell] for line in self.out.splitlines()[1:]]


class Command:
    """Runs the command line on a database.

    It waits for each answer with patience.

    :ivar known: what is read of rows, in place of a database
    """

    def __init__(
        self, database_url: str, capsys: pytest.CaptureFixture[str], known: Known | None = None
    ) -> None:
        self.database_url = database_url
        self._capsys = capsys
        self.known = known

    def __call__(self, command: str, *arguments: str, database: str | None = None) -> Answer:
        """Run a command of the command line in this process.

        :param command: ``status``, or with the action as ``jobs pause``
        """
        words = [*command.split(), "--database", database or self.database_url, *arguments]
        with patch.object(TaskLocks, "timings", PATIENT):
            try:
                status = main(words, locks=cast("TaskLocks | None", self.known))
            except SystemExit as ended:
                status = int(ended.code or 0)
        printed = self._capsys.readouterr()
        return Answer(status, printed.out, printed.err)


def environment(database_url: str, **more: str) -> dict[str, str]:
    """Return the environment of a process that is to run the command line."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    return {**inherited, "TASKLOCK_DATABASE_URL": database_url, "PYTHONPATH": str(ROOT), **more}


class OnTerminal:
    """A process of the command line on a terminal. A context manager."""

    def __init__(self, database_url: str, *arguments: str, **env: str) -> None:
        self._ours, theirs = pty.openpty()
        self.output = b""
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=environment(
                database_url, **{"TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50", **env}
            ),
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    @property
    def text(self) -> str:
        """The output so far."""
        try:
            while more := os.read(self._ours, 65536):
                self.output += more
        except (BlockingIOError, OSError):  # no output yet, or the process has ended
            pass
        return self.output.decode(errors="replace")

    def wait_for(self, text: str) -> str:
        """Wait until the output has a text."""
        eventually(lambda: text in self.text or self.process.poll() is not None)
        assert text in self.text, self.text
        return self.text

    def answer(self, text: str) -> None:
        """Type a text."""
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def status(self) -> int:
        """Wait for the end of the process, and return its exit status."""
        eventually(lambda: (self.text, self.process.poll())[1] is not None)
        return int(self.process.returncode)


def run_process(env: Mapping[str, str], *arguments: str) -> Answer:
    """Run the command line in its own process, with pipes for its output."""
    finished = subprocess.run(
        [sys.executable, "-m", "apscheduler_tasklock.cli", *arguments],
        env=dict(env),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return Answer(finished.returncode, finished.stdout, finished.stderr)
