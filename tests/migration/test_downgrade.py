"""Downgrades where there is nothing to take back create nothing, by every way in."""

from __future__ import annotations

import psycopg
import pytest
from sqlalchemy import create_engine

from apscheduler_tasklock import downgrade, migrate, upgrade
from tests.migration.conftest import CLI, Run, tables


def schemas(database_url: str) -> set[str]:
    with psycopg.connect(database_url) as connection:
        return {name for (name,) in connection.execute("SELECT nspname FROM pg_namespace")}


def x_arguments(database_url: str, schema: str | None) -> list[str]:
    """Return Alembic's own options for a database and a schema."""
    return ["-x", f"database={database_url}", *(["-x", f"schema={schema}"] if schema else [])]


@pytest.mark.nightly
@pytest.mark.parametrize("schema", [None, "nope"])
def test_where_nothing_was_upgraded_a_downgrade_says_so_and_creates_nothing(
    empty_database_url: str, run: Run, schema: str | None
) -> None:
    before = schemas(empty_database_url)
    options = ["--schema", schema] if schema else []
    said = run(CLI, "downgrade", "--database", empty_database_url, *options)
    name = f"{schema}.task_lock" if schema else "task_lock"
    assert said == f"nothing to downgrade: no migration of {name} is applied\n"
    assert not downgrade(empty_database_url, schema=schema)
    run("alembic", *x_arguments(empty_database_url, schema), "downgrade", "base")
    run("alembic", *x_arguments(empty_database_url, schema), "current")
    engine = create_engine(empty_database_url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        migrate(connection, schema=schema, revision="base")
    engine.dispose()
    assert tables(empty_database_url) == set()
    assert schemas(empty_database_url) == before


@pytest.mark.nightly
def test_a_second_upgrade_or_downgrade_has_nothing_left_to_do(
    empty_database_url: str, run: Run
) -> None:
    where = ("--database", empty_database_url, "--schema", "jobs")
    assert run(CLI, "upgrade", *where) == "jobs.task_lock is migrated\n"
    assert run(CLI, "upgrade", *where) == "nothing to migrate: jobs.task_lock is up to date\n"
    command = (CLI, "downgrade", *where)
    assert run(*command) == "jobs.task_lock is dropped\n"
    assert run(*command) == "nothing to downgrade: no migration of jobs.task_lock is applied\n"
    upgrade(empty_database_url, schema="jobs")
    assert "jobs.task_lock" in tables(empty_database_url)


@pytest.mark.nightly
def test_the_printed_sql_of_a_downgrade_creates_no_schema(run: Run) -> None:
    printed = run("alembic", "-x", "schema=jobs", "downgrade", "0001:base", "--sql")
    assert "DROP TABLE IF EXISTS jobs.task_lock_job" in printed
    assert "CREATE" not in printed
