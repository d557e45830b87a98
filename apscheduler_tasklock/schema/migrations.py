"""Creates, upgrades and drops the tables of the task lock, with Alembic."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from alembic import command, op
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, TextClause, create_engine, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateSchema

from apscheduler_tasklock._database.connection import connect_parameters
from apscheduler_tasklock._database.sqlstates import one_line
from apscheduler_tasklock._database.url import given_or_environment_database, parse_url
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockError, TaskLockSchemaError
from apscheduler_tasklock.schema.check import DOWNGRADE_COMMAND, UPGRADE_COMMAND
from apscheduler_tasklock.schema.drift import (
    BASE,
    Execute,
    FoundTables,
    Plan,
    dropping,
    find_tables_and_revision,
    is_of_drift,
    is_of_rights,
    newer_tables_error,
    not_as_noted_error,
    upgrading,
    wrong_role_error,
)
from apscheduler_tasklock.schema.table import (
    DEFAULT_TABLE,
    VERSION_SUFFIX,
    identifier,
    literal,
    tables_of,
    task_lock_table,
)

logger = logger_of(__name__)

# The advisory lock on which replicas wait for each other when they upgrade at the same time. The
# number is arbitrary.
UPGRADE_LOCK = 0x7461736B6C6F636B

# Limits the wait for another process's migration.
LOCK_TIMEOUT = "60s"
# Limits the seconds of connecting to one host.
_CONNECT_TIMEOUT = 10


@dataclass(frozen=True)
class Migrated:
    """The outcome of a migration.

    :ivar changed: whether the migration changed something
    :ivar notes: texts to log or print for the user
    """

    changed: bool
    notes: tuple[str, ...] = ()


def upgrade(
    database: str | URL | None = None,
    *,
    schema: str | None = None,
    table: str = DEFAULT_TABLE,
    revision: str = "head",
) -> bool:
    """Create the tables, or bring them up to date.

    Replicas may call this function at the same moment; one of them does the work. A missing schema
    is created. Tables that were dropped are created again, and a warning is logged. Tables that a
    newer version of this library has upgraded stay as they are, and a warning is logged, too.

    :param database: a PostgreSQL URL of a role that may create tables; by default that in the
        environment's ``TASKLOCK_DATABASE_URL``
    :param schema: schema of the table; with ``None`` the ``search_path`` decides
    :param table: name of the table
    :param revision: an Alembic revision of this library
    :return: whether the upgrade changed something
    :raises TaskLockOptionError: ``database`` is not a PostgreSQL URL, or ``schema`` or ``table`` is
        no valid name
    :raises TaskLockSchemaError: the role may not change the tables, or no released version of this
        library made them; the message says what to do
    :raises sqlalchemy.exc.SQLAlchemyError: the database is unavailable, or rejects a statement
    """
    migrated = upgrade_tables(database, schema=schema, table=table, revision=revision)
    log_notes(migrated.notes)
    return migrated.changed


def upgrade_tables(
    database: str | URL | None, *, schema: str | None, table: str, revision: str = "head"
) -> Migrated:
    """Do what :func:`upgrade` does, but return the notes instead of logging them."""
    return _run(database, schema, table, lambda config: command.upgrade(config, revision))


def downgrade(
    database: str | URL | None = None,
    *,
    schema: str | None = None,
    table: str = DEFAULT_TABLE,
    revision: str = "base",
) -> bool:
    """Downgrade the tables to a revision; ``"base"`` drops them. See :func:`upgrade`.

    :return: whether the downgrade changed something. A downgrade never creates anything.
    :raises TaskLockSchemaError: the role may not change the tables, or a newer version of this
        library has upgraded them
    """
    return _run(database, schema, table, lambda config: command.downgrade(config, revision)).changed


def print_upgrade_sql(*, schema: str | None = None, table: str = DEFAULT_TABLE) -> None:
    """Print the statements of a first upgrade to standard output, for a DBA. Needs no database."""
    command.upgrade(_config(schema, table), "head", sql=True)


def migrate(
    connection: Connection | None,
    *,
    schema: str | None = None,
    table: str = DEFAULT_TABLE,
    revision: str = "head",
) -> None:
    """Migrate the tables to a revision within an application's own migration.

    In the application's Alembic script: ``migrate(op.get_bind())`` in ``upgrade()``, and
    ``migrate(op.get_bind(), revision="base")`` in ``downgrade()``. The statements run in the
    connection's transaction, which the caller commits. The revision is noted in the table
    ``task_lock_alembic_version``, not in the application's version table.

    Under ``alembic upgrade --sql`` the statements are printed among the application's statements.
    Printed statements of an upgrade are for a database without our tables, and those of a downgrade
    are for a database with all of them.

    :param connection: an SQLAlchemy connection; ``None`` in Alembic's offline mode, where
        ``op.get_bind()`` returns ``None``
    :param schema: schema of the table; with ``None`` the ``search_path`` decides
    :param table: name of the table
    :param revision: an Alembic revision of this library, newer or older than the noted revision;
        ``"base"`` drops the tables
    :raises TaskLockError: there is no connection, and no offline migration is running
    :raises TaskLockSchemaError: as :func:`upgrade` and :func:`downgrade`
    """
    offline = {}
    if not isinstance(connection, Connection):  # in offline mode it is None, or a mock
        connection = None
        offline = _offline_options(starts_at="head" if revision == BASE else None)
    context = _context_to(revision, schema, table, connection, offline)
    log_notes(run_migrations(context, schema, table).notes)


def revisions() -> list[str]:
    """Return ``"base"`` and the revisions of this library, the oldest first."""
    scripts = ScriptDirectory(str(scripts_folder()))
    known = [script.revision for script in scripts.iterate_revisions("head", BASE)]
    return [BASE, *reversed(known)]


def revision_sql(
    start: str,
    end: str,
    *,
    schema: str | None = None,
    table: str = DEFAULT_TABLE,
    has_schema: bool = False,
) -> str:
    """Return the statements that migrate the tables from one revision to another.

    The statements do not begin or end a transaction. See :func:`revisions`.

    :param has_schema: whether the schema exists; if not, the statements create it
    """
    statements = StringIO()
    offline = {
        "as_sql": True,
        "output_buffer": statements,
        "literal_binds": True,
        "starting_rev": None if start == BASE else start,
    }
    context = _context_to(end, schema, table, None, offline)
    operations = Operations(context)
    if schema is not None and start == BASE and not has_schema:
        operations.execute(CreateSchema(schema, if_not_exists=True))
    context.run_migrations(op=operations, table=table, schema=schema)
    return statements.getvalue().strip()


def _context_to(
    revision: str,
    schema: str | None,
    table: str,
    connection: Connection | None,
    offline: dict[str, Any],
) -> MigrationContext:
    """Return a context that upgrades or downgrades the tables to a revision."""
    task_lock_table(table, schema)  # raises an error if a name is invalid
    scripts = ScriptDirectory(str(scripts_folder()))

    def to_revision(heads: Any, _context: MigrationContext) -> Any:
        # These two methods are private. Alembic's own commands call them, too.
        if revision == BASE or _is_older(scripts, revision, heads):
            return scripts._downgrade_revs(revision, heads)
        return scripts._upgrade_revs(revision, heads)

    return MigrationContext.configure(
        connection,
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},  # so that names may contain percent signs
        opts={
            "fn": to_revision,
            "script": scripts,
            "destination_rev": revision,
            **version_table(schema, table),
            **offline,
        },
    )


def _is_older(scripts: ScriptDirectory, revision: str, heads: Any) -> bool:
    """Return whether a revision is older than the database's heads."""
    if revision.startswith(("+", "-")):  # a relative revision, which Alembic resolves
        return revision.startswith("-")
    before = {script.revision for script in scripts.iterate_revisions(heads, "base")}
    before -= {heads} if isinstance(heads, str) else set(heads)
    wanted = scripts.get_revision(revision)
    return wanted is not None and wanted.revision in before


