"""Servers of web applications as processes of their own, and the pages that tell of them."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from apscheduler_tasklock.demo.server import free_port
from tests.support.polling import eventually

# Windows until a test believes that each is run once.
WINDOWS = 4


@dataclass(frozen=True)
class Server:
    """A command with all that it has started.

    :ivar port: which it listens on
    :ivar log: what its processes have printed
    """

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text()

    def pids(self, what: str) -> set[int]:
        """Return the processes that have said this, as ``process 12 ticks``."""
        return {int(pid) for pid in re.findall(rf"^process (\d+) {what}$", self.said, re.M)}

    def pid(self, what: str) -> int:
        """Wait until a process has said this, and return it; it is the only one."""
        [pid] = eventually(lambda: self.pids(what))
        return pid

    def stopped(self, process: int | None = None) -> str:
        """End it by SIGTERM, or one of its processes; wait until all is over. Return its log."""
        os.kill(process or self.process.pid, signal.SIGTERM)
        self.process.wait(60)
        return self.said


@contextmanager
def served(
    command: str, folder: Path, environment: Mapping[str, str], log: Path
) -> Iterator[Server]:
    """Run a console's command in a folder, on a port of its own.

    What is left of it at the end is killed.
    """
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            on_port(command, port),
            cwd=folder,
            env={**environment_of(folder), "PORT": str(port), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield Server(process, port, log)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(command: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run a console's command in a folder to its end, and return what it printed."""
    done = subprocess.run(
        python_command(command),
        check=False,
        cwd=folder,
        env={**environment_of(folder), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def environment_of(folder: Path) -> dict[str, str]:
    root = Path(__file__).parent.parent.parent
    own = {"PYTHONPATH": f"{root}{os.pathsep}{folder}", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **own, "PYTHONDONTWRITEBYTECODE": "1"}


def python_command(command: str) -> list[str]:
    """Return what runs a command with this test's Python."""
    program, *arguments = shlex.split(command)
    if program == "python":
        return [sys.executable, *arguments]
    module = {"apscheduler-tasklock": "apscheduler_tasklock"}.get(program, program)
    return [sys.executable, "-m", module, *arguments]


def on_port(command: str, port: int) -> list[str]:
    """Return what serves on this port."""
    words = python_command(command)
    if "gunicorn" in words or "hypercorn" in words:
        return [*words, "--bind", f"127.0.0.1:{port}"]
    if "uvicorn" in words or "flask" in words:
        return [*words, "--port", str(port)]
    return words


def replicas(connection: psycopg.Connection[Any]) -> int:
    """Count the processes whose schedulers are connected.

    Each names itself ``tasklock host:process:random``, or ``... child process`` where it was
    forked; an executor and a job store of one process differ in the random part.
    """
    found = connection.execute(
        "SELECT count(DISTINCT regexp_replace(application_name, ':[0-9a-f]{8}', '')) FROM"
        " pg_stat_activity WHERE application_name LIKE 'tasklock %'"
    ).fetchone()
    assert found is not None
    return int(found[0])


def windows(connection: psycopg.Connection[Any], task: str) -> list[Any]:
    """Return the run times of the runs of a task that ended well."""
    rows = connection.execute(
        "SELECT scheduled_at FROM task_lock_run WHERE task_name = %s AND outcome = 'ok'", [task]
    )
    return [scheduled_at for (scheduled_at,) in rows]


def runs_each_window_once(connection: psycopg.Connection[Any], task: str) -> None:
    """Wait for some windows of a task that has a run each second or so; none is run twice."""
    eventually(lambda: len(windows(connection, task)) >= WINDOWS)
    ran = windows(connection, task)
    assert len(ran) == len(set(ran))


def unfinished(connection: psycopg.Connection[Any]) -> int:
    """Count the locks that are held; one that was handed over is not."""
    held = "SELECT FROM task_lock WHERE finished_at IS NULL AND locked_until > now()"
    return connection.execute(held).rowcount


def files(page: Path) -> dict[str, str]:
    """Return the files that a page shows, by the names in their first lines."""
    shown = re.findall(r"^```python\n# (\S+)\n(.*?)^```", page.read_text(), re.DOTALL | re.M)
    found = dict(shown)
    assert len(found) == len(shown) == page.read_text().count("```python")
    return found


def commands(page: Path) -> list[str]:
    """Return the commands that a page shows."""
    consoles = re.findall(r"^```console\n(.*?)^```", page.read_text(), re.DOTALL | re.M)
    return [line.removeprefix("$ ") for text in consoles for line in text.splitlines()]


def write(files: Mapping[str, str], folder: Path) -> None:
    """Write files, whose jobs are due each second in place of some minutes or hours."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("minutes=5", "seconds=1").replace("hour=3", 'second="*"'))
