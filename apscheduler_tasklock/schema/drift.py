"""Compares the tables in a database with the noted revision, and plans what a migration does.

Alembic reads only its own version table. But tables may have been dropped or restored without the
version table, or made by a newer version of this library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Table
from sqlalchemy.schema import CreateIndex, CreateTable

from apscheduler_tasklock.errors import TaskLockSchemaError
from apscheduler_tasklock.schema.check import DOWNGRADE_COMMAND, UPGRADE_COMMAND, with_table_options
from apscheduler_tasklock.schema.locking import (
    granting_like,
    identifying,
    qualified,
    when_unlocked,
)
from apscheduler_tasklock.schema.table import (
    DIALECT,
    JOB_SUFFIX,
    VERSION_SUFFIX,
    literal,
    quoted,
    quoted_name,
    storage_parameters,
    tables_of,
    task_lock_table,
)

# Alembic's name for the state before the first revision.
BASE = "base"

# The SQLSTATEs of missing rights.
_INSUFFICIENT_PRIVILEGE, _NO_SCHEMA = "42501", "3F000"
# The SQLSTATEs of tables and columns that a revision expects and does not find, or finds already.
_DRIFT = ("42P01", "42703", "42P07", "42701", "42704", "42710")

_LOOK = """
    SELECT ours.name, namespace.nspname::text, pg_get_userbyid(found.relowner)::text,
           has_table_privilege(found.oid, 'SELECT'), pg_has_role(found.relowner, 'USAGE'),
           ARRAY(SELECT attname::text FROM pg_catalog.pg_attribute
                 WHERE attrelid = found.oid AND attnum > 0 AND NOT attisdropped),
           current_user::text, place.nspname::text,
           CASE WHEN pg_get_userbyid(place.nspowner) <> 'pg_database_owner'
                THEN pg_get_userbyid(place.nspowner) ELSE pg_get_userbyid(datdba) END::text,
           pg_get_userbyid(datdba)::text
    FROM (VALUES {names}) AS ours (place, name)
    JOIN pg_catalog.pg_database ON datname = current_database()
    LEFT JOIN pg_catalog.pg_namespace AS place ON place.nspname = {schema_or_first}
    LEFT JOIN (pg_catalog.pg_class AS found
               JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = found.relnamespace)
        ON found.relname = ours.name AND found.relkind IN ('r', 'p') AND {is_ours}
    ORDER BY ours.place
"""


@dataclass(frozen=True)
class FoundTable:
    """A table that was found.

    :ivar schema: the table's schema
    :ivar owner: the table's owner
    :ivar readable: whether the connection's role may read the table
    :ivar changeable: whether that role may alter and drop the table, because the role is the owner
        or a member of the owner
    :ivar columns: the names of the table's columns
    """

    schema: str
    owner: str
    readable: bool
    changeable: bool
    columns: frozenset[str]


@dataclass(frozen=True)
class FoundTables:
    """The tables that a database has.

    :ivar declared: the task lock table as this library declares it
    :ivar tables: the tables that exist, by name, without the version table
    :ivar versions: the version table, if it exists
    :ivar noted: the revision in the version table, if there is one
    :ivar role: the connection's role
    :ivar schema: the schema in which tables are created; ``None`` if it does not exist
    :ivar schema_owner: the schema's owner; for the schema public, the database's owner
    :ivar database_owner: the database's owner
    """

    declared: Table
    tables: Mapping[str, FoundTable]
    versions: FoundTable | None
    noted: str | None
    role: str
    schema: str | None
    schema_owner: str | None
    database_owner: str

    @property
    def missing(self) -> list[Table]:
        """The tables that do not exist."""
        return [table for table in tables_of(self.declared) if table.name not in self.tables]

    @property
    def is_kept_by_others(self) -> bool:
        """Whether no table is missing, but the role may not change every table."""
        found = [*self.tables.values(), *([self.versions] if self.versions else [])]
        return not self.missing and not all(each.changeable for each in found)

    @property
    def incomplete(self) -> tuple[Table, str] | None:
        """The first table that lacks a needed column, and that column; or ``None``."""
        for table in tables_of(self.declared):
            there = self.tables.get(table.name)
            for column in table.columns if there else ():
                if there and column.name not in there.columns:
                    return table, column.name
        return None

    @property
    def unknown(self) -> str:
        """A column that this library does not declare, for a message; an empty text if none is."""
        for table in tables_of(self.declared):
            there = self.tables.get(table.name)
            for column in sorted(there.columns - set(table.columns.keys())) if there else ():
                return f"the column {column} of {table.fullname}"
        return ""

    @property
    def versions_name(self) -> str:
        """The version table's name, qualified and quoted for SQL."""
        schema = self.versions.schema if self.versions else self.declared.schema
        return qualified(self.declared.name + VERSION_SUFFIX, schema)


