"""The exceptions: a base class, and a subclass for each kind of error that a caller may handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

from apscheduler_tasklock._values import shown

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Limits the seconds until a retry.
LONGEST_RETRY_DELAY = 86_400.0


class TaskLockError(Exception):
    """The base class of every error that this library raises."""

    def for_page(self) -> str:
        """Return the message for a page, which has buttons and boxes in place of commands."""
        return str(self)


class TaskLockOptionError(TaskLockError, ValueError):
    """An option is unknown or impossible. The message names the option and what is allowed."""


class TaskLockSchemaError(TaskLockError):
    """The task lock table is missing, old or not permitted. The message names the remedy."""


class TaskLockRefusedError(TaskLockError):
    """``TaskLocks.hold`` was refused: the task is running, was just run, or is paused.

    :ivar name: the task's name
    :ivar holder: the replica that made the task's last claim
    :ivar locked_until: database time until which the task is locked
    :ivar reason: ``"running"``, ``"window"`` or ``"paused"``
    """

    def __init__(self, name: str, holder: str, locked_until: datetime, reason: str) -> None:
        super().__init__(name, holder, locked_until, reason)
        self.name = name
        self.holder = holder
        self.locked_until = locked_until
        self.reason = reason

    def __str__(self) -> str:
        if self.reason == "paused":
            return f"task {self.name!r} is paused, or was when this run was due"
        what = "is running on" if self.reason == "running" else "was just run by"
        return f"task {self.name!r} {what} {shown(self.holder)}, locked until {self.locked_until}"


class TaskLockNotFoundError(TaskLockError):
    """An operation names tasks, replicas, or jobs of the job store, that have no row.

    :ivar names: the names
    :ivar kind: what was not found
    """

    def __init__(
        self, names: Sequence[str], kind: Literal["task", "job", "replica"] = "task", hint: str = ""
    ) -> None:
        super().__init__(names, kind, hint)
        self.names = tuple(names)
        self.kind: Literal["task", "job", "replica"] = kind
        self._hint = hint

    def __str__(self) -> str:
        command = "status" if self.kind == "task" else f"{self.kind}s"
        listed = f"`apscheduler-tasklock {command}` lists all {self.kind}s"
        return f"{self.for_page()}; {listed}{self._hint}"

    def for_page(self) -> str:
        """Return the message without the command that lists what there is."""
        return f"no such {self.kind}: {', '.join(map(repr, self.names))}"


class TaskLockStateError(TaskLockError):
    """A task's or a job's state forbids an operation. The message says why, and what to do.

    :param why: what forbids the operation
    :param remedy: what to do about it on the command line or in Python
    :param on_page: what to do about it on a page
    """

    def __init__(self, why: str, *, remedy: str = "", on_page: str = "") -> None:
        super().__init__(why)
        self._why = why
        self._remedy = remedy
        self._on_page = on_page

    def __str__(self) -> str:
        return "; ".join(filter(None, (self._why, self._remedy)))

    def for_page(self) -> str:
        """Return why, and what to do with the buttons and boxes of a page."""
        return "; ".join(filter(None, (self._why, self._on_page)))


class _AsksExecutor(Exception):  # noqa: N818  # a job raises it to ask for something
    """The base class of the exceptions with which a job asks its executor for something."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is unpickled by a call of its class with `args`. That fails for a
        # subclass with an `__init__` of its own, and an exception that cannot be unpickled breaks a
        # process pool. So `__init__` is not called.
        return _made_anew, (type(self), self.args), vars(self)


def _made_anew(kind: type[BaseException], arguments: tuple[object, ...]) -> BaseException:
    return kind.__new__(kind, *arguments)


class TaskLockRetry(_AsksExecutor):
    """A job raises this to be run again after a delay of its own.

    It counts as one of the option ``retries``. If none is left, the run fails.

    :param after: the delay until the retry: seconds or a ``timedelta``, a day at most; ``None``:
        that of the options
    :ivar after: the delay, in seconds. A subclass can set it as well, also to a ``timedelta``.
    :raises TaskLockOptionError: the delay is impossible
    """

    # Of the class, for a subclass that does not call this `__init__`.
    after: timedelta | float | None = None

    def __init__(self, *args: object, after: timedelta | float | None = None) -> None:
        super().__init__(*args)
        if after is not None:
            self.after = retry_delay(after)


def retry_delay(after: timedelta | float) -> float:
    """Return the delay of a ``TaskLockRetry`` in seconds.

    :raises TaskLockOptionError: the delay is impossible
    """
    seconds = after.total_seconds() if isinstance(after, timedelta) else after
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (is_number and 0 <= seconds <= LONGEST_RETRY_DELAY):
        raise TaskLockOptionError(
            f"TaskLockRetry: after must be seconds or a timedelta, from 0 to a day, not {after!r}"
        )
    return float(seconds)


class TaskLockGiveUp(_AsksExecutor):
    """A job raises this to fail without a retry, although retries are left."""


class TaskLockDatabaseError(TaskLockError):
    """The database could not be reached, or did not answer in time."""


class TaskLockUnknownError(TaskLockDatabaseError):
    """It is not known whether an operator's action was done: it was sent, and no answer came."""


def raised_at_the_call(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a public function raise this library's errors without the frames below it: a decorator.

    So a traceback ends with the user's line and one line of the library. The message has all that
    the frames and the causes could tell.
    """

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except TaskLockError as error:
            raise error.with_traceback(None) from None

    return call
