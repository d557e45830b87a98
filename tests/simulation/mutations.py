"""Mutations of the database's side: mistakes that the simulation must find."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from math import inf
from typing import Any
from uuid import uuid4

from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.outbox import Outbox
from apscheduler_tasklock._lock import claim_attempts, heartbeat
from apscheduler_tasklock._lock.database_clock import DatabaseClock
from apscheduler_tasklock._lock.releases import Release
from apscheduler_tasklock._runs import executor_run
from apscheduler_tasklock.lock import HeldLock
from tests.simulation.world import replaced
from tests.support.internals import undo_nothing
from tests.support.waist import ClaimTimes, Database, HeldLocks


def _nothing(*_: object) -> None:
    pass


def _read_times(**changes: Any) -> Callable[..., ClaimTimes]:
    original = claim_attempts.ClaimContext.read_times

    def read_times(context: Any, sent: float, lag: float = 0.0) -> ClaimTimes:
        return replace(original(context, sent, lag), **changes)

    return read_times


def _with_a_new_id(request: Any, error: BaseException) -> None:
    request.in_doubt = True
    request.request = replace(request.request, claim_id=uuid4())


def _sent_once(original: Callable[..., None], made: Any, *arguments: Any, **options: Any) -> None:
    original(made, *arguments, **options)
    made.tried_until = -inf


def _tried_once(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return {**original(*arguments, **options), "tried_until": -inf}


def _refused_is_refused(
    original: Callable[..., Any], client: Any, wanted: Any, begun: float, outcome: Any
) -> Any:
    if outcome.error is None:
        wanted.in_doubt = False
    return original(client, wanted, begun, outcome)


def _method(function: Callable[..., Any], owner: Any, name: str) -> Callable[..., Any]:
    """Return a method that gets the replaced method as its first argument."""
    original = vars(owner)[name]

    def method(*arguments: Any, **options: Any) -> Any:
        return function(original, *arguments, **options)

    return method


def _put_off(leases: Any) -> None:
    for each in leases:
        each.due += each.held.lease or 0.0


# The mutations by name: the scenario that is tried first, and how the mistake is made.
MUTATIONS: dict[str, tuple[str, Callable[[], AbstractContextManager[None]]]] = {
    "a claim that nobody waits for is granted": (
        "hold",
        lambda: replaced((claim_attempts.ClaimContext, "read_times", _read_times(not_after=None))),
    ),
    "rows are believed at once": (
        "overrun",
        lambda: replaced((claim_attempts.ClaimContext, "read_times", _read_times(stable=True))),
    ),
    "a claim in doubt is not ended": (
        "hold",
        lambda: replaced((HeldLocks, "withdraw", _nothing)),
    ),
    "a doubt is not noted": (
        "hold",
        lambda: replaced((claim_attempts.Attempt, "note_failure", _nothing)),
    ),
    "a claim that was refused when it was sent again is not ended": (
        "hold",
        lambda: replaced(
            (HeldLocks, "_conclude", _method(_refused_is_refused, HeldLocks, "_conclude"))
        ),
    ),
    "a hand-over that finds nothing is not sent again": (
        "hold",
        lambda: replaced((Release, "stays", lambda *_: False)),
    ),
    "a release does not go before a claim of its task": (
        "backlog",
        lambda: replaced((Outbox, "_let_releases_go_first", _nothing)),
    ),
    "a claim is sent again with a new id": (
        "windows",
        lambda: replaced((claim_attempts.Attempt, "note_failure", _with_a_new_id)),
    ),
    "a claim is sent once": (
        "windows",
        lambda: replaced((Database, "times", _method(_tried_once, Database, "times"))),
    ),
    "a release is sent once": (
        "hold",
        lambda: replaced((Release, "__init__", _method(_sent_once, Release, "__init__"))),
    ),
    "a release that is rejected is not sent again": (
        "hold",
        lambda: replaced((Release, "rejected_backoff", ())),
    ),
    "a renewal that failed waits for a lease": (
        "renewals",
        lambda: replaced((heartbeat, "_put_off", _put_off)),
    ),
    "a loss is not told": ("lost lock", lambda: replaced((HeldLock, "lose", _nothing))),
    "a run begins at the end of its lease": (
        "failover",
        lambda: replaced((executor_run, "LEAST_OF_LEASE", 0.0)),
    ),
    "there is no recovery grace": ("renewals", lambda: replaced((Outage, "grace", 0.0))),
    "an outage is not noted": ("overrun", lambda: replaced((Outage, "begin", _nothing))),
    "a step of the clock is not noted": (
        "renewals",
        lambda: replaced((DatabaseClock, "_step", lambda *_: 0.0)),
    ),
    "a claim that cannot be used is left": (
        "windows",
        lambda: replaced((claim_attempts.ClaimAttempt, "_undo", undo_nothing)),
    ),
}
