"""The check at start, that the task lock table is there, new enough, and permitted."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Table

from apscheduler_tasklock.errors import TaskLockDatabaseError
from apscheduler_tasklock.failures import missing_grant, missing_policy, missing_table, old_table
from apscheduler_tasklock.table import quoted_name

# From the catalogue, which every role may read: the run-time role has rights on the task lock
# table only, and so cannot read the version that Alembic notes in a table of its own.
_CHECK = """
    SELECT now(), found.oid IS NOT NULL,
           ARRAY(SELECT attname::text FROM pg_catalog.pg_attribute
                 WHERE attrelid = found.oid AND attnum > 0 AND NOT attisdropped),
           has_table_privilege(found.oid, 'SELECT') AND has_table_privilege(found.oid, 'INSERT')
           AND has_table_privilege(found.oid, 'UPDATE'),
           current_setting('transaction_read_only') = 'on',
           CASE WHEN row_security_active(found.oid) THEN ARRAY(
               SELECT command
               FROM (VALUES ('SELECT', 'r'), ('INSERT', 'a'), ('UPDATE', 'w')) AS _ (command, code)
               WHERE NOT EXISTS (
                   SELECT FROM pg_catalog.pg_policy
                   WHERE polrelid = found.oid AND polpermissive AND polcmd IN ('*', code::"char")
                         AND EXISTS (SELECT FROM unnest(polroles) AS role
                                     WHERE role = 0 OR pg_has_role(role, 'USAGE'))))
           ELSE '{}' END
    FROM (SELECT to_regclass(%s) AS oid) AS found
"""


def check_table(cursor: Any, table: Table, user: str | None) -> datetime:
    """Make sure that the table can be used as it is.

    Columns that this library does not know are left alone: during a rolling deployment the table
    may be newer than some of the replicas.

    :param cursor: a psycopg cursor
    :param table: the task lock table as this library declares it
    :param user: the role that asks, for the message
    :return: the database's time
    :raises TaskLockSchemaError: the table is missing, old, or not permitted
    :raises TaskLockDatabaseError: the database can only be read, as during a failover
    """
    row = cursor.execute(_CHECK, [quoted_name(table)]).fetchone()
    database_time, exists, columns, permitted, read_only, without_policy = row
    if not exists:
        raise missing_table(table)
    missing = [column.name for column in table.columns if column.name not in columns]
    if missing:
        raise old_table(table, missing[0])
    if not permitted:
        raise missing_grant(table, user)
    if without_policy:  # else the rows would not be there for it, and each claim would be refused
        raise missing_policy(table, user, without_policy)
    if read_only:
        raise TaskLockDatabaseError(
            "it is read-only: a standby, or default_transaction_read_only is on"
        )
    return database_time  # type: ignore[no-any-return]  # the cursor's rows are untyped
