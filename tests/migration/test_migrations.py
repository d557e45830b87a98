"""The task lock table's own migrations, by every way in."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from psycopg import sql
from sqlalchemy import create_engine, create_mock_engine, text

from apscheduler_tasklock import TaskLockError, TaskLocks, downgrade, include_name, migrate, upgrade
from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock.cli import main
from apscheduler_tasklock.schema.table import (
    JOB_STORAGE_PARAMETERS,
    RUN_STORAGE_PARAMETERS,
    STORAGE_PARAMETERS,
    task_lock_table,
)
from tests.migration.conftest import CLI, Run, described, tables
from tests.support.polling import eventually

BESIDE = {"public.task_lock_run", "public.task_lock_replica", "public.task_lock_job"}
OURS = {"public.task_lock", "public.task_lock_alembic_version", *BESIDE}


def engine_url(database_url: str) -> str:
    return database_url.replace("postgresql://", "postgresql+psycopg://")


def test_the_migrated_table_is_the_declared_one(database_url: str) -> None:
    engine = create_engine(engine_url(database_url))
    with engine.connect() as connection:
        options = {
            "compare_type": True,
            "compare_server_default": True,
            "include_name": lambda name, *_: name != "task_lock_alembic_version",
        }
        context = MigrationContext.configure(connection, opts=options)
        difference = compare_metadata(context, task_lock_table().metadata)
    engine.dispose()
    # Which has an id, made anew for each database.
    assert [(change[0], change[1].name) for change in difference] == [
        ("remove_table_comment", "task_lock_job")
    ]
    parameters = {
        "task_lock": STORAGE_PARAMETERS,
        "task_lock_run": RUN_STORAGE_PARAMETERS,
        "task_lock_job": JOB_STORAGE_PARAMETERS,
    }
    for table, declared in parameters.items():
        reloptions = {row[2] for row in described(database_url) if row[1] == table}
        expected = ",".join(f"{name}={value}" for name, value in declared.items())
        assert reloptions == {f"{{{expected}}}"}


def test_the_jobs_are_found_by_indexes_of_those_that_are_due_or_ended(
    connection: psycopg.Connection[Any],
) -> None:
    """Alembic's comparison does not look at what an index is limited to."""
    found = connection.execute(
        "SELECT indexname::text, split_part(indexdef, 'USING ', 2) FROM pg_indexes"
        " WHERE tablename = 'task_lock_job' AND indexname NOT LIKE '%_pkey'"
    )
    assert dict(found.fetchall()) == {
        "task_lock_job_due": "btree (executor, next_run_time, id)"
        " WHERE (next_run_time IS NOT NULL)",
        "task_lock_job_ended": "btree (id) WHERE ended",
    }


@pytest.mark.nightly
def test_alembic_in_a_checkout_upgrades_and_downgrades(empty_database_url: str, run: Run) -> None:
    run("alembic", "upgrade", "head", TASKLOCK_DATABASE_URL=empty_database_url)
    assert tables(empty_database_url) == OURS
    run("alembic", "-x", f"database={empty_database_url}", "downgrade", "base")
    assert tables(empty_database_url) == {"public.task_lock_alembic_version"}
    run("alembic", "-x", f"database={empty_database_url}", "upgrade", "head")
    assert tables(empty_database_url) == OURS


@pytest.mark.nightly
def test_every_way_in_leads_to_the_same_tables(
    empty_database_url: str, database_url: str, run: Run
) -> None:
    """The fixture's table came by upgrade(); compare the command and the printed SQL with it."""
    expected = described(database_url)
    run(CLI, "upgrade", "--database", empty_database_url)
    assert described(empty_database_url) == expected
    run(CLI, "downgrade", TASKLOCK_DATABASE_URL=empty_database_url)
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("DROP TABLE task_lock_alembic_version")

    printed = run(CLI, "upgrade", "--sql")
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute(printed)
    assert described(empty_database_url) == expected
    assert printed == run("alembic", "upgrade", "head", "--sql")


