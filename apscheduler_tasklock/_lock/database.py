"""The database, as one user of a replica asks it: statements, and what becomes of errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, TypeVar

from psycopg.errors import InsufficientPrivilege, InvalidSchemaName, UndefinedTable

from apscheduler_tasklock._database.actions import ActionRequest
from apscheduler_tasklock._database.awaited_request import AwaitedCall
from apscheduler_tasklock._database.connection import attempt_limit, turn_limit
from apscheduler_tasklock._database.requests import Call, Outcome
from apscheduler_tasklock._database.sequences import (
    SequenceRequest,
    Statement,
    Statements,
    ask_here,
    next_statement,
)
from apscheduler_tasklock._database.url import as_url
from apscheduler_tasklock._lock.job_rows import JobRows
from apscheduler_tasklock._lock.protocol_messages import Message, ReadTasks, TaskRow
from apscheduler_tasklock._lock.replica import LockSettings, Replica
from apscheduler_tasklock._shutdown import CANCEL_LIMIT, NO_STOP, Closing
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockNotFoundError,
    TaskLockStateError,
    TaskLockUnknownError,
)
from apscheduler_tasklock.schema.check import explain_missing_rights, explain_missing_table

Answer = TypeVar("Answer")


class Database:
    """The database, as one user of a replica asks it. Safe to share between threads.

    :param closing: the user's stop, which ends what is asked
    :ivar thread: the replica's thread, which sends the statements
    :ivar protocol: the statements of the lock
    :ivar jobs: the statements of the job store
    :ivar table: the task lock table
    :ivar role: the role of the connection, as far as the URL names it
    :ivar attempt: limits how long the answer to a request is waited for, in seconds
    """

    def __init__(self, replica: Replica, settings: LockSettings, closing: Closing) -> None:
        self.thread = replica.thread
        self.table = replica.table
        self.protocol = replica.protocol(settings)
        self.jobs = JobRows(
            replica.table,
            settings.replica_id,
            settings.history,
            settings.timings,
            replica.rejections,
        )
        self.attempt = attempt_limit(settings.claim_timeout, settings.timings.longest_answer)
        self._turn_limit = turn_limit(settings.claim_timeout)
        self._timeout = settings.claim_timeout
        self._clock = replica.clock
        self._closing = closing
        self.role = as_url(settings.database).username

    def times(self, tried_for: float = -1.0, until: float = inf) -> dict[str, float]:
        """Return the times of a request that comes now.

        :param tried_for: seconds for which it is sent again while the database is unavailable; by
            default it is sent once
        :param until: when it is over in any case, on the monotonic clock
        """
        now = time.monotonic()
        return {
            "came": now,
            "until": until,
            "turn_until": now + self._turn_limit,
            "tried_until": now + tried_for,
            "answer_within": self.attempt,
        }

    def ask(
        self,
        statement: Callable[[Any], Answer],
        until: float = inf,
        *,
        tried_for: float = -1.0,
        goes_first: bool = False,
    ) -> Answer:
        """Run a short statement on this replica's connection, and wait for its result.

        :param statement: called with a cursor of the connection
        :param until: limits the wait, on the monotonic clock
        :param tried_for: seconds for which it is sent again while the database is unavailable; by
            default it is sent once. The server may then carry it out more than once.
        :param goes_first: whether the statement is sent in an outage, too, so that operators can
            read while nothing can be written
        :return: the statement's result
        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: the database rejects the statement; the message names the remedy
        """
        if time.monotonic() > until - CANCEL_LIMIT:
            raise TaskLockDatabaseError("no time was left to send the statement")
        asked = self.asked(self._explaining(statement), until, tried_for)
        asked.goes_first = goes_first
        return self.thread.get(asked)

    def begin(self, statement: Callable[[Any], Answer]) -> AwaitedCall[Answer]:
        """Send a statement once. Does not wait, and explains no missing rights."""
        asked = self.asked(statement)
        self.thread.submit(asked)
        return asked

    def begin_despite_stop(self, message: Message[Any]) -> None:
        """Send a message once, also after the user's stop. Does not wait."""
        times = self.times(until=time.monotonic() + self.attempt)
        self.thread.submit(Call(self.carrying_out(message), NO_STOP, **times))

    def asked(
        self, statement: Callable[[Any], Answer], until: float = inf, tried_for: float = -1.0
    ) -> AwaitedCall[Answer]:
        """Return the request of a statement; see :meth:`times`."""
        return AwaitedCall(statement, self._closing, **self.times(tried_for, until))

    def act(self, action: Callable[..., Answer], whether: str) -> Answer:
        """Carry out an operator's action. After a doubt, send it again for ``claim_timeout``.

        :param action: called with a cursor, and with whether it may have been done before
        :param whether: what may have been done, in words
        :raises TaskLockUnknownError: it is not known whether the action was done
        :raises TaskLockDatabaseError: the database is unavailable, and nothing was done
        :raises TaskLockError: nothing was done; the message says why
        """
        request = ActionRequest(
            lambda cursor, in_doubt: self._explaining(partial(action, in_doubt=in_doubt))(cursor),
            self._closing,
            **self.times(self._timeout),
        )
        try:
            return self.thread.get(request)
        except (TaskLockStateError, TaskLockNotFoundError):
            raise  # the answer of an action that was sent again, too
        except TaskLockError as error:
            if not request.may_be_done:
                raise
            why = f"it is not known whether {whether}: {error}"
            raise TaskLockUnknownError(why) from (error.__cause__ or error)

    def ask_all(self, statements: Statements[Answer], *, goes_first: bool = False) -> Answer:
        """Send a sequence's statements one after the other, and wait for each.

        :param goes_first: as in :meth:`ask`
        :raises TaskLockError: a statement failed
        """
        return ask_here(statements, partial(self.ask, goes_first=goes_first))

    def begin_all(
        self,
        statements: Statements[object],
        call: Callable[[Callable[[], object]], object],
        done: Callable[[], object],
    ) -> None:
        """Send a sequence's statements one after the other. Does not wait.

        :param call: called with a function that runs the sequence's code up to its next statement.
            ``call`` has to call that function, in this thread or in another one. The replica's
            thread makes most of the calls of ``call``, so in that thread ``call`` must not wait.
        :param done: called at the end, in the thread that has run the sequence's last code
        """

        def proceed(outcome: Outcome[Any] | None) -> None:
            statement = None
            try:
                statement = next_statement(statements, outcome)
            finally:
                if statement is None:
                    done()
            if statement is not None:
                self.thread.submit(request_of(statement))

        def request_of(statement: Statement) -> SequenceRequest:
            return SequenceRequest(
                self._explaining(statement),
                self._closing,
                lambda outcome: call(partial(proceed, outcome)),
                **self.times(),
            )

        call(partial(proceed, None))

    def _explaining(self, statement: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
        """Return the statement in a form whose errors name missing rights, or where tables are."""

        def run(cursor: Any) -> Answer:
            try:
                return statement(cursor)
            except InsufficientPrivilege as error:
                raise explain_missing_rights(cursor, error, self.table, self.role) from error
            except (UndefinedTable, InvalidSchemaName) as error:
                raise explain_missing_table(cursor, error, self.table) from error

        return run

    def carrying_out(self, message: Message[Answer]) -> Callable[[Any], Answer]:
        """Return a statement that carries out a message."""
        return lambda cursor: self.protocol.execute(cursor, message)

    def reading(self, task_names: Sequence[str], always: Sequence[str] = ()) -> Statement:
        """Return a statement that reads the rows of tasks that need an action, such as a takeover.

        :param always: the tasks whose rows are read in any case
        """

        def read(cursor: Any) -> list[TaskRow]:
            sent = time.monotonic()
            states, database_time = self.protocol.execute(cursor, ReadTasks(task_names, always))
            self._clock.note(sent, database_time)
            return states

        return read
