"""Replicas as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.polling import eventually


class ReplicaProcess:
    """A scheduler in a process of its own, started as ``python -m tests.acceptance.replica``."""

    def __init__(self, log: Path, database_url: str, checkout: Path, job: dict[str, Any]) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.acceptance.replica"],
                cwd=checkout,
                env={**os.environ, "DATABASE_URL": database_url, "JOB": json.dumps(job)},
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

    def says(self, line: str) -> None:
        """Wait until the replica has printed a line that starts so."""
        eventually(lambda: any(said.startswith(line) for said in self.said))

    def signal(self, which: signal.Signals) -> None:
        self._process.send_signal(which)

    def end(self) -> None:
        """Kill it, and the worker processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def start_replica(
    tmp_path: Path, database_url: str, checkout: Path
) -> Iterator[Callable[..., ReplicaProcess]]:
    """Start a replica with a job; it is killed after the test."""
    with ExitStack() as ending:
        number = iter(range(100))

        def start(**job: Any) -> ReplicaProcess:
            log = tmp_path / f"replica {next(number)}.log"
            replica = ReplicaProcess(log, database_url, checkout, job)
            ending.callback(replica.end)
            return replica

        yield start