@pytest.mark.parametrize("name", ["jobs", 'My "schema"', "100%", "a:b"])
def test_another_schema_and_name_are_created_and_dropped(
    empty_database_url: str, name: str
) -> None:
    upgrade(empty_database_url, schema=name, table=f"{name}_lock")
    suffixes = ("", "_alembic_version", "_run", "_replica", "_job")
    assert tables(empty_database_url) == {f"{name}.{name}_lock{suffix}" for suffix in suffixes}
    upgrade(empty_database_url, schema=name, table=f"{name}_lock")  # nothing to do
    downgrade(empty_database_url, schema=name, table=f"{name}_lock")
    assert tables(empty_database_url) == {f"{name}.{name}_lock_alembic_version"}


def test_an_existing_schema_needs_no_right_to_create_one(
    empty_database_url: str,
) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE migrator LOGIN PASSWORD 'migrates'")
        connection.execute("CREATE SCHEMA jobs AUTHORIZATION migrator")
        migrator = parse_url(empty_database_url).set(username="migrator", password="migrates")
        try:
            upgrade(migrator, schema="jobs")
            assert "jobs.task_lock" in tables(empty_database_url)
        finally:
            connection.execute("DROP OWNED BY migrator; DROP ROLE migrator")


@pytest.mark.nightly
def test_replicas_that_upgrade_at_the_same_moment_all_succeed(
    empty_database_url: str, checkout: Path
) -> None:
    replicas = [
        subprocess.Popen(
            [sys.executable, "-m", CLI, "upgrade", "--database", empty_database_url],
            cwd=checkout,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(5)
    ]
    ended = [(*replica.communicate(timeout=120), replica.returncode) for replica in replicas]
    assert [status for *_, status in ended] == [0] * 5, ended
    assert tables(empty_database_url) == OURS


def test_a_migration_waits_for_another_that_is_under_way(empty_database_url: str) -> None:
    engine = create_engine(engine_url(empty_database_url))
    with engine.connect() as first, ThreadPoolExecutor(1) as pool:
        migrate(first)  # not committed yet
        second = pool.submit(upgrade, empty_database_url)
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        eventually(lambda: first.scalar(text(waiting)) == 1)
        first.commit()
        second.result(60)
    engine.dispose()
    assert tables(empty_database_url) == OURS


def test_a_migration_leaves_the_callers_lock_timeout_as_it_was(empty_database_url: str) -> None:
    engine = create_engine(engine_url(empty_database_url))
    with engine.connect() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '2s'"))
        migrate(connection)
        assert connection.scalar(text("SHOW lock_timeout")) == "2s"
    engine.dispose()


@pytest.mark.parametrize(
    "name",
    [
        "$tasklock$; --",
        'it\'s "100%", a:b {a} %(task_name)s',
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in (
                "100%",
                "a:b",
                'My "locks"',
                "it's; --",
                "back\\slash",
                "lateral",
                "{a}",
                "two  spaces",
                "%(task_name)s",
                "é" * 21,
                "x" * 43,
            )
        ),
    ],
)
def test_the_printed_sql_serves_any_name(
    empty_database_url: str, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["upgrade", "--sql", "--schema", name, "--table", name]) == 0
    printed = capsys.readouterr().out
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute(printed)
    assert f"{name}.{name}" in tables(empty_database_url)
    upgrade(empty_database_url, schema=name, table=name)
    with closing(TaskLocks(empty_database_url, schema=name, table=name)) as locks:
        with locks.hold("job", min_lock=0, max_lock=60):
            [task] = locks.tasks()
        assert task.name == "job"
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        # Made anew beside the others, with their grants.
        connection.execute(
            sql.SQL("DROP TABLE {}.{}").format(*map(sql.Identifier, (name, f"{name}_run")))
        )
    upgrade(empty_database_url, schema=name, table=name)
    downgrade(empty_database_url, schema=name, table=name)
    assert f"{name}.{name}" not in tables(empty_database_url)


