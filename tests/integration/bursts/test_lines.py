"""What holds up one line of a replica holds up none of its others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_JOB_SUBMITTED
from apscheduler.executors.pool import ThreadPoolExecutor as PoolExecutor

from apscheduler_tasklock import EVENT_TASK_LOCK_GRANTED, TaskLockExecutor
from tests.support.hosts import AsyncIO, Host
from tests.support.internals import (
    fail_once_while_runs_are,
    fail_to_report_waiting_runs,
    instances,
    wait_until_decided,
)
from tests.support.polling import eventually
from tests.support.schedulers import Replica

RUNS = 200
# Runs of the line that is held up; and of one that pauses after each of them, for longer than the
# test goes on.
HELD_UP, REJECTED = 3, 100


@dataclass
class Trouble:
    """What holds up a line, until the test is over.

    :ivar executor: the arguments that make an executor with such a line
    :ivar job: what its jobs call
    :ivar is_there: whether a run of the line has met it
    :ivar runs: how many runs the line has
    """

    executor: dict[str, Any]
    job: Callable[..., Any]
    is_there: threading.Event
    runs: int = HELD_UP


def wait_until(is_over: threading.Event, is_there: threading.Event) -> None:
    is_there.set()
    assert is_over.wait(60)


@contextmanager
def a_busy_worker(_url: str) -> Iterator[Trouble]:
    """The only worker has a job that goes on."""
    is_there, is_over = threading.Event(), threading.Event()
    yield Trouble(
        {"executor": "threadpool", "max_workers": 1},
        lambda: wait_until(is_over, is_there),
        is_there,
    )
    is_over.set()


@contextmanager
def a_run_that_does_not_begin(_url: str) -> Iterator[Trouble]:
    """The pool has taken a run, and its worker begins nothing."""
    is_there, is_over = threading.Event(), threading.Event()
    kwargs = {"initializer": wait_until, "initargs": (is_over, is_there)}
    yield Trouble(
        {"executor": "threadpool", "max_workers": 1, "pool_kwargs": kwargs}, lambda: None, is_there
    )
    is_over.set()


@contextmanager
def pauses_after_failures(_url: str) -> Iterator[Trouble]:
    """The executor takes no run, and the line pauses after each of them."""
    is_there = threading.Event()

    class RejectingExecutor(PoolExecutor):  # type: ignore[misc]  # APScheduler has no types
        def _do_submit_job(self, _job: Any, _run_times: Any) -> None:
            is_there.set()
            raise LookupError("it takes no job")

    yield Trouble({"executor": RejectingExecutor(1)}, lambda: None, is_there, REJECTED)


@contextmanager
def locked_rows(url: str) -> Iterator[Trouble]:
    """A session has the rows of all tasks of the line locked."""
    is_there = threading.Event()
    is_there.set()
    with psycopg.connect(url) as connection:
        locked = connection.execute("SELECT FROM task_lock FOR UPDATE")
        assert locked.rowcount == HELD_UP
        yield Trouble({"executor": "threadpool", "max_workers": 1}, lambda: None, is_there)


@pytest.mark.parametrize(
    "trouble", [a_busy_worker, a_run_that_does_not_begin, pauses_after_failures, locked_rows]
)
@pytest.mark.parametrize("host_class", [Host, AsyncIO], ids=["functions", "coroutines"])
def test_200_runs_go_through_beside_a_line_that_is_held_up(
    database_url: str,
    known_task: Callable[[str], None],
    host_class: type[Host],
    trouble: Callable[[str], Any],
) -> None:
    ran: list[str] = []

    async def coroutine(name: str) -> None:
        ran.append(name)

    host = host_class()
    job = coroutine if host.coroutines else ran.append
    workers: dict[str, Any] = {} if host.coroutines else {"max_workers": 2}
    for number in range(HELD_UP):
        known_task(f"held up {number}")
    with ExitStack() as stack:
        stack.callback(host.close)
        replica = Replica(database_url, host=host, claim_timeout=180, **workers)
        stack.callback(replica.shutdown)
        there = stack.enter_context(trouble(database_url))
        other = TaskLockExecutor(database_url, claim_timeout=180, **there.executor)
        replica.scheduler.add_executor(other, "other")
        for number in range(there.runs):
            replica.run_once(there.job, job_id=f"held up {number}", executor="other")
        replica.start()
        assert there.is_there.wait(60)
        eventually(lambda: of_others(replica, EVENT_JOB_SUBMITTED) == there.runs)
        replica.scheduler.pause()
        for number in range(RUNS):
            replica.run_once(job, job_id=f"job {number}", args=[f"job {number}"])
        replica.scheduler.resume()
        eventually(lambda: len(ran) >= RUNS)
        assert len(set(ran)) == len(ran)
        assert not of_others(replica, EVENT_JOB_EXECUTED)


def of_others(replica: Replica, code: int) -> int:
    """Count the events of the line that is held up."""
    events = [each for each in list(replica.events) if each.code == code]
    return sum(each.job_id.startswith("held up") for each in events)


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        ("claimed", "Error running job first"),
        ("asked for", "Error running job first"),
        ("given", "Error submitting job"),
    ],
    ids=["claiming", "asking", "giving"],
)
def test_an_error_as_a_run_is_asked_for_or_given_costs_no_later_run(
    make_replica_in_memory: Callable[..., Replica],
    caplog: pytest.LogCaptureFixture,
    fails: str,
    told: str,
) -> None:
    """Such as that memory has run out."""
    ran: list[str] = []
    replica = make_replica_in_memory()
    fail_once_while_runs_are(fails, replica.executor)
    replica.run_once(ran.append, job_id="first", args=["first"])
    eventually(lambda: told in caplog.text)
    replica.run_once(ran.append, job_id="second", args=["second"])
    eventually(lambda: "second" in ran)
    replica.idle()


def test_an_error_as_a_run_is_withdrawn_leaves_no_instance(
    make_replica_in_memory: Callable[..., Replica], caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    replica = make_replica_in_memory(max_workers=1)
    replica.run_once(lambda: goes_on.wait(60), job_id="first")
    eventually(lambda: replica.codes("first").count(EVENT_TASK_LOCK_GRANTED))
    replica.run_once(lambda: None, job_id="second")
    eventually(lambda: instances(replica.executor).get("second"))
    wait_until_decided(replica.executor)
    fail_to_report_waiting_runs(replica.executor)
    replica.scheduler.shutdown(wait=False)
    eventually(lambda: "The task lock's thread failed, and goes on" in caplog.text)
    eventually(lambda: not instances(replica.executor).get("second"))
    goes_on.set()
    replica.idle()
