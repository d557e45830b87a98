"""What there is to know of a database that the task lock is set up in. For `doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

from alembic.script import ScriptDirectory
from psycopg.rows import class_row, dict_row, tuple_row
from sqlalchemy import MetaData, Table

from apscheduler_tasklock.schema.check import WITHOUT_POLICY
from apscheduler_tasklock.schema.migrations import scripts_folder, version_table
from apscheduler_tasklock.schema.table import job_table, quoted_name, replica_table, run_table

_SERVER = """
    SELECT clock_timestamp() AS database_time, pg_backend_pid() AS backend_pid,
           current_setting('server_version') AS version,
           current_setting('server_version_num')::int AS version_number,
           current_setting('transaction_read_only') = 'on' AS read_only,
           pg_is_in_recovery() AS is_standby, current_user::text AS role
"""

_TABLE = f"""
    SELECT found.oid IS NOT NULL AS exists,
           ARRAY(SELECT attname::text FROM pg_catalog.pg_attribute
                 WHERE attrelid = found.oid AND attnum > 0 AND NOT attisdropped) AS columns,
           ARRAY(SELECT command FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'])
                 WITH ORDINALITY AS _ (command, place)
                 WHERE NOT has_table_privilege(found.oid, command) ORDER BY place) AS not_granted,
           {WITHOUT_POLICY} AS without_policy,
           COALESCE(statistics.n_live_tup, 0) AS live_rows,
           COALESCE(statistics.n_dead_tup, 0) AS dead_rows,
           statistics.last_autovacuum AS vacuumed_at
    FROM (SELECT to_regclass($1) AS oid) AS found
         LEFT JOIN pg_catalog.pg_stat_all_tables AS statistics ON statistics.relid = found.oid
