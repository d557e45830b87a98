"""What a database error means: unavailable for now, or wrong for good."""

from __future__ import annotations

import psycopg
import sqlalchemy.exc

from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

# A prepared statement is unknown, or known already: pgbouncer has given another connection than
# the one that it was prepared on.
LOST_STATEMENT_STATES = ("26000", "42P05")

# The server is there, and has undone the statement because of another one.
_CONFLICT_STATES = ("40", "55P03")

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
_ROLLED_BACK_STATES = ("25006", "40", "53", "55P03", "57014", *LOST_STATEMENT_STATES)

# libpq has no error codes for rejected logins.
_REJECTIONS = (
    "authentication failed",
    "does not exist",
    "no pg_hba.conf entry",
    "not permitted",
    "no password supplied",
)

# Nor for a server that is full.
_FULL = ("too many connections", "too many clients", "remaining connection slots")


class ConflictError(TaskLockDatabaseError):
    """The server is there, and undid the statement because of another one: no outage.

    Where transactions are serializable by default, that is what one gets that waited for another.
    """


class RowLockedError(ConflictError):
    """The server is there, and some session has the task's row locked."""


class UnstorableNameError(TaskLockError):
    """The database's encoding lacks a character of a task's name. Nothing was sent."""


class NoThreadError(TaskLockError):
    """No thread can be started that would renew a lease. Nothing runs then, also unlocked."""


class TableLockedError(TaskLockDatabaseError):
    """The server is there, and another session has a whole table locked.

    Nobody can claim, renew or release meanwhile, so it counts as an outage.
    """


class ServerFullError(TaskLockDatabaseError):
    """The server is there, and has no connection left."""


class NotSentError(TaskLockDatabaseError):
    """A request whose turn did not come in time. The database knows nothing of it."""


def as_unavailable(error: BaseException) -> TaskLockDatabaseError | None:
    """Return the error to raise if another attempt may succeed, else ``None``."""
    if isinstance(error, TaskLockDatabaseError):
        return error
    if isinstance(error, sqlalchemy.exc.TimeoutError):
        return TaskLockDatabaseError("no connection became free in time: all are in use")
    cause = getattr(error, "orig", None) or error
    if not isinstance(cause, psycopg.Error):
        return None
    state = cause.sqlstate
    if state is not None:
        if not state.startswith(_TRANSIENT_STATES):
            return None
    elif not isinstance(
        cause, (psycopg.OperationalError, psycopg.InterfaceError)
    ) or _is_rejected_login(str(cause)):
        return None
    return _kind(cause)(one_line(cause))


def _kind(error: psycopg.Error) -> type[TaskLockDatabaseError]:
    if isinstance(error, psycopg.errors.LockNotAvailable):
        return RowLockedError
    if (error.sqlstate or "").startswith(_CONFLICT_STATES):
        return ConflictError
    if _is_full(error):
        return ServerFullError
    return TaskLockDatabaseError


def _is_full(error: psycopg.Error) -> bool:
    if error.sqlstate is not None:
        return isinstance(error, psycopg.errors.TooManyConnections)
    # Of several hosts, another one may be unavailable.
    said = str(error)
    return "Multiple connection attempts" not in said and any(sign in said for sign in _FULL)


def is_rolled_back(error: BaseException) -> bool:
    """Tell whether the statement that failed with this error has certainly changed nothing."""
    if isinstance(error, (UnicodeError, UnstorableNameError)):
        return True  # it could not even be sent
    if isinstance(error, RowLockedError):
        return True
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    if state is None:
        return False
    return state.startswith(_ROLLED_BACK_STATES) or not state.startswith(_TRANSIENT_STATES)


def _is_rejected_login(message: str) -> bool:
    """Tell a login that will be rejected again from a server that is unavailable."""
    return any(sign in message for sign in _REJECTIONS)


def one_line(error: BaseException) -> str:
    """Return the message of a database error as one line, without the statement."""
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    # libpq indents its hints by a tab, and has two spaces after "FATAL:".
    lines = [
        " ".join(line.split())
        for line in str(error).splitlines()
        if line and not line.startswith("\t")
    ]
    return primary or "; ".join(lines)
