"""Failover: which windows of dead holders are run again, by whom, and which are given up."""

from __future__ import annotations

import json
import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_JOB_MISSED, EVENT_JOB_SUBMITTED
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from psycopg import sql
from psycopg.types.json import set_json_loads

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    HeldLock,
    TaskLockDatabaseError,
    TaskLockExecutor,
    current_lock,
)
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._runs.watch import Watch
from apscheduler_tasklock.options import DEFAULT_LEASE
from tests.support import claims, outages
from tests.support.claims import AHEAD, LaterThan, end_lease, row
from tests.support.faults import CLAIM
from tests.support.internals import (
    deferred_run_times,
    instances,
    instances_lock,
    wait_until_decided,
)
from tests.support.outages import count_looks
from tests.support.polling import eventually
from tests.support.proxy import SYNC, Proxy
from tests.support.roles import role
from tests.support.schedulers import Replica
from tests.support.waist import Ask, GiveUp, intercept_claims, is_takeover, met, takeover_of

MakeReplica = Callable[..., Replica]
MakeLocks = Callable[..., LockClient]
MakeHolder = Callable[..., HeldLock]
Connection = psycopg.Connection[Any]

RUN = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]
REFUSED_THEN_RUN = [EVENT_TASK_LOCK_REFUSED, *RUN]


def token_and_takeover(**_: Any) -> tuple[int, bool]:
    lock = current_lock()
    assert lock is not None
    return lock.token, lock.is_takeover


def something_else(**_: Any) -> str:
    return "something else"


# What the job function is to a claim.
RUNS = f"{__name__}:token_and_takeover"


@pytest.fixture
def dying(make_locks: MakeLocks) -> LockClient:
    return make_locks(replica_id="dead")


@pytest.fixture
def holder(dying: LockClient) -> MakeHolder:
    """Let a replica called "dead" claim a task and not be heard of again, as after SIGKILL.

    That the real thing leaves the same behind is shown by tests/acceptance.
    """

    def claim(task: str = "job", *, lives: bool = False, **wanted: Any) -> HeldLock:
        hourly: dict[str, Any] = {"min_lock": 3240, "max_lock": 18000}
        renewed: dict[str, Any] = {"lease": 600, "failover": True, "runs": RUNS}
        held = claims.held(dying, task, **{**hourly, **renewed, **wanted})
        if not lives:
            claims.die(dying, held)
        return held

    return claim


@pytest.fixture
def make_heir(make_replica: MakeReplica) -> MakeReplica:
    """Make a replica with failover that believes the rows from the start, and looks often."""
    often = {"failover": True, "lease": 600, "poll_interval": 0.3}

    def make(*arguments: Any, start: bool = True, **options: Any) -> Replica:
        replica = make_replica(*arguments, start=False, **{**often, **options})
        replica.executor.locks.outage.believe()
        if start:
            replica.scheduler.start()
        return replica

    return make


@pytest.fixture
def until_looked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Replica], None]]:
    """Wait until a replica has looked for dead runs some times more."""
    counted: dict[int, list[Sequence[str]]] = {}

    def wait(replica: Replica) -> None:
        if id(replica) not in counted:
            counted[id(replica)] = count_looks(replica, monkeypatch)
        outages.until_looked(counted[id(replica)])

    yield wait
    monkeypatch.undo()


def end_its_maximum_lock(connection: Connection) -> None:
    connection.execute("UPDATE task_lock SET locked_until = now(), run_until = now()")


def after_a_death(replica: Replica) -> list[int]:
    """Return the codes of the events but that of the run that died, which has no fixed place."""
    told = replica.of()
    [death] = [event for event in told if getattr(event, "outcome", None) == "died"]
    return [event.code for event in told if event is not death]


def next_hour() -> datetime:
    return datetime.now(timezone.utc) + timedelta(hours=1)


def until_its_lease_ends(connection: Connection) -> None:
    """Wait for it by the database's clock; the holder reckons that it ends a little earlier."""
    eventually(lambda: row(connection)["over"])


@pytest.mark.nightly
def test_a_job_does_not_begin_once_its_lease_has_gone_to_another_replica(
    make_heir: MakeReplica, proxy: Proxy, connection: Connection
) -> None:
    """As where a process is stopped between its claim and the job, and goes on a minute later."""
    heir = make_heir(replica_id="heir")
    replica = make_heir(proxy.url, replica_id="late", lease=1, start=False)

    def cut_off(_event: Any) -> None:
        if proxy.accepting:
            proxy.accepting = False
            proxy.cut_all()
            until_its_lease_ends(connection)
            heir.run_once(token_and_takeover)
            heir.one(EVENT_JOB_EXECUTED)

    replica.scheduler.add_listener(cut_off, EVENT_TASK_LOCK_GRANTED)
    replica.scheduler.start()
    replica.run_once(token_and_takeover)
    eventually(lambda: EVENT_TASK_LOCK_ERROR in replica.codes())
    replica.idle()
    _token, is_takeover = heir.one(EVENT_JOB_EXECUTED).retval
    assert is_takeover
    assert EVENT_JOB_EXECUTED not in replica.codes()
    proxy.accepting = True


