"""``flask tasklock``: the command line with the application's database."""

from __future__ import annotations

import sys

import click
from flask.cli import ScriptInfo, pass_script_info

from apscheduler_tasklock.flask.configuration import Configuration


class _Command(click.Command):
    """A command that gets all words after its name as they are, also ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["arguments"] = tuple(args)
        return []


@click.command(
    "tasklock",
    cls=_Command,
    short_help="See and steer the task locks of this application.",
    add_help_option=False,  # because `apscheduler-tasklock` prints the help of all commands
)
@pass_script_info
def tasklock(script: ScriptInfo, arguments: tuple[str, ...]) -> None:
    """Run ``apscheduler-tasklock`` with the database that the application is configured with."""
    from apscheduler_tasklock.cli import main

    app = script.load_app()

    def defaults() -> dict[str, str]:
        configuration = Configuration.of(app)
        names = ("schema", "table", "namespace")
        given = {name: configuration.executor_options.get(name) for name in names}
        given["database"] = configuration.database_text
        return {name: str(value) for name, value in given.items() if value}

    sys.exit(main(arguments, prog="flask tasklock", defaults=defaults))
