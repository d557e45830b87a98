"""Mutations of retries: mistakes that the simulation must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from math import inf
from typing import Any
from uuid import UUID

from apscheduler_tasklock import options
from apscheduler_tasklock._lock.outcomes import WindowAfter
from apscheduler_tasklock._runs import executor_run
from apscheduler_tasklock._runs.watch import Watch
from apscheduler_tasklock.testing import rule
from apscheduler_tasklock.testing.rule import LATEST_RETRY, Row
from tests.simulation.mutations import _method
from tests.simulation.world import replaced
from tests.support.waist import Refusal

Mutated = AbstractContextManager[None]


def _by_its_time(row: Row, now: datetime) -> bool:
    """Return whether a retry is pending, also if another claim was granted since it was noted."""
    if not row.finished or row.retry_at is None:
        return False
    is_before_next = row.due_at is None or now < row.due_at
    return is_before_next and now < row.retry_at + LATEST_RETRY


def _without_an_end(row: Row, now: datetime) -> bool:
    """Return whether a retry is pending, also after the next run time was due."""
    if not row.finished or row.retry_of != row.claim_id or row.retry_at is None:
        return False
    return now < row.retry_at + LATEST_RETRY


def _in_pauses(row: Row, now: datetime) -> bool:
    """Return whether a retry is due, also while its task is paused."""
    return row.retry_at is not None and row.retry_at <= now and row.is_retry_pending(now)


@contextmanager
def _by_the_number() -> Iterator[None]:
    """Let a retry's claim name the number of the attempt that has failed, and not its claim."""
    attempts: dict[UUID, int] = {}
    state_of, rerun = rule.state_of, rule.rerun

    def noting(row: Row, now: datetime) -> Any:
        attempts[row.claim_id] = row.attempt
        return state_of(row, now)

    def by_the_number(row: Row | None, request: Any, *arguments: Any) -> Any:
        is_retry = row is not None and request.kind == "retry"
        if is_retry and attempts.get(request.cause) == row.attempt:
            request = replace(request, cause=row.claim_id)
        return rerun(row, request, *arguments)

    with replaced((rule, "state_of", noting), (rule, "rerun", by_the_number)):
        yield


def _without_a_bound() -> Mutated:
    return replaced(
        (executor_run, "LONGEST_RETRY_DELAY", inf), (options, "LONGEST_RETRY_DELAY", inf)
    )


def _finishing(change: Callable[[Row, Row, Any], Row]) -> Callable[[], Mutated]:
    """Return a mutation of a run's end.

    :param change: gets the rows before and after, and the outcome, and returns the row
    """
    finish = rule._finish

    def changed(row: Row, end: Any, *arguments: Any) -> Any:
        after, ended = finish(row, end, *arguments)
        return (after if row.finished else change(row, after, end)), ended

    return lambda: replaced((rule, "_finish", changed))


def _opened(_before: Row, after: Row, end: Any) -> Row:
    if end.window is not WindowAfter.OPEN:
        return after
    return replace(after, window_until=after.window_start - timedelta(seconds=1))


def _reset(_before: Row, after: Row, _end: Any) -> Row:
    return replace(after, deaths=0)


def _counted(before: Row, after: Row, end: Any) -> Row:
    if end.outcome != "error":
        return after
    return replace(after, failures=before.failures + 1)


def _of_any_run(original: Callable[..., Refusal], answer: Any) -> Refusal:
    return replace(original(answer), came_first=answer.came_first and not answer.manual)


def _begun_anew(
    original: Callable[..., Any], row: Row | None, request: Any, *arguments: Any
) -> Any:
    decision = original(row, request, *arguments)
    if request.kind != "takeover" or decision.row is None or decision.row is row:
        return decision
    return replace(
        decision,
        row=replace(decision.row, attempt=1),
        answer=decision.answer._replace(attempt=1),
    )


def _came_first_of_any_run() -> Mutated:
    of = Refusal.of
    return replaced((Refusal, "of", staticmethod(lambda answer: _of_any_run(of, answer))))


# The mutations by name: where the mistake is looked for, and how it is made.
RETRY_MUTATIONS: dict[str, tuple[str, Callable[[], Mutated]]] = {
    "a retry is pending by its time alone": (
        "retries",
        lambda: replaced((Row, "is_retry_pending", _by_its_time)),
    ),
    "a retry's claim names the attempt's number": (
        "every three seconds, at once",
        _by_the_number,
    ),
    "a retry's delay has no bound": ("a delay that grows", _without_a_bound),
    "each failed attempt opens its window": ("the window is opened", _finishing(_opened)),
    "a release that notes a retry resets the deaths": ("a poisonous job", _finishing(_reset)),
    "a run time that was refused because of a retry is not kept": (
        "the next run time comes in the retry",
        _came_first_of_any_run,
    ),
    "each failed attempt is a failure": ("every attempt fails", _finishing(_counted)),
    "a retry begins after the next run time was due": (
        "the next run time comes before the look",
        lambda: replaced((Row, "is_retry_pending", _without_an_end)),
    ),
    "a retry begins in a pause": (
        "an operator's pause",
        lambda: replaced((Row, "is_retry_due", _in_pauses)),
    ),
    "a takeover of a retry is a first attempt": (
        "killed in the retry",
        lambda: replaced((rule, "rerun", _method(_begun_anew, rule, "rerun"))),
    ),
}


def forgetting() -> Mutated:
    """Let replicas forget a one-off job as the scheduler drops it."""
    return replaced((Watch, "note_unfinished", lambda *_: None))
