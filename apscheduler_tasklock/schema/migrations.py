"""Creating and upgrading the task lock table, with Alembic."""

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
from apscheduler_tasklock._database.errors import one_line
from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.schema.check import DOWNGRADE_COMMAND, UPGRADE_COMMAND
from apscheduler_tasklock.schema.drift import (
    BASE,
    Execute,
    Plan,
    There,
    dropping,
    is_of_rights,
    look,
    newer_than,
    upgrading,
    wrong_role,
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

# Any number will do as long as it is the same everywhere: replicas that upgrade at the same
# moment wait for each other on it.
UPGRADE_LOCK = 0x7461736B6C6F636B

LOCK_TIMEOUT = "60s"
_CONNECT_TIMEOUT = 10


@dataclass(frozen=True)
class Migrated:
    """What a migration has done.

    :ivar changed: whether there was anything to do
    :ivar notes: what a user is to be told
    """

    changed: bool
    notes: tuple[str, ...] = ()


def upgrade(
    database: str | URL,
    *,
    schema: str | None = None,
    table: str = DEFAULT_TABLE,
    revision: str = "head",
) -> bool:
    """Create the tables, or bring them up to date.

    Replicas may call this at the same moment; one of them does the work. The schema is created if
    it is missing. Tables that were dropped are made anew. Tables that a newer version of this
    library has upgraded are left as they are. A warning is logged of both.

    :param database: a PostgreSQL URL of a role that may create tables
    :param schema: schema of the table; ``None`` leaves it to the ``search_path``
    :param table: name of the table
    :param revision: an Alembic revision of this library
    :return: whether there was anything to do
    :raises TaskLockOptionError: ``database`` is not a PostgreSQL URL, or ``schema`` or ``table`` is
        no name that PostgreSQL can have
    :raises TaskLockSchemaError: the role may not do that, or the tables were made by an unreleased
        version of this library; the message says what to do
    :raises sqlalchemy.exc.SQLAlchemyError: the database is unavailable, or rejects that
    """
    migrated = upgrade_tables(database, schema=schema, table=table, revision=revision)
    log_notes(migrated.notes)
    return migrated.changed


def upgrade_tables(
    database: str | URL, *, schema: str | None, table: str, revision: str = "head"
) -> Migrated:
    """Do what :func:`upgrade` does, and return what there is to tell instead of logging it."""
    return _run(database, schema, table, lambda config: command.upgrade(config, revision))


def downgrade(
    database: str | URL,
    *,
    schema: str | None = None,
    table: str = DEFAULT_TABLE,
    revision: str = "base",
) -> bool:
    """Take the tables back to a revision; ``"base"`` drops them. See :func:`upgrade`.

    :return: whether there was anything to take back; if not, nothing is created either
    :raises TaskLockSchemaError: the role may not do that, or a newer version of this library has
        upgraded the tables
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
    """Take the tables to a revision within an application's own migration.

    In the application's Alembic script: ``migrate(op.get_bind())`` in ``upgrade()``, and
    ``migrate(op.get_bind(), revision="base")`` in ``downgrade()``. It takes part in the
    connection's transaction, which the caller commits, and keeps a history of its own in
    ``task_lock_alembic_version``. Under ``alembic upgrade --sql`` the statements go where the
    application's own go, as for a database that has none of our tables, or all of them.

    :param connection: an SQLAlchemy connection; ``None`` in Alembic's offline mode, where
        ``op.get_bind()`` has none
    :param schema: schema of the table; ``None`` leaves it to the ``search_path``
    :param table: name of the table
    :param revision: an Alembic revision of this library, newer or older than the one that is there;
        ``"base"`` drops the tables
    :raises TaskLockError: there is no connection, and no migration is being run offline
    :raises TaskLockSchemaError: as of :func:`upgrade` and :func:`downgrade`
    """
    offline = {}
    if not isinstance(connection, Connection):  # offline, where there is none, or a mock of one
        connection = None
        offline = _offline_options(starts_at="head" if revision == BASE else None)
    context = _context_to(revision, schema, table, connection, offline)
    log_notes(run_migrations(context, schema, table).notes)


def revisions() -> list[str]:
    """Return the revisions of this library, the oldest first; before them, ``"base"``."""
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
    """Return the statements that take the tables from one revision to another.

    They neither begin nor end a transaction. See :func:`revisions`.

    :param has_schema: whether the schema is there; if not, they create it
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
    """Return a context in which the tables go to a revision, up or down."""
    task_lock_table(table, schema)  # which knows what PostgreSQL can have
    scripts = ScriptDirectory(str(scripts_folder()))

    def to_revision(heads: Any, _context: MigrationContext) -> Any:
        # What Alembic's own commands call; it has no public name.
        if revision == BASE or _is_older(scripts, revision, heads):
            return scripts._downgrade_revs(revision, heads)
        return scripts._upgrade_revs(revision, heads)

    return MigrationContext.configure(
        connection,
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},  # which leaves a percent sign in a name alone
        opts={
            "fn": to_revision,
            "script": scripts,
            "destination_rev": revision,
            **version_table(schema, table),
            **offline,
        },
    )


def _is_older(scripts: ScriptDirectory, revision: str, heads: Any) -> bool:
    """Tell whether a revision comes before those that the database has."""
    if revision.startswith(("+", "-")):  # relative, which Alembic resolves itself
        return revision.startswith("-")
    before = {script.revision for script in scripts.iterate_revisions(heads, "base")}
    before -= {heads} if isinstance(heads, str) else set(heads)
    wanted = scripts.get_revision(revision)
    return wanted is not None and wanted.revision in before


