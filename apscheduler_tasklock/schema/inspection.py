"""Reads the state of a server and of the task lock's tables, for `doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, Table

from apscheduler_tasklock._database.sqlstates import WAITS_FOR_STANDBY
from apscheduler_tasklock._database.wire import class_row, dict_row, tuple_row
from apscheduler_tasklock.schema.check import STRONG_LOCKS
from apscheduler_tasklock.schema.migrations import scripts_folder, version_table
from apscheduler_tasklock.schema.table import DIALECT, quoted, quoted_name, replica_table

# The `application_name` of each connection that this library opens itself begins with this.
OUR_SESSIONS = "tasklock "

_SERVER = """
    SELECT clock_timestamp() AS database_time, pg_backend_pid() AS backend_pid,
           current_setting('server_version') AS version,
           current_setting('server_version_num')::int AS version_number,
           current_setting('transaction_read_only') = 'on' AS read_only,
           pg_is_in_recovery() AS is_standby, current_user::text AS role,
           current_setting('synchronous_standby_names') AS standby_names,
           current_setting('synchronous_commit') AS synchronous_commit,
           pg_has_role('pg_read_all_stats', 'USAGE') AS sees_sessions
"""

_SETTING = """
    SELECT name, setting AS value, source, sourcefile AS file, sourceline AS line
    FROM pg_catalog.pg_settings WHERE name = $1
"""

# Without pg_read_all_stats, only the sessions of one's own roles are among them.
_UNCONFIRMED = """
    SELECT pid, NULLIF(application_name, '') AS application, usename::text AS role,
           xact_start AS since
    FROM pg_catalog.pg_stat_activity WHERE wait_event = 'SyncRep' ORDER BY since, pid
"""

# Without pg_read_all_stats, the state is NULL.
_STANDBYS = """
    SELECT application_name AS name, state, sync_state AS kind
    FROM pg_catalog.pg_stat_replication ORDER BY name, pid
"""

_STATISTICS = """
    SELECT COALESCE(n_live_tup, 0) AS live_rows, COALESCE(n_dead_tup, 0) AS dead_rows
    FROM pg_catalog.pg_stat_all_tables WHERE relid = to_regclass($1)::oid
"""

_LOCKS_ON = """
    SELECT pid, mode, granted,
           CASE WHEN pid IS NULL THEN (
               SELECT transactionid::text FROM pg_catalog.pg_locks AS own
               WHERE own.virtualtransaction = lock.virtualtransaction AND own.pid IS NULL
                     AND own.locktype = 'transactionid' LIMIT 1) END AS prepared
    FROM pg_catalog.pg_locks AS lock
    WHERE locktype = 'relation' AND relation = ANY ($1::text[]::regclass[]::oid[])
          AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
          AND pid IS DISTINCT FROM pg_backend_pid()
"""

# A session that waits for its lock is listed together with the sessions that block it.
_BLOCKERS = f"""
    WITH held AS ({_LOCKS_ON} AND mode IN {STRONG_LOCKS}),
         blocking AS (SELECT pid, prepared, mode, granted FROM held
                      UNION SELECT waited_for, NULL, NULL, true
                      FROM held, pg_catalog.unnest(pg_blocking_pids(pid)) AS waited_for
                      WHERE NOT granted AND waited_for <> 0)
    SELECT blocking.pid, prepared_xact.gid, string_agg(DISTINCT mode, ', ') AS modes,
           NULLIF(application_name, '') AS application,
           COALESCE(usename, prepared_xact.owner)::text AS role,
           COALESCE(xact_start, prepared_xact.prepared) AS since, state,
           wait_event_type AS waits_type, wait_event AS waits_for, bool_and(granted) AS holds
    FROM blocking
         LEFT JOIN pg_catalog.pg_stat_activity AS activity ON activity.pid = blocking.pid
         LEFT JOIN pg_catalog.pg_prepared_xacts AS prepared_xact
             ON prepared_xact.transaction::text = blocking.prepared
    GROUP BY 1, 2, 4, 5, 6, 7, 8, 9 ORDER BY holds DESC, since, 1
