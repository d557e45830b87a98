"""What another process needs to use the same task locks."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock.database import parse_url


@dataclass(frozen=True)
class LockSettings:
    """The arguments of ``TaskLocks``, to be pickled. ``database`` holds the password."""

    database: URL = field(repr=False)
    replica_id: str
    claim_timeout: float
    schema: str | None
    table: str


def as_url(database: str | URL | Engine) -> URL:
    """Return the URL of what an application gave as its database."""
    return database.url if isinstance(database, Engine) else parse_url(database)