class TestWhoTakesOver:
    def test_a_replica_that_was_refused(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.INFO)
        kept = "SELECT window_start, window_until, run_until FROM task_lock"
        died = holder()
        before = connection.execute(kept).fetchone()
        replica = make_heir(replica_id="heir")
        replica.run_once(token_and_takeover)
        replica.one(EVENT_TASK_LOCK_REFUSED)
        end_lease(connection)
        executed = replica.one(EVENT_JOB_EXECUTED)
        replica.idle()

        assert after_a_death(replica) == REFUSED_THEN_RUN
        assert executed.retval == (LaterThan(died.token), True)
        [refused] = [e for e in replica.of() if e.code == EVENT_TASK_LOCK_REFUSED]
        granted = replica.one(EVENT_TASK_LOCK_GRANTED)
        assert (refused.reason, refused.holder) == ("running", "dead")
        assert (granted.reason, granted.holder) == ("takeover", "heir")
        assert before is not None
        assert died.window_start <= executed.scheduled_run_time < before[1]
        assert connection.execute(kept).fetchone() == before
        assert "Task 'job': runs the window of" in caplog.text
        holder = f"'dead' (token {died.token})"
        token, _is_takeover = executed.retval
        assert f"(token {token}), since its holder {holder} neither renew" in caplog.text

    def test_a_replica_whose_application_reads_json_in_its_own_way(
        self, make_heir: MakeReplica, holder: MakeHolder, connection: Connection
    ) -> None:
        """psycopg's ``set_json_loads`` counts for all connections of a process."""
        holder()
        replica = make_heir(replica_id="heir")
        set_json_loads(partial(json.loads, parse_float=Decimal))
        try:
            replica.run_once(token_and_takeover)
            replica.one(EVENT_TASK_LOCK_REFUSED)
            end_lease(connection)
            replica.one(EVENT_JOB_EXECUTED)
            replica.idle()
        finally:
            set_json_loads(json.loads)
        assert after_a_death(replica) == REFUSED_THEN_RUN

    @pytest.mark.parametrize("joins", ["before the death", "after the death"])
    def test_a_replica_that_was_never_refused_and_whose_next_run_is_an_hour_away(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        dying: LockClient,
        connection: Connection,
        joins: str,
    ) -> None:
        held = holder(lives=joins == "before the death")
        replica = make_heir(start=False)
        replica.run_once(token_and_takeover, next_run_time=next_hour())
        replica.scheduler.start()
        if joins == "before the death":
            claims.die(dying, held)
        end_lease(connection)
        assert replica.one(EVENT_JOB_EXECUTED).retval == (LaterThan(held.token), True)
        replica.idle()
        assert after_a_death(replica) == RUN

    def test_the_successor_of_the_replica_that_was_refused(
        self, make_heir: MakeReplica, holder: MakeHolder, dying: LockClient, connection: Connection
    ) -> None:
        """As in a rolling deployment in mid-job, after which the holder is killed."""
        held = holder(lives=True)
        refused = make_heir()
        refused.run_once(token_and_takeover)
        refused.one(EVENT_TASK_LOCK_REFUSED)
        refused.shutdown()
        successor = make_heir()
        successor.run_once(token_and_takeover, next_run_time=next_hour())
        claims.die(dying, held)
        end_lease(connection)
        assert successor.one(EVENT_JOB_EXECUTED).retval == (LaterThan(held.token), True)
        assert refused.codes() == [EVENT_TASK_LOCK_REFUSED]

    @pytest.mark.nightly
    def test_one_of_several(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        connection: Connection,
        until_looked: Callable[[Replica], None],
    ) -> None:
        died = holder()
        end_lease(connection)
        replicas = [make_heir(replica_id=f"replica {n}") for n in range(3)]
        for replica in replicas:
            replica.run_once(token_and_takeover)
        eventually(lambda: any(EVENT_JOB_EXECUTED in replica.codes() for replica in replicas))
        for replica in replicas:
            until_looked(replica)
            replica.idle()
        executed = [e.retval for r in replicas for e in r.of() if e.code == EVENT_JOB_EXECUTED]
        assert executed == [(LaterThan(died.token), True)]

    @pytest.mark.nightly
    def test_nobody_while_the_holder_renews_its_lease(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        dying: LockClient,
        until_looked: Callable[[Replica], None],
    ) -> None:
        held = holder(lives=True, lease=2)
        replica = make_heir()
        replica.run_once(token_and_takeover)
        replica.one(EVENT_TASK_LOCK_REFUSED)
        first = held.locked_until
        eventually(lambda: held.locked_until > first + timedelta(seconds=3))
        assert not held.lost
        dying.release(held)
        until_looked(replica)
        assert replica.codes() == [EVENT_TASK_LOCK_REFUSED]

    @pytest.mark.nightly
    @pytest.mark.parametrize("without", ["the holder", "the other replica"])
    def test_nobody_where_the_holder_or_the_other_replica_has_no_failover(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        connection: Connection,
        until_looked: Callable[[Replica], None],
        without: str,
    ) -> None:
        died = holder(failover=without != "the holder")
        replica = make_heir(failover=without == "the holder")
        replica.run_once(token_and_takeover)
        replica.one(EVENT_TASK_LOCK_REFUSED)
        end_lease(connection)
        until_looked(replica)
        replica.idle()
        replica.run_once(token_and_takeover, replace_existing=True)
        eventually(lambda: len(replica.of()) == 2)
        assert [event.reason for event in replica.of()] == ["running", "window"]
        assert row(connection)["token"] == died.token


