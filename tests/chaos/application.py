"""A table beside the task lock's, of what that shows.

It is written and read on connections that the monkey's proxies are not in the way of.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg

from apscheduler_tasklock.demo.history import Event

_CONNECT_TIMEOUT = 5

# A trigger notes changes of the task lock table in their own transactions, so that the history also
# has claims whose replica was killed before the job began.
_TABLES = """
    CREATE TABLE claim (id bigserial PRIMARY KEY, kind text NOT NULL, at timestamptz NOT NULL,
                        task text NOT NULL, token bigint NOT NULL, replica text NOT NULL,
                        window_start timestamptz NOT NULL, until timestamptz NOT NULL,
                        kept boolean NOT NULL, run_until timestamptz);
    CREATE FUNCTION note_claim() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        kind text := 'renewed';
        kept boolean := true;
        happened timestamptz := clock_timestamp();
    BEGIN
        IF TG_OP = 'INSERT' AND NEW.finished_at IS NOT NULL THEN
            RETURN NULL;  -- a replica tells that it has the task
        ELSIF TG_OP = 'INSERT' OR (NEW.claim_id <> OLD.claim_id AND NEW.finished_at IS NULL) THEN
            kind := 'claimed';
            happened := NEW.started_at;
        ELSIF NEW.finished_at IS NOT NULL THEN
            IF OLD.finished_at IS NOT NULL THEN RETURN NULL; END IF;
            kind := 'released';
            kept := NEW.window_until = OLD.window_until;
            happened := now();  -- its run may have ended long before that
            -- A run that has overrun its maximum lock counts as no death. It has failed at the end
            -- of its lease if it was given up, and later if it was released.
            IF NEW.deaths > OLD.deaths
               OR (NEW.last_outcome = 'overran' AND NEW.failed_at = OLD.locked_until) THEN
                kind := 'given up';
            END IF;
        ELSIF NEW.handed_over AND NOT OLD.handed_over THEN
            kind := 'handed over';
        ELSIF NEW.locked_until < OLD.locked_until
              OR (NEW IS NOT DISTINCT FROM OLD AND NEW.locked_until <= now()) THEN
            kind := 'lease ended';  -- to this moment, unless it had ended before
        ELSIF NEW.locked_until = OLD.locked_until THEN
            RETURN NULL;  -- no sign of life: somebody has changed something else
        END IF;
        INSERT INTO claim (kind, at, task, token, replica, window_start, until, kept, run_until)
        VALUES (kind, happened, NEW.task_name, NEW.token, NEW.locked_by, NEW.window_start,
                NEW.locked_until, kept, NEW.run_until);
        RETURN NULL;
    END $$;
    CREATE TRIGGER note_claim AFTER INSERT OR UPDATE ON task_lock
        FOR EACH ROW EXECUTE FUNCTION note_claim();
"""


def connect(url: str) -> psycopg.Connection[Any]:
    """Return a connection of our own, in autocommit mode."""
    return psycopg.connect(url, autocommit=True, connect_timeout=_CONNECT_TIMEOUT)


def create_tables(url: str) -> None:
    """Create the table beside the task lock's, and what writes to it."""
    with connect(url) as connection:
        connection.execute(_TABLES)


def monotonic_offset() -> float:
    """Return what to add to a wall clock time for the machine's monotonic one."""
    return time.monotonic() - time.time()


def read_events(url: str, offset: float) -> list[Event]:
    """Return what the table shows, in the order in which it happened."""
    with connect(url) as connection:
        claims = connection.execute(
            "SELECT at, kind, replica, task, token, window_start, until, kept, run_until"
            " FROM claim ORDER BY id"
        ).fetchall()
    return [
        Event(
            at.timestamp() + offset,
            kind,
            replica,
            task,
            token,
            due=start.timestamp() + offset,
            until=until.timestamp() + offset,
            kept=kept,
            run_until=None if run_until is None else run_until.timestamp() + offset,
        )
        for at, kind, replica, task, token, start, until, kept, run_until in claims
    ]
