"""What the app's migrations do: they take the library's tables to one of its revisions."""

from __future__ import annotations

from typing import Any

from django.db import router
from django.db.migrations.exceptions import IrreversibleError
from django.db.migrations.operations.base import Operation

from apscheduler_tasklock.django.configuration import configuration
from apscheduler_tasklock.schema.drift import BASE
from apscheduler_tasklock.schema.migrations import (
    LOCK_TIMEOUT,
    UPGRADE_LOCK,
    revision_sql,
    revisions,
    version_table,
)
from apscheduler_tasklock.schema.table import quoted


class TakeTablesTo(Operation):
    """Takes the tables to a revision of the library, and back to the one before.

    What there is to do is found in the library's own table of versions, so that the tables may
    have been created or upgraded by ``apscheduler-tasklock upgrade`` as well. It happens on
    Django's connection. Databases that are not PostgreSQL, or that a router keeps the app from,
    are left alone.

    :param revision: of the library
    :param before: the revision before it; ``"base"`` before the first
    """

    reduces_to_sql = True
    reversible = True

    def __init__(self, revision: str, before: str = BASE) -> None:
        self.revision = revision
        self.before = before

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return what a squashed migration writes for this."""
        arguments = {"revision": self.revision, "before": self.before}
        return type(self).__qualname__, [], arguments

    def describe(self) -> str:
        """Return what ``migrate --plan`` and ``sqlmigrate`` show."""
        return f"Task lock tables, revision {self.revision}"

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change no model: the app's models are not managed by Django."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, _from_state: Any, _to_state: Any
    ) -> None:
        """Do what is to be done from the revision that the tables have."""
        if not _is_for(schema_editor, app_label):
            return
        if schema_editor.collect_sql:
            schema_editor.execute(_statements(self.before, self.revision), params=None)
            return
        there = _revision_there(schema_editor)
        # A revision of a newer version of the library has this one behind it.
        if there in revisions() and _is_before(there, self.revision):
            _execute(schema_editor, there, self.revision)

    def database_backwards(
        self, app_label: str, schema_editor: Any, _from_state: Any, _to_state: Any
    ) -> None:
        """Undo what is to be undone from the revision that the tables have.

        :raises IrreversibleError: a newer version of the library has upgraded them
        """
        if not _is_for(schema_editor, app_label):
            return
        if schema_editor.collect_sql:
            schema_editor.execute(_statements(self.revision, self.before), params=None)
            return
        there = _revision_there(schema_editor)
        if there not in revisions():
            raise IrreversibleError(
                f"the task lock tables are at revision {there} of a newer version of this library; "
                "take them back with that version"
            )
        if _is_before(self.before, there):
            _execute(schema_editor, there, self.before)


def _is_for(schema_editor: Any, app_label: str) -> bool:
    connection = schema_editor.connection
    return connection.vendor == "postgresql" and bool(
        router.allow_migrate(connection.alias, app_label)
    )


def _is_before(revision: str, other: str) -> bool:
    known = revisions()
    return known.index(revision) < known.index(other)


def _version_table() -> str:
    configured = configuration()
    name = quoted(str(version_table(configured.schema, configured.table)["version_table"]))
    return f"{quoted(configured.schema)}.{name}" if configured.schema else name


def _revision_there(schema_editor: Any) -> str:
    """Return the revision of the tables; nobody else migrates until this transaction ends."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('lock_timeout')")
        [before] = cursor.fetchone()
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [LOCK_TIMEOUT])
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [UPGRADE_LOCK])
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [before])
        table = _version_table()
        cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [table])
        if not cursor.fetchone()[0]:
            return BASE
        cursor.execute(f"SELECT version_num FROM {table}")  # noqa: S608  # quoted
        found = cursor.fetchone()
    return str(found[0]) if found else BASE


def _execute(schema_editor: Any, start: str, end: str) -> None:
    schema = configuration().schema
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("SELECT to_regnamespace(%s) IS NOT NULL", [schema and quoted(schema)])
        has_schema = cursor.fetchone()[0]
    if start == BASE:
        # A downgrade has left it, empty. The statements create it.
        schema_editor.execute(f"DROP TABLE IF EXISTS {_version_table()}", params=None)
    schema_editor.execute(_statements(start, end, has_schema=has_schema), params=None)


def _statements(start: str, end: str, *, has_schema: bool = False) -> str:
    configured = configuration()
    return revision_sql(
        start, end, schema=configured.schema, table=configured.table, has_schema=has_schema
    )