def _offline_options(starts_at: str | None) -> dict[str, Any]:
    """Return the options that print statements to the output of the running migration.

    :param starts_at: the revision that the database is assumed to have
    """
    try:
        outer = op.get_context()
    except NameError:  # raised by Alembic outside a migration
        outer = None
    if outer is None or not outer.as_sql:
        raise TaskLockError("migrate() needs a connection, except in Alembic's --sql mode")
    return {
        "as_sql": True,
        "output_buffer": outer.output_buffer,
        "literal_binds": True,
        "starting_rev": starts_at,
    }


def include_name(
    name: str | None,
    type_: str,
    parent_names: MutableMapping[Any, str | None],
    *,
    schema: str | None = None,
    table: str = DEFAULT_TABLE,
) -> bool:
    """Keep an application's ``alembic revision --autogenerate`` from dropping our tables.

    In the application's ``env.py``: ``context.configure(..., include_name=include_name)``. With
    another table or schema name, ``functools.partial(include_name, schema="jobs")``.

    :return: ``False`` for the tables of the task lock and their version table, else ``True``
    """
    if type_ != "table" or parent_names.get("schema_name") != schema:
        return True
    ours = [each.name for each in tables_of(task_lock_table(table, schema))]
    return name not in (*ours, version_table(schema, table)["version_table"])


