"""A step of a queue of runs: what has happened, and then what is to be done."""

from __future__ import annotations

from collections.abc import Sequence

from apscheduler_tasklock._lock.outcomes import ClaimOutcome
from apscheduler_tasklock._runs.deferred_runs import Outlook
from apscheduler_tasklock._runs.queue import RunQueue, ToDo
from apscheduler_tasklock._runs.run import QueuedRun


def step_of(
    queue: RunQueue,
    now: float,
    workers: int | None,
    *,
    came: Sequence[QueuedRun] = (),
    begun: Sequence[QueuedRun] = (),
    freed: Sequence[tuple[QueuedRun, float]] = (),
    not_given: Sequence[QueuedRun] = (),
    answered: Sequence[tuple[QueuedRun, ClaimOutcome]] = (),
    found: Sequence[tuple[QueuedRun, Outlook, float]] = (),
    stopped: bool = False,
) -> ToDo:
    """Tell a queue what has happened; return what is to be done then."""
    if stopped:
        queue.stop()
    for run in came:
        queue.came(run)
    for run in begun:
        queue.begun(run, now)
    for run, took in freed:
        queue.freed(run, took)
    for run in not_given:
        queue.not_given(run, now)
    for run, outcome in answered:
        queue.answered(run, outcome, now)
    for run, outlook, as_of in found:
        queue.found(run, outlook, as_of, now)
    return queue.next(now, workers)
