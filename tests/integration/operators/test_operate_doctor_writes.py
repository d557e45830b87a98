"""What ``doctor`` and ``check`` say while a database answers reads and confirms no writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import psycopg
import pytest

from apscheduler_tasklock import upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.support.commands import Answer, Command
from tests.support.polling import eventually
from tests.support.roles import role
from tests.support.rows import OVERDUE, STAYS_OK, add_replica, add_task
from tests.support.standby import Standby
from tests.support.unconfirmed import LonelyServer

pytestmark = pytest.mark.own_server

TABLES = ("task_lock", "task_lock_run", "task_lock_replica", "task_lock_job")
READ_ONLY = "default_transaction_read_only"


@pytest.fixture(scope="module")
def two_servers() -> Iterator[list[EmbeddedServer]]:
    with ExitStack() as stack:
        servers = [EmbeddedServer({"fsync": "off"}, loopback=True) for _ in range(2)]
        yield [stack.enter_context(server) for server in servers]


@pytest.fixture(scope="module")
def with_tables(two_servers: list[EmbeddedServer]) -> Iterator[LonelyServer]:
    with closing(LonelyServer(two_servers[0])) as lonely:
        upgrade(lonely.url)
        yield lonely


@pytest.fixture
def lonely(with_tables: LonelyServer) -> Iterator[LonelyServer]:
    with psycopg.connect(with_tables.url, autocommit=True) as connection:
        add_replica(connection, "one")
        yield with_tables
    for table in TABLES:
        with_tables.run(f"DELETE FROM {table}")


@pytest.fixture
def command(lonely: LonelyServer, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(lonely.url, capsys)


@pytest.fixture
def app(lonely: LonelyServer) -> Iterator[tuple[str, str]]:
    """Return the name and the URL of a role with all rights on the tables, and no others."""
    with role(lonely.url) as (name, url):
        for table in TABLES:
            lonely.run(f'GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO "{name}"')
        yield name, url


@contextmanager
def waiting(lonely: LonelyServer, statements: str, application: str) -> Iterator[int]:
    """Let a session wait for a standby; yield its pid."""
    with psycopg.connect(lonely.url, autocommit=True, application_name=application) as connection:

        def send() -> None:
            with closing(connection):
                connection.execute(statements)

        thread = threading.Thread(target=send)
        thread.start()
        pid = connection.info.backend_pid
        eventually(lambda: pid in [each for each, _ in lonely.waiting()])
        try:
            yield pid
        finally:
            lonely.wait_for("''")
            thread.join()


def wrong(answer: Answer) -> dict[str, dict[str, str]]:
    """Return what was found wrong, by what it is about."""
    found = [each for each in answer.json["findings"] if each["level"] == "wrong"]
    assert answer.status == (1 if found else 0)
    assert all(each["remedy"] for each in found), found
    assert "hunter2" not in answer.out + answer.err
    return {each["what"]: each for each in found}


def told(answer: Answer, what: str) -> dict[str, str]:
    [found] = [each for each in answer.json["findings"] if each["what"] == what]
    return dict(found)


@contextmanager
def set_to(server: EmbeddedServer, name: str, value: str) -> Iterator[None]:
    """Set a server's setting with ``ALTER SYSTEM``."""
    with psycopg.connect(server.url, autocommit=True) as connection:

        def change(statement: str, wanted: str) -> None:
            connection.execute(statement)
            connection.execute("SELECT pg_reload_conf()")

            def is_so() -> bool:
                with psycopg.connect(server.url) as other:
                    return other.execute(f"SHOW {name}").fetchone() == (wanted,)

            eventually(is_so)

        change(f"ALTER SYSTEM SET {name} = {value}", value)
        try:
            yield
        finally:
            change(f"ALTER SYSTEM RESET {name}", "off")


