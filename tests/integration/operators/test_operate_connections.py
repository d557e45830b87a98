"""What ``doctor`` says of a connection that fails: on real servers, and through pgbouncer.

Where the remedy is a statement, it is run, and the connection works.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock._doctor.remedies import remedy_of
from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.support.commands import Answer, Command
from tests.support.pgbouncer import PgBouncer
from tests.support.polling import eventually
from tests.support.postgres import Server
from tests.support.programs import UnavailableError, skip_or_fail
from tests.support.standby import Pair

pytestmark = [
    pytest.mark.own_server,
    pytest.mark.direct("it is about logins, which the pooler answers by itself"),
]

# Who has a password, who is let in without, and who is not let in.
HBA = """
host all rejected 127.0.0.1/32 reject
hostssl all encrypted 127.0.0.1/32 trust
host all app,expired 127.0.0.1/32 scram-sha-256
host all postgres,limited,sleeping,nobody 127.0.0.1/32 trust
"""
SET_UP = (
    "CREATE ROLE app LOGIN PASSWORD 'hunter2'",
    "CREATE ROLE expired LOGIN PASSWORD 'hunter2' VALID UNTIL '2020-01-01'",
    "CREATE ROLE limited LOGIN CONNECTION LIMIT 0",
    "CREATE ROLE sleeping",
    "CREATE DATABASE crowded CONNECTION LIMIT 0",
    "CREATE DATABASE closed ALLOW_CONNECTIONS false",
    "CREATE DATABASE frozen",
    "ALTER DATABASE frozen SET default_transaction_read_only = on",
    "CREATE DATABASE private",
    "REVOKE CONNECT ON DATABASE private FROM PUBLIC",
)


@pytest.fixture(scope="module")
def strict() -> Iterator[EmbeddedServer]:
    """A server that lets few in. It has 6 connections, of which 3 are for superusers."""
    settings = {
        "fsync": "off",
        "max_connections": "6",
        "superuser_reserved_connections": "3",
        "max_prepared_transactions": "2",
    }
    with EmbeddedServer(settings, loopback=True) as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            [path] = connection.execute("SHOW hba_file").fetchone()
            with open(path, "w") as file:
                file.write(HBA)
            for statement in SET_UP:
                connection.execute(statement)
            connection.execute("SELECT pg_reload_conf()")
            # Sent to the server's main process, which then sends it on.
            rules = "SELECT count(*) FROM pg_hba_file_rules"
            assert connection.execute(rules).fetchone() == (4,)
        eventually(lambda: _is_rejected(server))
        yield server


def _is_rejected(server: EmbeddedServer) -> bool:
    try:
        psycopg.connect(url_of(server, "rejected")).close()
    except psycopg.OperationalError as error:
        return "pg_hba.conf rejects" in str(error)
    return False


def url_of(server: EmbeddedServer, user: str, database: str = "postgres", query: str = "") -> str:
    return f"postgresql://{user}@127.0.0.1:{server.port}/{database}{query}"


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command("", capsys)


def failed(doctor: Command, url: str) -> tuple[str, str]:
    """Return what is said of a connection that fails, and the remedy."""
    answer: Answer = doctor("doctor", "--json", database=url)
    assert answer.status == 1
    [found] = [one for one in answer.json["findings"] if one["level"] == "wrong"]
    assert found["what"] == "connection"
    assert "hunter2" not in answer.out + answer.err
    return found["says"], found["remedy"]


@pytest.mark.parametrize(
    ("user", "database", "query", "says", "remedy"),
    [
        ("app:wrong", "postgres", "", "password authentication failed", "check the role and its"),
        ("app", "postgres", "", "no password supplied", "postgresql://user:password@host/name"),
        ("app:hunter2", "nowhere", "", '"nowhere" does not exist', "CREATE DATABASE nowhere"),
        ("nobody", "postgres", "", 'role "nobody" does not exist', "CREATE ROLE nobody LOGIN"),
        (
            "rejected",
            "postgres",
            "",
            "pg_hba.conf rejects",
            "such as: host postgres rejected 127.0.0.1/32 scram-sha-256",
        ),
        ("unknown", "postgres", "", "no pg_hba.conf entry", "host postgres unknown 127.0.0.1/32"),
        ("encrypted", "postgres", "", "no encryption", "a hostssl one, put sslmode=require"),
        (
            "app:hunter2",
            "postgres",
            "?sslmode=require",
            "does not support SSL",
            "turn SSL on in the server (ssl = on",
        ),
        (
            "app:hunter2",
            "frozen",
            "?target_session_attrs=read-write",
            "its server takes no writes",
            "ALTER DATABASE frozen RESET default_transaction_read_only",
        ),
        (
            "app:hunter2",
            "postgres",
            "?target_session_attrs=standby",
            "not in hot standby mode",
            "leave target_session_attrs out",
        ),
    ],
)
def test_what_the_server_rejects_has_its_remedy(
    doctor: Command,
    strict: EmbeddedServer,
    user: str,
    database: str,
    query: str,
    says: str,
    remedy: str,
) -> None:
    told = failed(doctor, url_of(strict, user, database, query))
    assert says in told[0]
    assert remedy in told[1]


@pytest.mark.parametrize(
    ("user", "database", "says", "statement"),
    [
        ("limited", "postgres", 'for role "limited"', "ALTER ROLE limited CONNECTION LIMIT -1"),
        ("app:hunter2", "crowded", "for database", "ALTER DATABASE crowded CONNECTION LIMIT -1"),
        ("sleeping", "postgres", "not permitted to log in", "ALTER ROLE sleeping LOGIN"),
        (
            "app:hunter2",
            "closed",
            "not currently accepting",
            "ALTER DATABASE closed ALLOW_CONNECTIONS true",
        ),
        (
            "app:hunter2",
            "private",
            "permission denied",
            "GRANT CONNECT ON DATABASE private TO app",
        ),
        (
            "expired:hunter2",
            "postgres",
            "password authentication failed",
            "ALTER ROLE expired VALID UNTIL 'infinity'",
        ),
    ],
)
def test_the_statement_of_the_remedy_helps(
    doctor: Command,
    strict: EmbeddedServer,
    user: str,
    database: str,
    says: str,
    statement: str,
) -> None:
    url = url_of(strict, user, database)
    told, remedy = failed(doctor, url)
    assert says in told
    assert remedy.endswith(f" run: {statement}")
    with psycopg.connect(strict.url, autocommit=True) as connection:
        connection.execute(statement)
    psycopg.connect(url).close()


def connected(url: str) -> psycopg.Connection[Any]:
    """Open a connection, once earlier ones have ended in the server, which takes a moment."""

    def connect() -> psycopg.Connection[Any] | None:
        with suppress(psycopg.OperationalError):
            return psycopg.connect(url)
        return None

    connection: psycopg.Connection[Any] = eventually(connect)
    return connection


def test_a_full_server(doctor: Command, strict: EmbeddedServer) -> None:
    url = url_of(strict, "app:hunter2")
    with ExitStack() as closing:
        for full in ("slots are reserved", "too many clients already"):
            for _ in range(3):
                who = url if full.startswith("slots") else strict.url
                closing.enter_context(connected(who))
            told, remedy = failed(doctor, url)
            assert full in told
            assert "max_connections" in remedy
            assert "firewall" not in remedy
    with connected(strict.url) as connection:  # the statement that it names
        connection.execute(remedy.partition("can list all connections: ")[2])


def test_a_server_that_is_nearly_full_is_a_note(doctor: Command, strict: EmbeddedServer) -> None:
    def told(level: str) -> dict[str, str] | None:
        """Return the finding, once earlier connections have ended in the server."""
        findings = doctor("doctor", "--json", database=url).json["findings"]
        found = [one for one in findings if (one["what"], one["level"]) == ("connections", level)]
        return dict(found[0]) if found else None

    url = url_of(strict, "app:hunter2")
    assert eventually(lambda: told("ok"))
    with connected(url), connected(url):
        found = eventually(lambda: told("note"))
    assert (found["level"], "3 of 3 of the server" in found["says"]) == ("note", True)
    assert "max_connections" in found["remedy"]


def test_a_server_that_shuts_down(doctor: Command) -> None:
    with EmbeddedServer({"fsync": "off"}) as server, psycopg.connect(server.url):
        os.kill(server.pid, signal.SIGTERM)  # it waits for the connection
        eventually(lambda: "shutting down" in _said_of(server.url))
        told, remedy = failed(doctor, server.url)
    assert "shutting down" in told
    assert "wait until the server is started again" in remedy


@pytest.mark.parametrize(
    "said",
    [
        "the database system is starting up",
        "the database system is not yet accepting connections",
        "the database system is not accepting connections; Hot standby mode is disabled.",
        "the database system is in recovery mode",
    ],
)
def test_a_server_that_has_not_started_or_recovered_yet(said: str) -> None:
    error = psycopg.OperationalError(f"connection failed: FATAL:  {said}")
    assert remedy_of(error, parse_url("postgresql://app@db/app")).startswith("wait until")


@pytest.mark.nightly
def test_a_standby_is_told_from_a_setting(doctor: Command) -> None:
    with Pair() as pair:
        assert doctor("upgrade", database=pair.primary.url).status == 0
        answer = doctor("doctor", "--json", database=pair.standby.url)
        [found] = [one for one in answer.json["findings"] if one["level"] == "wrong"]
        assert (answer.status, found["what"]) == (1, "writable")
        assert "this is a standby" in found["says"]
        assert "name the primary; or all servers, in one URL" in found["remedy"]
        assert doctor("doctor", database=pair.url()).status == 0  # all servers, in one URL


def _said_of(url: str) -> str:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("postgresql://app:hunter2@no-such-host.invalid/db", "check the host's name"),
        ("postgresql://app:hunter2@/db?host=one.invalid:5432,two.invalid:5432", "?host=one:5432&"),
        ("postgresql://app:hunter2@/db?host=/no/such/folder", "no server listens on that socket"),
    ],
)
def test_a_host_that_is_none(doctor: Command, url: str, remedy: str) -> None:
    assert remedy in failed(doctor, url)[1]


@pytest.mark.skipif(
    psycopg.__version__ < "3.3", reason="psycopg before 3.3 tells of the last host alone"
)
def test_of_several_hosts_each_failure_has_its_remedy(
    doctor: Command, strict: EmbeddedServer
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    both = f"?host=127.0.0.1:{strict.port}&host=127.0.0.1:{port}"
    remedy = failed(doctor, f"postgresql://app:wrong@/postgres{both}")[1]
    assert "check the role and its password" in remedy
    assert "listen_addresses" in remedy


def test_a_port_of_another_program(doctor: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):  # the test is over: it need not be asked twice
                for _ in range(2):
                    client, _ = server.accept()
                    with client:
                        client.recv(1024)
                        client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        url = f"postgresql://app:hunter2@127.0.0.1:{server.getsockname()[1]}/db"
        assert "check the port" in failed(doctor, url + "?sslmode=disable")[1]


@pytest.mark.nightly
def test_a_prepared_transaction_that_has_the_table_locked(
    doctor: Command, strict: EmbeddedServer
) -> None:
    assert doctor("upgrade", database=strict.url).status == 0
    with psycopg.connect(strict.url, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("LOCK TABLE task_lock")
        connection.execute("PREPARE TRANSACTION 'left'")
        answer = doctor("doctor", "--json", database=strict.url)
        blocked = [one for one in answer.json["findings"] if "blocked" in one["says"]]
        [statement] = {
            one["remedy"].partition("superuser: ")[2].partition(",")[0] for one in blocked
        }
        assert statement == "ROLLBACK PREPARED 'left'"
        connection.execute(statement)


class TestPooler:
    @pytest.fixture
    def bouncer(self, request: pytest.FixtureRequest, server: Server) -> Iterator[PgBouncer]:
        try:
            with PgBouncer(server.url, 0, request.param) as bouncer:
                yield bouncer
        except UnavailableError as unavailable:
            skip_or_fail(unavailable)

    @pytest.mark.parametrize("bouncer", [{"pool_mode": "statement"}], indirect=True)
    def test_statement_pooling_is_wrong(
        self, doctor: Command, bouncer: PgBouncer, database_url: str, connection: Any
    ) -> None:
        answer = doctor("doctor", "--json", database=bouncer.url_of(database_url))
        assert answer.status == 1
        [found] = [one for one in answer.json["findings"] if one["level"] == "wrong"]
        assert found["what"] == "pooler"
        assert "by statement" in found["says"]
        assert "pool_mode = transaction" in found["remedy"]
        assert connection.execute("SELECT FROM task_lock").rowcount == 0

    @pytest.mark.parametrize("bouncer", [{"max_client_conn": "1"}], indirect=True)
    def test_one_that_is_full(self, doctor: Command, bouncer: PgBouncer, database_url: str) -> None:
        url = bouncer.url_of(database_url)
        with psycopg.connect(url):
            told, remedy = failed(doctor, url)
        assert "max_client_conn" in told
        assert "pgbouncer.ini" in remedy

    @pytest.mark.parametrize(
        "bouncer", [{"default_pool_size": "1", "query_wait_timeout": "1"}], indirect=True
    )
    def test_one_whose_connections_are_all_in_use(
        self, doctor: Command, bouncer: PgBouncer, database_url: str
    ) -> None:
        url = bouncer.url_of(database_url)
        with psycopg.connect(url) as connection:
            connection.execute("SELECT")  # in a transaction, which keeps the only one
            told, remedy = failed(doctor, url)
        assert "query_wait_timeout" in told
        assert "default_pool_size" in remedy

    @pytest.mark.parametrize("bouncer", [{}], indirect=True)
    def test_a_role_that_it_does_not_know(
        self, doctor: Command, bouncer: PgBouncer, database_url: str
    ) -> None:
        url = bouncer.url_of(database_url).replace("postgres@", "unknown:hunter2@")
        told, remedy = failed(doctor, url)
        assert "no such user" in told or "authentication failed" in told
        assert "check the role" in remedy
