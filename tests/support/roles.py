"""Roles of an application, with fewer rights than the tests' own role."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import psycopg
from psycopg import sql

from apscheduler_tasklock._database.url import parse_url

PASSWORD = "hunter2"


@contextmanager
def role(
    database_url: str, options: str = f"LOGIN PASSWORD '{PASSWORD}'", name: str | None = None
) -> Iterator[tuple[str, str]]:
    """Create a role. Yield its name, and the database's URL for it."""
    name = f"role {uuid4().hex[:8]}" if name is None else name
    with psycopg.connect(database_url, autocommit=True) as connection:
        create = sql.SQL("CREATE ROLE {} " + options)
        connection.execute(create.format(sql.Identifier(name)))
        try:
            yield name, url_of(database_url, name)
        finally:
            connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def url_of(database_url: str, user: str) -> str:
    """Return the database's URL for a role with the password."""
    url = parse_url(database_url).set(username=user, password=PASSWORD)
    return url.render_as_string(hide_password=False)
