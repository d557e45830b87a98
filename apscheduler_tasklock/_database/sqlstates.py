"""Database errors by their SQLSTATEs: which another attempt can overcome, and which it cannot."""

from __future__ import annotations

import psycopg

from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

# A prepared statement is unknown, or exists already, because pgbouncer has changed the server
# connection since the statement was prepared.
LOST_STATEMENT_STATES = ("26000", "42P05")

# What the query for the session that has a table locked returns in place of a session which waits
# for a synchronous standby.
WAITS_FOR_STANDBY = "SyncRep"
# The message of an UnconfirmedError.
UNCONFIRMED = "commits wait for a synchronous standby, and none confirms them"

# The server is available, and has undone the statement because of another session's statement.
CONFLICT_STATES = ("40", "55P03")

# The server lacks something that only some statements need, such as space on a disk.
RESOURCE_STATES = ("53", "58", "XX")

# PostgreSQL's error classes and codes that another attempt can overcome.
TRANSIENT_STATES = (
    "08",  # connection exceptions
    "25006",  # read-only transaction: the server is a standby, at least until a failover
    "40",  # transaction rollback: deadlock, serialization
    "53",  # insufficient resources: too many connections
    "55P03",  # lock not available
    "57",  # operator intervention: shutdown, restart, statement timeout
    "58",  # system error: the server's input and output
    "XX",  # internal error
    *LOST_STATEMENT_STATES,
)


# Transient states after which it is certain that nothing was committed. The other transient states
# are in doubt, because a connection may have been lost or shut down after the commit.
_ROLLED_BACK_STATES = ("25006", "40", "53", "55P03", "57014", *LOST_STATEMENT_STATES)


class ConflictError(TaskLockDatabaseError):
    """The server has undone the statement because of another session's statement.

    The error is no outage. Where transactions are serializable by default, a statement that waited
    for another session's statement fails with this error.
    """


class RowLockedError(ConflictError):
    """Another session has the task's row locked, which is no outage."""


class UnstorableNameError(TaskLockError):
    """The database's encoding lacks a character of a task's name. Nothing was sent."""


class NoThreadError(TaskLockError):
    """No thread can be started to renew a lease. The job does not run, not even without a lock."""


class TableLockedError(TaskLockDatabaseError):
    """Another session has a whole table locked.

    It counts as an outage, because no replica can claim, renew or release meanwhile.
    """


class UnconfirmedError(TaskLockDatabaseError):
    """The server has committed the statement, but no synchronous standby has confirmed the commit.

    It counts as an outage. A failover to the standby would lose what the statement has written, so
    the statement is in doubt, and grants nothing.
    """


class ServerFullError(TaskLockDatabaseError):
    """The server has no connection left."""


class SlowReadError(psycopg.errors.QueryCanceled):
    """The server has ended a read that took too long, which is no outage."""


class NotSentError(TaskLockDatabaseError):
    """The request was not sent, because its turn did not come in time."""


def row_locked_error(said: str = "") -> RowLockedError:
    """Return the error of a statement that has found its row locked.

    :param said: what the server has said
    """
    return RowLockedError(f"another session has the row locked{said and f' ({said})'}")


def is_rolled_back(error: BaseException) -> bool:
    """Return whether the statement that failed with this error has certainly changed nothing."""
    if isinstance(error, (UnicodeError, UnstorableNameError)):
        return True  # the statement was not sent
    if isinstance(error, psycopg.DataError) and error.sqlstate is None:
        return True  # a value that psycopg cannot send
    if isinstance(error, RowLockedError):
        return True
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    if state is None:
        return False
    return state.startswith(_ROLLED_BACK_STATES) or not state.startswith(TRANSIENT_STATES)


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
