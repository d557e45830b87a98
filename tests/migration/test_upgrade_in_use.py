"""Upgrades of a table that is in use: nothing of its rows is lost, and no claim waits for long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from apscheduler_tasklock import TaskLocks, downgrade, upgrade
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock.locks import lock_settings
from tests.migration.conftest import Run, described, tables
from tests.support.claims import held, row
from tests.support.polling import eventually

# As a replica of the version before inserts a row.
OLD_CLAIM = """
    INSERT INTO task_lock (task_name, started_at, locked_until, run_until, window_start,
        window_until, locked_by, claim_id, token, deaths, handovers, handed_over, failover, runs,
        one_off)
    VALUES (%s, now(), now() + interval '1 minute', now() + interval '5 minutes', now(),
            now() + interval '54 seconds', 'old', gen_random_uuid(), 7, 0, 0, false, false,
            'jobs:job', false)
"""
WAITING = "SELECT FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND NOT granted"


@pytest.fixture
def old_table(empty_database_url: str) -> str:
    """Make a table of the first revision, with a run that goes on; return the database's URL."""
    upgrade(empty_database_url, revision="0001")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute(OLD_CLAIM, ["running"])
    return empty_database_url


@contextmanager
def reader(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """Read the table in a transaction that stays open, which no ALTER TABLE passes."""
    with psycopg.connect(database_url) as connection:
        connection.execute("SELECT FROM task_lock")
        yield connection


def locks(database_url: str) -> LockClient:
    return LockClient(lock_settings(database_url, claim_timeout=30))


def by_command(run: Run, database_url: str) -> None:
    run("apscheduler_tasklock.cli", "upgrade", "--database", database_url)


def by_printed_sql(run: Run, database_url: str) -> None:
    printed = run("alembic", "upgrade", "0001:head", "--sql")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(printed)


WAYS = pytest.mark.parametrize("way", [by_command, by_printed_sql])


@WAYS
def test_rows_in_use_are_kept_and_both_versions_go_on(
    old_table: str, run: Run, way: Callable[[Run, str], None]
) -> None:
    way(run, old_table)
    with psycopg.connect(old_table, autocommit=True) as connection:
        assert row(connection, "running")["locked_by"] == "old"
        connection.execute(OLD_CLAIM, ["of the old version"])
        new = locks(old_table)
        with closing(new):
            new.check()
            held(new, "of the new version")
    assert "public.task_lock_run" in tables(old_table)


@WAYS
def test_an_upgrade_behind_an_open_transaction_lets_claims_pass(
    old_table: str, run: Run, way: Callable[[Run, str], None]
) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(old_table, autocommit=True) as connection,
    ):
        with reader(old_table):
            upgrading = pool.submit(way, run, old_table)
            eventually(lambda: connection.execute(WAITING).rowcount == 1)
            # It waits behind the upgrade, which waits behind the reader, until that gives way.
            connection.execute("SET statement_timeout = '20s'")
            connection.execute(OLD_CLAIM, ["meanwhile"])
            assert not upgrading.done()
        upgrading.result(120)
        assert row(connection, "meanwhile")["kind"] is None
    with closing(TaskLocks(old_table)) as new:
        new.check()


@pytest.mark.slow  # since it takes as long as the upgrade tries
def test_an_upgrade_that_nobody_lets_pass_says_so_and_changes_nothing(old_table: str) -> None:
    before = described(old_table)
    with reader(old_table), pytest.raises(OperationalError, match=r"keeps the table .* locked"):
        upgrade(old_table)
    assert described(old_table) == before


def test_a_downgrade_of_one_revision_keeps_the_locks(old_table: str) -> None:
    before = described(old_table)
    upgrade(old_table)
    downgrade(old_table, revision="0001")
    assert described(old_table) == before
    with psycopg.connect(old_table) as connection:
        assert row(connection, "running")["locked_by"] == "old"


def test_a_downgrade_to_the_second_revision_drops_the_jobs_alone(old_table: str) -> None:
    upgrade(old_table, revision="0002")
    before = described(old_table)
    upgrade(old_table)
    assert "public.task_lock_job" in tables(old_table)
    downgrade(old_table, revision="0002")
    assert described(old_table) == before


def test_who_may_use_the_lock_may_use_what_lies_beside_it(old_table: str) -> None:
    with psycopg.connect(old_table, autocommit=True) as connection:
        connection.execute('CREATE ROLE "The app"')
        try:
            connection.execute('GRANT SELECT, INSERT, UPDATE ON task_lock TO "The app"')
            upgrade(old_table)
            privilege = "SELECT has_table_privilege('The app', %s, %s)"
            for table in ("task_lock_run", "task_lock_replica"):
                for right, has in {"SELECT": True, "UPDATE": True, "DELETE": False}.items():
                    assert connection.execute(privilege, [table, right]).fetchone() == (has,)
            for right in ("SELECT", "INSERT", "UPDATE", "DELETE"):  # jobs can be removed
                assert connection.execute(privilege, ["task_lock_job", right]).fetchone() == (True,)
        finally:
            connection.execute('DROP OWNED BY "The app"; DROP ROLE "The app"')