@dataclass(frozen=True)
class Plan:
    """The plan of a migration: statements to execute, and whether the revisions run after them.

    :ivar statements: to be executed in this order
    :ivar runs_revisions: whether the revisions are run after the statements
    :ivar notes: texts to log or print for the user
    """

    statements: tuple[str, ...] = ()
    runs_revisions: bool = False
    notes: tuple[str, ...] = ()


Execute = Callable[[str], Sequence[Any]]
"""Executes a statement without parameters, and returns its rows."""


def find_tables_and_revision(execute: Execute, schema: str | None, table: str) -> FoundTables:
    """Return the tables that the database has, with the noted revision.

    :param execute: executes statements on the connection that migrates
    :raises TaskLockSchemaError: the role may not read the version table
    """
    there = find_tables(execute, schema, table)
    if there.versions is None:
        return there
    if not there.versions.readable:
        said = f"permission denied for table {table}{VERSION_SUFFIX}"
        raise wrong_role_error(there, UPGRADE_COMMAND, said)
    noted = execute(f"SELECT version_num FROM {there.versions_name}")
    return replace(there, noted=noted[0][0] if noted else None)


def find_tables(execute: Execute, schema: str | None, table: str) -> FoundTables:
    """Return the tables that the database has, without the noted revision. Needs no rights.

    :param execute: as for :func:`find_tables_and_revision`
    """
    declared = task_lock_table(table, schema)
    ours = [each.name for each in tables_of(declared)]
    names = [*ours, table + VERSION_SUFFIX]
    rows = execute(
        _LOOK.format(
            names=", ".join(f"({place}, {literal(name)})" for place, name in enumerate(names)),
            schema_or_first="current_schema()" if schema is None else literal(schema),
            is_ours=(
                "pg_table_is_visible(found.oid)"
                if schema is None
                else f"namespace.nspname = {literal(schema)}"
            ),
        )
    )
    found = {
        name: FoundTable(place, owner, readable, changeable, frozenset(columns))
        for name, place, owner, readable, changeable, columns, *_ in rows
        if place is not None
    }
    role, place, schema_owner, database_owner = rows[0][6:]
    versions = found.pop(table + VERSION_SUFFIX, None)
    return FoundTables(declared, found, versions, None, role, place, schema_owner, database_owner)


def upgrading(there: FoundTables, known: Sequence[str]) -> Plan:
    """Return the plan of an upgrade.

    :param known: the revisions of this library, the oldest first
    :raises TaskLockSchemaError: the tables are not as a released version of this library made them
    """
    noted, head = there.noted, known[-1]
    if not there.tables:
        return _from_nothing(there)
    if noted in known and noted != head:
        return Plan(runs_revisions=True)
    if noted not in (None, head):
        return _left_to_newer(there, head)
    if there.incomplete:
        raise _made_otherwise(there, *there.incomplete)
    if noted is None and there.unknown:
        return Plan(
            notes=(
                f"no revision is noted, and {there.unknown} is a newer version's: left as it is; "
                "that version's `upgrade` notes the revision",
            )
        )
    return _completed(there, head)