"""

# A long transaction is a replica's only while it waits for something, because each statement of a
# replica is a transaction of its own.
_OPEN_TRANSACTIONS = f"""
    WITH held AS ({_LOCKS_ON} AND granted AND mode IN ('RowShareLock', 'RowExclusiveLock'))
    SELECT held.pid, prepared_xact.gid, string_agg(DISTINCT mode, ', ') AS modes,
           NULLIF(application_name, '') AS application,
           COALESCE(usename, prepared_xact.owner)::text AS role,
           COALESCE(xact_start, prepared_xact.prepared) AS since, state,
           wait_event_type AS waits_type, wait_event AS waits_for, true AS holds
    FROM held
         LEFT JOIN pg_catalog.pg_stat_activity AS activity ON activity.pid = held.pid
         LEFT JOIN pg_catalog.pg_prepared_xacts AS prepared_xact
             ON prepared_xact.transaction::text = held.prepared
    WHERE COALESCE(xact_start, prepared_xact.prepared) < now() - $2::float8 * interval '1 second'
    GROUP BY 1, 2, 4, 5, 6, 7, 8, 9 ORDER BY since, 1
"""

_CONNECTIONS = """
    WITH client AS (SELECT datname, usename FROM pg_catalog.pg_stat_activity
                    WHERE datid IS NOT NULL AND usesysid IS NOT NULL)
    SELECT 'server' AS of, count(*) AS used,
           current_setting('max_connections')::int
           - current_setting('superuser_reserved_connections')::int
           - COALESCE(current_setting('reserved_connections', true)::int, 0) AS allowed
    FROM client
    UNION ALL
    SELECT 'role', (SELECT count(*) FROM client WHERE usename = rolname), rolconnlimit
    FROM pg_catalog.pg_roles
    WHERE rolname = current_user AND NOT rolsuper AND rolconnlimit >= 0
    UNION ALL
    SELECT 'database', (SELECT count(*) FROM client WHERE client.datname = base.datname),
           datconnlimit
    FROM pg_catalog.pg_database AS base
    WHERE datname = current_database() AND datconnlimit >= 0
          AND NOT (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user)
