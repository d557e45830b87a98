"""The checks of a set-up: what is wrong with it, and what to do about it."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from functools import partial
from typing import Any

import psycopg
from sqlalchemy import Engine, Table
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.abandoned_call import call_within
from apscheduler_tasklock._database.connection import (
    connect_parameters,
    host_count,
    set_up,
)
from apscheduler_tasklock._database.outage import as_unavailable
from apscheduler_tasklock._database.session import connect_limit, opener
from apscheduler_tasklock._database.sqlstates import UnconfirmedError, one_line
from apscheduler_tasklock._database.url import as_url, describe
from apscheduler_tasklock._database.wire import Cursor, NoAnswerError, Wire
from apscheduler_tasklock._doctor.remedies import (
    FULL_DATABASE,
    FULL_ROLE,
    FULL_SERVER,
    STANDBY,
    STATEMENT_POOLING,
    UNCONFIRMED,
    end_of,
    filled,
    remedy_of,
    reset_of,
    see_more,
    set_by,
)
from apscheduler_tasklock._lock.command_lines import library_version
from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock._lock.statements import SILENT_AFTER, probe
from apscheduler_tasklock._lock.words import rfc3339
from apscheduler_tasklock._values import cut
from apscheduler_tasklock._words.findings import RELEASES, VERSIONS, WatchedRows, findings_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.schema.check import (
    UPGRADE_COMMAND,
    Found,
    explain_rejection,
    in_another_schema_error,
    look_up,
    missing_table_error,
    problems_of,
    read_elsewhere,
    with_table_options,
)
from apscheduler_tasklock.schema.inspection import (
    Blocker,
    ServerState,
    Setting,
    Standby,
    Statistics,
    Unconfirmed,
    has_table,
    limit_locks,
    noted_in,
    read_blockers,
    read_connections,
    read_open_transactions,
    read_rejected,
    read_revision,
    read_server,
    read_setting,
    read_standbys,
    read_statistics,
    read_unconfirmed,
    try_to_write,
)
from apscheduler_tasklock.schema.table import (
    job_table,
    quoted,
    quoted_name,
    replica_table,
    tables_of,
)
from apscheduler_tasklock.status import Finding

# Limits the seconds that each answer of the database may take.
_TIMEOUT = 5.0

# The parameters of a connection to a single server, unless the URL has them.
_OF_DOCTOR = {"application_name": "tasklock doctor", "connect_timeout": int(_TIMEOUT)}

# The settings that let a server take no writes, and commits wait for no standby.
_READ_ONLY, _COMMIT = "default_transaction_read_only", "synchronous_commit"

# The oldest supported server, and the first libpq that can cancel a statement within a limit.
_OLDEST_SERVER = 140000
_CANCELLING_LIBPQ = 170000

# Limits the seconds by which this machine's clock may deviate. Above the first limit, the level of
# the finding is "note". Above the second limit, it is "wrong", because such a clock makes schedules
# of minutes unreliable.
_CLOCK_NOTE, _CLOCK_WRONG = 2.0, 60.0

# The number of rights: SELECT, INSERT, UPDATE and DELETE.
_ALL_RIGHTS = 4
# Limits the dead rows of a table. Autovacuum begins at 1,000 dead rows, so ten times as many mean
# that autovacuum is stuck.
_MOST_DEAD_ROWS = 10_000

# Limits the seconds that a transaction may be open. The task lock's own transactions take
# milliseconds.
_LONG_TRANSACTION = 2.0

# Limits the sessions and the standbys that are named while commits wait.
_MOST_WAITING = 5

# Limits the overdue jobs that are named, and the characters of each id.
_MOST_JOBS, _LONGEST_ID = 5, 100

# The least number of free connections, because a deployment needs some for its new replicas.
_FEW_CONNECTIONS = 2

_FULL = {"server": FULL_SERVER, "role": FULL_ROLE, "database": FULL_DATABASE}


def examine(database: str | URL | Engine, task_lock: Table, namespace: str) -> Iterator[Finding]:
    """Yield the findings of all checks, on a connection that is opened for them.

    :param namespace: the prefix of tasks' names
    :raises TaskLockOptionError: the task lock cannot use ``database``
    """
    url = as_url(database)
    connect = opener(database, attempt=_TIMEOUT, application_name="tasklock doctor")
    yield from _libraries()
    try:
        # In a thread, because a listener of an engine, or a look-up of a host's name, may hang.
        wire = call_within(
            connect_limit(host_count(url), _TIMEOUT),
            partial(connect, 0, _TIMEOUT),
            lambda late: late.close(),
        )
    except Exception as error:  # noqa: BLE001  # an engine's listener may raise any error
        # An engine's own code may choose the server, so the servers of its URL say nothing.
        found = None if isinstance(database, Engine) else _none_writable(error, url)
        yield found or _not_connected(error, url)
        return
    with closing(wire):
        yield Finding("connection", "ok", f"to {describe(url)}")
        yield from _Examination(wire, task_lock, namespace, url).findings()


def _not_connected(error: Exception, url: URL) -> Finding:
    """Return a finding about a connection that could not be opened."""
    what, where = "connection", f"to {describe(url)}"
    cause = getattr(error, "orig", error)
    if isinstance(cause, psycopg.ProgrammingError) and cause.sqlstate is None:
        # The error names the parameter. It is not shown, because it is a part of the password if
        # the password has a "?" or "&" that was not written as an escape.
        return Finding(
            what,
            "wrong",
            f"{where}: its URL has a parameter that libpq does not have",
            "leave that parameter out; if it is a part of the password, write %3F for ? and %26 "
            "for & in the password",
        )
    if isinstance(cause, (psycopg.Error, TaskLockDatabaseError)):
        return Finding(what, "wrong", f"{where}: {one_line(cause)}", remedy_of(cause, url))
    if isinstance(cause, TaskLockError):
        return _wrong(what, cause)
    # The error's message is not shown, because it may have a secret of the application.
    return Finding(
        what,
        "wrong",
        f"{where}: the engine gives no connection, but raises {type(cause).__name__}",
        "look at the engine's listeners and its creator; engine.connect() shows the whole error",
    )


def _none_writable(error: Exception, url: URL) -> Finding | None:
    """Return a finding that no server of the URL takes writes; ``None`` if that is not the reason.

    Each server is asked by itself, because libpq's message says neither which of them is a standby,
    nor why another one is read-only.
    """
    if as_unavailable(error) is None:
        return None
    says, remedies, is_any_asked = [], [], False
    for where, parameters in _servers(url):
        try:
            server, setting, database = call_within(
                connect_limit(1, _TIMEOUT) + 2 * _TIMEOUT,
                partial(_ask_server, parameters),
                lambda _late: None,
            )
        except (psycopg.Error, TaskLockDatabaseError) as failed:
            says.append(f"{where}: {one_line(failed)}")
            remedies.append(f"at {where}: {remedy_of(failed, url)}")
            continue
        is_any_asked = True
        if not server.read_only:
            return None
        if server.is_standby:
            says.append(f"{where}: a standby")
            continue
        says.append(f"{where}: {_frozen(setting, server.role)}")
        remedies.append(f"at {where}: {reset_of(setting, server.role, database)}")
    if not is_any_asked:
        return None
    what = "its server takes no writes" if len(says) == 1 else "none of its servers takes writes"
    return Finding(
        "connection",
        "wrong",
        f"to {describe(url)}: {what}: {'; '.join(says)}",
        "; ".join(remedies) or "promote a standby, or name the primary in the URL, too",
    )


def _servers(url: URL) -> list[tuple[str, dict[str, Any]]]:
    """Return the servers of a URL, each with the parameters of a connection to it alone.

    There are none if any server would do, because then the connection fails for another reason.
    """
    parameters = connect_parameters(url)
    wanted = parameters.get("target_session_attrs") or os.environ.get("PGTARGETSESSIONATTRS")
    if wanted not in ("read-write", "primary"):
        return []
    hosts = str(parameters.get("host") or os.environ.get("PGHOST", "")).split(",")
    addresses = str(parameters.get("hostaddr", "")).split(",")
    ports = str(parameters.get("port") or os.environ.get("PGPORT", "")).split(",")
    servers = []
    for place in range(host_count(url)):
        # A single port, or a single empty name, is of all servers.
        host, address, port = (
            each[place] if place < len(each) else each[-1] for each in (hosts, addresses, ports)
        )
        chosen = {"host": host, "hostaddr": address, "port": port, "target_session_attrs": "any"}
        given = {name: value for name, value in chosen.items() if value}
        others = {name: value for name, value in parameters.items() if name not in chosen}
        servers.append((f"{host or address}:{port or 5432}", {**others, **given}))
    return servers


def _ask_server(parameters: dict[str, Any]) -> tuple[ServerState, Setting, str]:
    """Return the state of a server, why it may be read-only, and the database's name."""
    with closing(psycopg.connect(**{**_OF_DOCTOR, **parameters})) as connection:
        # As each connection of the library, because the application may have another loader.
        cursor = set_up(connection, _TIMEOUT).cursor()
        return read_server(cursor), read_setting(cursor, _READ_ONLY), connection.info.dbname


