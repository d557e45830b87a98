"""Private parts of APScheduler, Python and our own classes that tests need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import thread as thread_pools
from dataclasses import replace
from math import inf
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest

from apscheduler_tasklock._database import thread as database_thread
from apscheduler_tasklock._database.thread import ReplicaThread
from apscheduler_tasklock._runs.executor_run import ExecutorRun


def instances(executor: Any) -> dict[str, int]:
    """Return the number of running instances that an executor counts, by job id."""
    counted: dict[str, int] = executor._instances
    return counted


def submissions(executor: Any) -> list[Any]:
    """Return the submissions whose runs wait or go on in an executor."""
    active: list[Any] = executor._active.submissions
    return active


def has_stored_runs(executor: Any) -> bool:
    """Return whether runs of stored jobs wait or go on in an executor. They are no instances."""
    return any(submission.due is not None for submission in submissions(executor))


def instances_lock(executor: Any) -> threading.Condition:
    """Return the lock under which an executor counts its instances."""
    lock: threading.Condition = executor._active._changing
    return lock


def deferred_run_times(executor: Any) -> list[Any]:
    """Return the run times that an executor defers because another run is in their way."""
    return [run.run_time for run in deferred_runs(executor)]


def deferred_runs(executor: Any) -> list[Any]:
    """Return the runs that an executor defers."""
    return [run for by_run in list(executor._deferred._by_task.values()) for run in list(by_run)]


def missed_tasks(executor: Any) -> set[str]:
    """Return the tasks whose missed run times an executor has not told yet."""
    return set(executor._missed._pending)


def has_notes(executor: Any) -> bool:
    """Return whether an executor's next look has something to tell: a miss, or a changed job."""
    missed, registrar = executor._missed, executor._registrar
    return bool(missed._pending or missed._rescheduled or registrar._changed)


def executors_of(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's executors, by their aliases."""
    executors: dict[str, Any] = scheduler._executors
    return executors


def runs_of(executor: Any) -> Any:
    """Return the runs of a started executor."""
    return executor._runs


def wait_until_decided(executor: Any) -> None:
    """Wait until the queue has decided on all submissions, and their claims are answered."""
    queue = executor._runs._functions
    for _ in range(2):  # a step reads all messages, and then decides
        is_taken_in = threading.Event()
        queue.call(is_taken_in.set)
        assert is_taken_in.wait(60)
    assert executor.user.locks.wait_for_claims(60)


def pool_of(executor: Any) -> Any:
    """Return the pool of threads or processes of the executor that ours wraps."""
    return executor.inner._pool


def is_broken(executor: Any) -> bool:
    """Return whether a process of a wrapped executor's pool has died, and the pool knows it."""
    return bool(pool_of(executor)._broken)


def pool_size(executor: Any) -> int:
    """Return how many threads or processes a wrapped executor may have."""
    size: int = pool_of(executor)._max_workers
    return size


def waiting_in_pool(executor: Any) -> int:
    """Return the number of calls that wait for a thread in a wrapped executor's pool."""
    return int(pool_of(executor)._work_queue.qsize())


def coroutines(executor: Any) -> set[Any]:
    """Return the futures of the coroutines that a wrapped event loop executor runs."""
    pending: set[Any] = executor.inner._pending_futures
    return pending


def look_interval(executor: Any) -> float:
    """Return the seconds between two looks of an executor at its tasks."""
    seconds: float = executor._watch.looks.interval
    return seconds


def abandon(executor: Any) -> None:
    """End an executor's threads, as at the end of a process without a shutdown."""
    executor.user.close()
    executor._watch.looks.close()


def pools_lock() -> Any:
    """Return the lock that all pools of threads of this process take in ``submit``."""
    return thread_pools._global_shutdown_lock


def replace_passes(scheduler: Any, function: Callable[[], object]) -> None:
    """Let a scheduler call a function in place of each pass over its jobs."""
    scheduler._process_jobs = function


def wake_poll(executor: Any) -> None:
    """Let an executor look at its tasks' rows now."""
    executor._watch.looks.wake()


def one_pass(scheduler: Any) -> float | None:
    """Run one pass of a scheduler over its jobs.

    :return: the seconds until the next pass; ``None``: when the scheduler is woken
    """
    seconds: float | None = scheduler._process_jobs()
    return seconds


def jobs_lock(scheduler: Any) -> threading.RLock:
    """Return the lock under which a scheduler calls its job stores."""
    lock: threading.RLock = scheduler._jobstores_lock
    return lock


def finish_pass(scheduler: Any) -> None:
    """Wait until a scheduler has finished its pass.

    APScheduler's thread fails if a shutdown comes before the pass removes a one-off job.
    """
    with jobs_lock(scheduler):
        pass


def when_the_interpreter_ends(function: Callable[[], object]) -> None:
    """Call a function when the interpreter begins to end, before it waits for running jobs.

    Functions of ``atexit`` are called after that wait.
    """
    threading._register_atexit(function)  # type: ignore[attr-defined]  # there is no public one


def undo_nothing(wanted: Any, _cursor: Any) -> None:
    """Leave a grant that cannot be used as it is, and ask again."""
    if wanted._to_undo is not None:
        wanted.request = replace(wanted.request, claim_id=uuid4())
        wanted._to_undo = None


def safe_look(watch: Any) -> Any:
    """Return the steps of a look as replicas make it: an outage ends it, and is no error."""
    return watch._look_safely()


def end_database_threads() -> None:
    """Do what is done at the end of an interpreter without a shutdown."""
    database_thread._end_all()


def is_asleep(thread: ReplicaThread) -> bool:
    """Return whether a replica's thread waits for a message."""
    return thread._turn_began == inf


def waiting_in(thread: ReplicaThread) -> int:
    """Return how many requests wait in a replica's thread to be sent for the first time."""
    came = len(thread._inbox.messages) + len(thread._came)
    return came + sum(each.error is None for each in list(thread._outbox.waiting))


def fail_once_while_runs_are(doing: str, executor: Any) -> None:
    """Let the thread of a started executor fail once while it asks for runs, or gives one.

    :param doing: ``"claimed"``, ``"asked for"`` or ``"given"``
    """
    owner, name = {
        "claimed": (executor.user.locks, "attempt"),
        "asked for": (executor.user.locks, "begin_claims"),
        "given": (executor._runs, "_begin_to_give"),
    }[doing]
    works, failed = getattr(owner, name), []

    def fail_once(*arguments: Any) -> Any:
        if not failed:
            failed.append(arguments)
            raise MemoryError
        return works(*arguments)

    setattr(owner, name, fail_once)


def fail_to_report_waiting_runs(executor: Any) -> None:
    """Let the reports of the runs fail that wait in a started executor."""
    for run in executor._runs._functions.runs._waiting:
        run.telemetry = Mock(skipped=Mock(side_effect=LookupError))


def fail_to_measure(run: ExecutorRun) -> None:
    """Let the telemetry of a run's claim fail."""
    run.telemetry = Mock(claimed=Mock(side_effect=LookupError))


def fail_after_a_claims_answer(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let a replica's thread fail once, right after it has read the answer to claims.

    :return: gets the claims
    """
    note_answers, failed = ReplicaThread._note_answers, []

    def fail_once(self: ReplicaThread, batch: list[Any], *answers: Any) -> None:
        if batch[0].follows_releases and not failed:
            failed.extend(batch)
            raise ValueError("once")
        note_answers(self, batch, *answers)

    monkeypatch.setattr(ReplicaThread, "_note_answers", fail_once)
    return failed
