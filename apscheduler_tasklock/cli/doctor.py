"""The command ``doctor``: what is wrong with the set-up, and what to do about it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psycopg
from sqlalchemy import Table

from apscheduler_tasklock._database.connection import bounded_waits, connector, raw_cursor
from apscheduler_tasklock._database.deadline import Deadline
from apscheduler_tasklock._database.errors import as_unavailable, one_line
from apscheduler_tasklock._database.url import describe, parse_url
from apscheduler_tasklock.cli.exits import FAILED, OK
from apscheduler_tasklock.cli.output import Cell, output, print_json
from apscheduler_tasklock.cli.output import Table as Shown
from apscheduler_tasklock.cli.target import database_of
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.schema.check import (
    explain_rejection,
    missing_grant,
    missing_policy,
    missing_table,
    old_table,
)
from apscheduler_tasklock.schema.inspection import (
    ServerState,
    TableState,
    read_rejected,
    read_revision,
    read_server,
    read_table,
    read_versions,
    try_to_write,
)
from apscheduler_tasklock.schema.table import (
    job_table,
    quoted,
    quoted_name,
    replica_table,
    run_table,
    task_lock_table,
)

# Seconds within which each answer has to come.
_TIMEOUT = 5.0

# The oldest server and the first libpq that do all that this library asks of them.
_OLDEST_SERVER = 140000
_CANCELLING_LIBPQ = 170000

# Seconds: schedules of minutes suffer from the second.
_CLOCK_NOTE, _CLOCK_WRONG = 2.0, 60.0

# SELECT, INSERT, UPDATE and DELETE.
_ALL_RIGHTS = 4
# Autovacuum comes by after 1,000 dead rows; with ten times as many it does not get through.
_MOST_DEAD_ROWS = 10_000

# As the operations have it: three intervals of a replica.
_ALIVE_FOR = 90.0

_STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}


@dataclass(frozen=True)
class Finding:
    """Something that was looked at.

    :ivar what: what that is
    :ivar level: ``"ok"``, ``"note"`` or ``"wrong"``
    :ivar says: how it is
    :ivar remedy: what to do; ``""`` if nothing
    """

    what: str
    level: str
    says: str
    remedy: str = ""


def doctor(options: argparse.Namespace) -> int:
    """Look at the set-up; return 0 if nothing is wrong."""
    findings = list(_examine(options))
    is_wrong = any(finding.level == "wrong" for finding in findings)
    if options.json:
        print_json({"ok": not is_wrong, "findings": findings})
        return FAILED if is_wrong else OK
    shown = output()
    rows: list[list[Cell | str]] = [
        [Cell(f.level, _STYLES[f.level]), f.what, f.says] for f in findings
    ]
    shown.print_table(Shown(("", "what", "how it is"), rows))
    for finding in findings:
        if finding.remedy:
            shown.print(f"{finding.what}: {finding.remedy}", _STYLES[finding.level])
    return FAILED if is_wrong else OK


def _examine(options: argparse.Namespace) -> Iterator[Finding]:
    url = parse_url(database_of(options))
    task_lock = task_lock_table(options.table, options.schema)
    yield from _libraries()
    try:
        connection = connector(url, _TIMEOUT, "tasklock doctor", None)()
    except psycopg.Error as error:
        yield _no_connection(error, describe(url))
        return
    with connection, bounded_waits(connection, _TIMEOUT, Deadline(None)):
        yield Finding("connection", "ok", f"to {describe(url)}")
        examination = _Examination(connection, task_lock, options.namespace, describe(url))
        yield from examination.findings()


def _libraries() -> Iterator[Finding]:
    ours = _version_of("apscheduler-tasklock")
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("versions", "ok", f"apscheduler-tasklock {ours}, Python {python}")
    libpq = psycopg.pq.version()
    says = f"psycopg {psycopg.__version__} ({psycopg.pq.__impl__}), libpq {libpq // 10000}"
    if libpq >= _CANCELLING_LIBPQ:
        yield Finding("libpq", "ok", says)
        return
    yield Finding(
        "libpq",
        "note",
        f"{says}: a statement that gets no answer in time is not cancelled in the server",
        "install libpq 17 or later, or pip install 'apscheduler-tasklock[binary]'",
    )


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a folder where it is not installed
        return "(not installed)"


def _no_connection(error: psycopg.Error, where: str) -> Finding:
    if as_unavailable(error) is None:
        remedy = "check the user, the password and the database's name, and pg_hba.conf"
    else:
        remedy = (
            "check the host and the port, that the server runs, and that no firewall is between"
        )
    return Finding("connection", "wrong", f"to {where}: {one_line(error)}", remedy)


class _Examination:
    """Looks at a database through one connection.

    :param prefix: of tasks' names
    :param where: the database, for messages
    """

    def __init__(
        self, connection: psycopg.Connection[Any], task_lock: Table, prefix: str, where: str
    ) -> None:
        self._connection = connection
        self._task_lock = task_lock
        self._prefix = prefix
        self._where = where
        beside = (run_table(task_lock), replica_table(task_lock), job_table(task_lock))
        self._tables = (task_lock, *beside)
        self._states: dict[str, TableState] = {}
        self._server_state: ServerState | None = None

    def findings(self) -> Iterator[Finding]:
        """Yield what is found, from what all depends on to what little does."""
        yield from self._guarded("server", self._server)
        server = self._server_state
        if server is None:
            return
        for table in self._tables:
            yield from self._guarded(f"table {table.fullname}", partial(self._table, table))
        yield from self._guarded("revision", self._revision)
        if not server.read_only:
            for table in self._tables:
                yield from self._guarded(
                    f"writing to {table.fullname}", partial(self._writing, table)
                )
        yield from self._guarded("replicas", self._replicas)

    @property
    def _cursor(self) -> psycopg.RawCursor[Any]:
        return raw_cursor(self._connection)

    def _guarded(self, what: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
        """Yield what a look finds, and an error of the database as a finding."""
        try:
            yield from look()
        except psycopg.Error as error:
            unavailable = as_unavailable(error)
            if unavailable is not None:
                yield Finding(what, "wrong", str(unavailable), "try again, or see the server's log")
            else:
                role = self._server_state.role if self._server_state else None
                yield _wrong(what, explain_rejection(error, self._task_lock, role, self._where))

    def _server(self) -> Iterator[Finding]:
        before = datetime.now(timezone.utc)
        server = self._server_state = read_server(self._cursor)
        after = datetime.now(timezone.utc)
        yield self._pooler(server)
        yield _server_version(server)
        yield _read_only(server)
        yield clock_finding(server.database_time, before, after)

    def _pooler(self, server: ServerState) -> Finding:
        if server.backend_pid == self._connection.info.backend_pid:
            return Finding("pooler", "ok", "none: the connection leads straight to the server")
        return Finding(
            "pooler",
            "note",
            "a pooler such as pgbouncer is in the way; the task lock works through it",
            "nothing has to be done; prepared statements are not used through it",
        )

    def _table(self, table: Table) -> Iterator[Finding]:
        what = f"table {table.fullname}"
        state = self._states[table.name] = read_table(self._cursor, table)
        if not state.exists:
            yield _wrong(what, missing_table(self._task_lock, table))
            return
        problems = list(self._problems(table, state))
        yield from problems
        if not problems:
            yield Finding(what, "ok", "is there, with its columns, and permitted")
        yield _bloat(table, state)

    def _problems(self, table: Table, state: TableState) -> Iterator[Finding]:
        what, role = (
            f"table {table.fullname}",
            self._server_state.role if self._server_state else "",
        )
        missing = [column.name for column in table.columns if column.name not in state.columns]
        if missing:
            yield _wrong(what, old_table(self._task_lock, missing[0]))
        needed = set(state.not_granted) - {"DELETE"}
        if table is job_table(self._task_lock) and len(state.not_granted) == _ALL_RIGHTS:
            yield Finding(
                what,
                "note",
                f"role {quoted(role)} has no rights on it, so that a TaskLockJobStore does not "
                "start here; nothing else needs them",
                "if there is to be one, let its owner run: GRANT SELECT, INSERT, UPDATE, DELETE ON "
                f"{quoted_name(table)} TO {quoted(role)}",
            )
        elif needed:
            yield _wrong(what, missing_grant(table, role))
        elif "DELETE" in state.not_granted:
            yield Finding(
                what,
                "note",
                f"role {quoted(role)} may not delete: {_not_deleted(table, self._task_lock)}",
                f"let its owner run: GRANT DELETE ON {quoted_name(table)} TO {quoted(role)}",
            )
        if state.without_policy:
            yield _wrong(what, missing_policy(table, role, state.without_policy))

    def _revision(self) -> Iterator[Finding]:
        if not self._states.get(self._task_lock.name, _NO_TABLE).exists:
            return  # told already
        try:
            revision = read_revision(self._cursor, self._task_lock)
        except psycopg.errors.InsufficientPrivilege:
            yield Finding("revision", "ok", "not looked at: only the tables' owner may read it")
            return
        says = f"{revision.there}, and this library needs {revision.head}"
        if revision.there == revision.head:
            yield Finding("revision", "ok", revision.head)
        elif revision.there is None:
            yield Finding(
                "revision",
                "note",
                "none is noted, so `apscheduler-tasklock upgrade` would create the tables again",
                f"if the tables are up to date, note it: alembic stamp {revision.head}",
            )
        elif revision.is_known:
            yield _wrong("revision", old_table(self._task_lock), says)
        else:
            yield Finding(
                "revision", "note", f"{says}: the tables are newer", "upgrade the library"
            )

    def _writing(self, table: Table) -> Iterator[Finding]:
        """Try what a claim does, and roll it back: policies and triggers have the last word."""
        state = self._states.get(table.name, _NO_TABLE)
        columns = {column.name for column in table.columns}
        is_told = set(state.not_granted) - {"DELETE"} or state.without_policy
        if not state.exists or columns - set(state.columns) or is_told:
            return
        with self._connection.transaction(force_rollback=True):
            is_seen = try_to_write(self._cursor, table, self._task_lock, self._prefix)
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
        state = self._states.get(replica_table(self._task_lock).name, _NO_TABLE)
        if not state.exists or "SELECT" in state.not_granted:
            return  # told already
        versions = read_versions(self._cursor, self._task_lock, _ALIVE_FOR)
        says = ", ".join(f"{count} with version {name}" for name, count in versions.items())
        if len(versions) > 1:
            yield Finding(
                "replicas",
                "wrong",
                f"they differ: {says}; an older one may not obey a pause",
                "finish the deployment, so that all have one version",
            )
        elif versions:
            yield Finding("replicas", "ok", says)
        else:
            yield Finding("replicas", "note", "none is alive", "start a scheduler, or see its log")
        if "rejected" not in state.columns:
            return  # told already
        rejected = read_rejected(self._cursor, self._task_lock, _ALIVE_FOR)
        for entry, replicas in rejected.items():
            yield _rejected(entry, replicas)


_NO_TABLE = TableState(False, (), (), (), 0, 0, None)


def _wrong(what: str, error: TaskLockError, says: str = "") -> Finding:
    """Return a finding of an error, whose message names the remedy last."""
    problem, _, remedy = str(error).partition("; ")
    return Finding(what, "wrong", says or problem, remedy)


def _rejected(entry: str, replicas: Sequence[str]) -> Finding:
    """Return a finding of what the database rejects of replicas' work, as they have told."""
    what, _, why = entry.partition(": ")
    problem, _, remedy = why.partition("; ")
    says = f"{what} rejected on {', '.join(replicas)}: {problem}"
    return Finding("rejected", "wrong", says, remedy or "see the logs of these replicas")


