"""Mutations of the queue of runs: mistakes that the simulation must find."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf
from typing import Any

from apscheduler_tasklock._runs import queue
from apscheduler_tasklock._runs.queue import RunQueue, _Asking, _place
from apscheduler_tasklock._runs.run import QueuedRun, RunKind, State, Token
from apscheduler_tasklock._runs.workers import WorkerModel
from tests.simulation.mutations import _method
from tests.simulation.world import replaced
from tests.support.waist import ClaimOutcome

Mutated = AbstractContextManager[None]


def _mutated(function: Callable[..., Any], owner: Any, name: str) -> Callable[[], Mutated]:
    return lambda: replaced((owner, name, _method(function, owner, name)))


def _ends_its_backlog(original: Callable[..., None], runs: Any, run: QueuedRun, at: float) -> None:
    for each in run.backlog:
        each.state = State.OVER
    run.following = None
    original(runs, run, at)


def _asked_beside(original: Callable[..., int], runs: Any, *arguments: Any) -> int:
    asked, runs._asked = runs._asked, set()
    taken = original(runs, *arguments)
    runs._asked = asked | runs._asked
    return taken


def _asked_while_unbegun(original: Callable[..., int], runs: Any, *arguments: Any) -> int:
    unbegun, runs._unbegun = runs._unbegun, set()
    taken = original(runs, *arguments)
    runs._unbegun |= unbegun
    return taken


def _without_a_limit(original: Callable[..., list[Any]], asking: Any) -> list[Any]:
    asks = original(asking)
    for ask in asks:
        ask.most = len(ask.runs)
    return asks


def _of_any_task(
    original: Callable[..., bool], asking: Any, run: QueuedRun, **options: Any
) -> bool:
    asking._tasks.discard(run.task_name)
    return original(asking, run, **options)


def _not_paused(original: Callable[..., None], runs: Any, now: float, free: float) -> None:
    """Let a run of a task overtake another one whose row was locked."""
    before = [(run, run.not_before) for run in runs._waiting]
    for run, _ in before:
        if run.not_before > now:
            run.not_before, run.state = -inf, State.OVER
    original(runs, now, free)
    for run, not_before in before:
        if run.state is State.OVER and run.not_before == -inf < not_before:
            run.not_before, run.state = not_before, State.WAITING
            insort(runs._waiting, run, key=_place)


def _by_a_stopwatch(
    _original: Callable[..., float], _workers: Any, run: QueuedRun, now: float
) -> float:
    return now


def _as_it_came(
    _original: Callable[..., float], _workers: Any, run: QueuedRun, now: float
) -> float:
    return run.came


def _not_withdrawn(_original: Callable[..., None], runs: Any, now: float) -> None:
    runs._deal(now, runs._workers.free)


def _given_though_stopped(original: Callable[..., None], runs: Any, now: float) -> None:
    stopped, runs._stopped = runs._stopped, False
    original(runs, now)
    runs._stopped = stopped


def _deferred_for_ever(_original: Callable[..., None], *_: Any) -> None:
    pass


def _refused_if_locked(
    original: Callable[..., None], runs: Any, run: QueuedRun, outcome: ClaimOutcome, now: float
) -> None:
    original(runs, run, ClaimOutcome.REFUSED if outcome is ClaimOutcome.LOCKED else outcome, now)


def _refused_if_beyond(
    original: Callable[..., None], runs: Any, run: QueuedRun, outcome: ClaimOutcome, now: float
) -> None:
    original(runs, run, ClaimOutcome.REFUSED if outcome is ClaimOutcome.BEYOND else outcome, now)


def _taken_for_good(original: Callable[..., None], runs: Any, run: QueuedRun, now: float) -> None:
    original(runs, run, now)
    runs._workers.given.add(run)


def _missed_has_a_worker(original: Callable[..., None], workers: Any, run: QueuedRun) -> None:
    is_missed, run.is_missed = run.is_missed, False
    original(workers, run)
    run.is_missed = is_missed


def _at_the_end(_original: Callable[..., None], runs: Any, run: QueuedRun, at: float) -> None:
    run.state = State.OVER
    if run.following is not None:
        run.following.earliest = at
        run.following.number = run.number + 1_000_000
        insort(runs._waiting, run.following, key=_place)


# The mutations by name: where the mistake is looked for, and how it is made. "overload" and "stall"
# are seeds; the other places are scenarios.
QUEUE_MUTATIONS: dict[str, tuple[str, Callable[[], Mutated]]] = {
    "a refused run ends its backlog": (
        "backlogs, no failover",
        _mutated(_ends_its_backlog, RunQueue, "_end"),
    ),
    "more than one ask is under way": (
        "40 jobs, the database 2 s late",
        _mutated(_asked_beside, RunQueue, "_deal_to"),
    ),
    "it asks while something given has not begun": (
        "shared",
        _mutated(_asked_while_unbegun, RunQueue, "_deal_to"),
    ),
    "more are granted than workers are free": ("full", _mutated(_without_a_limit, _Asking, "asks")),
    "two runs of a task are asked for together": (
        "close together",
        _mutated(_of_any_task, _Asking, "add"),
    ),
    "a run overtakes one of its task whose row is locked": (
        "locked rows",
        _mutated(_not_paused, RunQueue, "_deal"),
    ),
    "a locked row is a refusal": (
        "jobs",
        _mutated(_refused_if_locked, RunQueue, "answered"),
    ),
    "what is beyond the limit is refused": (
        "full",
        _mutated(_refused_if_beyond, RunQueue, "answered"),
    ),
    "lateness is waiting by a stopwatch": (
        "stall",
        _mutated(_by_a_stopwatch, WorkerModel, "begins_at"),
    ),
    "nobody is late for a worker": (
        "overload",
        _mutated(_as_it_came, WorkerModel, "begins_at"),
    ),
    "a missed run has a worker before its turn": (
        "stall",
        _mutated(_missed_has_a_worker, WorkerModel, "give"),
    ),
    "a backlog goes behind those that came with it": (
        "overload",
        _mutated(_at_the_end, RunQueue, "_end"),
    ),
    "what waits is begun after the stop": (
        "the queue stops",
        _mutated(_not_withdrawn, RunQueue, "_withdraw_all"),
    ),
    "what is granted after the stop is begun": (
        "the queue stops",
        _mutated(_given_though_stopped, RunQueue, "_deal_with_granted"),
    ),
    "a deferred run is not asked for again": (
        "backlogs",
        _mutated(_deferred_for_ever, RunQueue, "found"),
    ),
    "a worker is busy for good after a run that was not taken": (
        "raises",
        _mutated(_taken_for_good, RunQueue, "not_given"),
    ),
    "a token is there twice": (
        "raises, and queues",
        lambda: replaced((Token, "take", lambda _token: True)),
    ),
    "runs that somebody waits for have no share": (
        "manual",
        lambda: replaced((RunKind, "goes_first", property(lambda _kind: False))),
    ),
    "runs without a lock wait for the database": (
        "unlocked",
        lambda: replaced((queue, "PATIENCE", inf)),
    ),
}
