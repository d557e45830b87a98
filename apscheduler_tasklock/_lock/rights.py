"""The tables of a replica, and the rights that its database role has on them."""

from __future__ import annotations

import time
from typing import Any

from apscheduler_tasklock._database.rejections import CLAIMS, RUN_HISTORY
from apscheduler_tasklock._database.sequences import Statements
from apscheduler_tasklock._lock.database import Database
from apscheduler_tasklock._lock.replica import LockSettings, Replica
from apscheduler_tasklock.errors import TaskLockError, TaskLockSchemaError
from apscheduler_tasklock.schema.check import check_tables, find_problem
from apscheduler_tasklock.schema.table import job_table, replica_table, run_table


class Rights:
    """Checks tables and rights for one user of a replica, at a start and in looks."""

    def __init__(self, replica: Replica, settings: LockSettings, database: Database) -> None:
        self._table = replica.table
        self._clock = replica.clock
        self._rejections = replica.rejections
        self._settings = settings
        self._database = database
        self._due_at = 0.0  # when the rights are checked next, on the monotonic clock

    def check(self, *, jobs: bool = False) -> None:
        """Check that the tables exist, are new enough, and may be used.

        :param jobs: whether to check the job store's table, too
        :raises TaskLockSchemaError: a table or a right is missing, or a table is too old; the
            message names all that is missing
        :raises TaskLockDatabaseError: the database is unavailable
        """
        if self._settings.stand_in is not None:
            return
        tables = [self._table]
        if self._settings.history:
            tables.append(run_table(self._table))
        tables.append(replica_table(self._table))
        if jobs:
            tables.append(job_table(self._table))

        def check(cursor: Any) -> None:
            sent = time.monotonic()
            role = self._database.role
            self._clock.note(sent, check_tables(cursor, self._table, tables, role))

        self._database.ask(check)
        self._due_at = time.monotonic() + self._settings.timings.report_interval

    def look(self) -> Statements[None]:
        """Check whether claims and the run history are still permitted.

        Claims alone would not show a missing right in time, because a task may be claimed once a
        night. So the rights are checked as often as a replica sends a sign of life. While work is
        rejected, the rights are checked at each look at the tasks' rows.

        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: the database rejects the statement
        """
        rejections, now = self._rejections, time.monotonic()
        is_urgent = rejections.suspected or rejections.reported()
        if self._settings.stand_in is not None or not (is_urgent or now > self._due_at):
            return
        rejections.suspected = False
        needed = {CLAIMS: self._table}
        if self._settings.history:
            needed[RUN_HISTORY] = run_table(self._table)

        def find(cursor: Any) -> dict[str, TaskLockSchemaError | None]:
            role = self._database.role
            return {
                what: find_problem(cursor, self._table, table, role)
                for what, table in needed.items()
            }

        try:
            found = yield find
        except TaskLockError:
            rejections.suspected = True
            raise
        for what, problem in found.items():
            if problem is None:
                rejections.permitted(what)
            else:
                rejections.begin(what, problem)
        self._due_at = now + self._settings.timings.report_interval
