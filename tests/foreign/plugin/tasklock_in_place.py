"""A plugin of pytest that puts this library's executor or job store in place of APScheduler's.

It lies outside of the package `tests`, since the suites have packages of that name themselves. What
it needs to know comes from `tests/foreign/__main__.py`. Where it says ADAPTED, `suites.py` has the
reason.
"""

from __future__ import annotations

import fnmatch
import importlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import NonCallableMock

import apscheduler
import apscheduler.executors.base
import psycopg
import pytest
from apscheduler.executors.base import BaseExecutor
from apscheduler.schedulers.base import BaseScheduler
from sqlalchemy.engine import make_url
from tornado.ioloop import IOLoop

from apscheduler_tasklock import TaskLockEvent, TaskLockExecutor, TaskLockJobStore
from apscheduler_tasklock.django import DjangoTaskLockExecutor

SETTINGS = json.loads(os.environ["TASKLOCK_FOREIGN"])

# Where APScheduler has its executors, and its schedulers.
EXECUTORS = {
    "asyncio": ["AsyncIOExecutor"],
    "debug": ["DebugExecutor"],
    "gevent": ["GeventExecutor"],
    "pool": ["ThreadPoolExecutor", "ProcessPoolExecutor"],
    "tornado": ["TornadoExecutor"],
    "twisted": ["TwistedExecutor"],
}
SCHEDULERS = ["asyncio", "background", "blocking", "gevent", "qt", "tornado", "twisted"]

REPORTS = ("_run_job_success", "_run_job_error")

# Seconds that jobs of the suites may take until a shutdown goes on.
SHUTDOWN_LIMIT = 10.0

# What a test that is listed as a difference has to report.
FAILURE = pytest.StashKey[str]()

# The executors that run, and how many jobs each kind of them was given.
running: list[TaskLockExecutor] = []
submitted: Counter[str] = Counter()
# How many jobs each job store left in the database.
stored: list[int] = []

Base: Any = DjangoTaskLockExecutor if SETTINGS["django"] else TaskLockExecutor


class InPlace(Base):
    """Wraps an executor of APScheduler, and takes its arguments."""

    original: ClassVar[type[BaseExecutor]]

    def __init__(self, *args: Any, **options: Any) -> None:
        self.wrap(self.original(*args, **options))

    def wrap(self, inner: BaseExecutor) -> None:
        # Tests use the same ids of jobs; each has tasks of its own.
        namespace = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        where = [] if SETTINGS["django"] else [SETTINGS["database"]]
        super().__init__(*where, executor=inner, namespace=f"{namespace} ")

    def start(self, scheduler: Any, alias: str) -> None:
        if isinstance(scheduler, NonCallableMock):
            scheduler = MockScheduler(scheduler)
        super().start(scheduler, alias)
        running.append(self)

    def submit_job(self, job: Any, run_times: list[datetime]) -> None:
        submitted[self.original.__name__] += 1
        if apscheduler.executors.base.datetime is not datetime and run_times:
            # ADAPTED "clock": to the clock of the test, these run times are due now.
            now = datetime.now(run_times[-1].tzinfo)
            run_times = [now + (run_time - run_times[-1]) for run_time in run_times]
        io_loop = getattr(self.inner, "_ioloop", None)
        if io_loop is not None and not io_loop.asyncio_loop.is_running():
            # ADAPTED "loop": fixtures that are no coroutines find no loop, and make one.
            self.inner._ioloop = IOLoop.current()
        super().submit_job(job, run_times)

    def shutdown(self, wait: bool = True) -> None:
        # ADAPTED "shutdown": what was submitted to a pool is run first.
        until = time.monotonic() + (SHUTDOWN_LIMIT if wait and hasattr(self.inner, "_pool") else 0)
        while any(self._instances.values()) and time.monotonic() < until:
            time.sleep(0.01)
        super().shutdown(wait)

    # ADAPTED "internals": the wrapped executor has what the tests look at and replace.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or vars(self).get("_inner") is None:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in REPORTS:
            getattr(self.inner, name).report = value
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name not in REPORTS:
            super().__delattr__(name)


def in_place_of(original: type[BaseExecutor]) -> Any:
    """Return a class that tests can use, and subclass, in place of one of APScheduler's."""
    return type(original.__name__, (InPlace,), {"original": original})


class MockScheduler:
    """ADAPTED "mock": a mock of a scheduler, with the attributes that a scheduler has."""

    def __init__(self, mock: Any) -> None:
        self.mock = mock
        self.plain = PlainScheduler()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mock if hasattr(self.mock, name) else self.plain, name)

    def _dispatch_event(self, event: Any) -> None:
        if not isinstance(event, TaskLockEvent):  # which only listeners that ask for it would get
            self.mock._dispatch_event(event)


class PlainScheduler(BaseScheduler):
    """A scheduler that is not started."""

    def shutdown(self, wait: bool = True) -> None: ...

    def wakeup(self) -> None: ...


