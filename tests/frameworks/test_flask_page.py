"""docs/how-to/flask.md: each file that it shows is served by the commands beside it."""

from __future__ import annotations

import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock.cli import main
from tests.frameworks.servers import (
    Server,
    commands,
    files,
    replicas,
    run,
    runs_each_window_once,
    served,
    unfinished,
    write,
)
from tests.support.polling import eventually

pytestmark = pytest.mark.nightly

APP = "gunicorn app:app --workers 4"

# The command that serves, its schedulers, and the task that it runs; and further commands that
# are run meanwhile.
SERVED = {
    APP: (4, "sync_prices"),
    'gunicorn "project:create_app()" --workers 4': (4, "clean-up"),
    "gunicorn app:app --workers 4 --graceful-timeout 60": (4, "sync_prices"),
    "gunicorn app:app --workers 4 --preload": (4, "sync_prices"),
    "gunicorn app:app --config gunicorn.conf.py": (1, "sync_prices"),
    "python serve.py": (1, "sync_prices"),
    "flask --app app run --debug": (1, "sync_prices"),
    "gunicorn with_flask_apscheduler:app --workers 2": (2, "sync_prices"),
}
REMINDERS = "gunicorn reminders:app --workers 2"
RUN = [
    "flask tasklock upgrade",
    "flask tasklock status",
    "flask tasklock runs --outcome error",
    "flask tasklock pause sync_prices --for 2h",
    "flask tasklock resume sync_prices",
]
INSTALL = 'pip install ".[binary,flask]" gunicorn'
DATABASE = "export TASKLOCK_DATABASE_URL=postgresql://app:secret@localhost/app"
TEST = "pytest test_app.py"


@pytest.fixture
def page(checkout: Path) -> Path:
    return checkout / "docs" / "how-to" / "flask.md"


@pytest.fixture
def folder(page: Path, tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    folder = tmp_path / "folder"
    write(files(page), folder)
    return folder


def test_each_command_of_the_page_is_tested(page: Path) -> None:
    tested = [*SERVED, REMINDERS, *RUN, INSTALL, DATABASE, TEST]
    assert sorted(commands(page)) == sorted(tested)


def test_each_file_of_the_page_is_used(page: Path) -> None:
    assert set(files(page)) == {
        "app.py",
        "project/__init__.py",
        "project/jobs.py",
        "gunicorn.conf.py",
        "serve.py",
        "reminders.py",
        "test_app.py",
        "with_flask_apscheduler.py",
    }


@pytest.mark.parametrize("command", SERVED)
def test_a_server_of_the_page_runs_each_window_once(
    command: str,
    folder: Path,
    database_url: str,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
) -> None:
    schedulers, task = SERVED[command]
    if "--config" not in command:
        (folder / "gunicorn.conf.py").unlink()  # which gunicorn would find by itself
    with served(command, folder, {"TASKLOCK_DATABASE_URL": database_url}, tmp_path / "log") as (
        server
    ):
        eventually(lambda: replicas(connection) == schedulers)
        runs_each_window_once(connection, task)
        if command != "flask --app app run --debug":  # whose watching process kills the other one
            said = server.stopped()
            assert "Traceback" not in said, said
            assert unfinished(connection) == 0


def test_the_commands_of_the_page_use_the_database_of_the_application(
    folder: Path, empty_database_url: str, tmp_path: Path
) -> None:
    environment = {"TASKLOCK_DATABASE_URL": empty_database_url}
    upgrade, *others = RUN
    (folder / "gunicorn.conf.py").unlink()
    assert "is migrated" in run(upgrade, folder, environment)
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        with served(APP, folder, environment, tmp_path / "log"):
            runs_each_window_once(connection, "sync_prices")
            for command in others:
                run(command, folder, environment)
        assert main(["show", "sync_prices", "--database", empty_database_url]) == 0


def test_a_reminder_of_the_page_is_run_once(
    folder: Path, database_url: str, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    (folder / "gunicorn.conf.py").unlink()

    def added(server: Server, text: str) -> bool:
        with suppress(OSError):  # while it starts
            url = f"http://127.0.0.1:{server.port}/reminders/{text}"
            request = urllib.request.Request(url, method="POST")
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310  # HTTP
                return bool(answer.read())
        return False

    def runs() -> int:
        found = connection.execute("SELECT FROM task_lock_run WHERE outcome = 'ok'")
        return found.rowcount

    environment = {"TASKLOCK_DATABASE_URL": database_url}
    with served(REMINDERS, folder, environment, tmp_path / "log") as server:
        eventually(lambda: replicas(connection) == 2)
        for text in ("tea", "coffee"):
            eventually(lambda text=text: added(server, text))  # type: ignore[misc]  # its type is not inferred
        eventually(lambda: runs() == 2)
        said = server.stopped()
    assert "Traceback" not in said, said
    assert runs() == 2


def test_the_tests_of_the_page_pass(folder: Path, database_url: str) -> None:
    said = run(TEST, folder, {"TASKLOCK_DATABASE_URL": database_url})
    assert "3 passed" in said
