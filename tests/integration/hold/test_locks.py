"""LockClient on a real server: races, retries, lost answers, and releases that are pending."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import AssertionPool, Pool, SingletonThreadPool, StaticPool

from apscheduler_tasklock._database.thread import ReplicaThread
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
)
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.locks import TaskLocks
from tests.support.claims import AHEAD, claim, die, held, pids, row
from tests.support.commands import PATIENT
from tests.support.polling import eventually
from tests.support.proxy import Proxy, pass_on
from tests.support.waist import LockClient, Refusal, takeover_of

MakeLocks = Callable[..., LockClient]
KnownTask = Callable[[str], None]


def backends(connection: psycopg.Connection[Any]) -> int:
    """Count the server's connections from the library."""
    return len(pids(connection))


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


class TestClaim:
    @pytest.mark.parametrize("exists", [False, True])
    def test_of_many_at_the_same_instant_one_is_granted_and_all_others_know_by_whom(
        self, make_locks: MakeLocks, exists: bool
    ) -> None:
        replicas = [make_locks(replica_id=f"replica {number}") for number in range(12)]
        barrier = threading.Barrier(len(replicas))

        def race(locks: LockClient, task: str) -> HeldLock | Refusal:
            barrier.wait(30)
            return claim(locks, task, min_lock=0.0 if exists else 9.0)

        with ThreadPoolExecutor(len(replicas)) as pool:
            for task in (f"task {number}" for number in range(20)):
                if exists:
                    replicas[0].release(held(replicas[0], task, min_lock=0.0))
                claimed = list(pool.map(race, replicas, [task] * len(replicas)))
                winners = [
                    locks.replica_id
                    for locks, result in zip(replicas, claimed, strict=True)
                    if isinstance(result, HeldLock)
                ]
                refusals = [result for result in claimed if isinstance(result, Refusal)]
                assert len(winners) == 1
                assert {(refusal.holder, refusal.reason) for refusal in refusals} == {
                    (winners[0], "running")
                }

    @pytest.mark.parametrize(
        "setting",
        [
            "default_transaction_isolation = 'serializable'",
            "timezone = 'America/Los_Angeles'",
        ],
    )
    def test_is_decided_alike_whatever_the_database_is_set_to(
        self,
        make_locks: MakeLocks,
        connection: psycopg.Connection[Any],
        setting: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        connection.execute(f'ALTER DATABASE "{connection.info.dbname}" SET {setting}')
        patient = {"claim_timeout": 180, "timings": PATIENT}
        replicas = [make_locks(replica_id=f"replica {number}", **patient) for number in range(6)]
        barrier = threading.Barrier(len(replicas))

        def race(locks: LockClient, run_time: datetime) -> HeldLock | Refusal:
            barrier.wait(30)
            return claim(locks, run_time=run_time)

        token = 0
        with ThreadPoolExecutor(len(replicas)) as pool:
            for number in range(10):
                # Each run time is a new window, and all of them have long begun.
                ago = timedelta(seconds=10 * (10 - number))
                run_times = [datetime.now(timezone.utc) - ago] * len(replicas)
                claimed = list(pool.map(race, replicas, run_times))
                (won,) = (result for result in claimed if isinstance(result, HeldLock))
                assert won.token > token
                token = won.token
                left = (won.locked_until - datetime.now(timezone.utc)).total_seconds()
                assert 570 < left <= 600.5
                assert replicas[0].release(won)
        assert not caplog.records

    def test_says_why_it_was_refused(self, make_locks: MakeLocks) -> None:
        one, other = make_locks(replica_id="one"), make_locks(replica_id="other")
        lock = held(one)
        running = claim(other)
        one.release(lock)
        window = claim(other)
        assert isinstance(running, Refusal)
        assert isinstance(window, Refusal)
        assert (running.holder, running.reason, running.token) == ("one", "running", lock.token)
        assert (window.holder, window.reason, window.token) == ("one", "window", lock.token)
        assert running.locked_until == lock.locked_until

    def test_that_is_refused_or_given_up_leaves_nothing_in_use(
        self, make_locks: MakeLocks, proxy: Proxy
    ) -> None:
        one, other = make_locks(), make_locks()
        cut_off = make_locks(proxy.url, claim_timeout=1)
        lock = held(one)
        assert isinstance(claim(other), Refusal)
        proxy.accepting = False
        proxy.cut_all()
        with pytest.raises(TaskLockDatabaseError):
            claim(cut_off)
        assert other.what_runs() == cut_off.what_runs() == []
        assert [run.task for run in one.what_runs()] == ["task"]
        one.release(lock)
        one.release(lock)  # does no harm
        assert one.what_runs() == []

    def test_one_thousand_refused_write_no_wal_and_take_no_transaction_id(
        self, make_locks: MakeLocks, connection: psycopg.Connection[Any]
    ) -> None:
        locks, loser = make_locks(), make_locks(replica_id="loser")
        times = {"min_lock": 3600, "max_lock": 7200}  # longer than a busy machine takes for this
        locks.release(held(locks, **times))
        held(locks, "running", **times)
        connection.execute("CHECKPOINT")

        def written() -> tuple[int, int]:
            before = _wal_and_transaction_ids(connection)
            for _ in range(500):
                assert isinstance(claim(loser, **times), Refusal)
                assert isinstance(claim(loser, "running", **times), Refusal)
            after = _wal_and_transaction_ids(connection)
            return after[0] - before[0], after[1] - before[1]

        # The server's own processes write now and then; refused claims would write every time.
        rounds = []
        while (0, 0) not in rounds:
            rounds.append(written())
            assert len(rounds) < 5, rounds

    def test_is_one_statement_and_a_release_one_more(
        self, make_locks: MakeLocks, proxy: Proxy, known_task: KnownTask
    ) -> None:
        sent: list[bytes] = []

        def count(data: bytes) -> bytes:
            if data.endswith(b"S\x00\x00\x00\x04"):  # Sync: the statement is whole
                sent.append(data)
            return data

        locks = make_locks(proxy.url)
        for name in ("connects", "prepares"):  # what comes a second time
            lock = held(locks, name)
            assert isinstance(claim(locks, name), Refusal)
            locks.release(lock)
        known_task("task")
        proxy.to_server = count
        lock = held(locks)
        assert len(sent) == 1, sent
        assert isinstance(claim(locks), Refusal)
        assert len(sent) == 2
        locks.release(lock)
        assert len(sent) == 3

    @pytest.mark.direct("it counts the library's connections in the server")
    def test_holds_no_connection_while_a_job_runs_and_keeps_one_idle(
        self, make_locks: MakeLocks, connection: psycopg.Connection[Any]
    ) -> None:
        locks = make_locks()
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(lambda task: held(locks, f"task {task}"), range(100)))
        assert eventually(lambda: backends(connection) == 1)
        locks.close()
        assert eventually(lambda: backends(connection) == 0)

    def test_opens_one_connection_however_many_claim(
        self, make_locks: MakeLocks, proxy: Proxy
    ) -> None:
        go_on = threading.Event()
        timings = Timings(longest_answer=60.0)  # longer than the first answer is held up
        locks = make_locks(proxy.url, claim_timeout=180, timings=timings)
        proxy.to_client = lambda data: data if go_on.wait(60) else None
        with ThreadPoolExecutor(20) as pool:
            asked = [pool.submit(held, locks, f"task {number}") for number in range(20)]
            eventually(lambda: proxy.accepted == 1)
            go_on.set()
            assert {claim.result(60).name for claim in asked} == {
                f"task {number}" for number in range(20)
            }
        assert proxy.accepted == 1


