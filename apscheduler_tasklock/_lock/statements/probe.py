"""The probe: a write that changes no row, but is confirmed only if a claim would be, too."""

from __future__ import annotations

from sqlalchemy import Table

from apscheduler_tasklock._lock.statements.conditions import AUDIBLY, DURABLY
from apscheduler_tasklock.schema.table import quoted_name


def probe(table: Table | None) -> bytes:
    """Return the probe of a task lock table; of ``None``: one that needs no right on a table.

    The UPDATE fails where the table takes no writes, and needs only the right that a claim needs,
    too. It writes nothing, so the message is what the commit has to write, and a standby has to
    confirm. Readers of the write-ahead log ignore messages for which they have not asked.
    """
    written = (
        f"WITH written AS (UPDATE {quoted_name(table)} SET token = 0 WHERE false)"
        if table is not None
        else ""
    )
    return f"""
        {written}
        SELECT pg_catalog.pg_logical_emit_message(true, 'tasklock', '')
        WHERE {DURABLY} AND {AUDIBLY}
    """.encode()
