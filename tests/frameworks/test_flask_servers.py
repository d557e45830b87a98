"""Flask under real servers: which processes run jobs, and how they stop."""

from __future__ import annotations

import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.frameworks.servers import (
    Server,
    replicas,
    run,
    runs_each_window_once,
    served,
    unfinished,
    windows,
)
from tests.support.polling import eventually

pytestmark = pytest.mark.nightly

GUNICORN = "gunicorn application:app --workers 2 --graceful-timeout 60"

WAITRESS = """
import os, signal, sys
from application import app, scheduler
from waitress import serve
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
scheduler.start()
serve(app, host="127.0.0.1", port=int(os.environ["PORT"]))
"""

Serve = Callable[..., AbstractContextManager[Server]]


@pytest.fixture
def folder(checkout: Path, tmp_path: Path) -> Path:
    """A folder with the application."""
    folder = tmp_path / "folder"
    folder.mkdir()
    application = checkout / "tests" / "frameworks" / "flask_application.py"
    shutil.copy(application, folder / "application.py")
    (folder / "serve.py").write_text(WAITRESS)
    return folder


@pytest.fixture
def environment(database_url: str) -> dict[str, str]:
    return {"FLASK_TASKLOCK_DATABASE_URL": database_url, "FLASK_APP": "application"}


@pytest.fixture
def serve(folder: Path, environment: dict[str, str], tmp_path: Path) -> Serve:
    def serve(command: str, **more: str) -> AbstractContextManager[Server]:
        return served(command, folder, {**environment, **more}, tmp_path / "log")

    return serve


def answer(server: Server) -> bool:
    with suppress(OSError):  # while it starts
        url = f"http://127.0.0.1:{server.port}/"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bool(answer.read() == b"served")
    return False


@pytest.mark.parametrize(
    ("command", "schedulers"),
    [
        ("flask run", 1),
        ("python application.py", 1),
        (GUNICORN, 2),
        (f"{GUNICORN} --preload", 2),
        (f"{GUNICORN} --worker-class gthread --preload", 2),
        (f"{GUNICORN} --worker-class gevent", 2),
        ("python serve.py", 1),
    ],
)
def test_sigterm_lets_a_job_end_and_each_window_is_run_once(
    command: str,
    schedulers: int,
    serve: Serve,
    folder: Path,
    connection: psycopg.Connection[Any],
) -> None:
    with serve(command) as server:
        worker = server.pid("begins")
        eventually(lambda: replicas(connection) == schedulers)
        runs_each_window_once(connection, "tick")
        if "gunicorn" in command:
            assert server.process.pid not in server.pids("ticks in application")
        os.kill(server.process.pid, signal.SIGTERM)
        eventually(lambda: replicas(connection) <= 1)
        time.sleep(1.5)  # in which a run comes due, which must not go to a pool that is closed
        eventually(lambda: unfinished(connection) == 1)  # once no `tick` runs any more
        (folder / "go").touch()
        server.process.wait(60)
        said = server.said
    assert server.pids("ends") == {worker}
    assert unfinished(connection) == 0
    assert len(windows(connection, "long")) == 1
    assert "Traceback" not in said, said


@pytest.mark.parametrize("command", ["flask run --debug", "flask run --reload"])
def test_the_process_that_serves_runs_the_jobs_and_not_the_one_that_watches(
    command: str, serve: Serve, folder: Path, connection: psycopg.Connection[Any]
) -> None:
    with serve(command) as server:
        worker = server.pid("begins")
        assert worker != server.process.pid
        runs_each_window_once(connection, "tick")
        assert replicas(connection) == 1
        os.kill(worker, signal.SIGTERM)
        (folder / "go").touch()
        server.process.wait(60)
        said = server.said
    assert said.count("Scheduler started") == 1, said
    assert server.pids("ends") == {worker}
    assert unfinished(connection) == 0


def test_run_with_the_reloader_starts_the_scheduler_in_its_child(
    serve: Serve, folder: Path, connection: psycopg.Connection[Any]
) -> None:
    (folder / "go").touch()
    with serve("python application.py", DEBUG="1") as server:
        worker = server.pid("ends")
        assert server.process.pid in server.pids("imports") - {worker}
        runs_each_window_once(connection, "tick")
        said = server.stopped(worker)
    assert said.count("Scheduler started") == 1, said
    assert unfinished(connection) == 0


