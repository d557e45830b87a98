"""Functions and operators that another role has put into a schema of the ``search_path``."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from psycopg import sql

from apscheduler_tasklock import (
    TaskLockDatabaseError,
    TaskLockJobStore,
    TaskLocks,
)
from apscheduler_tasklock._lock.statements.statement import Statement
from tests.support.commands import Command
from tests.support.overloads import create_overloads
from tests.support.postgres import Server
from tests.support.roles import role
from tests.support.rows import add_replica, add_task
from tests.support.schedulers import Replica
from tests.support.snippets import ROOT

Connection = psycopg.Connection[Any]

pytestmark = pytest.mark.direct("the pooler keeps connections for a role, and has no login for it")

TABLES = "task_lock, task_lock_run, task_lock_replica, task_lock_job"


@pytest.fixture(scope="module")
def overloaded(server: Server, template: str) -> Iterator[str]:
    """Name of a database with what another role has made, which each test gets a copy of."""
    with server.database(template) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            create_overloads(connection)
            connection.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC")
        yield str(psycopg.conninfo.conninfo_to_dict(url)["dbname"])


@pytest.fixture
def direct_url(server: Server, overloaded: str) -> Iterator[str]:
    with server.database(overloaded) as url:
        yield url


@pytest.fixture
def victim(database_url: str, connection: Connection) -> Iterator[tuple[str, str]]:
    """The name and the URL of a replica's role, which may not call what another one has made."""
    with role(database_url) as (name, url):
        grant = f"GRANT SELECT, INSERT, UPDATE, DELETE ON {TABLES} TO {{}}"
        connection.execute(sql.SQL(grant).format(sql.Identifier(name)))
        yield name, url


def test_each_statement_calls_what_postgresql_has(
    victim: tuple[str, str], connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, url = victim
    texts: list[str] = []
    make = Statement.__init__

    def record(self: Statement, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        texts.append(self.text)

    monkeypatch.setattr(Statement, "__init__", record)
    TaskLocks(url).close()
    TaskLockJobStore(url, functions=["tests.*"])
    assert len(texts) > 40
    connection.execute("SET plan_cache_mode = force_generic_plan")
    connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(name)))
    found = {text: rejected(connection, text) for text in dict.fromkeys(texts)}
    assert [(error, text) for text, error in found.items() if error] == []


# Of these, what we call takes no arguments that somebody could make a better fit for.
SAFE = {"count", "unnest", "min", "max", "coalesce"}


@pytest.mark.nightly
def test_no_statement_names_a_function_of_any_type_without_its_schema(
    connection: Connection,
) -> None:
    """A function of the exact type, in another schema, would be taken for one of any type."""
    query = """
        SELECT DISTINCT proname FROM pg_catalog.pg_proc
        WHERE pronamespace = 'pg_catalog'::regnamespace AND EXISTS (
            SELECT FROM pg_catalog.unnest(proargtypes) AS type
            WHERE format_type(type, NULL) IN ('"any"', 'anyarray', 'anyelement', 'anynonarray',
                                              'anycompatible', 'anycompatiblearray'))
    """
    any_type = {name for (name,) in connection.execute(query)} - SAFE
    assert {"format", "pg_column_size", "array_remove", "jsonb_build_object"} <= any_type
    called = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / "apscheduler_tasklock").rglob("*.py")
        for text in literals(ast.parse(path.read_text(encoding="utf-8")))
        for name in re.findall(r"(?<![.\w])([a-z_]+)\(", text)
    }
    assert len(called) > 30
    assert sorted((path, name) for path, name in called if name in any_type) == []


def literals(module: ast.Module) -> Iterator[str]:
    """Give all texts of a module but its docstrings."""
    docstrings = {
        node.body[0].value
        for node in ast.walk(module)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(module):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and node not in docstrings:
            yield node.value


def rejected(connection: Connection, text: str) -> str | None:
    """Return why the server does not plan a statement: it may not call a function in public."""
    numbers = set(re.findall(r"\$(\d+)", text))
    try:
        connection.execute(f"PREPARE ours AS {text}".encode())
    except psycopg.Error as error:
        return str(error)
    nothing = f"({', '.join('NULL' for _ in numbers)})" if numbers else ""
    try:
        connection.execute(f"EXPLAIN EXECUTE ours{nothing}".encode())
    except psycopg.Error as error:
        return str(error)
    finally:
        connection.execute("DEALLOCATE ours")
    return None


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor"],
        ["status"],
        ["runs"],
        ["why", "job"],
        ["replicas"],
        ["jobs"],
        ["metrics"],
        ["check"],
        ["pause", "job"],
        ["resume", "job"],
        ["run", "job"],
        ["forget", "job"],
    ],
    ids=" ".join,
)
def test_a_command_calls_what_postgresql_has(
    victim: tuple[str, str], connection: Connection, command: Command, arguments: list[str]
) -> None:
    """Each statement is planned and run as the replica's role, which may not call the others."""
    add_task(connection, "job")
    if arguments[0] == "run":
        add_replica(connection, "one", ["job"])
    answer = command(*arguments, database=victim[1])
    said = answer.out + answer.err
    assert "public" not in said
    assert "permission denied" not in said
    assert "boolean" not in said
    assert answer.status == 0, said


def test_the_check_at_start_calls_what_postgresql_has(
    victim: tuple[str, str], make_replica: Callable[..., Replica]
) -> None:
    replica = make_replica(victim[1])
    replica.run_once(print)
    replica.one(EVENT_JOB_EXECUTED)
    replica.shutdown()


@pytest.mark.nightly
def test_what_names_who_has_a_table_locked_calls_what_postgresql_has(
    victim: tuple[str, str], connection: Connection
) -> None:
    connection.execute("BEGIN; LOCK TABLE task_lock")
    with (
        closing(TaskLocks(victim[1], claim_timeout=3)) as locks,
        pytest.raises(TaskLockDatabaseError, match="pg_terminate_backend"),
        locks.hold("job", min_lock=0, max_lock=60),
    ):
        pass
    connection.execute("ROLLBACK")
