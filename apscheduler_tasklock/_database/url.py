"""URLs and engines of databases, and whether the task lock can use them."""

from __future__ import annotations

import os
from functools import cache
from typing import TypeVar
from urllib.parse import unquote

from psycopg.pq import Conninfo
from sqlalchemy import Engine
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import AssertionPool, SingletonThreadPool, StaticPool

from apscheduler_tasklock.errors import TaskLockOptionError

Given = TypeVar("Given", bound=str | URL | Engine)

DRIVER = "postgresql+psycopg"

# The variable of the environment with the URL of the database, where an application gives none.
DATABASE_VARIABLE = "TASKLOCK_DATABASE_URL"

# Stands in for a URL where the task lock is off or has no database. Nothing connects to it.
UNUSED = URL.create("postgresql", host="unused.invalid", database="unused")


# Other drivers' names of parameters, with libpq's names for them. Names that differ only in case
# and separators are left out, because `_alike` finds them.
_NAMES_ELSEWHERE = {"ssl": "sslmode", "timeout": "connect_timeout"}

_SEVERAL_AT_SIGNS = (
    "database is a URL with more than one @: in a user or a password, write %40 for it"
)


def given_or_environment_database(
    database: Given | None, how: str = "Pass postgresql://user@host/name"
) -> Given | str:
    """Return the database that was given, or else that of the environment.

    :param database: ``None`` or ``""`` if none was given
    :param how: what to do in order to give one, for the message
    :raises TaskLockOptionError: neither was given
    """
    given = database or os.environ.get(DATABASE_VARIABLE)
    if not given:
        raise TaskLockOptionError(f"which database? {how}, or set {DATABASE_VARIABLE}")
    return given


def as_url(database: str | URL | Engine) -> URL:
    """Return the URL of a database that an application gave as a URL or an engine.

    :raises TaskLockOptionError: the database is not a PostgreSQL URL
    """
    return database.url if isinstance(database, Engine) else parse_url(database)


def parse_url(database: str | URL) -> URL:
    """Return the URL with psycopg 3 as its driver.

    :raises TaskLockOptionError: the database is not a PostgreSQL URL, or the URL has a parameter
        that libpq does not have. The message never repeats the URL, which may have a password.
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
        raise TaskLockOptionError(_SEVERAL_AT_SIGNS)
    _check_parameters(url)
    password = url.query.get("password")
    if isinstance(password, str):  # because the text of a URL shows its query, but no password
        url = url.difference_update_query(["password"]).set(password=password)
    host = unquote(url.host or "")
    if host != (url.host or "") or "/" in host:
        # libpq decodes a host such as %2Ftmp, the folder of a socket; SQLAlchemy does not. The
        # decoded host becomes a parameter, because only a parameter may have a slash in the text of
        # a URL. Django's settings have such a host as it is.
        parameters = {"host": host, **url.query}
        url = url._replace(host=None).set(query=parameters)
    return url.set(drivername=DRIVER)


def _check_parameters(url: URL) -> None:
    """Reject parameters that libpq does not have, such as those of a URL written for asyncpg."""
    unknown = [name for name in url.query if name not in libpq_parameters()]
    if not unknown:
        return
    if "@" in str(dict(url.query)):
        # The password has a "?" or "&" in it. So the unknown parameter's name may be a part of the
        # password, and is not shown.
        raise TaskLockOptionError(_SEVERAL_AT_SIGNS)
    [name, *_] = unknown
    meant = _NAMES_ELSEWHERE.get(name) or next(
        (known for known in libpq_parameters() if _alike(known) == _alike(name)), None
    )
    example = "=require" if meant == "sslmode" else ""
    raise TaskLockOptionError(
        f"database is a URL with the parameter {name!r}, which libpq does not have; "
        + (f"write {meant}{example} for it" if meant else "leave it out")
    )


def _alike(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


@cache
def libpq_parameters() -> frozenset[str]:
    """Return the names of libpq's connection parameters."""
    return frozenset(option.keyword.decode() for option in Conninfo.get_defaults())


def describe(url: URL) -> str:
    """Return the database's host, port and name, for logs and messages."""
    host = url.host or url.query.get("host") or "the default host"
    host = host if isinstance(host, str) else ", ".join(host)
    port = f":{url.port}" if url.port else ""
    return f"{host}{port}, database {url.database or url.username!r}"


def check_engine(engine: Engine) -> None:
    """Make sure that the task lock can use an application's engine.

    :raises TaskLockOptionError: the engine cannot be used; the message says what to give instead
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
    if isinstance(engine.pool, (AssertionPool, SingletonThreadPool, StaticPool)):
        raise TaskLockOptionError(
            f"the engine's {type(engine.pool).__name__} has no connection besides one that the "
            "application may be using; give the URL instead of the engine"
        )
