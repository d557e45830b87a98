"""What a container's probes are told, and how a replica is drained before it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.triggers.base import BaseTrigger

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_REFUSED,
    TaskLockExecutor,
    TaskLockJobStore,
    _application,
)
from apscheduler_tasklock._database import thread
from apscheduler_tasklock._database.timings import Timings
from tests.support.internals import replace_passes
from tests.support.outages import Job, refuse
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.schedulers import DAILY, Replica

MakeReplica = Callable[..., Replica]
FAST: dict[str, Any] = {"poll_interval": 0.2}


class TestHealth:
    def test_it_is_neither_before_the_start_nor_after_the_shutdown(
        self, make_replica: MakeReplica
    ) -> None:
        replica = make_replica(start=False, **FAST)
        assert (replica.executor.health().live, replica.executor.health().ready) == (False, False)
        replica.start()
        eventually(lambda: replica.executor.health().ready)
        assert replica.executor.health().live
        replica.shutdown()
        assert (replica.executor.health().live, replica.executor.health().ready) == (False, False)

    def test_a_database_that_goes_away_makes_it_degraded_only(
        self, make_replica: MakeReplica, proxy: Proxy
    ) -> None:
        replica = make_replica(proxy.url, **FAST)
        replica.scheduler.add_job(print, "cron", **DAILY, id="job")
        eventually(lambda: replica.executor.health().ready)
        refuse(proxy)
        [why] = eventually(lambda: replica.executor.health().degraded)
        assert why.startswith("the database is unavailable: ")
        assert replica.executor.health().live
        assert replica.executor.health().ready
        proxy.accepting = True
        eventually(lambda: not replica.executor.health().degraded)

    def test_it_is_not_ready_until_it_has_seen_its_table(
        self, make_replica: MakeReplica, proxy: Proxy
    ) -> None:
        refuse(proxy)
        replica = make_replica(proxy.url, claim_timeout=1, **FAST)
        assert (replica.executor.health().live, replica.executor.health().ready) == (True, False)
        proxy.accepting = True
        eventually(lambda: replica.executor.health().ready)

    # Its end is what is looked for.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_scheduler_whose_thread_has_died_is_not_live(self, make_replica: MakeReplica) -> None:
        replica = make_replica(**FAST)
        scheduler, died = replica.scheduler, threading.Event()

        def die() -> None:
            died.set()
            raise SystemExit

        eventually(lambda: replica.executor.health().live)
        replace_passes(scheduler, die)  # as an error in a job store does
        scheduler.wakeup()
        assert died.wait(60)
        eventually(lambda: not replica.executor.health().live)
        assert scheduler.running

    def test_a_scheduler_that_stands_still_is_not_live(self, make_replica: MakeReplica) -> None:
        replica = make_replica(**FAST)
        replica.scheduler.add_job(print, "cron", **DAILY, id="job")
        eventually(lambda: replica.executor.health().live)
        [job] = replica.scheduler.get_jobs()
        replace_passes(replica.scheduler, lambda: None)
        replica.finish_pass()  # else it might submit the job
        job.next_run_time = datetime.now(timezone.utc) - timedelta(minutes=2)
        assert not replica.executor.health().live

    @pytest.mark.parametrize("of", ["executor", "job store"])
    def test_a_thread_of_the_database_that_is_stuck_makes_it_not_live(
        self, make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch, database_url: str, of: str
    ) -> None:
        store = TaskLockJobStore(database_url, functions=["tests."])
        replica = make_replica(start=False, **FAST)
        replica.scheduler.add_jobstore(store, "shared")
        replica.start()
        user = replica.executor.user if of == "executor" else store.user
        stuck, go_on = threading.Event(), threading.Event()

        def hang(_cursor: Any) -> None:
            stuck.set()
            assert go_on.wait(60)

        asking = threading.Thread(target=user.database.ask, args=[hang])
        asking.start()
        assert stuck.wait(60)
        assert replica.executor.health().live
        monkeypatch.setattr(thread, "STUCK", 0.1)
        eventually(lambda: not replica.executor.health().live)
        monkeypatch.undo()
        go_on.set()
        asking.join(60)
        assert replica.executor.health().live

    def test_overdue_tasks_make_it_degraded(
        self, make_replica: MakeReplica, connection: psycopg.Connection[Any]
    ) -> None:
        replica = make_replica(**FAST)
        replica.scheduler.add_job(print, "cron", **DAILY, id="job")
        eventually(lambda: connection.execute("SELECT FROM task_lock").rowcount)
        connection.execute(
            "UPDATE task_lock SET due_at = now() - interval '1 h', overdue_at = now()"
        )
        assert eventually(lambda: replica.executor.health().degraded) == ("overdue tasks: job",)

    @pytest.mark.nightly
    @pytest.mark.parametrize("hangs", ["trigger", "job store"])
    def test_code_of_the_applications_that_hangs_makes_it_degraded(
        self, make_replica: MakeReplica, hangs: str
    ) -> None:
        """Where a look asks it. The scheduler's own thread is not kept waiting here."""
        go_on = threading.Event()

        def hang() -> None:
            if threading.current_thread().name == _application.NAME:
                assert go_on.wait(60)

        class HangingTrigger(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
            def get_next_fire_time(self, previous: Any, now: datetime) -> datetime:
                hang()
                return now + timedelta(hours=1)

        class HangingStore(MemoryJobStore):  # type: ignore[misc]  # APScheduler has no types
            def get_all_jobs(self) -> list[Any]:
                hang()
                return list(super().get_all_jobs())

        replica = make_replica(start=False, timings=Timings(longest_turn=0.3), **FAST)
        if hangs == "trigger":
            replica.scheduler.add_job(print, HangingTrigger(), id="job")
            why = "jobs whose own code hangs: job"
        else:
            replica.scheduler.add_jobstore(HangingStore(), "other")
            why = (
                "a look at the tasks waits for code of the application, such as a job store that "
                "hangs"
            )
        replica.start()
        eventually(lambda: replica.executor.health().degraded == (why,))
        go_on.set()
        eventually(lambda: replica.executor.health().degraded == ())
        assert replica.executor.health().live


class TestDrain:
    def test_what_runs_ends_and_nothing_new_is_claimed(
        self, make_replica: MakeReplica, job: Job
    ) -> None:
        replica, other = make_replica(**FAST), make_replica(**FAST)
        replica.run_once(job.run)
        eventually(job.begun.is_set)
        assert not replica.executor.drain(timeout=0.1)
        replica.run_once(print, job_id="late")
        replica.finish_pass()
        other.run_once(print, job_id="late")
        eventually(lambda: [e.code for e in other.of("late")])
        assert not [e for e in other.of("late") if e.code == EVENT_TASK_LOCK_REFUSED]
        job.go_on.set()
        assert replica.executor.drain(timeout=60)
        assert not replica.of("late")

    def test_it_waits_for_nothing_before_the_start(self, database_url: str) -> None:
        assert TaskLockExecutor(database_url).drain(timeout=1)


@pytest.mark.parametrize("enabled", [False])
def test_without_locks_it_is_ready_at_once(make_replica: MakeReplica, enabled: bool) -> None:
    replica = make_replica("postgresql://nobody@127.0.0.1:1/nowhere", enabled=enabled)
    health = replica.executor.health()
    assert (health.live, health.ready, health.degraded) == (True, True, ())