"""

# A value of a new row's column that cannot be null, by its type.
_NEW = {"TEXT": "''", "JSONB": "'{}'", "TEXT[]": "'{}'", "UUID": "gen_random_uuid()"}
_NEW |= {"TIMESTAMP WITH TIME ZONE": "now()", "BOOLEAN": "false"}


@dataclass(frozen=True)
class ServerState:
    """A server and a connection to it.

    :ivar database_time: the server's time
    :ivar backend_pid: the connection's server process
    :ivar version: such as ``17.2``
    :ivar version_number: such as ``170002``
    :ivar read_only: whether transactions are read-only
    :ivar is_standby: whether the server is a standby
    :ivar role: the connection's role
    :ivar standby_names: the standbys that commits wait for, as ``synchronous_standby_names`` has
        them; ``""``: none
    :ivar synchronous_commit: the setting of the connection
    :ivar sees_sessions: whether the role may see what other roles' sessions do
    """

    database_time: datetime
    backend_pid: int
    version: str
    version_number: int
    read_only: bool
    is_standby: bool
    role: str
    standby_names: str
    synchronous_commit: str
    sees_sessions: bool


@dataclass(frozen=True)
class Setting:
    """A setting of a connection, and where it comes from.

    :ivar name: such as ``synchronous_commit``
    :ivar value: such as ``off``
    :ivar source: as in ``pg_settings``, such as ``configuration file`` or ``user``
    :ivar file: the configuration file that has it; ``None`` for another source, or if this role may
        not see it
    :ivar line: the number of the file's line, or ``None``
    """

    name: str
    value: str
    source: str
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Unconfirmed:
    """A session whose commit waits for a synchronous standby.

    :ivar pid: its server process
    :ivar application: its ``application_name``
    :ivar role: its role
    :ivar since: the start of its transaction
    """

    pid: int
    application: str | None
    role: str | None
    since: datetime | None


@dataclass(frozen=True)
class Standby:
    """A standby that is connected to the server.

    :ivar name: its ``application_name``, which ``synchronous_standby_names`` has to list
    :ivar state: such as ``streaming``; ``None`` if this role may not see it
    :ivar kind: such as ``sync`` or ``async``; ``None`` if this role may not see it
    """

    name: str
    state: str | None
    kind: str | None


@dataclass(frozen=True)
class Statistics:
    """The server's statistics of a table.

    :ivar live_rows: number of rows
    :ivar dead_rows: number of versions of rows that a vacuum would remove
    """

    live_rows: int
    dead_rows: int


@dataclass(frozen=True)
class Blocker:
    """A session, or a prepared transaction, that has locks on our tables or waits for them.

    :ivar pid: the session's server process; ``None`` for a prepared transaction
    :ivar gid: the prepared transaction's name
    :ivar modes: the modes of its locks; ``None`` if it has none on our tables, and only blocks
        another session of the list
    :ivar application: the session's ``application_name``
    :ivar role: the session's role
    :ivar since: the start of its transaction; ``None`` if this role may not see it
    :ivar state: such as ``idle in transaction``; ``None`` if this role may not see it
    :ivar waits_type: the kind of what it waits for, such as ``Lock``; ``None`` if this role may not
        see it
    :ivar waits_for: such as ``SyncRep``; ``None`` if this role may not see it
    :ivar holds: whether its locks are granted, and it does not wait
    """

    pid: int | None
    gid: str | None
    modes: str | None
    application: str | None
    role: str | None
    since: datetime | None
    state: str | None
    waits_type: str | None
    waits_for: str | None
    holds: bool

    @property
    def is_unconfirmed(self) -> bool:
        """Whether its commit waits for a synchronous standby."""
        return self.waits_for == WAITS_FOR_STANDBY

    @property
    def is_hidden(self) -> bool:
        """Whether this role may not see what the session does."""
        return self.pid is not None and self.state is None

    @property
    def is_ours(self) -> bool:
        """Whether it is a session of this library."""
        return (self.application or "").startswith(OUR_SESSIONS)

    @property
    def is_victim(self) -> bool:
        """Whether it is a session of this library that another session keeps waiting."""
        return self.is_ours and self.waits_type == "Lock"


@dataclass(frozen=True)
class Connections:
    """A limit of connections, and how many there are.

    :ivar of: the owner of the limit: ``server``, ``role`` or ``database``
    :ivar used: number of connections
    :ivar allowed: the limit
    """

    of: str
    used: int
    allowed: int


@dataclass(frozen=True)
class Revision:
    """The revision of the tables.

    :ivar there: the revision that Alembic noted, or ``None``
    :ivar head: the revision that this library needs
    :ivar is_known: whether this library knows the noted revision; a newer version has others
    """

    there: str | None
    head: str
    is_known: bool


def read_server(cursor: Any) -> ServerState:
    """Return the state of the server.

    :param cursor: a cursor of a ``Wire``
    """
    cursor.row_factory = class_row(ServerState)
    state: ServerState = cursor.execute(_SERVER).fetchone()
    return state


def read_setting(cursor: Any, name: str) -> Setting:
    """Return a setting of the connection, and where it comes from."""
    cursor.row_factory = class_row(Setting)
    setting: Setting = cursor.execute(_SETTING, [name]).fetchone()
    return setting


def read_unconfirmed(cursor: Any) -> list[Unconfirmed]:
    """Return the sessions that wait for a synchronous standby, as far as this role may see them."""
    cursor.row_factory = class_row(Unconfirmed)
    found: list[Unconfirmed] = cursor.execute(_UNCONFIRMED).fetchall()
    return found


def read_standbys(cursor: Any) -> list[Standby]:
    """Return the standbys that are connected to the server."""
    cursor.row_factory = class_row(Standby)
    found: list[Standby] = cursor.execute(_STANDBYS).fetchall()
    return found


def read_statistics(cursor: Any, table: Table) -> Statistics:
    """Return the server's statistics of a table; zeros if there are none."""
    cursor.row_factory = class_row(Statistics)
    found: Statistics | None = cursor.execute(_STATISTICS, [quoted_name(table)]).fetchone()
    return found or Statistics(0, 0)


