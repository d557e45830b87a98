"""The dashboard as an operator starts it, as a command in a process of its own; or in this one."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from starlette.applications import Starlette

from apscheduler_tasklock import TaskLocks
from apscheduler_tasklock.dashboard import dashboard
from tests.support.commands import COMMAND, PATIENT, environment
from tests.support.polling import eventually

APP = "apscheduler_tasklock.dashboard.app"


def patient_dashboard(url: str, **options: Any) -> Starlette:
    """Return a dashboard that waits for each answer for longer than a slow machine needs."""
    with patch.object(TaskLocks, "timings", PATIENT), patch(f"{APP}.TIMEOUT", 60.0):
        return dashboard(url, **options)


_ADDRESS = re.compile(r"the dashboard is at (http://\S+/) ")


class DashboardProcess:
    """The command ``dashboard`` on a free port. A context manager.

    :param log: where its output goes
    """

    def __init__(self, log: Path, database_url: str, *arguments: str, **env: str) -> None:
        self._log = log
        self._arguments = arguments
        self._environment = environment(database_url, **{"TZ": "UTC", **env})
        self._process = self._start("0")
        try:
            self.url = self._wait()
        except BaseException:
            self._end()
            raise

    def _start(self, port: str) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as output:
            return subprocess.Popen(
                [*COMMAND, "dashboard", "--port", port, *self._arguments],
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait(self) -> str:
        """Wait until it listens, and return its address."""
        eventually(lambda: self._process.poll() is not None or _ADDRESS.search(self.said))
        found = _ADDRESS.search(self.said)
        assert found is not None, self.said
        return found[1]

    @property
    def said(self) -> str:
        """Its output so far."""
        return self._log.read_text()

    def stop(self) -> None:
        """Stop it as Ctrl-C does, and wait for its end."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(30)

    def start_again(self) -> None:
        """Start it again on the same port."""
        self._process = self._start(self.url.rstrip("/").rpartition(":")[2])
        self._wait()

    def __enter__(self) -> DashboardProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