def _server_version(server: ServerState) -> Finding:
    says = f"PostgreSQL {server.version}"
    if server.version_number >= _OLDEST_SERVER:
        return Finding("server", "ok", says)
    return Finding("server", "wrong", f"{says} is not tested", "upgrade to PostgreSQL 14 or later")


def _read_only(server: ServerState) -> Finding:
    if not server.read_only:
        return Finding("writable", "ok", "the server takes writes")
    if server.is_standby:
        says, remedy = "this is a standby", "name the primary; or all servers, in one URL"
    else:
        says = "default_transaction_read_only is on"
        remedy = "ALTER DATABASE ... RESET default_transaction_read_only, or the same for the role"
    return Finding("writable", "wrong", f"the server is read-only: {says}", remedy)


def clock_finding(database_time: datetime, before: datetime, after: datetime) -> Finding:
    """Return what is to be told of this machine's clock.

    :param before: its time before the database was asked for its own
    :param after: its time after that
    """
    off = (before + (after - before) / 2 - database_time).total_seconds()
    ahead = "ahead of" if off > 0 else "behind"
    says = f"this machine's is {abs(off):.1f} s {ahead} the database's"
    surely_off = abs(off) - (after - before).total_seconds() / 2
    level = "ok"
    if surely_off > _CLOCK_NOTE:
        level = "wrong" if surely_off > _CLOCK_WRONG else "note"
    remedy = "" if level == "ok" else "let both machines keep their time with NTP"
    return Finding("clock", level, says, remedy)


def _bloat(table: Table, state: TableState) -> Finding:
    what, dead = f"bloat of {table.fullname}", state.dead_rows
    says = f"{dead} dead rows, {state.live_rows} live ones"
    if dead <= max(_MOST_DEAD_ROWS, state.live_rows):
        return Finding(what, "ok", says)
    return Finding(
        what,
        "wrong",
        f"{says}: vacuum does not get through",
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
