"""The exit statuses of the command line, and its lines on standard error."""

from __future__ import annotations

import re
import sys

from apscheduler_tasklock._database.sqlstates import UnconfirmedError
from apscheduler_tasklock._doctor.remedies import (
    NONE_WRITABLE,
    READ_ONLY,
    SEVERAL_SERVERS,
)
from apscheduler_tasklock._lock.command_lines import PROGRAM
from apscheduler_tasklock._lock.words import printable
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockNotFoundError,
    TaskLockOptionError,
    TaskLockStateError,
    TaskLockUnknownError,
)

OK = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
FORBIDDEN = 4
"""A task's state forbids the command."""
WAIT_OVER = 5
"""The awaited run did not end within the time of ``--wait``."""
RUN_FAILED = 6
"""The awaited run failed."""
NOT_KNOWN = 7
"""It is not known whether the change was made, because no answer came within ``--timeout``."""
INTERRUPTED = 130
"""Ctrl-C. Shells use the same number."""

# The SQLSTATE of a statement that a read-only server rejects.
_READ_ONLY_TRANSACTION = "25006"

_STATUSES: tuple[tuple[type[TaskLockError], int], ...] = (
    (TaskLockNotFoundError, NOT_FOUND),
    (TaskLockStateError, FORBIDDEN),
    (TaskLockOptionError, USAGE),
    (TaskLockUnknownError, NOT_KNOWN),
)


def status_of(error: TaskLockError) -> int:
    """Return the exit status of an error."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), FAILED)


def message_of(error: TaskLockError) -> str:
    """Return the message of an error."""
    if isinstance(error, TaskLockUnknownError):
        return f"{error}{remedy_after(error)}"
    if isinstance(error, TaskLockDatabaseError):
        return f"the database is unavailable: {error}{remedy_after(error)}"
    return str(error)


def remedy_after(error: Exception) -> str:
    """Return what to do about an error, to be put behind its message; ``""`` if it is not known.

    The message alone is not enough, because a server may tell it in another language.
    """
    cause = getattr(error, "orig", None) or error.__cause__ or error
    is_of_writes = getattr(cause, "sqlstate", None) == _READ_ONLY_TRANSACTION
    if isinstance(error, UnconfirmedError):
        return "; `apscheduler-tasklock doctor` says what to do"
    if not is_of_writes and "read-only" not in str(error):
        return ""
    return f"; {NONE_WRITABLE if SEVERAL_SERVERS in str(error) else READ_ONLY}"


def without_passwords(text: str) -> str:
    """Return a text with the passwords of its URLs as ``***``, for an URL in the wrong place."""
    return re.sub(r"(://[^\s:/@]*):[^\s/]*@", r"\1:***@", text)


def say(message: str) -> None:
    """Write a line to standard error. Standard output is for data alone."""
    line = without_passwords(printable(message))
    print(f"{PROGRAM}: {line}", file=sys.stderr, flush=True)


def is_asked() -> bool:
    """Return whether questions can be asked, which needs a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def confirms(question: str) -> bool:
    """Ask on the terminal, and return whether the answer is yes."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
