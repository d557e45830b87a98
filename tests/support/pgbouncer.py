"""Runs pgbouncer in front of the server, in transaction mode, which keeps no session state."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy.engine import make_url

from apscheduler_tasklock.demo.server import die_with_parent, free_port
from tests.support.polling import eventually
from tests.support.programs import UnavailableError

# The first version that tracks prepared statements in transaction mode.
PREPARES_SINCE = (1, 21)

# Limits the ports that are tried, because another program may have taken one that was free.
MOST_PORTS = 10
_IN_USE = "Address already in use"

# pgbouncer does not run as root. Tests that run as root start it as this user.
UNPRIVILEGED_USER = "nobody"


class TooOldError(Exception):
    """The pgbouncer of this machine cannot do what a test needs."""


class PgBouncer:
    """A pgbouncer on a loopback port, with a temporary configuration. A context manager.

    It serves every database and every role of one server, so that tests can create their own. Each
    transaction uses the next of its connections to the server, so that tests notice session state.

    :param target_url: the server, and its superuser
    :param max_prepared_statements: the prepared statements that it tracks per connection; 0: none
    :param settings: further settings, as ``{"default_pool_size": "1"}``
    :raises UnavailableError: pgbouncer is not installed
    :raises TooOldError: it is too old for prepared statements
    """

    def __init__(
        self,
        target_url: str,
        max_prepared_statements: int = 200,
        settings: dict[str, str] | None = None,
    ) -> None:
        self._program, self.version = find_program()
        if max_prepared_statements and self.version < PREPARES_SINCE:
            wanted, found = _dotted(PREPARES_SINCE), _dotted(self.version)
            raise TooOldError(
                f"pgbouncer {found} has no prepared statements in transaction mode; "
                f"{wanted} or later is needed (PGBOUNCER=... names one)"
            )
        self._target = make_url(target_url)
        self.max_prepared_statements = max_prepared_statements
        self._more_settings = settings or {}
        self._home = Path()
        self.port = 0
        self._closing = ExitStack()

    @property
    def description(self) -> str:
        """The text for the header of the run."""
        prepares = self.max_prepared_statements
        return f"pgbouncer {_dotted(self.version)}, max_prepared_statements={prepares}"

    @property
    def url(self) -> str:
        """URL of the target's database, through this pgbouncer."""
        return self.url_of(self._target.render_as_string(hide_password=False))

    def url_of(self, direct_url: str) -> str:
        """Return the URL of a database of the same server, through this pgbouncer."""
        url = make_url(direct_url).set(host="127.0.0.1", port=self.port, query={})
        return url.render_as_string(hide_password=False)

    def spread(self, direct_url: str, connections: int = 2) -> str:
        """Open several connections to the server for a database, and return its URL.

        A lone client would get only one connection, on which session state would seem to work.
        """
        url = self.url_of(direct_url)
        with ExitStack() as clients:
            for _ in range(connections):
                client = clients.enter_context(psycopg.connect(url))
                client.execute("SELECT")  # in a transaction, which keeps the connection
        return url

    @property
    def log(self) -> str:
        """The log so far."""
        return (self._home / "log").read_text(errors="replace")

    def __enter__(self) -> PgBouncer:
        with ExitStack() as closing:
            self._home = Path(tempfile.mkdtemp(prefix="tasklock-pgbouncer-"))
            closing.callback(shutil.rmtree, self._home, ignore_errors=True)
            for _ in range(MOST_PORTS):
                self.port = free_port()
                process = self._start(self._configure())
                closing.callback(process.wait, 30)
                closing.callback(process.kill)  # because it has nothing to save
                if self._has_begun(process) or _IN_USE not in self.log:
                    break
            assert self._listens, self.log
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def _settings(self) -> dict[str, str]:
        superuser = self._target.username or "postgres"
        prepares = {"max_prepared_statements": str(self.max_prepared_statements)}
        return {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            # If the server needs passwords, the clients' passwords are passed on.
            "auth_type": "scram-sha-256" if self._target.password else "trust",
            "auth_file": str(self._home / "users.txt"),
            "auth_user": superuser,
            "auth_query": "SELECT usename, passwd FROM pg_catalog.pg_shadow WHERE usename = $1",
            "admin_users": superuser,
            "pool_mode": "transaction",
            "server_round_robin": "1",
            # Tests drop their databases, cut connections and restart servers.
            "server_idle_timeout": "10",
            "server_login_retry": "0.1",
            "max_client_conn": "500",
            **(prepares if self.version >= PREPARES_SINCE else {}),
            **self._more_settings,
        }

    def _configure(self) -> Path:
        target = self._target
        host = str(target.query.get("host") or target.host or "127.0.0.1")
        lines = [
            "[databases]",
            f"* = host={host} port={target.port or 5432}",
            "[pgbouncer]",
            *(f"{name} = {value}" for name, value in self._settings().items()),
        ]
        users = f'"{_doubled(target.username or "postgres")}" "{_doubled(target.password or "")}"\n'
        (self._home / "users.txt").write_text(users)
        configuration = self._home / "pgbouncer.ini"
        configuration.write_text("\n".join([*lines, ""]))
        return configuration

    def _start(self, configuration: Path) -> subprocess.Popen[bytes]:
        as_root = os.geteuid() == 0
        # A copy, because the user that runs it may lack access to the folder of the original.
        program = Path(shutil.copy2(self._program, self._home / "pgbouncer"))
        if as_root:
            for path in (self._home, *self._home.iterdir()):
                shutil.chown(path, UNPRIVILEGED_USER)
        with (self._home / "log").open("wb") as log:
            return subprocess.Popen(
                [*die_with_parent(), str(program), str(configuration)],
                cwd=self._home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=UNPRIVILEGED_USER if as_root else None,
                extra_groups=[] if as_root else None,
            )

    def _has_begun(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until it listens, and return whether it does; otherwise it has ended."""
        eventually(lambda: process.poll() is not None or self._listens)
        return self._listens

    @property
    def _listens(self) -> bool:
        """Whether it listens, by its own words, since another program may listen on the port."""
        return f"listening on 127.0.0.1:{self.port}" in self.log


def find_program() -> tuple[Path, tuple[int, ...]]:
    """Return the pgbouncer of ``PGBOUNCER`` or else of the system, and its version."""
    # Debian's pgbouncer is in a folder that only root has in PATH.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
    named = os.environ.get("PGBOUNCER") or "pgbouncer"
    found = shutil.which(named, path=path)
    if found is None:
        raise UnavailableError(f"{named} is not installed: apt-get install pgbouncer")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    version: Any = re.search(r"PgBouncer (\d+)\.(\d+)\.(\d+)", said)
    return Path(found), tuple(map(int, version.groups()))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _doubled(text: str) -> str:
    """Escape a text between double quotes in pgbouncer's list of users."""
    return str(text).replace('"', '""')
