"""Failover on a real server: dead runs are found, run again and given up, and old rows deleted.

Which of them are run again, by whom and when is in ``tests/simulation``.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from psycopg import sql
from psycopg.types.json import set_json_loads

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    HeldLock,
    TaskLockExecutor,
    current_lock,
)
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._runs.watch import Watch
from tests.support import claims, outages
from tests.support.claims import LaterThan, end_lease, row
from tests.support.outages import count_looks
from tests.support.polling import eventually
from tests.support.roles import role
from tests.support.schedulers import Replica
from tests.support.waist import Ask, LockClient, intercept_claims

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
        replica.executor.user.outage.believe()
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


class TestWhatIsRun:
    def test_the_job_as_it_is_by_then(
        self, make_heir: MakeReplica, holder: MakeHolder, connection: Connection
    ) -> None:
        """Its arguments, its options, and the executor that it is on."""
        holder()
        end_lease(connection)
        replica = make_heir(start=False)
        second = TaskLockExecutor(
            replica.executor.user.settings.database,
            executor={"type": "threadpool", "max_workers": 1},
            failover=True,
            lease=600,
            replica_id="second",
        )
        second.user.outage.believe()
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
        database = replica.executor.user.database
        read = database.reading
        monkeypatch.setattr(database, "reading", lambda *names: asked.append(names) or read(*names))
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
                    eventually(lambda: replica.executor.user.closed)
                    tell(decided)

                send(attempts, most, tell_late)

            return ask

        undo = intercept_claims(replica.executor.user.locks, slowly)
        replica.run_once(token_and_takeover)
        assert refused.wait(60)
        replica.shutdown()
        replica.one(EVENT_TASK_LOCK_REFUSED)
        assert replica.codes() == [EVENT_TASK_LOCK_REFUSED]

        undo()
        end_lease(connection)
        replica.start()
        replica.executor.user.outage.believe()
        replica.run_once(token_and_takeover, next_run_time=next_hour())
        assert replica.one(EVENT_JOB_EXECUTED).retval == (LaterThan(died.token), True)
        until_looked(replica)
        replica.idle()
        assert after_a_death(replica) == REFUSED_THEN_RUN


class TestGivingUp:
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
    outage = replica.executor.user.outage
    alone = outage.grace
    replica.start()
    eventually(lambda: outage.grace > alone)
    assert outage.grace == pytest.approx(alone - 2.5 + 10.0, abs=0.02)