def has_table(cursor: Any, table: Table) -> bool:
    """Return whether a table exists.

    :raises psycopg.errors.InsufficientPrivilege: the role lacks USAGE on the table's schema
    """
    cursor.row_factory = tuple_row
    [is_there] = cursor.execute(
        "SELECT to_regclass($1) IS NOT NULL", [quoted_name(table)]
    ).fetchone()
    return bool(is_there)


def read_blockers(cursor: Any, tables: Sequence[Table]) -> list[Blocker]:
    """Return the sessions that block writes to tables. The tables must exist."""
    cursor.row_factory = class_row(Blocker)
    found: list[Blocker] = cursor.execute(_BLOCKERS, [_names(tables)]).fetchall()
    return found


def read_open_transactions(cursor: Any, tables: Sequence[Table], seconds: float) -> list[Blocker]:
    """Return transactions open for more than ``seconds`` that may have rows of tables locked."""
    cursor.row_factory = class_row(Blocker)
    arguments = [_names(tables), seconds]
    found: list[Blocker] = cursor.execute(_OPEN_TRANSACTIONS, arguments).fetchall()
    return found


def read_connections(cursor: Any) -> list[Connections]:
    """Return how many connections the server, the role and the database have."""
    cursor.row_factory = class_row(Connections)
    found: list[Connections] = cursor.execute(_CONNECTIONS).fetchall()
    return found


def _names(tables: Sequence[Table]) -> list[str]:
    return [quoted_name(table) for table in tables]


def noted_in(table: Table) -> Table:
    """Return Alembic's version table of our tables."""
    names = version_table(table.schema, table.name)
    return Table(names["version_table"], MetaData(), schema=table.schema)


def read_revision(cursor: Any, table: Table) -> Revision:
    """Return the revision of the tables.

    :raises psycopg.errors.InsufficientPrivilege: the role may not read the version table
    """
    noted = noted_in(table)
    row = None
    if has_table(cursor, noted):
        row = cursor.execute(f"SELECT version_num FROM {quoted_name(noted)}").fetchone()
    scripts = ScriptDirectory(str(scripts_folder()))
    head = scripts.get_current_head() or ""
    there = row[0] if row else None
    return Revision(there, head, there in [script.revision for script in scripts.walk_revisions()])


def read_rejected(cursor: Any, task_lock: Table, alive_for: float) -> dict[str, list[str]]:
    """Return the requests that the database rejects, each with the live replicas that report it.

    :param alive_for: the seconds for which a replica counts as live after its last sign of life
    """
    cursor.row_factory = dict_row
    query = f"""
        SELECT entry, pg_catalog.array_agg(replica_id ORDER BY replica_id) AS replicas
        FROM {quoted_name(replica_table(task_lock))}, pg_catalog.unnest(rejected) AS entry
        WHERE stopped_at IS NULL AND seen_at > now() - $1::float8 * interval '1 second'
        GROUP BY entry ORDER BY entry
    """
    rows = cursor.execute(query, [alive_for]).fetchall()
    return {row["entry"]: row["replicas"] for row in rows}


def limit_locks(cursor: Any) -> None:
    """Limit the waits for locks in this transaction to 3 seconds."""
    cursor.row_factory = tuple_row
    cursor.execute("SELECT set_config('lock_timeout', '3s', true)")


def try_to_write(cursor: Any, table: Table, prefix: str) -> bool:
    """Insert a row into one of our tables and update it. The caller rolls back.

    :param table: the task lock table, or a table beside it
    :param prefix: the prefix of the row's name, because a policy may ask for one
    :return: whether the inserted row was visible to the update
    :raises psycopg.Error: a policy, a trigger or a constraint rejects the row
    """
    needed = [each for each in table.columns if not each.nullable and each.server_default is None]
    key, *others = [quoted(each.name) for each in needed]
    values = [_NEW.get(each.type.compile(DIALECT), "0") for each in needed[1:]]
    name, row = quoted_name(table), f"{prefix}doctor {uuid4()}"
    columns, given = ", ".join((key, *others)), ", ".join(("$1", *values))
    cursor.execute(f"INSERT INTO {name} ({columns}) VALUES ({given})", [row])
    updated = cursor.execute(f"UPDATE {name} SET {key} = {key} WHERE {key} = $1", [row])
    return bool(updated.rowcount == 1)
