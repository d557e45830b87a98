"""Functions of the module that a process is started with: one task, however it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest

APPLICATION = """
import multiprocessing
import os
import sys
import threading
from datetime import datetime, timezone

from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import EVENT_TASK_LOCK_REFUSED, TaskLockExecutor


def tick():
    print("ran the recurring one\\n", end="")


def remind():
    print("ran the one-off\\n", end="")


def main():
    told = threading.Semaphore(0)
    executor = TaskLockExecutor(os.environ["DATABASE_URL"])
    scheduler = BackgroundScheduler(executors={"default": executor}, timezone="UTC")
    scheduler.add_listener(
        lambda event: told.release(), EVENT_JOB_EXECUTED | EVENT_TASK_LOCK_REFUSED
    )
    any_time = {"misfire_grace_time": None}
    scheduler.add_job(tick, "cron", hour=3, next_run_time=datetime.now(timezone.utc), **any_time)
    scheduler.add_job(remind, "date", run_date="2026-01-01 09:00:00", **any_time)
    scheduler.start()
    for _ in range(2):
        assert told.acquire(timeout=60)
    scheduler.shutdown()


if __name__ == "__main__":
    if sys.argv[1:] == ["spawn"]:
        child = multiprocessing.get_context("spawn").Process(target=main)
        child.start()
        child.join()
    else:
        main()
"""

WAYS: dict[str, dict[str, tuple[str, list[str]]]] = {
    "app": {
        "script": (".", ["app.py"]),
        "module": (".", ["-m", "app"]),
        "imported": (".", ["-c", "import app; app.main()"]),
        "spawned": (".", ["app.py", "spawn"]),
    },
    "pk.sub.app": {
        "script": (".", ["pk/sub/app.py"]),
        "script-in-its-folder": ("pk/sub", ["app.py"]),
        "module": (".", ["-m", "pk.sub.app"]),
        "imported": (".", ["-c", "import pk.sub.app; pk.sub.app.main()"]),
        "spawned": (".", ["-m", "pk.sub.app", "spawn"]),
    },
    "pk": {
        "folder": (".", ["pk"]),
        "module": (".", ["-m", "pk"]),
        "script": ("pk", ["__main__.py"]),
    },
}


def ran(folder: Path, where: str, command: list[str], database_url: str) -> list[str]:
    """Run the application in a process, and return what it said."""
    environment = {**os.environ, "DATABASE_URL": database_url, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder / where,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()


@pytest.mark.nightly
@pytest.mark.parametrize("module", WAYS)
def test_a_function_of_main_is_one_task_however_the_process_was_started(
    tmp_path: Path, database_url: str, connection: psycopg.Connection[Any], module: str
) -> None:
    (tmp_path / "pk" / "sub").mkdir(parents=True)
    (tmp_path / "app.py").write_text(APPLICATION)
    for folder in ("pk", "pk/sub"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "pk" / "sub" / "app.py").write_text(APPLICATION)
    (tmp_path / "pk" / "__main__.py").write_text(APPLICATION)
    said = Counter(
        line
        for where, command in WAYS[module].values()
        for line in ran(tmp_path, where, command, database_url)
    )
    assert said == {"ran the recurring one": 1, "ran the one-off": 1}
    tasks = connection.execute("SELECT task_name, runs FROM task_lock").fetchall()
    assert {name.rpartition("-")[0] for name, _ in tasks} == {f"{module}:tick", f"{module}:remind"}
    assert {runs.partition(" at ")[0] for _, runs in tasks} == {
        f"{module}:tick",
        f"{module}:remind",
    }
