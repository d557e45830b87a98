"""A plugin of pytest that puts this library's executor in place of APScheduler's.

It lies outside of the package `tests`, since the suites have packages of that name themselves. What
it needs to know comes from `tests/foreign/__main__.py`, which runs it.
"""

from __future__ import annotations

import fnmatch
import importlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import NonCallableMock

import apscheduler.executors.base
import pytest
from apscheduler.executors.base import BaseExecutor
from apscheduler.schedulers.base import BaseScheduler

from apscheduler_tasklock import TaskLockEvent, TaskLockExecutor

SETTINGS = json.loads(os.environ["TASKLOCK_FOREIGN"])

# Where APScheduler has its executors, and its schedulers.
EXECUTORS = {
    "apscheduler.executors.asyncio": ["AsyncIOExecutor"],
    "apscheduler.executors.debug": ["DebugExecutor"],
    "apscheduler.executors.gevent": ["GeventExecutor"],
    "apscheduler.executors.pool": ["ThreadPoolExecutor", "ProcessPoolExecutor"],
    "apscheduler.executors.tornado": ["TornadoExecutor"],
    "apscheduler.executors.twisted": ["TwistedExecutor"],
}
SCHEDULERS = ["asyncio", "background", "blocking", "gevent", "qt", "tornado", "twisted"]


def _base() -> type[TaskLockExecutor]:
    if not SETTINGS["django"]:
        return TaskLockExecutor
    from apscheduler_tasklock.django import DjangoTaskLockExecutor

    return DjangoTaskLockExecutor


class Replaced:
    """What the suite did with the executors."""

    running: ClassVar[list[TaskLockExecutor]] = []
    submitted: ClassVar[Counter[str]] = Counter()


def in_place_of(original: type[BaseExecutor]) -> type[TaskLockExecutor]:
    """Return a class that wraps an executor of APScheduler, and takes its arguments."""
    base: Any = _base()

    class InPlace(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self.__init_around__(original(*args, **options))

        def __init_around__(self, inner: BaseExecutor) -> None:
            # Tests use the same ids of jobs; each has tasks of its own.
            namespace = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
            where = [] if SETTINGS["django"] else [SETTINGS["database"]]
            base.__init__(self, *where, executor=inner, namespace=f"{namespace} ")

        def start(self, scheduler: Any, alias: str) -> None:
            if isinstance(scheduler, NonCallableMock):
                scheduler = MockScheduler(scheduler)
            super().start(scheduler, alias)
            Replaced.running.append(self)

        def submit_job(self, job: Any, run_times: list[datetime]) -> None:
            Replaced.submitted[original.__name__] += 1
            if apscheduler.executors.base.datetime is not datetime and run_times:
                # ADAPTED "clock": to the clock of the test, these run times are due now.
                now = datetime.now(run_times[-1].tzinfo)
                run_times = [now + (run_time - run_times[-1]) for run_time in run_times]
            super().submit_job(job, run_times)

        def shutdown(self, wait: bool = True) -> None:
            if wait and hasattr(self.inner, "_pool"):
                # ADAPTED "shutdown": what was submitted is run first.
                until = time.monotonic() + 10
                while any(self._instances.values()) and time.monotonic() < until:
                    time.sleep(0.01)
            super().shutdown(wait)

        # ADAPTED "internals": the wrapped executor has what the tests look at.

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or vars(self).get("_inner") is None:
                raise AttributeError(name)
            return getattr(self.inner, name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in ("_run_job_success", "_run_job_error"):
                getattr(self.inner, name).report = value
            else:
                super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            if name not in ("_run_job_success", "_run_job_error"):
                super().__delattr__(name)

    InPlace.__name__ = InPlace.__qualname__ = original.__name__
    return InPlace


class MockScheduler:
    """ADAPTED "mock": a mock of a scheduler, with the attributes that a scheduler has."""

    def __init__(self, mock: Any) -> None:
        self._mock = mock
        self._plain = _Plain()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mock if hasattr(self._mock, name) else self._plain, name)

    def _dispatch_event(self, event: Any) -> None:
        if not isinstance(event, TaskLockEvent):  # which only listeners that ask for it would get
            self._mock._dispatch_event(event)


class _Plain(BaseScheduler):
    def shutdown(self, wait: bool = True) -> None:
        super().shutdown(wait)

    def wakeup(self) -> None:
        pass


def _wrap_default(scheduler: type[BaseScheduler]) -> None:
    make_own = scheduler._create_default_executor

    def make(self: Any) -> TaskLockExecutor:
        own = make_own(self)
        if isinstance(own, TaskLockExecutor):
            return own
        executor = object.__new__(in_place_of(type(own)))
        executor.__init_around__(own)
        return executor

    scheduler._create_default_executor = make


def pytest_configure(config: pytest.Config) -> None:
    schedulers = {BaseScheduler}
    for name in SCHEDULERS:
        module = importlib.import_module(f"apscheduler.schedulers.{name}")
        schedulers |= {c for c in vars(module).values() if isinstance(c, type)}
    for scheduler in schedulers:
        if "_create_default_executor" in vars(scheduler):
            _wrap_default(scheduler)
    for module_name, names in EXECUTORS.items():
        module = importlib.import_module(module_name)
        for name in names:
            setattr(module, name, in_place_of(getattr(module, name)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """End the executors that a test leaves running, as many do."""
    yield
    while Replaced.running:
        with suppress(Exception):  # its event loop may be over
            Replaced.running.pop().shutdown(wait=False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    used = set()
    kept, deselected = [], []
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        for row in SETTINGS["deselected"]:
            if fnmatch.fnmatchcase(name, row["test"].replace("[", "[[]")):
                used.add(row["test"])
                deselected.append(item)
                break
        else:
            kept.append(item)
        for row in SETTINGS["differences"]:
            if fnmatch.fnmatchcase(name, row["test"].replace("[", "[[]")):
                used.add(row["test"])
                item.add_marker(pytest.mark.xfail(strict=True, reason=row["why"]))
                item.stash[FAILURE] = row["failure"]
    items[:] = kept
    config.hook.pytest_deselected(items=deselected)
    rows = SETTINGS["deselected"] + SETTINGS["differences"]
    if unused := [row["test"] for row in rows if row["test"] not in used]:
        raise pytest.UsageError(f"tests/foreign/suites.py lists tests that are not there: {unused}")


FAILURE = pytest.StashKey[str]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Let a listed test fail for another reason than the one that is listed."""
    outcome: Any = yield
    report = outcome.get_result()
    expected = item.stash.get(FAILURE, None)
    if expected is None or call.excinfo is None or not hasattr(report, "wasxfail"):
        return
    happened = str(call.excinfo.getrepr(style="short"))
    if call.when != "call" or expected not in happened:
        report.outcome = "failed"
        report.longrepr = (
            f"It is listed as a difference that fails with {expected!r}, but here, in its "
            f"{call.when}:\n{happened}"
        )
        del report.wasxfail


def pytest_sessionfinish() -> None:
    Path(SETTINGS["used"]).write_text(json.dumps(Replaced.submitted))
