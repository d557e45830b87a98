"""Requests to the database, and their outcomes. One statement can have several requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from apscheduler_tasklock.errors import TaskLockError

Answer = TypeVar("Answer")


class Request(Generic[Answer]):
    """A request to the database.

    :cvar kind: requests of one kind can be sent in one statement; ``None``: the request always has
        a statement of its own
    :ivar sender: the object that sends the request; one statement has requests of one sender only
    :ivar task_name: the task that the request is for. Two requests for one task are never in one
        statement, so that the database decides on them one after the other
    :cvar goes_first: whether the request is sent in an outage, too, without a probe before it
    :ivar in_doubt: whether the database may have carried out the request although no answer came
    """

    kind: type[Request[Any]] | str | None = None
    sender: object = None
    task_name: str = ""
    goes_first: bool = False
    in_doubt: bool = False

    @property
    def task_names(self) -> Sequence[str]:
        """The tasks that the request is for."""
        return (self.task_name,)

    def send(self, cursor: Any) -> Answer | TaskLockError:
        """Send this request alone, on a cursor in autocommit mode; return the answer or an error.

        A returned error concerns this request alone, so the connection stays usable.
        """
        raise NotImplementedError

    @property
    def goes_alone(self) -> bool:
        """Whether the request needs a statement of its own now."""
        return self.kind is None

    @classmethod
    def send_together(
        cls, cursor: Any, requests: Sequence[Any]
    ) -> Sequence[Answer | TaskLockError]:
        """Send several requests of this kind; return an answer or an error for each."""
        raise NotImplementedError

    def note_failure(self, error: BaseException) -> None:
        """Note that the request was sent and failed. Must not wait."""


class Call(Request[Answer]):
    """A request that always has a statement of its own, which a function sends.

    :param function: sends a statement on the given cursor, and returns the answer
    :param goes_first: as in :class:`Request`
    """

    def __init__(self, function: Callable[[Any], Answer], *, goes_first: bool = False) -> None:
        self._function = function
        self.goes_first = goes_first

    def send(self, cursor: Any) -> Answer:
        """Call the function."""
        return self._function(cursor)


@dataclass(frozen=True)
class Outcome(Generic[Answer]):
    """The outcome of a request: an answer, or an error."""

    answer: Answer | None = None
    error: Exception | None = None

    def result(self) -> Answer:
        """Return the answer, or raise the error."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                # The error's traceback refers to this frame, so the frame must not refer to the
                # error.
                del self
        return self.answer  # type: ignore[return-value]  # an answer may be None
