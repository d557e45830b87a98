"""What is asked of the database: requests, those that can travel together, and their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from apscheduler_tasklock.errors import TaskLockError

Answer = TypeVar("Answer")


class Request(Generic[Answer]):
    """Something to ask of the database.

    :cvar kind: requests of one kind can travel together; ``None`` if it always goes alone
    :ivar sender: on whose behalf: only requests of one sender can travel together
    :ivar task_name: no two requests for one task travel together: the second is decided after the
        first
    :ivar in_doubt: whether the database may have carried it out without an answer having come
    """

    kind: type[Request[Any]] | None = None
    sender: object = None
    task_name: str = ""
    in_doubt: bool = False

    @property
    def task_names(self) -> Sequence[str]:
        """The tasks that it is for, if it is for several that go together."""
        return (self.task_name,)

    def send(self, cursor: Any) -> Answer | TaskLockError:
        """Ask alone, on a cursor in autocommit mode; return the answer, or why it was not asked."""
        raise NotImplementedError

    @property
    def goes_alone(self) -> bool:
        """Whether this one cannot travel with others now."""
        return self.kind is None

    @classmethod
    def send_together(
        cls, cursor: Any, requests: Sequence[Any]
    ) -> Sequence[Answer | TaskLockError]:
        """Ask for several of this kind; return their answers, or why one is to be asked again."""
        raise NotImplementedError

    def note_failure(self, error: BaseException) -> None:
        """Note that it was sent and failed. Must not wait."""


class Call(Request[Answer]):
    """A request that always goes alone.

    :param function: asks on a cursor
    """

    def __init__(self, function: Callable[[Any], Answer]) -> None:
        self._function = function

    def send(self, cursor: Any) -> Answer:
        """Call the function."""
        return self._function(cursor)


@dataclass(frozen=True)
class Outcome(Generic[Answer]):
    """What became of a request: an answer, or an error."""

    answer: Answer | None = None
    error: Exception | None = None

    def result(self) -> Answer:
        """Return the answer, or raise the error."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                # The traceback refers to this frame, and so, in a circle, to the error.
                del self
        return self.answer  # type: ignore[return-value]  # what the request answers may be None
