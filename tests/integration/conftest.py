"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

from apscheduler_tasklock import _shutdown
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock._lock.settings import lock_settings
from apscheduler_tasklock._shutdown import Closing
from apscheduler_tasklock.executor import TaskLockExecutor
from apscheduler_tasklock.locks import TaskLocks
from tests.support.commands import PATIENT, Command
from tests.support.exchanges import Setup
from tests.support.interrupting import hearing_ctrl_c
from tests.support.outages import Job
from tests.support.proxy import Gate, Proxy, proxy_to
from tests.support.schedulers import NO_DATABASE, Replica
from tests.support.waist import LockClient, MemoryTaskLocks, use_stand_in, with_late_takeovers


@pytest.fixture(autouse=True)
def late_takeovers() -> Iterator[None]:
    """Takeovers are granted on a slow machine, too. `tests/contract` has those that come late."""
    with with_late_takeovers():
        yield


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C is heard, also where the tests run in the background of a shell."""
    with hearing_ctrl_c():
        yield


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    """A proxy in front of the test's database."""
    with proxy_to(database_url) as proxy:
        yield proxy


@pytest.fixture
def gate(proxy: Proxy) -> Iterator[Gate]:
    """Holds up the answers that go through the proxy, until the test's end at the latest."""
    gate = Gate(proxy)
    yield gate
    gate.open()


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """An application's own engine.

    Named before what uses it, it outlives that. What is checked in after ``dispose`` stays open.
    """
    engine = create_engine(parse_url(database_url))
    yield engine
    engine.dispose()


@pytest.fixture
def unhurried_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a stopped replica wait for each answer, however late a busy machine gives it.

    For tests of what an answer leads to; the limits have tests of their own.
    """
    over_at = Closing.over_at

    def unhurried(closing: Closing, since: float, limit: float) -> float:
        # Without a limit it is a close that ends its releases.
        return inf if limit else over_at(closing, since, limit)

    monkeypatch.setattr(Closing, "over_at", unhurried)
    monkeypatch.setattr(_shutdown, "SHUTDOWN_LIMIT", 600.0)
    patient = replace(TaskLockExecutor.timings, closing_timeout=600.0, longest_answer=60.0)
    monkeypatch.setattr(TaskLockExecutor, "timings", patient)


@pytest.fixture
def make_setup() -> Iterator[Callable[..., Setup]]:
    made: list[Setup] = []

    def make(*arguments: Any, **options: Any) -> Setup:
        made.append(Setup(*arguments, **options))
        return made[-1]

    yield make
    for setup in made:
        setup.close()


@pytest.fixture
def make_locks(database_url: str) -> Iterator[Callable[..., LockClient]]:
    """Make the :class:`LockClient` of a replica; it is closed after the test."""
    with ExitStack() as closing:

        def make(
            database: Any = database_url, timings: Timings | None = None, **options: Any
        ) -> LockClient:
            settings = lock_settings(database, "test", **{"replica_id": "replica", **options})
            locks = LockClient(replace(settings, timings=timings or Timings()))
            closing.callback(locks.close)
            return locks

        yield make


@pytest.fixture
def make_task_locks(database_url: str) -> Iterator[Callable[..., TaskLocks]]:
    """Make the :class:`TaskLocks` of a replica; they are closed after the test.

    Where no proxy is in the way, they wait for answers with patience.
    """
    with ExitStack() as closing:

        def make(
            database: Any = database_url, given: Timings | None = None, **options: Any
        ) -> TaskLocks:
            is_broken_by_nobody = database == database_url

            class WithTimings(TaskLocks):
                timings = given or (PATIENT if is_broken_by_nobody else TaskLocks.timings)

            patient = {"claim_timeout": 180} if is_broken_by_nobody else {}
            locks = WithTimings(database, **{"replica_id": "replica", **patient, **options})
            closing.callback(locks.close)
            return locks

        yield make


@pytest.fixture
def command(database_url: str, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line on the test's database."""
    return Command(database_url, capsys)


@pytest.fixture
def make_replica(database_url: str) -> Iterator[Callable[..., Replica]]:
    """Make and start a replica; it is shut down after the test."""
    with _replicas(database_url) as make:
        yield make


@pytest.fixture
def memory() -> Iterator[MemoryTaskLocks]:
    """Rows and a history in memory, which stand in for the database of each replica."""
    rows = MemoryTaskLocks()
    with use_stand_in(rows):
        yield rows


@pytest.fixture
def make_replica_in_memory(memory: MemoryTaskLocks) -> Iterator[Callable[..., Replica]]:
    """The same without a database: its claims are decided in memory, by the same rule."""
    with _replicas(NO_DATABASE) as make:
        yield make


@contextmanager
def _replicas(database_url: str) -> Iterator[Callable[..., Replica]]:
    with ExitStack() as closing:

        def make(
            database: Any = database_url, *arguments: Any, start: bool = True, **options: Any
        ) -> Replica:
            replica = Replica(database, *arguments, **options)
            if start:
                replica.scheduler.start()
            closing.callback(end, replica)
            return replica

        def end(replica: Replica) -> None:
            if replica.scheduler.running:
                replica.finish_pass()
                replica.scheduler.shutdown(wait=True)

        yield make


@pytest.fixture
def job() -> Iterator[Job]:
    """A job that runs until it is let go, at the end of the test at the latest."""
    job = Job()
    yield job
    job.go_on.set()