class StoreInPlace(TaskLockJobStore):
    """ADAPTED "store": stands where the tests make a SQLAlchemyJobStore."""

    def __init__(self, url: str | None = None, **options: Any) -> None:
        if url is not None:
            options["database"] = SETTINGS["database"]
            Path(make_url(url).database or "").touch()  # the fixture removes it at its end
        super().__init__(**options, **SETTINGS["store"])

    def start(self, scheduler: Any, alias: str) -> None:
        # ADAPTED "scheduler": the fixture gives none.
        super().start(PlainScheduler() if scheduler is None else scheduler, alias)

    def shutdown(self) -> None:
        """End it, and leave an empty table to the next test."""
        super().shutdown()
        with psycopg.connect(SETTINGS["database"]) as connection:
            stored.append(connection.execute("DELETE FROM task_lock_job").rowcount)


class StoreWithDueJobs(StoreInPlace):
    """ADAPTED "due": answers what is due by what a replica reads."""

    def get_due_jobs(self, now: datetime) -> list[Any]:
        return [self.lookup_job(row.id) for row in self._due_rows() if row.next_run_time <= now]

    def get_next_run_time(self) -> Any:
        return min((row.next_run_time for row in self._due_rows()), default=None)

    def _due_rows(self) -> list[Any]:
        database = self.user.database
        read = partial(database.jobs.read_due, most={"default": 100})
        return [found.row for found in database.ask(read).jobs]


def wrap_default_of(scheduler: type[BaseScheduler]) -> None:
    """Let a scheduler's own default executor be this library's, around the one that it makes."""
    make_own = scheduler._create_default_executor

    def make(self: Any) -> Any:
        own = make_own(self)
        if isinstance(own, InPlace):  # of a module whose executor was replaced
            return own
        executor = object.__new__(in_place_of(type(own)))
        executor.wrap(own)
        return executor

    scheduler._create_default_executor = make


def pytest_configure() -> None:
    if SETTINGS["store"] is None:
        replace_executors()
    else:
        module = importlib.import_module("apscheduler.jobstores.sqlalchemy")
        store = StoreWithDueJobs if SETTINGS["due"] else StoreInPlace
        module.SQLAlchemyJobStore = store  # type: ignore[attr-defined]  # of any module


def replace_executors() -> None:
    schedulers = {BaseScheduler}
    for name in SCHEDULERS:
        module = importlib.import_module(f"apscheduler.schedulers.{name}")
        schedulers |= {found for found in vars(module).values() if isinstance(found, type)}
    for scheduler in schedulers:
        if "_create_default_executor" in vars(scheduler):
            wrap_default_of(scheduler)
    for module_name, names in EXECUTORS.items():
        module = importlib.import_module(f"apscheduler.executors.{module_name}")
        for name in names:
            setattr(module, name, in_place_of(getattr(module, name)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """End the executors that a test leaves running, as many do."""
    yield
    while running:
        with suppress(Exception):  # its event loop may be over
            running.pop().shutdown(wait=False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if row_of(item, "left_out")]
    unasked = [i for i in items if not fnmatch.fnmatchcase(name_of(i), SETTINGS["only"])]
    config.hook.pytest_deselected(items=[i for i in items if i in left_out or i in unasked])
    items[:] = [item for item in items if item not in left_out and item not in unasked]
    different = [(item, row) for item in items if (row := row_of(item, "differences"))]
    for item, row in different:
        item.add_marker(pytest.mark.xfail(strict=True, reason=row["why"]))
        item.stash[FAILURE] = row["failure"]
    if config.getoption("keyword") or any("::" in argument for argument in config.args):
        return
    listed = {row["test"] for row in SETTINGS["left_out"] + SETTINGS["differences"]}
    listed -= {row_of(item, "left_out")["test"] for item in left_out}
    listed -= {row["test"] for _, row in different}
    if listed:
        raise pytest.UsageError(f"suites.py lists tests that are not there: {sorted(listed)}")


def name_of(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/")


def row_of(item: pytest.Item, table: str) -> Any:
    """Return the first row of a table that lists a test, or ``None``."""
    name = name_of(item)
    rows = [r for r in SETTINGS[table] if fnmatch.fnmatchcase(name, r["test"].replace("[", "[[]"))]
    return rows[0] if rows else None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Let a test fail that is listed as a difference, but fails in another way."""
    outcome: Any = yield
    report = outcome.get_result()
    if FAILURE not in item.stash or call.excinfo is None or not hasattr(report, "wasxfail"):
        return
    expected, happened = item.stash[FAILURE], report.longreprtext
    if call.when != "call" or not re.search(expected, happened):
        del report.wasxfail
        report.outcome = "failed"
        report.longrepr = f"in its {call.when}, and not with {expected!r}:\n{happened}"


def pytest_sessionfinish() -> None:
    used = {
        "apscheduler": apscheduler.version,
        "submitted": submitted,
        "stored": sum(stored),
    }
    Path(SETTINGS["used"]).write_text(json.dumps(used))
