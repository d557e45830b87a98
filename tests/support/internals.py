"""What tests need of APScheduler, Python, and our own classes, that has no public name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import thread as thread_pools
from dataclasses import replace
from typing import Any
from uuid import uuid4

from apscheduler.job import Job
from apscheduler.triggers.cron import CronTrigger

from apscheduler_tasklock._lock import claim


def instances(executor: Any) -> dict[str, int]:
    """Return how many instances of each job an executor counts as running, by the jobs' ids."""
    counted: dict[str, int] = executor._instances
    return counted


def instances_lock(executor: Any) -> threading.RLock:
    """Return the lock under which an executor counts its instances."""
    inner = inner_of(executor)
    is_shared = executor._instances is inner._instances
    lock: threading.RLock = inner._lock if is_shared else executor._lock
    return lock


def is_claimed_first(executor: Any) -> bool:
    """Tell whether an executor's runs are claimed before the wrapped executor gets them."""
    return executor._runs is not None


def executors_of(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's executors, by their aliases."""
    executors: dict[str, Any] = scheduler._executors
    return executors


def inner_of(executor: Any) -> Any:
    """Return the executor that ours wraps; ``None`` before it is started."""
    return executor._inner


def pool_of(executor: Any) -> Any:
    """Return the pool of threads or processes of the executor that ours wraps."""
    return inner_of(executor)._pool


def waiting_in_pool(executor: Any) -> int:
    """Return how much waits for a thread in the pool of a wrapped executor."""
    return int(pool_of(executor)._work_queue.qsize())


def worker_count(executor: Any) -> int:
    """Return how many workers the pool has at most."""
    count: int = pool_of(executor)._max_workers
    return count


def coroutines(executor: Any) -> set[Any]:
    """Return the futures of the coroutines that the wrapped executor of an event loop runs."""
    pending: set[Any] = inner_of(executor)._pending_futures
    return pending


def look_interval(executor: Any) -> float:
    """Return the seconds between two looks of an executor at its tasks."""
    seconds: float = executor._watch.looks.interval
    return seconds


def abandon(executor: Any) -> None:
    """End an executor's threads, as at the end of a process that has not shut it down."""
    executor.locks.close()
    executor._watch.looks.close()


def listens(locks: Any) -> bool:
    """Tell whether the connection of task locks listens for changes of jobs."""
    is_listening: bool = locks._database._session.listens
    return is_listening


def pools_lock() -> Any:
    """Return the lock that all pools of threads of this process take in ``submit``."""
    return thread_pools._global_shutdown_lock


def executor_of(scheduler: Any) -> Any:
    """Return a scheduler's default executor."""
    return scheduler._executors["default"]


def pool_size(executor: Any) -> int:
    """Return how many threads or processes the wrapped executor may have."""
    return int(executor.inner._pool._max_workers)


def replace_passes(scheduler: Any, function: Callable[[], object]) -> None:
    """Let a scheduler call this in place of each pass over its jobs."""
    scheduler._process_jobs = function


def wake_poll(executor: Any) -> None:
    """Let an executor look at its tasks' rows now."""
    executor._watch.looks.wake()


def one_pass(scheduler: Any) -> None:
    """Let a scheduler look through its jobs once, as it does when it is woken."""
    scheduler._process_jobs()


def jobs_lock(scheduler: Any) -> threading.RLock:
    """Return the lock under which a scheduler calls its job stores."""
    lock: threading.RLock = scheduler._jobstores_lock
    return lock


def when_the_interpreter_ends(function: Callable[[], object]) -> None:
    """Call a function when the interpreter has begun to end, before it waits for running jobs.

    Functions of ``atexit`` are called after that.
    """
    threading._register_atexit(function)  # type: ignore[attr-defined]  # no public one


def take_nothing_back(wanted: Any, _cursor: Any) -> None:
    """Ask anew for a claim whose grant cannot be used, and leave the grant as it is."""
    if wanted._to_take_back is not None:
        wanted.request = replace(wanted.request, claim_id=uuid4())
        wanted._to_take_back = None


def attempts() -> type[Any]:
    """Return the class of which claims of all kinds are."""
    return claim._Attempt


def make_job(scheduler: Any, function: Callable[..., Any], job_id: str, **given: Any) -> Job:
    """Return a daily job as APScheduler has it, which nobody has added."""
    attributes = {
        "trigger": CronTrigger(hour=3, timezone="UTC"),
        "executor": "default",
        "func": function,
        "args": [job_id],
        "kwargs": {},
        "name": "a job",
        "misfire_grace_time": None,
        "coalesce": True,
        "max_instances": 1,
        "next_run_time": None,
    }
    return Job(scheduler, job_id, **{**attributes, **given})
