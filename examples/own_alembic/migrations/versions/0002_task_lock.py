"""The task lock table, as a step of the application's own history.

Revision ID: 0002
"""

from alembic import op

from apscheduler_tasklock import migrate

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the task lock table, or bring it up to date."""
    migrate(op.get_bind())


def downgrade() -> None:
    """Drop it."""
    migrate(op.get_bind(), revision="base")
