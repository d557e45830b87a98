"""The operations of the app's migrations: they migrate the tables to a revision of the library.

Alembic prints the statements, and Django's connection runs them, so that they are in Django's
transaction with any driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.core.management import CommandError
from django.db import connections, router, transaction
from django.db.migrations.operations.base import Operation
from django.db.migrations.recorder import MigrationRecorder
from django.db.utils import Error

from apscheduler_tasklock._database.sqlstates import one_line
from apscheduler_tasklock.django.configuration import configuration
from apscheduler_tasklock.errors import TaskLockSchemaError
from apscheduler_tasklock.schema.check import UPGRADE_COMMAND
from apscheduler_tasklock.schema.drift import (
    BASE,
    FoundTables,
    Plan,
    dropping,
    find_tables,
    find_tables_and_revision,
    is_of_rights,
    newer_tables_error,
    upgrading,
    wrong_role_error,
)
from apscheduler_tasklock.schema.migrations import (
    log_notes,
    revision_sql,
    revisions,
    wait_for_others,
)

APP = "apscheduler_tasklock"


class MigrateTables(Operation):
    """Upgrades the tables to a revision of the library, or downgrades them to the revision before.

    The plan depends on the tables and on the library's own version table, because
    ``apscheduler-tasklock upgrade`` may have created or upgraded the tables. The statements run on
    Django's connection. Databases that are not PostgreSQL, or that a router excludes, are skipped.

    :param revision: the revision of the library
    :param before: the revision before that one; ``"base"`` before the first
    """

    reduces_to_sql = True
    reversible = True

    def __init__(self, revision: str, before: str) -> None:
        self.revision = revision
        self.before = before

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return the parts from which a squashed migration makes this operation again."""
        arguments = {"revision": self.revision, "before": self.before}
        return type(self).__qualname__, [], arguments

    def describe(self) -> str:
        """Return the text for ``migrate --plan`` and ``sqlmigrate``."""
        return f"Task lock tables, revision {self.revision}"

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change no model, because Django does not manage the app's models."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, _from_state: Any, _to_state: Any
    ) -> None:
        """Upgrade the tables from the revision that they have.

        :raises CommandError: the role lacks a right, or no released version made the tables
        """
        if not _is_for(schema_editor.connection, app_label):
            return
        if schema_editor.collect_sql:
            schema_editor.execute(_statements(self.before, self.revision), params=None)
            return
        if not _is_done_by_others(schema_editor.connection):
            _upgrade(schema_editor, self.revision)

    def database_backwards(
        self, app_label: str, schema_editor: Any, _from_state: Any, _to_state: Any
    ) -> None:
        """Downgrade the tables from the revision that they have.

        :raises CommandError: the role lacks a right, or a newer version has upgraded the tables
        """
        if not _is_for(schema_editor.connection, app_label):
            return
        if schema_editor.collect_sql:
            schema_editor.execute(_statements(self.revision, self.before), params=None)
            return
        _, *known = revisions()

        def planned(there: FoundTables) -> Plan:
            if self.before == BASE:
                return dropping(there, known)
            if there.noted is not None and there.noted not in known:
                raise newer_tables_error(there, known[-1])
            return Plan(runs_revisions=bool(there.tables))  # else there is nothing to alter

        with _migrating(schema_editor, planned) as (there, plan):
            start = there.noted or BASE
            if plan.runs_revisions and _is_before(self.before, start):
                _execute(schema_editor, start, self.before, there)


def make_anew(using: str, plan: Any = None, **_others: Any) -> None:
    """Create tables again that were dropped after they had been migrated.

    Called after ``manage.py migrate``. Django itself does not notice that tables were dropped,
    because it reads only its own table of migrations. Nothing is done if no table is missing and
    the role may not change the tables, because a DBA then maintains the tables.

    :param using: the database's alias
    :param plan: the migrations that ``migrate`` has just run, or faked; ``None`` after ``flush``
    :raises CommandError: as in a migration
    """
    connection = connections[using]
    if plan is None or any(step.app_label == APP for step, _ in plan):
        return
    if not _is_for(connection, APP):
        return
    if not any(app == APP for app, _ in MigrationRecorder(connection).applied_migrations()):
        return
    if _find(connection).is_kept_by_others:
        return
    with transaction.atomic(using=using), connection.schema_editor(atomic=False) as schema_editor:
        _upgrade(schema_editor, revisions()[-1])


def _find(connection: Any) -> FoundTables:
    configured = configuration()
    with connection.cursor() as cursor:
        return find_tables(partial(_rows, cursor), configured.schema, configured.table)


def _is_done_by_others(connection: Any) -> bool:
    """Return whether a DBA has brought the tables up to date, which this role may not change."""
    there = _find(connection)
    return there.is_kept_by_others and not there.incomplete


def _upgrade(schema_editor: Any, revision: str) -> None:
    _, *known = revisions()
    with _migrating(schema_editor, lambda there: upgrading(there, known)) as (there, plan):
        # If the tables were missing, the plan's statements have deleted the noted revision, so the
        # revisions run from the first on.
        start = there.noted if there.tables and there.noted else BASE
        if plan.runs_revisions and _is_before(start, revision):
            _execute(schema_editor, start, revision, there)
    if revision == known[-1]:
        # A table of an earlier revision may be missing.
        with _migrating(schema_editor, lambda there: upgrading(there, known)):
            pass


@contextmanager
def _migrating(
    schema_editor: Any, planned: Callable[[FoundTables], Plan]
) -> Iterator[tuple[FoundTables, Plan]]:
    """Plan the migration, and execute the statements that come before the revisions.

    No other process migrates until this transaction ends.
    """
    configured = configuration()
    try:
        with schema_editor.connection.cursor() as cursor:
            execute = partial(_rows, cursor)
            wait_for_others(execute)
            there = find_tables_and_revision(execute, configured.schema, configured.table)
        plan = planned(there)
    except TaskLockSchemaError as error:
        raise CommandError(str(error)) from error
    try:
        for statement in plan.statements:
            schema_editor.execute(statement, params=None)
        yield there, plan
    except Error as error:
        cause = error.__cause__
        if cause is None or not is_of_rights(cause):
            raise
        raise CommandError(
            str(wrong_role_error(there, UPGRADE_COMMAND, one_line(cause)))
        ) from error
    log_notes(plan.notes)


def _rows(cursor: Any, statement: str) -> Any:
    cursor.execute(statement)
    return cursor.fetchall()


def _is_for(connection: Any, app_label: str) -> bool:
    return connection.vendor == "postgresql" and bool(
        router.allow_migrate(connection.alias, app_label)
    )


def _is_before(revision: str, other: str) -> bool:
    known = revisions()
    return known.index(revision) < known.index(other)


def _execute(schema_editor: Any, start: str, end: str, there: FoundTables) -> None:
    if start == BASE and there.versions is not None:
        # A downgrade has left an empty version table. It is dropped, because the statements create
        # it again.
        schema_editor.execute(f"DROP TABLE {there.versions_name}", params=None)
    has_schema = there.schema is not None
    schema_editor.execute(_statements(start, end, has_schema=has_schema), params=None)


def _statements(start: str, end: str, *, has_schema: bool = False) -> str:
    configured = configuration()
    return revision_sql(
        start, end, schema=configured.schema, table=configured.table, has_schema=has_schema
    )