def _left_to_newer(there: FoundTables, head: str) -> Plan:
    newer = f"revision {there.noted}; this one knows {head} as the last"
    lacking = _named(there.missing) or _lacking(there)
    if lacking:
        raise TaskLockSchemaError(
            f"the tables are of a newer version of this library ({newer}), and this version "
            f"cannot use them, because {lacking} is missing; use that version"
        )
    return Plan(
        notes=(
            f"the tables of {there.declared.fullname} are of a newer version of this library "
            f"({newer}), and left as they are",
        )
    )


def _completed(there: FoundTables, head: str) -> Plan:
    """Return the plan that makes missing tables, and notes the revision if none is noted."""
    statements, notes = [], []
    if there.missing:
        statements += _creating(there, there.missing)
        notes.append(f"{_named(there.missing)}: missing beside the other tables, and made anew")
    if there.noted is None:
        statements += _noting(there, head)
        notes.append(f"no revision was noted beside the tables: noted {head}")
    return Plan(tuple(statements), notes=tuple(notes), runs_revisions=not statements)


def _from_nothing(there: FoundTables) -> Plan:
    if there.noted is None:
        return Plan(runs_revisions=True)
    return Plan(
        (f"DELETE FROM {there.versions_name}",),
        runs_revisions=True,
        notes=(
            f"the tables were missing, although revision {there.noted} was noted: made anew, "
            "without their earlier rows; other roles have no rights on them, except by default",
        ),
    )


def dropping(there: FoundTables, known: Sequence[str]) -> Plan:
    """Return the plan of a downgrade that drops the tables.

    The revisions' own downgrades are not run, because some of the tables may be missing.

    :raises TaskLockSchemaError: a newer version or another program made the tables
    """
    if there.tables and there.noted not in known:
        if there.noted is not None:
            raise newer_tables_error(there, known[-1])
        if there.incomplete:
            raise _made_otherwise(there, *there.incomplete)
    statements = []
    if there.tables:
        dropped = ", ".join(qualified(name, found.schema) for name, found in there.tables.items())
        statements.append(when_unlocked(f"DROP TABLE {dropped}"))
    if there.noted is not None:
        statements.append(f"DELETE FROM {there.versions_name}")
    return Plan(tuple(statements))


def newer_tables_error(there: FoundTables, head: str) -> TaskLockSchemaError:
    """Return the error for tables that this library cannot downgrade."""
    return TaskLockSchemaError(
        f"the tables of {there.declared.fullname} are of a newer version of this library (revision "
        f"{there.noted}; this one knows {head} as the last); downgrade with that version"
    )


def is_of_rights(error: BaseException | None) -> bool:
    """Return whether a driver's error is about missing rights."""
    return _code_of(error) in (_INSUFFICIENT_PRIVILEGE, _NO_SCHEMA)


def is_of_drift(error: BaseException | None) -> bool:
    """Return whether a driver's error says that the tables are not as the noted revision made them.

    :param error: the error of a revision
    """
    return _code_of(error) in _DRIFT


def _code_of(error: BaseException | None) -> str | None:
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def not_as_noted_error(there: FoundTables, said: str) -> TaskLockSchemaError:
    """Return the error for tables that a revision cannot change.

    :param said: PostgreSQL's message
    """
    return TaskLockSchemaError(
        f"the tables of {there.declared.fullname} are not as revision {there.noted} has made them, "
        f"which is noted (PostgreSQL: {said}); restore all of them and {there.versions_name} from "
        "one dump"
    )


