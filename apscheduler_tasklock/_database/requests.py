"""Requests to the database, and their outcomes. One statement can have several requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar

from apscheduler_tasklock._database.jitter import BACKOFF, LOCKED_BACKOFF
from apscheduler_tasklock._shutdown import ATTEMPT_LIMIT, CANCEL_LIMIT, Closing
from apscheduler_tasklock.errors import TaskLockError

Answer = TypeVar("Answer")


class Request(Generic[Answer]):
    """A request to the database, which waits to be sent, or for its answer.

    All times are on the monotonic clock.

    :param closing: says whether the request is to end soon, such as after a stop of claiming
    :param came: when the request came; the request that came first is sent first
    :param until: when the request is over in any case
    :param turn_until: limits the wait for the request's turn on the connection
    :param tried_until: limits how long the request is sent again after failures; its first attempt
        is made in any case
    :param answer_within: limits the wait for the answer, in seconds, if that is less than the
        connection's limit
    :cvar kind: requests of one kind can be sent in one statement; ``None``: the request always has
        a statement of its own
    :ivar sender: the object that sends the request; one statement has requests of one sender only
    :ivar task_name: the task that the request is for. Two requests for one task are never in one
        statement, so that the database decides on them one after the other
    :cvar goes_first: whether the request is sent in an outage, too, without a probe before it
    :ivar in_doubt: whether the database may have carried out the request although no answer came
    :ivar by: the request's place among the waiting requests. The request with the lowest place is
        sent first
    :ivar not_before: the time before which the request is not sent
    :ivar sent_at: when the request was sent last
    """

    kind: type[Any] | str | None = None
    sender: object = None
    task_name: str = ""
    goes_first: bool = False
    in_doubt: bool = False
    # The pauses before a request is sent again while the database is unavailable, in seconds.
    backoff: Sequence[float] = BACKOFF
    # The same pauses while a row is locked; empty: the request is not sent again.
    locked_backoff: Sequence[float] = LOCKED_BACKOFF
    # The same pauses after the database has rejected the request.
    rejected_backoff: Sequence[float] = ()
    # Limits the request once its `closing` has stopped, in seconds.
    limit = ATTEMPT_LIMIT
    # Whether this request is sent after a release of its task, also if that release has failed and
    # waits to be sent again.
    follows_releases = False
    # Whether the request is a release, which is sent before the claims of its task.
    is_release = False

    def __init__(
        self,
        closing: Closing,
        *,
        came: float,
        until: float = inf,
        turn_until: float = inf,
        tried_until: float = -inf,
        answer_within: float = inf,
    ) -> None:
        self.closing = closing
        self.came = self.by = self.not_before = came
        self.until = until
        self.turn_until = turn_until
        self.tried_until = tried_until
        self.answer_within = answer_within
        self.failures = 0
        self.sent_at = -inf
        self.error: Exception | None = None
        self.together: object = None  # only requests with the same mark can be in one batch

    @property
    def over_at(self) -> float:
        """When the request's waits end. A stop may move that time closer.

        The waits end ``CANCEL_LIMIT`` seconds before the request is over, so that there is time to
        cancel its statement.
        """
        until = self.until
        if self.closing.stopped:
            until = min(until, self.closing.over_at(self.came, self.limit))
        return until - CANCEL_LIMIT

    @property
    def task_names(self) -> Sequence[str]:
        """The tasks that the request is for."""
        return (self.task_name,)

    @property
    def goes_alone(self) -> bool:
        """Whether the request needs a statement of its own now."""
        return self.kind is None

    @property
    def is_unwanted(self) -> bool:
        """Whether nobody waits for the result any more."""
        return False

    def send(self, cursor: Any) -> Answer | TaskLockError:
        """Send this request alone, on a cursor in autocommit mode; return the answer or an error.

        A returned error concerns this request alone, so the connection stays usable.
        """
        raise NotImplementedError

    @classmethod
    def send_together(
        cls, cursor: Any, requests: Sequence[Any]
    ) -> Sequence[Answer | TaskLockError]:
        """Send several requests of this kind; return an answer or an error for each."""
        raise NotImplementedError

    def note_failure(self, error: BaseException) -> None:
        """Note that the request was sent and failed. Must not wait."""

    def stays(self, _outcome: Outcome[Answer], _now: float) -> bool:
        """Return whether an answered request is to be sent once more, at its ``not_before``."""
        return False

    def taken(self) -> None:
        """Note that the database's side has taken the request. Must not wait."""

    def finish(self, outcome: Outcome[Answer]) -> None:
        """Take the outcome, after which the request is not sent again. Must not wait."""

    def abandon(self, error: Exception) -> None:
        """Take the error that :meth:`finish` or :meth:`fail` has raised."""

    def fail(self, outcome: Outcome[Answer]) -> None:
        """Take the outcome of an attempt, after which the request is sent again. Must not wait."""


class Call(Request[Answer]):
    """A request whose statement a function sends. It always has a statement of its own.

    :param function: sends a statement on the given cursor, and returns the answer
    :param closing: as in :class:`Request`
    :param times: as in :class:`Request`
    """

    def __init__(self, function: Callable[..., Answer], closing: Closing, **times: float) -> None:
        super().__init__(closing, **times)
        self._function = function

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
