"""What ``doctor`` finds wrong with a set-up, and what it says to do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timezone
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import make_url

from apscheduler_tasklock import TaskLockSchemaError, upgrade
from apscheduler_tasklock.cli import main
from apscheduler_tasklock.schema.table import quoted
from tests.support.commands import Answer, Command, PatientTaskLocks
from tests.support.pgbouncer import PgBouncer
from tests.support.polling import eventually
from tests.support.postgres import Server
from tests.support.programs import UnavailableError, skip_or_fail
from tests.support.roles import PASSWORD, role
from tests.support.rows import add_replica, add_task

pytestmark = pytest.mark.direct("it creates roles and databases, which the pooler does not know")

Connection = psycopg.Connection[Any]
Finding = dict[str, str]

GRANTS = {
    "task_lock": "SELECT, INSERT, UPDATE, DELETE",
    "task_lock_run": "SELECT, INSERT, UPDATE, DELETE",
    "task_lock_replica": "SELECT, INSERT, UPDATE, DELETE",
    "task_lock_job": "SELECT, INSERT, UPDATE, DELETE",
}


def wrong(answer: Answer) -> list[Finding]:
    """Return what was found wrong; the exit status has to say so, too."""
    found = [finding for finding in answer.json["findings"] if finding["level"] == "wrong"]
    assert (answer.status, answer.json["ok"]) == ((1, False) if found else (0, True))
    assert all(finding["remedy"] for finding in found), found
    assert "hunter2" not in answer.out + answer.err
    return found


def finding(answer: Answer, what: str) -> Finding:
    [found] = [finding for finding in answer.json["findings"] if finding["what"] == what]
    return dict(found)


def grant(connection: Connection, name: str, **changes: str) -> None:
    for table, commands in {**GRANTS, **changes}.items():
        statement = f"GRANT {commands} ON {table} TO {{}}"
        connection.execute(sql.SQL(statement).format(sql.Identifier(name)))


def leave(connection: Connection, name: str, table: str, rights: str) -> None:
    """Leave a role some rights on one table, and all that are needed on the others."""
    for each in GRANTS:
        revoke = sql.SQL(f"REVOKE ALL ON {each} FROM {{}}")
        connection.execute(revoke.format(sql.Identifier(name)))
    grant(connection, name, **{table: rights})


def test_nothing_is_wrong_with_a_set_up_as_it_should_be(
    command: Command, connection: Connection
) -> None:
    add_replica(connection, "one")
    answer = command("doctor", "--json")
    assert wrong(answer) == []
    assert {found["level"] for found in answer.json["findings"]} == {"ok"}
    plain = command("doctor")
    assert plain.status == 0
    for what in ("connection", "libpq", "server", "pooler", "clock", "revision", "bloat of"):
        assert what in plain.out


def test_it_leaves_no_rows(command: Command, connection: Connection) -> None:
    assert command("doctor").status == 0
    for table in GRANTS:
        assert connection.execute(f"SELECT FROM {table}").rowcount == 0


def test_a_server_that_does_not_listen(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    url = f"postgresql://app:hunter2@127.0.0.1:{port}/db"
    [found] = wrong(command("doctor", "--json", database=url))
    assert found["what"] == "connection"
    assert "check the host and the port" in found["remedy"]


@pytest.mark.nightly
def test_a_server_that_never_answers(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        url = f"postgresql://app:hunter2@127.0.0.1:{nobody.getsockname()[1]}/db"
        [found] = wrong(command("doctor", "--json", database=url))
    assert found["what"] == "connection"


def test_a_login_that_is_rejected(command: Command, database_url: str) -> None:
    with role(database_url, f"NOLOGIN PASSWORD '{PASSWORD}'") as (_, url):
        [found] = wrong(command("doctor", "--json", database=url))
    assert "not permitted to log in" in found["says"]
    assert found["remedy"].endswith(" LOGIN")


def test_a_database_that_does_not_exist(command: Command, server: Server) -> None:
    [found] = wrong(command("doctor", "--json", database=server.database_url("nowhere")))
    assert 'database "nowhere" does not exist' in found["says"]


@pytest.mark.parametrize("url", ["localhost/app", "mysql://user:hunter2@host/app"])
def test_a_url_that_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("TASKLOCK_DATABASE_URL", url)
    assert main(["doctor"]) == 2
    assert "URL" in capsys.readouterr().err


def test_a_read_only_database(command: Command, database_url: str, connection: Connection) -> None:
    name = sql.Identifier(str(psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]))
    read_only = "ALTER DATABASE {} SET default_transaction_read_only = on"
    connection.execute(sql.SQL(read_only).format(name))
    [found] = wrong(command("doctor", "--json"))
    assert found["what"] == "writable"
    statement = found["remedy"].partition("let the database's owner run: ")[2]
    with psycopg.connect(database_url, autocommit=True) as other:  # read-only, as any session
        other.execute(statement)
    assert wrong(command("doctor", "--json")) == []


@pytest.mark.parametrize(
    ("arguments", "has_tables"),
    [
        (["upgrade"], False),
        (["downgrade", "--yes"], True),
        (["pause", "sync"], True),
        (["run", "sync"], True),
        (["free", "sync", "--token", "7"], True),
        (["forget", "sync"], True),
    ],
)
def test_each_command_that_writes_has_a_remedy_for_a_read_only_database(
    command: Command,
    database_url: str,
    empty_database_url: str,
    connection: Connection,
    arguments: list[str],
    has_tables: bool,
) -> None:
    url = database_url if has_tables else empty_database_url
    if has_tables:
        add_task(connection, "sync")
    name = sql.Identifier(str(psycopg.conninfo.conninfo_to_dict(url)["dbname"]))
    set_to = "ALTER DATABASE {} SET default_transaction_read_only = {}"
    connection.execute(sql.SQL(set_to).format(name, sql.SQL("on")))
    answer = command(*arguments, database=url)
    assert (answer.status, answer.out) == (1, "")
    assert "name the primary" in answer.err
    assert "`apscheduler-tasklock doctor` says where" in answer.err
    connection.execute(sql.SQL(set_to).format(name, sql.SQL("off")))
    assert "read-only" not in command(*arguments, database=url).err


def test_missing_tables(command: Command, empty_database_url: str) -> None:
    found = wrong(command("doctor", "--json", database=empty_database_url))
    assert [one["what"] for one in found] == [f"table {table}" for table in GRANTS]
    assert {one["remedy"] for one in found} == {"create it with: apscheduler-tasklock upgrade"}


def test_a_table_of_another_name(command: Command) -> None:
    found = wrong(command("doctor", "--json", "--schema", "jobs", "--table", "locks"))
    assert found[0]["remedy"].endswith("upgrade --schema jobs --table locks")


@pytest.mark.parametrize("table", ["task_lock_run", "task_lock_replica", "task_lock_job"])
def test_a_table_beside_it_that_is_missing(
    command: Command, connection: Connection, table: str
) -> None:
    connection.execute(f"DROP TABLE {table}")
    [found] = wrong(command("doctor", "--json"))
    assert (found["what"], "upgrade" in found["remedy"]) == (f"table {table}", True)


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("task_lock", "token"),
        ("task_lock_run", "outcome"),
        ("task_lock_replica", "tasks"),
        ("task_lock_job", "version"),
    ],
)
def test_an_old_table(command: Command, connection: Connection, table: str, column: str) -> None:
    connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    found = [one for one in wrong(command("doctor", "--json")) if one["what"] == f"table {table}"]
    assert f"has no column {column}" in found[0]["says"]


def test_a_revision_that_is_newer_and_none(command: Command, connection: Connection) -> None:
    connection.execute("UPDATE task_lock_alembic_version SET version_num = '9999'")
    answer = command("doctor", "--json")
    assert wrong(answer) == []
    assert finding(answer, "revision")["level"] == "note"
    connection.execute("DELETE FROM task_lock_alembic_version")
    assert finding(command("doctor", "--json"), "revision")["level"] == "note"


class TestRole:
    def test_all_rights_are_enough(
        self, command: Command, database_url: str, connection: Connection
    ) -> None:
        with role(database_url) as (name, url):
            grant(connection, name)
            answer = command("doctor", "--json", database=url)
            assert wrong(answer) == []

    def test_a_revision_that_it_may_not_read_is_a_note_with_the_grant_that_helps(
        self, command: Command, database_url: str, connection: Connection
    ) -> None:
        with role(database_url) as (name, url):
            grant(connection, name)
            told = finding(command("doctor", "--json", database=url), "revision")
            assert (told["level"], told["says"].startswith("not known: ")) == ("note", True)
            connection.execute(told["remedy"].partition("let the owner run: ")[2])
            assert finding(command("doctor", "--json", database=url), "revision")["level"] == "ok"

    def test_fewer_are_found_with_the_grant_that_helps(
        self, command: Command, database_url: str, connection: Connection
    ) -> None:
        with role(database_url) as (name, url):
            for table in GRANTS:
                leave(connection, name, table, "SELECT")
                [found] = wrong(command("doctor", "--json", database=url))
                assert found["what"] == f"table {table}"
                connection.execute(found["remedy"].partition("let its owner run: ")[2])
                assert wrong(command("doctor", "--json", database=url)) == []

    def test_without_any_on_the_jobs_only_a_job_store_lacks_something(
        self, command: Command, database_url: str, connection: Connection
    ) -> None:
        """As README grants them."""
        with role(database_url) as (name, url):
            grant(connection, name)
            connection.execute(
                sql.SQL("REVOKE ALL ON task_lock_job FROM {}").format(sql.Identifier(name))
            )
            answer = command("doctor", "--json", database=url)
            assert wrong(answer) == []
            told = finding(answer, "table task_lock_job")
            assert (told["level"], "TaskLockJobStore" in told["says"]) == ("note", True)
            connection.execute(told["remedy"].partition("let the table's owner run: ")[2])
            level = finding(command("doctor", "--json", database=url), "table task_lock_job")
            assert level["level"] == "ok"

    def test_without_delete_nothing_is_wrong_but_it_is_told(
        self, command: Command, database_url: str, connection: Connection
    ) -> None:
        with role(database_url) as (name, url):
            grant(connection, name, task_lock="SELECT, INSERT, UPDATE")
            answer = command("doctor", "--json", database=url)
            assert wrong(answer) == []
            assert "GRANT DELETE" in finding(answer, "table task_lock")["remedy"]

    def test_all_rights_that_a_table_lacks_are_in_one_remedy(
        self, command: Command, database_url: str, connection: Connection
    ) -> None:
        with role(database_url) as (name, url):
            for table in GRANTS:
                leave(connection, name, table, "SELECT, INSERT")
                [found] = wrong(command("doctor", "--json", database=url))
                rights = "UPDATE, DELETE" if table == "task_lock_job" else "UPDATE"
                assert found["remedy"].endswith(f'run: GRANT {rights} ON {table} TO "{name}"')

    @pytest.mark.parametrize("rights", ["", "SELECT, INSERT, UPDATE, DELETE"])
    def test_a_schema_that_it_may_not_look_into(
        self, command: Command, database_url: str, connection: Connection, rights: str
    ) -> None:
        upgrade(database_url, schema="jobs")
        with role(database_url) as (name, url):
            for table in GRANTS if rights else ():
                connection.execute(f'GRANT {rights} ON jobs.{table} TO "{name}"')
            found = wrong(command("doctor", "--json", "--schema", "jobs", database=url))
            tables = list(GRANTS) if rights else [*GRANTS][:-1]  # a job store is not needed
            assert [one["what"] for one in found] == [f"table jobs.{table}" for table in tables]
            for one in found:
                connection.execute(one["remedy"].partition("let its owner run: ")[2])
            assert wrong(command("doctor", "--json", "--schema", "jobs", database=url)) == []

    def test_status_names_the_rights_on_all_tables_of_a_schema_that_it_may_not_look_into(
        self, command: Command, database_url: str, connection: Connection
    ) -> None:
        upgrade(database_url, schema="jobs")
        with role(database_url) as (_, url):
            said = command("status", "--schema", "jobs", database=url)
            assert said.status == 1
            connection.execute(said.err.partition("let their owner run: ")[2])
            assert command("status", "--schema", "jobs", database=url).status == 0
            found = wrong(command("doctor", "--json", "--schema", "jobs", database=url))
            assert found == []

    def test_its_name_is_in_the_remedy_of_a_limit_also_where_the_url_has_none(
        self, command: Command, database_url: str, connection: Connection, monkeypatch: Any
    ) -> None:
        with role(database_url, f"LOGIN CONNECTION LIMIT 1 PASSWORD '{PASSWORD}'") as (name, url):
            grant(connection, name)
            monkeypatch.setenv("PGUSER", name)
            monkeypatch.setenv("PGPASSWORD", PASSWORD)
            nameless = str(make_url(url)._replace(username=None, password=None))
            found = finding(command("doctor", "--json", database=nameless), "connections")
            assert f"WHERE usename = '{name}'" in found["remedy"]
            assert f'ALTER ROLE "{name}" CONNECTION LIMIT' in found["remedy"]

    def test_row_level_security_without_a_policy(
        self, command: Command, database_url: str, connection: Connection
    ) -> None:
        with role(database_url) as (name, url):
            grant(connection, name)
            for table in GRANTS:
                connection.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
                [found] = wrong(command("doctor", "--json", database=url))
                assert "row-level security" in found["says"]
                connection.execute(found["remedy"].partition("let its owner run: ")[2])
                assert wrong(command("doctor", "--json", database=url)) == []

    @pytest.mark.parametrize(
        ("policy", "says"),
        [
            ("USING (true) WITH CHECK (false)", "violates row-level security policy"),
            ("FOR ALL USING (false) WITH CHECK (true)", "cannot be seen"),
        ],
    )
    def test_a_policy_that_rejects_or_hides_the_rows(
        self, command: Command, database_url: str, connection: Connection, policy: str, says: str
    ) -> None:
        with role(database_url) as (name, url):
            grant(connection, name)
            connection.execute("ALTER TABLE task_lock ENABLE ROW LEVEL SECURITY")
            connection.execute(f"CREATE POLICY one ON task_lock {policy}")
            [found] = wrong(command("doctor", "--json", database=url))
        assert found["what"] == "writing to task_lock"
        assert says in found["says"]

    def test_a_policy_for_names_of_a_namespace(
        self, command: Command, database_url: str, connection: Connection
    ) -> None:
        with role(database_url) as (name, url):
            grant(connection, name)
            connection.execute("ALTER TABLE task_lock ENABLE ROW LEVEL SECURITY")
            connection.execute("CREATE POLICY own ON task_lock USING (task_name LIKE 'app:%')")
            assert wrong(command("doctor", "--json", database=url))
            assert wrong(command("doctor", "--json", "--namespace", "app:", database=url)) == []


class TestAnotherSchema:
    @pytest.fixture(autouse=True)
    def moved(self, connection: Connection) -> None:
        connection.execute("CREATE SCHEMA jobs")
        for table in GRANTS:
            connection.execute(f"ALTER TABLE {table} SET SCHEMA jobs")
        connection.execute("ALTER TABLE task_lock_alembic_version SET SCHEMA jobs")

    def test_a_table_that_the_search_path_lacks_is_found_there(
        self, command: Command, database_url: str, connection: Connection
    ) -> None:
        found = wrong(command("doctor", "--json"))
        assert [one["what"] for one in found] == [f"table {table}" for table in GRANTS]
        for one in found:
            assert "there is one in schema jobs" in one["says"]
            assert "pass --schema jobs to the command and schema='jobs' to" in one["remedy"]
        assert wrong(command("doctor", "--json", "--schema", "jobs")) == []
        name = sql.Identifier(str(psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]))
        put = sql.SQL("ALTER DATABASE {} SET search_path = jobs, public").format(name)
        connection.execute(put)
        assert wrong(command("doctor", "--json")) == []

    def test_each_command_names_the_schema_that_has_the_tables(
        self, command: Command, connection: Connection
    ) -> None:
        role = quoted(connection.info.user)
        for arguments in (
            *(["status"], ["show", "sync"], ["runs"], ["replicas"], ["check"], ["jobs"]),
            *(["why", "sync"], ["metrics"], ["pause", "sync"], ["pause", "--all", "--for", "1h"]),
            *(["resume", "sync"], ["run", "sync"], ["free", "sync", "--token", "7"]),
            *(["forget", "sync"], ["ack", "sync"], ["jobs pause", "reminder"]),
        ):
            said = command(*arguments)
            assert said.status in (1, 3), arguments
            words = said.out + said.err
            assert "the table task_lock is not in the search_path, but there is one in" in words
            assert f"in schema jobs of role {role}; if it is yours: pass --schema jobs to" in words
            elsewhere = command(*arguments, "--schema", "jobs")
            assert elsewhere.err.count("search_path") == 0, arguments

    def test_a_replica_that_starts_names_the_schema_that_has_the_tables(
        self, database_url: str
    ) -> None:
        with (
            closing(PatientTaskLocks(database_url)) as locks,
            pytest.raises(
                TaskLockSchemaError,
                match=r"the tables task_lock, task_lock_run, task_lock_replica are not in the "
                "search_path, but there is such a table in schema jobs .* pass --schema jobs ",
            ),
        ):
            locks.check()

    def test_of_another_schema_with_only_some_of_the_tables_nothing_is_said(
        self, command: Command, connection: Connection
    ) -> None:
        """These are another application's."""
        connection.execute("ALTER TABLE jobs.task_lock SET SCHEMA public")
        for said in (command("runs").err, command("doctor").out):
            assert "upgrade" in said
            assert "jobs" not in said

    def test_a_table_in_another_schema_than_the_one_that_is_named(self, command: Command) -> None:
        found = wrong(command("doctor", "--json", "--schema", "public"))
        assert (
            "task_lock is not in schema public, but there is one in schema jobs" in found[0]["says"]
        )
        assert "pass --schema jobs" in found[0]["remedy"]

    @pytest.mark.parametrize("arguments", [["status"], ["pause", "--all", "--for", "1s"]])
    def test_a_schema_that_does_not_exist(self, command: Command, arguments: list[str]) -> None:
        said = command(*arguments, "--schema", "nope").err
        assert "task_lock is not in schema nope, but there is one in schema jobs" in said

    def test_a_schema_of_the_search_path_that_the_role_may_not_use(
        self, command: Command, database_url: str, connection: Connection
    ) -> None:
        with role(database_url) as (name, url):
            user = sql.Identifier(name)
            connection.execute(sql.SQL("ALTER ROLE {} SET search_path = jobs, public").format(user))
            for table in GRANTS:
                connection.execute(sql.SQL(f"GRANT ALL ON jobs.{table} TO {{}}").format(user))
            remedies = {one["remedy"] for one in wrong(command("doctor", "--json", database=url))}
            assert remedies == {f'let its owner run: GRANT USAGE ON SCHEMA jobs TO "{name}"'}
            connection.execute(remedies.pop().partition("run: ")[2])
            assert wrong(command("doctor", "--json", database=url)) == []

    def test_a_table_of_the_same_name_that_is_something_else_is_none_of_ours(
        self, command: Command, connection: Connection
    ) -> None:
        connection.execute("DROP SCHEMA jobs CASCADE")
        connection.execute("CREATE SCHEMA other")
        connection.execute("CREATE TABLE other.task_lock (id int)")
        found = wrong(command("doctor", "--json"))
        assert {one["remedy"] for one in found} == {"create it with: apscheduler-tasklock upgrade"}


