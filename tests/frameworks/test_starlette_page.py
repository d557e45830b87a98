"""docs/how-to/fastapi.md: each file that it shows is served by the commands beside it."""

from __future__ import annotations

import json
import re
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

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

# The command that serves, and its schedulers.
SERVED = {
    "uvicorn app:app --workers 3": 3,
    "uvicorn background:app --workers 2": 2,
    "uvicorn app:app --reload": 1,
    "gunicorn app:app -k uvicorn_worker.UvicornWorker --workers 3 --graceful-timeout 60": 3,
    "gunicorn app:app -k uvicorn_worker.UvicornWorker --workers 3 --preload": 3,
    "hypercorn app:app --workers 2": 2,
}
OWN_LIFESPAN = "uvicorn own_lifespan:app --workers 2"
PROBES = "uvicorn probes:app"
LOGGED = ["uvicorn logged:app --workers 2", "uvicorn app:app --workers 2 --log-config logging.json"]
INSTALL = 'pip install ".[binary,fastapi]" uvicorn'
DATABASE = "export TASKLOCK_DATABASE_URL=postgresql://app:secret@localhost/app"
UPGRADE = "apscheduler-tasklock upgrade"
TEST = "pytest test_app.py"


@pytest.fixture
def page(checkout: Path) -> Path:
    return checkout / "docs" / "how-to" / "fastapi.md"


@pytest.fixture
def folder(page: Path, tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    folder = tmp_path / "folder"
    write(files(page), folder)
    return folder


def answer(server: Server, path: str) -> Any:
    with suppress(OSError):  # while it starts
        url = f"http://127.0.0.1:{server.port}{path}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)
    return None


def test_each_command_of_the_page_is_tested(page: Path) -> None:
    tested = [*SERVED, OWN_LIFESPAN, PROBES, *LOGGED, INSTALL, DATABASE, UPGRADE, TEST]
    assert sorted(commands(page)) == sorted(tested)


def test_each_file_of_the_page_is_used(page: Path) -> None:
    used = {"app", "background", "own_lifespan", "logged", "probes", "test_app"}
    assert set(files(page)) == {f"{module}.py" for module in used}


@pytest.mark.parametrize("command", SERVED)
def test_a_server_of_the_page_runs_each_window_once(
    command: str,
    folder: Path,
    database_url: str,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
) -> None:
    environment = {"TASKLOCK_DATABASE_URL": database_url}
    with served(command, folder, environment, tmp_path / "log") as server:
        eventually(lambda: replicas(connection) == SERVED[command])
        runs_each_window_once(connection, "sync-prices")
        said = server.stopped()
    assert "Traceback" not in said, said
    assert unfinished(connection) == 0


def test_a_lifespan_of_the_applications_own_goes_with_the_scheduler(
    folder: Path, database_url: str, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    environment = {"TASKLOCK_DATABASE_URL": database_url}
    with served(OWN_LIFESPAN, folder, environment, tmp_path / "log") as server:
        found = eventually(lambda: answer(server, "/jobs"))
        assert found == {"greeting": "hello", "jobs": ["sync-prices"]}
        runs_each_window_once(connection, "sync-prices")
        said = server.stopped()
    assert "Traceback" not in said, said
    assert unfinished(connection) == 0


def test_the_probe_of_the_page_answers(folder: Path, database_url: str, tmp_path: Path) -> None:
    environment = {"TASKLOCK_DATABASE_URL": database_url}
    with served(PROBES, folder, environment, tmp_path / "log") as server:
        found = eventually(lambda: answer(server, "/live"))
        assert found == {"live": True, "degraded": []}


@pytest.mark.parametrize(
    ("command", "schedulers"), [*((command, 2) for command in LOGGED), ("uvicorn app:app", 0)]
)
def test_lines_at_info_are_shown_with_the_configuration_of_the_page_only(
    command: str,
    schedulers: int,
    page: Path,
    folder: Path,
    database_url: str,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
) -> None:
    [configuration] = re.findall(r"^```json\n(.*?)^```", page.read_text(), re.DOTALL | re.M)
    (folder / "logging.json").write_text(configuration)
    environment = {"TASKLOCK_DATABASE_URL": database_url}
    with served(command, folder, environment, tmp_path / "log") as server:
        eventually(lambda: replicas(connection) == max(schedulers, 1))
        runs_each_window_once(connection, "sync-prices")
        answer(server, "/openapi.json")
        said = server.stopped()
    assert said.count("INFO apscheduler_tasklock.executor: Task locks are on for") == schedulers
    assert said.count("Application startup complete") == max(schedulers, 1)  # as uvicorn says
    assert said.count("GET /openapi.json") == 1
    assert "Traceback" not in said, said


def test_the_table_is_created_and_the_tests_of_the_page_pass(
    folder: Path, empty_database_url: str
) -> None:
    environment = {"TASKLOCK_DATABASE_URL": empty_database_url}
    assert "is migrated" in run(UPGRADE, folder, environment)
    assert "3 passed" in run(TEST, folder, environment)