class TestWhatIsRun:
    def test_a_one_off_job_that_the_memory_store_has_dropped(
        self, make_heir: MakeReplica, holder: MakeHolder, connection: Connection
    ) -> None:
        now = datetime.now(timezone.utc)
        died = holder(runs=f"{RUNS} at {now.isoformat()}")
        replica = make_heir()
        replica.scheduler.add_job(
            token_and_takeover, "date", run_date=now, id="job", misfire_grace_time=None
        )
        replica.one(EVENT_TASK_LOCK_REFUSED)
        assert replica.scheduler.get_job("job") is None
        end_lease(connection)
        assert replica.one(EVENT_JOB_EXECUTED).retval == (LaterThan(died.token), True)

    @pytest.mark.nightly
    def test_a_job_whose_last_run_time_has_passed(
        self, make_heir: MakeReplica, holder: MakeHolder, dying: LockClient, connection: Connection
    ) -> None:
        held = holder(lives=True)
        replica = make_heir()
        now = datetime.now(timezone.utc)
        end = now + timedelta(seconds=1.5)
        # One window for both of its run times.
        options = {"task_lock": {"min_lock": 3240, "max_lock": 18000}}
        times = {"hours": 0, "seconds": 1, "start_date": now, "end_date": end}
        replica.run_once(token_and_takeover, kwargs=options, **times)
        eventually(lambda: replica.scheduler.get_job("job") is None)
        eventually(replica.of)
        replica.idle()
        claims.die(dying, held)
        end_lease(connection)
        assert replica.one(EVENT_JOB_EXECUTED).retval == (LaterThan(held.token), True)

    @pytest.mark.nightly
    @pytest.mark.parametrize("by", ["another function", "another run date"])
    def test_not_a_job_that_was_put_in_its_place(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        connection: Connection,
        until_looked: Callable[[Replica], None],
        by: str,
    ) -> None:
        """It is due in 30 days, and only then."""
        now, later = datetime.now(timezone.utc), datetime.now(timezone.utc) + timedelta(days=30)
        died = holder(runs=f"{RUNS} at {now.isoformat()}")
        replica = make_heir()
        other = something_else if by == "another function" else token_and_takeover
        replica.scheduler.add_job(other, "date", run_date=later, id="job")
        end_lease(connection)
        until_looked(replica)
        replica.idle()
        assert replica.codes() == []
        assert row(connection)["token"] == died.token

    @pytest.mark.parametrize("meanwhile", ["pause_job", "remove_job"])
    def test_not_a_job_that_was_paused_or_removed_meanwhile(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        connection: Connection,
        until_looked: Callable[[Replica], None],
        meanwhile: str,
    ) -> None:
        holder()
        replica = make_heir(start=False)
        replica.run_once(token_and_takeover, next_run_time=next_hour())
        replica.scheduler.start(paused=True)
        getattr(replica.scheduler, meanwhile)("job")
        replica.scheduler.resume()
        end_lease(connection)
        if meanwhile == "pause_job":
            until_looked(replica)
        replica.idle()
        assert replica.codes() == []
        if meanwhile == "pause_job":
            replica.scheduler.resume_job("job")
            replica.one(EVENT_JOB_EXECUTED)

    def test_the_job_as_it_is_by_then(
        self, make_heir: MakeReplica, holder: MakeHolder, connection: Connection
    ) -> None:
        """Its arguments, its options, and the executor that it is on."""
        holder()
        end_lease(connection)
        replica = make_heir(start=False)
        second = TaskLockExecutor(
            replica.executor.locks.settings.database,
            executor={"type": "threadpool", "max_workers": 1},
            failover=True,
            lease=600,
            replica_id="second",
        )
        second.locks.outage.believe()
        replica.scheduler.add_executor(second, "second")
        replica.run_once(token_and_takeover, next_run_time=next_hour())
        replica.scheduler.start(paused=True)
        options = {"task_lock": {"lease": 77}}
        replica.scheduler.modify_job("job", executor="second", kwargs=options)
        replica.scheduler.resume()
        granted = replica.one(EVENT_TASK_LOCK_GRANTED)
        replica.one(EVENT_JOB_EXECUTED)
        taken_over = row(connection)
        assert (granted.holder, granted.reason) == ("second", "takeover")
        assert taken_over["locked_by"] == "second"
        assert granted.locked_until - taken_over["started_at"] == timedelta(seconds=77)

    @pytest.mark.nightly
    @pytest.mark.parametrize("by", ["this scheduler", "another one"])
    def test_not_under_a_name_that_the_job_has_no_more(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        dying: LockClient,
        connection: Connection,
        until_looked: Callable[[Replica], None],
        by: str,
    ) -> None:
        held = holder(lives=True)
        replica = make_heir()
        replica.run_once(token_and_takeover, next_run_time=next_hour())
        replica.run_once(token_and_takeover, job_id="other", next_run_time=next_hour())
        until_looked(replica)  # by its first name
        kwargs = {"task_lock": {"name": "renamed"}}
        if by == "this scheduler":
            replica.scheduler.modify_job("job", kwargs=kwargs)
        else:  # in a job store that they share; nobody tells this one
            replica.scheduler.get_job("job").kwargs = kwargs
        claims.die(dying, held)
        end_lease(connection)
        until_looked(replica)
        replica.idle()
        assert replica.codes() == []
        assert row(connection)["token"] == held.token


