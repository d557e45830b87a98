"""Functions that no call runs, such as coroutines in a thread: an error when the job is added."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    TaskLockJobStore,
    TaskLockOptionError,
)
from tests.support.schedulers import Replica

MakeReplica = Callable[..., Replica]


async def coroutine() -> None: ...


async def async_generator() -> AsyncIterator[int]:
    yield 1


def generator() -> Iterator[int]:
    yield 1


class AsyncCallable:
    async def __call__(self) -> None: ...


class GeneratorCallable:
    def __call__(self) -> Iterator[int]:
        yield 1


class AwaitableObject:
    def __await__(self) -> Iterator[None]:
        yield


class Service:
    async def fetch(self) -> AsyncIterator[int]:
        yield 1

    def read(self) -> Iterator[int]:
        yield 1

    def __iter__(self) -> Iterator[int]:
        return iter([])


async_callable = AsyncCallable()
service = Service()

NEVER_RUN: dict[str, tuple[Any, str]] = {
    "object": (async_callable, "is AsyncCallable.__call__, which is a coroutine"),
    "partial": (partial(partial(async_callable)), "is AsyncCallable.__call__, which is"),
    "generator-object": (GeneratorCallable(), "returns a generator, which nobody iterates over"),
    "async-generator": (async_generator, "returns an async generator, which nobody"),
    "generator": (generator, "returns a generator, which nobody iterates over"),
    "lambda": (lambda: (yield), "returns a generator, which nobody iterates over"),
    "async-method": (service.fetch, "returns an async generator, which nobody"),
    "method": (partial(service.read), "returns a generator, which nobody iterates over"),
    "context-manager": (contextmanager(generator), "returns a context manager, which nobody"),
    "class": (partial(map, str, [1]), "returns a map object, which nobody iterates over"),
}


@pytest.mark.parametrize(("function", "told"), NEVER_RUN.values(), ids=NEVER_RUN)
@pytest.mark.parametrize("options", [{}, {"enabled": False}], ids=["on", "off"])
def test_a_job_whose_body_would_never_run_is_an_error_when_the_scheduler_starts(
    make_replica: MakeReplica, function: Any, told: str, options: dict[str, Any]
) -> None:
    replica = make_replica(start=False, **options)
    replica.run_once(function)
    with pytest.raises(TaskLockOptionError) as raised:
        replica.scheduler.start()
    assert str(raised.value).startswith(f"job 'job': its function {told}")
    replica.executor.user.close()


@pytest.mark.parametrize("executor", ["threadpool", "processpool"])
def test_a_coroutine_function_is_an_error_where_nobody_awaits_it(
    make_replica: MakeReplica, caplog: pytest.LogCaptureFixture, executor: str
) -> None:
    replica = make_replica(executor=executor)
    replica.run_once(coroutine)
    error = replica.one(EVENT_TASK_LOCK_ERROR).exception
    assert "is a coroutine, which " in str(error)
    assert "PoolExecutor does not await" in str(error)
    assert f"Job 'job' will not run: {error}" in caplog.text
    assert replica.codes() == [EVENT_TASK_LOCK_ERROR]


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        pytest.param("async_callable", "a coroutine", id="object"),
        pytest.param("async_generator", "an async generator", id="async-generator"),
        pytest.param("generator", "a generator", id="generator"),
        pytest.param("coroutine", "does not await", id="coroutine"),
    ],
)
def test_the_job_store_raises(
    make_replica: MakeReplica, database_url: str, reference: str, told: str
) -> None:
    replica = make_replica(start=False)
    replica.scheduler.add_jobstore(TaskLockJobStore(database_url, secret="0123456789abcdef"))
    replica.scheduler.start()
    with pytest.raises(TaskLockOptionError, match=f"job 'job': its function .*{told}"):
        replica.scheduler.add_job(f"{__name__}:{reference}", "interval", hours=1, id="job")
    assert replica.scheduler.get_jobs() == []


def test_the_job_store_raises_where_jobs_are_only_added(database_url: str) -> None:
    scheduler = BackgroundScheduler(
        jobstores={"default": TaskLockJobStore(database_url, functions=[__name__])}
    )
    scheduler.start(paused=True)
    try:
        with pytest.raises(TaskLockOptionError, match="returns an async generator"):
            scheduler.add_job(f"{__name__}:async_generator", "interval", hours=1, id="job")
    finally:
        scheduler.shutdown()


def test_a_function_that_was_modified_into_one_that_never_runs_is_told_of(
    make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica()
    job = replica.scheduler.add_job(print, "interval", hours=1, id="job")
    job.modify(func=generator)
    assert "Job 'job' will not run" in caplog.text


UNRUN: dict[str, tuple[Any, str]] = {
    # A lambda that could be left out is what is tried here.
    "coroutine": (lambda: coroutine(), "a coroutine"),  # noqa: PLW0108  # as users write it
    "generator": (lambda: generator(), "a generator"),  # noqa: PLW0108  # as users write it
    "map": (lambda: map(str, [1]), "a map object"),
    "context-manager": (lambda: contextmanager(generator)(), "a context manager"),  # noqa: PLW0108  # as users write it
    "awaitable": (lambda: AwaitableObject(), "an awaitable AwaitableObject"),  # noqa: PLW0108  # as users write it
}


# With locks on, it is in `tests/simulation/test_windows.py`.
@pytest.mark.parametrize(("function", "told"), UNRUN.values(), ids=UNRUN)
def test_a_function_that_returns_what_nobody_runs_has_failed(
    make_replica: MakeReplica, caplog: pytest.LogCaptureFixture, function: Any, told: str
) -> None:
    replica = make_replica(enabled=False)
    replica.run_once(function)
    error = replica.one(EVENT_JOB_ERROR).exception
    assert f"'job': its function has returned {told}, which nobody" in str(error)
    assert str(error) in caplog.text
    assert isinstance(error, TaskLockOptionError)  # which is not retried


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(AsyncCallable, id="class"),
        pytest.param(Service, id="iterable"),
        pytest.param(lambda: iter([1]), id="iterator"),
    ],
)
def test_what_a_call_runs_is_no_error(make_replica: MakeReplica, function: Any) -> None:
    replica = make_replica()
    replica.run_once(function)
    replica.one(EVENT_JOB_EXECUTED)
