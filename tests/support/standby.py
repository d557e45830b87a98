"""A primary and its streaming standby, from the binaries of the embedded server."""

from __future__ import annotations

import shutil
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.support.polling import eventually

# A commit waits until the standby shows it, so that a killed primary loses no commit.
SETTINGS = {"wal_level": "replica", "synchronous_commit": "remote_apply", "fsync": "off"}


class Standby(EmbeddedServer):
    """A streaming standby of a running server.

    :param primary: an embedded server
    :param settings: server settings, as ``{"max_connections": "20"}``
    :param installation: folder with ``bin`` and ``lib`` of a PostgreSQL to run instead
    """

    def __init__(
        self,
        primary: EmbeddedServer,
        settings: dict[str, str] | None = None,
        installation: Path | None = None,
    ) -> None:
        self._primary = primary
        super().__init__(settings, installation, loopback=True)

    def promote(self) -> None:
        """Promote the standby, and wait until it accepts writes."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            row = connection.execute("SELECT pg_promote()").fetchone()
        assert row == (True,), self.log

    def _initialize(self) -> None:
        """Make the data folder as a copy of the primary's."""
        if self._user is not None:
            shutil.chown(self._home, self._user)
        command = [str(self._binaries / "pg_basebackup"), "--write-recovery-conf", "--no-sync"]
        options = ["--checkpoint=fast", "-D", str(self._home / "data"), "-d", self._primary.url]
        process = self._popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = process.communicate()
        assert not process.returncode, output.decode()


class Pair:
    """A primary and its standby. A context manager, which stops both at its end.

    :param settings: settings of both
    :param installation: folder with ``bin`` and ``lib`` of a PostgreSQL to run instead
    """

    def __init__(
        self, settings: dict[str, str] | None = None, installation: Path | None = None
    ) -> None:
        self._settings = {**SETTINGS, **(settings or {})}
        self._installation = installation
        self._closing = ExitStack()

    def __enter__(self) -> Pair:
        with ExitStack() as closing:
            settings, installation = self._settings, self._installation
            self.primary = closing.enter_context(
                EmbeddedServer(settings, installation, loopback=True)
            )
            self.standby = Standby(self.primary, settings, installation)
            closing.callback(self.standby.close)
            self._make_synchronous()
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def url(self, database: str = "postgres", **parameters: str) -> str:
        """Return the URL of a database with both servers.

        :param parameters: libpq's parameters, as ``target_session_attrs="read-write"``
        """
        hosts = [f"host=127.0.0.1:{server.port}" for server in (self.primary, self.standby)]
        more = [f"{name}={value}" for name, value in parameters.items()]
        return f"postgresql://postgres@/{database}?{'&'.join([*hosts, *more])}"

    def kill_primary(self) -> None:
        """Kill the primary, without messages to its clients or its standby."""
        self.primary.stop(signal.SIGQUIT)

    def _make_synchronous(self) -> None:
        """Let each commit of the primary wait for the standby, once it streams.

        The setting comes after the copy, because a promoted standby must not wait for any server.
        """
        with psycopg.connect(self.primary.url, autocommit=True) as connection:

            def state() -> Any:
                return connection.execute("SELECT sync_state FROM pg_stat_replication").fetchone()

            eventually(state)
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
            eventually(lambda: state() == ("sync",))