class TestALongClaimTimeout:
    @pytest.mark.nightly
    def test_lets_a_dead_connection_keep_nothing_waiting(
        self, make_locks: MakeLocks, proxy: Proxy
    ) -> None:
        """As where a firewall forgets it: the next one is answered."""
        locks = make_locks(proxy.url, claim_timeout=600)
        lock = held(locks, max_lock=600, lease=60)
        dead, renewed = proxy.accepted, lock.locked_until
        proxy.tap = lambda number, _to_server, data: data if number > dead else b""
        with ThreadPoolExecutor(1) as pool:
            claiming = pool.submit(held, locks, "other")
            try:
                other = claiming.result(60)
            except BaseException:
                locks.stop_claiming()
                raise
        assert eventually(lambda: locks.renew_now(lock))
        assert lock.locked_until > renewed
        assert [locks.release(each) is None for each in (lock, other)] == [False, False]

    def test_is_how_long_it_may_take_until_a_claim_has_its_turn(
        self, make_locks: MakeLocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        locks = make_locks(claim_timeout=600)
        sent: list[Any] = []
        get = ReplicaThread.get
        monkeypatch.setattr(
            ReplicaThread, "get", lambda self, asked: sent.append(asked) or get(self, asked)
        )
        held(locks)
        assert sent[0].turn_until >= sent[0].tried_until


class TestLostAnswers:
    def test_a_claim_whose_answer_was_lost_is_granted_when_asked_again(
        self,
        make_locks: MakeLocks,
        proxy: Proxy,
        connection: psycopg.Connection[Any],
        known_task: KnownTask,
    ) -> None:
        locks = make_locks(proxy.url)
        held(locks, "connects")
        known_task("task")
        cut = _cut_once(proxy)

        lock = held(locks)

        assert cut.is_set()
        assert lock.token == AHEAD + 1
        assert locks.release(lock) is not None
        assert row(connection, "task")["finished_at"] is not None

    def test_a_release_whose_answer_was_lost_is_sent_again_at_once(
        self,
        make_locks: MakeLocks,
        proxy: Proxy,
        connection: psycopg.Connection[Any],
    ) -> None:
        locks = make_locks(proxy.url, timings=Timings(release_timeout=60.0))
        lock = held(locks)
        cut = _cut_once(proxy)
        assert locks.release(lock) is not None
        assert cut.is_set()
        assert row(connection, "task")["finished_at"] is not None

    def test_a_release_that_cannot_be_sent_is_pending_and_arrives_later(
        self, make_locks: MakeLocks, proxy: Proxy, connection: psycopg.Connection[Any]
    ) -> None:
        locks = make_locks(proxy.url)
        lock = held(locks)
        proxy.accepting = False
        proxy.cut_all()
        with pytest.raises(TaskLockDatabaseError):
            locks.release(lock)
        assert row(connection, "task")["finished_at"] is None
        proxy.accepting = True
        eventually(lambda: row(connection, "task")["finished_at"])

    @pytest.mark.usefixtures("unhurried_stop")
    @pytest.mark.parametrize("locked", [1, 3])
    @pytest.mark.parametrize("then", ["goes on", "stops claiming", "closes"])
    def test_an_owed_release_does_not_wait_for_one_whose_row_is_locked(
        self,
        make_locks: MakeLocks,
        proxy: Proxy,
        connection: psycopg.Connection[Any],
        direct_url: str,
        locked: int,
        then: str,
    ) -> None:
        locks = make_locks(proxy.url, timings=Timings(closing_timeout=600.0))
        names = [f"locked {number}" for number in range(locked)]
        of_both = [held(locks, task) for task in (*names, "free")]
        proxy.accepting = False
        proxy.cut_all()
        for lock in of_both:
            with pytest.raises(TaskLockDatabaseError):
                locks.release(lock)
        with ThreadPoolExecutor(1) as pool, psycopg.connect(direct_url) as other:
            other.execute("SELECT FROM task_lock WHERE task_name LIKE 'locked%' FOR UPDATE")
            proxy.accepting = True
            if then == "stops claiming":
                locks.stop_claiming()
            elif then == "closes":
                pool.submit(locks.close)  # which waits for the locked ones
            eventually(lambda: row(connection, "free")["finished_at"])
            assert not any(row(connection, name)["finished_at"] for name in names)
        eventually(lambda: all(row(connection, name)["finished_at"] for name in names))

    @pytest.mark.nightly  # in simulated time: tests/simulation/test_side_rules.py::TestAnswers
    @pytest.mark.parametrize(
        ("wanted", "then"),
        [
            ({}, "open"),
            ({"keep_window_if_in_doubt": True}, "taken"),
            ({"runs": "app:job"}, "handed over"),
        ],
    )
    def test_a_claim_that_was_given_up_but_granted_is_ended_and_its_window_as_asked_for(
        self,
        make_locks: MakeLocks,
        proxy: Proxy,
        connection: psycopg.Connection[Any],
        known_task: KnownTask,
        wanted: dict[str, Any],
        then: str,
    ) -> None:
        """Of a job that then runs nowhere, it is handed over to those that were refused."""
        locks = make_locks(proxy.url, claim_timeout=8)  # enough for a server that stops for seconds
        held(locks, "connects")
        known_task("task")
        proxy.to_client = lambda _data: None  # no answer gets through any more
        now = datetime.now(timezone.utc)
        with pytest.raises(TaskLockDatabaseError, match="could not be used for"):
            claim(locks, run_time=now, min_lock=900.0, max_lock=5000.0, **wanted)
        granted = row(connection, "task")
        assert granted["token"] == AHEAD + 1
        assert not granted["over"]
        proxy.to_client = pass_on

        eventually(lambda: row(connection, "task")["over"] or then == "taken")
        if then != "handed over":
            eventually(lambda: row(connection, "task")["finished_at"])
        other = make_locks(replica_id="other")
        claimed = claim(other, run_time=now, min_lock=900.0, runs="app:job")
        if then == "handed over":
            assert row(connection, "task")["finished_at"] is None
            assert isinstance(claimed, Refusal)
            assert (claimed.reason, claimed.waits) == ("running", True)
            dead = takeover_of("task", granted["claim_id"], "replica", None, failover=True)
            claimed = other.claim(dead)
        assert isinstance(claimed, Refusal if then == "taken" else HeldLock)
        assert claimed is not None
        assert claimed.window_start == granted["window_start"] or then == "open"

    def test_a_claim_that_never_left_owes_no_release(
        self, make_locks: MakeLocks, proxy: Proxy
    ) -> None:
        proxy.accepting = False
        locks = make_locks(proxy.url, claim_timeout=0.2)
        with pytest.raises(TaskLockDatabaseError):
            claim(locks)
        assert not [t for t in threading.enumerate() if t.name == "tasklock-releases"]

    def test_a_claim_held_up_on_its_way_does_not_repeat_a_window(
        self, make_locks: MakeLocks, proxy: Proxy
    ) -> None:
        """The statement says "not late" and arrives after the window has ended."""
        window = 0.5
        slow = make_locks(proxy.url, replica_id="slow", claim_timeout=180, timings=PATIENT)
        quick = make_locks(replica_id="quick")
        slow.check()  # learns the database's clock
        held_up, go_on = threading.Event(), threading.Event()

        def hold_up(data: bytes) -> bytes:
            held_up.set()
            go_on.wait(60)
            return data

        proxy.to_server = hold_up
        run_time = datetime.now(timezone.utc)
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(claim, slow, run_time=run_time, min_lock=window, max_lock=600)
            assert held_up.wait(60)
            quick.release(held(quick, run_time=run_time, min_lock=window, max_lock=600))
            ended = run_time + timedelta(seconds=window + 0.1)
            eventually(lambda: datetime.now(timezone.utc) > ended)
            go_on.set()
            refused = late.result(60)
        assert isinstance(refused, Refusal)
        assert refused.reason == "window"


class TestClockJumps:
    """The database's clock, or the monotonic one, has jumped, and the bound is an hour behind."""

    def behind(self, locks: LockClient) -> None:
        locks.check()
        now, past = time.monotonic(), datetime.now(timezone.utc) - timedelta(hours=1)
        locks.replica.clock.learn(sent=now, answered=now, database_time=past, bound=None)

    def test_a_new_window_is_granted_all_the_same(self, make_locks: MakeLocks) -> None:
        locks = make_locks()
        now = datetime.now(timezone.utc)
        earlier = now - timedelta(minutes=20)
        locks.release(held(locks, run_time=earlier, min_lock=540, max_lock=3000))
        self.behind(locks)
        assert isinstance(claim(locks, run_time=now, min_lock=540, max_lock=3000), HeldLock)

    def test_a_dead_run_is_taken_over_when_rows_are_believed_again(
        self, make_locks: MakeLocks, connection: psycopg.Connection[Any]
    ) -> None:
        """When nobody would wait for the takeover any more is reckoned on the bound."""
        locks = make_locks(claim_timeout=180, timings=PATIENT)
        dying = make_locks(replica_id="dying")
        dead = held(dying, runs="app:job", failover=True)
        die(dying, dead)
        connection.execute("UPDATE task_lock SET locked_until = now()")
        locks.outage.believe()
        self.behind(locks)
        doubted = locks.claim(takeover_of("task", dead.claim_id, "dying"))
        assert isinstance(doubted, Refusal)  # its lease may have ended by the jump alone
        locks.outage.believe()
        taken = locks.claim(takeover_of("task", dead.claim_id, "dying"))
        assert isinstance(taken, HeldLock)
        assert taken.is_takeover

    def test_a_granted_window_is_where_it_belongs(
        self, make_locks: MakeLocks, connection: psycopg.Connection[Any]
    ) -> None:
        one, other = make_locks(), make_locks()
        for locks in (one, other):
            self.behind(locks)
        now = datetime.now(timezone.utc)
        lock = held(one, run_time=now, min_lock=540, max_lock=3000)
        age = connection.execute("SELECT now() - window_start FROM task_lock").fetchone()
        assert age is not None
        assert age[0] < timedelta(minutes=1)
        one.release(lock)
        assert isinstance(claim(other, run_time=now, min_lock=540, max_lock=3000), Refusal)

    def test_a_misplaced_grant_is_taken_back_also_if_the_connection_breaks_meanwhile(
        self, make_locks: MakeLocks, proxy: Proxy, connection: psycopg.Connection[Any]
    ) -> None:
        locks = make_locks(proxy.url)
        self.behind(locks)
        answers = 0

        def cut_the_second(data: bytes) -> bytes | None:
            nonlocal answers
            answers += 1
            return None if answers == 2 else data

        proxy.to_client = cut_the_second  # that of the release
        now = datetime.now(timezone.utc)
        assert isinstance(claim(locks, run_time=now, min_lock=540, max_lock=3000), HeldLock)
        age = connection.execute("SELECT now() - window_start FROM task_lock").fetchone()
        assert age is not None
        assert age[0] < timedelta(minutes=1)
        assert answers > 2

    def test_clocks_that_jump_with_every_answer_are_an_error(self, make_locks: MakeLocks) -> None:
        locks = make_locks(claim_timeout=6)  # for longer than a slow machine stops
        latest = locks.replica.clock.latest
        locks.check()

        def behind(at: float) -> datetime | None:
            bound = latest(at)
            return bound and bound - timedelta(hours=1)

        locks.replica.clock.latest = behind
        with pytest.raises(TaskLockDatabaseError, match="jumps back and forth"):
            claim(locks)
        locks.replica.clock.latest = latest

    def test_a_held_lock_ends_when_the_database_says_so(
        self, make_locks: MakeLocks, proxy: Proxy
    ) -> None:
        """Its first answer was lost; the second one says how much of the lock is left."""
        locks = make_locks(proxy.url)
        held(locks, "connects")
        _cut_once(proxy)
        lock = held(locks, max_lock=600.0)
        left = lock.locked_until - datetime.now(timezone.utc)
        assert lock.seconds_left <= left.total_seconds() + 0.5


class TestUnavailable:
    def test_a_replica_is_not_refused_by_its_own_finished_run(
        self, make_locks: MakeLocks, proxy: Proxy, connection: psycopg.Connection[Any]
    ) -> None:
        """The release is still pending when the next window is due; the claim brings it along."""
        locks = make_locks(proxy.url, timings=Timings(release_interval=3600))
        lock = held(locks, min_lock=0.0)
        proxy.accepting = False
        proxy.cut_all()
        with pytest.raises(TaskLockDatabaseError):
            locks.release(lock)
        proxy.accepting = True
        assert held(locks, min_lock=0.0).token > lock.token
        eventually(lambda: not threads("tasklock-releases"))
        assert row(connection, "task")["finished_at"] is None

    @pytest.mark.direct("it cuts the library's connections in the server")
    def test_a_claim_and_a_release_outlive_a_cut_connection(
        self, make_locks: MakeLocks, connection: psycopg.Connection[Any]
    ) -> None:
        locks = make_locks(timings=Timings(release_timeout=60.0))
        lock = held(locks)
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name LIKE 'tasklock %'"
        )
        assert isinstance(claim(locks), Refusal)
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name LIKE 'tasklock %'"
        )
        assert locks.release(lock) is not None

    @pytest.mark.nightly
    def test_a_server_that_never_answers_is_given_up(
        self, make_locks: MakeLocks, proxy: Proxy
    ) -> None:
        locks = make_locks(proxy.url, claim_timeout=1)  # no time for another attempt
        held(locks, "connects")
        proxy.to_client = lambda _data: b""  # swallowed
        with pytest.raises(TaskLockDatabaseError, match="no answer from the server within"):
            claim(locks)
        proxy.to_client = pass_on

    def test_a_row_locked_by_somebody_else_does_not_hang_a_claim(
        self,
        make_locks: MakeLocks,
        database_url: str,
        connection: psycopg.Connection[Any],
        known_task: KnownTask,
    ) -> None:
        locks = make_locks(claim_timeout=6)  # for longer than a slow machine stops
        held(locks, "connects")
        known_task("task")
        with psycopg.connect(database_url) as blocker:
            blocker.execute("SELECT * FROM task_lock FOR UPDATE")
            with pytest.raises(TaskLockDatabaseError, match=r"no answer|due to lock timeout"):
                claim(locks)
            # It waits in the server no more, and will not claim when the row is free.
            eventually(lambda: _waiting(connection) == 0)

    @pytest.mark.nightly
    def test_an_outage_is_a_warning_once_and_its_end_an_info(
        self, make_locks: MakeLocks, proxy: Proxy, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "apscheduler_tasklock")
        locks = make_locks(proxy.url, claim_timeout=0.3)
        held(locks, "before")
        proxy.accepting = False
        proxy.cut_all()
        for _ in range(3):
            with pytest.raises(TaskLockDatabaseError):
                claim(locks)
        proxy.accepting = True
        held(locks, "after")

        levels = [
            (record.levelname, record.getMessage().split(" (")[0]) for record in caplog.records
        ]
        assert levels == [
            ("WARNING", "The task lock database is unavailable"),
            ("INFO", "The task lock database is back"),
        ]

    def test_a_statement_that_takes_longer_than_a_third_of_a_lease_begins_the_recovery_grace(
        self, make_locks: MakeLocks
    ) -> None:
        """Other replicas could not renew such a lease meanwhile."""
        locks = make_locks(timings=Timings(recovery_grace=600.0))
        lock = held(locks, lease=3.0)
        locks.outage.believe()
        locks.ask(lambda cursor: cursor.execute("SELECT pg_sleep(1.1)"))
        assert not locks.stable
        locks.release(lock)

    def test_closing_ends_the_retries_of_a_claim(self, make_locks: MakeLocks, proxy: Proxy) -> None:
        proxy.accepting = False
        locks = make_locks(proxy.url, claim_timeout=3600)
        with ThreadPoolExecutor(1) as pool:
            claiming = pool.submit(claim, locks)
            eventually(lambda: locks.outage.reason)
            locks.close()
            with pytest.raises(TaskLockDatabaseError):
                claiming.result(60)


