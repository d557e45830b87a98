"""The check at start, that the task lock table is there, new enough, and permitted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import dict_row
from sqlalchemy import Table

from apscheduler_tasklock._database.errors import one_line
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError, TaskLockSchemaError
from apscheduler_tasklock.schema.table import (
    DEFAULT_TABLE,
    job_table,
    quoted,
    quoted_name,
    replica_table,
    run_table,
)

# For which commands row-level security hides the rows of `found` from this role.
WITHOUT_POLICY = """CASE WHEN row_security_active(found.oid) THEN ARRAY(
    SELECT command
    FROM (VALUES ('SELECT', 'r'), ('INSERT', 'a'), ('UPDATE', 'w')) AS _ (command, code)
    WHERE NOT EXISTS (
        SELECT FROM pg_catalog.pg_policy
        WHERE polrelid = found.oid AND polpermissive AND polcmd IN ('*', code::"char")
              AND EXISTS (SELECT FROM unnest(polroles) AS role
                          WHERE role = 0 OR pg_has_role(role, 'USAGE'))))
ELSE '{}' END"""

# From the catalogue, which every role may read: the run-time role has rights on the task lock
# table only, and so cannot read the version that Alembic notes in a table of its own.
_CHECK = f"""
    SELECT now() AS database_time, found.oid IS NOT NULL AS table_exists,
           ARRAY(SELECT attname::text FROM pg_catalog.pg_attribute
                 WHERE attrelid = found.oid AND attnum > 0 AND NOT attisdropped) AS columns,
           has_table_privilege(found.oid, 'SELECT') AND has_table_privilege(found.oid, 'INSERT')
           AND has_table_privilege(found.oid, 'UPDATE') AS permitted,
           has_table_privilege(found.oid, 'DELETE') AS may_delete,
           current_setting('transaction_read_only') = 'on' AS read_only,
           {WITHOUT_POLICY} AS without_policy
    FROM (SELECT to_regclass($1) AS oid) AS found
"""

_NEEDED_RIGHTS = ("SELECT", "INSERT", "UPDATE")

_MISSING_RIGHTS = """
    SELECT ARRAY(SELECT command
                 FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS command
                 WHERE NOT has_table_privilege(to_regclass($1), command)) AS missing