class TestLocks:
    """Each of these blocks claims, and says which session is to be ended."""

    @pytest.fixture
    def other(self, database_url: str) -> Iterator[Connection]:
        url = f"{database_url}?application_name=psql%20of%20ann"
        with psycopg.connect(url) as connection, connection.transaction(force_rollback=True):
            yield connection

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("table", "mode"),
        [
            ("task_lock", "ACCESS EXCLUSIVE"),
            ("task_lock_replica", "ACCESS EXCLUSIVE"),
            ("task_lock_alembic_version", "ACCESS EXCLUSIVE"),
            pytest.param("task_lock_run", "ACCESS EXCLUSIVE", marks=pytest.mark.nightly),
            pytest.param("task_lock_job", "EXCLUSIVE", marks=pytest.mark.nightly),
            ("task_lock", "SHARE"),
        ],
    )
    def test_a_table_that_another_session_has_locked(
        self, command: Command, connection: Connection, other: Connection, table: str, mode: str
    ) -> None:
        pid = other.info.backend_pid
        since = other.execute("SELECT now()").fetchone()[0]
        other.execute(f"LOCK TABLE {table} IN {mode} MODE")
        [found] = wrong(command("doctor", "--json"))  # once, wherever it stands in the way
        assert f"pid {pid} (psql of ann), role postgres, has " in found["says"]
        assert f"since {since.astimezone(timezone.utc):%Y-%m-%dT%H:%M:%SZ}" in found["says"]
        assert "idle in transaction" in found["says"]
        assert "firewall" not in found["remedy"]
        statement = found["remedy"].partition("superuser: ")[2]
        assert statement == f"SELECT pg_terminate_backend({pid})"
        connection.execute(statement)
        eventually(lambda: wrong(command("doctor", "--json")) == [])

    @pytest.mark.nightly
    def test_a_change_of_the_table_that_waits_for_a_reader(
        self, command: Command, database_url: str, connection: Connection, other: Connection
    ) -> None:
        """All claims wait behind it; who has to end is the reader."""
        other.execute("SELECT FROM task_lock")
        with psycopg.connect(database_url, autocommit=True) as altering:
            alter = threading.Thread(
                target=lambda: altering.execute("ALTER TABLE task_lock ADD COLUMN x int")
            )
            alter.start()
            waits = "SELECT FROM pg_locks WHERE NOT granted AND pid = %s"
            waiting = altering.info.backend_pid
            eventually(lambda: connection.execute(waits, [waiting]).rowcount == 1)
            first, second = wrong(command("doctor", "--json"))
            assert f"pid {other.info.backend_pid} (psql of ann)" in first["says"]
            assert "keeps another session waiting" in first["says"]
            assert f"pid {waiting} " in second["says"]
            assert "waits for AccessExclusiveLock" in second["says"]
            other.execute("ROLLBACK")
            alter.join()

    def test_a_transaction_that_is_open_for_long_and_has_rows_locked(
        self, command: Command, connection: Connection, other: Connection
    ) -> None:
        add_task(connection, "sync")
        other.execute("SELECT FROM task_lock FOR UPDATE")
        [found] = eventually(lambda: wrong(command("doctor", "--json")))  # not at once
        assert found["what"] == "transactions"
        assert f"pid {other.info.backend_pid} (psql of ann)" in found["says"]
        assert f"SELECT pg_terminate_backend({other.info.backend_pid})" in found["remedy"]

    @pytest.mark.nightly
    def test_a_role_that_may_not_see_other_sessions_is_told_the_pid_all_the_same(
        self, command: Command, database_url: str, connection: Connection, other: Connection
    ) -> None:
        with role(database_url) as (name, url):
            grant(connection, name)
            other.execute("LOCK TABLE task_lock")
            [found] = wrong(command("doctor", "--json", database=url))
            assert f"pid {other.info.backend_pid} (psql of ann)" in found["says"]
            assert "since a time that this role may not see" in found["says"]
            other.execute("ROLLBACK")

    def test_a_connection_that_is_lost_on_the_way_is_one_finding(
        self, command: Command, connection: Connection, other: Connection
    ) -> None:
        other.execute("LOCK TABLE task_lock")
        while_it_waits(connection, "SELECT pg_terminate_backend(pid)")
        [found] = wrong(command("doctor", "--json"))
        assert found["what"] == "writing to task_lock"

    @pytest.mark.nightly
    def test_what_fails_while_it_looks_for_who_has_the_lock_is_a_finding_as_well(
        self, command: Command, connection: Connection, other: Connection
    ) -> None:
        other.execute("LOCK TABLE task_lock_run")
        while_it_waits(connection, "DROP TABLE task_lock_job")
        found = wrong(command("doctor", "--json"))
        assert "writing to task_lock_run" in [one["what"] for one in found]