def version_table(schema: str | None, table: str) -> dict[str, Any]:
    """Return Alembic's options that name the version table of the task lock's tables."""
    place = None if schema is None else identifier(schema)
    return {"version_table": f"{table}{VERSION_SUFFIX}", "version_table_schema": place}


def run_migrations(context: MigrationContext, schema: str | None, table: str) -> Migrated:
    """Run the migrations of a configured Alembic context, one process at a time.

    :raises TaskLockSchemaError: as :func:`upgrade` and :func:`downgrade`
    """
    schema, table = None if schema is None else identifier(schema), identifier(table)
    if context.as_sql or context.opts.get("dont_mutate"):  # dont_mutate: `alembic current`
        if schema is not None and context.as_sql and not _to_base(context):
            Operations(context).execute(CreateSchema(schema, if_not_exists=True))
        context.run_migrations(op=Operations(context), table=table, schema=schema)
        return Migrated(context.as_sql)
    connection = context.connection
    assert connection is not None
    execute = partial(_rows, connection)
    wait_for_others(execute)
    there = find_tables_and_revision(execute, schema, table)
    plan = _plan(context, there)
    before = context.get_current_heads()
    try:
        notes = _carry_out(plan, context, there, schema, table)
    except DBAPIError as error:
        explained = _explained(error, there, context)
        if explained is None:
            raise
        raise explained from error
    changed = bool(plan.statements) or context.get_current_heads() != before
    return Migrated(changed, notes)


def _carry_out(
    plan: Plan, context: MigrationContext, there: FoundTables, schema: str | None, table: str
) -> tuple[str, ...]:
    """Execute a plan, and return the notes for the user."""
    connection = context.connection
    assert connection is not None
    for statement in plan.statements:
        connection.execute(_as_it_is(statement))
    if not plan.runs_revisions:
        return plan.notes
    if schema is not None and there.schema is None and not _to_base(context):
        connection.execute(CreateSchema(schema, if_not_exists=True))
    context.run_migrations(op=Operations(context), table=table, schema=schema)
    if not _to_head(context):
        return plan.notes
    # A table of an earlier revision may be missing.
    _, *known = revisions()
    completing = upgrading(
        find_tables_and_revision(partial(_rows, connection), schema, table), known
    )
    for statement in completing.statements:
        connection.execute(_as_it_is(statement))
    return (*plan.notes, *completing.notes)


