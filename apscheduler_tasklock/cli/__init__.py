"""The command ``apscheduler-tasklock``."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence

import psycopg
from sqlalchemy.exc import DBAPIError

from apscheduler_tasklock._database.sqlstates import one_line
from apscheduler_tasklock._lock.command_lines import PROGRAM
from apscheduler_tasklock.cli.check import UNKNOWN, answer_monitor
from apscheduler_tasklock.cli.completion import answer_shell
from apscheduler_tasklock.cli.exits import (
    FAILED,
    INTERRUPTED,
    message_of,
    remedy_after,
    say,
    status_of,
)
from apscheduler_tasklock.cli.parser import (
    CommandParser,
    Default,
    MonitorParser,
    build_parser,
    joined,
)
from apscheduler_tasklock.cli.target import with_hint
from apscheduler_tasklock.errors import TaskLockError, TaskLockNotFoundError, TaskLockOptionError
from apscheduler_tasklock.locks import TaskLocks


def main(
    arguments: Sequence[str] | None = None,
    *,
    prog: str = PROGRAM,
    defaults: Callable[[], Mapping[str, Default]] = dict,
    locks: TaskLocks | None = None,
) -> int:
    """Run the command line and return its exit status; see ``apscheduler-tasklock --help``.

    :param arguments: the words of the command line; by default those of this process
    :param prog: the program's name in messages, if a framework's command runs it
    :param defaults: returns defaults of the options ``database``, ``schema``, ``table`` and
        ``namespace``. ``database`` may be a function, which is called if no database is given. If
        one of these functions raises an error, the error is reported, but ``--help`` works.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # A task's name may have characters that the stream's encoding lacks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    is_check = next((word for word in given if not word.startswith("-")), None) == "check"
    try:
        try:
            if is_check:
                return answer_monitor(
                    lambda: _run(MonitorParser, prog, defaults, given, locks),
                    as_json="--json" in given,
                )
            return _answer(lambda: _run(CommandParser, prog, defaults, given, locks))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # because a failure can be reported here, and not at the exit
    except OSError as error:
        _give_up_output()
        if not isinstance(error, BrokenPipeError):  # a closed pipe is usual, as in `runs | head`
            say(f"cannot write: {error}")
        return UNKNOWN if is_check else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _give_up_output() -> None:
    """Discard unprinted text, because Python would try to print it again at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(
    parser_class: type[CommandParser],
    prog: str,
    defaults: Callable[[], Mapping[str, Default]],
    given: list[str],
    locks: TaskLocks | None,
) -> int:
    failure, known = None, dict[str, Default]()
    try:
        known = dict(defaults())
    except TaskLockError as error:
        failure = error
    for word in given:
        _check_text(word)
    # `--help` ends the process here, so it works without defaults.
    parser = build_parser(parser_class, prog, known)
    answer_shell(parser)
    options = parser.parse_args(joined(given))
    if failure is not None:
        raise failure
    options.locks = locks
    try:
        status: int = options.run(options)
    except TaskLockNotFoundError as error:
        raise with_hint(options, error) from None
    return status


def _check_text(word: str) -> None:
    try:
        word.encode()
    except UnicodeEncodeError:
        # Python reads bytes that are not valid as lone surrogates, which cannot be sent.
        raise TaskLockOptionError(f"the argument {word!r} is not valid UTF-8") from None


def _answer(run: Callable[[], int]) -> int:
    try:
        return run()
    except TaskLockError as error:
        say(message_of(error))
        return status_of(error)
    except (DBAPIError, psycopg.Error) as error:
        # The driver's message is shown, because SQLAlchemy's message repeats the statement.
        cause = getattr(error, "orig", None) or error
        refused = isinstance(cause, psycopg.Error) and cause.sqlstate is not None
        what = "the database refused" if refused else "cannot use the database"
        say(f"{what}: {one_line(cause)}{remedy_after(error)}")
        return FAILED