def _offline_options(starts_at: str | None) -> dict[str, Any]:
    """Return the options with which the statements go where a running migration prints its own.

    :param starts_at: the revision that the database has, which nobody can ask
    """
    try:
        outer = op.get_context()
    except NameError:  # Alembic's, outside a migration
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

    :return: ``False`` for the task lock table, those beside it and its version table, else ``True``
    """
    if type_ != "table" or parent_names.get("schema_name") != schema:
        return True
    ours = [each.name for each in tables_of(task_lock_table(table, schema))]
    return name not in (*ours, version_table(schema, table)["version_table"])


def version_table(schema: str | None, table: str) -> dict[str, Any]:
    """Return Alembic's options for where the task lock table's history is kept."""
    place = None if schema is None else identifier(schema)
    return {"version_table": f"{table}{VERSION_SUFFIX}", "version_table_schema": place}


def run_migrations(context: MigrationContext, schema: str | None, table: str) -> Migrated:
    """Run the migrations that an Alembic context was configured for, one process at a time.

    :raises TaskLockSchemaError: see :func:`upgrade` and :func:`downgrade`
    """
    schema, table = None if schema is None else identifier(schema), identifier(table)
    if context.as_sql or context.opts.get("dont_mutate"):  # the latter is `alembic current`
        if schema is not None and context.as_sql and not _to_base(context):
            Operations(context).execute(CreateSchema(schema, if_not_exists=True))
        context.run_migrations(op=Operations(context), table=table, schema=schema)
        return Migrated(context.as_sql)
    connection = context.connection
    assert connection is not None
    execute = partial(_rows, connection)
    wait_for_others(execute)
    there = look(execute, schema, table)
    plan = _plan(context, there)
    before = context.get_current_heads()
    try:
        for statement in plan.statements:
            connection.execute(_as_it_is(statement))
        if plan.runs_revisions:
            if schema is not None and there.schema is None and not _to_base(context):
                connection.execute(CreateSchema(schema, if_not_exists=True))
            context.run_migrations(op=Operations(context), table=table, schema=schema)
    except DBAPIError as error:
        if error.orig is None or not is_of_rights(error.orig):
            raise
        what = DOWNGRADE_COMMAND if _to_base(context) else UPGRADE_COMMAND
        raise wrong_role(there, what, one_line(error.orig)) from error
    changed = bool(plan.statements) or context.get_current_heads() != before
    return Migrated(changed, plan.notes)


def _plan(context: MigrationContext, there: There) -> Plan:
    """Return what is to be done, as the tables are that were found."""
    _, *known = revisions()
    if _to_base(context):
        return dropping(there, known)
    # Alembic's commands pass a function that is called after them; `migrate` has one of its own.
    what = context.opts["fn"].__name__
    if what == "downgrade" or (what == "to_revision" and _goes_back(context, there, known)):
        if there.noted is not None and there.noted not in known:
            raise newer_than(there, known[-1])
    elif what in ("upgrade", "to_revision"):
        return upgrading(there, known)
    return Plan(runs_revisions=True)  # also of `alembic stamp`


def _to_base(context: MigrationContext) -> bool:
    return context.opts.get("destination_rev") == BASE


def _goes_back(context: MigrationContext, there: There, known: list[str]) -> bool:
    """Tell whether `migrate` is to take the tables back to a revision."""
    revision = str(context.opts["destination_rev"])
    if there.noted is None or revision in ("head", "heads"):
        return False
    return there.noted not in known or _is_older(context.opts["script"], revision, there.noted)


def _rows(connection: Connection, sql: str) -> Sequence[Any]:
    return connection.execute(_as_it_is(sql)).fetchall()


def _as_it_is(sql: str) -> TextClause:
    return text(sql.replace(":", r"\:"))  # which begins a parameter


def wait_for_others(execute: Execute) -> None:
    """Let one process at a time migrate, until the end of the transaction."""
    [[before]] = execute("SELECT pg_catalog.current_setting('lock_timeout')")
    execute(f"SELECT pg_catalog.set_config('lock_timeout', {literal(LOCK_TIMEOUT)}, true)")
    execute(f"SELECT pg_catalog.pg_advisory_xact_lock({UPGRADE_LOCK})")
    # The transaction may be an application's, with a limit of its own.
    execute(f"SELECT pg_catalog.set_config('lock_timeout', {literal(before)}, true)")


def migration_engine(database: str | URL) -> Engine:
    """Return an engine for migrations, which keeps no connection.

    :raises TaskLockOptionError: ``database`` is not a PostgreSQL URL
    """
    url = parse_url(database)
    parameters = {"connect_timeout": _CONNECT_TIMEOUT, **connect_parameters(url)}
    return create_engine(url, poolclass=NullPool, connect_args=parameters)


def _run(database: str | URL, schema: str | None, table: str, run: Any) -> Migrated:
    with migration_engine(database).connect() as connection:
        config = _config(schema, table, connection)
        run(config)
    migrated: Migrated = config.attributes["migrated"]  # env.py notes it
    return migrated


def log_notes(notes: Sequence[str]) -> None:
    """Log what a user is to be told of a migration."""
    for note in notes:
        logger.warning("%s", note)


def _config(schema: str | None, table: str, connection: Connection | None = None) -> Config:
    task_lock_table(table, schema)  # which knows what PostgreSQL can have
    config = Config(attributes={"connection": connection, "schema": schema, "table": table})
    config.set_main_option("script_location", str(scripts_folder()).replace("%", "%%"))
    return config


def scripts_folder() -> Path:
    """Return where the migrations are: inside an installed package, or beside a checkout's."""
    package = Path(__file__).parent.parent
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parent / "alembic"
