"""``TaskLockExecutor.run_now``: manual runs that the application asks for on a replica."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.memory import MemoryJobStore

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    RunRequest,
    TaskLockError,
    TaskLockExecutor,
    TaskLockNotFoundError,
    TaskLockOptionError,
    TaskLocks,
    TaskLockStateError,
)
from tests.integration.conftest import Job
from tests.support.claims import ended_runs
from tests.support.hosts import AsyncIO
from tests.support.internals import submissions
from tests.support.polling import eventually
from tests.support.schedulers import NO_DATABASE, Replica
from tests.support.stored_jobs import note, store_replicas

MakeReplica = Callable[..., Replica]

# No look comes in a test but the first one, and those that are hurried.
NO_LOOKS: dict[str, Any] = {"poll_interval": 3600}


@pytest.fixture
def operator(make_task_locks: Callable[..., TaskLocks]) -> TaskLocks:
    return make_task_locks(replica_id="operator")


@pytest.fixture
def loop() -> Iterator[AsyncIO]:
    host = AsyncIO()
    yield host
    host.close()


@pytest.fixture
def on_loop(loop: AsyncIO, database_url: str) -> Iterator[Replica]:
    """A replica with an AsyncIOScheduler."""
    replica = Replica(database_url, host=loop, **NO_LOOKS)
    replica.start()
    yield replica
    replica.shutdown()


def looked(replica: Replica) -> Replica:
    """Wait for a replica's first look, after which none comes that is not hurried."""
    eventually(lambda: replica.executor.health().ready)
    return replica


def has_run(locks: TaskLocks, *kinds: str, task: str = "job") -> bool:
    """Tell whether a task's runs are of these kinds, the newest first."""
    return [run.kind for run in ended_runs(locks, task)] == list(kinds)


def add_daily(replica: Replica, function: Callable[..., Any] = print, **job: Any) -> None:
    """Add a job that does not come due in a test."""
    replica.scheduler.add_job(function, "interval", days=1, **{"id": "job", **job})


def listen_once(replica: Replica, code: int, call: Callable[[], object]) -> None:
    """Let a listener call a function at the first event of a kind."""
    events: list[Any] = []

    def heard(event: Any) -> None:
        events.append(event)
        if len(events) == 1:
            call()

    replica.scheduler.add_listener(heard, code)


def run_and_be_refused(replica: Replica, function: Callable[..., Any]) -> None:
    replica.run_once(function)
    eventually(lambda: EVENT_TASK_LOCK_RELEASED in replica.codes())
    replica.scheduler.modify_job("job", next_run_time=datetime.now(timezone.utc))
    assert replica.one(EVENT_TASK_LOCK_REFUSED).reason == "window"


async def coroutine() -> None: ...


def work(**_task_lock: Any) -> None: ...


