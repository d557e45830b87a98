"""Which database, table and tasks a command is about."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import psycopg
from sqlalchemy.exc import DBAPIError

from apscheduler_tasklock._database import rejections
from apscheduler_tasklock._database.url import given_or_environment_database
from apscheduler_tasklock._lock.patterns import is_pattern, unmatched
from apscheduler_tasklock.cli.exits import say
from apscheduler_tasklock.cli.text import did_you_mean
from apscheduler_tasklock.errors import TaskLockError, TaskLockNotFoundError
from apscheduler_tasklock.locks import TaskLocks

# Limits the seconds that a command waits for the database.
_TIMEOUT = 15.0

# Limits the names among which a misspelled one is looked for, so that the answer comes at once.
_MOST_NAMES = 5_000


def database_of(options: argparse.Namespace) -> str:
    """Return the database's URL, from the command line, a framework or the environment.

    :raises TaskLockOptionError: no URL is given, or the framework's database is not PostgreSQL
    """
    given = options.database() if callable(options.database) else options.database
    return str(given_or_environment_database(given, "Pass --database postgresql://user@host/name"))


@contextmanager
def task_locks(options: argparse.Namespace) -> Iterator[TaskLocks]:
    """Open the task locks that a command is about, unless they were given."""
    if options.locks is not None:
        yield options.locks
        return
    # An outage is not logged, because the error says the same in one line.
    logging.getLogger("apscheduler_tasklock").addHandler(logging.NullHandler())
    locks = TaskLocks(
        database_of(options),
        claim_timeout=getattr(options, "timeout", _TIMEOUT),
        schema=options.schema,
        table=options.table,
    )
    notes, notes_level = rejections.logger, rejections.logger.level
    handler = _Notes(logging.INFO)
    notes.addHandler(handler)
    notes.setLevel(logging.INFO)
    try:
        yield locks
    finally:
        locks.close()  # before the handler is removed, because close() may log notes, too
        notes.removeHandler(handler)
        notes.setLevel(notes_level)


class _Notes(logging.Handler):
    """Writes notes on missing tables and rights to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def name_of(options: argparse.Namespace, task: str) -> str:
    """Return a task's full name."""
    return f"{options.namespace}{task}"


def patterns_of(options: argparse.Namespace, given: Sequence[str]) -> list[str]:
    """Return the patterns with the namespace; without patterns, one for the whole namespace."""
    if not given and options.namespace:
        return [name_of(options, "*")]
    return [name_of(options, pattern) for pattern in given]


def with_hint(options: argparse.Namespace, error: TaskLockNotFoundError) -> TaskLockNotFoundError:
    """Return the error with a question for the name that is most like a misspelled one."""
    hint = ""
    with suppress(TaskLockError, DBAPIError, psycopg.Error), task_locks(options) as locks:
        if error.kind == "task":
            known = [task.name for task in locks.tasks(limit=_MOST_NAMES)]
        else:
            known = [job.id for job in locks.jobs()][:_MOST_NAMES]
        hint = next(filter(None, (did_you_mean(name, known) for name in error.names)), "")
    return TaskLockNotFoundError(error.names, error.kind, hint)


def check_names(
    patterns: Sequence[str], names: Iterable[str], kind: Literal["task", "job"] = "task"
) -> None:
    """Make sure that each pattern without ``*`` and ``?`` is the name of a task or a job.

    :raises TaskLockNotFoundError: a pattern is no such name, perhaps because it was mistyped
    """
    missing = [name for name in unmatched(patterns, names) if not is_pattern(name)]
    if missing:
        raise TaskLockNotFoundError(missing, kind)
