"""Cursors on connections of the tests that read as those of the library do."""

from __future__ import annotations

from typing import Any

import psycopg

from apscheduler_tasklock._database.connection import AnyTimeLoader, raw_cursor


def reading_all_times(connection: psycopg.Connection[Any]) -> psycopg.RawCursor[Any]:
    """Return a raw cursor that reads each time that PostgreSQL has."""
    cursor = raw_cursor(connection)
    cursor.adapters.register_loader("timestamptz", AnyTimeLoader)
    return cursor
