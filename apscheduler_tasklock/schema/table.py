"""The tables as SQLAlchemy definitions. Tests compare these with the tables of the migrations.

A claim is decided on the task lock table alone. Two tables beside it are for operators: the run
history and the replicas. A third table beside it contains the jobs of the job store.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.dialects.postgresql.base import PGDialect, PGIdentifierPreparer
from sqlalchemy.sql import quoted_name as QuotedName  # noqa: N812  # a class

from apscheduler_tasklock.errors import TaskLockOptionError

DEFAULT_TABLE = "task_lock"

# The version table's name is the task lock table's name and this suffix.
VERSION_SUFFIX = "_alembic_version"

# Limits the bytes of a name, as PostgreSQL does. The task lock table's name is shorter, because the
# other names consist of it and a suffix. The longest suffix is that of the version table's key.
LONGEST_IDENTIFIER = 63
LONGEST_TABLE = LONGEST_IDENTIFIER - len(f"{VERSION_SUFFIX}_pkc")

# A table beside the task lock table has the task lock table's name and one of these suffixes.
RUN_SUFFIX = "_run"
REPLICA_SUFFIX = "_replica"
JOB_SUFFIX = "_job"

# Compiles statements to text. The parameter style is one that does not double percent signs.
DIALECT = PGDialect(paramstyle="named")  # type: ignore[no-untyped-call]  # SQLAlchemy's own

# A name needs no quotes if it matches the pattern and is not reserved.
_PLAIN = re.compile("[a-z_][a-z0-9_]*")
_RESERVED = PGIdentifierPreparer.reserved_words | {"lateral", "system_user", "tablesample"}

# Every claim and release updates a row, but not its key. Half of each page stays empty, so that the
# new version of a row fits on the page of the old one (HOT), where PostgreSQL prunes old versions.
# Autovacuum begins after a fixed number of dead rows, because the table has few rows.
STORAGE_PARAMETERS: dict[str, float] = {
    "fillfactor": 50,
    "autovacuum_vacuum_scale_factor": 0,
    "autovacuum_vacuum_threshold": 1000,
}
# A finished run overwrites the row of its task's oldest run, so pages have room for updates.
RUN_STORAGE_PARAMETERS: dict[str, float] = {
    "fillfactor": 80,
    "autovacuum_vacuum_scale_factor": 0.02,
    "autovacuum_vacuum_threshold": 1000,
}
# A job's row and its entry in the index of due jobs change with each run time, so pages have more
# room for updates.
JOB_STORAGE_PARAMETERS: dict[str, float] = {
    "fillfactor": 70,
    "autovacuum_vacuum_scale_factor": 0.02,
    "autovacuum_vacuum_threshold": 1000,
}
# The indexes of the jobs' table, for due and for ended jobs: suffix, columns, condition.
JOB_INDEXES = (
    ("due", ("executor", "next_run_time", "id"), "next_run_time IS NOT NULL"),
    ("ended", ("id",), "ended"),
)

# Limits the characters of a text of a task, a run or a replica, so that a page of rows is read in
# time. Replicas and operators write shorter ones.
LONGEST_TEXT = 10_000
LONGEST_TEXTS = {"error": 2_000, "traceback": 8_000}
# Limits the bytes of a task's details and of its pauses, and of each text of a stored job; of a
# replica's lists together; and of a job's trigger, options and arguments together. So no row takes
# longer to read than an answer may take.
LARGEST_VALUE, LARGEST_REPLICA, LARGEST_DEFINITION = 1_000_000, 10_000_000, 500_000

# Limits the times of a row, so that Python can represent each of them in each time zone. A row with
# another time, such as `infinity`, would make every answer unreadable that contains this time.
EARLIEST, LATEST = "timestamptz '0001-01-02Z'", "timestamptz '9999-12-30Z'"


def task_lock_table(name: str = DEFAULT_TABLE, schema: str | None = None) -> Table:
    """Return the task lock table's definition, in a ``MetaData`` apart from the application's.

    The tables beside it are in the same ``MetaData``; see :func:`run_table`,
    :func:`replica_table` and :func:`job_table`. All callers with the same names share a definition,
    so do not change it.

    :param name: the table's name
    :param schema: the table's schema; with ``None`` the connection's ``search_path`` decides
    :raises TaskLockOptionError: a name is invalid
    """
    _check_identifier(name, "table", LONGEST_TABLE)
    if schema is not None:
        _check_identifier(schema, "schema", LONGEST_IDENTIFIER)
        schema = identifier(schema)
    return _defined(identifier(name), schema)


@lru_cache(maxsize=16)  # each executor and job store of a process has the same tables
def _defined(name: str, schema: str | None) -> Table:
    def moment() -> DateTime:
        return DateTime(timezone=True)

    metadata = MetaData()
    runs = Table(
        name + RUN_SUFFIX,
        metadata,
        Column("task_name", Text, primary_key=True),
        Column("ring", Text, primary_key=True),
        Column("slot", Integer, primary_key=True, autoincrement=False),
        Column("token", BigInteger, nullable=True),
        Column("scheduled_at", moment(), nullable=True),
        Column("started_at", moment(), nullable=False),
        Column("ended_at", moment(), nullable=False),
        Column("replica", Text, nullable=False),
        Column("kind", Text, nullable=False),
        Column("outcome", Text, nullable=False),
        Column("error_type", Text, nullable=True),
        Column("error", Text, nullable=True),
        Column("traceback", Text, nullable=True),
        Column("by", Text, nullable=True),
        Column("until", moment(), nullable=True),
        Column("reason", Text, nullable=True),
        Column("cause", Text, nullable=True),
        Column("last_scheduled_at", moment(), nullable=True),
        Column("run_times", Integer, nullable=True),
        Column("attempt", Integer, nullable=True),
        Column("retry_at", moment(), nullable=True),
        Column("action_id", Uuid, nullable=True),
        Column("release", Text, nullable=True),
        schema=schema,
    )
    _limit_texts(runs)
    _limit_times(runs)
    replicas = Table(
        name + REPLICA_SUFFIX,
        metadata,
        Column("replica_id", Text, primary_key=True),
        Column("host", Text, nullable=False),
        Column("version", Text, nullable=False),
        Column("started_at", moment(), nullable=False),
        Column("seen_at", moment(), nullable=False),
        Column("tasks", ARRAY(Text), nullable=False),
        Column("stopped_at", moment(), nullable=True),
        Column("rejected", ARRAY(Text), nullable=False, server_default=text("'{}'")),
        Column("running", JSONB, nullable=False, server_default=text("'[]'")),
        Column("leader_namespace", Text, nullable=True),
        Column("release", Text, nullable=True),
        Column("keep_one_offs", BigInteger, nullable=True),
        schema=schema,
    )
    _limit_texts(replicas)
    _limit_times(replicas)
    _limit_sum(replicas, "lists", ("tasks", "rejected", "running"), LARGEST_REPLICA)
    jobs = Table(
        name + JOB_SUFFIX,
        metadata,
        Column("id", Text, primary_key=True),
        Column("func", Text, nullable=False),
        Column("trigger", JSONB, nullable=False),
        Column("options", JSONB, nullable=False),
        Column("arguments", JSONB, nullable=False),
        Column("executor", Text, nullable=False),
        Column("definition_id", Uuid, nullable=True),
        Column("signature", Text, nullable=True),
        Column("version", BigInteger, nullable=False),
        Column("added_id", Uuid, nullable=False),
        Column("changed_id", Uuid, nullable=True),
        Column("changed_at", moment(), nullable=False, server_default=func.now()),
        Column("next_run_time", moment(), nullable=True),
        Column("last_run_time", moment(), nullable=True),
        Column("ended", Boolean, nullable=False),
        Column("task_name", Text, nullable=True),
        schema=schema,
    )
    _limit_bytes(jobs)
    _limit_times(jobs)
    _limit_sum(jobs, "definition", ("trigger", "options", "arguments"), LARGEST_DEFINITION)
    for suffix, columns, where in JOB_INDEXES:
        Index(
            f"{jobs.name}_{suffix}",
            *(jobs.c[column] for column in columns),
            postgresql_where=text(where),
        )
    locks = Table(
        name,
        metadata,
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
        Column("kind", Text, nullable=True),
        Column("schedule", Text, nullable=True),
        Column("due_at", moment(), nullable=True),
        Column("overdue_at", moment(), nullable=True),
        Column("overrun_at", moment(), nullable=True),
        Column("recorded", BigInteger, nullable=False, server_default=text("0")),
        Column("recorded_failures", BigInteger, nullable=False, server_default=text("0")),
        Column("recorded_actions", BigInteger, nullable=False, server_default=text("0")),
        Column("recorded_misses", BigInteger, nullable=False, server_default=text("0")),
        Column("missed_at", moment(), nullable=True),
        Column("succeeded_at", moment(), nullable=True),
        Column("failed_at", moment(), nullable=True),
        Column("failures", Integer, nullable=False, server_default=text("0")),
        Column("error_type", Text, nullable=True),
        Column("paused_at", moment(), nullable=True),
        Column("paused_until", moment(), nullable=True),
        Column("pauses", JSONB, nullable=True),
        Column("request_id", Uuid, nullable=True),
        Column("requested_by", Text, nullable=True),
        Column("requested_at", moment(), nullable=True),
        Column("request_until", moment(), nullable=True),
        Column("acknowledged_at", moment(), nullable=True),
        Column("last_outcome", Text, nullable=True),
        Column("overran", Boolean, nullable=False, server_default=text("false")),
        Column("is_last", Boolean, nullable=False, server_default=text("false")),
        Column("window_schedule", Text, nullable=True),
        Column("schedule_since", moment(), nullable=True),
        Column("details", Text, nullable=True),
        Column("attempt", Integer, nullable=False, server_default=text("1")),
        Column("retry_at", moment(), nullable=True),
        Column("retry_of", Uuid, nullable=True),
        schema=schema,
    )
    _limit_texts(locks)
    _limit_times(locks)
    _limit_sum(locks, "pauses", ("pauses",), LARGEST_VALUE)
    _limit_sum(locks, "details", ("details",), LARGEST_VALUE)
    return locks


def run_table(task_lock: Table) -> Table:
    """Return the run history's table, which is beside a task lock table."""
    return _beside(task_lock, RUN_SUFFIX)


