"""The tables of the task lock.

Revision ID: 0001
Revises:
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from apscheduler_tasklock.schema.locking import (
    execute_when_unlocked,
    grant_like,
    identify,
    qualified,
)
from apscheduler_tasklock.schema.table import JOB_SUFFIX, REPLICA_SUFFIX, RUN_SUFFIX

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade(op: Operations, table: str, schema: str | None) -> None:
    """Create the task lock table and the tables beside it."""
    _create_task_lock(op, table, schema)
    _create_runs(op, table + RUN_SUFFIX, schema)
    _create_replicas(op, table + REPLICA_SUFFIX, schema)
    _create_jobs(op, table + JOB_SUFFIX, schema)
    identify(op, table + JOB_SUFFIX, schema)
    # Default privileges may lack DELETE, which the job store needs. So roles with UPDATE get it.
    grant_like(op, table, table + JOB_SUFFIX, schema, deletes=True)


def downgrade(op: Operations, table: str, schema: str | None) -> None:
    """Drop the tables with all rows."""
    suffixes = (JOB_SUFFIX, REPLICA_SUFFIX, RUN_SUFFIX, "")
    dropped = ", ".join(qualified(table + suffix, schema) for suffix in suffixes)
    execute_when_unlocked(op, f"DROP TABLE IF EXISTS {dropped}")


def _moment(name: str, *, nullable: bool, **options: Any) -> sa.Column[datetime]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable, **options)


def _texts(
    table: str, columns: Sequence[sa.Column[Any]], but: Sequence[str] = (), **limits: int
) -> sa.CheckConstraint:
    texts = [each.name for each in columns if isinstance(each.type, sa.Text)]
    most = {10_000: [name for name in texts if name not in (*but, *limits)]}
    most |= {limit: [column] for column, limit in limits.items()}
    lengths = {
        limit: ", ".join(f"pg_catalog.length({column})" for column in names)
        for limit, names in most.items()
    }
    condition = " AND ".join(f"GREATEST({each}) <= {limit}" for limit, each in lengths.items())
    return sa.CheckConstraint(condition, name=f"{table}_texts")


def _bytes(table: str, columns: Sequence[sa.Column[Any]]) -> sa.CheckConstraint:
    texts = [each.name for each in columns if isinstance(each.type, sa.Text)]
    lengths = ", ".join(f"pg_catalog.octet_length({name})" for name in texts)
    return sa.CheckConstraint(f"GREATEST({lengths}) <= 1000000", name=f"{table}_texts")


def _times(table: str, columns: Sequence[sa.Column[Any]]) -> sa.CheckConstraint:
    times = ", ".join(each.name for each in columns if isinstance(each.type, sa.DateTime))
    return sa.CheckConstraint(
        f"LEAST({times}) >= timestamptz '0001-01-02Z'"
        f" AND GREATEST({times}) <= timestamptz '9999-12-30Z'",
        name=f"{table}_times",
    )


def _sum(table: str, what: str, columns: Sequence[str], most: int) -> sa.CheckConstraint:
    lengths = " + ".join(f"pg_catalog.octet_length(CAST({column} AS text))" for column in columns)
    return sa.CheckConstraint(f"{lengths} <= {most}", name=f"{table}_{what}")


def _create_task_lock(op: Operations, table: str, schema: str | None) -> None:
    columns: list[sa.Column[Any]] = [
        sa.Column("task_name", sa.Text, primary_key=True),
        _moment("started_at", nullable=False),
        _moment("locked_until", nullable=False),
        _moment("window_start", nullable=False),
        _moment("window_until", nullable=False),
        sa.Column("locked_by", sa.Text, nullable=False),
        sa.Column("claim_id", sa.Uuid, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        _moment("finished_at", nullable=True),
        _moment("run_until", nullable=False),
        sa.Column("failover", sa.Boolean, nullable=False),
        sa.Column("deaths", sa.Integer, nullable=False),
        sa.Column("handovers", sa.Integer, nullable=False),
        sa.Column("handed_over", sa.Boolean, nullable=False),
        sa.Column("runs", sa.Text, nullable=False),
        sa.Column("one_off", sa.Boolean, nullable=False),
        sa.Column("kind", sa.Text, nullable=True),
        sa.Column("schedule", sa.Text, nullable=True),
        _moment("due_at", nullable=True),
        _moment("overdue_at", nullable=True),
        _moment("overrun_at", nullable=True),
        sa.Column("recorded", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("recorded_failures", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("recorded_actions", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("recorded_misses", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        _moment("missed_at", nullable=True),
        _moment("succeeded_at", nullable=True),
        _moment("failed_at", nullable=True),
        sa.Column("failures", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("error_type", sa.Text, nullable=True),
        _moment("paused_at", nullable=True),
        _moment("paused_until", nullable=True),
        sa.Column("pauses", JSONB, nullable=True),
        sa.Column("request_id", sa.Uuid, nullable=True),
        sa.Column("requested_by", sa.Text, nullable=True),
        _moment("requested_at", nullable=True),
        _moment("request_until", nullable=True),
        _moment("acknowledged_at", nullable=True),
        sa.Column("last_outcome", sa.Text, nullable=True),
        sa.Column("overran", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("is_last", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("window_schedule", sa.Text, nullable=True),
        _moment("schedule_since", nullable=True),
        sa.Column("details", sa.Text, nullable=True),
        sa.Column("attempt", sa.Integer, nullable=False, server_default=sa.text("1")),
        _moment("retry_at", nullable=True),
        sa.Column("retry_of", sa.Uuid, nullable=True),
    ]
    op.create_table(
        table,
        *columns,
        _texts(table, columns, but=["details"]),
        _times(table, columns),
        _sum(table, "pauses", ("pauses",), 1_000_000),
        _sum(table, "details", ("details",), 1_000_000),
        schema=schema,
    )
    # Half of each page stays empty, so that updates stay on their page.
    _set_storage(op, table, schema, fillfactor=50, scale_factor=0)


def _create_runs(op: Operations, table: str, schema: str | None) -> None:
    columns: list[sa.Column[Any]] = [
        sa.Column("task_name", sa.Text, primary_key=True),
        sa.Column("ring", sa.Text, primary_key=True),
        sa.Column("slot", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("token", sa.BigInteger, nullable=True),
        _moment("scheduled_at", nullable=True),
        _moment("started_at", nullable=False),
        _moment("ended_at", nullable=False),
        sa.Column("replica", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("error_type", sa.Text, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Column("traceback", sa.Text, nullable=True),
        sa.Column("by", sa.Text, nullable=True),
        _moment("until", nullable=True),
        sa.Column("reason", sa.Text, nullable=True),
        sa.Column("cause", sa.Text, nullable=True),
        _moment("last_scheduled_at", nullable=True),
        sa.Column("run_times", sa.Integer, nullable=True),
        sa.Column("attempt", sa.Integer, nullable=True),
        _moment("retry_at", nullable=True),
        sa.Column("action_id", sa.Uuid, nullable=True),
        sa.Column("release", sa.Text, nullable=True),
    ]
    op.create_table(
        table,
        *columns,
        _texts(table, columns, error=2_000, traceback=8_000),
        _times(table, columns),
        schema=schema,
    )
    _set_storage(op, table, schema, fillfactor=80, scale_factor=0.02)


def _create_replicas(op: Operations, table: str, schema: str | None) -> None:
    columns: list[sa.Column[Any]] = [
        sa.Column("replica_id", sa.Text, primary_key=True),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        _moment("started_at", nullable=False),
        _moment("seen_at", nullable=False),
        sa.Column("tasks", ARRAY(sa.Text), nullable=False),
        _moment("stopped_at", nullable=True),
        sa.Column("rejected", ARRAY(sa.Text), nullable=False, server_default=sa.text("'{}'")),
        sa.Column("running", JSONB, nullable=False, server_default=sa.text("'[]'")),
        sa.Column("leader_namespace", sa.Text, nullable=True),
        sa.Column("release", sa.Text, nullable=True),
        sa.Column("keep_one_offs", sa.BigInteger, nullable=True),
    ]
    op.create_table(
        table,
        *columns,
        _texts(table, columns),
        _times(table, columns),
        _sum(table, "lists", ("tasks", "rejected", "running"), 10_000_000),
        schema=schema,
    )


def _create_jobs(op: Operations, table: str, schema: str | None) -> None:
    columns: list[sa.Column[Any]] = [
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("func", sa.Text, nullable=False),
        sa.Column("trigger", JSONB, nullable=False),
        sa.Column("options", JSONB, nullable=False),
        sa.Column("arguments", JSONB, nullable=False),
        sa.Column("executor", sa.Text, nullable=False),
        sa.Column("definition_id", sa.Uuid, nullable=True),
        sa.Column("signature", sa.Text, nullable=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("added_id", sa.Uuid, nullable=False),
        sa.Column("changed_id", sa.Uuid, nullable=True),
        _moment("changed_at", nullable=False, server_default=sa.func.now()),
        _moment("next_run_time", nullable=True),
        _moment("last_run_time", nullable=True),
        sa.Column("ended", sa.Boolean, nullable=False),
        sa.Column("task_name", sa.Text, nullable=True),
    ]
    op.create_table(
        table,
        *columns,
        _bytes(table, columns),
        _times(table, columns),
        _sum(table, "definition", ("trigger", "options", "arguments"), 500_000),
        schema=schema,
    )
    _set_storage(op, table, schema, fillfactor=70, scale_factor=0.02)
    for suffix, indexed, where in (
        ("due", ["executor", "next_run_time", "id"], "next_run_time IS NOT NULL"),
        ("ended", ["id"], "ended"),
    ):
        op.create_index(
            f"{table}_{suffix}", table, indexed, schema=schema, postgresql_where=sa.text(where)
        )


def _set_storage(
    op: Operations, table: str, schema: str | None, *, fillfactor: int, scale_factor: float
) -> None:
    """Set storage parameters, for which SQLAlchemy 2.0.0 has no option."""
    name = qualified(table, schema).replace(":", r"\:")  # a plain colon would begin a parameter
    op.execute(
        f"ALTER TABLE {name} SET (fillfactor = {fillfactor}, "
        f"autovacuum_vacuum_scale_factor = {scale_factor}, autovacuum_vacuum_threshold = 1000)"
    )