"""

_NEW_ROW = {
    "task_lock": """
        INSERT INTO {name} (task_name, started_at, locked_until, window_start, window_until,
            locked_by, claim_id, token, finished_at, run_until, failover, deaths, handovers,
            handed_over, runs, one_off)
        VALUES ($1, now(), now(), now(), now(), 'doctor', gen_random_uuid(), 0, now(), now(), false,
                0, 0, false, '', true)
    """,
    "run": """
        INSERT INTO {name} (task_name, slot, token, started_at, ended_at, replica, kind, outcome)
        VALUES ($1, 0, 0, now(), now(), 'doctor', 'hold', 'ok')
    """,
    "replica": """
        INSERT INTO {name} (replica_id, host, version, started_at, seen_at, tasks)
        VALUES ($1, '', '', now(), 'epoch', '{{}}')
    """,
    "job": """
        INSERT INTO {name} (id, func, trigger, options, arguments, executor, version, added_id,
            ended)
        VALUES ($1, '', '{{}}', '{{}}', '{{}}', '', 1, gen_random_uuid(), true)
    """,
}


@dataclass(frozen=True)
class ServerState:
    """A server, as a connection to it sees it.

    :ivar database_time: its time
    :ivar backend_pid: the process that answers
    :ivar version: as in ``17.2``
    :ivar version_number: as in ``170002``
    :ivar read_only: whether nothing can be written
    :ivar is_standby: whether that is because it is a standby
    :ivar role: who is logged in
    """

    database_time: datetime
    backend_pid: int
    version: str
    version_number: int
    read_only: bool
    is_standby: bool
    role: str


@dataclass(frozen=True)
class TableState:
    """One of our tables, as a role sees it.

    :ivar exists: whether it is there
    :ivar columns: the names of its columns
    :ivar not_granted: of SELECT, INSERT, UPDATE and DELETE, what the role may not do
    :ivar without_policy: of SELECT, INSERT and UPDATE, what row-level security leaves it no row for
    :ivar live_rows: rows that there are, as the statistics know
    :ivar dead_rows: versions of rows that a vacuum would remove
    :ivar vacuumed_at: when autovacuum last came by
    """

    exists: bool
    columns: Sequence[str]
    not_granted: Sequence[str]
    without_policy: Sequence[str]
    live_rows: int
    dead_rows: int
    vacuumed_at: datetime | None


@dataclass(frozen=True)
class Revision:
    """How far the tables are migrated.

    :ivar there: the revision that Alembic noted; ``None`` if it noted none
    :ivar head: the one that this library needs
    :ivar is_known: whether this library has the revision that is there; a newer one has others
    """

    there: str | None
    head: str
    is_known: bool


def read_server(cursor: Any) -> ServerState:
    """Return what the server says of itself.

    :param cursor: as of ``raw_cursor``
    """
    cursor.row_factory = class_row(ServerState)
    state: ServerState = cursor.execute(_SERVER).fetchone()
    return state


def read_table(cursor: Any, table: Table) -> TableState:
    """Return the state of one of our tables.

    :raises psycopg.errors.InsufficientPrivilege: the role may not look into its schema
    """
    cursor.row_factory = class_row(TableState)
    state: TableState = cursor.execute(_TABLE, [quoted_name(table)]).fetchone()
    return state


def read_revision(cursor: Any, table: Table) -> Revision:
    """Return the revision of the tables.

    :raises psycopg.errors.InsufficientPrivilege: only the tables' owner may read it, as is usual
    """
    names = version_table(table.schema, table.name)
    noted = Table(names["version_table"], MetaData(), schema=table.schema)
    cursor.row_factory = tuple_row
    [is_there] = cursor.execute(
        "SELECT to_regclass($1) IS NOT NULL", [quoted_name(noted)]
    ).fetchone()
    row = None
    if is_there:
        row = cursor.execute(f"SELECT version_num FROM {quoted_name(noted)}").fetchone()
    scripts = ScriptDirectory(str(scripts_folder()))
    head = scripts.get_current_head() or ""
    there = row[0] if row else None
    return Revision(there, head, there in [script.revision for script in scripts.walk_revisions()])


def read_versions(cursor: Any, task_lock: Table, alive_for: float) -> dict[str, int]:
    """Return how many replicas have each version of the library.

    :param alive_for: seconds after its last sign that a replica counts as alive
    """
    cursor.row_factory = dict_row
    query = f"""
        SELECT version, count(*) AS replicas FROM {quoted_name(replica_table(task_lock))}
        WHERE stopped_at IS NULL AND seen_at > now() - $1 * interval '1 second'
        GROUP BY version ORDER BY version
    """
    rows = cursor.execute(query, [alive_for]).fetchall()
    return {row["version"]: row["replicas"] for row in rows}


def read_rejected(cursor: Any, task_lock: Table, alive_for: float) -> dict[str, list[str]]:
    """Return what the database rejects of replicas' work, and of which replicas.

    :param alive_for: seconds after its last sign that a replica counts as alive
    """
    cursor.row_factory = dict_row
    query = f"""
        SELECT entry, array_agg(replica_id ORDER BY replica_id) AS replicas
        FROM {quoted_name(replica_table(task_lock))}, unnest(rejected) AS entry
        WHERE stopped_at IS NULL AND seen_at > now() - $1 * interval '1 second'
        GROUP BY entry ORDER BY entry
    """
    rows = cursor.execute(query, [alive_for]).fetchall()
    return {row["entry"]: row["replicas"] for row in rows}


def try_to_write(cursor: Any, table: Table, task_lock: Table, prefix: str) -> bool:
    """Insert a row into one of our tables and update it; the caller rolls that back.

    :param table: the task lock table or one beside it
    :param prefix: what the row's name begins with, as a policy may ask for
    :return: whether the row could be seen afterwards
    :raises psycopg.Error: a policy, a trigger or something else rejects it
    """
    kind, key = {
        run_table(task_lock).name: ("run", "task_name"),
        replica_table(task_lock).name: ("replica", "replica_id"),
        job_table(task_lock).name: ("job", "id"),
    }.get(table.name, ("task_lock", "task_name"))
    name, row = quoted_name(table), f"{prefix}doctor {uuid4()}"
    cursor.execute("SELECT set_config('lock_timeout', '3s', true)")
    cursor.execute(_NEW_ROW[kind].format(name=name), [row])
    updated = cursor.execute(f"UPDATE {name} SET {key} = {key} WHERE {key} = $1", [row])
    return bool(updated.rowcount == 1)
