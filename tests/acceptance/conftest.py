"""Replicas as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from tests.support.polling import eventually


class Run(NamedTuple):
    """A run that a replica printed."""

    run_time: str
    token: int
    how: str
    pid: int


class ReplicaProcess:
    """A scheduler in a process of its own, or several behind a server.

    :param command: Python's arguments; what it runs is configured as in
        tests/acceptance/replica.py
    """

    def __init__(
        self,
        log: Path,
        database_url: str,
        checkout: Path,
        job: dict[str, Any],
        command: Sequence[str] = ("-m", "tests.acceptance.replica"),
    ) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                cwd=checkout,
                env={**os.environ, "DATABASE_URL": database_url, "JOB": json.dumps(job)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def said(self) -> list[str]:
        """The lines that the replica printed: what happened to its job."""
        return self._log.read_text().splitlines()

    def says(self, line: str, timeout: float = 60.0) -> None:
        """Wait until the replica has printed a line that starts so."""
        eventually(lambda: any(said.startswith(line) for said in self.said), timeout)

    @property
    def runs(self) -> list[Run]:
        lines = [line.split()[1:] for line in self.said if line.startswith("runs")]
        return [Run(time, int(token), how, int(pid)) for time, token, how, pid in lines]

    @property
    def pids(self) -> dict[str, int]:
        """The processes in which its tasks were begun last."""
        lines = [line for line in self.said if line.startswith("begins ")]
        begun = [line.removeprefix("begins ").rpartition(" ") for line in lines]
        return {task: int(pid) for task, _, pid in begun}

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of its scheduler, and wait for its end."""
        assert self._process.stdin is not None
        before = self.said.count(f"did {method}")
        self._process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        self._process.stdin.flush()
        eventually(lambda: self.said.count(f"did {method}") > before)

    @property
    def exit_code(self) -> int | None:
        """What it ended with, or ``None`` while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Send it SIGTERM, and wait for its end."""
        self.signal(signal.SIGTERM)
        self._process.wait(60)

    def leave(self) -> None:
        """End its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        return self._process.wait(60)

    def signal_group(self, which: signal.Signals) -> None:
        """Send a signal to it and to all processes that it started, as a service manager does."""
        os.killpg(self.pid, which)

    def signal(self, which: signal.Signals) -> None:
        self._process.send_signal(which)

    def end(self) -> None:
        """Kill it, and the worker processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


@pytest.fixture
def start_replica(
    tmp_path: Path, database_url: str, checkout: Path
) -> Iterator[Callable[..., ReplicaProcess]]:
    """Start a replica with a job, by default as a plain process; it is killed after the test."""
    with ExitStack() as ending:
        number = iter(range(100))

        def start(*command: str, database: str = database_url, **job: Any) -> ReplicaProcess:
            log = tmp_path / f"replica {next(number)}.log"
            replica = ReplicaProcess(log, database, checkout, job, *[command] if command else [])
            ending.callback(replica.end)
            return replica

        yield start


class Rows:
    """The rows of the task lock table."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def __getitem__(self, task: str) -> dict[str, Any]:
        """Return a task's row, with whether it is free, and the database's time."""
        found = self.get(task)
        assert found is not None
        return found

    def get(self, task: str) -> dict[str, Any] | None:
        cursor = self._connection.cursor(row_factory=psycopg.rows.dict_row)
        free = "finished_at IS NOT NULL OR locked_until <= clock_timestamp() AS free"
        return cursor.execute(
            f"SELECT *, {free}, clock_timestamp() AS now FROM task_lock WHERE task_name = %s",
            [task],
        ).fetchone()


@pytest.fixture
def rows(connection: psycopg.Connection[Any]) -> Rows:
    return Rows(connection)
