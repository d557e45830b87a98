"""A server whose commits wait for a synchronous standby that does not exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.support.polling import eventually

# The sessions that wait for a standby, but for the test's own.
_WAITING = """
    SELECT pid, query FROM pg_stat_activity
    WHERE wait_event = 'SyncRep' AND pid <> pg_backend_pid() ORDER BY pid
"""


class LonelyServer:
    """A server that can be told to wait for a standby, which never comes.

    :ivar url: the URL of its database
    """

    def __init__(self, server: EmbeddedServer) -> None:
        self.url = server.url
        # Its own statements wait for nobody.
        self._connection: psycopg.Connection[Any] = psycopg.connect(
            server.url, autocommit=True, options="-csynchronous_commit=local"
        )

    def close(self) -> None:
        self._connection.close()

    def run(self, statement: Any, *values: object) -> list[Any]:
        """Run a statement that waits for no standby; return its rows."""
        cursor = self._connection.execute(statement, values)
        return cursor.fetchall() if cursor.description else []

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Let commits wait, as long as the context lasts."""
        self.wait_for("'nobody'")
        try:
            yield
        finally:
            self.wait_for("''")

    def wait_for(self, names: str) -> None:
        """Let commits wait for the standbys of these names."""
        self.run(f"ALTER SYSTEM SET synchronous_standby_names = {names}")
        self.run("SELECT pg_reload_conf()")
        # Other sessions read the configuration when they are idle, as this one does.
        wanted = names.strip("'")
        eventually(lambda: self.run("SHOW synchronous_standby_names") == [(wanted,)])
        if wanted:
            # Commits wait only when the checkpointer, too, has read the configuration.
            eventually(self._hangs)

    def _hangs(self) -> bool:
        """Return whether a commit waits for a standby."""
        waiting = "-csynchronous_commit=on"
        with psycopg.connect(self.url, autocommit=True, options=waiting) as connection:
            connection.pgconn.send_query(b"SELECT pg_logical_emit_message(true, '', '')")
            pid = connection.info.backend_pid
            find = """SELECT wait_event FROM pg_stat_activity WHERE pid = %s
                      AND (wait_event = 'SyncRep' OR (state = 'idle' AND query <> ''))"""
            [(found,)] = eventually(lambda: self.run(find, pid))
            waits: bool = found == "SyncRep"
            if waits:
                self.cancel(pid)
            while connection.pgconn.get_result() is not None:
                pass
            return waits

    def waiting(self) -> Sequence[tuple[int, str]]:
        """Return the sessions that wait for a standby, each with its statement."""
        return self.run(_WAITING)

    def one_waiting(self, but: int = 0) -> int:
        """Wait until one session waits for a standby, other than the given one; return its pid."""

        def found() -> int | None:
            pids = [pid for pid, _ in self.waiting()]
            return pids[0] if len(pids) == 1 and pids[0] != but else None

        return eventually(found, instead=self.waiting)  # type: ignore[no-any-return]  # Any

    def cancel_first(self) -> None:
        """Cancel the first session that waits for a standby, and wait for the next one."""
        first = self.one_waiting()
        self.cancel(first)
        self.one_waiting(but=first)

    def cancel(self, pid: int) -> None:
        """Cancel the statement of a session."""
        assert self.run("SELECT pg_cancel_backend(%s)", pid) == [(True,)]

    def terminate(self, pid: int) -> None:
        """End a session."""
        assert self.run("SELECT pg_terminate_backend(%s)", pid) == [(True,)]
