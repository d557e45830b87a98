"""The tables of a Django project: created, upgraded and dropped by `manage.py migrate`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import psycopg
import pytest

from apscheduler_tasklock import downgrade, upgrade
from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock.schema.migrations import UPGRADE_LOCK, revisions
from tests.frameworks.conftest import MakeProject
from tests.migration.conftest import described, tables
from tests.support.django_project import DjangoProject
from tests.support.polling import eventually
from tests.support.postgres import Server
from tests.support.roles import role

# Each starts several processes, which load Django.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

APP = "apscheduler_tasklock"


def ours(url: str) -> set[str]:
    return {name.removeprefix("public.") for name in tables(url) if "task_lock" in name}


# What is left without the tables: some versions of Alembic drop their own with the last revision.
LEFT = {"task_lock_alembic_version"}

ALL = {
    "task_lock",
    "task_lock_alembic_version",
    "task_lock_run",
    "task_lock_replica",
    "task_lock_job",
}


ALL_TABLES = "DROP TABLE task_lock, task_lock_run, task_lock_replica, task_lock_job"


def described_ours(url: str) -> list[tuple[object, ...]]:
    return [row for row in described(url) if "task_lock" in row[1]]


def revision(url: str) -> str | None:
    if "task_lock_alembic_version" not in ours(url):
        return None
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT version_num FROM task_lock_alembic_version").fetchone()
    return row and row[0]


def test_migrate_makes_the_same_tables_as_the_command(
    project: DjangoProject, empty_database_url: str, database_url: str
) -> None:
    assert "WARNINGS" not in project.manage("migrate")
    assert described_ours(empty_database_url) == described_ours(database_url)
    assert not upgrade(empty_database_url)  # nothing is left to do


def test_each_revision_of_the_library_has_a_migration(project: DjangoProject) -> None:
    found = project.ask(
        """
