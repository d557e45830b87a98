"""``manage.py tasklock``: runs the command line with the project's database."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, OutputWrapper

from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock.cli import main
from apscheduler_tasklock.django.configuration import configuration
from apscheduler_tasklock.django.database import database_url
from apscheduler_tasklock.errors import TaskLockOptionError


class Command(BaseCommand):
    """Runs ``apscheduler-tasklock`` with the project's database, schema, table and namespace."""

    help = "See and steer the task locks of this project, as apscheduler-tasklock does."
    requires_system_checks: Sequence[str] = ()  # so that it also works when a check fails

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command line for ``manage.py``, and exit with its status.

        :param argv: the words of the command, from ``manage.py`` on
        """
        # Django has handled these options already. All other options are the command line's.
        handled = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        handled.add_argument("--settings")
        handled.add_argument("--pythonpath")
        _, arguments = handled.parse_known_args(argv[2:])
        sys.exit(_run(arguments, f"{os.path.basename(argv[0])} {argv[1]}"))

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """Print the help of the command line, for ``manage.py help tasklock``."""
        _run(["--help"], f"{os.path.basename(prog_name)} {subcommand}")

    def add_arguments(self, parser: Any) -> None:
        """Accept all arguments, as in ``call_command("tasklock", "pause", "sync-prices")``."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def handle(self, *, arguments: Sequence[str], **options: Any) -> None:
        """Run the command line for ``call_command``.

        :param options: ``stdout`` and ``stderr`` redirect the output
        :raises CommandError: the command has failed; ``returncode`` is its exit status
        """
        with ExitStack() as redirected:
            for name, redirect in (("stdout", redirect_stdout), ("stderr", redirect_stderr)):
                if options.get(name) is not None:
                    # Without ending="" Django's wrapper would add line breaks.
                    redirected.enter_context(redirect(OutputWrapper(options[name], ending="")))
            try:
                status = _run(arguments, "manage.py tasklock")
            except SystemExit as ended:  # raised by the parser, for `--help` or wrong usage
                status = int(ended.code or 0)
        if status:
            raise CommandError(f"tasklock ended with the status {status}", returncode=status)


def _run(arguments: Sequence[str], prog: str) -> int:
    return main(arguments, prog=prog, defaults=_defaults)


def _defaults() -> dict[str, str | Callable[[], str]]:
    try:
        configured = configuration()
    except ImproperlyConfigured as error:
        raise TaskLockOptionError(str(error)) from error
    given = {
        "schema": configured.schema,
        "table": configured.table,
        "namespace": configured.namespace,
    }
    return {"database": _database, **{name: value for name, value in given.items() if value}}


def _database() -> str:
    try:
        return parse_url(database_url()).render_as_string(hide_password=False)
    except ImproperlyConfigured as error:
        raise TaskLockOptionError(str(error)) from error
