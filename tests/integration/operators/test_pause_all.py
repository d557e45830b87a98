"""A pause of all tasks, with replicas whose claims are under way, and at the command line."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from itertools import groupby
from operator import itemgetter
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED

from apscheduler_tasklock import TaskLockError, TaskLocks, locks
from apscheduler_tasklock.events import EVENT_TASK_LOCK_REFUSED
from tests.support.commands import Command, PatientTaskLocks
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.rows import add_task

Connection = psycopg.Connection[Any]
MakeReplica = Callable[..., Any]
FAST: dict[str, Any] = {"poll_interval": 0.1}


@pytest.fixture
def operator(make_task_locks: Callable[..., TaskLocks]) -> TaskLocks:
    return make_task_locks()


class TestReplicas:
    def test_no_claim_is_granted_once_it_has_been_committed(
        self, make_replica: MakeReplica, operator: TaskLocks, connection: Connection
    ) -> None:
        begun: list[datetime] = []

        def job() -> None:
            begun.append(datetime.now(timezone.utc))

        for _ in range(3):
            replica = make_replica(jobs={f"job {n}": {"min_lock": 0} for n in range(5)}, **FAST)
            for number in range(5):
                replica.scheduler.add_job(
                    job, "interval", seconds=0.05, id=f"job {number}", max_instances=5
                )

        def refusals() -> int:
            events = [event for n in range(5) for event in replica.of(f"job {n}")]
            return sum(getattr(event, "reason", None) == "paused" for event in events)

        def several_refusals_later() -> None:
            before = refusals()
            eventually(lambda: refusals() > before + 20)

        latest = "SELECT max(started_at) FROM task_lock WHERE runs <> ''"
        for _ in range(3):
            before = len(begun)
            eventually(lambda before=before: len(begun) > before + 30)
            pause = operator.pause_all(duration=None, reason="a move")
            found = connection.execute(latest).fetchone()
            [paused_at] = connection.execute("SELECT clock_timestamp()").fetchone() or [None]
            several_refusals_later()
            assert connection.execute(latest).fetchone() == found
            assert found is not None
            assert found[0] < paused_at
            assert pause.reason == "a move"
            assert operator.resume_all().left == ()

    def test_a_task_that_appears_later_is_paused(
        self, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        operator.pause_all(duration=3600, namespace="jo")
        replica = make_replica(**FAST)
        often = {"trigger": "interval", "seconds": 0.1, "misfire_grace_time": None}
        replica.scheduler.add_job(print, id="job", **often)
        replica.scheduler.add_job(print, id="another", **often)
        eventually(lambda: EVENT_JOB_EXECUTED in replica.codes("another"))
        refused = eventually(lambda: replica.of("job"))
        assert {event.code for event in refused} == {EVENT_TASK_LOCK_REFUSED}
        assert {event.reason for event in refused} == {"paused"}
        eventually(lambda: operator.tasks("job"))
        [task] = operator.tasks("job")
        assert (task.paused, task.started_at) == (True, None)

    def test_holds_go_on(self, operator: TaskLocks) -> None:
        operator.pause_all(duration=None)
        with operator.hold("hold", min_lock=0, max_lock=600):
            pass
        with operator.hold("hold", min_lock=0, max_lock=600):
            assert [task.paused for task in operator.tasks("hold")] == [False]


class TestCalls:
    @pytest.fixture(autouse=True)
    def short_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(locks, "TABLE_BREAK", 0.01)
        monkeypatch.setattr(locks, "LONGEST_TABLE_WAIT", 0.1)

    def test_it_waits_for_a_claim_that_is_under_way(
        self, operator: TaskLocks, connection: Connection, direct_url: str
    ) -> None:
        add_task(connection, "task")
        done = threading.Event()

        def pause() -> None:
            operator.pause_all(duration=None)
            done.set()

        waits = "SELECT FROM pg_locks WHERE mode = 'ShareRowExclusiveLock' AND NOT granted"
        with psycopg.connect(direct_url) as other:
            other.execute("UPDATE task_lock SET token = token + 1")
            pausing = threading.Thread(target=pause)
            pausing.start()
            eventually(lambda: connection.execute(waits).rowcount)
            assert not done.is_set()
            other.commit()
        pausing.join(60)
        assert done.is_set()
        assert operator.tasks("task")[0].paused

    def test_a_session_that_keeps_the_table_locked_is_told(
        self,
        operator: TaskLocks,
        direct_url: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        with psycopg.connect(direct_url) as other:
            other.execute("LOCK TABLE task_lock IN ROW EXCLUSIVE MODE")
            with pytest.raises(TaskLockError, match="doctor` names them"):
                operator.pause_all(duration=None)
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert "to pause all tasks is tried again" in caplog.text
            other.rollback()
            assert operator.pauses_of_all() == []

    def test_a_refusal_that_comes_before_all_is_sent_is_told_once(
        self,
        operator: TaskLocks,
        direct_url: str,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The client is slower here than the limit of its wait for the table."""
        execute = psycopg.Cursor.execute

        def execute_late(cursor: Any, query: Any, *given: Any, **wanted: Any) -> Any:
            is_begun = not str(query).startswith(("BEGIN", "SET", "LOCK"))
            if cursor.connection.pgconn.pipeline_status and is_begun:
                assert select.select([cursor.connection], [], [], 60)[0]
            return execute(cursor, query, *given, **wanted)

        monkeypatch.setattr(psycopg.Cursor, "execute", execute_late)
        with psycopg.connect(direct_url) as other:
            other.execute("LOCK TABLE task_lock IN ROW EXCLUSIVE MODE")
            with pytest.raises(TaskLockError, match="doctor` names them"):
                operator.pause_all(duration=None)
        assert [record.name for record in caplog.records] == ["apscheduler_tasklock.locks"]

    def test_a_refusal_whose_answer_comes_in_pieces_is_a_refusal(
        self, operator: TaskLocks, direct_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The pieces are a mock, because no proxy can tell where a client's read ends."""
        leave = psycopg.Pipeline.__exit__

        def leave_in_pieces(pipeline: Any, *given: Any) -> None:
            try:
                leave(pipeline, *given)
            except psycopg.errors.LockNotAvailable:
                raise psycopg.errors.PipelineAborted  # noqa: B904  # as psycopg does

        monkeypatch.setattr(psycopg.Pipeline, "__exit__", leave_in_pieces)
        with psycopg.connect(direct_url) as other:
            other.execute("LOCK TABLE task_lock IN ROW EXCLUSIVE MODE")
            with pytest.raises(TaskLockError, match="doctor` names them"):
                operator.pause_all(duration=None)

    def test_the_table_is_never_locked_while_its_session_waits_for_the_client(
        self, proxy: Proxy
    ) -> None:
        """The server answers a transaction when it has got all of it."""
        sent: list[tuple[bool, bytes]] = []

        def tap(_number: int, to_server: bool, data: bytes) -> bytes:
            sent.append((to_server, data))
            return data

        with PatientTaskLocks(proxy.url) as operator:
            operator.tasks()
            proxy.tap = tap
            operator.pause_all(duration=None)
        turns = [
            b"".join(data for _, data in turn)
            for to_server, turn in groupby(sent, key=itemgetter(0))
            if to_server
        ]
        ends = [b"COMMIT" in turn for turn in turns if b"LOCK TABLE" in turn]
        assert ends == [True, True]

    @pytest.mark.nightly
    def test_one_that_is_in_force_although_it_could_not_wait_says_so(
        self,
        connection: Connection,
        database_url: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Another transaction gets the table after the first lock, and keeps it."""
        monkeypatch.setattr(locks, "LONGEST_TABLE_WAIT", 2.0)
        monkeypatch.setattr(locks, "TABLE_ATTEMPTS", 1)
        operator = PatientTaskLocks(database_url)
        add_task(connection, "task", **JOB)
        change = "UPDATE task_lock SET task_name = task_name"
        waiting = "SELECT FROM pg_locks WHERE NOT granted AND relation = 'task_lock'::regclass"
        with (
            psycopg.connect(database_url) as first,
            psycopg.connect(database_url) as second,
            ThreadPoolExecutor(2) as pool,
        ):
            first.execute(change)
            paused = pool.submit(operator.pause_all, duration=None)
            eventually(lambda: connection.execute(waiting).rowcount == 1)
            changed = pool.submit(second.execute, change)
            eventually(lambda: connection.execute(waiting).rowcount == 2)
            first.commit()
            changed.result(60)
            with pytest.raises(TaskLockError, match="all tasks are paused, but claims"):
                paused.result(60)
        assert [task.paused for task in operator.tasks("task")] == [True]
        operator.close()


JOB = {"runs": "'jobs:job'"}


class TestCommands:
    def test_all_tasks_are_paused_and_resumed(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "task", **JOB)
        answer = command("pause", "--all", "--for", "2h", "--reason", "a move", "--as", "ann")
        assert answer.status == 0
        assert answer.out.startswith("all tasks: paused by ann until 2")
        assert answer.out.endswith("(a move)\n")
        assert "not paused are code under `hold`" in answer.err
        listed = command("status")
        assert listed.err.startswith("apscheduler-tasklock: all tasks: paused by ann since 2")
        assert listed.cells[0][1].strip() == "paused"
        assert "paused with all tasks by ann" in command("show", "task").out
        answer = command("resume", "task")
        assert (answer.status, answer.out[:38]) == (4, "task: still paused with all tasks by a")
        assert "`resume --all` ends that" in answer.err
        assert command("pause", "task", "--as", "bob").status == 0
        answer = command("resume", "task", "--as", "bob")
        assert answer.status == 4
        assert answer.out.startswith(
            "task: no longer paused by bob until resumed; still paused with all tasks by ann since"
        )
        assert "`resume --all` ends that" in answer.err
        answer = command("resume", "--all")
        assert answer.status == 4
        assert answer.out.startswith("all tasks: still paused by ann")
        answer = command("resume", "--all", "--as", "ann")
        assert (answer.status, answer.out) == (0, "all tasks: resumed\n")
        assert command("status").cells[0][1].strip() == "ok"
        told = command("runs", "*", "--kind", "operator", "--json").json
        assert [(each["task"], each["outcome"], each["by"]) for each in told] == [
            ("*", "resumed", "ann"),
            ("task", "resumed", "bob"),
            ("task", "paused", "bob"),
            ("*", "paused", "ann"),
        ]

    def test_of_one_namespace(self, command: Command, connection: Connection) -> None:
        for task in ("shop:a", "b"):
            add_task(connection, task, **JOB)
        answer = command("pause", "--all", "--namespace", "shop:", "--until-resumed", "--json")
        assert answer.json["paused"]["namespace"] == "shop:"
        assert [row[0] for row in command("status", "--state", "paused").cells] == ["shop:a"]
        answer = command("resume", "--all")  # those of all namespaces
        assert answer.status == 4
        assert "`resume --all --namespace shop:` ends that" in answer.err
        assert [row[0] for row in command("status", "--state", "paused").cells] == ["shop:a"]
        answer = command("resume", "--all", "--namespace", "shop:", "--json")
        assert (answer.status, answer.json["still_paused"]) == (0, [])
        assert [each["namespace"] for each in answer.json["ended"]] == ["shop:"]
