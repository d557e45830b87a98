"""Statements on a database that may be away: once, or again until a time limit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from math import inf
from typing import Any, TypeVar

import psycopg
from sqlalchemy import Table

from apscheduler_tasklock._database.database import Database
from apscheduler_tasklock._database.deadline import ATTEMPT_LIMIT, Closing, Until
from apscheduler_tasklock._database.errors import is_conflict, is_full
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.schema.check import explain_refusal

Result = TypeVar("Result")

# Pauses between attempts while the database is away, in seconds; the last one repeats.
BACKOFF = (0.05, 0.1, 0.25, 0.5, 1.0)


class Attempts:
    """Runs statements, notes when the database goes away and is back, and explains refusals.

    :param database: where to
    :param table: the task lock table, for messages
    :param outage: told when the database is away and back
    """

    def __init__(self, database: Database, table: Table, outage: Outage) -> None:
        self._database = database
        self._table = table
        self._outage = outage
        database.ended = outage.idle_connection_ended

    @property
    def outage(self) -> Outage:
        """What is known of the database's outages."""
        return self._outage

    def rest(self) -> None:
        """Keep no connection until the next statement."""
        self._database.rest()

    def once(
        self,
        statement: Callable[[Any], Result],
        until: Until = inf,
        limit: float = ATTEMPT_LIMIT,
    ) -> Result:
        """Run a statement on a cursor, and return what it returns.

        :param until: when nothing is waited for any more, as of
            :class:`~apscheduler_tasklock._database.deadline.Deadline`
        :param limit: the seconds that it may take once claiming is stopped
        :raises TaskLockDatabaseError: the database is away
        :raises TaskLockError: the database refuses; the message names the remedy
        """
        begun = time.monotonic()
        try:
            with self._database.cursor(until, limit) as cursor:
                result = statement(cursor)
        except TaskLockDatabaseError as error:
            if not is_conflict(error.__cause__):
                opened_at = begun if error._opened_at is None else error._opened_at
                self._outage.begin(error, opened_at, full=is_full(error.__cause__))
            raise
        except psycopg.Error as error:
            # The message has what PostgreSQL said; its own traceback would only hide it.
            user, where = self._database.url.username, self._database.where
            raise explain_refusal(error, self._table, user, where) from None
        except TaskLockError:
            raise
        except Exception as error:
            raise TaskLockError(f"the task lock database failed: {error!r}") from error
        self._outage.end(begun)
        return result

    def until(
        self,
        seconds: float,
        statement: Callable[[Any], Result],
        stop: Closing | None = None,
        since: float | None = None,
        limit: float = ATTEMPT_LIMIT,
    ) -> Result:
        """Run a statement; while the database is away, again until so many seconds are over.

        :param stop: ends the attempts when claiming is stopped
        :param since: when the seconds began, from :func:`time.monotonic`, if that was not now. If
            they are over already, there is one attempt all the same, unless the database is known
            to be away.
        :param limit: the seconds that an attempt may take once claiming is stopped
        :raises TaskLockDatabaseError: it stayed away
        :raises TaskLockError: the database refuses; the message names the remedy
        """
        begun = time.monotonic() if since is None else since
        if self._outage.reason is not None and time.monotonic() > begun + seconds:
            raise self._gave_up(begun, self._outage.reason)
        stop = stop or Closing()
        attempt = 0
        while True:
            try:
                return self.once(statement, limit=limit)
            except TaskLockDatabaseError as error:
                pause = BACKOFF[min(attempt, len(BACKOFF) - 1)]
                # Else all replicas would come back at the same moment.
                pause *= random.uniform(0.8, 1.2)  # noqa: S311  # no secret
                if time.monotonic() + pause > begun + seconds or stop.wait(pause):
                    raise self._gave_up(begun, str(error)) from error.__cause__
                attempt += 1

    def _gave_up(self, begun: float, reason: str) -> TaskLockDatabaseError:
        return TaskLockDatabaseError(
            f"the task lock database ({self._database.where}) could not be used for "
            f"{time.monotonic() - begun:.1f} sec: {reason}"
        )
