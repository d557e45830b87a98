"""A psycopg connection on which every wait has a limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import psycopg


class BoundedConnection(psycopg.Connection[Any]):
    """A psycopg connection that does not wait for an answer for ever.

    TCP's own limits notice a dead path, but not a server that is stopped, waits for a lock, or
    a middleman that swallows the answer. A ``statement_timeout`` would be session state, which
    pgbouncer in transaction mode gives to somebody else.

    :ivar attempt_timeout: seconds that it waits for an answer at most
    :ivar answer_timeout: seconds that it waits for the next one
    """

    attempt_timeout: float = 10.0
    answer_timeout: float = attempt_timeout

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        """Wait as psycopg does, at most ``answer_timeout`` seconds."""
        try:
            return super().wait(_until(gen, self.answer_timeout), *args, **kwargs)
        except _NoAnswerError:
            # The statement should not be carried out later, when nobody waits for it. Where libpq
            # is too old to do this within a time limit, closing the connection has to do.
            if psycopg.capabilities.has_cancel_safe():
                with suppress(psycopg.Error):
                    self.cancel_safe(timeout=1.0)
            raise


def wait_at_most(connection: psycopg.Connection[Any], seconds: float) -> None:
    """Let a connection of ours wait no longer for its next answers, so that there is time again."""
    if isinstance(connection, BoundedConnection):
        connection.answer_timeout = min(connection.attempt_timeout, seconds)


class _NoAnswerError(psycopg.OperationalError):
    """The server did not answer in time."""


def _until(gen: Generator[Any, Any, Any], seconds: float) -> Generator[Any, Any, Any]:
    """Pass a psycopg wait on, and end it after so many seconds. psycopg wakes it every 0.1 s."""
    deadline = time.monotonic() + seconds
    ready = None
    while True:
        try:
            wanted = next(gen) if ready is None else gen.send(ready)
        except StopIteration as finished:
            return finished.value
        ready = yield wanted
        if time.monotonic() > deadline:
            raise _NoAnswerError(f"no answer from the server within {seconds:.1f} sec")


def attempt_limit(timeout: float) -> float:
    """Return how many seconds of such a timeout a single attempt gets."""
    return max(1.0, timeout / 3)


def connector(attempt: float, application_name: str) -> Callable[..., BoundedConnection]:
    """Return what opens a connection whose waits end within ``attempt`` seconds each."""
    defaults = {
        "application_name": application_name,
        "connect_timeout": max(2, int(attempt)),  # libpq takes whole seconds, and at least 2
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": int(attempt * 1000),
    }

    def connect(
        _dialect: Any, _record: Any, arguments: list[Any], parameters: dict[str, Any]
    ) -> BoundedConnection:
        connection: BoundedConnection = BoundedConnection.connect(
            *arguments, **{**defaults, **parameters}
        )
        connection.attempt_timeout = connection.answer_timeout = attempt
        try:
            connection.autocommit = True
            if not _is_direct(connection):
                connection.prepare_threshold = None
        except BaseException:
            connection.close()
            raise
        return connection

    return connect


def _is_direct(connection: psycopg.Connection[Any]) -> bool:
    """Tell whether the server process is the one that was named at the login.

    A pooler answers the login by itself, and so with a process id of its own making. One that knows
    nothing of prepared statements lends the same server connection to one client after the other;
    and as every psycopg gives its statements the same names, a release of ours could there run what
    the application has prepared, or the other way round, without an error.
    """
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    return row is not None and row[0] == connection.info.backend_pid