class TestWhenItIsRun:
    @pytest.mark.nightly
    def test_before_the_claimers_own_window_which_is_no_misfire_then(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        connection: Connection,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Else the claim would put its own window in the place of the one that died."""
        died = holder(min_lock=0.001, lease=2, runs=f"{__name__}:{_Recorder.__qualname__}.run")
        until_its_lease_ends(connection)
        # It looks when it starts, every 20 sec, and when it is refused: its own window comes first.
        replica = make_heir(lease=60, poll_interval=20, start=False)
        replica.run_once(token_and_takeover, job_id="other", next_run_time=next_hour())
        looks = count_looks(replica, monkeypatch)
        replica.scheduler.start()
        eventually(lambda: looks)
        job = _Recorder()
        # Of a grace time that a busy machine keeps to as well.
        own = replica.run_once(job.run, misfire_grace_time=4).next_run_time
        job.takes_until = own + timedelta(seconds=5)
        eventually(lambda: len(job.ran) == 2 or EVENT_JOB_MISSED in replica.codes())
        replica.idle()
        (first, is_takeover, dead_run_time), second = job.ran
        assert (first, is_takeover) == (LaterThan(died.token), True)
        assert second == (LaterThan(first), False, own)
        assert timedelta(seconds=1) < own - dead_run_time < timedelta(seconds=60)
        executed = [e.scheduled_run_time for e in replica.of() if e.code == EVENT_JOB_EXECUTED]
        assert executed == [dead_run_time, own]

    @pytest.mark.nightly
    def test_the_next_run_time_after_it_runs_on_time(
        self, make_heir: MakeReplica, holder: MakeHolder, connection: Connection
    ) -> None:
        died = holder(min_lock=3.6)
        end_lease(connection)
        replica = make_heir(min_factor=0.9)
        own = replica.run_once(token_and_takeover, hours=0, seconds=4).next_run_time

        def executed() -> list[Any]:
            return [e for e in replica.of() if e.code == EVENT_JOB_EXECUTED]

        eventually(lambda: len(executed()) > 1)
        first, second = executed()[:2]
        assert first.retval == (LaterThan(died.token), True)
        assert second.retval == (LaterThan(first.retval[0]), False)
        assert second.scheduled_run_time == own + timedelta(seconds=4)

    @pytest.mark.nightly
    def test_again_after_its_pool_refused_it(
        self, make_heir: MakeReplica, holder: MakeHolder, connection: Connection
    ) -> None:
        """As a pool does that is broken, or where threads are limited for a moment.

        It was claimed by then, and is handed over.
        """
        died = holder()
        end_lease(connection)
        pool = _RefusesOnce()
        replica = make_heir(executor=pool)
        replica.scheduler.add_job(token_and_takeover, "interval", hours=1, id="job")
        assert replica.one(EVENT_JOB_EXECUTED).retval == (LaterThan(died.token), True)
        assert pool.refused == 1

    def test_when_a_paused_scheduler_is_resumed(
        self, make_heir: MakeReplica, holder: MakeHolder, connection: Connection
    ) -> None:
        died = holder()
        replica = make_heir()
        replica.run_once(token_and_takeover)
        replica.one(EVENT_TASK_LOCK_REFUSED)
        replica.scheduler.pause()
        end_lease(connection)
        replica.idle()
        assert replica.codes() == [EVENT_TASK_LOCK_REFUSED]
        replica.scheduler.resume()
        assert replica.one(EVENT_JOB_EXECUTED).retval == (LaterThan(died.token), True)

    def test_when_a_worker_is_free(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        connection: Connection,
        until_looked: Callable[[Replica], None],
    ) -> None:
        died = holder()
        go_on, busy = threading.Event(), threading.Event()

        def occupy() -> None:
            busy.set()
            assert go_on.wait(60)

        replica = make_heir(max_workers=1)
        replica.run_once(token_and_takeover)
        replica.one(EVENT_TASK_LOCK_REFUSED)
        replica.run_once(occupy, job_id="busy")
        eventually(busy.is_set)
        replica.scheduler.modify_job("job", misfire_grace_time=1)
        too_late = died.window_start + timedelta(seconds=1.2)
        eventually(lambda: datetime.now(timezone.utc) > too_late)
        end_lease(connection)
        # More looks than one may have to pass: after a statement that took a third of this lease
        # or longer, no run counts as dead for a while.
        eventually(lambda: instances(replica.executor)["job"] == 1)
        until_looked(replica)
        assert instances(replica.executor)["job"] == 1
        assert replica.codes() == [EVENT_TASK_LOCK_REFUSED]
        go_on.set()
        assert replica.one(EVENT_JOB_EXECUTED).retval == (LaterThan(died.token), True)

    @pytest.mark.nightly
    def test_when_the_job_may_have_another_instance(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        connection: Connection,
        until_looked: Callable[[Replica], None],
    ) -> None:
        """As when the job runs here for a window that it was granted under another name."""
        died = holder()
        replica = make_heir()
        replica.run_once(token_and_takeover)
        replica.one(EVENT_TASK_LOCK_REFUSED)
        replica.idle()
        with instances_lock(replica.executor):
            instances(replica.executor)["job"] += 1
        end_lease(connection)
        until_looked(replica)
        assert replica.codes() == [EVENT_TASK_LOCK_REFUSED]
        with instances_lock(replica.executor):
            del instances(replica.executor)["job"]
        assert replica.one(EVENT_JOB_EXECUTED).retval == (LaterThan(died.token), True)

    @pytest.mark.parametrize("way", ["skip", "run"])
    def test_after_an_outage_and_never_without_a_lock(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        connection: Connection,
        monkeypatch: pytest.MonkeyPatch,
        way: str,
    ) -> None:
        died = holder()
        replica = make_heir(on_database_error=way)
        locks, failures = replica.executor.locks, [TaskLockDatabaseError("unavailable")]

        def after_an_outage(send: Ask) -> Ask:
            def ask(attempts: Any, most: Any, tell: Any) -> None:
                if is_takeover(attempts[0]) and failures:
                    tell([(attempts[0], failures.pop())])
                else:
                    send(attempts, most, tell)

            return ask

        intercept_claims(locks, after_an_outage)
        replica.run_once(token_and_takeover)
        replica.one(EVENT_TASK_LOCK_REFUSED)
        end_lease(connection)
        executed = replica.one(EVENT_JOB_EXECUTED)
        replica.idle()
        assert not failures
        assert executed.retval == (LaterThan(died.token), True)
        assert after_a_death(replica) == [EVENT_TASK_LOCK_REFUSED, EVENT_TASK_LOCK_ERROR, *RUN]


class TestLooking:
    @pytest.mark.nightly
    def test_is_one_statement_for_all_tasks_at_each_interval(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        dying: LockClient,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        tasks = [f"job {number}" for number in range(5)]
        held = [holder(task, lives=True, lease=2) for task in tasks]
        replica = make_heir(lease=6, poll_interval=5)
        for task in tasks:
            replica.run_once(token_and_takeover, job_id=task)
            replica.one(EVENT_TASK_LOCK_REFUSED, task)
        looks = count_looks(replica, monkeypatch)
        begun = min(lock.locked_until for lock in held)
        eventually(lambda: len(looks) > 2)
        took = max(lock.locked_until for lock in held) - begun
        # Three in a lease, and now and then one at once.
        assert len(looks) <= took / timedelta(seconds=6 * 0.9 / 3) + 3
        assert all(names == tasks for names in looks)
        for lock in held:
            dying.release(lock)

    def test_that_the_database_refuses_is_told_once_and_goes_on(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """As when a grant is revoked for a while."""
        died = holder()
        replica = make_heir()
        asked: list[Any] = []
        read = replica.executor.locks.reading
        monkeypatch.setattr(
            replica.executor.locks, "reading", lambda *names: asked.append(names) or read(*names)
        )
        replica.run_once(token_and_takeover)
        replica.one(EVENT_TASK_LOCK_REFUSED)
        connection.execute("ALTER TABLE task_lock RENAME TO elsewhere")
        before = len(asked)
        eventually(lambda: len(asked) >= before + 3)
        connection.execute("ALTER TABLE elsewhere RENAME TO task_lock")
        end_lease(connection)
        assert replica.one(EVENT_JOB_EXECUTED).retval == (LaterThan(died.token), True)
        [refusal] = [r for r in caplog.records if "tried again" in r.getMessage()]
        assert "the table task_lock does not exist" in refusal.getMessage()
        assert refusal.exc_info is None

    @pytest.mark.nightly
    def test_ends_with_the_scheduler_and_begins_with_it_again(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        connection: Connection,
        monkeypatch: pytest.MonkeyPatch,
        until_looked: Callable[[Replica], None],
    ) -> None:
        """What was refused while the shutdown waits for it is not kept."""
        died = holder(min_lock=0.001)
        replica = make_heir()
        refused = threading.Event()

        def slowly(send: Ask) -> Ask:
            def ask(attempts: Any, most: Any, tell: Any) -> None:
                def tell_late(decided: Any) -> None:
                    refused.set()
                    eventually(lambda: replica.executor.locks.closed)
                    tell(decided)

                send(attempts, most, tell_late)

            return ask

        undo = intercept_claims(replica.executor.locks, slowly)
        replica.run_once(token_and_takeover)
        assert refused.wait(60)
        replica.shutdown()
        replica.one(EVENT_TASK_LOCK_REFUSED)
        assert replica.codes() == [EVENT_TASK_LOCK_REFUSED]

        undo()
        end_lease(connection)
        replica.start()
        replica.executor.locks.outage.believe()
        replica.run_once(token_and_takeover, next_run_time=next_hour())
        assert replica.one(EVENT_JOB_EXECUTED).retval == (LaterThan(died.token), True)
        until_looked(replica)
        replica.idle()
        assert after_a_death(replica) == REFUSED_THEN_RUN


class TestOwnWindows:
    """A run time that was refused because of a run that had not ended, and whose window is new."""

    @pytest.fixture
    def refused(
        self, make_heir: MakeReplica, holder: MakeHolder
    ) -> tuple[HeldLock, Replica, datetime]:
        held = holder(lives=True, min_lock=0.001, failover=False)
        replica = make_heir(failover=False)
        own = datetime.now(timezone.utc)
        job = replica.run_once(token_and_takeover, next_run_time=own)
        eventually(lambda: deferred_run_times(replica.executor))
        replica.idle()
        job.modify(misfire_grace_time=1)
        return held, replica, own

    @pytest.mark.nightly
    def test_run_once_the_lease_of_a_dead_holder_has_ended(
        self,
        refused: tuple[HeldLock, Replica, datetime],
        dying: LockClient,
        connection: Connection,
    ) -> None:
        """Without failover, only the dead holder's own window is lost; and it is no misfire."""
        held, replica, own = refused
        eventually(lambda: datetime.now(timezone.utc) > own + timedelta(seconds=1.2))
        claims.die(dying, held)
        end_lease(connection)
        executed = replica.one(EVENT_JOB_EXECUTED)
        replica.idle()
        assert executed.retval == (LaterThan(held.token), False)
        assert executed.scheduled_run_time == own
        assert after_a_death(replica) == RUN

    def test_are_dropped_when_the_holder_ends(
        self,
        refused: tuple[HeldLock, Replica, datetime],
        dying: LockClient,
        connection: Connection,
        until_looked: Callable[[Replica], None],
    ) -> None:
        """As in plain APScheduler, with one instance at a time."""
        held, replica, _ = refused
        dying.release(held)
        until_looked(replica)
        replica.idle()
        assert replica.codes() == [EVENT_TASK_LOCK_REFUSED]
        assert row(connection)["token"] == held.token

    @pytest.mark.nightly
    @pytest.mark.parametrize("coalesce", [True, False])
    def test_run_all_or_the_last_one_as_the_job_coalesces(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        dying: LockClient,
        connection: Connection,
        coalesce: bool,
    ) -> None:
        held = holder(lives=True, min_lock=0.001)
        replica = make_heir(min_factor=0.5, failover=False)
        replica.run_once(
            token_and_takeover, hours=0, seconds=2, coalesce=coalesce, max_instances=10
        )

        def codes(code: int) -> list[Any]:
            return [event for event in replica.of() if event.code == code]

        def seen() -> list[Any]:
            refused = [event.scheduled_run_time for event in codes(EVENT_TASK_LOCK_REFUSED)]
            return [*refused, *deferred_run_times(replica.executor)]

        def submitted() -> list[Any]:
            events = [e for e in list(replica.events) if e.code == EVENT_JOB_SUBMITTED]
            return [run_time for event in events for run_time in event.scheduled_run_times]

        eventually(lambda: len(seen()) >= 3)
        replica.scheduler.modify_job("job", next_run_time=next_hour())
        wait_until_decided(replica.executor)
        eventually(lambda: set(seen()) <= set(submitted()))  # the last event may be on its way
        kept = submitted()
        claims.die(dying, held)
        end_lease(connection)
        eventually(lambda: len(codes(EVENT_JOB_EXECUTED)) == (1 if coalesce else len(kept)))
        replica.idle()
        executed = [event.scheduled_run_time for event in codes(EVENT_JOB_EXECUTED)]
        assert executed == (kept[-1:] if coalesce else kept)
        assert len(codes(EVENT_TASK_LOCK_REFUSED)) == (len(kept) - 1 if coalesce else 0)

    @pytest.mark.nightly
    def test_go_before_a_later_one_that_comes_when_the_run_in_their_way_is_over(
        self, make_heir: MakeReplica, holder: MakeHolder, dying: LockClient, connection: Connection
    ) -> None:
        """Although no look has told so until then: the later one lets one be made."""
        held = holder(lives=True, min_lock=0.001, failover=False)
        replica = make_heir(min_factor=0.5, failover=False, poll_interval=3600)
        replica.run_once(token_and_takeover, hours=0, seconds=2, coalesce=False, max_instances=10)
        eventually(lambda: len(deferred_run_times(replica.executor)) >= 2)
        kept = deferred_run_times(replica.executor)
        claims.die(dying, held)
        # Long before the next run time: if it ended between that one's look and its claim, the kept
        # ones would be overtaken.
        end_lease(connection)

        def executed() -> list[datetime]:
            events = [e for e in replica.of() if e.code == EVENT_JOB_EXECUTED]
            return [event.scheduled_run_time for event in events]

        eventually(lambda: set(kept) < set(executed()) and max(executed()) > kept[-1])
        assert executed() == sorted(executed())

    def test_are_kept_while_the_job_cannot_be_looked_up(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        dying: LockClient,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """As in a job store on a server that was restarted."""
        failures: list[Exception] = []

        class FailingStore(MemoryJobStore):  # type: ignore[misc]  # APScheduler has no types
            def lookup_job(self, job_id: str) -> Any:
                if failures and any(f.name == "renewed" for f in traceback.extract_stack()):
                    raise failures.pop()
                return super().lookup_job(job_id)

        held = holder(lives=True, min_lock=0.001, failover=False)
        replica = make_heir(failover=False)
        replica.scheduler.add_jobstore(FailingStore(), "failing")
        own = datetime.now(timezone.utc)
        job = {"jobstore": "failing", "kwargs": {"task_lock": {"name": "job"}}}
        replica.run_once(token_and_takeover, next_run_time=own, **job)
        eventually(lambda: deferred_run_times(replica.executor))
        failures.append(ConnectionError("its connection is stale"))
        claims.die(dying, held)
        end_lease(connection)
        assert replica.one(EVENT_JOB_EXECUTED).scheduled_run_time == own
        assert "its connection is stale" in caplog.text

    @pytest.mark.parametrize(
        "change",
        [
            lambda job: job.remove(),
            lambda job: job.pause(),
            lambda job: job.reschedule("interval", hours=2),
        ],
        ids=["removed", "paused", "rescheduled"],
    )
    def test_are_dropped_when_the_job_is(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        dying: LockClient,
        connection: Connection,
        change: Callable[[Any], object],
    ) -> None:
        held = holder(lives=True, min_lock=0.001, failover=False)
        replica = make_heir(failover=False)
        job = replica.run_once(token_and_takeover)
        eventually(lambda: deferred_run_times(replica.executor))
        change(job)
        claims.die(dying, held)
        end_lease(connection)
        replica.one(EVENT_TASK_LOCK_REFUSED)
        replica.idle()
        assert replica.codes() == [EVENT_TASK_LOCK_REFUSED]

    def test_of_a_daily_job_wait_for_a_default_lease_at_most(
        self, make_replica: MakeReplica, connection: Connection
    ) -> None:
        """A killed holder would otherwise silence it for five days."""
        replica = make_replica()
        replica.run_once(token_and_takeover, hours=24)
        granted = replica.one(EVENT_TASK_LOCK_GRANTED)
        replica.one(EVENT_JOB_EXECUTED)
        claimed = row(connection)
        assert granted.locked_until - claimed["started_at"] == timedelta(seconds=DEFAULT_LEASE)
        assert claimed["run_until"] - claimed["started_at"] == timedelta(days=5)


class TestGivingUp:
    @pytest.fixture
    def poison(self, holder: MakeHolder, dying: LockClient, connection: Connection) -> HeldLock:
        """Let the job kill its holder, and those of two takeovers."""
        held = holder()
        dying.outage.believe()
        for _ in range(2):
            end_lease(connection)
            dead = takeover_of("job", held.claim_id, "dead", 1, failover=True)
            taken_over = dying.claim(dead)
            assert isinstance(taken_over, HeldLock)
            held = taken_over
            claims.die(dying, held)
        end_lease(connection)
        return held

    @pytest.mark.nightly
    def test_a_job_that_kills_its_holders_is_told_once_among_all_replicas(
        self,
        make_heir: MakeReplica,
        poison: HeldLock,
        connection: Connection,
        until_looked: Callable[[Replica], None],
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        replicas = [make_heir(max_takeovers=2) for _ in range(2)]
        at_once = threading.Barrier(len(replicas))

        def give_up_at_once(_message: GiveUp, give_up: Callable[[], Any]) -> Any:
            at_once.wait(60)
            return give_up()

        monkeypatch.setattr(*met(GiveUp, give_up_at_once))

        for replica in replicas:
            replica.run_once(token_and_takeover, next_run_time=next_hour())
        eventually(lambda: any(replica.of() for replica in replicas))
        for replica in replicas:
            until_looked(replica)
            replica.idle()
        [died, event] = [event for replica in replicas for event in replica.of()]
        assert (died.code, died.outcome) == (EVENT_TASK_LOCK_RELEASED, "died")
        assert (died.holder, died.token) == ("dead", poison.token)
        assert (event.code, event.reason) == (EVENT_TASK_LOCK_ERROR, "given up")
        assert (event.holder, event.token) == ("dead", poison.token)
        said = "is given up: 3 runs of the task in a row have died with their holders"
        assert said in str(event.exception)
        errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert len(errors) == 1
        assert said in errors[0]
        assert row(connection)["finished_at"] is not None

    @pytest.mark.nightly
    def test_is_no_end_of_the_task_whose_next_window_runs(
        self, make_heir: MakeReplica, poison: HeldLock, connection: Connection
    ) -> None:
        replica = make_heir(max_takeovers=2, min_factor=0)
        connection.execute("UPDATE task_lock SET window_until = window_start + interval '1 ms'")
        replica.run_once(token_and_takeover)
        executed = replica.one(EVENT_JOB_EXECUTED)
        replica.idle()
        assert executed.retval == (LaterThan(poison.token), False)
        assert EVENT_TASK_LOCK_ERROR in replica.codes()
        assert row(connection)["deaths"] == 0  # since a run has ended

    @pytest.mark.nightly
    def test_comes_after_as_many_takeovers_as_the_option_allows(
        self, make_heir: MakeReplica, poison: HeldLock
    ) -> None:
        replica = make_heir(max_takeovers=3)
        replica.run_once(token_and_takeover, next_run_time=next_hour())
        assert replica.one(EVENT_JOB_EXECUTED).retval == (LaterThan(poison.token), True)

    def test_comes_at_the_end_of_the_maximum_lock(
        self, make_heir: MakeReplica, holder: MakeHolder, connection: Connection
    ) -> None:
        """Friday's mail does not go out on Monday."""
        holder()
        end_its_maximum_lock(connection)
        replica = make_heir()
        replica.run_once(token_and_takeover, next_run_time=next_hour())
        given_up = replica.one(EVENT_TASK_LOCK_ERROR)
        assert "is given up: its maximum lock has ended" in str(given_up.exception)
        assert replica.codes() == [EVENT_TASK_LOCK_RELEASED, EVENT_TASK_LOCK_ERROR]

    def test_loses_the_lock_of_a_holder_that_ends_later_so_that_one_end_is_told(
        self, make_heir: MakeReplica, connection: Connection
    ) -> None:
        begun, go_on = threading.Event(), threading.Event()

        def slow() -> None:
            begun.set()
            go_on.wait(60)

        holder = make_heir()
        holder.run_once(slow)
        assert begun.wait(60)
        connection.execute("UPDATE task_lock SET finished_at = now(), last_outcome = 'died'")
        go_on.set()
        holder.one(EVENT_TASK_LOCK_LOST)
        holder.idle()
        assert EVENT_TASK_LOCK_RELEASED not in holder.codes()

    def test_does_not_wait_for_one_whose_row_is_locked(
        self,
        make_heir: MakeReplica,
        holder: MakeHolder,
        connection: Connection,
        direct_url: str,
    ) -> None:
        for task in ("a", "job"):
            holder(task)
        end_its_maximum_lock(connection)
        replica = make_heir(start=False)
        for task in ("a", "job"):
            job = {"job_id": task, "next_run_time": next_hour()}
            replica.run_once(token_and_takeover, **job)
        with psycopg.connect(direct_url) as session:
            session.execute("SELECT FROM task_lock WHERE task_name = 'a' FOR UPDATE")
            replica.scheduler.start()
            replica.one(EVENT_TASK_LOCK_ERROR)
            assert replica.codes("a") == []
        replica.one(EVENT_TASK_LOCK_ERROR, "a")


@pytest.mark.direct("the pooler would answer in the server's place")
class TestClaimsGivenBack:
    @pytest.mark.nightly
    @pytest.mark.parametrize("again", [True, False], ids=["with failover", "without"])
    def test_one_that_was_granted_without_an_answer_is_run_by_the_replica_that_it_refused(
        self,
        make_replica: MakeReplica,
        make_heir: MakeReplica,
        connection: Connection,
        known_task: Callable[[str], None],
        proxy: Proxy,
        again: bool,
    ) -> None:
        """The link of the one is cut, and comes back. The other has the database all the time."""
        known_task("job")
        # It would see to the window itself, but for this.
        cut_off = make_replica(
            proxy.url, claim_timeout=0.5, failover=again, lease=600, poll_interval=600
        )
        begun, claimed = threading.Event(), threading.Event()

        def cut_from_the_claim_on(_number: int, to_server: bool, data: bytes) -> bytes | None:
            if claimed.is_set():
                return None
            if to_server and CLAIM in data:
                begun.set()
            if (
                to_server and begun.is_set() and data.endswith(SYNC)
            ):  # it may come in several pieces
                claimed.set()
            return data

        proxy.tap = cut_from_the_claim_on
        cut_off.run_once(token_and_takeover)
        cut_off.one(EVENT_TASK_LOCK_ERROR)
        assert row(connection)["token"] == AHEAD + 1
        other = make_heir(failover=again)
        other.run_once(token_and_takeover)
        other.one(EVENT_TASK_LOCK_REFUSED)
        assert row(connection)["finished_at"] is None
        proxy.tap = None
        assert other.one(EVENT_JOB_EXECUTED).retval == (AHEAD + 2, True)
        other.idle()
        assert other.codes() == REFUSED_THEN_RUN
        assert EVENT_JOB_EXECUTED not in cut_off.codes()


class TestRetention:
    @pytest.fixture
    def pruning(
        self, make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., Replica]:
        """Make a replica that deletes old rows at each look, but for the first one maybe."""
        at_each_look = partial(Watch, prune_interval=0.001)
        monkeypatch.setattr("apscheduler_tasklock.executor.Watch", at_each_look)

        def make(*arguments: Any, **options: Any) -> Replica:
            return make_replica(*arguments, **{"poll_interval": 0.5, **options})

        return make

    @pytest.mark.parametrize(
        ("options", "old", "young"),
        [
            ({}, "7 days 1 minute", "6 days"),
            ({"keep_one_offs": timedelta(hours=20)}, "1201 minutes", "1 hour"),
        ],
    )
    def test_rows_of_one_off_jobs_are_kept_for_a_week_or_as_an_option_says(
        self,
        pruning: Callable[..., Replica],
        connection: Connection,
        options: dict[str, Any],
        old: str,
        young: str,
    ) -> None:
        replica = pruning(**options)
        jobs: dict[str, dict[str, Any]] = {
            "old": {"trigger": "date"},
            "young": {"trigger": "date"},
            "hourly": {"trigger": "interval", "hours": 1},
        }
        tokens = {}
        for name, job in jobs.items():
            now = {} if job["trigger"] == "date" else {"next_run_time": datetime.now(timezone.utc)}
            replica.scheduler.add_job(
                token_and_takeover, id=name, misfire_grace_time=None, **job, **now
            )
            tokens[name] = replica.one(EVENT_JOB_EXECUTED, name).retval[0]
        replica.idle()
        over = "finished_at = {0}, window_until = {0}, run_until = {0}, locked_until = {0}"
        ago = "now() - interval '{}'"
        for name, days in (("old", old), ("young", young), ("hourly", "1 year")):
            connection.execute(
                f"UPDATE task_lock SET {over.format(ago.format(days))} WHERE task_name = '{name}'"
            )
        names = "SELECT task_name FROM task_lock ORDER BY 1"
        eventually(lambda: ("old",) not in connection.execute(names).fetchall())
        assert connection.execute(names).fetchall() == [("hourly",), ("young",)]
        kept = options.get("keep_one_offs", timedelta(days=7)).total_seconds()
        reported = "SELECT keep_one_offs FROM task_lock_replica"
        eventually(lambda: connection.execute(reported).fetchall() == [(kept,)])
        replica.events.clear()
        replica.scheduler.add_job(token_and_takeover, id="old", misfire_grace_time=None)
        assert replica.one(EVENT_JOB_EXECUTED, "old").retval[0] > tokens["old"]

    def test_a_day_of_thousands_of_them_is_deleted_in_one_go(
        self, pruning: Callable[..., Replica], dying: LockClient, connection: Connection
    ) -> None:
        """Though a statement deletes 1,000 at most."""
        dying.release(claims.held(dying, "job", one_off=True))
        connection.execute(
            "UPDATE task_lock SET finished_at = past, window_until = past, run_until = past,"
            " locked_until = past FROM (SELECT now() - interval '8 days' AS past) AS _"
        )
        columns = ", ".join(
            column for column in row(connection) if column not in ("task_name", "over")
        )
        connection.execute(
            f"INSERT INTO task_lock (task_name, {columns})"
            f" SELECT number::text, {columns} FROM task_lock, generate_series(1, 2500) AS number"
        )
        # A slow machine answers late, and another try comes with the next look only.
        patient = {"timings": Timings(longest_answer=60.0), "claim_timeout": 180}
        replica = pruning(poll_interval=600, failover=True, lease=1800, **patient)
        replica.run_once(token_and_takeover, job_id="next", next_run_time=next_hour())
        count = "SELECT count(*) FROM task_lock WHERE one_off"
        eventually(lambda: connection.execute(count).fetchall() == [(0,)])

    @pytest.mark.usefixtures("unhurried_stop")
    def test_a_role_that_may_not_delete_is_told_once_and_nothing_else_suffers(
        self,
        pruning: Callable[..., Replica],
        database_url: str,
        connection: Connection,
        until_looked: Callable[[Replica], None],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.INFO)
        with role(database_url) as (name, url):
            tables = "task_lock, task_lock_run, task_lock_replica"
            grant = sql.SQL(f"GRANT SELECT, INSERT, UPDATE ON {tables} TO {{}}")
            connection.execute(grant.format(sql.Identifier(name)))
            patient = Timings(longest_answer=60.0)
            replica = pruning(url, claim_timeout=180, timings=patient)
            replica.run_once(token_and_takeover)
            replica.one(EVENT_JOB_EXECUTED)
            said = f'old rows: role "{name}" may not use the table task_lock; let'
            eventually(lambda: said in caplog.text)
            until_looked(replica)
            replica.shutdown()
        assert caplog.text.count(said) == 1
        assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_in_a_large_fleet_a_replica_believes_later_that_a_holder_died(
    make_replica: MakeReplica, connection: Connection
) -> None:
    """It counts the live replicas as it reports itself, at its first look."""
    connection.execute(
        "INSERT INTO task_lock_replica (replica_id, host, version, started_at, seen_at,"
        "                               stopped_at, tasks)"
        " SELECT 'replica ' || n, 'host', '1.0', now(), now() - CASE WHEN n > 2000 THEN"
        "     interval '2 min' ELSE interval '1 min' END, CASE WHEN n > 1000 THEN now() END, '{}'"
        " FROM generate_series(1, 3000) AS n"
    )
    replica = make_replica(start=False)
    replica.scheduler.add_job(token_and_takeover, "interval", days=1, id="job")
    outage = replica.executor.locks.outage
    alone = outage.grace
    replica.start()
    eventually(lambda: outage.grace > alone)
    assert outage.grace == pytest.approx(alone - 2.5 + 10.0, abs=0.02)


class _RefusesOnce(ThreadPoolExecutor):
    """An executor that cannot take the first job that is submitted."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        if not self.refused:
            self.refused += 1
            raise RuntimeError("can't start new thread")
        super()._do_submit_job(job, run_times)


class _Recorder:
    """A job that notes what it ran under, and takes until a time if it is a takeover."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, bool, datetime]] = []
        self.takes_until = datetime.max.replace(tzinfo=timezone.utc)

    def run(self) -> None:
        lock = current_lock()
        assert lock is not None
        assert lock.run_time is not None
        if lock.is_takeover:
            eventually(lambda: datetime.now(timezone.utc) > self.takes_until)
        self.ran.append((lock.token, lock.is_takeover, lock.run_time))