class TestEngine:
    @pytest.mark.direct("it counts the library's connections in the server")
    def test_nobody_is_connected_to_before_there_is_something_to_ask(
        self, make_locks: MakeLocks, proxy: Proxy, connection: psycopg.Connection[Any]
    ) -> None:
        locks = make_locks(proxy.url)
        assert backends(connection) == 0
        locks.release(held(locks))
        assert backends(connection) == 1

    def test_a_hook_of_the_applications_that_fails_is_an_outage(
        self, engine: Engine, make_locks: MakeLocks
    ) -> None:
        failing = True

        def fetch_password(*_: Any) -> None:
            if failing:
                raise OSError("the vault is sealed")

        event.listen(engine, "do_connect", fetch_password)
        locks = make_locks(engine, claim_timeout=6)  # for longer than a slow machine stops
        with pytest.raises(TaskLockDatabaseError, match="the vault is sealed"):
            claim(locks)
        failing = False
        held(locks)

    def test_an_engine_that_gives_open_transactions_is_refused(
        self, engine: Engine, make_locks: MakeLocks
    ) -> None:

        @event.listens_for(engine, "checkout")
        def run_sql(connection: Any, *_: Any) -> None:
            connection.execute("SELECT 1")

        with pytest.raises(TaskLockError, match="whose transaction is open"):
            make_locks(engine).check()

    @pytest.mark.parametrize("pool", [AssertionPool, SingletonThreadPool, StaticPool])
    def test_an_engine_that_shares_its_connection_is_refused(
        self, pool: type[Pool], database_url: str
    ) -> None:
        url = database_url.replace("postgresql://", "postgresql+psycopg://")
        with pytest.raises(TaskLockOptionError, match=f"{pool.__name__} has no connection besides"):
            TaskLocks(create_engine(url, poolclass=pool))

    @pytest.mark.direct("it connects to the server's own socket")
    def test_the_folder_of_a_socket_may_be_the_host(
        self, make_locks: MakeLocks, connection: psycopg.Connection[Any]
    ) -> None:
        folder = connection.execute("SHOW unix_socket_directories").fetchone()[0]  # type: ignore[index]  # one row
        info = connection.info
        if not Path(folder, f".s.PGSQL.{info.port}").exists():
            pytest.skip("the server has no socket on this machine")
        host = quote(folder, safe="")
        held(make_locks(f"postgresql://{info.user}@{host}:{info.port}/{info.dbname}"))

    @pytest.mark.direct("it loses the statements itself")
    def test_prepared_statements_that_a_pooler_loses_are_given_up(
        self, make_locks: MakeLocks, connection: psycopg.Connection[Any]
    ) -> None:
        """As behind pgbouncer in transaction mode, which lends any connection it has."""
        locks = make_locks()
        for number in range(3):  # what is sent for the second time is prepared
            held(locks, f"task {number}")
        locks.ask(lambda cursor: cursor.execute("DEALLOCATE ALL"))
        held(locks, "after")
        assert not locks.ask(lambda cursor: cursor.wire.is_direct)

    @pytest.mark.direct("it counts the library's connections in the server")
    def test_a_forked_child_leaves_its_parents_connection_alone(
        self, make_task_locks: Callable[..., TaskLocks], connection: psycopg.Connection[Any]
    ) -> None:
        locks = make_task_locks()
        locks.check()
        (parents,) = pids(connection)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # nothing of pytest's may run here
            locks.check()
            os.read(reader, 1)
            os._exit(0)
        eventually(lambda: len(pids(connection)) == 2)
        os.write(writer, b"!")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
        locks.check()
        eventually(lambda: pids(connection) == {parents})

    def test_an_applications_engine_is_used_as_it_is_except_for_autocommit(
        self, make_locks: MakeLocks, database_url: str, connection: psycopg.Connection[Any]
    ) -> None:
        engine = create_engine(
            database_url.replace("postgresql://", "postgresql+psycopg://"),
            pool_size=1,
            max_overflow=0,
            connect_args={"application_name": "the application"},
        )
        try:
            locks = make_locks(engine)
            lock = held(locks)
            assert row(connection, "task")["token"] == lock.token  # committed at once
            locks.release(lock)
            with engine.connect() as mine:
                assert not mine.connection.driver_connection.autocommit
            locks.close()
            assert engine.pool.checkedin() == 1
        finally:
            engine.dispose()

    def test_an_applications_engine_whose_pool_is_used_up_is_used_all_the_same(
        self, make_locks: MakeLocks, database_url: str
    ) -> None:
        engine = create_engine(
            database_url.replace("postgresql://", "postgresql+psycopg://"),
            pool_size=1,
            max_overflow=0,
            pool_timeout=600,
        )
        try:
            with engine.connect():
                locks = make_locks(engine)
                locks.release(held(locks))
                locks.close()
        finally:
            engine.dispose()

    def test_another_driver_is_refused(self) -> None:
        engine = create_engine("sqlite://")
        with pytest.raises(TaskLockError, match="the engine uses sqlite"):
            TaskLocks(engine, replica_id="replica")


