"""What a database error means: away for now, or wrong for good and by which remedy."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
import sqlalchemy.exc
from sqlalchemy import Table

from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockSchemaError,
)
from apscheduler_tasklock.table import DEFAULT_TABLE, quoted, quoted_name

UPGRADE_COMMAND = "apscheduler-tasklock upgrade"

# A prepared statement is unknown, or known already: pgbouncer has lent another connection than
# the one that it was prepared on.
LOST_STATEMENT_STATES = ("26000", "42P05")

# PostgreSQL's error classes and codes that another attempt can overcome.
_TRANSIENT_STATES = (
    "08",  # connection exceptions
    "25006",  # read-only transaction: a standby, until the failover reaches it
    "40",  # transaction rollback: deadlock, serialization
    "53",  # insufficient resources: too many connections
    "55P03",  # lock not available
    "57",  # operator intervention: shutdown, restart, statement timeout
    "58",  # system error: the server's input and output
    "XX",  # internal error
    *LOST_STATEMENT_STATES,
)


# Of these, and of errors that are not transient, it is certain that nothing was committed. A
# connection that is shut down, or lost, may have been so after the commit.
_UNDONE_STATES = ("25006", "40", "53", "55P03", "57014", *LOST_STATEMENT_STATES)

# libpq has no error codes for refused logins.
_REFUSALS = (
    "authentication failed",
    "does not exist",
    "no pg_hba.conf entry",
    "not permitted",
    "no password supplied",
)

# Nor for a server that is full.
_FULL = ("too many connections", "too many clients", "remaining connection slots")


def explain_away(error: BaseException) -> TaskLockDatabaseError | None:
    """Return the error to raise if ``error`` says that the database is away, else ``None``."""
    if isinstance(error, sqlalchemy.exc.TimeoutError):
        return TaskLockDatabaseError("no connection became free in time: all are in use")
    cause = getattr(error, "orig", None) or error
    if not isinstance(cause, psycopg.Error):
        return None
    if cause.sqlstate is not None:
        away = cause.sqlstate.startswith(_TRANSIENT_STATES)
    else:
        away = isinstance(cause, (psycopg.OperationalError, psycopg.InterfaceError))
        away = away and not _refused_login(str(cause))
    return TaskLockDatabaseError(one_line(cause)) if away else None


def is_conflict(error: BaseException | None) -> bool:
    """Tell whether the server is there, and undid the statement because of another one.

    Where transactions are serializable by default, that is what one gets that waited for another.
    """
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    return (state or "").startswith(("40", "55P03"))


def is_full(error: BaseException | None) -> bool:
    """Tell whether the server is there, and has no connection left."""
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is not None:
        return isinstance(error, psycopg.errors.TooManyConnections)
    # Of several hosts, another one may be away.
    said = str(error)
    return "Multiple connection attempts" not in said and any(sign in said for sign in _FULL)


def is_row_locked(error: BaseException | None) -> bool:
    """Tell whether the server is there, and somebody has locked the task's row."""
    return isinstance(error, psycopg.errors.LockNotAvailable)


def surely_undone(error: psycopg.Error) -> bool:
    """Tell whether the statement that failed with this error has certainly changed nothing."""
    state = error.sqlstate
    if state is None:
        return False
    return state.startswith(_UNDONE_STATES) or not state.startswith(_TRANSIENT_STATES)


def _refused_login(message: str) -> bool:
    """Tell a login that will be refused again from a server that is away."""
    return any(sign in message for sign in _REFUSALS)


def one_line(error: BaseException) -> str:
    """Return the message of a database error as one line, without the statement."""
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    # libpq indents its hints by a tab.
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    return primary or "; ".join(lines)


def explain_refusal(
    error: psycopg.Error, table: Table, user: str | None, where: str
) -> TaskLockError:
    """Return the error to raise for a failure that another attempt would not overcome.

    :param error: what PostgreSQL said
    :param table: the task lock table
    :param user: the role that asked, if known
    :param where: the database, for people
    """
    if isinstance(error, (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)):
        return missing_table(table)
    if isinstance(error, psycopg.errors.UndefinedColumn):
        return old_table(table)
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return missing_grant(table, user, one_line(error))
    return TaskLockError(f"the task lock database ({where}) refuses: {one_line(error)}")


def missing_table(table: Table) -> TaskLockSchemaError:
    """Return the error for a database that was never upgraded."""
    return TaskLockSchemaError(
        f"the table {table.fullname} does not exist in this database; "
        f"create it with: {_upgrade_command(table)}"
    )


def old_table(table: Table, missing: str = "") -> TaskLockSchemaError:
    """Return the error for a table that an older version of this library made."""
    what = f" (it has no column {missing})" if missing else ""
    return TaskLockSchemaError(
        f"the table {table.fullname} is older than this library{what}; "
        f"bring it up to date with: {_upgrade_command(table)}"
    )


def missing_grant(table: Table, user: str | None, said: str = "") -> TaskLockSchemaError:
    """Return the error for a role that may not use the table.

    :param said: PostgreSQL's own words, as it may be a policy that stands against it
    """
    role = quoted(user) if user else "<the application's role>"
    schema = f"GRANT USAGE ON SCHEMA {quoted(table.schema)} TO {role}; " if table.schema else ""
    why = f" (PostgreSQL: {said})" if said else ""
    return TaskLockSchemaError(
        f"role {role} may not use the table {table.fullname}{why}; let its owner run: "
        f"{schema}GRANT SELECT, INSERT, UPDATE ON {quoted_name(table)} TO {role}"
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


def _upgrade_command(table: Table) -> str:
    schema = f" --schema {table.schema}" if table.schema else ""
    name = f" --table {table.name}" if table.name != DEFAULT_TABLE else ""
    return f"{UPGRADE_COMMAND}{schema}{name}"