@pytest.mark.nightly
def test_the_wheel_brings_its_migrations(
    empty_database_url: str, checkout: Path, tmp_path: Path, run: Run
) -> None:
    build = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
    run(*build, str(tmp_path), str(checkout))
    [wheel] = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    [site] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    run("pip", "--quiet", "install", "--no-deps", "--target", str(site), str(wheel))
    command = str(tmp_path / "venv" / "bin" / "python")
    # The dependencies come from here; an editable install's .pth file is not read on this path.
    here = str(Path(psycopg.__file__).parent.parent)

    from_wheel = partial(run, cwd=tmp_path, python=command, PYTHONPATH=here)
    where = "import apscheduler_tasklock; print(apscheduler_tasklock.__file__)"
    package = subprocess.run(
        [command, "-c", where],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": here},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert Path(package.strip()).is_relative_to(site)
    assert (Path(package.strip()).parent / "migrations" / "env.py").is_file()
    from_wheel(CLI, "upgrade", "--database", empty_database_url)
    assert tables(empty_database_url) == OURS


class TestCommandLine:
    def fails(self, checkout: Path, *arguments: str, status: int = 1) -> str:
        finished = subprocess.run(
            [sys.executable, "-m", CLI, *arguments],
            cwd=checkout,
            env={k: v for k, v in os.environ.items() if k != "TASKLOCK_DATABASE_URL"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert finished.returncode == status
        assert "Traceback" not in finished.stderr
        return finished.stderr

    def test_asks_which_database(self, checkout: Path) -> None:
        assert "Pass --database postgresql://" in self.fails(checkout, "upgrade", status=2)

    def test_says_that_a_url_is_none(self, checkout: Path) -> None:
        url = "mysql://me:hunter2@host/db"
        said = self.fails(checkout, "upgrade", "--database", url, status=2)
        assert "mysql URL; the task lock needs PostgreSQL" in said
        assert "hunter2" not in said

    def test_says_that_nobody_answers(self, checkout: Path) -> None:
        said = self.fails(
            checkout, "upgrade", "--database", "postgresql://me:hunter2@127.0.0.1:1/d"
        )
        assert "Connection refused" in said
        assert "hunter2" not in said


class TestIncludeName:
    @pytest.mark.parametrize(
        "name",
        [
            "task_lock",
            "task_lock_alembic_version",
            "task_lock_run",
            "task_lock_replica",
            "task_lock_job",
        ],
    )
    def test_hides_our_tables(self, name: str) -> None:
        assert not include_name(name, "table", {"schema_name": None})

    def test_shows_everything_else(self) -> None:
        assert include_name("users", "table", {"schema_name": None})
        assert include_name(None, "schema", {})
        assert include_name("task_lock", "column", {"schema_name": None})
        assert include_name("task_lock", "table", {"schema_name": "another"})

    def test_takes_another_schema_and_name(self) -> None:
        jobs = partial(include_name, schema="jobs", table="locks")
        assert not jobs("locks_alembic_version", "table", {"schema_name": "jobs"})
        assert jobs("locks", "table", {"schema_name": None})


class TestMigrate:
    def test_takes_part_in_the_callers_transaction(self, empty_database_url: str) -> None:
        engine = create_engine(engine_url(empty_database_url))
        with engine.connect() as connection:
            migrate(connection, schema="jobs")
            connection.rollback()
            assert tables(empty_database_url) == set()
            migrate(connection)
            connection.commit()
            assert tables(empty_database_url) == OURS
            migrate(connection, revision="base")
            connection.commit()
        engine.dispose()
        assert tables(empty_database_url) == {"public.task_lock_alembic_version"}

    def test_an_older_revision_is_gone_back_to(self, empty_database_url: str) -> None:
        engine = create_engine(engine_url(empty_database_url))
        with engine.connect() as connection:
            for revision in ("head", "0001", "-1", "+1", "base", "0001"):
                migrate(connection, revision=revision)
                found = connection.scalar(text("SELECT to_regclass('task_lock') IS NOT NULL"))
                assert found is (revision not in ("-1", "base"))
        engine.dispose()

    @pytest.mark.parametrize(
        "bind", [None, create_mock_engine("postgresql://", lambda *_: None)], ids=["none", "mock"]
    )
    def test_without_a_connection_says_what_to_do(self, bind: Any) -> None:
        """What op.get_bind() returns in Alembic's offline mode is either of the two."""
        with pytest.raises(TaskLockError, match="needs a connection, except in Alembic's --sql"):
            migrate(bind)
