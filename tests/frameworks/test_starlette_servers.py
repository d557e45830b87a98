"""The lifespan under real servers: which processes run jobs, and how they stop."""

from __future__ import annotations

import os
import shutil
import signal
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.frameworks.servers import (
    Server,
    replicas,
    runs_each_window_once,
    served,
    unfinished,
    windows,
)
from tests.support.polling import eventually

pytestmark = pytest.mark.nightly

GUNICORN = "gunicorn application:app -k uvicorn_worker.UvicornWorker --graceful-timeout 60"


@pytest.fixture
def folder(checkout: Path, tmp_path: Path) -> Path:
    """A folder with the application."""
    folder = tmp_path / "folder"
    folder.mkdir()
    application = checkout / "tests" / "frameworks" / "asgi_application.py"
    shutil.copy(application, folder / "application.py")
    return folder


def answer(server: Server) -> bool:
    with suppress(OSError):  # while it starts
        url = f"http://127.0.0.1:{server.port}/"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bool(answer.read() == b"served")
    return False


def has_ended(connection: psycopg.Connection[Any], task: str) -> bool:
    query = "SELECT FROM task_lock WHERE task_name = %s AND finished_at IS NOT NULL"
    return connection.execute(query, [task]).rowcount == 1


def only_cancellations(said: str) -> bool:
    """Tell whether nothing was raised but in cancelled jobs, which APScheduler logs."""
    return said.count("Traceback") == said.count("is cancelled")


@pytest.mark.parametrize(
    ("command", "schedulers"),
    [
        ("uvicorn application:app --loop asyncio", 1),
        ("uvicorn application:app --loop uvloop", 1),
        ("uvicorn application:app --workers 2", 2),
        (f"{GUNICORN} --workers 2", 2),
        (f"{GUNICORN} --workers 2 --preload", 2),
        ("hypercorn application:app", 1),
    ],
)
def test_sigterm_lets_threads_end_and_cancels_coroutines(
    command: str,
    schedulers: int,
    folder: Path,
    database_url: str,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
) -> None:
    environment = {"TASKLOCK_DATABASE_URL": database_url}
    with served(command, folder, environment, tmp_path / "log") as server:
        worker = server.pid("begins")
        eventually(lambda: server.pids("listens"))
        eventually(lambda: replicas(connection) == schedulers)
        eventually(lambda: answer(server))
        runs_each_window_once(connection, "tick")
        if "gunicorn" in command:
            assert server.process.pid not in server.pids("ticks")
        os.kill(server.process.pid, signal.SIGTERM)
        eventually(lambda: replicas(connection) <= 1)
        assert not has_ended(connection, "long")
        assert worker not in server.pids("closes")
        (folder / "go").touch()
        server.process.wait(60)
        said = server.said
    assert server.pids("ends") == {worker}
    assert server.pids("is cancelled")
    assert said.index("is cancelled") < said.rindex("closes")
    assert len(server.pids("closes")) == schedulers
    assert unfinished(connection) == 0
    assert has_ended(connection, "long")
    assert len(windows(connection, "long")) == 1
    assert only_cancellations(said), said


def test_a_changed_file_ends_the_scheduler_and_starts_another(
    folder: Path, database_url: str, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    (folder / "go").touch()
    environment = {"TASKLOCK_DATABASE_URL": database_url}
    command = "uvicorn application:app --reload"
    with served(command, folder, environment, tmp_path / "log") as server:
        first = server.pid("ends")
        eventually(lambda: answer(server))
        module = folder / "application.py"
        module.write_text(module.read_text().replace('say("ticks")', 'say("tocks")'))
        second = server.pid("tocks")
        assert server.pids("closes") == {first}
        assert first != second
        said = server.stopped()
    assert server.pids("closes") == {first, second}
    assert only_cancellations(said), said
