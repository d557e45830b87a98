"""SIGTERM while a program waits for a database that swallows packets, and to our own servers."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.frameworks.servers import environment_of

# What the recipe leaves to its reader.
AROUND_RECIPE = """
import os
from apscheduler.schedulers.blocking import BlockingScheduler
from apscheduler_tasklock import TaskLockExecutor
scheduler = BlockingScheduler(
    executors={"default": TaskLockExecutor(os.environ["TASKLOCK_DATABASE_URL"])}
)
"""


@pytest.fixture
def black_hole() -> Iterator[socket.socket]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        yield server


def command_of(program: str, checkout: Path) -> Sequence[str]:
    if program.endswith(".py"):
        return [str(checkout / "examples" / program)]
    page = (checkout / "docs" / "how-to" / program).read_text()
    recipe = next(
        each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "SIGTERM" in each
    )
    return ["-c", AROUND_RECIPE + recipe]


@pytest.mark.parametrize(
    "program",
    [
        "deployments.md",
        pytest.param("threads.py", marks=pytest.mark.nightly),
        pytest.param("own_alembic/app.py", marks=pytest.mark.nightly),
        pytest.param("compose/app.py", marks=pytest.mark.nightly),
        pytest.param("kubernetes/app.py", marks=pytest.mark.nightly),
        pytest.param("fencing.py", marks=pytest.mark.nightly),
    ],
)
def test_a_program_that_waits_for_its_database_ends_well(
    program: str, black_hole: socket.socket, checkout: Path, tmp_path: Path
) -> None:
    port = black_hole.getsockname()[1]
    environment = {
        **environment_of(tmp_path),
        "TASKLOCK_DATABASE_URL": f"postgresql://app@127.0.0.1:{port}/app",
        "PROBE_HOST": "127.0.0.1",
        "PROBE_PORT": "0",
    }
    with subprocess.Popen(
        [sys.executable, *command_of(program, checkout)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        connection, _ = black_hole.accept()  # so the program waits for an answer, or is about to
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=120)
        connection.close()
    assert (process.returncode, "Traceback" in said) == (0, False), said


@pytest.mark.parametrize(
    "command", [["dashboard", "--port", "0"], ["metrics", "--listen", "127.0.0.1:0"]]
)
def test_our_servers_end_well(command: list[str], tmp_path: Path) -> None:
    # No database is needed, because it is read when somebody asks.
    environment = {
        **environment_of(tmp_path),
        "TASKLOCK_DATABASE_URL": "postgresql://app@nowhere/app",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "apscheduler_tasklock", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert "http://127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, "")
