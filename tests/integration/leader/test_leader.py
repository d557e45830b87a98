"""Leader mode: one replica asks first, and whatever becomes of it, no run time is lost."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from itertools import count
from typing import Any

import psycopg
import pytest
from psycopg import sql

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    TaskLockExecutor,
    TaskLockSchemaError,
)
from apscheduler_tasklock._database.timings import Timings
from tests.support.faults import CLAIM, FIRST_CLAIM
from tests.support.internals import deferred_run_times, deferred_runs
from tests.support.outages import Job, refuse, restore
from tests.support.polling import eventually
from tests.support.postgres import Server
from tests.support.proxy import Proxy, proxy_to
from tests.support.roles import role
from tests.support.schedulers import Replica
from tests.support.stored_jobs import note, store_replicas

pytestmark = pytest.mark.direct("it counts the statements of each replica")

# Short pauses, so that no test waits for long, and a lease for which no machine is too slow.
OPTIONS: dict[str, Any] = {
    "leader": True,
    "leader_lease": 600,
    "poll_interval": 0.3,
    "timings": Timings(head_start=0.5, recovery_grace=0.2),
}
# For what a resignation leads to, which is sent once, and has the time of one answer.
PATIENT: dict[str, Any] = {
    "claim_timeout": 180,
    "timings": Timings(head_start=0.5, recovery_grace=0.2, longest_answer=60.0),
}


class Member:
    """A replica of a fleet in leader mode, behind a proxy of its own."""

    def __init__(
        self, proxy: Proxy, make_replica: Callable[..., Replica], name: str, **options: Any
    ):
        self.proxy = proxy
        self.claims = 0
        proxy.tap = self._count
        self.replica = make_replica(proxy.url, replica_id=name, **{**OPTIONS, **options})
        self.replica.scheduler.add_job(print, "interval", hours=1, id="of all")
        self.name = name

    def _count(self, _number: int, to_server: bool, data: bytes) -> bytes:
        # Not prepared in the first statements on a connection, so each claim's text is sent.
        self.claims += to_server and (CLAIM in data or FIRST_CLAIM in data)
        return data

    @property
    def leads(self) -> bool:
        return self.replica.executor.is_leader

    def reasons(self, job_id: str = "job") -> list[Any]:
        return [
            event.reason
            for event in self.replica.of(job_id)
            if event.code == EVENT_TASK_LOCK_REFUSED
        ]

    def run_times(self, job_id: str = "job") -> list[datetime]:
        return [
            event.scheduled_run_time
            for event in self.replica.of(job_id)
            if event.code == EVENT_TASK_LOCK_GRANTED
        ]


MakeFleet = Callable[..., Sequence[Member]]


@pytest.fixture
def make_fleet(database_url: str, make_replica: Callable[..., Replica]) -> Iterator[MakeFleet]:
    """Make replicas in leader mode. The first of them leads."""
    names = (f"web-{number}" for number in count(1))
    with ExitStack() as closing:

        def make(size: int = 3, *, waits_to_lead: bool = True, **options: Any) -> Sequence[Member]:
            members: list[Member] = []
            for _ in range(size):
                proxy = closing.enter_context(proxy_to(database_url))
                members.append(Member(proxy, make_replica, next(names), **options))
                if waits_to_lead:
                    eventually(lambda: members[0].leads or not options.get("leader", True))
            return members

        yield make


def in_a_moment(seconds: float = 0.3) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def add_to_all(members: Sequence[Member], function: Callable[..., Any], **job: Any) -> datetime:
    """Add a job that is due at the same moment on all replicas."""
    due = in_a_moment()
    for member in members:
        trigger = {"trigger": "interval", "hours": 1, "start_date": due}
        # It is due although a slow machine adds it late.
        late = {"next_run_time": due, "misfire_grace_time": None}
        member.replica.scheduler.add_job(function, id="job", **{**trigger, **late, **job})
    return due


class Ran:
    def __init__(self) -> None:
        self.times = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        with self._lock:
            self.times += 1


def test_one_replica_leads_and_the_others_ask_for_nothing_that_was_run(
    make_fleet: MakeFleet,
) -> None:
    # So long that the leader asks before a follower does, also on a slow machine.
    fleet = make_fleet(timings=Timings(head_start=4.0, recovery_grace=0.2))
    job = Ran()
    add_to_all(fleet, job.run)
    for follower in fleet[1:]:
        eventually(follower.reasons)
    # A follower may have seen the claim before its answer reached the leader.
    eventually(lambda: job.times and fleet[0].run_times())
    assert [member.leads for member in fleet] == [True, False, False]
    assert job.times == 1
    assert [len(member.run_times()) for member in fleet] == [1, 0, 0]
    assert fleet[0].reasons() == []
    for follower in fleet[1:]:
        # On a slow machine the leader's run may not be released yet.
        assert follower.reasons() in (["window"], ["running"])
        assert follower.claims == 0


def test_a_run_that_a_follower_has_left_to_the_leader_needs_no_garbage_collector(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(2, timings=Timings(head_start=4.0, recovery_grace=0.2))
    follower = fleet[1].replica
    gc.disable()
    try:
        add_to_all(fleet, print)
        kept = eventually(lambda: [weakref.ref(run) for run in deferred_runs(follower.executor)])
        eventually(lambda: not any(run() for run in kept))
    finally:
        gc.enable()


@pytest.mark.nightly
def test_a_replica_that_is_cut_off_alone_leads_no_longer_and_nothing_is_lost(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(leader_lease=1.5)
    refuse(fleet[0].proxy)
    job = Ran()
    add_to_all(fleet[1:], job.run)
    eventually(lambda: job.times)
    eventually(lambda: any(member.leads for member in fleet[1:]))
    eventually(lambda: not fleet[0].leads)
    restore(fleet[0].proxy)
    assert sum(member.leads for member in fleet) == 1
    assert job.times == 1


def test_a_leader_that_shuts_down_gives_the_leadership_up(
    make_fleet: MakeFleet, connection: psycopg.Connection[Any]
) -> None:
    fleet = make_fleet(**PATIENT)
    fleet[0].replica.scheduler.shutdown()
    eventually(lambda: any(member.leads for member in fleet[1:]))


def test_a_leader_that_is_drained_gives_the_leadership_up(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(**PATIENT)
    fleet[0].replica.executor.drain()
    eventually(lambda: any(member.leads for member in fleet[1:]))
    assert not fleet[0].leads


def test_a_job_that_the_leader_does_not_have_is_run_by_a_follower(make_fleet: MakeFleet) -> None:
    """As in a rolling deployment with a new job, or if two services share a table."""
    fleet = make_fleet()
    job = Ran()
    add_to_all(fleet[1:], job.run)
    eventually(lambda: job.times)
    eventually(lambda: len([r for m in fleet[1:] for r in m.reasons()]) == 1)
    assert job.times == 1
    assert fleet[0].leads


def test_what_waits_for_a_worker_of_the_leader_is_run_by_a_follower(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(max_workers=1)
    long, job = Job(), Ran()
    try:
        fleet[0].replica.run_once(long.run, job_id="long")
        assert long.begun.wait(60)
        add_to_all(fleet, job.run)
        eventually(lambda: job.times)
        assert not fleet[0].run_times()
    finally:
        long.go_on.set()


def test_a_one_off_job_with_an_id_is_run_once_and_nobody_waits_for_the_leader(
    make_fleet: MakeFleet,
) -> None:
    """Its scheduler has dropped it, so that a follower that kept it and stopped would lose it."""
    fleet = make_fleet(timings=Timings(head_start=600, recovery_grace=0.2))
    job = Ran()
    due = in_a_moment()
    for member in fleet[1:]:
        one_off = {"run_date": due, "misfire_grace_time": None}
        member.replica.scheduler.add_job(job.run, "date", id="job", **one_off)
    eventually(lambda: job.times)
    eventually(lambda: len([r for m in fleet[1:] for r in m.reasons()]) == 1)
    assert job.times == 1


def test_in_an_outage_only_the_one_that_has_led_last_runs_jobs_without_a_lock(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(on_database_error="run", claim_timeout=1)
    for member in fleet:
        refuse(member.proxy)
    job = Ran()
    add_to_all(fleet, job.run)
    eventually(lambda: job.times)
    for follower in fleet[1:]:
        eventually(lambda follower=follower: follower.replica.of("job") and _failed(follower))
    assert job.times == 1


def _failed(member: Member) -> bool:
    return any(getattr(event, "exception", None) for event in member.replica.of("job"))


def test_fleets_in_two_namespaces_have_a_leader_each(make_fleet: MakeFleet) -> None:
    [one] = make_fleet(1, namespace="billing:")
    [other] = make_fleet(1, namespace="reports:")
    assert one.leads
    assert other.leads


def test_what_a_follower_keeps_is_skipped_in_an_outage_and_not_run_late_after_it(
    make_fleet: MakeFleet,
) -> None:
    """As without leader mode: it is asked for, and skipped if the database does not answer."""
    head_start = Timings(head_start=600, recovery_grace=0.2)
    fleet = make_fleet(claim_timeout=1, timings=head_start)
    job = Ran()
    add_to_all(fleet[1:], job.run)
    for follower in fleet[1:]:
        eventually(lambda follower=follower: deferred_run_times(follower.replica.executor))
        refuse(follower.proxy)
    for follower in fleet[1:]:
        eventually(lambda follower=follower: _failed(follower))
    assert job.times == 0


def test_what_a_follower_keeps_does_not_wait_for_a_missing_right_for_longer_than_a_lease(
    make_fleet: MakeFleet,
    make_replica: Callable[..., Replica],
    database_url: str,
    connection: psycopg.Connection[Any],
) -> None:
    """Else it would be run when the right is there again, whatever its grace time."""
    make_fleet(1)
    with role(database_url) as (name, url):
        user = sql.Identifier(name)
        tables = sql.SQL("task_lock, task_lock_run, task_lock_replica")
        connection.execute(sql.SQL("GRANT ALL ON {} TO {}").format(tables, user))
        timings = Timings(head_start=600, recovery_grace=0.2)
        options = {**OPTIONS, "leader_lease": 3, "timings": timings}
        follower = make_replica(url, replica_id="follower", **options)
        job = Ran()
        late = {"next_run_time": in_a_moment(), "misfire_grace_time": None}
        follower.scheduler.add_job(job.run, "interval", hours=1, id="job", **late)
        eventually(lambda: deferred_run_times(follower.executor))
        connection.execute(sql.SQL("REVOKE ALL ON task_lock FROM {}").format(user))
        rejected = follower.one(EVENT_TASK_LOCK_ERROR)
        assert isinstance(rejected.exception, TaskLockSchemaError)
        follower.scheduler.shutdown()
    assert job.times == 0


def one_application() -> None: ...


def another_application() -> None: ...


def test_two_functions_under_one_task_name_are_told_by_a_follower(
    make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    """It never asks for what the leader has run, and so no claim of its own is refused."""
    fleet = make_fleet(2)
    for member, function in zip(fleet, [one_application, another_application], strict=True):
        add_to_all([member], function, hours=0, seconds=1)
    eventually(lambda: len(fleet[1].reasons()) >= 2)
    told = f"it runs {__name__}:another_application here, and is refused"
    eventually(lambda: told in caplog.text)


def test_a_manual_run_is_begun_by_a_follower_at_once(
    make_fleet: MakeFleet, make_task_locks: Callable[..., Any]
) -> None:
    fleet = make_fleet(timings=Timings(head_start=600, recovery_grace=0.2))
    job, locks = Ran(), make_task_locks()
    for member in fleet[1:]:
        member.replica.scheduler.add_job(job.run, "interval", hours=1, id="job")
    eventually(lambda: [each for each in locks.replicas() if "job" in each.tasks])
    eventually(lambda: [each for each in locks.tasks() if each.name == "job"])
    locks.request_run("job", by="ann")
    eventually(lambda: job.times)


def test_a_replica_without_leader_mode_asks_at_once_beside_a_leader(make_fleet: MakeFleet) -> None:
    """As while leader mode is deployed."""
    [leader] = make_fleet(1)
    [plain] = make_fleet(1, leader=False)
    job = Ran()
    add_to_all([leader, plain], job.run)
    eventually(lambda: leader.reasons() or plain.reasons())
    eventually(lambda: job.times)
    assert job.times == 1


def test_a_job_that_is_due_faster_than_followers_ask_is_run_without_the_leader(
    make_fleet: MakeFleet,
) -> None:
    """With ``coalesce`` a follower keeps the last run time only, which is always a new one."""
    fleet = make_fleet(timings=Timings(head_start=3, recovery_grace=0.2))
    job = Ran()
    add_to_all(fleet[1:], job.run, hours=0, seconds=1)
    eventually(lambda: job.times >= 2)
    assert not fleet[0].run_times()


def test_all_executors_of_a_scheduler_lead_together(make_fleet: MakeFleet) -> None:
    """Else the jobs of all but one of them would always wait for a look."""
    [member] = make_fleet(1)
    options = {name: OPTIONS[name] for name in ("leader", "leader_lease", "poll_interval")}
    other = TaskLockExecutor(member.proxy.url, **options)
    member.replica.scheduler.add_executor(other, "other")
    member.replica.scheduler.add_job(Ran().run, "interval", hours=1, id="other", executor="other")
    eventually(lambda: other.is_leader)
    assert member.leads


def test_executors_of_two_namespaces_lead_under_their_own_ids(
    make_fleet: MakeFleet, make_task_locks: Callable[..., Any]
) -> None:
    """So that it is seen of each who leads."""
    [member] = make_fleet(1, namespace="a:")
    options = {name: OPTIONS[name] for name in ("leader", "leader_lease", "poll_interval")}
    other = TaskLockExecutor(member.proxy.url, namespace="b:", replica_id="other", **options)
    member.replica.scheduler.add_executor(other, "other")
    member.replica.scheduler.add_job(Ran().run, "interval", hours=1, id="other", executor="other")
    eventually(lambda: other.is_leader)
    locks = make_task_locks()
    # The first sign of life of the other one may have come before its job.
    eventually(lambda: [replica.leads for replica in locks.replicas()] == [True, True])


def test_executors_of_two_databases_lead_under_their_own_ids(
    make_fleet: MakeFleet, make_task_locks: Callable[..., Any], server: Server, template: str
) -> None:
    """So that it is seen in each database who leads there."""
    [member] = make_fleet(1)
    options = {name: OPTIONS[name] for name in ("leader", "leader_lease", "poll_interval")}
    with server.database(template) as url:
        other = TaskLockExecutor(url, replica_id="other", **options)
        member.replica.scheduler.add_executor(other, "other")
        member.replica.scheduler.add_job(print, "interval", hours=1, id="here", executor="other")
        locks = make_task_locks(url)
        eventually(lambda: [each.leads for each in locks.replicas()] == [True])
        member.replica.scheduler.shutdown()
        locks.close()


def test_a_replica_without_jobs_does_not_lead(
    make_replica: Callable[..., Replica],
    make_fleet: MakeFleet,
    make_task_locks: Callable[..., Any],
) -> None:
    """Else the others would ask for everything later than they could."""
    idle = make_replica(replica_id="idle", **OPTIONS)
    eventually(lambda: idle.executor.health().ready)
    assert not idle.executor.is_leader
    assert [each.leader_namespace for each in eventually(make_task_locks().replicas)] == [None]
    [member] = make_fleet(1, **PATIENT)
    assert member.leads
    [heir] = make_fleet(1, waits_to_lead=False)
    member.replica.scheduler.remove_all_jobs()
    eventually(lambda: not member.leads)
    eventually(lambda: heir.leads)


def test_a_replica_that_has_only_jobs_of_the_job_store_does_not_lead(
    make_fleet: MakeFleet, make_task_locks: Callable[..., Any], database_url: str
) -> None:
    """No leader asks for them first, and it would ask for nothing else."""
    key = "test_a_replica_that_has_only_jobs_of_the_job_store_does_not_lead"
    with store_replicas(database_url) as make:
        of_store = make(replica_id="of store", **OPTIONS)
        of_store.scheduler.add_job(note, "interval", hours=1, id=key, args=[key])
        locks = make_task_locks()
        eventually(lambda: [each for each in locks.replicas() if key in each.tasks])
        assert [each.leader_namespace for each in locks.replicas()] == [None]
        make_fleet(1)
        assert not of_store.executor.is_leader
