"""What the contract is tested with: one protocol on one connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from apscheduler_tasklock.protocol import (
    ClaimAnswer,
    ClaimRequest,
    ReleaseAnswer,
    TaskLockProtocol,
)
from apscheduler_tasklock.table import task_lock_table


class Replica:
    """A replica as the protocol sees one: an id, and a connection with a clock."""

    def __init__(self, name: str, connection: psycopg.Connection[Any]) -> None:
        self.name = name
        self.connection = connection
        self.protocol = TaskLockProtocol(task_lock_table())

    def claim(
        self,
        task: str = "task",
        *,
        lag: float = 0.0,
        min_lock: float = 9.0,
        max_lock: float = 50.0,
        claim_id: UUID | None = None,
        latest: Any = None,
    ) -> tuple[UUID, ClaimAnswer]:
        """Claim as for a job every 10 s, whose run time was ``lag`` seconds ago."""
        claim_id = claim_id or uuid4()
        request = ClaimRequest(task, lag, latest, min_lock, max_lock, self.name, claim_id)
        return claim_id, self.protocol.claim(self.connection.cursor(), request)

    def release(
        self, claim_id: UUID, task: str = "task", *, keep_window: bool = True
    ) -> ReleaseAnswer | None:
        return self.protocol.release(
            self.connection.cursor(), task, claim_id, keep_window=keep_window
        )

    def granted(self, task: str = "task", **request: Any) -> bool:
        return self.claim(task, **request)[1].granted


@pytest.fixture
def travel(connection: psycopg.Connection[Any]) -> Callable[[float], None]:
    """Move the clock that the shipped statements see by so many seconds.

    A schema before ``pg_catalog`` in the search path wins, so ``now()`` is this one.
    """
    connection.execute("""
        CREATE SCHEMA travel;
        CREATE FUNCTION travel.now() RETURNS timestamptz STABLE LANGUAGE sql
            AS $$ SELECT current_setting('travel.now')::timestamptz $$;
        SET search_path = travel, pg_catalog, public;
        SET travel.now = '2026-01-01 00:00:00+00';
    """)

    def move(seconds: float) -> None:
        connection.execute(
            "SELECT set_config('travel.now', (now() + %s * interval '1 second')::text, false)",
            [seconds],
        )

    return move


@pytest.fixture
def one(connection: psycopg.Connection[Any], travel: object) -> Replica:
    """A replica. It shares its connection, and so its clock, with :func:`other`."""
    return Replica("one", connection)


@pytest.fixture
def other(connection: psycopg.Connection[Any], travel: object) -> Replica:
    return Replica("other", connection)
