"""The command ``apscheduler-tasklock``."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence

import psycopg
from sqlalchemy.exc import DBAPIError

from apscheduler_tasklock._database.errors import one_line
from apscheduler_tasklock._lock.commands import PROGRAM
from apscheduler_tasklock.cli.check import UNKNOWN, answer_monitor
from apscheduler_tasklock.cli.exits import FAILED, INTERRUPTED, message_of, say, status_of
from apscheduler_tasklock.cli.parser import Default, MonitorParser, build_parser, needs_defaults
from apscheduler_tasklock.errors import TaskLockError


def main(
    arguments: Sequence[str] | None = None,
    *,
    prog: str = PROGRAM,
    defaults: Callable[[], Mapping[str, Default]] = dict,
) -> int:
    """Run the command line and return its exit status; see ``apscheduler-tasklock --help``.

    :param arguments: by default the process's own
    :param prog: what it is called as, where a framework's command runs it
    :param defaults: returns those of the options ``database``, ``schema``, ``table`` and
        ``namespace``. ``database`` may be a function, which is called where no other is given. What
        both raise is told as other errors are, and by no command's ``--help``.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name may be in any script
            stream.reconfigure(errors="backslashreplace")
    is_check = next((word for word in given if not word.startswith("-")), None) == "check"
    try:
        try:
            if is_check:
                return answer_monitor(
                    lambda: _run(MonitorParser, prog, defaults, given),
                    as_json="--json" in given,
                )
            return _answer(lambda: _run(argparse.ArgumentParser, prog, defaults, given))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # now, when it can still be told that this fails
    except OSError as error:
        _give_up_output()
        if not isinstance(error, BrokenPipeError):  # as in `apscheduler-tasklock runs | head`
            say(f"cannot write: {error}")
        return UNKNOWN if is_check else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _give_up_output() -> None:
    """Let nobody have what is left to print; else Python would try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(
    parser_class: type[argparse.ArgumentParser],
    prog: str,
    defaults: Callable[[], Mapping[str, Default]],
    given: list[str],
) -> int:
    failure, known = None, dict[str, Default]()
    try:
        known = dict(defaults())
    except TaskLockError as error:
        failure = error
    # The parser may end here, as it does for `--help`, which needs no defaults.
    options = build_parser(parser_class, prog, known).parse_args(given)
    if failure is not None and needs_defaults(options):
        raise failure
    status: int = options.run(options)
    return status


def _answer(run: Callable[[], int]) -> int:
    try:
        return run()
    except TaskLockError as error:
        say(message_of(error))
        return status_of(error)
    except (DBAPIError, psycopg.Error) as error:
        # SQLAlchemy's message repeats the statement; the driver's says what is wrong.
        cause = getattr(error, "orig", None) or error
        refused = isinstance(cause, psycopg.Error) and cause.sqlstate is not None
        what = "the database refused" if refused else "cannot use the database"
        say(f"{what}: {one_line(cause)}")
        return FAILED