def test_a_changed_file_ends_the_scheduler_and_starts_another(
    serve: Serve, folder: Path, connection: psycopg.Connection[Any]
) -> None:
    with serve("flask run --debug") as server:
        first = server.pid("begins")
        module = folder / "application.py"
        eventually(lambda: answer(server))  # the reloader knows its files by then
        module.write_text(module.read_text().replace("ticks in", "tocks in"))
        eventually(lambda: "Detected change" in server.said)
        (folder / "go").touch()
        second = server.pid("tocks in application")
        assert second != first
        assert server.pids("ends") == {first}
        server.stopped(second)
    assert unfinished(connection) == 0


@pytest.mark.parametrize(
    "command", ["flask routes", "flask shell", "flask tasklock status", "flask tasklock doctor"]
)
def test_other_commands_start_no_scheduler(
    command: str,
    folder: Path,
    environment: dict[str, str],
    connection: psycopg.Connection[Any],
) -> None:
    module = folder / "application.py"
    module.write_text(f"{module.read_text()}\nscheduler.start()\n")  # as some are used to
    said = run(command, folder, environment)
    assert "imports" in said
    assert "Scheduler started" not in said
    assert connection.execute("SELECT FROM task_lock_replica").rowcount == 0


def test_the_first_request_starts_the_scheduler_under_a_server_that_is_not_recognised(
    serve: Serve, folder: Path, connection: psycopg.Connection[Any]
) -> None:
    (folder / "go").touch()
    script = WAITRESS.replace("scheduler.start()\n", "")
    (folder / "serve.py").write_text(script)
    with serve("python serve.py") as server:
        eventually(lambda: answer(server))
        runs_each_window_once(connection, "tick")
        said = server.stopped()
    assert said.count("Scheduler started") == 1, said
    assert unfinished(connection) == 0


def ends_though_terminated(serve: Serve, folder: Path) -> None:
    """Terminate a server in a job that goes on until ``go`` is there, and wait for its end."""
    with serve("flask run") as server:
        worker = server.pid("begins")
        os.kill(worker, signal.SIGTERM)
        eventually(lambda: "Paused scheduler" in server.said)
        (folder / "go").touch()
        server.process.wait(60)
        assert server.pids("ends") == {worker}


def test_a_job_may_call_the_scheduler_at_the_end_of_the_process(
    serve: Serve, folder: Path, connection: psycopg.Connection[Any]
) -> None:
    module = folder / "application.py"
    call = 'scheduler.apscheduler.add_job(print, "interval", hours=1)'
    module.write_text(module.read_text().replace('say("ends")', f'{call}\n    say("ends")'))
    ends_though_terminated(serve, folder)
    assert unfinished(connection) == 0


def test_a_job_ends_that_began_before_the_schedulers_start_returned(
    serve: Serve, folder: Path, connection: psycopg.Connection[Any]
) -> None:
    """As on a busy machine, where the thread that has started the scheduler gets no turn."""
    module = folder / "application.py"
    returns_late = """
from apscheduler.schedulers.background import BackgroundScheduler


class LateScheduler(BackgroundScheduler):
    def start(self, *arguments, **options):
        super().start(*arguments, **options)
        while not Path("go").exists():
            time.sleep(0.01)


from apscheduler_tasklock.flask import extension
extension.BackgroundScheduler = LateScheduler
"""
    text = module.read_text().replace('\nsay("imports")', f'{returns_late}\nsay("imports")')
    module.write_text(text)
    ends_though_terminated(serve, folder)
    assert unfinished(connection) == 0


def test_a_worker_that_gevent_patches_too_late_says_so_and_serves(
    serve: Serve, connection: psycopg.Connection[Any]
) -> None:
    with serve(f"{GUNICORN} -k gevent --preload --workers 1") as server:
        eventually(lambda: "gevent.monkey.patch_all() at the top of" in server.said)
        eventually(lambda: answer(server))
        said = server.stopped()
    assert "Traceback" not in said, said
    assert "Scheduler started" not in said, said
    assert connection.execute("SELECT FROM task_lock_replica").rowcount == 0


def test_a_fork_by_a_job_starts_no_scheduler(
    serve: Serve, folder: Path, connection: psycopg.Connection[Any]
) -> None:
    (folder / "go").touch()
    module = folder / "application.py"
    forks = """
@scheduler.task("date", misfire_grace_time=None)
def forks():
    pid = os.fork()
    if not pid:
        time.sleep(1)  # for which a scheduler of its own would have time to start
        os._exit(0)
    os.waitpid(pid, 0)
    say("has forked")
"""
    module.write_text(module.read_text().replace("\nif __name__", f"{forks}\nif __name__"))
    with serve(f"{GUNICORN} --preload --workers 1") as server:
        server.pid("has forked")
        said = server.stopped()
    assert said.count("Scheduler started") == 1, said
    assert "does not start" not in said, said
    assert unfinished(connection) == 0