def replica_table(task_lock: Table) -> Table:
    """Return the replicas' table, which is beside a task lock table."""
    return _beside(task_lock, REPLICA_SUFFIX)


def job_table(task_lock: Table) -> Table:
    """Return the jobs' table, which is beside a task lock table."""
    return _beside(task_lock, JOB_SUFFIX)


def tables_of(task_lock: Table) -> list[Table]:
    """Return the task lock table and the tables beside it."""
    beside = run_table(task_lock), replica_table(task_lock), job_table(task_lock)
    return [task_lock, *beside]


def storage_parameters(table: Table, task_lock: Table) -> dict[str, float]:
    """Return the storage parameters of a task lock table, or of a table beside it."""
    return {
        "": STORAGE_PARAMETERS,
        RUN_SUFFIX: RUN_STORAGE_PARAMETERS,
        JOB_SUFFIX: JOB_STORAGE_PARAMETERS,
    }.get(table.name.removeprefix(task_lock.name), {})


def _limit_texts(table: Table) -> None:
    """Limit the characters of each text of a row, but for those that have another limit."""
    names = [each.name for each in table.columns if isinstance(each.type, Text)]
    most = {LONGEST_TEXT: [n for n in names if n not in LONGEST_TEXTS and n != "details"]}
    most |= {limit: [name] for name, limit in LONGEST_TEXTS.items() if name in names}
    lengths = {
        limit: ", ".join(f"pg_catalog.length({name})" for name in each)
        for limit, each in most.items()
    }
    _check(table, "texts", " AND ".join(f"GREATEST({each}) <= {n}" for n, each in lengths.items()))