def while_it_waits(connection: Connection, statement: str) -> None:
    """Run a statement once ``doctor`` waits for a lock."""

    def run() -> None:
        waits = "SELECT pid FROM pg_locks WHERE NOT granted"
        pid = eventually(lambda: connection.execute(waits).fetchone())[0]
        connection.execute(statement.replace("pid", str(pid)))

    threading.Thread(target=run, daemon=True).start()


def test_replicas_of_different_versions(command: Command, connection: Connection) -> None:
    assert finding(command("doctor", "--json"), "replicas")["level"] == "note"
    add_replica(connection, "one", ["sync"])
    add_replica(connection, "dead", ["sync"], version="'0.1'", seen_at="now() - interval '2 min'")
    assert wrong(command("doctor", "--json")) == []
    add_replica(connection, "silent", ["sync"], version="'0.2'", seen_at="now() - interval '50 s'")
    connection.execute("UPDATE task_lock_replica SET rejected = '{x: y}' WHERE version = '0.2'")
    assert wrong(command("doctor", "--json")) == []
    add_replica(connection, "batch", ["batch/sum"], version="'1.2'")  # of another application
    found = finding(command("doctor", "--json"), "replicas")
    assert (found["level"], found["says"]) == ("ok", "1 with version 1.0, 1 with version 1.2")
    add_replica(connection, "two", ["sync", "zones"], version="'1.1'")
    found = finding(command("doctor", "--json"), "replicas")
    says = "live replicas with common tasks have several versions: 1 with 1.0, 1 with 1.1"
    assert (found["level"], found["says"]) == ("note", says)


