"""Mutations of leader mode: mistakes that the simulation must find."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from apscheduler_tasklock._runs.deferred_runs import Outlook
from apscheduler_tasklock._runs.leadership import FollowerRun, Leadership
from apscheduler_tasklock._runs.queue import RunQueue
from tests.simulation.mutations import _method
from tests.simulation.world import replaced


def _never_asks(original: Callable[..., Outlook], *arguments: Any) -> Outlook:
    outlook = original(*arguments)
    return Outlook.WAITS if outlook is Outlook.ASKED_AGAIN else outlook


def _asks_if_it_leads(
    original: Callable[..., Outlook], following: FollowerRun, *arguments: Any
) -> Outlook:
    outlook = original(following, *arguments)
    return Outlook.REFUSED if following.leadership.follows else outlook


def _all_together(original: Callable[..., None], runs: Any, *arguments: Any) -> None:
    excused = {run: run.excused for run in runs._workers.given}
    for run in excused:
        run.excused = 0.0
    original(runs, *arguments)
    for run, seconds in excused.items():
        run.excused = seconds


def _if_it_leads(original: Callable[..., None], leadership: Any) -> None:
    leadership._may_lead = leadership.leads
    original(leadership)


def _mutated(function: Callable[..., Any], owner: Any, name: str) -> Any:
    return lambda: replaced((owner, name, _method(function, owner, name)))


# The mutations by name: where the mistake is looked for, and how it is made.
LEADER_MUTATIONS: dict[str, tuple[str, Callable[[], AbstractContextManager[None]]]] = {
    "a follower never asks": (
        "the leader is killed",
        _mutated(_never_asks, FollowerRun, "outlook"),
    ),
    "a follower drops what was not run": (
        "the leader is killed",
        lambda: replaced((FollowerRun, "_was_run", lambda *_: True)),
    ),
    "the leader alone may ask": (
        "a job that the leader does not have",
        _mutated(_asks_if_it_leads, FollowerRun, "outlook"),
    ),
    "a leader never gives its leadership up": (
        "the leader stops",
        lambda: replaced((Leadership, "_resign", lambda *_: None)),
    ),
    "only what is known to lead gives its leadership up": (
        "a replica stops while it takes the leadership",
        _mutated(_if_it_leads, Leadership, "close"),
    ),
    "followers ask at once": (
        "a leader",
        lambda: replaced((Leadership, "follows", False)),
    ),
    "a leader leads on after its lease": (
        "the leader is paused",
        lambda: replaced((Leadership, "is_leader", property(lambda self: self.leads))),
    ),
    "each of the run times that are merged has a head start": (
        "every second, merged, and the leader does not have it",
        lambda: replaced((FollowerRun, "replace", lambda *_: None)),
    ),
    "a replica leads as soon as it joins": (
        "every second, and a replica joins after the leader's stop",
        lambda: replaced((Leadership, "_is_new", lambda *_: False)),
    ),
    "run times that were deferred are asked for while one of them has a worker": (
        "every second, and the leader is killed",
        _mutated(_all_together, RunQueue, "_deal"),
    ),
}
