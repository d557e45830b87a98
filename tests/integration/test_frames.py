"""How many hands a run time passes, from APScheduler's worker to the statement."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock import EVENT_TASK_LOCK_RELEASED
from tests.support.schedulers import Replica

# Frames of the library between APScheduler's ``run_job`` and ``cursor.execute``.
MOST_FRAMES = 9


def frames_below(execute: FrameType | None) -> list[str]:
    """Return the library's frames up to APScheduler's ``run_job``; empty if it is not there."""
    found = []
    frame = execute
    while frame is not None:
        module = frame.f_globals["__name__"]
        if module == "apscheduler.executors.base" and frame.f_code.co_name == "run_job":
            return found
        if module.startswith("apscheduler_tasklock"):
            found.append(f"{module}:{frame.f_code.co_name}")
        frame = frame.f_back
    return []


def test_a_claim_and_a_release_pass_few_hands(
    make_replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks: list[list[str]] = []
    execute = psycopg.Cursor.execute

    def note(self: Any, *arguments: Any, **named: Any) -> Any:
        stacks.append(frames_below(sys._getframe(1)))
        return execute(self, *arguments, **named)

    monkeypatch.setattr(psycopg.Cursor, "execute", note)
    replica = make_replica()
    replica.run_once(print)
    replica.one(EVENT_TASK_LOCK_RELEASED)
    of_the_run = [stack for stack in stacks if stack]
    assert len(of_the_run) >= 2  # the claim, and the release
    for stack in of_the_run:
        assert len(stack) <= MOST_FRAMES, "\n".join(stack)
