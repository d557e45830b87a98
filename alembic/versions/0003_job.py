"""The jobs of the job store; how the last run ended, and what runs on a replica.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects.postgresql import JSONB

from apscheduler_tasklock.schema.locking import execute_when_unlocked, grant_like, qualified
from apscheduler_tasklock.schema.table import JOB_SUFFIX, REPLICA_SUFFIX

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COLUMNS = {
    "last_outcome": "text",
    "overran": "boolean NOT NULL DEFAULT false",
}
REPLICA_COLUMNS = {"running": "jsonb NOT NULL DEFAULT '[]'"}


def upgrade(op: Operations, table: str, schema: str | None) -> None:
    """Create the table, and add the columns.

    Whoever may use the task lock table may use the jobs, and delete from them.
    """
    jobs = table + JOB_SUFFIX
    op.create_table(
        jobs,
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("func", sa.Text, nullable=False),
        sa.Column("trigger", JSONB, nullable=False),
        sa.Column("options", JSONB, nullable=False),
        sa.Column("arguments", JSONB, nullable=False),
        sa.Column("executor", sa.Text, nullable=False),
        sa.Column("signature", sa.Text, nullable=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("added_id", sa.Uuid, nullable=False),
        sa.Column("changed_id", sa.Uuid, nullable=True),
        sa.Column(
            "changed_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()
        ),
        sa.Column("next_run_time", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_run_time", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended", sa.Boolean, nullable=False),
        sa.Column("task_name", sa.Text, nullable=True),
        sa.Column("handed_id", sa.Uuid, nullable=True),
        sa.Column("handed_to", sa.Text, nullable=True),
        sa.Column("handed_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("first_handed_at", sa.DateTime(timezone=True), nullable=True),
        schema=schema,
    )
    # Not an option of create_table: SQLAlchemy 2.0.0 has none for these.
    stored = qualified(jobs, schema).replace(":", r"\:")  # which begins a parameter
    op.execute(
        f"ALTER TABLE {stored} SET (fillfactor = 70, "
        "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000)"
    )
    due = ["executor", "next_run_time"]
    _create_index(op, jobs, schema, "due", due, "next_run_time IS NOT NULL")
    _create_index(op, jobs, schema, "handed", ["handed_id"], "handed_id IS NOT NULL")
    _create_index(op, jobs, schema, "ended", ["id"], "ended")
    grant_like(op, table, jobs, schema, deletes=True)
    for name, columns in ((table + REPLICA_SUFFIX, REPLICA_COLUMNS), (table, COLUMNS)):
        added = ", ".join(f"ADD COLUMN {column} {type_}" for column, type_ in columns.items())
        execute_when_unlocked(op, f"ALTER TABLE {qualified(name, schema)} {added}")


def downgrade(op: Operations, table: str, schema: str | None) -> None:
    """Drop the table, and with it the jobs; and the columns."""
    for name, columns in ((table, COLUMNS), (table + REPLICA_SUFFIX, REPLICA_COLUMNS)):
        dropped = ", ".join(f"DROP COLUMN {column}" for column in columns)
        execute_when_unlocked(op, f"ALTER TABLE {qualified(name, schema)} {dropped}")
    op.drop_table(table + JOB_SUFFIX, schema=schema)


def _create_index(
    op: Operations, jobs: str, schema: str | None, suffix: str, columns: list[str], where: str
) -> None:
    op.create_index(
        f"{jobs}_{suffix}", jobs, columns, schema=schema, postgresql_where=sa.text(where)
    )
