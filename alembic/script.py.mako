"""${message}

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
"""

import sqlalchemy as sa

from alembic.operations import Operations

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade(op: Operations, table: str, schema: str | None) -> None:
    ${upgrades if upgrades else "raise NotImplementedError"}


def downgrade(op: Operations, table: str, schema: str | None) -> None:
    ${downgrades if downgrades else "raise NotImplementedError"}
