"""What a database error means: away for now, or wrong for good and by which remedy."""

from __future__ import annotations

import psycopg
import sqlalchemy.exc

from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
)

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