def _libraries() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("versions", "ok", f"apscheduler-tasklock {library_version()}, Python {python}")
    libpq = psycopg.pq.version()
    says = f"psycopg {psycopg.__version__} ({psycopg.pq.__impl__}), libpq {libpq // 10000}"
    if libpq >= _CANCELLING_LIBPQ:
        yield Finding("libpq", "ok", says)
        return
    yield Finding(
        "libpq",
        "note",
        f"{says}: a statement that gets no answer in time is not cancelled in the server",
        "install libpq 17 or later, or pip install 'psycopg[binary]'",
    )


class _Examination:
    """Checks a database through one connection.

    :param prefix: the prefix of tasks' names
    :param url: the URL of that connection
    """

    def __init__(self, wire: Wire, task_lock: Table, prefix: str, url: URL) -> None:
        self._wire = wire
        self._task_lock = task_lock
        self._prefix = prefix
        self._url = url
        self._tables = tables_of(task_lock)
        self._found: dict[str, Found] = {}
        self._told_of: set[tuple[int | None, str | None]] = set()
        self._server_state: ServerState | None = None
        self._is_unconfirmed = False  # whether the write of `_writable` was not confirmed

    def findings(self) -> Iterator[Finding]:
        """Yield the findings of all checks. The server comes first, because each check needs it."""
        yield from self._guarded("server", self._server)
        server = self._server_state
        if server is None:
            return
        looks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
            ("writable", self._writable),
            ("writable", self._unconfirmed),
            ("connections", self._connections),
            *((f"table {table.fullname}", partial(self._table, table)) for table in self._tables),
            ("transactions", self._transactions),
            ("revision", self._revision),
        ]
        if not server.read_only:
            looks += [
                (f"writing to {table.fullname}", partial(self._writing, table))
                for table in self._tables
            ]
        for what, look in [*looks, ("replicas", self._replicas), ("jobs", self._jobs)]:
            if self._wire.connection.closed:  # the check before has reported this
                return
            yield from self._guarded(what, look)

    @property
    def _cursor(self) -> Cursor:
        return self._wire.cursor()

    def _guarded(self, what: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
        """Yield the findings of a check. An error of the database is a finding, too."""
        try:
            yield from self._unblocked(what, look)
        except (psycopg.Error, TaskLockDatabaseError) as error:
            if self._wire.is_unanswered:
                self._wire.close()  # because the answer would be taken for the next one
            unavailable = as_unavailable(error)
            if unavailable is not None:
                yield Finding(what, "wrong", str(unavailable), "try again, or see the server's log")
            elif isinstance(error, psycopg.Error):
                role = self._role or None
                yield _wrong(
                    what, explain_rejection(error, self._task_lock, role, describe(self._url))
                )

    def _unblocked(self, what: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
        """Yield the findings of a check, or the sessions with the lock that the check waits for."""
        try:
            yield from look()
        except psycopg.errors.LockNotAvailable as error:
            yield from self._blocked(what, error)

    @contextmanager
    def _in_transaction(self, *, undone: bool = False) -> Iterator[None]:
        """Open a transaction that waits for a lock for a few seconds only.

        :param undone: whether the transaction is rolled back
        """
        with self._wire.transaction(undone=undone):
            limit_locks(self._cursor)
            yield

    def _blocked(self, what: str, error: psycopg.Error) -> Iterator[Finding]:
        """Yield the sessions that have a table locked; each session only the first time."""
        tables = [table for table in self._tables if self._may_use(table)]
        blockers = read_blockers(self._cursor, [*tables, *self._noted()])
        for blocker in _culprits(blockers):
            who = blocker.pid, blocker.gid
            if who not in self._told_of:
                self._told_of.add(who)
                yield blocking(what, blocker, self._role)
        if not blockers:
            yield Finding(
                what,
                "wrong",
                f"{one_line(error)}, and the session with the lock has released it since",
                "run doctor again",
            )

    def _noted(self) -> list[Table]:
        """Return the table with the revision, if there is one that this role may find."""
        table = noted_in(self._task_lock)
        return [table] if has_table(self._cursor, table) else []

    @property
    def _role(self) -> str:
        return self._server_state.role if self._server_state else ""

    def _may_use(self, table: Table, *rights: str) -> bool:
        """Return whether a table exists, and the role may enter its schema and has these rights."""
        found = self._found.get(table.name)
        return (
            found is not None
            and found.exists
            and found.may_enter
            and not found.lacks_rights(rights)
        )

    def _server(self) -> Iterator[Finding]:
        before = datetime.now(timezone.utc)
        server = self._server_state = read_server(self._cursor)
        after = datetime.now(timezone.utc)
        yield from self._pooler(server)
        yield _server_version(server)
        yield clock_finding(server.database_time, before, after)

    def _writable(self) -> Iterator[Finding]:
        """Send a write that changes nothing, and yield whether it is confirmed."""
        server = self._server_state
        assert server is not None
        if server.read_only:
            yield self._read_only(server)
            return
        setting = read_setting(self._cursor, _COMMIT)
        try:
            self._cursor.execute(probe(None))
        except UnconfirmedError:
            self._is_unconfirmed = True
            return
        except NoAnswerError:
            if not (server.standby_names and self._wire.is_unanswered):
                raise  # because it is not a standby that the write waits for
            yield self._not_cancelled(server)
            return
        except psycopg.errors.InsufficientPrivilege as error:
            yield Finding(
                "writable",
                "note",
                f"whether writes are confirmed is not known: {one_line(error)}",
                "let a superuser run: GRANT EXECUTE ON FUNCTION pg_logical_emit_message(boolean, "
                f"text, text) TO {quoted(server.role)}",
            )
            return
        yield _written(server, setting, self._wire.connection.info.dbname)

    def _read_only(self, server: ServerState) -> Finding:
        if server.is_standby:
            says, remedy = "this is a standby", STANDBY
        else:
            setting = read_setting(self._cursor, _READ_ONLY)
            says = _frozen(setting, server.role)
            remedy = reset_of(setting, server.role, self._wire.connection.info.dbname)
        return Finding("writable", "wrong", f"the server is read-only: {says}", remedy)

    def _unconfirmed(self) -> Iterator[Finding]:
        """Yield a finding about commits that hang, with the sessions that wait, as far as seen.

        It is a check of its own, because a check's limits end with a commit that hangs.
        """
        server = self._server_state
        assert server is not None
        if not self._is_unconfirmed:
            return
        standbys, sessions = read_standbys(self._cursor), read_unconfirmed(self._cursor)
        says = (
            "commits wait for a synchronous standby, and none has confirmed a write within "
            f"{_TIMEOUT:.0f} s; {_names(server)}; {_of_standbys(standbys)}; "
            f"{_of_sessions(sessions)}"
        )
        remedy = UNCONFIRMED
        if not server.sees_sessions:
            says += (
                f"; role {quoted(server.role)} may not see what other roles' sessions and the "
                "standbys do"
            )
            remedy += f"; {see_more(server.role)}"
        yield Finding("writable", "wrong", says, remedy)

    def _not_cancelled(self, server: ServerState) -> Finding:
        """Close the connection, and return a finding about a write that got no answer at all."""
        self._wire.close()
        says = (
            f"a write got no answer within {_TIMEOUT:.0f} s, and could not be cancelled, so that "
            f"nothing else was checked; {_names(server)}, so that it may wait for a standby"
        )
        return Finding("writable", "wrong", says, f"see the server's log; {UNCONFIRMED}")

    def _pooler(self, server: ServerState) -> Iterator[Finding]:
        if server.backend_pid == self._wire.connection.info.backend_pid:
            yield Finding("pooler", "ok", "none: the connection leads straight to the server")
            return
        try:
            with self._wire.transaction():
                pass
        except psycopg.OperationalError as error:  # pgbouncer has closed the connection
            if "statement pooling" not in str(error):
                raise
            yield Finding(
                "pooler",
                "wrong",
                f"pgbouncer pools by statement: {one_line(error)}; nothing else can be checked",
                STATEMENT_POOLING,
            )
            return
        yield Finding(
            "pooler",
            "note",
            "the connection goes through a pooler such as pgbouncer; the task lock works with it",
            "nothing has to be done; prepared statements are not used through a pooler",
        )

    def _connections(self) -> Iterator[Finding]:
        found = read_connections(self._cursor)
        says = "; ".join(f"{one.used} of {one.allowed} of the {one.of}" for one in found)
        few = [one for one in found if one.allowed - one.used < _FEW_CONNECTIONS]
        told = {"user": self._role}
        remedies = [filled(_FULL[one.of], self._url, told) for one in few]
        yield Finding("connections", "note" if few else "ok", says, "; ".join(remedies))

    def _transactions(self) -> Iterator[Finding]:
        """Yield long transactions that may have tasks' rows locked, and so hold up claims."""
        if not self._may_use(self._task_lock):
            return  # because an earlier check has reported the problem
        found = read_open_transactions(self._cursor, [self._task_lock], _LONG_TRANSACTION)
        blamed = [each for each in found if not (each.is_victim or self._is_reported(each))]
        for blocker in blamed:
            yield blocking("transactions", blocker, self._role)
        if not blamed:
            other = "other " if found else ""
            yield Finding("transactions", "ok", f"no {other}long transaction has rows locked")

    def _is_reported(self, blocker: Blocker) -> bool:
        """Return whether the finding about commits that hang is about this session, too."""
        return blocker.is_unconfirmed and self._is_unconfirmed

    def _table(self, table: Table) -> Iterator[Finding]:
        what = f"table {table.fullname}"
        [found] = look_up(self._cursor, [table])
        self._found[table.name] = found
        if not found.exists:
            # Another application's tables may be in another schema, so these are of no use if the
            # task lock table is where it is looked for.
            is_elsewhere = not self._found[self._task_lock.name].exists
            there = read_elsewhere(self._cursor, table) if is_elsewhere else []
            yield _wrong(
                what,
                in_another_schema_error(self._task_lock, [table], there, self._role)
                if there
                else missing_table_error(self._task_lock, table),
            )
            return
        problems = list(self._problems(found))
        yield from problems
        if not problems:
            yield Finding(what, "ok", "is there, with its columns, and permitted")
        if found.may_enter:
            yield _bloat(table, read_statistics(self._cursor, table))

    def _problems(self, found: Found) -> Iterator[Finding]:
        table, what, role = found.table, f"table {found.table.fullname}", self._role
        is_of_jobs = table is job_table(self._task_lock)
        if is_of_jobs and len(found.not_granted) == _ALL_RIGHTS:
            found = found.with_all_rights()
            yield Finding(
                what,
                "note",
                f"role {quoted(role)} has no rights on it, so that a TaskLockJobStore does not "
                "start here; only a TaskLockJobStore needs these rights",
                "if there is to be a TaskLockJobStore, let the table's owner run: GRANT SELECT, "
                f"INSERT, UPDATE, DELETE ON {quoted_name(table)} TO {quoted(role)}",
            )
        elif found.not_granted == ["DELETE"] and found.may_enter:
            found = found.with_all_rights()
            yield Finding(
                what,
                "note",
                f"role {quoted(role)} may not delete: {_not_deleted(table, self._task_lock)}",
                f"let its owner run: GRANT DELETE ON {quoted_name(table)} TO {quoted(role)}",
            )
        for problem in problems_of([found], self._task_lock, role):
            yield _wrong(what, problem)

    def _revision(self) -> Iterator[Finding]:
        if not self._may_use(self._task_lock):
            return  # because an earlier check has reported the problem
        try:
            with self._in_transaction():
                revision = read_revision(self._cursor, self._task_lock)
        except psycopg.errors.InsufficientPrivilege:
            role = quoted(self._role)
            noted = noted_in(self._task_lock)
            yield Finding(
                "revision",
                "note",
                f"not known: role {role} may not read {noted.fullname}; the tables' columns were "
                "checked",
                "to check the revision, run `apscheduler-tasklock doctor` as the tables' owner, or "
                f"let the owner run: GRANT SELECT ON {quoted_name(noted)} TO {role}",
            )
            return
        says = f"{revision.there}, and this library needs {revision.head}"
        if revision.there == revision.head:
            yield Finding("revision", "ok", revision.head)
        elif revision.there is None:
            yield Finding(
                "revision",
                "note",
                "none is noted, although the tables are there",
                f"note it with: {with_table_options(UPGRADE_COMMAND, self._task_lock)}",
            )
        elif revision.is_known:
            upgrade = with_table_options(UPGRADE_COMMAND, self._task_lock)
            yield Finding("revision", "wrong", says, f"bring them up to date with: {upgrade}")
        else:
            yield Finding(
                "revision", "note", f"{says}: the tables are newer", "upgrade the library"
            )

    def _writing(self, table: Table) -> Iterator[Finding]:
        """Write a row and roll it back, to see whether a policy or a trigger forbids claims."""
        found = self._found.get(table.name)
        if not self._may_use(table, "SELECT", "INSERT", "UPDATE"):
            return  # because an earlier check has reported the problem
        if found is None or found.lacks_columns or found.without_policy:
            return
        with self._in_transaction(undone=True):
            is_seen = try_to_write(self._cursor, table, self._prefix)
        what = f"writing to {table.fullname}"
        if is_seen:
            yield Finding(what, "ok", "a row was written and rolled back")
            return
        yield Finding(
            what,
            "wrong",
            "a row that was just written cannot be seen: a policy or a trigger hides it",
            f"look at the policies and triggers with: \\d {quoted_name(table)}",
        )

    def _replicas(self) -> Iterator[Finding]:
        table = replica_table(self._task_lock)
        if not self._may_use(table, "SELECT"):
            return  # because an earlier check has reported the problem
        rows = self._verdict_rows()
        if rows is not None:
            yield from _of_replicas(rows)
        if "rejected" in self._found[table.name].lacks_columns:
            return  # because an earlier check has reported the problem
        rejected = read_rejected(self._cursor, self._task_lock, SILENT_AFTER)
        for entry, replicas in rejected.items():
            if entry:  # anybody who can write the table may have written NULL
                yield _rejected(entry, replicas)

    def _verdict_rows(self) -> WatchedRows | None:
        """Return the replicas, for the verdict; ``None`` if they cannot be read.

        An earlier check has then reported the problem.
        """
        if not self._is_readable(replica_table(self._task_lock), self._task_lock):
            return None
        with self._in_transaction():
            operations = Operations(self._task_lock)
            now = operations.database_time(self._cursor)
            return WatchedRows(now, replicas=operations.fleet(self._cursor, None))

    def _is_readable(self, *tables: Table) -> bool:
        return all(
            self._may_use(table, "SELECT") and not self._found[table.name].lacks_columns
            for table in tables
        )

    def _jobs(self) -> Iterator[Finding]:
        """Yield what the verdict says of overdue stored jobs, which may have no task so far."""
        if not self._is_readable(job_table(self._task_lock), self._task_lock):
            return  # because an earlier check has reported the problem
        operations, rows = Operations(self._task_lock), self._verdict_rows()
        with self._in_transaction():
            found = operations.jobs(self._cursor, overdue=True)
            jobs = {
                job.task or f"{self._prefix}{job.id}": job
                for job in found
                if job.task is None or job.task.startswith(self._prefix)
            }
            having: Mapping[str, Sequence[str]] | None = None
            if rows is not None and jobs:
                having = operations.having(self._cursor, list(jobs))
            now = operations.database_time(self._cursor)
        told = WatchedRows(
            now, replicas=None if rows is None else rows.replicas, jobs=jobs, having=having
        )
        yield from _overdue_jobs(told)


def _wrong(what: str, error: TaskLockError, says: str = "") -> Finding:
    """Return a finding from an error whose message has the remedy behind a semicolon."""
    problem, _, remedy = str(error).partition("; ")
    return Finding(what, "wrong", says or problem, remedy)


def _rejected(entry: str, replicas: Sequence[str]) -> Finding:
    """Return a finding about statements of replicas that the database rejects.

    The text of the row is quoted, and is not shown as a remedy, because anybody who can write the
    table may have written it.
    """
    what, _, why = entry.partition(": ")
    says = f"{what} rejected on {', '.join(replicas)}, which say: {json.dumps(why)}"
    remedy = (
        "see the logs of these replicas, or run doctor as their role; the quoted text comes from "
        "a table: run no command in it that you do not know"
    )
    return Finding("rejected", "wrong", says, remedy)


def _of_replicas(rows: WatchedRows) -> Iterator[Finding]:
    """Yield how many replicas are alive, and whether they differ, as the verdict says it."""
    alive = [replica.version for replica in rows.replicas or () if replica.alive]
    differ = [each for each in findings_of(rows) if each.what in (VERSIONS, RELEASES)]
    for finding in differ:
        yield Finding("replicas", "note", finding.says, finding.remedy)
    if not alive:
        yield Finding("replicas", "note", "none is alive", "start a scheduler, or see its log")
    elif not differ:
        numbers = sorted(Counter(alive).items())
        told = ", ".join(f"{number} with version {cut(each, 50)}" for each, number in numbers)
        yield Finding("replicas", "ok", told)


def _overdue_jobs(rows: WatchedRows) -> Iterator[Finding]:
    """Yield what the verdict says of overdue stored jobs, of the first of many."""
    found = [each for each in findings_of(rows) if each.task in rows.jobs]
    for finding in found[:_MOST_JOBS]:
        name = json.dumps(cut(finding.task, _LONGEST_ID), ensure_ascii=False)
        yield Finding("jobs", "wrong", f"{name} is overdue {finding.says}", finding.remedy)
    if len(found) > _MOST_JOBS:
        more = len(found) - _MOST_JOBS
        yield Finding("jobs", "wrong", f"{more} more are overdue", "see `jobs`")


def _culprits(blockers: Sequence[Blocker]) -> Sequence[Blocker]:
    """Return the sessions to blame: no session of this library that another one keeps waiting."""
    return [each for each in blockers if not each.is_victim] or blockers


def blocking(what: str, blocker: Blocker, own_role: str) -> Finding:
    """Return a finding about a session that blocks others, with the way to end it.

    :param own_role: the role of the doctor's connection
    """
    if blocker.gid is not None:
        who = f"the prepared transaction {blocker.gid!r}"
    else:
        application = blocker.application or "an application without a name"
        who = f"pid {blocker.pid} ({application})"
    since = "since a time that this role may not see"
    if blocker.since is not None:
        since = f"in a transaction since {rfc3339(blocker.since, 'seconds')}"
    state = f", now {blocker.state}" if blocker.state else ""
    if blocker.is_unconfirmed:
        state = ", and waits for a synchronous standby that has to confirm its commit"
    if blocker.modes is None:
        does = "keeps another session waiting that wants the table locked"
    elif not blocker.holds:
        does = f"waits for {blocker.modes}, and all other sessions wait behind it"
    else:
        does = f"has {blocker.modes}"
    return Finding(
        what,
        "wrong",
        f"blocked: {who}, role {blocker.role or 'unknown'}, {does}, {since}{state}",
        end_of(blocker, own_role),
    )


def _server_version(server: ServerState) -> Finding:
    says = f"PostgreSQL {server.version}"
    if server.version_number >= _OLDEST_SERVER:
        return Finding("server", "ok", says)
    return Finding("server", "wrong", f"{says} is not tested", "upgrade to PostgreSQL 14 or later")


def _frozen(setting: Setting, role: str) -> str:
    return f"{setting.name} is on, {set_by(setting, role)}"


def _written(server: ServerState, setting: Setting, database: str) -> Finding:
    """Return a finding about a write that was confirmed, with the standbys that it waited for."""
    says = "the server takes writes, and has confirmed one"
    if setting.value in ("off", "local"):
        says += (
            f"; role {quoted(server.role)} waits for no standby, because {setting.name} is "
            f"{setting.value}, {set_by(setting, server.role)}"
        )
        if server.standby_names:
            return Finding(
                "writable",
                "note",
                f"{says}: a failover may lose claims, so that a job is run twice",
                reset_of(setting, server.role, database),
            )
    elif server.standby_names:
        says += f"; commits wait for the standbys {server.standby_names!r}"
    return Finding("writable", "ok", says)


def _names(server: ServerState) -> str:
    return f"synchronous_standby_names is {server.standby_names!r}"


def _of_standbys(standbys: Sequence[Standby]) -> str:
    if not standbys:
        return "no standby is connected"
    named = ", ".join(
        f"{cut(each.name, _LONGEST_ID)} ({each.state}, {each.kind})"
        if each.state
        else cut(each.name, _LONGEST_ID)
        for each in standbys[:_MOST_WAITING]
    )
    more = " and more" if len(standbys) > _MOST_WAITING else ""
    return f"connected standbys: {named}{more}"


def _of_sessions(sessions: Sequence[Unconfirmed]) -> str:
    if not sessions:
        return "no session that is seen waits now"
    named = ", ".join(
        f"pid {each.pid} ({each.application or 'an application without a name'})"
        for each in sessions[:_MOST_WAITING]
    )
    more = f" and {len(sessions) - _MOST_WAITING} more" if len(sessions) > _MOST_WAITING else ""
    since = sessions[0].since
    how_long = f", the first in a transaction since {rfc3339(since, 'seconds')}" if since else ""
    return f"sessions that wait for a standby: {named}{more}{how_long}"


def clock_finding(database_time: datetime, before: datetime, after: datetime) -> Finding:
    """Return a finding about this machine's clock.

    :param before: this machine's time right before the database's time was read
    :param after: this machine's time right after the database's time was read
    """
    off = (before + (after - before) / 2 - database_time).total_seconds()
    ahead = "ahead of" if off > 0 else "behind"
    says = f"this machine's clock is {abs(off):.1f} s {ahead} the database's"
    surely_off = abs(off) - (after - before).total_seconds() / 2
    level = "ok"
    if surely_off > _CLOCK_NOTE:
        level = "wrong" if surely_off > _CLOCK_WRONG else "note"
    remedy = "" if level == "ok" else "let both machines keep their time with NTP"
    return Finding("clock", level, says, remedy)


def _bloat(table: Table, counted: Statistics) -> Finding:
    what, dead = f"bloat of {table.fullname}", counted.dead_rows
    says = f"{dead} dead rows, {counted.live_rows} live ones"
    if dead <= max(_MOST_DEAD_ROWS, counted.live_rows):
        return Finding(what, "ok", says)
    return Finding(
        what,
        "wrong",
        f"{says}: vacuum does not remove them fast enough",
        f"VACUUM {quoted_name(table)}; if that does not help, end old transactions "
        "(pg_stat_activity.backend_xmin, pg_prepared_xacts, pg_replication_slots), and see that "
        "autovacuum is on",
    )


def _not_deleted(table: Table, task_lock: Table) -> str:
    if table is task_lock:
        return "rows of one-off jobs stay, and `forget` is not possible"
    if table is job_table(task_lock):
        return "the job store does not start"
    return "rows that nobody needs any more stay"