"""


def check_table(cursor: Any, table: Table, user: str | None) -> datetime:
    """Make sure that the table can be used as it is.

    Columns that this library does not know are left alone: during a rolling deployment the table
    may be newer than some of the replicas.

    :param cursor: a psycopg cursor
    :param table: the task lock table as this library declares it
    :param user: the role that asks, for the message
    :return: the database's time
    :raises TaskLockSchemaError: the table is missing, old, or not permitted
    :raises TaskLockDatabaseError: the database can only be read, as during a failover
    """
    cursor.row_factory = dict_row
    found = cursor.execute(_CHECK, [quoted_name(table)]).fetchone()
    if not found["table_exists"]:
        raise missing_table(table)
    missing = [column.name for column in table.columns if column.name not in found["columns"]]
    if missing:
        raise old_table(table, missing[0])
    if not found["permitted"]:
        raise missing_grant(table, user)
    if found["without_policy"]:  # else the rows would not be there, and each claim be refused
        raise missing_policy(table, user, found["without_policy"])
    if found["read_only"]:
        raise TaskLockDatabaseError(
            "it is read-only: a standby, or default_transaction_read_only is on"
        )
    return found["database_time"]  # type: ignore[no-any-return]  # the cursor's rows are untyped


def check_job_table(cursor: Any, table: Table, user: str | None) -> None:
    """Make sure that the jobs' table can be used as it is.

    :param cursor: a psycopg cursor
    :param table: the task lock table as this library declares it
    :param user: the role that asks, for the message
    :raises TaskLockSchemaError: the table is missing, old, or not permitted
    """
    jobs = job_table(table)
    cursor.row_factory = dict_row
    found = cursor.execute(_CHECK, [quoted_name(jobs)]).fetchone()
    if not found["table_exists"]:
        raise missing_table(table, jobs)
    missing = [column.name for column in jobs.columns if column.name not in found["columns"]]
    if missing:
        raise old_table(table, missing[0], jobs)
    if not (found["permitted"] and found["may_delete"]):
        raise missing_grant(jobs, user, rights=(*_NEEDED_RIGHTS, "DELETE"))
    if found["without_policy"]:
        raise missing_policy(jobs, user, found["without_policy"])


UPGRADE_COMMAND = "apscheduler-tasklock upgrade"
DOWNGRADE_COMMAND = "apscheduler-tasklock downgrade"


def explain_rejection(
    error: psycopg.Error, table: Table, user: str | None, where: str
) -> TaskLockError:
    """Return the error to raise for a failure that another attempt would not overcome.

    :param error: what PostgreSQL said
    :param table: the task lock table
    :param user: the role that asked, if known
    :param where: the database, shown in messages
    """
    if isinstance(error, psycopg.errors.UndefinedTable):
        return missing_table(table, _named(table, one_line(error)))
    if isinstance(error, psycopg.errors.InvalidSchemaName):
        return missing_table(table)
    if isinstance(error, psycopg.errors.UndefinedColumn):
        return old_table(table)
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        said = one_line(error)
        refused = _named(table, said)
        deletes = ("DELETE",) if refused is job_table(table) else ()
        return missing_grant(refused, user, said, (*_NEEDED_RIGHTS, *deletes))
    return TaskLockError(f"the task lock database ({where}) rejects this: {one_line(error)}")


def explain_refusal(
    cursor: Any, error: psycopg.errors.InsufficientPrivilege, table: Table, user: str | None
) -> TaskLockSchemaError:
    """Return the error for a statement that a role may not run, with the rights that it lacks.

    :param cursor: of the connection that was refused, outside a transaction
    :param table: the task lock table
    :param user: the role that asked, for the message
    """
    said = one_line(error)
    refused = _named(table, said)
    try:
        cursor.row_factory = dict_row
        found = cursor.execute(_MISSING_RIGHTS, [quoted_name(refused)]).fetchone()["missing"]
    except psycopg.Error:  # as without a right on the schema
        found = []
    # The right to delete is named where it alone is missing: most roles work without it, except
    # with the jobs' table.
    deletes = refused is job_table(table)
    rights = [right for right in found if right != "DELETE" or deletes] or found
    return missing_grant(refused, user, said, rights)


def _named(table: Table, said: str) -> Table:
    """Return the table that PostgreSQL names: the task lock table, or one beside it."""
    beside = (run_table(table), replica_table(table), job_table(table))
    return next((each for each in beside if each.name in said), table)


def missing_table(table: Table, beside: Table | None = None) -> TaskLockSchemaError:
    """Return the error for a database that was never upgraded.

    :param beside: the table that is missing, if it is one of those beside the task lock table
    """
    missing = table if beside is None else beside
    return TaskLockSchemaError(
        f"the table {missing.fullname} does not exist in this database; "
        f"create it with: {command(UPGRADE_COMMAND, table)}"
    )


def old_table(table: Table, missing: str = "", beside: Table | None = None) -> TaskLockSchemaError:
    """Return the error for a table that an unreleased version of this library made.

    No other lacks a column, as long as there is one revision.

    :param beside: the table that is old, if it is one of those beside the task lock table
    """
    what = f" (it has no column {missing})" if missing else ""
    old = table if beside is None else beside
    return TaskLockSchemaError(
        f"the table {old.fullname} was made by an unreleased version of this library{what}; drop "
        f"and create with: {command(DOWNGRADE_COMMAND, table)} && {command(UPGRADE_COMMAND, table)}"
    )


def missing_grant(
    table: Table, user: str | None, said: str = "", rights: Sequence[str] = ()
) -> TaskLockSchemaError:
    """Return the error for a role that may not use the table.

    :param table: the task lock table, or one beside it
    :param said: PostgreSQL's own words, as it may be a policy that stands against it
    :param rights: that it lacks; by default all that a replica needs
    """
    granted = ", ".join(rights or _NEEDED_RIGHTS)
    role = quoted(user) if user else "<the application's role>"
    schema = f"GRANT USAGE ON SCHEMA {quoted(table.schema)} TO {role}; " if table.schema else ""
    why = f" (PostgreSQL: {said})" if said else ""
    return TaskLockSchemaError(
        f"role {role} may not use the table {table.fullname}{why}; let its owner run: "
        f"{schema}GRANT {granted} ON {quoted_name(table)} TO {role}"
    )


def missing_policy(table: Table, user: str | None, commands: Sequence[str]) -> TaskLockSchemaError:
    """Return the error for a role from which row-level security hides the rows.

    :param commands: for which it has no policy
    """
    role = quoted(user) if user else "<the application's role>"
    # Each role has one of its own.
    policy = quoted(f"task_lock_of_{user or 'the_application'}"[:60])
    return TaskLockSchemaError(
        f"row-level security is on for the table {table.fullname}, and role {role} has no policy "
        f"for {', '.join(commands)}; let its owner run: CREATE POLICY {policy} ON "
        f"{quoted_name(table)} TO {role} USING (true) WITH CHECK (true)"
    )


def command(what: str, table: Table) -> str:
    """Return a command with the options that name a task lock table."""
    schema = f" --schema {shlex.quote(table.schema)}" if table.schema else ""
    name = f" --table {shlex.quote(table.name)}" if table.name != DEFAULT_TABLE else ""
    return f"{what}{schema}{name}"
