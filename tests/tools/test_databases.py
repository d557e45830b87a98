"""A kept database is handed on empty, and only as it was copied."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

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
