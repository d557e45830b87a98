"""Runs the task lock's migrations, for the command `alembic` and for the library.

The library passes a connection and the table's names in `config.attributes`. The command takes them
from `-x database=...`, `-x schema=...` and `-x table=...`, or the database's URL from
TASKLOCK_DATABASE_URL.
"""

from logging.config import fileConfig

from alembic import context
from sqlalchemy import Connection

from apscheduler_tasklock._database.url import given_or_environment_database
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.schema.migrations import (
    log_notes,
    migration_engine,
    run_migrations,
    version_table,
)
from apscheduler_tasklock.schema.table import DEFAULT_TABLE

config = context.config
attributes = config.attributes
arguments = context.get_x_argument(as_dictionary=True) if config.cmd_opts else {}
schema = attributes.get("schema") or arguments.get("schema")
table = attributes.get("table") or arguments.get("table") or DEFAULT_TABLE


def main() -> None:
    """Print the statements, or run them on the library's or a new connection."""
    if config.config_file_name is not None:
        fileConfig(config.config_file_name, disable_existing_loggers=False)
    if context.is_offline_mode():
        context.configure(
            dialect_name="postgresql",
            dialect_opts={"paramstyle": "named"},  # so that names may contain percent signs
            literal_binds=True,
            **version_table(schema, table),
        )
        run()
    elif attributes.get("connection") is not None:
        run_on(attributes["connection"])
    else:
        how = "Pass alembic -x database=postgresql://user@host/name upgrade head"
        database = given_or_environment_database(arguments.get("database"), how)
        with migration_engine(database).connect() as connection:
            run_on(connection)


def run_on(connection: Connection) -> None:
    """Run the migrations on a connection."""
    context.configure(connection=connection, **version_table(schema, table))
    run()


def run() -> None:
    """Run the migrations in the configured context, as one transaction."""
    with context.begin_transaction():
        migrated = run_migrations(context.get_context(), schema, table)
    attributes["migrated"] = migrated
    if config.cmd_opts:
        log_notes(migrated.notes)


try:
    main()
except TaskLockError as error:
    if not config.cmd_opts:  # the library's caller gets the error, the command's user its text
        raise
    raise SystemExit(str(error)) from None
