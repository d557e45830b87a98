"""The command ``apscheduler-tasklock``."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import psycopg
from sqlalchemy.exc import DBAPIError

from apscheduler_tasklock._database.errors import one_line
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.schema.table import DEFAULT_TABLE

PROGRAM = "apscheduler-tasklock"
DATABASE_VARIABLE = "TASKLOCK_DATABASE_URL"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, or 1 if something failed."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except TaskLockError as error:
        return _failed(str(error))
    except (DBAPIError, psycopg.Error) as error:
        # SQLAlchemy's message repeats the statement; the driver's says what is wrong.
        cause = getattr(error, "orig", None) or error
        refused = isinstance(cause, psycopg.Error) and cause.sqlstate is not None
        what = "the database refused" if refused else "cannot use the database"
        return _failed(f"{what}: {one_line(cause)}")
    except BrokenPipeError:  # as in `apscheduler-tasklock upgrade --sql | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _failed(message: str) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="The task lock table of APScheduler's replicas."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    upgrade = commands.add_parser("upgrade", help="create the table, or bring it up to date")
    _add_table_options(upgrade)
    upgrade.add_argument("--sql", action="store_true", help="print the statements, run nothing")
    upgrade.set_defaults(run=_upgrade)

    downgrade = commands.add_parser("downgrade", help="drop the table")
    _add_table_options(downgrade)
    downgrade.set_defaults(run=_downgrade)

    demo = commands.add_parser("demo", help="watch replicas share jobs, and one of them die")
    _add_database_option(demo, "by default an embedded PostgreSQL, which goes with the demo")
    demo.add_argument("--replicas", type=_at_least_one, default=3, help="how many (default: 3)")
    demo.add_argument(
        "--seconds",
        type=_duration,
        default=30.0,
        help="how long (default: 30); from 12 on one of them is killed on the way",
    )
    demo.set_defaults(run=_demo)
    return parser


def _version() -> str:
    try:
        return version(PROGRAM)
    except PackageNotFoundError:  # run from a folder where it is not installed
        return "(not installed)"


def _add_database_option(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--database", metavar="URL", help=f"postgresql://user:password@host:5432/name; {default}"
    )


def _add_table_options(parser: argparse.ArgumentParser) -> None:
    _add_database_option(parser, f"by default the environment's {DATABASE_VARIABLE}")
    parser.add_argument("--schema", help="schema of the table (default: from the search_path)")
    parser.add_argument("--table", default=DEFAULT_TABLE, help="name (default: %(default)s)")


def _at_least_one(text: str) -> int:
    try:
        number = int(text)
    except ValueError:  # argparse would name this function in its message
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, not {text!r}")
    return number


def _duration(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:  # argparse would name this function in its message
        seconds = math.nan
    if not 1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 86400, not {text!r}")
    return seconds


def _database(options: argparse.Namespace) -> str:
    url = options.database or os.environ.get(DATABASE_VARIABLE)
    if not url:
        raise TaskLockError(
            f"which database? Pass --database postgresql://user@host/name, or set "
            f"{DATABASE_VARIABLE}"
        )
    return str(url)


def _upgrade(options: argparse.Namespace) -> int:
    from apscheduler_tasklock.schema import migrations as schema

    if options.sql:
        schema.print_upgrade_sql(schema=options.schema, table=options.table)
        return 0
    migrated = schema.upgrade(_database(options), schema=options.schema, table=options.table)
    name = _full_name(options)
    print(f"{name} is migrated" if migrated else f"nothing to migrate: {name} is up to date")
    return 0


def _downgrade(options: argparse.Namespace) -> int:
    from apscheduler_tasklock.schema import migrations as schema

    dropped = schema.downgrade(_database(options), schema=options.schema, table=options.table)
    name = _full_name(options)
    print(
        f"{name} is dropped"
        if dropped
        else f"nothing to downgrade: no migration of {name} is applied"
    )
    return 0


def _full_name(options: argparse.Namespace) -> str:
    return f"{options.schema}.{options.table}" if options.schema else str(options.table)


def _demo(options: argparse.Namespace) -> int:
    from apscheduler_tasklock.demo.run import run_demo

    return run_demo(options.database, options.replicas, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
