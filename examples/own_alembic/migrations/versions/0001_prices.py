"""The application's table.

Revision ID: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "prices", sa.Column("id", sa.Integer, primary_key=True), sa.Column("name", sa.Text)
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("prices")
