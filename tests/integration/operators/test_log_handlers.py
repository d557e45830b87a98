"""Log handlers of the application that block, and what they must not hold up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timezone
from typing import Any

import pytest
from apscheduler.executors.base import BaseExecutor
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockDatabaseError, TaskLockExecutor, TaskLocks
from tests.support.claims import RENEWS_OFTEN
from tests.support.outages import refuse
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.waist import user

MakeLocks = Callable[..., TaskLocks]
LOGGER = logging.getLogger("apscheduler_tasklock")
TIMES: dict[str, Any] = {"min_lock": 0, "max_lock": 3600, "lease": 600}


class Handler(logging.Handler):
    """A handler that may block, and what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.blocks, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def emit(self, record: logging.LogRecord) -> None:
        if not self.go_on.is_set():
            self.blocks.set()
            assert self.go_on.wait(60)
        self.lines.append(record.getMessage())


@pytest.fixture
def handler() -> Iterator[Handler]:
    made = Handler()
    LOGGER.addHandler(made)
    yield made
    made.go_on.set()
    LOGGER.removeHandler(made)


def test_one_that_blocks_holds_up_no_renewal_and_no_claim(
    make_task_locks: MakeLocks, proxy: Proxy, handler: Handler
) -> None:
    locks = make_task_locks(proxy.url, given=RENEWS_OFTEN, claim_timeout=180)
    with locks.hold("held", **TIMES) as held:
        handler.go_on.clear()
        refuse(proxy)
        assert handler.blocks.wait(60)  # the first line of the outage
        proxy.accepting = True
        before = held.locked_until
        eventually(lambda: held.locked_until > before)
        with locks.hold("another", **TIMES):
            pass
        assert not held.lost
    handler.go_on.set()


def with_a_line_that_blocks(
    make_task_locks: MakeLocks, proxy: Proxy, handler: Handler
) -> TaskLocks:
    """Return task locks whose outage the handler does not get done with."""
    handler.go_on.clear()
    refuse(proxy)
    locks = make_task_locks(proxy.url, claim_timeout=1)
    with pytest.raises(TaskLockDatabaseError), locks.hold("task", **TIMES):
        pass
    assert handler.blocks.wait(60)
    return locks


def test_lines_are_written_before_a_shutdown_returns(
    make_task_locks: MakeLocks, proxy: Proxy, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = user.flush_application

    def let_go(_until: float) -> None:
        handler.go_on.set()
        flush(time.monotonic() + 60)  # a slow machine may take longer than a shutdown has

    locks = with_a_line_that_blocks(make_task_locks, proxy, handler)
    monkeypatch.setattr(user, "flush_application", let_go)
    locks.close()
    assert any("database is unavailable" in line for line in handler.lines)


@pytest.mark.nightly
def test_a_shutdown_does_not_wait_for_one_that_blocks_for_ever(
    make_task_locks: MakeLocks, proxy: Proxy, handler: Handler
) -> None:
    locks = with_a_line_that_blocks(make_task_locks, proxy, handler)
    locks.close()
    assert handler.lines == []


class RaisingHandler(logging.Handler):
    """A handler that somebody wrote badly."""

    def emit(self, _record: logging.LogRecord) -> None:
        raise ValueError("a handler that somebody wrote badly")


def test_a_start_that_fails_in_one_leaves_nothing_behind(database_url: str) -> None:
    """The application may try to start again and again."""
    handler = RaisingHandler()
    executor = TaskLockExecutor(database_url)
    scheduler = BackgroundScheduler(executors={"default": executor}, timezone=timezone.utc)
    level = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match="wrote badly"):
                scheduler.start()
            eventually(no_thread_is_left)
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
    scheduler.start()
    assert executor.health().live
    scheduler.shutdown()


class FailingExecutor(BaseExecutor):  # type: ignore[misc]  # APScheduler has no types
    """Another executor of the same scheduler, whose start fails."""

    fails = True

    def start(self, scheduler: Any, alias: str) -> None:
        if self.fails:
            raise LookupError("another executor")
        super().start(scheduler, alias)

    def _do_submit_job(self, job: Any, run_times: list[Any]) -> None: ...


def test_after_two_starts_that_failed_in_two_places_it_looks_at_the_rows(database_url: str) -> None:
    """The first one had begun the looks, and the second one ended them."""
    handler, other = RaisingHandler(), FailingExecutor()
    executor = TaskLockExecutor(database_url)
    scheduler = BackgroundScheduler(
        executors={"default": executor, "other": other}, timezone=timezone.utc
    )
    level = LOGGER.level
    with pytest.raises(LookupError, match="another executor"):
        scheduler.start()
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        with pytest.raises(ValueError, match="wrote badly"):
            scheduler.start()
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
    other.fails = False
    scheduler.start()
    try:
        eventually(lambda: executor.health().ready)
    finally:
        scheduler.shutdown()


def no_thread_is_left() -> bool:
    return not [each for each in threading.enumerate() if each.name.startswith("tasklock")]