from django.db import connection
from django.db.migrations.loader import MigrationLoader
loader = MigrationLoader(connection)
steps = [
    (operation.before, operation.revision)
    for name in sorted(name for app, name in loader.disk_migrations if app == sys.argv[1][1:-1])
    for operation in loader.disk_migrations[sys.argv[1][1:-1], name].operations
    if hasattr(operation, "revision")
]
answer([steps, loader.graph.leaf_nodes(sys.argv[1][1:-1])])
""",
        APP,
    )
    steps, leaves = found
    known = revisions()
    assert steps == [list(step) for step in pairwise(known)]
    assert len(leaves) == 1


def test_each_migration_can_be_undone(project: DjangoProject, empty_database_url: str) -> None:
    project.manage("migrate")
    project.manage("migrate", APP, "zero")
    assert revision(empty_database_url) is None
    assert ours(empty_database_url) <= LEFT
    project.manage("migrate", APP)
    assert ours(empty_database_url) == ALL
    assert revision(empty_database_url) == revisions()[-1]


def test_the_command_and_migrate_can_both_be_used(
    project: DjangoProject, empty_database_url: str
) -> None:
    upgrade(empty_database_url)
    project.manage("migrate", APP)  # finds nothing to do
    assert ours(empty_database_url) == ALL
    downgrade(empty_database_url)
    project.manage("migrate", APP, "zero")  # finds nothing to do
    upgrade(empty_database_url)
    project.manage("migrate", APP)
    assert revision(empty_database_url) == revisions()[-1]


def test_tables_of_a_newer_version_are_left_alone(
    project: DjangoProject, empty_database_url: str
) -> None:
    project.manage("migrate")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("UPDATE task_lock_alembic_version SET version_num = '9999'")
    project.manage("migrate", "--fake", APP, "zero")
    for _ in range(2):  # also where Django has nothing to do
        finished = project.finished("manage.py", "migrate", APP)
        assert finished.returncode == 0
        assert "newer version" in finished.stderr
    said = project.refused("migrate", APP, "zero")
    assert "newer version of this library (revision 9999" in said
    assert said.startswith("CommandError: ")
    assert ours(empty_database_url) == ALL


@pytest.mark.parametrize("dropped", [ALL_TABLES, "DROP TABLE task_lock_run"])
def test_tables_that_were_dropped_are_made_anew(
    project: DjangoProject, empty_database_url: str, database_url: str, dropped: str
) -> None:
    project.manage("migrate")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute(dropped)
    finished = project.finished("manage.py", "migrate")
    assert finished.returncode == 0
    assert "made anew" in finished.stderr
    assert described_ours(empty_database_url) == described_ours(database_url)
    finished = project.finished("manage.py", "migrate")
    assert (finished.returncode, finished.stderr) == (0, "")


def test_tables_that_the_command_has_dropped_are_made_anew(
    project: DjangoProject, empty_database_url: str, database_url: str
) -> None:
    project.manage("migrate")
    downgrade(empty_database_url)
    project.manage("migrate")
    assert described_ours(empty_database_url) == described_ours(database_url)


def test_what_was_faked_or_undone_is_left_alone(
    project: DjangoProject, empty_database_url: str
) -> None:
    project.manage("migrate", "--fake", APP)
    assert ours(empty_database_url) == set()
    project.manage("migrate", APP, "zero")
    project.manage("migrate", "auth")
    assert ours(empty_database_url) <= LEFT


def test_dropped_tables_can_be_migrated_back(
    project: DjangoProject, empty_database_url: str
) -> None:
    project.manage("migrate")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute(ALL_TABLES)
    project.manage("migrate", APP, "zero")
    project.manage("migrate")
    assert ours(empty_database_url) == ALL


def test_a_column_that_is_missing_is_one_error_with_what_to_run(
    project: DjangoProject, empty_database_url: str
) -> None:
    project.manage("migrate")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("ALTER TABLE task_lock DROP COLUMN due_at")
    said = project.refused("migrate")
    assert said.startswith("CommandError: the table task_lock has no column due_at, although")
    assert "manage.py migrate" in project.manage("check", "--database", "default")
    project.manage("migrate", APP, "zero")
    project.manage("migrate")
    assert "no issues" in project.manage("check", "--database", "default")


def test_a_role_that_may_not_migrate_is_told_what_helps(
    make_project: MakeProject, empty_database_url: str
) -> None:
    with role(empty_database_url) as (name, url):
        with psycopg.connect(empty_database_url) as connection:
            connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
            connection.execute(f'CREATE SCHEMA "{name}" AUTHORIZATION "{name}"')
            connection.execute(f'ALTER ROLE "{name}" SET search_path = "{name}"')
        project = make_project(empty_database_url)
        user = {"USER": name, "PASSWORD": parse_url(url).password}
        project.configure(f"DATABASES['default'] |= {user!r}")
        project.configure('TASKLOCK_SCHEMA = "public"')
        said = project.refused("migrate")
        assert said.startswith(f'CommandError: role "{name}" may not change the tables')
        assert said.endswith(f'GRANT USAGE, CREATE ON SCHEMA public TO "{name}"')


@pytest.mark.parametrize("may_read_the_revision", [False, True])
def test_tables_of_another_role_are_left_alone_if_none_is_missing(
    make_project: MakeProject, empty_database_url: str, may_read_the_revision: bool
) -> None:
    upgrade(empty_database_url)
    with role(empty_database_url) as (name, url):
        with psycopg.connect(empty_database_url) as connection:
            connection.execute(f'GRANT CREATE ON SCHEMA public TO "{name}"')
            for table in sorted(ALL - LEFT):
                rights = "SELECT, INSERT, UPDATE, DELETE"
                connection.execute(f'GRANT {rights} ON {table} TO "{name}"')
            if may_read_the_revision:  # there is none
                connection.execute("DELETE FROM task_lock_alembic_version")
                connection.execute(f'GRANT SELECT ON task_lock_alembic_version TO "{name}"')
        project = make_project(empty_database_url)
        user = {"USER": name, "PASSWORD": parse_url(url).password}
        project.configure(f"DATABASES['default'] |= {user!r}")
        for _ in range(2):  # also where Django has nothing to do
            finished = project.finished("manage.py", "migrate")
            assert (finished.returncode, finished.stderr) == (0, "")
        with psycopg.connect(empty_database_url) as connection:
            connection.execute("DROP TABLE task_lock_run")
        said = project.refused("migrate")
        assert said.startswith(f'CommandError: role "{name}" may not change the tables')
        assert said.endswith("as which to run: apscheduler-tasklock upgrade")


def test_a_migration_that_fails_leaves_nothing_behind(
    project: DjangoProject, empty_database_url: str
) -> None:
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("CREATE SEQUENCE task_lock_replica")  # in the way
    said = project.refused("migrate", APP)
    assert 'relation "task_lock_replica" already exists' in said
    assert ours(empty_database_url) == set()


def test_migrations_by_any_way_wait_for_each_other(
    project: DjangoProject, empty_database_url: str, tmp_path: Path
) -> None:
    waiting = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with psycopg.connect(empty_database_url) as connection:
        # As `apscheduler-tasklock upgrade` does, for as long as its transaction lasts.
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [UPGRADE_LOCK])
        with project.started("manage.py", "migrate", APP, log=tmp_path / "log") as migrating:
            eventually(lambda: connection.execute(waiting).rowcount == 1)
            assert ours(empty_database_url) == set()
            connection.commit()
            assert migrating.wait(60) == 0
    assert ours(empty_database_url) == ALL


def test_sqlmigrate_prints_statements_that_make_the_tables(
    project: DjangoProject, empty_database_url: str, database_url: str
) -> None:
    statements = "".join(project.manage("sqlmigrate", APP, each) for each in revisions()[1:])
    assert ours(empty_database_url) == set()
    back = project.manage("sqlmigrate", APP, "0001", "--backwards")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute(statements.encode())
    assert described_ours(empty_database_url) == described_ours(database_url)
    assert "DROP TABLE IF EXISTS task_lock_job, " in back


def test_makemigrations_finds_nothing_to_do(project: DjangoProject) -> None:
    assert "No changes detected" in project.manage("makemigrations", "--check", "--dry-run")
    project.configure('TASKLOCK_TABLE, TASKLOCK_SCHEMA = "locks", "jobs"')
    assert "No changes detected" in project.manage("makemigrations", "--check", "--dry-run")


def test_another_schema_and_table_are_those_of_the_settings(
    project: DjangoProject, empty_database_url: str
) -> None:
    project.configure('TASKLOCK_TABLE, TASKLOCK_SCHEMA = "our locks", "Jobs"')
    project.manage("migrate")
    made = {name for name in tables(empty_database_url) if "locks" in name}
    assert made == {name.replace("task_lock", "Jobs.our locks") for name in ALL}
    assert "no issues" in project.manage("check", "--database", "default")
    counts = """
