"""Tables that are not what the noted revision says: dropped, changed, newer, of another role."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import create_engine

from apscheduler_tasklock import (
    TaskLockError,
    TaskLocks,
    TaskLockSchemaError,
    downgrade,
    migrate,
    upgrade,
)
from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock.schema.migrations import revisions
from tests.migration.conftest import described
from tests.support.commands import Command
from tests.support.roles import role, url_of

TABLES = ("task_lock", "task_lock_run", "task_lock_replica", "task_lock_job")
FORGET = "DELETE FROM task_lock_alembic_version"
ALL = f"DROP TABLE {', '.join(TABLES)}"
DOWNGRADE = "apscheduler-tasklock downgrade"
UPGRADE = "apscheduler-tasklock upgrade"
HEAD = revisions()[-1]

Ended = subprocess.CompletedProcess[str]
Start = Callable[..., Ended]


@pytest.fixture
def command(database_url: str, capsys: pytest.CaptureFixture[str]) -> Start:
    """Run `apscheduler-tasklock` on the test's database; return how it ended."""
    run = Command(database_url, capsys)

    def command(name: str, *arguments: str, url: str | None = None) -> Ended:
        answer = run(name, *arguments, database=url)
        return Ended([], answer.status, answer.out, answer.err)

    return command


@pytest.fixture
def alembic(checkout: Path, database_url: str) -> Start:
    """Run `alembic`, which configures the logging, in its own process; return how it ended."""

    def alembic(*arguments: str, url: str = database_url) -> Ended:
        return subprocess.run(
            [sys.executable, "-m", "alembic", "-x", f"database={url}", *arguments],
            cwd=checkout,
            env={k: v for k, v in os.environ.items() if k != "TASKLOCK_DATABASE_URL"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return alembic


def migrated(url: str, revision: str = "head", **options: Any) -> Ended:
    """Call migrate(), as an application's own migration does; return it as a command's end."""
    engine = create_engine(parse_url(url))
    try:
        with engine.begin() as connection:
            migrate(connection, revision=revision, **options)
    except TaskLockError as error:
        return subprocess.CompletedProcess([], 1, "", str(error))
    finally:
        engine.dispose()
    return subprocess.CompletedProcess([], 0, "", "")


class Ways:
    """Each way to upgrade and to downgrade."""

    def __init__(self, command: Start, alembic: Start, url: str) -> None:
        self.upgrades: dict[str, Callable[[], Ended]] = {
            "command": lambda: command("upgrade"),
            "alembic": lambda: alembic("upgrade", "head"),
            "migrate": lambda: migrated(url),
        }
        self.downgrades: dict[str, Callable[[], Ended]] = {
            "command": lambda: command("downgrade", "--yes"),
            "alembic": lambda: alembic("downgrade", "base"),
            "migrate": lambda: migrated(url, "base"),
        }


@pytest.fixture
def ways(command: Start, alembic: Start, database_url: str) -> Ways:
    return Ways(command, alembic, database_url)


# These are processes. What they do with the tables, `migrate` does as well.
NIGHTLY_WAYS = [pytest.param(way, marks=pytest.mark.nightly) for way in ("command", "alembic")]
EACH_WAY = pytest.mark.parametrize("way", ["migrate", *NIGHTLY_WAYS])


def nightly(way: str, drop: str) -> Any:
    return pytest.param(way, drop, marks=pytest.mark.nightly)


def noted(connection: psycopg.Connection[Any]) -> list[str]:
    rows = connection.execute("SELECT version_num FROM task_lock_alembic_version").fetchall()
    return [revision for (revision,) in rows]


def is_fine(url: str) -> bool:
    with closing(TaskLocks(url)) as locks:
        locks.check()
        return locks.tasks() == []


@pytest.fixture
def as_made(database_url: str) -> Callable[[], bool]:
    """Return whether the tables are again what they were when the test began."""
    before = described(database_url)
    return lambda: described(database_url) == before and is_fine(database_url)


class TestDropped:
    @pytest.mark.parametrize(
        ("way", "drop"),
        [
            *(("migrate", drop) for drop in (ALL, f"{ALL}; {FORGET}", *TABLES)),
            *(nightly(way, drop) for way in ("command", "alembic") for drop in (ALL, "task_lock")),
        ],
    )
    def test_an_upgrade_makes_what_is_missing_anew(
        self,
        ways: Ways,
        connection: psycopg.Connection[Any],
        as_made: Callable[[], bool],
        way: str,
        drop: str,
    ) -> None:
        connection.execute(drop if " " in drop else f"DROP TABLE {drop}")
        ended = ways.upgrades[way]()
        assert ended.returncode == 0, ended.stderr
        assert as_made()
        if "DELETE" not in drop and way != "migrate":  # whose caller has the logs
            assert "made anew" in ended.stdout + ended.stderr

    def test_rows_of_tables_that_are_there_stay(
        self, database_url: str, connection: psycopg.Connection[Any], known_task: Any
    ) -> None:
        known_task("report")
        connection.execute("DROP TABLE task_lock_run, task_lock_job")
        assert upgrade(database_url)
        assert connection.execute("SELECT task_name FROM task_lock").fetchall() == [("report",)]

    @pytest.mark.parametrize("drop", [ALL, "DROP TABLE task_lock_job"])
    def test_a_jobs_table_that_is_made_anew_has_another_id(
        self, database_url: str, connection: psycopg.Connection[Any], drop: str
    ) -> None:
        """With which stored jobs are signed."""
        ids = set()
        for _ in range(2):
            connection.execute(drop)
            assert upgrade(database_url)
            told = connection.execute("SELECT obj_description('task_lock_job'::regclass)")
            ids.add(str(*(told.fetchone() or [])))
        assert len(ids) == 2
        assert all(re.match(r"apscheduler-tasklock [0-9a-f-]{36}\.", each) for each in ids)

    def test_a_table_that_is_made_anew_has_the_grants_of_those_that_are_there(
        self, command: Start, database_url: str, connection: psycopg.Connection[Any]
    ) -> None:
        with role(database_url) as (name, _):
            connection.execute(f'GRANT SELECT, INSERT, UPDATE ON task_lock TO "{name}"')
            connection.execute("DROP TABLE task_lock_run, task_lock_job")
            assert command("upgrade").returncode == 0
            privilege = "SELECT has_table_privilege(%s, %s, %s)"
            for table, deletes in {"task_lock_run": False, "task_lock_job": True}.items():
                for right, has in {"INSERT": True, "DELETE": deletes}.items():
                    found = connection.execute(privilege, [name, table, right]).fetchone()
                    assert found == (has,)

    def test_where_all_are_made_anew_it_says_that_grants_are_gone(
        self, command: Start, connection: psycopg.Connection[Any]
    ) -> None:
        connection.execute(ALL)
        said = command("upgrade").stdout
        assert f"although revision {HEAD} was noted: made anew" in said
        assert "rights" in said
        connection.execute("DROP TABLE task_lock_run")
        answer = json.loads(command("upgrade", "--json").stdout)
        assert answer["migrated"] is True
        assert "task_lock_run" in answer["notes"][0]

    def test_what_is_missing_is_made_in_the_schema_of_the_others(
        self, command: Start, connection: psycopg.Connection[Any], as_made: Callable[[], bool]
    ) -> None:
        connection.execute("DROP TABLE task_lock_replica; CREATE SCHEMA first")
        name = connection.info.dbname
        connection.execute(f"ALTER DATABASE {name} SET search_path = first, public")
        assert command("upgrade").returncode == 0
        connection.execute("DROP SCHEMA first")
        assert as_made()

    @pytest.mark.parametrize("name", ["100%", "a:b", 'My "locks"'])
    def test_any_name_of_schema_and_table(self, empty_database_url: str, name: str) -> None:
        names = {"schema": name, "table": name}
        upgrade(empty_database_url, **names)
        before = described(empty_database_url)
        for suffix in ("_run", "", "_job"):
            missing = name + suffix
            with psycopg.connect(empty_database_url) as connection:
                drop = sql.SQL("DROP TABLE {}").format(sql.Identifier(name, missing))
                connection.execute(drop)
            assert upgrade(empty_database_url, **names)
            assert described(empty_database_url) == before
        assert not upgrade(empty_database_url, **names)

    @pytest.mark.nightly
    def test_replicas_that_do_so_at_the_same_moment_all_succeed(
        self,
        checkout: Path,
        database_url: str,
        connection: psycopg.Connection[Any],
        as_made: Callable[[], bool],
    ) -> None:
        connection.execute("DROP TABLE task_lock, task_lock_run")
        command = [sys.executable, "-m", "apscheduler_tasklock.cli", "upgrade", "--database"]
        replicas = [
            subprocess.Popen(
                [*command, database_url],
                cwd=checkout,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in range(4)
        ]
        said = [replica.communicate(timeout=120)[0] for replica in replicas]
        assert [replica.returncode for replica in replicas] == [0] * 4, said
        assert sum("made anew" in each for each in said) == 1
        assert as_made()

    @pytest.mark.parametrize(
        ("way", "drop"),
        [
            *(("migrate", drop) for drop in (ALL, *TABLES)),
            *(nightly(way, ALL) for way in ("command", "alembic")),
        ],
    )
    def test_a_downgrade_drops_what_is_there_and_forgets_the_revision(
        self,
        ways: Ways,
        connection: psycopg.Connection[Any],
        database_url: str,
        as_made: Callable[[], bool],
        way: str,
        drop: str,
    ) -> None:
        connection.execute(drop if " " in drop else f"DROP TABLE {drop}")
        ended = ways.downgrades[way]()
        assert ended.returncode == 0, ended.stderr
        assert not {row[1] for row in described(database_url)} & set(TABLES)
        assert upgrade(database_url)
        assert as_made()


class TestNothingNoted:
    """Tables without a revision, as of a dump that was restored without that table."""

    @EACH_WAY
    @pytest.mark.parametrize("forget", [FORGET, "DROP TABLE task_lock_alembic_version"])
    def test_an_upgrade_notes_it(
        self,
        ways: Ways,
        connection: psycopg.Connection[Any],
        as_made: Callable[[], bool],
        way: str,
        forget: str,
    ) -> None:
        connection.execute(forget)
        ended = ways.upgrades[way]()
        assert ended.returncode == 0, ended.stderr
        assert noted(connection) == [HEAD]
        assert as_made()

    @EACH_WAY
    def test_a_downgrade_drops_them(
        self, ways: Ways, connection: psycopg.Connection[Any], database_url: str, way: str
    ) -> None:
        connection.execute(FORGET)
        ended = ways.downgrades[way]()
        assert ended.returncode == 0, ended.stderr
        assert not {row[1] for row in described(database_url)} & set(TABLES)

    @pytest.mark.parametrize(
        ("way", "goes"),
        [("command", "downgrades"), *((way, "upgrades") for way in ("command", "alembic"))],
    )
    def test_a_table_of_somebody_else_with_our_name_is_left_alone(
        self, ways: Ways, connection: psycopg.Connection[Any], way: str, goes: str
    ) -> None:
        connection.execute(f"{ALL}; {FORGET}")
        connection.execute("CREATE TABLE task_lock (name text)")
        ended = getattr(ways, goes)[way]()
        assert ended.returncode == 1
        said = one_error(ended)
        assert "the table task_lock has no column" in said
        assert "DROP" not in said
        assert "--table" in said
        found = connection.execute("SELECT to_regclass('task_lock') IS NOT NULL").fetchone()
        assert found == (True,)


def one_error(ended: Ended) -> str:
    """Return what was said, which is no traceback and one line, but for Alembic's own."""
    said = [line for line in ended.stderr.splitlines() if not line.startswith("INFO  [alembic.")]
    assert len(said) == 1, ended.stderr
    return said[0]


OLD = ("ALTER TABLE task_lock DROP COLUMN due_at", "ALTER TABLE task_lock_run DROP COLUMN kind")


class TestChanged:
    """Somebody has dropped a column, or no released version made the tables."""

    @pytest.mark.parametrize(
        ("way", "old"),
        [*product(("migrate",), OLD), *product(("command", "alembic"), OLD[:1])],
    )
    def test_an_upgrade_says_which_commands_drop_and_create_them(
        self,
        ways: Ways,
        connection: psycopg.Connection[Any],
        database_url: str,
        as_made: Callable[[], bool],
        way: str,
        old: str,
    ) -> None:
        connection.execute(old)
        ended = ways.upgrades[way]()
        assert ended.returncode == 1
        said = one_error(ended)
        column = old.rpartition(" ")[2]
        assert f"has no column {column}, although revision {HEAD}, which has it, is noted" in said
        assert said.strip().endswith(f"create them with: {DOWNGRADE} && {UPGRADE}")
        assert noted(connection) == [HEAD]
        # And these commands help.
        dropped = ways.downgrades[way]()
        assert dropped.returncode == 0, dropped.stderr
        assert upgrade(database_url)
        assert as_made()

    def test_the_commands_name_schema_and_table(self, empty_database_url: str) -> None:
        upgrade(empty_database_url, schema="jobs", table="locks")
        with psycopg.connect(empty_database_url) as connection:
            connection.execute("ALTER TABLE jobs.locks DROP COLUMN due_at")
        options = "--schema jobs --table locks"
        with pytest.raises(
            TaskLockSchemaError, match=f"{DOWNGRADE} {options} && {UPGRADE} {options}$"
        ):
            upgrade(empty_database_url, schema="jobs", table="locks")

    def test_no_executor_starts_on_them(
        self, database_url: str, connection: psycopg.Connection[Any]
    ) -> None:
        connection.execute(OLD[0])
        with (
            closing(TaskLocks(database_url)) as locks,
            pytest.raises(TaskLockSchemaError, match=f"no column due_at; .* with: {UPGRADE}$"),
        ):
            locks.check()


class TestNewer:
    """A rollback: the tables were upgraded by a newer version of the library."""

    @pytest.fixture(autouse=True)
    def newer(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute("UPDATE task_lock_alembic_version SET version_num = '0009'")
        connection.execute("ALTER TABLE task_lock ADD COLUMN newer text")

    @EACH_WAY
    def test_an_upgrade_leaves_them_alone_and_says_so(
        self, ways: Ways, database_url: str, connection: psycopg.Connection[Any], way: str
    ) -> None:
        before = described(database_url)
        ended = ways.upgrades[way]()
        assert ended.returncode == 0, ended.stderr
        assert "Traceback" not in ended.stderr
        if way != "migrate":
            assert "newer version of this library" in ended.stdout + ended.stderr
            assert "0009" in ended.stdout + ended.stderr
        assert described(database_url) == before
        assert noted(connection) == ["0009"]
        assert is_fine(database_url)

    def test_the_command_says_it_once(self, command: Start) -> None:
        ended = command("upgrade")
        assert ended.stderr == ""
        assert ended.stdout.startswith("nothing to migrate: ")
        assert len(ended.stdout.splitlines()) == 1
        answer = json.loads(command("upgrade", "--json").stdout)
        assert answer["migrated"] is False
        assert "newer version" in answer["notes"][0]

    def test_migrate_logs_it(self, database_url: str, caplog: pytest.LogCaptureFixture) -> None:
        migrated(database_url)
        [said] = [record.getMessage() for record in caplog.records if "newer" in record.message]
        assert "0009" in said

    @EACH_WAY
    def test_a_downgrade_is_left_to_that_version(
        self, ways: Ways, database_url: str, way: str
    ) -> None:
        before = described(database_url)
        ended = ways.downgrades[way]()
        assert ended.returncode == 1
        assert "downgrade with that version" in one_error(ended)
        assert described(database_url) == before

    def test_a_table_of_it_that_is_missing_is_left_to_that_version(
        self, command: Start, connection: psycopg.Connection[Any]
    ) -> None:
        connection.execute("DROP TABLE task_lock_run")
        ended = command("upgrade")
        assert ended.returncode == 1
        assert "task_lock_run" in one_error(ended)
        assert "use that version" in one_error(ended)

    @EACH_WAY
    def test_a_column_that_it_no_longer_has_is_left_to_that_version(
        self, ways: Ways, connection: psycopg.Connection[Any], database_url: str, way: str
    ) -> None:
        connection.execute("ALTER TABLE task_lock_run DROP COLUMN kind")
        before = described(database_url)
        ended = ways.upgrades[way]()
        assert ended.returncode == 1
        said = one_error(ended)
        assert "newer version of this library" in said
        assert "because the column kind of task_lock_run is missing; use that version" in said
        ended = ways.downgrades[way]()
        assert ended.returncode == 1
        assert "downgrade with that version" in one_error(ended)
        assert described(database_url) == before

    def test_if_all_are_dropped_ours_are_made(
        self, connection: psycopg.Connection[Any], database_url: str
    ) -> None:
        connection.execute(ALL)
        assert upgrade(database_url)
        assert noted(connection) == [HEAD]
        assert is_fine(database_url)

    def test_the_doctor_has_a_note(self, command: Start) -> None:
        ended = command("doctor", "--json")
        assert ended.returncode == 0, ended.stdout
        found = {one["what"]: one for one in json.loads(ended.stdout)["findings"]}
        assert found["revision"]["level"] == "note"
        assert "newer" in found["revision"]["says"]


@pytest.mark.parametrize("url", ["foo", "mysql://user:hunter2@host/app"])
def test_a_database_that_is_none_is_one_error_of_alembic(alembic: Start, url: str) -> None:
    ended = alembic("upgrade", "head", url=url)
    assert ended.returncode == 1
    assert "URL" in one_error(ended)
    assert "hunter2" not in ended.stderr


class TestAnotherRole:
    @pytest.fixture
    def stranger(self, database_url: str) -> Iterator[tuple[str, str]]:
        """A role that owns nothing: its name, and the database's URL for it."""
        with role(database_url) as found:
            yield found

    def fails(self, url: str, command: Start, alembic: Start) -> set[str]:
        """Upgrade by each way; return what was said."""
        ended = [
            command("upgrade", url=url),
            alembic("upgrade", "head", url=url),
            migrated(url),
        ]
        assert [each.returncode for each in ended] == [1] * 3
        return {one_error(each).removeprefix("apscheduler-tasklock: ").strip() for each in ended}

    def test_without_the_right_to_create_in_the_schema(
        self,
        stranger: tuple[str, str],
        command: Start,
        alembic: Start,
        connection: psycopg.Connection[Any],
    ) -> None:
        name, url = stranger
        connection.execute(f"{ALL}, task_lock_alembic_version")
        connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
        [said] = self.fails(url, command, alembic)
        assert f'role "{name}" may not' in said
        remedy = f'GRANT USAGE, CREATE ON SCHEMA public TO "{name}"'
        assert said.endswith(remedy)
        assert connection.info.user in said  # who may do so
        connection.execute(remedy)
        assert command("upgrade", url=url).returncode == 0

    def test_without_any_right_on_the_schema(
        self, stranger: tuple[str, str], command: Start, connection: psycopg.Connection[Any]
    ) -> None:
        _, url = stranger
        connection.execute("CREATE SCHEMA jobs")
        said = one_error(command("upgrade", "--schema", "jobs", url=url))
        connection.execute(said.partition("which may grant that, run: ")[2])
        assert command("upgrade", "--schema", "jobs", url=url).returncode == 0

    def test_without_the_right_to_create_the_schema(
        self, stranger: tuple[str, str], command: Start, connection: psycopg.Connection[Any]
    ) -> None:
        name, url = stranger
        said = one_error(command("upgrade", "--schema", "jobs", url=url))
        remedy = f'CREATE SCHEMA jobs AUTHORIZATION "{name}"'
        assert said.strip().endswith(remedy)
        connection.execute(remedy)
        assert command("upgrade", "--schema", "jobs", url=url).returncode == 0

    @pytest.mark.parametrize("drop", [None, ALL])
    def test_who_does_not_own_the_tables(
        self,
        stranger: tuple[str, str],
        command: Start,
        alembic: Start,
        connection: psycopg.Connection[Any],
        drop: str | None,
    ) -> None:
        name, url = stranger
        if drop:
            connection.execute(drop)
        [said] = self.fails(url, command, alembic)
        assert f'role "{name}" may not' in said
        assert f"belong to role {connection.info.user}" in said
        assert said.endswith("apscheduler-tasklock upgrade")

    def test_a_downgrade_names_its_own_command(
        self, stranger: tuple[str, str], command: Start, connection: psycopg.Connection[Any]
    ) -> None:
        name, url = stranger
        connection.execute(f'GRANT ALL ON task_lock_alembic_version TO "{name}"')
        said = one_error(command("downgrade", "--yes", url=url))
        assert f"belong to role {connection.info.user}" in said
        assert said.strip().endswith(DOWNGRADE)

    def test_the_owner_of_some_tables_alone(
        self, command: Start, connection: psycopg.Connection[Any], stranger: tuple[str, str]
    ) -> None:
        """As a role has them that made one of them anew by itself."""
        name, url = stranger
        connection.execute(f'ALTER TABLE task_lock_run OWNER TO "{name}"')
        said = one_error(command("downgrade", "--yes", url=url))
        assert f"belong to role {connection.info.user}" in said

    def test_no_password_is_told(self, stranger: tuple[str, str], command: Start) -> None:
        name, url = stranger
        ended = command("upgrade", url=url)
        assert "hunter2" not in ended.stderr + ended.stdout
        assert url_of(url, name) == url


def test_a_first_upgrade_and_one_that_finds_nothing_have_no_notes(
    empty_database_url: str, command: Start
) -> None:
    first = json.loads(command("upgrade", "--json", url=empty_database_url).stdout)
    again = json.loads(command("upgrade", "--json", url=empty_database_url).stdout)
    assert first == {"table": "task_lock", "migrated": True, "notes": []}
    assert again == {"table": "task_lock", "migrated": False, "notes": []}
    assert downgrade(empty_database_url)
