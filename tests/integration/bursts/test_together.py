"""Claims and releases that travel together: what is promised of one holds for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy.engine import make_url

from apscheduler_tasklock import TaskLockDatabaseError, TaskLockError, TaskLocks, upgrade
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock.lock import HeldLock
from tests.support.claims import AHEAD, LaterThan, claim, die, held, row
from tests.support.commands import PATIENT
from tests.support.internals import waiting_in
from tests.support.polling import eventually
from tests.support.proxy import Proxy, counted, proxy_to
from tests.support.schedulers import Replica
from tests.support.waist import (
    LockClient,
    Message,
    Refusal,
    RerunRequest,
    Retire,
    ShortenHistory,
    SignOfLife,
    retry_of,
    takeover_of,
)

MakeLocks = Callable[..., LockClient]
Connection = psycopg.Connection[Any]

# Of a replica that only connects once a slow machine lets it, and that nobody disturbs.
WITH_PATIENCE: dict[str, Any] = {"claim_timeout": 180, "timings": PATIENT}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


@contextmanager
def in_use(locks: LockClient, pool: ThreadPoolExecutor) -> Iterator[None]:
    """Keep the connection in use, so that requests wait."""
    has_it, go_on = threading.Event(), threading.Event()

    def hold(_cursor: Any) -> None:
        has_it.set()
        assert go_on.wait(60)

    holding = pool.submit(locks.ask, hold)
    assert has_it.wait(60)
    try:
        yield
    finally:
        go_on.set()
        holding.result(60)


def together(
    locks: LockClient, pool: ThreadPoolExecutor, calls: Sequence[Callable[[], Any]]
) -> list[Future[Any]]:
    """Make calls whose requests are sent in one statement, if they are of one kind."""
    with in_use(locks, pool):
        asked = []
        for number, call in enumerate(calls):
            asked.append(pool.submit(call))
            eventually(lambda number=number: waiting_in(locks.thread) == number + 1)
    return asked


def claims(locks: LockClient, tasks: Sequence[str], **wanted: Any) -> list[Callable[[], Any]]:
    return [lambda task=task: claim(locks, task, **wanted) for task in tasks]


def results(asked: Sequence[Future[Any]]) -> list[Any]:
    return [each.result(60) for each in asked]


TASKS = [f"task {number}" for number in range(20)]


def test_what_waits_is_claimed_in_one_statement_and_released_in_one(
    make_locks: MakeLocks,
    proxy: Proxy,
    pool: ThreadPoolExecutor,
    known_task: Callable[[str], None],
    connection: psycopg.Connection[Any],
) -> None:
    locks = make_locks(proxy.url, **WITH_PATIENCE)
    locks.check()
    for _ in range(2):  # what comes a second time is prepared
        others = results(together(locks, pool, claims(locks, ["one", "other"])))
        results(together(locks, pool, [partial(locks.release, lock) for lock in others]))
        connection.execute("UPDATE task_lock SET window_start = 'epoch', window_until = 'epoch'")
    for task in TASKS:
        known_task(task)
    sent = counted(proxy)
    granted = results(together(locks, pool, claims(locks, TASKS)))
    assert [lock.name for lock in granted] == TASKS
    assert len(sent) == 1
    refused = results(together(locks, pool, claims(locks, TASKS)))
    assert all(isinstance(refusal, Refusal) for refusal in refused)
    assert len(sent) == 2
    releases = [lambda lock=lock: locks.release(lock) for lock in granted]
    assert all(results(together(locks, pool, releases)))
    assert len(sent) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("ending", [WindowAfter.KEEP, WindowAfter.HAND_OVER])
def test_releases_that_an_outage_held_up_arrive_in_one_statement(
    make_locks: MakeLocks,
    proxy: Proxy,
    pool: ThreadPoolExecutor,
    connection: psycopg.Connection[Any],
    ending: WindowAfter,
) -> None:
    """Else hundreds arrive after others have taken their claims for those of dead holders."""
    # None is sent before the close, when all of them are pending.
    locks = make_locks(proxy.url, timings=Timings(release_interval=3600))
    granted = results(together(locks, pool, claims(locks, TASKS)))
    proxy.accepting = False
    proxy.cut_all()
    for lock in granted:
        with pytest.raises(TaskLockDatabaseError):
            locks.release(lock, RunOutcome(ending))
    sent = counted(proxy)
    proxy.accepting = True
    locks.close()
    left = "SELECT FROM task_lock WHERE finished_at IS NULL AND NOT handed_over"
    assert connection.execute(left).rowcount == 0
    releases = [data for data in sent if b"UPDATE" in data and b"emit_message" not in data]
    assert len(releases) == 1


def dead_ones(
    make_locks: MakeLocks, connection: Connection, pool: ThreadPoolExecutor, tasks: Sequence[str]
) -> list[RerunRequest]:
    """Let a holder of all these tasks die; return what takes them over."""
    dying = make_locks(replica_id="dying")
    dead = results(together(dying, pool, claims(dying, tasks, runs="app:job", failover=True)))
    for lock in dead:
        die(dying, lock)
    connection.execute("UPDATE task_lock SET locked_until = now()")
    return [takeover_of(lock.name, lock.claim_id, "dying", lease=600) for lock in dead]


def failed_ones(
    make_locks: MakeLocks, _connection: Connection, pool: ThreadPoolExecutor, tasks: Sequence[str]
) -> list[RerunRequest]:
    """Let a run of each of these tasks fail; return what runs them again."""
    failing = make_locks(replica_id="failing")
    failed = results(together(failing, pool, claims(failing, tasks, runs="app:job")))
    for lock in failed:
        failing.release(lock, RunOutcome(outcome="error", retry_in=0.0))
    return [retry_of(lock.name, lock.claim_id, 600.0, 600.0) for lock in failed]


@pytest.mark.parametrize("token", [2**63 - 2, 2**63 - 1])
@pytest.mark.parametrize("kind", ["claims", "takeovers", "retries"])
def test_a_token_that_cannot_grow_rejects_its_task_alone(
    make_locks: MakeLocks,
    pool: ThreadPoolExecutor,
    known_task: Callable[[str], None],
    connection: Connection,
    kind: str,
    token: int,
) -> None:
    locks = make_locks()
    locks.check()
    locks.outage.believe()
    if kind == "claims":
        for task in TASKS[:5]:
            known_task(task)
        calls = claims(locks, TASKS[:5])
    else:
        make = dead_ones if kind == "takeovers" else failed_ones
        again = make(make_locks, connection, pool, TASKS[:5])
        calls = [lambda each=each: locks.claim(each) for each in again]
    connection.execute("UPDATE task_lock SET token = %s WHERE task_name = %s", [token, TASKS[2]])
    asked = together(locks, pool, calls)
    assert "rejects this: bigint out of range" in str(asked.pop(2).exception(60))
    granted = results(asked)
    assert [lock.name for lock in granted] == [TASKS[0], TASKS[1], TASKS[3], TASKS[4]]
    assert row(connection, TASKS[2])["token"] == token
    for lock in granted:
        locks.release(lock)


def test_dead_runs_are_taken_over_in_one_statement_and_handed_over_in_one(
    make_locks: MakeLocks, proxy: Proxy, pool: ThreadPoolExecutor, connection: Connection
) -> None:
    takeovers = dead_ones(make_locks, connection, pool, TASKS)
    locks = make_locks(proxy.url, **WITH_PATIENCE)
    locks.check()
    locks.outage.believe()
    sent = counted(proxy)
    calls = [lambda takeover=takeover: locks.claim(takeover) for takeover in takeovers]
    taken = results(together(locks, pool, calls))
    assert [lock.token for lock in taken] == [row(connection, task)["token"] for task in TASKS]
    assert all(lock.is_takeover for lock in taken)
    assert len(sent) == 1
    ends = [
        lambda lock=lock: locks.release(lock, RunOutcome(WindowAfter.HAND_OVER))
        for lock in taken[1:]
    ]
    # One that is released travels with them.
    assert all(results(together(locks, pool, [*ends, lambda: locks.release(taken[0])])))
    assert len(sent) == 2
    assert [row(connection, task)["handed_over"] for task in TASKS] == [False] + [True] * 19
    assert row(connection, TASKS[0])["finished_at"] is not None


def test_a_takeover_whose_row_is_locked_is_asked_again_and_the_others_go_through(
    make_locks: MakeLocks, pool: ThreadPoolExecutor, connection: Connection, database_url: str
) -> None:
    takeovers = dead_ones(make_locks, connection, pool, TASKS[:3])
    locks = make_locks()
    locks.outage.believe()
    calls = [lambda takeover=takeover: locks.claim(takeover) for takeover in takeovers]
    with psycopg.connect(database_url) as other:
        other.execute("SELECT FROM task_lock WHERE task_name = %s FOR UPDATE", [TASKS[1]])
        asked = together(locks, pool, calls)
        assert isinstance(asked[0].result(60), HeldLock)
        assert isinstance(asked[2].result(60), HeldLock)
        assert not asked[1].done()
        other.rollback()
        assert isinstance(asked[1].result(60), HeldLock)
    for lock in results(asked):
        locks.release(lock)


def test_replicas_that_take_the_same_runs_over_together_share_them(
    make_locks: MakeLocks, pool: ThreadPoolExecutor, connection: Connection
) -> None:
    takeovers = dead_ones(make_locks, connection, pool, TASKS)
    start = threading.Barrier(2)

    def race(
        locks: LockClient, requests: Sequence[RerunRequest]
    ) -> list[tuple[LockClient, HeldLock]]:
        calls = [
            lambda each=each: locks.claim(replace(each, claim_id=uuid4())) for each in requests
        ]
        start.wait(60)
        with ThreadPoolExecutor(len(calls) + 1) as own:
            taken = results(together(locks, own, calls))
        return [(locks, each) for each in taken if isinstance(each, HeldLock)]

    orders = [takeovers, takeovers[::-1]]
    replicas = [make_locks(replica_id=f"replica {number}") for number in range(2)]
    for replica in replicas:
        replica.outage.believe()
    racing = [pool.submit(race, *each) for each in zip(replicas, orders, strict=True)]
    taken = [each for raced in results(racing) for each in raced]
    assert sorted(lock.name for _, lock in taken) == sorted(TASKS)
    for locks, lock in taken:
        assert locks.release(lock)


def test_first_claims_of_tasks_take_one_statement_more(
    make_locks: MakeLocks, proxy: Proxy, pool: ThreadPoolExecutor
) -> None:
    locks = make_locks(proxy.url, **WITH_PATIENCE)
    locks.check()
    sent = counted(proxy)
    granted = results(together(locks, pool, claims(locks, TASKS)))
    assert all(isinstance(lock, HeldLock) for lock in granted)
    assert len(sent) == 2


def test_replicas_that_claim_the_same_tasks_together_share_them(
    make_locks: MakeLocks, pool: ThreadPoolExecutor
) -> None:
    replicas = [make_locks(replica_id=f"replica {number}") for number in range(3)]
    for replica in replicas:
        replica.check()
    for names in (TASKS, TASKS[::-1]):  # first claims, and then claims of rows
        start = threading.Barrier(len(replicas))

        def race(locks: LockClient, tasks: list[str], start: Any = start) -> list[Any]:
            start.wait(60)
            with ThreadPoolExecutor(len(tasks) + 1) as own:
                return results(
                    together(locks, own, claims(locks, tasks, min_lock=0.0, max_lock=60.0))
                )

        orders = [names, names[::-1], names]
        races = [
            pool.submit(race, locks, order) for locks, order in zip(replicas, orders, strict=True)
        ]
        granted = [
            (locks, result)
            for locks, raced in zip(replicas, results(races), strict=True)
            for result in raced
            if isinstance(result, HeldLock)
        ]
        assert sorted(lock.name for _, lock in granted) == sorted(TASKS)
        for locks, lock in granted:
            assert locks.release(lock)


class TestLostAnswers:
    @pytest.mark.parametrize("known", [True, False])
    def test_each_claim_is_granted_once(
        self,
        make_locks: MakeLocks,
        proxy: Proxy,
        pool: ThreadPoolExecutor,
        connection: Connection,
        known_task: Callable[[str], None],
        known: bool,
    ) -> None:
        locks = make_locks(proxy.url, **WITH_PATIENCE)
        locks.check()
        for task in TASKS if known else ():
            known_task(task)
        cut = threading.Event()

        def cut_once(data: bytes) -> bytes | None:
            if cut.is_set():
                return data
            cut.set()
            return None

        with in_use(locks, pool):
            asked = [pool.submit(call) for call in claims(locks, TASKS)]
            eventually(lambda: waiting_in(locks.thread) == len(TASKS))
            proxy.to_client = cut_once
        granted = results(asked)
        assert cut.is_set()
        assert all(isinstance(lock, HeldLock) for lock in granted)
        for lock in granted:
            assert row(connection, lock.name)["token"] == lock.token
            assert not known or lock.token == AHEAD + 1

    @pytest.mark.nightly
    def test_a_claim_that_is_given_up_is_ended_and_so_is_each_that_travelled_with_it(
        self,
        make_locks: MakeLocks,
        proxy: Proxy,
        pool: ThreadPoolExecutor,
        connection: Connection,
        known_task: Callable[[str], None],
    ) -> None:
        locks = make_locks(proxy.url, claim_timeout=0.5)
        locks.check()
        for task in TASKS[:5]:
            known_task(task)
        with in_use(locks, pool):
            asked = [pool.submit(call) for call in claims(locks, TASKS[:5], runs="app:job")]
            eventually(lambda: waiting_in(locks.thread) == 5)
            proxy.to_client = lambda _data: None  # no answer gets through any more
        assert all(isinstance(each.exception(60), TaskLockError) for each in asked)
        assert {row(connection, task)["token"] for task in TASKS[:5]} == {AHEAD + 1}
        proxy.to_client = lambda data: data
        eventually(lambda: all(row(connection, task)["handed_over"] for task in TASKS[:5]))


class TestLockedRows:
    def test_one_is_passed_over_and_keeps_nobody_waiting(
        self,
        make_locks: MakeLocks,
        pool: ThreadPoolExecutor,
        direct_url: str,
        known_task: Callable[[str], None],
    ) -> None:
        locks = make_locks()
        for task in TASKS:
            known_task(task)
        with psycopg.connect(direct_url) as other:
            other.execute("SELECT FROM task_lock WHERE task_name = %s FOR UPDATE", [TASKS[7]])
            asked = together(locks, pool, claims(locks, TASKS))
            free = results(asked[:7] + asked[8:])
            assert all(isinstance(lock, HeldLock) for lock in free)
            assert not asked[7].done()
        assert isinstance(asked[7].result(60), HeldLock)
        assert locks.outage.reason is None

    def test_a_release_of_one_is_sent_again(
        self, make_locks: MakeLocks, pool: ThreadPoolExecutor, direct_url: str
    ) -> None:
        locks = make_locks(timings=replace(PATIENT, release_timeout=60))
        granted = [held(locks, task) for task in TASKS[:5]]
        with psycopg.connect(direct_url) as other:
            other.execute("SELECT FROM task_lock WHERE task_name = %s FOR UPDATE", [TASKS[2]])
            asked = together(
                locks, pool, [lambda lock=lock: locks.release(lock) for lock in granted]
            )
            assert all(results(asked[:2] + asked[3:]))
            assert not asked[2].done()
        assert asked[2].result(60)


# The second name has a character that the database's encoding lacks.
LATIN_TASKS = ["one", "\N{RIGHTWARDS ARROW}", "two"]


@pytest.fixture(params=["latin1", "utf8"])
def latin_proxy(
    request: pytest.FixtureRequest, database_url: str, connection: Connection
) -> Iterator[Proxy]:
    """Give a database in LATIN1, to clients in that encoding or another one."""
    name = f"latin_{uuid4().hex[:8]}"
    connection.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    url = make_url(database_url).set(database=name)
    url = url.update_query_dict({"client_encoding": request.param})
    rendered = url.render_as_string(hide_password=False)
    try:
        upgrade(rendered)
        with proxy_to(rendered) as proxy:
            yield proxy
    finally:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def latin(latin_proxy: Proxy, make_locks: MakeLocks) -> Iterator[LockClient]:
    """Give the locks of a database in LATIN1."""
    locks = make_locks(latin_proxy.url, **WITH_PATIENCE)
    yield locks
    locks.close()


def test_a_name_that_the_encoding_lacks_is_in_no_statement(
    latin: LockClient, latin_proxy: Proxy, pool: ThreadPoolExecutor
) -> None:
    asked = together(latin, pool, claims(latin, LATIN_TASKS))  # which connects
    for each in (asked[0], asked[2]):
        latin.release(each.result(60))
    sent = counted(latin_proxy)
    asked = together(latin, pool, claims(latin, LATIN_TASKS))
    assert all(isinstance(asked[number].result(60), Refusal) for number in (0, 2))
    with pytest.raises(TaskLockError, match="the encoding LATIN1 of the database lacks"):
        asked[1].result(60)
    with pytest.raises(TaskLockError, match="the encoding LATIN1 of the database lacks"):
        held(latin, LATIN_TASKS[1])
    assert len(sent) == 1
    latin.ask(latin.reading(LATIN_TASKS, LATIN_TASKS))
    assert len(sent) == 2, sent[1:]
    sign = SignOfLife("host", "1", LATIN_TASKS, rejected=[f"no {LATIN_TASKS[1]}"])
    latin.ask(latin.carrying_out(sign))
    assert len(sent) == 3


@pytest.mark.parametrize("message", [Retire(LATIN_TASKS, LATIN_TASKS), ShortenHistory(LATIN_TASKS)])
def test_a_name_that_the_encoding_lacks_does_not_keep_a_replica_from_cleaning_up(
    latin: LockClient, message: Message[int]
) -> None:
    assert latin.ask(latin.carrying_out(message)) == 0


def test_a_job_whose_name_the_encoding_lacks_is_told_once_and_the_others_run(
    latin_proxy: Proxy, make_replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica(latin_proxy.url, start=False)
    for task in LATIN_TASKS:
        replica.scheduler.add_job(print, "interval", seconds=1, id=task, args=[task])
    replica.start()
    for task in ("one", "two"):
        eventually(lambda task=task: len(replica.of(task)) >= 4)
    replica.shutdown()
    told = [record for record in caplog.records if "A job will not run" in record.getMessage()]
    assert [record.levelname for record in told] == ["ERROR"]
    with closing(TaskLocks(latin_proxy.url)) as operator:
        assert sorted(task.name for task in operator.tasks()) == ["one", "two"]
        [found] = operator.replicas()
    assert (sorted(found.tasks), found.rejected) == (["one", "two"], ())


def test_one_tasks_mistake_is_its_own(latin: LockClient, pool: ThreadPoolExecutor) -> None:
    asked = together(latin, pool, claims(latin, LATIN_TASKS))
    assert isinstance(asked[0].result(60), HeldLock)
    assert isinstance(asked[2].result(60), HeldLock)
    with pytest.raises(TaskLockError, match="LATIN1"):
        asked[1].result(60)
    assert latin.outage.reason is None
    for each in (asked[0], asked[2]):
        latin.release(each.result())


def test_one_tasks_mistake_does_not_hide_the_dead_runs_of_others(latin: LockClient) -> None:
    lock = held(latin, "two")
    for always in (["two"], LATIN_TASKS):
        assert [state.task_name for state in latin.ask(latin.reading(LATIN_TASKS, always))] == [
            "two"
        ]
    assert latin.ask(latin.reading(LATIN_TASKS, LATIN_TASKS[:2])) == []
    latin.release(lock)


def test_a_claim_that_was_lost_is_told_so_and_the_others_are_released(
    make_locks: MakeLocks, pool: ThreadPoolExecutor, connection: Connection
) -> None:
    locks = make_locks()
    granted = [held(locks, task) for task in TASKS[:5]]
    connection.execute(
        "UPDATE task_lock SET claim_id = gen_random_uuid() WHERE task_name = %s", [TASKS[2]]
    )
    asked = together(locks, pool, [lambda lock=lock: locks.release(lock) for lock in granted])
    assert [bool(answer) for answer in results(asked)] == [True, True, False, True, True]


def test_a_pending_release_goes_before_the_next_claim_of_its_task(
    make_locks: MakeLocks, proxy: Proxy, pool: ThreadPoolExecutor
) -> None:
    patient = {"claim_timeout": 180, "timings": replace(PATIENT, release_interval=3600)}
    locks = make_locks(proxy.url, **patient)
    granted = [held(locks, task, min_lock=0.0) for task in TASKS[:5]]
    for lock in granted[1:]:
        locks.release(lock)
    proxy.accepting = False
    proxy.cut_all()
    with pytest.raises(TaskLockError):
        locks.release(granted[0])
    proxy.accepting = True
    asked = together(locks, pool, claims(locks, TASKS[:5], min_lock=0.0))
    assert [lock.token for lock in results(asked)] == [LaterThan(lock.token) for lock in granted]


@pytest.mark.nightly
@pytest.mark.direct("it reads what the server has written")
def test_a_batch_that_is_refused_writes_nothing(
    make_locks: MakeLocks, pool: ThreadPoolExecutor, connection: Connection
) -> None:
    locks, loser = make_locks(), make_locks(replica_id="loser")
    for task in TASKS:
        held(locks, task, min_lock=3600, max_lock=7200)
    connection.execute("CHECKPOINT")

    def written() -> int:
        query = "SELECT pg_current_wal_insert_lsn() - '0/0'"
        before = connection.execute(query).fetchone()
        for _ in range(3):
            refused = results(together(loser, pool, claims(loser, TASKS)))
            assert all(isinstance(refusal, Refusal) for refusal in refused)
        after = connection.execute(query).fetchone()
        assert before is not None
        assert after is not None
        return int(after[0] - before[0])

    # The server's own processes write now and then; refused batches would write every time.
    eventually(lambda: written() == 0)
