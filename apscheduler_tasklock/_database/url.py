"""Where the database is: URLs and engines that the task lock can use."""

from __future__ import annotations

from sqlalchemy import Engine
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import StaticPool

from apscheduler_tasklock.errors import TaskLockOptionError

DRIVER = "postgresql+psycopg"

# Where there are no locks there need not be a PostgreSQL; nothing connects to this.
UNUSED = URL.create("postgresql", host="unused.invalid", database="unused")


def as_url(database: str | URL | Engine) -> URL:
    """Return the URL of what an application gave as its database.

    :raises TaskLockOptionError: not a PostgreSQL URL
    """
    return database.url if isinstance(database, Engine) else parse_url(database)


def parse_url(database: str | URL) -> URL:
    """Return the URL with psycopg 3 as its driver.

    :raises TaskLockOptionError: not a PostgreSQL URL. The message never repeats it, since it may
        hold a password.
    """
    if not isinstance(database, (str, URL)):
        raise TaskLockOptionError(
            "database must be a URL like postgresql://user@host/name or an SQLAlchemy Engine, "
            f"not {type(database).__name__}"
        )
    try:
        url = make_url(database)
    except (ArgumentError, ValueError):
        raise TaskLockOptionError(
            "database is not a URL; it should look like postgresql://user:password@host:5432/name, "
            "or postgresql://user@/name?host=one:5432&host=two:5432 for several servers"
        ) from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise TaskLockOptionError(
            f"database is a {url.get_backend_name()} URL; the task lock needs PostgreSQL, "
            "as in postgresql://user:password@host:5432/name"
        )
    if url.host and "@" in url.host:
        raise TaskLockOptionError(
            "database is a URL with more than one @: in a user or a password, write %40 for it"
        )
    password = url.query.get("password")
    if isinstance(password, str):  # where its text would show it
        url = url.difference_update_query(["password"]).set(password=password)
    return url.set(drivername=DRIVER)


def describe(url: URL) -> str:
    """Return the database's host, port and name, shown in logs and messages."""
    host = url.host or url.query.get("host") or "the default host"
    host = host if isinstance(host, str) else ", ".join(host)
    port = f":{url.port}" if url.port else ""
    return f"{host}{port}, database {url.database or url.username!r}"


def check_engine(engine: Engine) -> None:
    """Make sure that the task lock can use an application's engine.

    :raises TaskLockOptionError: it cannot; the message says what to give instead
    """
    if engine.dialect.is_async:
        raise TaskLockOptionError(
            "the engine is the synchronous side of an AsyncEngine, which works on its event loop "
            "only; give the URL instead, or an engine of create_engine()"
        )
    if engine.dialect.name != "postgresql" or engine.dialect.driver != "psycopg":
        raise TaskLockOptionError(
            f"the engine uses {engine.dialect.name}+{engine.dialect.driver}; the task lock needs "
            f"psycopg 3: create_engine('{DRIVER}://...'), or give the URL instead"
        )
    if isinstance(engine.pool, StaticPool):
        raise TaskLockOptionError(
            "the engine's StaticPool has one connection, which the application may be using; "
            "give the URL instead of the engine"
        )