def test_a_table_that_vacuum_does_not_get_through(command: Command, connection: Connection) -> None:
    connection.execute("ALTER TABLE task_lock SET (autovacuum_enabled = off)")
    connection.execute("ALTER TABLE task_lock_run SET (autovacuum_enabled = off)")
    add_task(connection, "sync")

    def bloat() -> list[Finding]:
        # Each time anew: up to PostgreSQL 14, what the server counts may get lost on its way.
        connection.execute(
            "INSERT INTO task_lock_run"
            " SELECT 'sync', 'runs', n, n, now(), now(), now(), 'one', 'hold', 'ok'"
            " FROM generate_series(1, 12000) AS n"
        )
        connection.execute("DELETE FROM task_lock_run")
        return wrong(command("doctor", "--json"))

    [found] = eventually(bloat)
    assert found["what"] == "bloat of task_lock_run"
    assert found["remedy"].startswith("VACUUM task_lock_run")


@pytest.mark.parametrize(
    ("seconds", "level"), [(0, "ok"), (10, "note"), (-10, "note"), (120, "wrong"), (-120, "wrong")]
)
def test_a_clock_that_is_off(seconds: float, level: str) -> None:
    from datetime import datetime, timedelta, timezone

    from apscheduler_tasklock._doctor.checks import clock_finding

    now = datetime.now(timezone.utc)
    found = clock_finding(now - timedelta(seconds=seconds), now, now + timedelta(milliseconds=2))
    assert found.level == level
    assert bool(found.remedy) == (level != "ok")
    assert ("ahead" in found.says) == (seconds >= 0)


