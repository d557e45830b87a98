"""Outcomes of runs, which a release writes into the row and the run history."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from apscheduler_tasklock._lock.tracebacks import (
    LONGEST_TRACEBACK,
    Section,
    class_of,
    traceback_of,
)
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.schema.table import LONGEST_TEXTS

logger = logger_of(__name__)

# Limits the characters of an exception's message in the run history.
LONGEST_ERROR = 500

# Limits how often a window is begun and handed over before it is given up, because a fleet that
# stops again and again would hand it over for ever.
MOST_HANDOVERS = 10


class WindowAfter(Enum):
    """What becomes of a window when its claim is released."""

    KEEP = "released, its window taken"
    OPEN = "released, its window open again"
    HAND_OVER = "handed over: its window is run again by another replica"


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run, and what becomes of the run's window.

    :ivar window: what becomes of the run's window
    :ivar outcome: ``"ok"``, ``"error"``, ``"cancelled"`` or ``"overran"``; ``""``: the run never
        began
    :ivar error_type: the exception's class
    :ivar error: the exception's message, in a form that can be stored
    :ivar next_in: seconds until the next run time. It is set only if the next run time that the
        claim has written into the task's row has passed.
    :ivar is_last: whether no run time follows
    :ivar cut: whether a shutdown has cancelled the run
    :ivar traceback: the exception's traceback, in a form that can be stored
    :ivar retry_in: seconds after which the failed run is to be run again; ``None``: it is not
    """

    window: WindowAfter = WindowAfter.KEEP
    outcome: str = ""
    error_type: str | None = None
    error: str | None = None
    next_in: float | None = None
    is_last: bool = False
    cut: bool = False
    traceback: str | None = None
    retry_in: float | None = None

    @property
    def error_in_words(self) -> str | None:
        """The exception's class and message; ``None`` if there is no exception."""
        return error_in_words(self.error_type, self.error) or None

    @property
    def last_outcome(self) -> str | None:
        """The outcome in the task's row; ``None``: the run never began."""
        return "cut" if self.cut else self.outcome or None

    @classmethod
    def of(
        cls,
        exception: BaseException | None,
        window: WindowAfter = WindowAfter.KEEP,
        redact: Callable[[BaseException], str | None] = str,
        *,
        overran: bool = False,
        tracebacks: bool = False,
        in_worker: Sequence[Section] = (),
    ) -> RunOutcome:
        """Return the outcome of a run.

        :param exception: the exception that ended the run; ``None``: there was none
        :param redact: called with the exception; returns the message that is stored, or ``None``
        :param overran: whether the maximum lock was over at the run's end, which is a failure
        :param tracebacks: whether the history keeps the exception's traceback
        :param in_worker: the traceback as a worker process has made it; empty: there is no worker
        """
        if exception is None:
            return cls(window, "overran" if overran else "ok")
        if isinstance(exception, (asyncio.CancelledError, GeneratorExit)):
            return cls(window, "cancelled")
        kind, message = _fit(class_of(exception)), _message_of(exception, redact)
        traceback = None
        if tracebacks:
            traceback = _traceback_of(exception, message, redact, in_worker)
        return cls(window, "error", kind, message, traceback=traceback)


# The outcome of a claim whose run never began.
NOT_BEGUN = RunOutcome()


def error_in_words(error_type: str | None, error: str | None) -> str:
    """Return the class and the message of an exception; ``""`` for none."""
    return ": ".join(part for part in (error_type, error) if part)


def _message_of(
    exception: BaseException, redact: Callable[[BaseException], str | None]
) -> str | None:
    try:
        text = redact(exception)
        return None if text is None else _fit(str(text))
    except BaseException:  # the application's code may even exit, but the release must not fail
        logger.exception("The message of %s is not in the run history", class_of(exception))
        return None


def _traceback_of(
    exception: BaseException,
    message: str | None,
    redact: Callable[[BaseException], str | None],
    in_worker: Sequence[Section],
) -> str | None:
    def message_of(each: BaseException) -> str | None:
        return message if each is exception else _message_of(each, redact)

    try:
        text = traceback_of(exception, message_of, in_worker)
        return _fit(text, LONGEST_TRACEBACK, LONGEST_TEXTS["traceback"])
    except BaseException:  # the exceptions are the application's, but the release must not fail
        logger.exception("The traceback of %s is not in the run history", class_of(exception))
        return None


def _fit(text: str, longest: int = LONGEST_ERROR, most_bytes: int = LONGEST_TEXTS["error"]) -> str:
    """Return a text that PostgreSQL can store: without NUL and surrogates, and not too long.

    :param most_bytes: the table's limit, which is one of bytes where the encoding is SQL_ASCII
    """
    stored = text[:longest].replace("\0", "\ufffd").encode("utf-8", "replace")
    return stored[:most_bytes].decode(errors="ignore")
