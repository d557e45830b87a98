"""The tables of released versions, which later versions bring up to date and leave usable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import psycopg
import pytest

from apscheduler_tasklock import TaskLocks, upgrade
from apscheduler_tasklock.schema.drift import BASE
from apscheduler_tasklock.schema.migrations import revision_sql
from tests.migration.conftest import described
from tests.released import FOLDER, RELEASES
from tests.support import rows

TABLES = ("task_lock", "task_lock_run", "task_lock_job", "task_lock_replica")
EACH_RELEASE = pytest.mark.parametrize("release", RELEASES)


def execute(database_url: str, statements: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(statements)


def schema_of(release: str) -> str:
    return (FOLDER / release / "schema.sql").read_text()


@dataclass(frozen=True)
class Column:
    kind: str
    is_required: bool
    has_default: bool


@dataclass(frozen=True)
class Columns:
    """What decides whether an older version can go on with the tables.

    A rule has its name alone: one that limits all columns changes with each column. A rule that
    became stricter, and a trigger, are not found.
    """

    columns: dict[str, Column]
    rules: set[str]
    indexes: dict[str, bool]

    @property
    def tables(self) -> set[str]:
        return {name.partition(".")[0] for name in self.columns}


_COLUMNS = """
    SELECT c.relname || '.' || attname, format_type(atttypid, atttypmod), attnotnull, atthasdef
    FROM pg_class c JOIN pg_attribute ON attrelid = c.oid AND attnum > 0 AND NOT attisdropped
    WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
"""
_RULES = """
    SELECT conrelid::regclass || '.' || conname FROM pg_constraint
    WHERE connamespace = 'public'::regnamespace AND contype NOT IN ('n', 'p', 'u')
"""
_INDEXES = """
    SELECT indrelid::regclass || '.' || indexrelid::regclass, indisunique FROM pg_index
    JOIN pg_class ON pg_class.oid = indexrelid WHERE relnamespace = 'public'::regnamespace
"""


def columns_of(database_url: str) -> Columns:
    with psycopg.connect(database_url) as connection:
        columns = {name: Column(*rest) for name, *rest in connection.execute(_COLUMNS)}
        rules = {name for (name,) in connection.execute(_RULES)}
        return Columns(columns, rules, dict(connection.execute(_INDEXES).fetchall()))


def breaks(before: Columns, after: Columns) -> Iterator[str]:
    """Return what of a migration the replicas of the version before cannot bear.

    They write their own values into the columns that they know, and leave the others out.
    """
    for name, old in before.columns.items():
        yield from changes(name, old, after.columns.get(name))
    for name in after.columns.keys() - before.columns.keys():
        new = after.columns[name]
        if name.partition(".")[0] in before.tables and new.is_required and not new.has_default:
            yield f"{name} may not be null, and has no default"
    keys = {name for name, is_unique in after.indexes.items() if is_unique}
    for rule in (after.rules - before.rules) | (keys - before.indexes.keys()):
        if rule.partition(".")[0] in before.tables:
            yield f"{rule} is a new rule"
    yield from (f"{name} is gone" for name in before.indexes.keys() - after.indexes.keys())


def changes(name: str, old: Column, new: Column | None) -> Iterator[str]:
    if new is None:
        yield f"{name} is gone"
    elif new.kind != old.kind:
        yield f"{name} is {new.kind}, and was {old.kind}"
    elif new.is_required and not old.is_required:
        yield f"{name} may not be null any more"
    elif old.has_default and not new.has_default:
        yield f"{name} has no default any more"


@EACH_RELEASE
def test_a_released_revision_is_not_edited(release: str, empty_database_url: str) -> None:
    execute(empty_database_url, schema_of(release))
    released = described(empty_database_url)
    with psycopg.connect(empty_database_url) as connection:
        [noted] = connection.execute("SELECT version_num FROM task_lock_alembic_version").fetchone()
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    execute(empty_database_url, revision_sql(BASE, noted))
    assert described(empty_database_url) == released, "add a revision; see CONTRIBUTING.md"


@EACH_RELEASE
def test_an_upgrade_keeps_the_rows_of_a_release(
    release: str, empty_database_url: str, database_url: str
) -> None:
    execute(empty_database_url, schema_of(release))
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        rows.add_task(connection, "old")
        rows.add_run(connection, "old", 7)
        rows.add_job(connection, "old")
        rows.add_replica(connection, "old")
        before = [connection.execute(f"TABLE {table}").fetchall() for table in TABLES]
        assert all(before)
        upgrade(empty_database_url)
        # New columns come after the old ones.
        kept = [
            [row[: len(before[place][0])] for row in connection.execute(f"TABLE {table}")]
            for place, table in enumerate(TABLES)
        ]
    assert kept == before
    assert described(empty_database_url) == described(database_url)
    with closing(TaskLocks(empty_database_url)) as locks:
        locks.check()
        assert [task.name for task in locks.tasks()] == ["old"]


@EACH_RELEASE
def test_replicas_of_a_release_can_use_the_newest_tables(
    release: str, empty_database_url: str, database_url: str
) -> None:
    execute(empty_database_url, schema_of(release))
    assert list(breaks(columns_of(empty_database_url), columns_of(database_url))) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("ALTER TABLE task_lock ADD added text", None),
        ("ALTER TABLE task_lock ADD added text NOT NULL DEFAULT ''", None),
        ("CREATE TABLE task_lock_added (name text NOT NULL CHECK (name <> ''))", None),
        ("CREATE INDEX added ON task_lock_run (replica)", None),
        ("ALTER TABLE task_lock DROP CONSTRAINT task_lock_texts", None),
        (
            "ALTER TABLE task_lock ALTER kind TYPE varchar",
            "task_lock.kind is character varying, and was text",
        ),
        ("ALTER TABLE task_lock RENAME kind TO sort", "task_lock.kind is gone"),
        ("ALTER TABLE task_lock_run DROP kind", "task_lock_run.kind is gone"),
        (
            "ALTER TABLE task_lock_run ALTER token SET NOT NULL",
            "task_lock_run.token may not be null any more",
        ),
        (
            "ALTER TABLE task_lock ADD added text NOT NULL",
            "task_lock.added may not be null, and has no default",
        ),
        (
            "ALTER TABLE task_lock ALTER failures DROP DEFAULT",
            "task_lock.failures has no default any more",
        ),
        (
            "ALTER TABLE task_lock_replica DROP CONSTRAINT task_lock_replica_pkey",
            "task_lock_replica.task_lock_replica_pkey is gone",
        ),
        ("DROP INDEX task_lock_job_due", "task_lock_job.task_lock_job_due is gone"),
        (
            "CREATE UNIQUE INDEX named ON task_lock_job (func)",
            "task_lock_job.named is a new rule",
        ),
        (
            "ALTER TABLE task_lock_job ADD CONSTRAINT named CHECK (id <> '')",
            "task_lock_job.named is a new rule",
        ),
    ],
)
def test_a_change_that_older_replicas_cannot_bear_is_found(
    database_url: str, change: str, found: str | None
) -> None:
    before = columns_of(database_url)
    execute(database_url, change)
    told = list(breaks(before, columns_of(database_url)))
    assert told == ([] if found is None else [found])