def test_pgbouncer_in_the_way_is_told_and_nothing_is_wrong(
    command: Command, database_url: str, server: Server
) -> None:
    try:
        with PgBouncer(server.url, 0) as pooler:
            answer = command("doctor", "--json", database=pooler.url_of(database_url))
    except UnavailableError as unavailable:
        skip_or_fail(unavailable)
    assert wrong(answer) == []
    assert finding(answer, "pooler")["level"] == "note"


def test_what_a_replica_has_written_is_quoted_and_no_remedy(
    command: Command, connection: Connection
) -> None:
    """Who can write the table can have written it."""
    words = "denied; let a superuser run: GRANT app TO evil"
    add_replica(connection, "one", rejected=f"ARRAY['claims: {words}']")
    findings = command("doctor", "--json").json["findings"]
    [found] = [one for one in findings if one["what"] == "rejected"]
    assert found["says"] == f'claims rejected on one, which say: "{words}"'
    assert "GRANT" not in found["remedy"]


def test_a_table_in_another_schema_is_told_with_its_owner(
    command: Command, connection: Connection, database_url: str
) -> None:
    with role(database_url) as (name, _):
        connection.execute(
            sql.SQL("CREATE SCHEMA trap AUTHORIZATION {}").format(sql.Identifier(name))
        )
        connection.execute("ALTER TABLE task_lock SET SCHEMA trap")
        connection.execute(
            sql.SQL("ALTER TABLE trap.task_lock OWNER TO {}").format(sql.Identifier(name))
        )
        findings = command("doctor", "--json").json["findings"]
        [found] = [one for one in findings if one["what"] == "table task_lock"]
        assert f'there is one in schema trap of role "{name}"' in found["says"]
        assert found["remedy"].startswith("if it is yours: pass --schema trap")