def _cut_once(proxy: Proxy) -> threading.Event:
    """Cut the connection instead of passing the next answer on."""
    cut = threading.Event()

    def rule(data: bytes) -> bytes | None:
        if cut.is_set():
            return data
        cut.set()
        return None

    proxy.to_client = rule
    return cut


def _waiting(connection: psycopg.Connection[Any]) -> int:
    found = connection.execute(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE application_name LIKE 'tasklock %' AND state = 'active'"
    ).fetchone()
    assert found is not None
    return int(found[0])


def _wal_and_transaction_ids(connection: psycopg.Connection[Any]) -> tuple[int, int]:
    found = connection.execute(
        "SELECT pg_current_wal_insert_lsn() - '0/0',"
        " pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
    ).fetchone()
    assert found is not None
    return int(found[0]), int(found[1])


@pytest.mark.filterwarnings("ignore:.*deleted while still open:ResourceWarning")  # as it is to be
def test_locks_that_nobody_has_any_more_leave_no_session_also_without_a_garbage_collection(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    gc.collect()
    gc.disable()
    try:
        for number in range(5):
            locks = TaskLocks(database_url, replica_id=f"forgotten {number}")
            with locks.hold(f"task {number}", min_lock=0, max_lock=60):
                pass
            del locks
        sessions = (
            "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'tasklock forgotten%'"
        )
        eventually(lambda: not connection.execute(sessions).fetchall())
    finally:
        gc.enable()