from apscheduler_tasklock.django.models import Run, Task
answer([Task.objects.count(), Run.objects.count()])
"""
    assert project.ask(counts) == [0, 0]
    project.manage("migrate", APP, "zero")
    left = {name for name in tables(empty_database_url) if "locks" in name}
    assert left <= {"Jobs.our locks_alembic_version"}


def test_another_database_is_migrated_by_its_alias_and_as_the_router_says(
    make_project: MakeProject, empty_database_url: str, server: Server
) -> None:
    with server.database() as jobs_url:
        project = make_project(empty_database_url, jobs=jobs_url)
        project.configure('TASKLOCK_DATABASE = "jobs"')
        project.write(
            "project/routers.py",
            "class Router:\n"
            "    def allow_migrate(self, db, app_label, **hints):\n"
            f"        return db == 'jobs' if app_label == {APP!r} else None\n",
        )
        project.configure('DATABASE_ROUTERS = ["project.routers.Router"]')
        project.manage("migrate")
        assert ours(empty_database_url) == ours(jobs_url) == set()
        project.manage("migrate", "--database", "jobs")
        assert ours(empty_database_url) == set()
        assert ours(jobs_url) == ALL
        assert "no issues" in project.manage("check", "--database", "jobs")
        project.manage("migrate", "--database", "jobs", APP, "zero")
        assert "task_lock" not in ours(jobs_url)


def test_a_database_that_is_not_postgresql_is_passed_over(
    make_project: MakeProject, empty_database_url: str
) -> None:
    project = make_project(empty_database_url, jobs=empty_database_url)
    project.configure(
        'DATABASES["default"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": "site.sqlite3"}\n'
        'TASKLOCK_DATABASE = "jobs"'
    )
    project.manage("migrate")
    assert ours(empty_database_url) == set()
    project.manage("migrate", "--database", "jobs")
    assert ours(empty_database_url) == ALL


def test_the_test_database_has_the_tables(project: DjangoProject) -> None:
    project.write(
        "shop/tests.py",
        """
from contextlib import closing
from django.test import TransactionTestCase
from project.scheduling import executor
from apscheduler_tasklock.django import database_url, task_locks

class LockTest(TransactionTestCase):
    def test_a_lock_is_held_in_the_test_database(self):
        self.assertTrue(database_url().database.startswith("test_"), database_url().database)
        with closing(task_locks()) as locks:
            with locks.hold("report", min_lock=0, max_lock=60) as held:
                self.assertGreater(held.token, 0)

    def test_a_scheduler_that_was_imported_before_uses_it_as_well(self):
        from apscheduler.schedulers.background import BackgroundScheduler
        scheduler = BackgroundScheduler(executors={"default": executor})
        self.assertFalse(executor.user.where.endswith(repr(database_url().database)))
        scheduler.start()
        self.assertTrue(executor.user.where.endswith(repr(database_url().database)))
        scheduler.shutdown()
""",
    )
    project.write(
        "project/scheduling.py",
        "from apscheduler_tasklock.django import DjangoTaskLockExecutor\n"
        "executor = DjangoTaskLockExecutor()\n",
    )
    assert "Ran 2 tests" in project.manage("test")


def test_django_may_use_psycopg2(project: DjangoProject, empty_database_url: str) -> None:
    # Django takes psycopg 3 if it is there.
    project.configure(
        "import sys\n"
        "import psycopg\n"
        "kept, sys.modules['psycopg'] = sys.modules['psycopg'], None\n"
        "import django.db.backends.postgresql.base\n"
        "sys.modules['psycopg'] = kept\n"
        "assert not django.db.backends.postgresql.psycopg_any.is_psycopg3"
    )
    project.manage("migrate")
    assert ours(empty_database_url) == ALL
    assert "no issues" in project.manage("check", "--database", "default")
    project.manage("migrate", APP, "zero")
    assert ours(empty_database_url) <= LEFT
