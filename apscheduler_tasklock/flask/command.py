"""``flask tasklock``: the command line with the application's database."""

from __future__ import annotations

import sys
from typing import Any

import click
from flask import current_app
from flask.cli import with_appcontext

from apscheduler_tasklock.flask.configuration import Configuration


@click.command(
    "tasklock",
    short_help="See and steer the task locks of this application.",
    add_help_option=False,  # `apscheduler-tasklock --help` has all commands
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@with_appcontext
def tasklock(arguments: tuple[str, ...]) -> None:
    """Run ``apscheduler-tasklock`` with the database that the application is configured with."""
    from apscheduler_tasklock.cli import main

    options = Configuration.of(current_app).executor_options
    defaults: dict[str, Any] = {
        name: options[name] for name in ("schema", "table", "namespace") if options.get(name)
    }
    defaults["database"] = Configuration.of(current_app).database_text
    sys.exit(main(arguments, prog="flask tasklock", defaults=defaults))