def wrong_role_error(there: FoundTables, what: str, said: str) -> TaskLockSchemaError:
    """Return the error for a role that may not migrate the tables.

    :param what: the command to run as another role
    :param said: PostgreSQL's message
    """
    role = quoted(there.role)
    problem = f"role {role} may not change the tables of the task lock (PostgreSQL: {said})"
    found = [*there.tables.values(), *([there.versions] if there.versions else [])]
    owners = sorted({each.owner for each in found} - {there.role})
    where = there.declared.schema
    if owners:
        named = " and ".join(map(quoted, owners))
        command = with_table_options(what, there.declared)
        remedy = f"they belong to role {named}, as which to run: {command}"
    elif there.schema is not None:
        remedy = (
            f"let role {quoted(there.schema_owner or '')}, which may grant that, run: "
            f"GRANT USAGE, CREATE ON SCHEMA {quoted(there.schema)} TO {role}"
        )
    elif where is not None:
        remedy = (
            f"let role {quoted(there.database_owner)}, the database's owner, run: "
            f"CREATE SCHEMA {quoted(where)} AUTHORIZATION {role}"
        )
    else:
        remedy = f"pass --schema, or name one: ALTER ROLE {role} SET search_path = ..."
    return TaskLockSchemaError(f"{problem}; {remedy}")


def _made_otherwise(there: FoundTables, table: Table, column: str) -> TaskLockSchemaError:
    if there.noted is not None:
        return TaskLockSchemaError(
            f"the table {table.fullname} has no column {column}, although revision {there.noted}, "
            "which has it, is noted; restore the column, or drop the tables with all stored jobs, "
            "pauses and the history, and create them with: "
            f"{with_table_options(DOWNGRADE_COMMAND, there.declared)} && "
            f"{with_table_options(UPGRADE_COMMAND, there.declared)}"
        )
    return TaskLockSchemaError(
        f"the table {table.fullname} has no column {column}, and no revision is noted: it is "
        "an older version's of this library, whose `upgrade` notes the revision and has to be run "
        "first, or another program's: take another name with --table, or another schema with "
        "--schema"
    )


def _lacking(there: FoundTables) -> str:
    """Return the first needed column that is missing, for a message; an empty text if none is."""
    if there.incomplete is None:
        return ""
    table, column = there.incomplete
    return f"the column {column} of {table.fullname}"


def _named(tables: Sequence[Table]) -> str:
    return ", ".join(table.fullname for table in tables)


def _creating(there: FoundTables, missing: Sequence[Table]) -> list[str]:
    """Return the statements that create missing tables, with the grants of an existing table."""
    first_name, first = next(iter(there.tables.items()))
    # The missing tables are created in the schema of the existing ones, because the search_path may
    # begin with another schema by now.
    declared = task_lock_table(there.declared.name, first.schema)
    names = {table.name for table in missing}
    statements = []
    for table in tables_of(declared):
        if table.name not in names:
            continue
        statements.append(str(CreateTable(table).compile(dialect=DIALECT)))
        parameters = storage_parameters(table, declared)
        if parameters:
            settings = ", ".join(f"{name} = {value}" for name, value in parameters.items())
            statements.append(f"ALTER TABLE {quoted_name(table)} SET ({settings})")
        statements += [
            str(CreateIndex(index).compile(dialect=DIALECT))
            for index in sorted(table.indexes, key=lambda index: str(index.name))
        ]
        deletes = table.name == declared.name + JOB_SUFFIX
        if deletes:
            statements.append(identifying(table.name, first.schema))
        statements.append(granting_like(first_name, table.name, first.schema, deletes=deletes))
    return statements


def _noting(there: FoundTables, revision: str) -> list[str]:
    """Return the statements that note a revision, as Alembic does."""
    first = next(iter(there.tables.values()))
    name = there.declared.name + VERSION_SUFFIX
    versions = qualified(name, there.versions.schema if there.versions else first.schema)
    key = quoted(f"{name}_pkc")
    return [
        f"CREATE TABLE IF NOT EXISTS {versions} (version_num VARCHAR(32) NOT NULL, "
        f"CONSTRAINT {key} PRIMARY KEY (version_num))",
        f"INSERT INTO {versions} (version_num) VALUES ({literal(revision)})",
    ]
