"""Worker processes and their parents; pools while the interpreter ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.executors.pool import ProcessPoolExecutor, ThreadPoolExecutor

from apscheduler_tasklock._scheduler.adapter import accepts_nothing_more


@pytest.mark.parametrize(
    ("executor", "refuses"),
    [(ThreadPoolExecutor, True), (ProcessPoolExecutor, True), (AsyncIOExecutor, False)],
)
def test_while_the_interpreter_ends_pools_accept_nothing_and_an_event_loop_may_go_on(
    executor: type[Any], refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in a thread that the interpreter waits for."""
    inner = executor()
    assert not accepts_nothing_more(inner)
    monkeypatch.setattr(threading, "_SHUTTING_DOWN", True)
    assert accepts_nothing_more(inner) == refuses