class TestHangingCommits:
    def test_are_found_by_a_write_which_leaves_no_session_that_waits(
        self, command: Command, lonely: LonelyServer
    ) -> None:
        assert told(command("doctor", "--json"), "writable")["level"] == "ok"
        with lonely.hanging():
            answer = command("doctor", "--json")
            assert lonely.waiting() == []
        [found] = wrong(answer).values()
        assert found["what"] == "writable"
        assert "wait for a synchronous standby" in found["says"]
        assert "synchronous_standby_names is 'nobody'" in found["says"]
        assert "no standby is connected" in found["says"]
        assert "terminate" not in answer.out
        assert "ALTER SYSTEM SET synchronous_standby_names = ''" in found["remedy"]
        assert told(answer, "replicas")["level"] == "ok"  # the checks after it are made

    def test_sessions_that_wait_for_a_standby_are_named_as_such_and_not_to_be_ended(
        self, command: Command, lonely: LonelyServer
    ) -> None:
        with (
            lonely.hanging(),
            waiting(
                lonely,
                "BEGIN; LOCK TABLE task_lock; UPDATE task_lock_replica SET host = ''; COMMIT",
                "tasklock web-1",
            ) as ours,
            waiting(
                lonely,
                "DELETE FROM task_lock_job; INSERT INTO task_lock_run SELECT 'x', "
                "'runs', 0, 0, now(), now(), now(), 'one', 'hold', 'ok'",
                "psql",
            ) as psql,
        ):
            age = "SELECT now() - xact_start > '2.1 s' FROM pg_stat_activity WHERE pid = %s"
            eventually(lambda: lonely.run(age, ours) == [(True,)])  # so that it is a long one
            answer = command("doctor", "--json")
        found = wrong(answer)
        assert "terminate" not in answer.out
        assert set(found) == {"writable", "writing to task_lock"}
        for pid in (f"pid {ours} (tasklock web-1)", f"pid {psql} (psql)"):
            assert pid in found["writable"]["says"]
        assert "waits for a synchronous standby" in found["writing to task_lock"]["says"]

    def test_a_role_without_pg_monitor_is_told_what_it_cannot_see(
        self, command: Command, lonely: LonelyServer, app: tuple[str, str]
    ) -> None:
        name, url = app
        locking = "BEGIN; LOCK TABLE task_lock; UPDATE task_lock_replica SET host = ''; COMMIT"
        with lonely.hanging(), waiting(lonely, locking, "psql of ann"):
            answer = command("doctor", "--json", database=url)
            checked = command("check", "--allow-empty", database=url)
        found = wrong(answer)
        assert f'role "{name}" may not see' in found["writable"]["says"]
        assert f'GRANT pg_monitor TO "{name}"' in found["writable"]["remedy"]
        assert "may not see" in found["writing to task_lock"]["says"]
        assert "pg_terminate_backend" not in answer.out
        looks_first = "state IS NOT NULL AND wait_event IS DISTINCT FROM 'SyncRep'"
        assert (checked.status, looks_first in checked.out) == (3, True)

    def test_make_the_verdict_of_check_unknown_but_are_no_relief(
        self, command: Command, lonely: LonelyServer
    ) -> None:
        with psycopg.connect(lonely.url, autocommit=True) as connection:
            add_task(connection, "fine", **STAYS_OK)
            assert command("check", "--allow-empty").status == 0
            with lonely.hanging():
                answer = command("check", "--allow-empty")
                assert lonely.waiting() == []
            assert answer.status == 3
            assert "takes no writes: commits wait for a synchronous standby" in answer.out
            assert "1 task |" in answer.out
            add_task(connection, "overdue", **OVERDUE)
            with lonely.hanging():
                answer = command("check", "--allow-empty")
            assert (answer.status, "takes no writes" in answer.out) == (2, True)

    def test_that_cannot_be_cancelled_are_a_finding_as_well(
        self, command: Command, lonely: LonelyServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As with an old libpq. The session that is left commits when the server waits no more."""
        monkeypatch.setattr(psycopg.capabilities, "has_cancel_safe", lambda: False)
        with lonely.hanging():
            [found] = wrong(command("doctor", "--json")).values()
        assert found["what"] == "writable"
        assert "could not be cancelled" in found["says"]


class TestWaitsForNoStandby:
    @pytest.mark.parametrize("value", ["off", "local"])
    def test_is_told_of_a_role(
        self, command: Command, lonely: LonelyServer, app: tuple[str, str], value: str
    ) -> None:
        name, url = app
        lonely.run(f'ALTER ROLE "{name}" SET synchronous_commit = {value}')
        found = told(command("doctor", "--json", database=url), "writable")
        assert (found["level"], "waits for no standby" in found["says"]) == ("ok", True)
        with lonely.hanging():
            found = told(command("doctor", "--json", database=url), "writable")
            assert command("check", "--allow-empty", database=url).status == 0
        assert found["level"] == "note"
        assert f"synchronous_commit is {value}" in found["says"]
        assert f'ALTER ROLE "{name}" RESET synchronous_commit' in found["remedy"]


class TestReadOnly:
    def test_set_by_alter_system_has_the_remedy_that_helps(
        self, command: Command, lonely: LonelyServer, two_servers: list[EmbeddedServer]
    ) -> None:
        with set_to(two_servers[0], READ_ONLY, "on"):
            [found] = wrong(command("doctor", "--json")).values()
            assert found["what"] == "writable"
            assert "ALTER SYSTEM" in found["says"]
            assert "ALTER DATABASE" not in found["remedy"]
            with psycopg.connect(lonely.url, autocommit=True) as connection:
                for statement in found["remedy"].partition("run: ")[2].split(", then "):
                    connection.execute(statement)
            eventually(lambda: wrong(command("doctor", "--json")) == {})

    def test_without_the_right_to_see_the_file_both_remedies_are_told(
        self,
        command: Command,
        two_servers: list[EmbeddedServer],
        app: tuple[str, str],
    ) -> None:
        with set_to(two_servers[0], READ_ONLY, "on"):
            found = wrong(command("doctor", "--json", database=app[1]))["writable"]
        assert f'role "{app[0]}" may not see' in found["says"]
        system, file = (found["remedy"].find(each) for each in ("ALTER SYSTEM", "postgresql.conf"))
        assert 0 < system < file

    @pytest.mark.parametrize("whose", ["ROLE", "DATABASE", "ROLE ... IN DATABASE"])
    def test_set_for_a_role_or_a_database_has_a_remedy_that_a_read_only_session_can_run(
        self, command: Command, lonely: LonelyServer, app: tuple[str, str], whose: str
    ) -> None:
        name, url = app
        subject = {
            "ROLE": f'ROLE "{name}"',
            "DATABASE": "DATABASE postgres",
            "ROLE ... IN DATABASE": f'ROLE "{name}" IN DATABASE postgres',
        }[whose]
        lonely.run(f"ALTER {subject} SET {READ_ONLY} = on")
        try:
            found = wrong(command("doctor", "--json", database=url))["writable"]
            with psycopg.connect(lonely.url, autocommit=True) as connection:
                connection.execute(found["remedy"].partition("run: ")[2])
            assert wrong(command("doctor", "--json", database=url)) == {}
        finally:
            lonely.run(f"ALTER {subject} RESET {READ_ONLY}")

    def test_a_url_of_several_servers_none_of_which_takes_writes(
        self, command: Command, lonely: LonelyServer, two_servers: list[EmbeddedServer]
    ) -> None:
        one, other = (f"127.0.0.1:{server.port}" for server in two_servers)
        url = f"postgresql://postgres@/postgres?host={one}&host={other}"
        with set_to(two_servers[0], READ_ONLY, "on"), set_to(two_servers[1], READ_ONLY, "on"):
            [found] = wrong(command("doctor", "--json", database=url)).values()
            checked = command("check", "--allow-empty", database=url)
        assert found["what"] == "connection"
        assert "none of its servers takes writes" in found["says"]
        for server in (one, other):
            assert f"{server}: {READ_ONLY} is on" in found["says"]
            assert f"at {server}: let a superuser run: ALTER SYSTEM RESET" in found["remedy"]
        assert (checked.status, "none of the URL's servers takes writes" in checked.out) == (
            3,
            True,
        )

    def test_a_url_of_a_standby_and_a_read_only_primary(
        self, command: Command, lonely: LonelyServer, two_servers: list[EmbeddedServer]
    ) -> None:
        """The standby alone has no remedy of its own: the primary is what is wrong."""
        standby = Standby(two_servers[0], {"fsync": "off"})
        with closing(standby), set_to(two_servers[0], READ_ONLY, "on"):
            one, other = (f"127.0.0.1:{each.port}" for each in (standby, two_servers[0]))
            url = f"postgresql://postgres@/postgres?host={one}&host={other}"
            [found] = wrong(command("doctor", "--json", database=url)).values()
            alone = wrong(command("doctor", "--json", database=standby.url))["writable"]
            assert command("check", "--allow-empty", database=standby.url).status == 3
        assert f"{one}: a standby; {other}: {READ_ONLY} is on" in found["says"]
        assert found["remedy"].startswith(f"at {other}: let a superuser run: ALTER SYSTEM RESET")
        assert ("standby" in alone["says"], "primary" in alone["remedy"]) == (True, True)

    def test_makes_the_verdict_of_check_unknown(
        self, command: Command, lonely: LonelyServer, two_servers: list[EmbeddedServer]
    ) -> None:
        with psycopg.connect(lonely.url, autocommit=True) as connection:
            add_task(connection, "fine", **STAYS_OK)
        with set_to(two_servers[0], READ_ONLY, "on"):
            answer = command("check", "--allow-empty")
        assert (answer.status, "takes no writes: it is read-only" in answer.out) == (3, True)
        assert "1 task |" in answer.out
        assert command("check", "--allow-empty").status == 0

    def test_of_a_role_that_only_reads_is_no_problem_of_the_database(
        self, command: Command, lonely: LonelyServer
    ) -> None:
        with psycopg.connect(lonely.url, autocommit=True) as connection:
            add_task(connection, "fine", **STAYS_OK)
        with role(lonely.url) as (name, url):
            lonely.run(f'GRANT SELECT ON task_lock TO "{name}"')
            check = partial(command, "check", "--allow-empty", database=url)
            # On a slow machine a connection may not come in time.
            eventually(lambda: check().status == 0)
            lonely.run(f'ALTER ROLE "{name}" SET {READ_ONLY} = on')
            eventually(lambda: check().status == 0)
            with lonely.hanging():
                assert check().status == 3
