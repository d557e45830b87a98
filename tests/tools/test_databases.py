"""A kept database is handed on empty, and only as it was copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row, tuple_row

from tests.support.databases import KeptDatabase
from tests.support.postgres import Server
from tests.support.rows import add_task


@pytest.fixture
def kept(server: Server, template: str) -> Iterator[KeptDatabase]:
    kept = KeptDatabase(server, template)
    yield kept
    kept.drop()


def after(kept: KeptDatabase, *changes: str) -> tuple[str, str]:
    """Return the URL that a test has that makes changes, and that of the next test."""
    before = kept.take()
    with psycopg.connect(before, autocommit=True) as connection:
        for change in changes:
            connection.execute(change.replace("HERE", connection.info.dbname).encode())
    kept.give_back()
    return before, kept.take()


def test_one_whose_rows_were_changed_is_handed_on_without_them(kept: KeptDatabase) -> None:
    url = kept.take()
    with psycopg.connect(url, autocommit=True) as connection:
        add_task(connection, "task")
        connection.execute("CREATE TEMPORARY TABLE gone ()")
        kept.give_back()  # ends the session
    assert kept.take() == url
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT FROM task_lock").fetchall() == []
        assert connection.execute("SELECT FROM task_lock_alembic_version").rowcount == 1


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE task_lock ADD COLUMN new text",
        "ALTER TABLE task_lock ALTER COLUMN token SET DEFAULT 7",
        "ALTER TABLE task_lock_run SET (autovacuum_enabled = false)",
        "CREATE TABLE new ()",
        "CREATE SCHEMA new",
        "CREATE FUNCTION new() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "DROP TABLE task_lock_job",
        "DROP TABLE task_lock_alembic_version",
        "UPDATE task_lock_alembic_version SET version_num = '9999'",
        "DELETE FROM task_lock_alembic_version",
        "COMMENT ON TABLE task_lock_job IS 'another id'",
        "GRANT SELECT ON task_lock TO PUBLIC",
        "GRANT SELECT (token) ON task_lock TO PUBLIC",
        "REVOKE CONNECT ON DATABASE HERE FROM PUBLIC",
        "ALTER DATABASE HERE SET search_path = nowhere",
        "ALTER ROLE CURRENT_USER IN DATABASE HERE SET work_mem = '8MB'",
        # As long as they are not vacuumed, the doctor finds bloat.
        "INSERT INTO task_lock_run SELECT 'x', 'runs', n, 0, now(), now(), now(), 'one', 'hold',"
        " 'ok' FROM generate_series(1, 1001) AS n",
    ],
)
def test_one_that_was_changed_is_not_handed_on(kept: KeptDatabase, change: str) -> None:
    before, later = after(kept, change)
    assert later != before


def test_a_change_that_was_undone_counts_too(kept: KeptDatabase) -> None:
    before, later = after(
        kept, "GRANT SELECT ON task_lock TO PUBLIC", "REVOKE SELECT ON task_lock FROM PUBLIC"
    )
    assert later != before


def test_one_that_is_not_cleaned_to_the_end_is_not_handed_on(
    kept: KeptDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    before = kept.take()
    monkeypatch.setattr(kept, "refill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept.give_back()
    monkeypatch.undo()
    assert kept.take() != before


def test_its_sessions_are_kept_as_they_began(kept: KeptDatabase) -> None:
    url = kept.take()
    with kept.session(url) as one, kept.session(url) as other:
        pids = {one.info.backend_pid, other.info.backend_pid}
        one.execute("CREATE TEMPORARY TABLE gone ()")
        one.row_factory = dict_row
        for _ in range(7):
            one.execute("SELECT 'prepared'")
        other.execute("SET search_path = nowhere")
        other.execute("SET ROLE pg_monitor")
    kept.give_back()
    assert kept.take() == url
    with kept.session(url) as one, kept.session(url) as other:
        assert {one.info.backend_pid, other.info.backend_pid} == pids
        for session in (one, other):
            found = session.execute(
                "SELECT to_regclass('gone'), current_setting('search_path'), current_user"
            ).fetchone()
            assert found == (None, '"$user", public', "postgres")
            assert session.row_factory is tuple_row
            assert session.execute("TABLE pg_prepared_statements").rowcount == 0


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda one: one.close(), id="closed"),
        pytest.param(lambda one: one.execute("BEGIN"), id="in a transaction"),
    ],
)
def test_a_session_that_a_test_does_not_leave_as_it_was_is_not_kept(
    kept: KeptDatabase, end: Callable[[Any], object]
) -> None:
    url = kept.take()
    with kept.session(url) as one:
        pid = one.info.backend_pid
        end(one)
    with kept.session(url) as other:
        assert other.info.backend_pid != pid


def test_a_kept_session_that_a_test_ended_is_replaced(kept: KeptDatabase) -> None:
    url = kept.take()
    with kept.session(url) as ended, kept.session(url) as ending:
        pid = ended.info.backend_pid
        ending.execute("SELECT pg_terminate_backend(%s, 30000)", [pid])
    kept.give_back()
    assert kept.take() == url
    with kept.session(url) as one, kept.session(url) as other:
        assert pid not in {one.info.backend_pid, other.info.backend_pid}
        assert one.execute("SELECT 1").rowcount == other.execute("SELECT 1").rowcount == 1


def test_a_session_of_another_database_is_not_kept(
    kept: KeptDatabase, empty_database_url: str
) -> None:
    url = kept.take()
    with kept.session(empty_database_url) as other:
        name = other.info.dbname
    with kept.session(url) as one:
        assert one.info.dbname != name
