"""Outcomes: of a claim, and of a run, as its release writes it and the history tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from operator import attrgetter

from apscheduler_tasklock._lock.parameters import Parameters, Unsent, sent
from apscheduler_tasklock._lock.tracebacks import (
    LONGEST_TRACEBACK,
    Section,
    class_of,
    traceback_of,
)
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.schema.table import LONGEST_TEXTS, literal, run_table, task_lock_table

logger = logger_of(__name__)

# Limits the characters of an exception's message in the run history.
LONGEST_ERROR = 500

# Limits how often a window is begun and handed over before it is given up, because a fleet that
# stops again and again would hand it over for ever.
MOST_HANDOVERS = 10


@dataclass(frozen=True)
class EntryOutcome:
    """An outcome in the run history: what follows from it, and all that is said of it.

    :ivar ended: what the run did
    :ivar is_failure: whether the run has failed
    :ivar is_corrected: whether a release that comes later corrects it
    :ivar did: what an operator did, unless its name says it
    :ivar after: how and after how long, ``{}``, the run of a task ended
    :ivar took: how long, ``{}``, the run took, as far as it is known
    :ivar why: why the run ended so, unless it raised or ended as it should
    :ivar failure: how the last failure of a task came about, of a run that another replica or an
        operator may have closed
    :ivar remedy: what to do about such a failure
    :ivar style: rich's style for it
    """

    name: str
    ended: str
    is_failure: bool = False
    is_corrected: bool = False
    did: str = ""
    after: str = "took {}"
    took: str = "{}"
    why: str = ""
    failure: str = ""
    remedy: str = ""
    style: str = "bold red"


_OUTCOMES = (
    EntryOutcome("ok", "ended well", style="green"),
    EntryOutcome("error", "failed", is_failure=True),
    EntryOutcome("cancelled", "was cancelled", after="cancelled after {}", style="yellow"),
    EntryOutcome(
        name="died",
        ended="died with its holder",
        is_failure=True,
        is_corrected=True,
        # The moment of the death is not known, only the end of the lease.
        after="died with its holder, whose lease ended after {}",
        took="at most {}",
        why="its replica died, or could not reach the database",
        failure="the last died with its holder",
        remedy="see why its replica died; acknowledge the death if it can wait",
    ),
    EntryOutcome(
        name="overran",
        ended="overran its maximum lock",
        is_failure=True,
        after="overran its maximum lock after {}",
        took="over {}",
        why="it took longer than its maximum lock",
        failure="the last has overrun its maximum lock",
        remedy="see why it took so long; acknowledge that if it can wait",
    ),
    EntryOutcome(
        "overtaken", "lost its lock, and ended later", why="it had lost its lock, and ended later"
    ),
    EntryOutcome(
        name="freed",
        ended="was freed by an operator",
        is_failure=True,
        is_corrected=True,
        after="freed after {}",
        why="an operator freed the task",
        failure="the last was freed",
        remedy="if it cannot wait for its next run time: run it now; else acknowledge it",
        style="yellow",
    ),
    EntryOutcome("missed", "missed"),
    *(EntryOutcome(name, name, style="magenta") for name in ("paused", "resumed")),
    EntryOutcome("run", "run", did="a run asked for", style="magenta"),
    *(EntryOutcome(name, name, style="magenta") for name in ("acknowledged", "rescheduled")),
    *(
        EntryOutcome(f"job-{done}", f"job-{done}", did=f"its job {done}", style="magenta")
        for done in ("paused", "resumed", "moved", "removed")
    ),
)
_CUT = EntryOutcome("cut", "was cut by a stop", after="cut by a stop after {}")
_BY_NAME = {each.name: each for each in (*_OUTCOMES, _CUT)}
# The outcomes of the entries in the run history, and those that tell of a failure or a miss.
OUTCOMES = tuple(each.name for each in _OUTCOMES)
FAILED = tuple(each.name for each in _OUTCOMES if each.is_failure)
BAD_OUTCOMES = (*FAILED, "missed")
# Failures that a release tells, those that are written without one, those of these that a late
# release corrects, and those of which only the end of the lease is known.
RELEASED_FAILURES = tuple(each for each in FAILED if not _BY_NAME[each].is_corrected)
UNRELEASED = tuple(each.name for each in _OUTCOMES if each.failure)
CORRECTED = tuple(each.name for each in _OUTCOMES if each.is_corrected)
UNTIMED = tuple(each.name for each in _OUTCOMES if each.took != "{}")


def outcome_named(name: str) -> EntryOutcome:
    """Return an outcome of a run or a task, also one that this version does not know."""
    return _BY_NAME.get(name) or EntryOutcome(name, name)


def in_sql(names: Iterable[str]) -> str:
    """Return names as a list for ``IN``."""
    return f"({', '.join(map(literal, names))})"


class ClaimOutcome(Enum):
    """The outcome of a run's claim, for the queue."""

    GRANTED = "granted"
    REFUSED = "refused"
    DEFERRED = "deferred"  # refused because of another run, but its own window is still to be run
    LOCKED = "locked"  # another session has the task's row locked
    UNANSWERED = "unanswered"  # no answer could be used, so that the claim may be granted
    BEYOND = "beyond"  # not granted, because other claims have got all free workers
    UNLOCKED = "unlocked"  # the database did not answer, and the run is run without a lock
    FAILED = "failed"  # the database did not answer, or rejected the claim


class WindowAfter(Enum):
    """What becomes of a window when its claim is released."""

    KEEP = "released, its window taken"
    OPEN = "released, its window open again"
    HAND_OVER = "handed over: its window is run again by another replica"


@dataclass(frozen=True)
class RunOutcome(Parameters):
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

    window: Unsent[WindowAfter] = WindowAfter.KEEP
    outcome: str = ""
    error_type: str | None = None
    error: str | None = None
    next_in: float | None = None
    is_last: bool = False
    cut: Unsent[bool] = False
    traceback: str | None = None
    retry_in: float | None = None

    @property
    def error_in_words(self) -> str | None:
        """The exception's class and message; ``None`` if there is no exception."""
        return error_in_words(self.error_type, self.error) or None

    @sent
    def keep_window(self) -> bool:
        """Whether the window stays taken."""
        return self.window is WindowAfter.KEEP

    @sent
    def hand_over(self) -> bool:
        """Whether the window is handed over."""
        return self.window is WindowAfter.HAND_OVER

    @sent
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


# What a ``RunOutcome`` has for the run history alone, by the names of the columns: texts of the
# application, which may have characters that the database's encoding lacks.
_COLUMNS = {each.name for each in run_table(task_lock_table()).columns} - {"outcome"}
END_TEXTS = tuple(each.name for each in fields(RunOutcome) if each.name in _COLUMNS)
# Returns them, of a ``RunOutcome``.
texts_of = attrgetter(*END_TEXTS)

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
