"""Migrations of tables that are in use: no claim waits for long behind one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import StringIO
from typing import Any

import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from apscheduler_tasklock import downgrade
from apscheduler_tasklock.schema.locking import execute_when_unlocked, grant_like
from tests.migration.conftest import Run, described, tables
from tests.support.polling import eventually

CLAIM = "UPDATE task_lock SET token = token + 1"
WAITING = "SELECT FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND NOT granted"
ALTER = "ALTER TABLE task_lock ADD COLUMN added text"


@contextmanager
def reader(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """Read the table in a transaction that stays open, which no ALTER or DROP TABLE passes."""
    with psycopg.connect(database_url) as connection:
        connection.execute("SELECT FROM task_lock")
        yield connection


def run_printed(database_url: str, printed: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(printed)


def alter(_run: Run, database_url: str) -> None:
    """Do what a later migration does that adds a column."""
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        execute_when_unlocked(Operations(MigrationContext.configure(connection)), ALTER)
    engine.dispose()


def alter_by_printed_sql(_run: Run, database_url: str) -> None:
    printed = StringIO()
    context = MigrationContext.configure(
        dialect_name="postgresql", opts={"as_sql": True, "output_buffer": printed}
    )
    execute_when_unlocked(Operations(context), ALTER)
    run_printed(database_url, printed.getvalue())


def drop(run: Run, database_url: str) -> None:
    run("apscheduler_tasklock.cli", "downgrade", "--database", database_url)


def drop_by_printed_sql(run: Run, database_url: str) -> None:
    run_printed(database_url, run("alembic", "downgrade", "0001:base", "--sql"))


@pytest.mark.parametrize("way", [alter, alter_by_printed_sql, drop, drop_by_printed_sql])
def test_a_migration_behind_an_open_transaction_lets_claims_pass(
    database_url: str, run: Run, way: Callable[[Run, str], None]
) -> None:
    before = described(database_url)
    with (
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(database_url, autocommit=True) as connection,
    ):
        with reader(database_url):
            migrating = pool.submit(way, run, database_url)
            eventually(lambda: connection.execute(WAITING).rowcount == 1)
            # It waits behind the migration, which waits behind the reader, until that gives way.
            connection.execute("SET statement_timeout = '20s'")
            connection.execute(CLAIM)
            assert not migrating.done()
        migrating.result(120)
    assert described(database_url) != before


@pytest.mark.nightly  # since it takes as long as the migration tries
def test_a_migration_that_nobody_lets_pass_says_so_and_changes_nothing(database_url: str) -> None:
    before = described(database_url)
    with reader(database_url), pytest.raises(OperationalError, match=r"keeps the table .* locked"):
        downgrade(database_url)
    assert described(database_url) == before


def test_who_may_use_the_lock_may_use_a_table_that_is_added_beside_it(database_url: str) -> None:
    url = database_url.replace("postgresql://", "postgresql+psycopg://")
    engine = create_engine(url, poolclass=NullPool)
    with psycopg.connect(database_url, autocommit=True) as connection, engine.connect() as other:
        connection.execute('CREATE ROLE "The app"')
        try:
            connection.execute('GRANT SELECT, INSERT, UPDATE ON task_lock TO "The app"')
            connection.execute("CREATE TABLE added (); CREATE TABLE deleted_from ()")
            op = Operations(MigrationContext.configure(other))
            grant_like(op, "task_lock", "added", None)
            grant_like(op, "task_lock", "deleted_from", None, deletes=True)
            other.commit()
            privilege = "SELECT has_table_privilege('The app', %s, %s)"
            for table, deletes in {"added": False, "deleted_from": True}.items():
                rights = {"SELECT": True, "INSERT": True, "UPDATE": True, "DELETE": deletes}
                for right, has in rights.items():
                    assert connection.execute(privilege, [table, right]).fetchone() == (has,)
        finally:
            connection.execute('DROP OWNED BY "The app"; DROP ROLE "The app"')


def test_who_may_update_by_default_may_delete_jobs(empty_database_url: str, run: Run) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE app_by_default")
        try:
            connection.execute(
                "ALTER DEFAULT PRIVILEGES GRANT SELECT, INSERT, UPDATE ON TABLES TO app_by_default"
            )
            run("apscheduler_tasklock.cli", "upgrade", "--database", empty_database_url)
            assert "public.task_lock_job" in tables(empty_database_url)
            privilege = "SELECT has_table_privilege('app_by_default', %s, 'DELETE')"
            for table, deletes in {"task_lock_job": True, "task_lock": False}.items():
                assert connection.execute(privilege, [table]).fetchone() == (deletes,)
        finally:
            connection.execute("DROP OWNED BY app_by_default; DROP ROLE app_by_default")
