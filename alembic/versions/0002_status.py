"""What operators see and steer: due times, pauses, requests, the run history, and the replicas.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects.postgresql import ARRAY

from apscheduler_tasklock.schema.locking import execute_when_unlocked, grant_like, qualified
from apscheduler_tasklock.schema.table import REPLICA_SUFFIX, RUN_SUFFIX

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# Null or with a constant default, so that no row is rewritten, and a replica of the version before
# can go on inserting its own.
COLUMNS = {
    "kind": "text",
    "schedule": "text",
    "due_at": "timestamptz",
    "overdue_at": "timestamptz",
    "overdue_told_at": "timestamptz",
    "overrun_at": "timestamptz",
    "recorded": "bigint NOT NULL DEFAULT 0",
    "succeeded_at": "timestamptz",
    "failed_at": "timestamptz",
    "failures": "integer NOT NULL DEFAULT 0",
    "error_type": "text",
    "paused_at": "timestamptz",
    "paused_until": "timestamptz",
    "paused_by": "text",
    "pause_reason": "text",
    "request_id": "uuid",
    "requested_by": "text",
    "requested_at": "timestamptz",
    "request_until": "timestamptz",
}


def upgrade(op: Operations, table: str, schema: str | None) -> None:
    """Create the tables beside the task lock table, and then add its columns.

    In this order, since the columns' lock on the table stands until the end of the transaction.
    """
    op.create_table(
        table + RUN_SUFFIX,
        sa.Column("task_name", sa.Text, primary_key=True),
        sa.Column("slot", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("scheduled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("replica", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("error_type", sa.Text, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        schema=schema,
    )
    # Not an option of create_table: SQLAlchemy 2.0.0 has none for these.
    runs = qualified(table + RUN_SUFFIX, schema).replace(":", r"\:")  # which begins a parameter
    op.execute(
        f"ALTER TABLE {runs} SET (fillfactor = 80, "
        "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000)"
    )
    op.create_table(
        table + REPLICA_SUFFIX,
        sa.Column("replica_id", sa.Text, primary_key=True),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tasks", ARRAY(sa.Text), nullable=False),
        sa.Column("stopped_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("rejected", ARRAY(sa.Text), nullable=False, server_default=sa.text("'{}'")),
        schema=schema,
    )
    for suffix in (RUN_SUFFIX, REPLICA_SUFFIX):
        grant_like(op, table, table + suffix, schema)
    added = ", ".join(f"ADD COLUMN {name} {type_}" for name, type_ in COLUMNS.items())
    execute_when_unlocked(op, f"ALTER TABLE {qualified(table, schema)} {added}")


def downgrade(op: Operations, table: str, schema: str | None) -> None:
    """Drop the columns, and with the tables what they hold. Replicas must be of the version before.

    A claim that is running stays what it is.
    """
    dropped = ", ".join(f"DROP COLUMN {name}" for name in COLUMNS)
    execute_when_unlocked(op, f"ALTER TABLE {qualified(table, schema)} {dropped}")
    op.drop_table(table + REPLICA_SUFFIX, schema=schema)
    op.drop_table(table + RUN_SUFFIX, schema=schema)
