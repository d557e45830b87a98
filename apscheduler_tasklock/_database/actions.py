"""Operators' actions on their way to the database: an action is sent again after a doubt."""

from __future__ import annotations

from math import inf
from typing import Any, TypeVar

from apscheduler_tasklock._database.awaited_request import AwaitedCall
from apscheduler_tasklock._database.sqlstates import is_rolled_back
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

Answer = TypeVar("Answer")


class ActionRequest(AwaitedCall[Answer]):
    """The request of an operator's action, which always has statements of its own.

    The action is sent once. If it is not known whether it was done, it is sent again for some time,
    until an answer says what has become of it.

    :param function: sends the action's statements. It gets a cursor, and whether the action may
        have been done before.
    :param times: as in :class:`Request`
    """

    def send(self, cursor: Any) -> Answer:
        """Call the function."""
        return self._function(cursor, self.in_doubt)

    def note_failure(self, error: BaseException) -> None:
        """Note whether the action may have been done. An answer of the action's own is no doubt."""
        is_answer = isinstance(error, TaskLockError) and not isinstance(
            error, TaskLockDatabaseError
        )
        self.in_doubt = self.in_doubt or not (is_answer or is_rolled_back(error))

    @property
    def may_be_done(self) -> bool:
        """Whether the action may have been done, although no answer says so."""
        return self.in_doubt or (self.future.cancelled() and self.sent_at > -inf)

    @property
    def tried_until(self) -> float:
        """Until when the action is sent again after a failure, on the monotonic clock."""
        return self._tried_until if self.in_doubt else -inf

    @tried_until.setter
    def tried_until(self, moment: float) -> None:
        self._tried_until = moment