def _explained(
    error: DBAPIError, there: FoundTables, context: MigrationContext
) -> TaskLockSchemaError | None:
    if error.orig is None:
        return None
    if is_of_drift(error.orig):
        return not_as_noted_error(there, one_line(error.orig))
    if is_of_rights(error.orig):
        what = DOWNGRADE_COMMAND if _to_base(context) else UPGRADE_COMMAND
        return wrong_role_error(there, what, one_line(error.orig))
    return None


def _plan(context: MigrationContext, there: FoundTables) -> Plan:
    """Return the plan for the command of a context and the tables that were found."""
    _, *known = revisions()
    if _to_base(context):
        return dropping(there, known)
    # Alembic's commands pass a function that is named after the command. `migrate` passes the
    # function `to_revision`.
    what = context.opts["fn"].__name__
    if what == "downgrade" or (what == "to_revision" and _goes_back(context, there, known)):
        if there.noted is not None and there.noted not in known:
            raise newer_tables_error(there, known[-1])
    elif what in ("upgrade", "to_revision"):
        return upgrading(there, known)
    return Plan(runs_revisions=True)  # also for `alembic stamp`


def _to_head(context: MigrationContext) -> bool:
    return context.opts.get("destination_rev") in ("head", "heads", revisions()[-1])


def _to_base(context: MigrationContext) -> bool:
    return context.opts.get("destination_rev") == BASE


def _goes_back(context: MigrationContext, there: FoundTables, known: list[str]) -> bool:
    """Return whether `migrate` is to downgrade the tables."""
    revision = str(context.opts["destination_rev"])
    if there.noted is None or revision in ("head", "heads"):
        return False
    return there.noted not in known or _is_older(context.opts["script"], revision, there.noted)


def _rows(connection: Connection, sql: str) -> Sequence[Any]:
    return connection.execute(_as_it_is(sql)).fetchall()


def _as_it_is(sql: str) -> TextClause:
    return text(sql.replace(":", r"\:"))  # a plain colon would begin a parameter


def wait_for_others(execute: Execute) -> None:
    """Take the lock of migrations until the end of the transaction."""
    [[before]] = execute("SELECT pg_catalog.current_setting('lock_timeout')")
    execute(f"SELECT pg_catalog.set_config('lock_timeout', {literal(LOCK_TIMEOUT)}, true)")
    execute(f"SELECT pg_catalog.pg_advisory_xact_lock({UPGRADE_LOCK})")
    # Restore the limit, because the transaction may be an application's.
    execute(f"SELECT pg_catalog.set_config('lock_timeout', {literal(before)}, true)")


def migration_engine(database: str | URL | None) -> Engine:
    """Return an engine for migrations, which pools no connections.

    :raises TaskLockOptionError: ``database`` is not a PostgreSQL URL
    """
    url = parse_url(given_or_environment_database(database))
    parameters = {"connect_timeout": _CONNECT_TIMEOUT, **connect_parameters(url)}
    return create_engine(url, poolclass=NullPool, connect_args=parameters)


def _run(database: str | URL | None, schema: str | None, table: str, run: Any) -> Migrated:
    with migration_engine(database).connect() as connection:
        config = _config(schema, table, connection)
        run(config)
    migrated: Migrated = config.attributes["migrated"]  # set by env.py
    return migrated


def log_notes(notes: Sequence[str]) -> None:
    """Log the notes of a migration."""
    for note in notes:
        logger.warning("%s", note)


def _config(schema: str | None, table: str, connection: Connection | None = None) -> Config:
    task_lock_table(table, schema)  # raises an error if a name is invalid
    config = Config(attributes={"connection": connection, "schema": schema, "table": table})
    config.set_main_option("script_location", str(scripts_folder()).replace("%", "%%"))
    return config


def scripts_folder() -> Path:
    """Return the folder of the migrations: in the installed package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parent / "alembic"
