"""The task lock table as SQLAlchemy knows it. The migrations create it; a test compares both."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Integer,
    MetaData,
    Table,
    Text,
    Uuid,
)
from sqlalchemy.dialects.postgresql.base import PGDialect, PGIdentifierPreparer

from apscheduler_tasklock.errors import TaskLockOptionError

DEFAULT_TABLE = "task_lock"

# PostgreSQL's limit, in bytes; the table's name needs room for its history's suffix.
LONGEST_IDENTIFIER = 63
LONGEST_TABLE = LONGEST_IDENTIFIER - len("_alembic_version")

# With a parameter style that leaves percent signs as they are.
_DIALECT = PGDialect(paramstyle="named")  # type: ignore[no-untyped-call]  # SQLAlchemy's own
_preparer = PGIdentifierPreparer(_DIALECT)

# Every claim and release updates a row, never its key. A half-empty page keeps such updates
# on their page (HOT), where the next one prunes them; the absolute threshold makes autovacuum
# come by for a table whose handful of rows would never reach a share of itself.
STORAGE_PARAMETERS = {
    "fillfactor": 50,
    "autovacuum_vacuum_scale_factor": 0,
    "autovacuum_vacuum_threshold": 1000,
}


def task_lock_table(name: str = DEFAULT_TABLE, schema: str | None = None) -> Table:
    """Return the task lock table's definition, in a ``MetaData`` of its own.

    :param name: the table's name
    :param schema: its schema; ``None`` leaves it to the connection's ``search_path``
    :raises TaskLockOptionError: PostgreSQL cannot have such a name
    """
    _check_identifier(name, "table", LONGEST_TABLE)
    if schema is not None:
        _check_identifier(schema, "schema", LONGEST_IDENTIFIER)

    def moment() -> DateTime:
        return DateTime(timezone=True)

    return Table(
        name,
        MetaData(),
        Column("task_name", Text, primary_key=True),
        Column("started_at", moment(), nullable=False),
        Column("locked_until", moment(), nullable=False),
        Column("window_start", moment(), nullable=False),
        Column("window_until", moment(), nullable=False),
        Column("locked_by", Text, nullable=False),
        Column("claim_id", Uuid, nullable=False),
        Column("token", BigInteger, nullable=False),
        Column("finished_at", moment(), nullable=True),
        Column("run_until", moment(), nullable=False),
        Column("failover", Boolean, nullable=False),
        Column("deaths", Integer, nullable=False),
        Column("handovers", Integer, nullable=False),
        Column("handed_over", Boolean, nullable=False),
        Column("runs", Text, nullable=False),
        Column("one_off", Boolean, nullable=False),
        schema=schema,
    )


def quoted_name(table: Table) -> str:
    """Return the table's name, with its schema if it has one, quoted for SQL where needed."""
    return _preparer.format_table(table)


def quoted(identifier: str) -> str:
    """Return an identifier, quoted for SQL where needed."""
    return str(_preparer.quote(identifier))


def _check_identifier(name: object, what: str, longest: int) -> None:
    if not isinstance(name, str) or not name or "\0" in name:
        raise TaskLockOptionError(f"{what} must be a name, not {name!r}")
    if len(name.encode(errors="replace")) > longest:
        raise TaskLockOptionError(f"{what} must have at most {longest} bytes: {name!r}")