def _limit_bytes(table: Table) -> None:
    """Limit the bytes of each text of a row."""
    lengths = [_bytes(column.name) for column in table.columns if isinstance(column.type, Text)]
    _check(table, "texts", f"GREATEST({', '.join(lengths)}) <= {LARGEST_VALUE}")


def _limit_times(table: Table) -> None:
    """Limit the times of a row to times that Python can represent."""
    times = ", ".join(each.name for each in table.columns if isinstance(each.type, DateTime))
    _check(table, "times", f"LEAST({times}) >= {EARLIEST} AND GREATEST({times}) <= {LATEST}")


def _limit_sum(table: Table, what: str, columns: Sequence[str], most: int) -> None:
    """Limit the bytes of some columns of a row together, written as text."""
    lengths = [_bytes(f"CAST({column} AS text)") for column in columns]
    _check(table, what, f"{' + '.join(lengths)} <= {most}")


def _bytes(text: str) -> str:
    return f"pg_catalog.octet_length({text})"


def _check(table: Table, what: str, condition: str) -> None:
    table.append_constraint(CheckConstraint(text(condition), name=f"{table.name}_{what}"))


def _beside(task_lock: Table, suffix: str) -> Table:
    schema = f"{task_lock.schema}." if task_lock.schema else ""
    return task_lock.metadata.tables[f"{schema}{task_lock.name}{suffix}"]


def quoted_name(table: Table) -> str:
    """Return the table's name, with its schema if it has one, quoted for SQL where needed."""
    return ".".join(quoted(name) for name in (table.schema, table.name) if name is not None)


def quoted(identifier: str) -> str:
    """Return an identifier, quoted for SQL where needed, in printable characters."""
    if identifier.isprintable():
        is_plain = _PLAIN.fullmatch(identifier) and identifier not in _RESERVED
        return identifier if is_plain else '"' + identifier.replace('"', '""') + '"'
    escaped = "".join(
        c.replace('"', '""') if c.isprintable() and c != "\\" else f"\\+{ord(c):06X}"
        for c in identifier
    )
    return f'U&"{escaped}"'


def identifier(name: str) -> str:
    """Return an identifier for SQLAlchemy, which then quotes it where :func:`quoted` does."""
    return name if quoted(name) == name else QuotedName(name, quote=True)


def literal(text: str) -> str:
    """Return a text as an SQL literal in printable characters, valid under all server settings."""
    doubled = text.replace("'", "''")
    if text.isprintable() and "\\" not in text:
        return f"'{doubled}'"
    escaped = (c if c.isprintable() and c != "\\" else f"\\U{ord(c):08X}" for c in doubled)
    return f"E'{''.join(escaped)}'"


def _check_identifier(name: object, what: str, longest: int) -> None:
    # A name with control characters is invalid, because nobody can read or paste it.
    if not isinstance(name, str) or not name or not name.isprintable():
        raise TaskLockOptionError(f"{what} must be a name, not {name!r}")
    if len(name.encode(errors="replace")) > longest:
        raise TaskLockOptionError(f"{what} must have at most {longest} bytes: {name!r}")
