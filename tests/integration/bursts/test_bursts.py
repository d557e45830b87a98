"""Bursts and stalls: time that the lock itself takes makes no run time a misfire.

All jobs have APScheduler's own `misfire_grace_time` of 1 s.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MISSED
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
)
from tests.support.hosts import AsyncIO, Host
from tests.support.polling import eventually
from tests.support.proxy import Proxy, counted, pass_on
from tests.support.schedulers import Replica

pytestmark = pytest.mark.nightly

Job = Callable[..., Any]

NEXT_HOUR = timedelta(hours=1)
GRACE = timedelta(seconds=1)  # APScheduler's own
MARGIN = timedelta(seconds=0.1)  # until the first job is submitted
# When each replica's scheduler last came to jobs that were due.
CAME: WeakKeyDictionary[Replica, datetime] = WeakKeyDictionary()


def function() -> None: ...


class FailingTrigger(IntervalTrigger):  # type: ignore[misc]  # APScheduler has no types
    """Fails where a claim is made of it, and not where the scheduler asks for its run time."""

    def __init__(self) -> None:
        super().__init__(hours=1)

    @property
    def jitter(self) -> None:
        if any(frame.name == "request_of" for frame in traceback.extract_stack()):
            raise RuntimeError("a trigger that somebody wrote badly")

    @jitter.setter
    def jitter(self, value: object) -> None: ...


async def coroutine() -> None: ...


class NotingStore(MemoryJobStore):  # type: ignore[misc]  # APScheduler has no types
    """Notes when its scheduler last came to jobs that were due.

    A machine that stands still delays that, too. What is due for longer than its grace time by then
    is missed, as without us.
    """

    def __init__(self, came: Callable[[datetime], object]) -> None:
        super().__init__()
        self._came = came

    def get_due_jobs(self, now: datetime) -> list[Any]:
        due: list[Any] = super().get_due_jobs(now)
        if due:
            self._came(now)
        return due


@pytest.fixture
def make_waiting() -> Iterator[Callable[..., Replica]]:
    """Make a replica with so many jobs, none of which is due yet."""
    with ExitStack() as closing:

        def make(url: str, jobs: int, host: Host | None = None, **options: Any) -> Replica:
            host = host or Host()
            replica = Replica(url, host=host, **options)
            closing.callback(host.close)
            closing.callback(replica.shutdown)
            replica.scheduler.add_jobstore(NotingStore(partial(CAME.__setitem__, replica)))
            job = coroutine if host.coroutines else function
            later = datetime.now(timezone.utc) + NEXT_HOUR
            for number in range(jobs):
                replica.scheduler.add_job(
                    job, "interval", hours=1, id=f"job {number}", next_run_time=later
                )
            replica.start()
            return replica

        yield make


def let_all_be_due(replicas: Sequence[Replica]) -> datetime:
    """Let all jobs of all replicas be due at one moment, which has not come yet by then.

    :return: that moment
    """
    ahead = timedelta(seconds=2)
    for replica in replicas:
        replica.scheduler.pause()
    while True:
        due = datetime.now(timezone.utc) + ahead
        for replica in replicas:
            for job in replica.scheduler.get_jobs():
                job.modify(next_run_time=due)
        if datetime.now(timezone.utc) < due:
            break
        ahead *= 2
    for replica in replicas:
        replica.scheduler.resume()
    return due


def outcomes(replicas: Sequence[Replica]) -> Counter[int]:
    return Counter(event.code for replica in replicas for event in list(replica.events))


def ran(replicas: Sequence[Replica]) -> Counter[str]:
    """Return how often each job ran on any replica."""
    events = [event for replica in replicas for event in list(replica.events)]
    return Counter(event.job_id for event in events if event.code == EVENT_JOB_EXECUTED)


@pytest.mark.parametrize("host", [Host, AsyncIO])
def test_of_600_jobs_due_at_once_on_three_replicas_none_is_missed(
    make_waiting: Callable[..., Replica], database_url: str, host: type[Host]
) -> None:
    jobs = 600
    replicas = [make_waiting(database_url, jobs, host()) for _ in range(3)]

    def decided() -> bool:
        codes = outcomes(replicas)
        ended = (EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_REFUSED, EVENT_JOB_MISSED)
        return sum(codes[code] for code in ended) >= 3 * jobs

    while not ran(replicas):  # where no scheduler came in time, all is missed, and no window taken
        for replica in replicas:
            replica.events.clear()
        due = let_all_be_due(replicas)
        eventually(decided, 120)
        for replica in replicas:
            replica.idle()
    in_time = [each for each in replicas if CAME[each] < due + GRACE - MARGIN]
    assert outcomes(in_time)[EVENT_JOB_MISSED] == 0
    assert ran(replicas) == {f"job {number}": 1 for number in range(jobs)}


@pytest.mark.parametrize("host", [Host, AsyncIO])
def test_of_40_jobs_due_while_the_database_answers_2_s_late_none_is_missed(
    make_waiting: Callable[..., Replica], proxy: Proxy, host: type[Host]
) -> None:
    replica = make_waiting(proxy.url, 40, host(), claim_timeout=60)

    together_until = 0.0

    def delay(data: bytes) -> bytes:
        nonlocal together_until
        if time.monotonic() > together_until:  # else it is of the same answer
            time.sleep(2)  # is the latency
        together_until = time.monotonic() + 0.05
        return data

    proxy.to_client = delay
    let_all_be_due([replica])
    # The others are late by then, by the clock.
    eventually(lambda: outcomes([replica])[EVENT_TASK_LOCK_GRANTED] > 1)
    proxy.to_client = pass_on
    eventually(
        lambda: sum(outcomes([replica])[c] for c in (EVENT_JOB_EXECUTED, EVENT_JOB_MISSED)) == 40
    )
    replica.idle()
    assert ran([replica]) == {f"job {number}": 1 for number in range(40)}


def test_coroutines_due_at_once_take_few_statements_and_no_thread_each(
    make_waiting: Callable[..., Replica], proxy: Proxy
) -> None:
    jobs = 200
    replica = make_waiting(proxy.url, jobs, AsyncIO())
    sent: list[bytes] = []
    most_threads = 0

    def count(data: bytes) -> bytes:
        nonlocal most_threads
        sent.append(data)
        ours = [t for t in threading.enumerate() if t.name.startswith("tasklock")]
        most_threads = max(most_threads, len(ours))
        return data

    proxy.to_server = count
    let_all_be_due([replica])
    eventually(lambda: outcomes([replica])[EVENT_TASK_LOCK_RELEASED] == jobs)
    replica.idle()
    assert ran([replica]) == {f"job {number}": 1 for number in range(jobs)}
    assert len(sent) < jobs / 2  # of the two that each would take alone
    assert most_threads < 10
    assert proxy.accepted == 1


def test_what_others_have_run_is_not_claimed_one_by_one(
    make_waiting: Callable[..., Replica], database_url: str, proxy: Proxy
) -> None:
    one = make_waiting(database_url, 100)
    two = make_waiting(proxy.url, 120, max_workers=1)
    let_all_be_due([one])
    eventually(lambda: outcomes([one])[EVENT_TASK_LOCK_RELEASED] == 100)
    sent = counted(proxy)
    let_all_be_due([two])
    eventually(lambda: outcomes([two])[EVENT_TASK_LOCK_RELEASED] == 20)
    eventually(lambda: outcomes([two])[EVENT_TASK_LOCK_REFUSED] == 100)
    two.idle()
    assert ran([two]) == {f"job {number}": 1 for number in range(100, 120)}
    refused = [event for event in two.events if event.code == EVENT_TASK_LOCK_REFUSED]
    assert {(event.reason, event.holder) for event in refused} == {
        ("window", one.executor.user.replica_id)
    }
    assert len(sent) < 100  # of which 40 claim and release what has to be run


def test_a_window_that_was_opened_while_the_workers_were_busy_is_run(
    make_waiting: Callable[..., Replica], database_url: str, connection: psycopg.Connection[Any]
) -> None:
    """Nothing is known of a window before a worker is free for it."""
    one = make_waiting(database_url, 40)
    two = make_waiting(database_url, 40, max_workers=1)
    let_all_be_due([one])
    eventually(lambda: outcomes([one])[EVENT_TASK_LOCK_RELEASED] == 40)
    busy, done = threading.Event(), threading.Event()

    def occupy() -> None:
        busy.set()
        assert done.wait(60)

    # By their ids, APScheduler submits it first, and "job 9" last, which the first ask does not
    # reach. If it came later, slow submissions could make asks so long that one has both.
    later = datetime.now(timezone.utc) + NEXT_HOUR
    two.scheduler.add_job(occupy, "interval", hours=1, id="a job", next_run_time=later)
    let_all_be_due([two])
    assert busy.wait(60)
    connection.execute(
        "UPDATE task_lock SET window_until = window_start - interval '1 s'"
        " WHERE task_name = 'job 9'"
    )
    done.set()
    eventually(lambda: outcomes([two])[EVENT_TASK_LOCK_RELEASED] == 2)
    assert ran([two]) == {"a job": 1, "job 9": 1}


def test_tasks_that_are_paused_keep_no_worker_from_other_jobs(
    make_waiting: Callable[..., Replica], connection: psycopg.Connection[Any], proxy: Proxy
) -> None:
    """They are refused together, and never given to the worker."""
    one = make_waiting(proxy.url, 30, max_workers=1)
    let_all_be_due([one])
    eventually(lambda: outcomes([one])[EVENT_TASK_LOCK_RELEASED] == 30)
    one.events.clear()
    # By their ids, APScheduler submits "job 9" last.
    connection.execute(
        "UPDATE task_lock SET window_until = 'epoch',"
        " paused_at = CASE WHEN task_name <> 'job 9' THEN now() END"
    )
    sent = counted(proxy)
    let_all_be_due([one])
    eventually(lambda: outcomes([one])[EVENT_TASK_LOCK_REFUSED] == 29)
    eventually(lambda: outcomes([one])[EVENT_TASK_LOCK_RELEASED] == 1)
    assert ran([one]) == {"job 9": 1}
    assert len(sent) < 29


def test_a_trigger_that_fails_in_a_burst_is_no_other_jobs_failure(
    make_waiting: Callable[..., Replica], database_url: str
) -> None:
    one = make_waiting(database_url, 40)
    two = make_waiting(database_url, 50, max_workers=1)
    let_all_be_due([one])
    eventually(lambda: outcomes([one])[EVENT_TASK_LOCK_RELEASED] == 40)
    later = datetime.now(timezone.utc) + NEXT_HOUR
    two.scheduler.add_job(function, FailingTrigger(), id="job 9x", next_run_time=later)
    let_all_be_due([two])
    eventually(lambda: outcomes([two])[EVENT_TASK_LOCK_REFUSED] == 40)
    eventually(lambda: sum(ran([two]).values()) == 10)
    eventually(lambda: outcomes([two])[EVENT_JOB_ERROR] >= 1)
    two.idle()
    assert ran([two]) == {f"job {number}": 1 for number in range(40, 50)}
    assert {e.job_id for e in two.events if e.code == EVENT_JOB_ERROR} == {"job 9x"}


def test_of_coroutines_whose_claims_fail_in_an_outage_none_is_skipped_when_it_is_over(
    make_waiting: Callable[..., Replica], proxy: Proxy
) -> None:
    """They are asked for together again, and not by one thread for each."""
    jobs = 600
    one = make_waiting(proxy.url, jobs, AsyncIO(), claim_timeout=12)
    proxy.accepting = False
    proxy.cut_all()
    let_all_be_due([one])
    eventually(lambda: one.executor.health().degraded)
    begun = time.monotonic()
    eventually(lambda: time.monotonic() > begun + 7)
    proxy.accepting = True
    eventually(lambda: outcomes([one])[EVENT_JOB_EXECUTED] == jobs)
    one.idle()
    assert ran([one]) == {f"job {number}": 1 for number in range(jobs)}


def test_rows_that_stay_locked_hold_up_no_other_coroutines_claim(
    make_waiting: Callable[..., Replica], database_url: str, connection: psycopg.Connection[Any]
) -> None:
    one = make_waiting(database_url, 40, AsyncIO(), claim_timeout=60)
    eventually(lambda: connection.execute("SELECT FROM task_lock").rowcount == 40)  # registered
    lock = "SELECT FROM task_lock WHERE task_name = ANY(%s) FOR UPDATE"
    # As APScheduler submits them: the first ones stay locked.
    names = sorted(f"job {number}" for number in range(40))[:20]
    with psycopg.connect(database_url) as longer:
        longer.execute(lock, [names[:10]])
        with psycopg.connect(database_url) as shorter:
            shorter.execute(lock, [names[10:]])
            let_all_be_due([one])
            eventually(lambda: outcomes([one])[EVENT_JOB_EXECUTED] == 20)
            begun = time.monotonic()
            eventually(lambda: time.monotonic() > begun + 1.5)  # each is asked for several times
        eventually(lambda: outcomes([one])[EVENT_JOB_EXECUTED] == 30, 30)
    eventually(lambda: outcomes([one])[EVENT_JOB_EXECUTED] == 40)
