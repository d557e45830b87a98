"""Databases of the tests: one is made ready again for the next test, while it is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn

from tests.support.postgres import Server

Connection = psycopg.Connection[Any]

# What a change of a database's objects, rights or settings writes to: a row that is new there has
# a higher ``xmin``, and one that is gone is missed in the count. Vacuum and analyze change rows of
# pg_class in place, which moves neither.
CATALOGS = {
    "pg_class": "oid >= 16384",
    "pg_attribute": "attrelid >= 16384",
    "pg_constraint": "oid >= 16384",
    "pg_proc": "oid >= 16384",
    "pg_trigger": "oid >= 16384",
    "pg_type": "oid >= 16384",
    "pg_event_trigger": "true",
    "pg_extension": "true",
    "pg_foreign_server": "true",
    "pg_namespace": "nspname NOT LIKE 'pg_temp%' AND nspname NOT LIKE 'pg_toast_temp%'",
    "pg_operator": "oid >= 16384",
    "pg_policy": "true",
    "pg_publication": "true",
    "pg_rewrite": "oid >= 16384",
    "pg_default_acl": "true",
    "pg_db_role_setting": "setdatabase = (SELECT oid FROM here)",
    "pg_database": "oid = (SELECT oid FROM here)",
    "pg_description": "objoid >= 16384",  # the jobs' table has its id in its comment
}

# One row, which compares as a whole.
FINGERPRINT = (
    "WITH here AS (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())"
    " SELECT "
    + ", ".join(
        f"(SELECT (pg_catalog.count(*), pg_catalog.max(xmin::text::bigint))::text"
        f" FROM pg_catalog.{catalog} WHERE {condition})"
        for catalog, condition in CATALOGS.items()
    )
)

# The migration's own row stays, so no test may have changed it.
VERSIONS = "task_lock_alembic_version"
NOTED = f"TABLE public.{VERSIONS}"

# A database in which a test has left more rows is dropped.
MOST_DELETED = 1000

# Limits how long the sessions that a test left open have to end, in milliseconds.
SESSION_END = 30_000

# The function below the view `pg_stat_activity`, which takes half as long in a new session.
END_OTHERS = (
    "SELECT pg_catalog.pg_terminate_backend(pid, %s) FROM pg_catalog.pg_stat_get_activity(NULL)"
    " WHERE pid <> ALL (%s) AND datid = (SELECT oid FROM pg_catalog.pg_database"
    " WHERE datname = pg_catalog.current_database())"
)

# Brings a session back to how it began. What the server remembers of catalogs stays: a new session
# looks all of it up again, and that costs more than a test's statements.
AS_BEGUN = b"DISCARD ALL"


@dataclass
class KeptDatabase:
    """A database for one test after the other, empty for each; a new one where a test changed it.

    What a test may have changed is told by the catalogs: a database whose tables, functions, rights
    or settings are not as they were is dropped. Else its rows are deleted, which takes a hundredth
    of the time of a copy.

    :ivar server: the run's server
    :ivar template: the name of the database that it is copied from
    :ivar prepare: does to a new copy what a copy does not take over, such as settings
    :ivar refill: sets rows that a test expects, after all rows were deleted
    """

    server: Server
    template: str
    prepare: Callable[[Connection], None] = lambda _: None
    refill: Callable[[Connection], None] = lambda _: None
    url: str | None = None
    _fingerprint: Any = None
    _noted: Any = None
    _tables: list[str] = field(default_factory=list)
    _sessions: list[PGconn] = field(default_factory=list)

    def take(self) -> str:
        """Return the URL of an empty database with the template's tables."""
        if self.url is None:
            url = self.server.create_database(self.template)
            with psycopg.connect(url, autocommit=True) as connection:
                self.prepare(connection)
            self.url = url
            try:
                self._note_how_it_is(url)
            except BaseException:
                self.drop()
                raise
        return self.url

    @contextmanager
    def session(self, url: str) -> Iterator[Connection]:
        """A connection in autocommit mode, whose session is kept if its database is this one."""
        if url != self.url:
            with psycopg.connect(url, autocommit=True) as connection:
                yield connection
            return
        if self._sessions:
            connection = Connection(self._sessions.pop())
            connection.autocommit = True
        else:
            connection = psycopg.connect(url, autocommit=True)
        try:
            yield connection
        finally:
            pgconn = connection.pgconn
            if pgconn.transaction_status == TransactionStatus.IDLE:
                self._sessions.append(pgconn)
                del connection.pgconn  # so that nobody has it any more
            else:
                connection.close()

    def give_back(self) -> None:
        """Make the database ready for the next test, or drop it, also if a timeout interrupts."""
        is_ready = False
        try:
            self._sessions = [session for session in self._sessions if _begins_anew(session)]
            with suppress(psycopg.OperationalError):  # it is gone, or takes no connections
                is_ready = self.url is not None and self._is_ready_again(self.url)
        finally:
            if not is_ready:
                self.drop()

    def drop(self) -> None:
        while self._sessions:
            self._sessions.pop().finish()
        url, self.url = self.url, None
        if url is not None:
            self.server.drop_database(url)

    def _note_how_it_is(self, url: str) -> None:
        # A setting of the database holds in sessions that begin after it.
        with self.session(url) as connection:
            self.refill(connection)
            self._tables = _tables(connection)
            self._fingerprint = connection.execute(FINGERPRINT).fetchone()
            self._noted = connection.execute(NOTED).fetchall()

    def _is_ready_again(self, url: str) -> bool:
        with self.session(url) as connection:
            return self._can_be_handed_on(connection)

    def _can_be_handed_on(self, connection: Connection) -> bool:
        kept = [session.backend_pid for session in (connection.pgconn, *self._sessions)]
        left = connection.execute(END_OTHERS, [SESSION_END, kept]).fetchall()
        if not all(ended for (ended,) in left):
            return False
        if connection.execute(FINGERPRINT).fetchone() != self._fingerprint:
            return False
        if connection.execute(NOTED).fetchall() != self._noted:
            return False
        delete = [sql.SQL("DELETE FROM " + table) for table in self._tables]  # type: ignore[arg-type]  # quoted by the server
        deleted = connection.execute(sql.SQL("; ").join(delete))
        rows = deleted.rowcount
        while deleted.nextset():
            rows += deleted.rowcount
        self.refill(connection)
        # Until they are vacuumed, the rows of a test that had thousands would be bloat to the next.
        return rows <= MOST_DELETED


def _begins_anew(session: PGconn) -> bool:
    """Let a kept session be as it began; return whether it is still there."""
    if session.exec_(AS_BEGUN).status == ExecStatus.COMMAND_OK:
        return True
    session.finish()
    return False


def _tables(connection: Connection) -> list[str]:
    """Return the names, quoted, of the tables whose rows are the tests'."""
    found = connection.execute(
        "SELECT oid::pg_catalog.regclass::text FROM pg_catalog.pg_class"
        " WHERE relkind = 'r' AND oid >= 16384 AND relname <> %s",
        [VERSIONS],
    )
    return [name for (name,) in found]