class TestItBegins:
    def test_within_a_window_in_which_modify_job_is_refused(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        replica = make_replica(**NO_LOOKS)
        run_and_be_refused(replica, print)
        request = replica.executor.run_now("job", by="ann")
        assert (request.task, request.requested_by) == ("job", "ann")
        eventually(lambda: has_run(operator, "manual", "schedule"))

    @pytest.mark.parametrize("function", [print, coroutine])
    def test_on_an_event_loop(
        self, on_loop: Replica, loop: AsyncIO, operator: TaskLocks, function: Callable[..., Any]
    ) -> None:
        run_and_be_refused(on_loop, function)
        asked = on_loop.executor.run_now_async("job", by="ann")
        request = asyncio.run_coroutine_threadsafe(asked, loop.loop).result(60)
        assert request.requested_by == "ann"
        eventually(lambda: has_run(operator, "manual", "schedule"))

    def test_before_a_look_has_registered_the_task(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        replica = looked(make_replica(**NO_LOOKS))
        add_daily(replica)
        replica.executor.run_now("job")
        eventually(lambda: has_run(operator, "manual"))

    def test_once_for_all_who_ask_before_it_begins(
        self, make_replica: MakeReplica, operator: TaskLocks, job: Job
    ) -> None:
        replica = make_replica(**NO_LOOKS)
        replica.run_once(job.run)
        eventually(job.begun.is_set)
        asked = [replica.executor.run_now("job", by=name) for name in ("ann", "bob")]
        assert [each.is_new for each in asked] == [True, False]
        assert replace(asked[0], is_new=False) == asked[1]
        job.go_on.set()
        eventually(lambda: has_run(operator, "manual", "schedule"))

    def test_at_the_end_of_the_run_that_goes_on(
        self, make_replica: MakeReplica, operator: TaskLocks, job: Job
    ) -> None:
        replica = looked(make_replica(**NO_LOOKS))
        replica.run_once(job.run)
        eventually(job.begun.is_set)
        replica.executor.run_now("job")
        assert not ended_runs(operator)
        job.go_on.set()
        eventually(lambda: has_run(operator, "manual", "schedule"))

    def test_not_before_a_paused_scheduler_is_resumed(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        replica = looked(make_replica(**NO_LOOKS))
        add_daily(replica)
        replica.scheduler.pause()
        replica.executor.run_now("job", by="ann")
        assert not submissions(replica.executor)
        assert operator.tasks("job")[0].requested_by == "ann"
        replica.scheduler.resume()
        eventually(lambda: has_run(operator, "manual"))

    def test_of_a_paused_job(self, make_replica: MakeReplica, operator: TaskLocks) -> None:
        replica = make_replica(**NO_LOOKS)
        add_daily(replica)
        replica.scheduler.pause_job("job")
        replica.executor.run_now("job")
        eventually(lambda: has_run(operator, "manual"))

    def test_on_another_replica_if_this_one_has_no_such_job(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        here = make_replica(**NO_LOOKS)
        there = make_replica(poll_interval=0.2, replica_id="there")
        add_daily(there)
        eventually(lambda: [seen for seen in operator.replicas() if "job" in seen.tasks])
        here.executor.run_now("job")
        eventually(lambda: has_run(operator, "manual"))
        assert ended_runs(operator)[0].replica == "there"

    def test_on_a_follower_that_was_asked(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        leading = make_replica(leader=True, leader_lease=600, **NO_LOOKS)
        add_daily(leading)
        eventually(lambda: leading.executor.is_leader)
        follower = make_replica(leader=True, leader_lease=600, replica_id="follower", **NO_LOOKS)
        add_daily(follower)
        follower.executor.run_now("job")
        eventually(lambda: has_run(operator, "manual"))
        assert ended_runs(operator)[0].replica == "follower"

    @pytest.mark.parametrize("jobstore", [None, "default"])
    def test_of_a_job_in_the_shared_store_that_another_replica_has_added(
        self, database_url: str, operator: TaskLocks, jobstore: str | None
    ) -> None:
        with store_replicas(database_url) as make:
            here = make(replica_id="here", **NO_LOOKS)
            add_daily(make(paused=True, **NO_LOOKS), note, args=["run-now"])
            here.executor.run_now("job", jobstore)
            eventually(lambda: has_run(operator, "manual"))
        assert ended_runs(operator)[0].replica == "here"


class TestInAListener:
    def test_of_failures(self, make_replica: MakeReplica, operator: TaskLocks) -> None:
        replica = make_replica(**NO_LOOKS)
        asked: list[RunRequest] = []
        listen_once(replica, EVENT_JOB_ERROR, lambda: asked.append(replica.executor.run_now("job")))
        replica.run_once(lambda: 1 / 0)
        eventually(lambda: has_run(operator, "manual", "schedule"))
        assert asked[0].token > 0

    def test_on_an_event_loop_the_request_comes_at_once(
        self, on_loop: Replica, operator: TaskLocks
    ) -> None:
        asked: list[RunRequest] = []
        listen_once(
            on_loop,
            EVENT_JOB_EXECUTED,
            lambda: asked.append(on_loop.executor.run_now("job", by="ann")),
        )
        on_loop.run_once(coroutine)
        eventually(lambda: has_run(operator, "manual", "schedule"))
        [request] = asked
        assert (request.task, request.token, request.requested_by) == ("job", 0, "ann")

    @pytest.mark.parametrize(
        ("job_id", "by", "told"),
        [("unknown", None, "no such task: 'unknown'"), ("job", "x" * 4001, "by has 4,001")],
    )
    def test_on_an_event_loop_an_error_is_one_warning(
        self,
        on_loop: Replica,
        caplog: pytest.LogCaptureFixture,
        job_id: str,
        by: str | None,
        told: str,
    ) -> None:
        caplog.set_level(logging.WARNING)
        listen_once(on_loop, EVENT_JOB_EXECUTED, lambda: on_loop.executor.run_now(job_id, by=by))
        on_loop.run_once(coroutine)
        [record] = eventually(lambda: list(caplog.records))
        assert f"Job '{job_id}': a listener's run_now has failed: " in record.getMessage()
        assert told in record.getMessage()


class TestInAJob:
    def test_of_threads_it_follows_that_job(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        replica, asked = make_replica(**NO_LOOKS), threading.Event()

        def run() -> None:
            if not asked.is_set():
                asked.set()
                replica.executor.run_now("job")

        replica.run_once(run)
        eventually(lambda: has_run(operator, "manual", "schedule"))

    def test_of_an_event_loop_it_follows_that_job(
        self, on_loop: Replica, operator: TaskLocks
    ) -> None:
        asked = threading.Event()

        async def run() -> None:
            if not asked.is_set():
                asked.set()
                await on_loop.executor.run_now_async("job")

        on_loop.run_once(run)
        eventually(lambda: has_run(operator, "manual", "schedule"))


class TestAnError:
    def test_on_the_thread_of_an_event_loop_names_the_other_method(
        self, on_loop: Replica, loop: AsyncIO
    ) -> None:
        add_daily(on_loop)
        with pytest.raises(TaskLockStateError, match=r"await executor\.run_now_async\('job'\)"):
            loop.on_loop(partial(on_loop.executor.run_now, "job"))

    def test_of_an_unknown_id(self, make_replica: MakeReplica) -> None:
        with pytest.raises(TaskLockNotFoundError, match="no such task: 'unknown'"):
            make_replica(**NO_LOOKS).executor.run_now("unknown")

    def test_of_an_unknown_id_in_a_coroutine(self, on_loop: Replica, loop: AsyncIO) -> None:
        asked = on_loop.executor.run_now_async("unknown")
        with pytest.raises(TaskLockNotFoundError, match="no such task: 'unknown'"):
            asyncio.run_coroutine_threadsafe(asked, loop.loop).result(60)

    def test_of_an_id_in_two_stores(self, make_replica: MakeReplica, operator: TaskLocks) -> None:
        replica = make_replica(**NO_LOOKS)
        replica.scheduler.add_jobstore(MemoryJobStore(), "other")
        for jobstore in ("default", "other"):
            add_daily(replica, jobstore=jobstore)
        with pytest.raises(TaskLockOptionError, match="'default' and 'other' have a job"):
            replica.executor.run_now("job")
        replica.executor.run_now("job", jobstore="other")
        eventually(lambda: has_run(operator, "manual", task="other:job"))

    @pytest.mark.parametrize("by", ["x" * 4001])
    def test_of_a_name_that_is_too_long(self, make_replica: MakeReplica, by: str) -> None:
        with pytest.raises(TaskLockOptionError, match="by has 4,001 characters"):
            make_replica(**NO_LOOKS).executor.run_now("job", by=by)

    @pytest.mark.parametrize("job_id", ["", 1, None])
    def test_of_an_id_that_is_none(self, make_replica: MakeReplica, job_id: Any) -> None:
        with pytest.raises(TaskLockOptionError, match="the name"):
            make_replica(**NO_LOOKS).executor.run_now(job_id)

    @pytest.mark.parametrize(
        ("job", "told"),
        [
            ({"kwargs": {"task_lock": False}}, "it has no task lock .*call job.func"),
            ({"id": None, "trigger": "date"}, "one-off job without an id.*call job.func"),
            ({"trigger": "date"}, "it is a one-off job .*modify_job"),
            ({"executor": "plain"}, "it is on the executor 'plain'.*job.func is"),
        ],
    )
    def test_of_a_job_that_cannot_have_one(
        self, make_replica: MakeReplica, job: dict[str, Any], told: str
    ) -> None:
        replica = make_replica(**NO_LOOKS)
        replica.scheduler.add_executor(ThreadPoolExecutor(1), "plain")
        tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
        when = {"run_date": tomorrow} if job.get("trigger") == "date" else {"days": 1}
        added = replica.scheduler.add_job(
            work, **{"trigger": "interval", "id": "job", **when, **job}
        )
        with pytest.raises(TaskLockStateError, match=told):
            replica.executor.run_now(added.id)

    def test_without_locks_names_the_function(self, make_replica: MakeReplica) -> None:
        replica = make_replica(NO_DATABASE, enabled=False)
        add_daily(replica, work)
        with pytest.raises(TaskLockStateError, match=r"test_run_now:work\); call job\.func"):
            replica.executor.run_now("job")
        with pytest.raises(TaskLockError, match="enabled=False"):
            replica.executor.run_now("unknown")

    def test_without_a_scheduler_that_runs(self, make_replica: MakeReplica) -> None:
        with pytest.raises(TaskLockStateError, match="which does not run"):
            TaskLockExecutor(NO_DATABASE).run_now("job")
        replica = make_replica(**NO_LOOKS)
        replica.shutdown()
        with pytest.raises(TaskLockStateError, match="which does not run"):
            replica.executor.run_now("job")
