"""Leader mode on a real server: who leads, and that the others ask for nothing that was run.

What becomes of run times is in ``tests/simulation``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from itertools import count
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    TaskLockExecutor,
)
from apscheduler_tasklock._database.timings import Timings
from tests.support.faults import CLAIM, FIRST_CLAIM
from tests.support.polling import eventually
from tests.support.postgres import Server
from tests.support.proxy import Proxy, proxy_to
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

        def make(size: int = 3, **options: Any) -> Sequence[Member]:
            members: list[Member] = []
            for _ in range(size):
                proxy = closing.enter_context(proxy_to(database_url))
                members.append(Member(proxy, make_replica, next(names), **options))
                eventually(lambda: members[0].leads)
            return members

        yield make


def in_a_moment(seconds: float = 0.3) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def add_to_all(members: Sequence[Member], function: Callable[..., Any]) -> None:
    """Add a job that is due at the same moment on all replicas."""
    due = in_a_moment()
    # It is due although a slow machine adds it late.
    late = {"next_run_time": due, "misfire_grace_time": None}
    for member in members:
        member.replica.scheduler.add_job(
            function, "interval", hours=1, start_date=due, id="job", **late
        )


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


def test_a_leader_that_shuts_down_gives_the_leadership_up(
    make_fleet: MakeFleet, connection: psycopg.Connection[Any]
) -> None:
    fleet = make_fleet(**PATIENT)
    fleet[0].replica.scheduler.shutdown()
    eventually(lambda: any(member.leads for member in fleet[1:]))


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
