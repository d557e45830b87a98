"""What the next release does to the tables of this one, with a revision that it might have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.migration.conftest import described

# Copies of the sources, and the command in many processes.
pytestmark = pytest.mark.nightly

COLUMN = 'Column("retry_of", Uuid, nullable=True),\n'
REVISION = """
from apscheduler_tasklock.schema.locking import execute_when_unlocked, qualified

revision, down_revision, branch_labels, depends_on = "{next}", "{head}", None, None


def upgrade(op, table, schema):
    execute_when_unlocked(op, f"ALTER TABLE {{qualified(table, schema)}} ADD COLUMN added bigint")


def downgrade(op, table, schema):
    execute_when_unlocked(op, f"ALTER TABLE {{qualified(table, schema)}} DROP COLUMN added")
"""

Ended = subprocess.CompletedProcess[str]


class Release:
    """The command line of a checkout."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self._folder, self._url = folder, database_url

    def __call__(self, *arguments: str) -> Ended:
        return subprocess.run(
            [sys.executable, "-m", "apscheduler_tasklock", *arguments],
            cwd=self._folder,
            env={**os.environ, "TASKLOCK_DATABASE_URL": self._url, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def does(self, *arguments: str) -> str:
        ended = self(*arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout


@pytest.fixture
def this(checkout: Path, empty_database_url: str) -> Release:
    return Release(checkout, empty_database_url)


@pytest.fixture
def next_one(checkout: Path, tmp_path: Path, empty_database_url: str) -> Release:
    """This version with one revision more, which adds a column."""
    for name in ("apscheduler_tasklock", "alembic"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(checkout / name, tmp_path / name, ignore=ignored)
    head = max(path.name[:4] for path in (tmp_path / "alembic" / "versions").glob("[0-9]*.py"))
    added = {"head": head, "next": f"{int(head) + 1:04}"}
    (tmp_path / "alembic" / "versions" / f"{added['next']}_added.py").write_text(
        REVISION.format(**added)
    )
    declared = tmp_path / "apscheduler_tasklock" / "schema" / "table.py"
    text = declared.read_text()
    assert text.count(COLUMN) == 1
    column = 'Column("added", BigInteger, nullable=True),\n'
    declared.write_text(text.replace(COLUMN, f"{COLUMN}        {column}"))
    return Release(tmp_path, empty_database_url)


def test_its_upgrade_keeps_the_rows_and_this_version_goes_on(
    this: Release, next_one: Release, empty_database_url: str
) -> None:
    this.does("upgrade")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute(
            """INSERT INTO task_lock (task_name, started_at, locked_until, window_start,
                window_until, locked_by, claim_id, token, run_until, failover, deaths, handovers,
                handed_over, runs, one_off)
            VALUES ('kept', now(), now(), now(), now(), 'replica', gen_random_uuid(), 1, now(),
                false, 0, 0, false, 'app:f', false)"""
        )

    found = next_one("doctor")
    assert found.returncode != 0
    assert "has no column added" in found.stdout
    assert "bring them up to date with: apscheduler-tasklock upgrade" in found.stdout

    assert "task_lock is migrated" in next_one.does("upgrade")
    for version in (next_one, this):
        assert "kept" in version.does("status")
    assert "newer version of this library" in this.does("upgrade")


def test_a_table_that_is_missing_before_its_upgrade_is_made_anew(
    this: Release, next_one: Release, empty_database_url: str
) -> None:
    next_one.does("upgrade")
    made = described(empty_database_url)
    next_one.does("downgrade", "--yes")
    this.does("upgrade")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("DROP TABLE task_lock_run")
    assert "task_lock_run: missing beside the other tables" in next_one.does("upgrade")
    assert described(empty_database_url) == made


@pytest.mark.parametrize("damage", ["DROP TABLE task_lock", "ALTER TABLE task_lock ADD added text"])
def test_tables_that_its_revision_cannot_change_are_one_error_with_what_to_do(
    this: Release, next_one: Release, empty_database_url: str, damage: str
) -> None:
    this.does("upgrade")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute(damage)
    ended = next_one("upgrade")
    assert ended.returncode == 1
    assert "are not as revision" in ended.stderr
    assert "from one dump" in ended.stderr


def test_this_version_notes_no_revision_beside_its_tables(
    this: Release, next_one: Release, empty_database_url: str
) -> None:
    next_one.does("upgrade")
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        [noted] = connection.execute("DELETE FROM task_lock_alembic_version RETURNING *").fetchall()
        said = this.does("upgrade")
        assert "the column added of task_lock is a newer version's: left as it is" in said
        next_one.does("upgrade")
        assert connection.execute("TABLE task_lock_alembic_version").fetchall() == [noted]


def test_it_goes_back_to_nothing_where_a_table_is_missing(
    next_one: Release, empty_database_url: str
) -> None:
    next_one.does("upgrade")
    made = described(empty_database_url)
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("DROP TABLE task_lock")
    next_one.does("downgrade", "--yes")
    assert remaining(empty_database_url) == {"task_lock_alembic_version"}
    next_one.does("upgrade")
    assert described(empty_database_url) == made


def remaining(database_url: str) -> set[Any]:
    return {name for _, name, *_ in described(database_url)}
