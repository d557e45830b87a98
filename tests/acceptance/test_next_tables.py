"""Replicas of this version on tables that a later minor version has brought up to date.

The policy in docs/how-to/upgrading.md says what such a migration may do. Here it does all of it
while replicas are at work. What a real earlier version does is in test_version_before.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine

from apscheduler_tasklock import TaskLocks
from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock.schema.locking import execute_when_unlocked
from tests.acceptance.conftest import ReplicaProcess
from tests.support.polling import eventually

pytestmark = pytest.mark.nightly

TABLES = ("task_lock", "task_lock_run", "task_lock_replica", "task_lock_job")
NEXT = [
    *(f"ALTER TABLE {table} ADD COLUMN next_null text" for table in TABLES),
    *(
        f"ALTER TABLE {table} ADD COLUMN next_flag boolean NOT NULL DEFAULT true"
        for table in TABLES
    ),
    "CREATE TABLE task_lock_next (task_name text PRIMARY KEY)",
    "CREATE INDEX task_lock_run_next ON task_lock_run (replica)",
    "ALTER TABLE task_lock DROP CONSTRAINT task_lock_texts",
    "UPDATE task_lock_alembic_version SET version_num = '9999'",
]


def migrate_to_next(database_url: str) -> None:
    """Do what the next version's ``upgrade`` does."""
    engine = create_engine(parse_url(database_url))
    with engine.begin() as connection:
        operations = Operations(MigrationContext.configure(connection))
        for statement in NEXT:
            execute_when_unlocked(operations, statement)
    engine.dispose()


def job(folder: Path) -> dict[str, Any]:
    """A job that runs until it is told to end, beside one that runs each second."""
    return {
        "function": "work",
        "kwargs": {"folder": str(folder)},
        "trigger": "cron",
        "second": "*/5",
        "options": {"failover": True, "lease": 3, "poll_interval": 0.5},
        "jobs": [
            {
                "id": "each second",
                "function": "sleep",
                "kwargs": {"takes": 0},
                "trigger": "cron",
                "second": "*",
            }
        ],
    }


@pytest.fixture
def replicas(database_url: str, checkout: Path, tmp_path: Path) -> Iterator[list[ReplicaProcess]]:
    with ExitStack() as ending:
        started = []
        for number in range(2):
            log = tmp_path / f"replica {number}.log"
            started.append(ReplicaProcess(log, database_url, checkout, job(tmp_path)))
            ending.callback(started[-1].end)
        yield started


def newest_token(locks: TaskLocks, task: str) -> int:
    return max((run.token or 0 for run in locks.runs(task)), default=0)


def token_of_takeover(locks: TaskLocks, task: str) -> int | None:
    [found] = locks.tasks(task)
    return found.token if found.kind == "takeover" else None


def test_replicas_at_work_go_on_and_take_over(
    replicas: list[ReplicaProcess], database_url: str, checkout: Path, tmp_path: Path
) -> None:
    with closing(TaskLocks(database_url)) as operator:
        [holder] = eventually(lambda: [each for each in replicas if "job" in each.pids])
        [heir] = [each for each in replicas if each is not holder]
        eventually(lambda: newest_token(operator, "each second"))
        migrate_to_next(database_url)

        # The run that began on the tables of before is renewed and, once its holder dies, taken
        # over; and the other job goes on.
        before = newest_token(operator, "each second")
        eventually(lambda: newest_token(operator, "each second") > before)
        holder.signal(signal.SIGKILL)
        eventually(lambda: "job" in heir.pids)
        token = eventually(lambda: token_of_takeover(operator, "job"))
        (tmp_path / str(token)).touch()
        heir.says(f"ends {token} held")
        ended = eventually(lambda: [run for run in operator.runs("job") if run.outcome == "ok"])
        assert [run.token for run in ended] == [token]

        # Operators can read and steer, and a further replica starts.
        assert {task.name for task in operator.tasks()} == {"job", "each second"}
        operator.pause("each second", by="alice")
        operator.resume("each second", by="alice")
        assert [each for each in operator.doctor() if each.level == "wrong"] == []
    log = tmp_path / "further replica.log"
    further = ReplicaProcess(log, database_url, checkout, job(tmp_path))
    try:
        eventually(lambda: "refused" in " ".join(further.said) or further.runs)
    finally:
        further.end()
    for replica in (*replicas, further):
        assert not [line for line in replica.said if line.startswith(("ERROR", "CRITICAL"))]


def test_the_command_leaves_them_as_they_are(database_url: str, checkout: Path) -> None:
    migrate_to_next(database_url)
    ended = subprocess.run(
        [sys.executable, "-m", "apscheduler_tasklock.cli", "upgrade"],
        cwd=checkout,
        env={**os.environ, "TASKLOCK_DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "newer version of this library (revision 9999" in ended.stdout
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT FROM task_lock_next").fetchall() == []
