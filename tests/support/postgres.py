"""The PostgreSQL of the tests: a given one, a container, or the embedded one."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.support.npm_postgres import installation

IMAGE = "postgres:17-alpine"

CACHE = Path(__file__).parent.parent.parent / ".cache"

# Limits from below the free bytes in memory for the server's data: several times what a run takes.
ROOM = 2 * 1024**3


@dataclass
class Server:
    """A running server.

    :ivar url: the superuser's URL
    :ivar description: the text for the header of the run
    :ivar close: stops the server, if it was started here
    """

    url: str
    description: str
    close: contextlib.ExitStack

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, autocommit=True, connect_timeout=10)

    def create_database(self, template: str = "template0") -> str:
        """Create a database and return its URL."""
        name = f"tasklock_test_{uuid.uuid4().hex[:12]}"
        with self.connect() as connection:
            # By default PostgreSQL 15 and later write the copy into the WAL as well, which takes
            # several times as long.
            strategy = " STRATEGY file_copy" if connection.info.server_version >= 150000 else ""
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}" + strategy).format(
                    sql.Identifier(name), sql.Identifier(template)
                )
            )
        return self.database_url(name)

    def drop_database(self, url: str) -> None:
        name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
        with self.connect() as connection:
            connection.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(str(name)))
            )

    def database_url(self, name: str) -> str:
        base, _, query = self.url.partition("?")
        return f"{base.rpartition('/')[0]}/{name}{'?' + query if query else ''}"

    @contextlib.contextmanager
    def database(self, template: str = "template0") -> Iterator[str]:
        url = self.create_database(template)
        try:
            yield url
        finally:
            self.drop_database(url)


def given_url(option: str | None) -> str | None:
    """Return the URL of the given server, if there is one."""
    return option or os.environ.get("TASKLOCK_TEST_DATABASE_URL")


def start_server(url: str | None, version: str | None) -> Server:
    """Return the server for this run, in the order that the README names."""
    if version is not None:
        return _embedded(f" from npm, version {version}", installation(version, CACHE))
    url = given_url(url)
    if url:
        return _described(url, "the given server", contextlib.ExitStack())
    return _container() or _embedded("")


def _container() -> Server | None:
    """Return a container, if a Docker engine answers and has or gets the image."""
    import docker

    with warnings.catch_warnings():
        # docker-py does not close a socket that it could not connect.
        warnings.simplefilter("ignore", ResourceWarning)
        engine = None
        with contextlib.suppress(docker.errors.DockerException):
            engine = docker.from_env(timeout=10)
        gc.collect()
    if engine is None:
        return None
    with contextlib.closing(engine):
        try:
            if not engine.images.list(name=IMAGE):
                engine.images.pull(*IMAGE.split(":"))
        except docker.errors.DockerException as error:
            return _embedded(f"; Docker answers, but has no image {IMAGE}: {_short(error)}")
    try:
        return _started_container()
    except docker.errors.DockerException as error:
        return _embedded(f"; Docker answers, but starts no container: {_short(error)}")


def _started_container() -> Server:
    try:
        from testcontainers.community.postgres import PostgresContainer
    except ImportError:  # before testcontainers 4.15
        from testcontainers.postgres import PostgresContainer

    closing = contextlib.ExitStack()
    container = closing.enter_context(PostgresContainer(IMAGE, driver=None))
    return _described(container.get_connection_url(), f"container of {IMAGE}", closing)


def _embedded(why: str, installed: Path | None = None) -> Server:
    closing = contextlib.ExitStack()
    settings = {"fsync": "off", "max_connections": "200", "max_wal_size": "256MB"}
    server = closing.enter_context(EmbeddedServer(settings, installed, _memory(), loopback=True))
    return _described(server.url, f"embedded{why}", closing)


def _memory() -> Path | None:
    """Return a folder in memory with room for the tests' databases, or ``None``.

    A copy of a database has 300 files, which take 25 ms in memory, and up to 200 ms on a disk.
    """
    memory = Path("/dev/shm")  # noqa: S108  # the server's folder in it has a unique name
    has_room = memory.is_dir() and shutil.disk_usage(memory).free >= ROOM
    return memory if has_room and os.access(memory, os.W_OK) else None


def _described(url: str, kind: str, closing: contextlib.ExitStack) -> Server:
    server = Server(url, kind, closing)
    with server.connect() as connection:
        row = connection.execute("SHOW server_version").fetchone()
    assert row is not None
    server.description = f"PostgreSQL {row[0]}, {kind}"
    return server


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:80]
