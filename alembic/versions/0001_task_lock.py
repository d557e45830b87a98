"""The task lock table.

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic.operations import Operations

from apscheduler_tasklock.schema.table import quoted

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade(op: Operations, table: str, schema: str | None) -> None:
    """Create the table, with room on its pages for its rows to be updated in place."""
    op.create_table(
        table,
        sa.Column("task_name", sa.Text, primary_key=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("locked_until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("window_start", sa.DateTime(timezone=True), nullable=False),
        sa.Column("window_until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("locked_by", sa.Text, nullable=False),
        sa.Column("claim_id", sa.Uuid, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("run_until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("failover", sa.Boolean, nullable=False),
        sa.Column("deaths", sa.Integer, nullable=False),
        sa.Column("handovers", sa.Integer, nullable=False),
        sa.Column("handed_over", sa.Boolean, nullable=False),
        sa.Column("runs", sa.Text, nullable=False),
        sa.Column("one_off", sa.Boolean, nullable=False),
        schema=schema,
    )
    name = f"{quoted(schema)}.{quoted(table)}" if schema else quoted(table)
    name = name.replace(":", r"\:")  # which begins a parameter here
    op.execute(
        f"ALTER TABLE {name} SET (fillfactor = 50, "
        "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000)"
    )


def downgrade(op: Operations, table: str, schema: str | None) -> None:
    """Drop the table."""
    op.drop_table(table, schema=schema)
