"""TaskLockExecutor around the process pool: claims, renewals and releases are the parent's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.executors.pool import ProcessPoolExecutor
from sqlalchemy import Engine

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockExecutor,
    TaskLocks,
)
from apscheduler_tasklock.status import ReplicaState
from tests.support import claims, pool_jobs
from tests.support.claims import row
from tests.support.internals import instances, is_broken, pool_of
from tests.support.polling import eventually
from tests.support.schedulers import Replica

MakeReplica = Callable[..., Replica]

A_CLAIM = "SELECT FROM task_lock WHERE kind IS NOT NULL"
A_MINUTE = timedelta(minutes=1)
RUN = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]
RAISED = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_ERROR, EVENT_TASK_LOCK_RELEASED]


def now(connection: psycopg.Connection[Any]) -> datetime:
    found = connection.execute("SELECT now()").fetchone()
    assert found is not None
    moment: datetime = found[0]
    return moment


def case(method: str) -> Any:
    return pytest.param(method, marks=pytest.mark.nightly)


# A spawned worker starts a Python: what is pickled matters there, and what is imported.
SPAWNED = pytest.mark.parametrize("pool", ["spawn", "fork", case("forkserver")], indirect=True)


@pytest.fixture(params=["fork", case("spawn"), case("forkserver")])
def pool(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of a process pool; fork is the default of APScheduler 3.10, spawn of 3.11."""
    context = multiprocessing.get_context(request.param)
    return {"max_workers": 1, "pool_kwargs": {"mp_context": context}}


@pytest.fixture
def make_pooled(make_replica: MakeReplica, pool: dict[str, Any]) -> MakeReplica:
    def make(*arguments: Any, **options: Any) -> Replica:
        return make_replica(*arguments, executor="processpool", **pool, **options)

    return make


def start_worker(replica: Replica) -> None:
    """Let the pool have its worker. The time of a lock runs while that is started."""
    replica.run_once(pool_jobs.decorated, job_id="first", args=[1])
    replica.one(EVENT_JOB_EXECUTED, "first")


@SPAWNED
def test_a_run_is_claimed_and_told_in_the_scheduler_and_its_worker_has_a_view_of_its_lock(
    make_pooled: MakeReplica, connection: psycopg.Connection[Any]
) -> None:
    one, other = make_pooled(replica_id="one"), make_pooled(replica_id="other")
    one.run_once(pool_jobs.lock_and_process, kwargs={"a": 1, "task_lock": {"max_factor": 2}})
    executed = one.one(EVENT_JOB_EXECUTED)
    one.idle()
    other.run_once(pool_jobs.lock_and_process)
    refused = other.one(EVENT_TASK_LOCK_REFUSED)
    other.idle()

    assert one.codes() == RUN
    granted = one.of()[0]
    *lock, pid, kwargs = executed.retval
    token, until = row(connection)["token"], granted.locked_until
    assert lock == ["job", token, executed.scheduled_run_time, until, False]
    assert pid != os.getpid()
    assert kwargs == {"a": 1}
    assert granted.holder == "one"
    assert row(connection)["run_until"] - row(connection)["started_at"] == timedelta(hours=2)
    assert other.codes() == [EVENT_TASK_LOCK_REFUSED]
    assert (refused.holder, refused.reason) == (granted.holder, "window")


@pytest.mark.parametrize(
    ("function", "exception"), [(pool_jobs.fail, ValueError), (pool_jobs.leave, SystemExit)]
)
def test_a_run_that_raises_is_released(
    make_pooled: MakeReplica,
    connection: psycopg.Connection[Any],
    function: Callable[[], None],
    exception: type[BaseException],
) -> None:
    replica = make_pooled()
    replica.run_once(function)
    error = replica.one(EVENT_JOB_ERROR)
    replica.idle()
    assert replica.codes() == RAISED
    assert isinstance(error.exception, exception)
    assert f"in {function.__name__}" in error.traceback
    assert row(connection)["finished_at"] is not None


@SPAWNED
def test_a_decorated_function_has_its_options_in_the_worker(
    make_pooled: MakeReplica, connection: psycopg.Connection[Any]
) -> None:
    replica = make_pooled()
    replica.run_once(pool_jobs.decorated, args=[7])
    assert replica.one(EVENT_JOB_EXECUTED).retval == 7
    assert row(connection)["window_until"] - row(connection)["window_start"] == timedelta(
        minutes=30
    )


@pytest.mark.nightly
def test_the_lease_of_a_killed_worker_is_ended_by_its_parent_and_the_pool_goes_on(
    make_pooled: MakeReplica,
    connection: psycopg.Connection[Any],
    database_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = make_pooled()
    replica.run_once(pool_jobs.die, next_run_time=None)
    with closing(TaskLocks(database_url)) as operator:  # all that a sign of life has to tell
        eventually(lambda: [each.tasks for each in operator.replicas()] == [("job",)])
    replica.scheduler.modify_job("job", next_run_time=datetime.now(timezone.utc))
    eventually(
        lambda: connection.execute("SELECT FROM task_lock WHERE kind IS NOT NULL").rowcount == 1
    )
    replica.idle()
    assert replica.one(EVENT_TASK_LOCK_LOST).reason == "died"
    assert "the worker process that ran it is dead" in caplog.text
    assert row(connection)["over"]
    assert row(connection)["finished_at"] is None
    assert not row(connection)["handed_over"]  # it may have run in part
    with closing(TaskLocks(database_url)) as operator:
        # Long before the next sign of life would be due.
        eventually(lambda: [each.state for each in operator.replicas()] == [ReplicaState.ALIVE], 9)
    replica.run_once(pool_jobs.decorated, job_id="next", args=[1])
    assert replica.one(EVENT_JOB_EXECUTED, "next").retval == 1


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Path]:
    """The file in which ``note_pid_and_hang`` notes its process, which the test's end kills."""
    begun = tmp_path / "hangs"
    yield begun
    with suppress(ProcessLookupError):
        os.kill(int(begun.read_text()), signal.SIGKILL)


@pytest.mark.usefixtures("unhurried_stop")
@pytest.mark.parametrize("stops", [False, True], ids=["goes on", "stops"])
@pytest.mark.parametrize(
    "context",
    ["fork", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("spawn", "forkserver"))],
)
def test_a_broken_pools_process_that_ignores_sigterm_is_killed_before_any_lease_is_ended(
    make_replica: MakeReplica,
    connection: psycopg.Connection[Any],
    hanging: Path,
    caplog: pytest.LogCaptureFixture,
    context: str,
    stops: bool,
) -> None:
    """Until then it may still run its window. A stop waits for it."""
    pool = {
        "mp_context": multiprocessing.get_context(context),
        "initializer": pool_jobs.ignore_sigterm,
    }
    replica = make_replica(executor="processpool", max_workers=2, pool_kwargs=pool)
    replica.run_once(pool_jobs.note_pid_and_hang, args=[str(hanging)], job_id="lives")
    eventually(hanging.exists)
    replica.run_once(pool_jobs.die, job_id="dies")
    eventually(lambda: caplog.text.count("Error running job") == 2)
    if stops:
        replica.scheduler.shutdown()
    else:
        replica.run_once(pool_jobs.decorated, job_id="next", args=[1])
        replica.one(EVENT_JOB_EXECUTED, "next")
    jobs = ("lives", "dies")
    eventually(lambda: any(row(connection, job_id)["over"] for job_id in jobs))
    with pytest.raises(ProcessLookupError):
        os.kill(int(hanging.read_text()), 0)
    for job_id in jobs:
        assert replica.one(EVENT_TASK_LOCK_LOST, job_id).reason == "died"
        assert row(connection, job_id)["over"]
        assert row(connection, job_id)["finished_at"] is None
        assert not row(connection, job_id)["handed_over"]  # it may have run in part


def test_a_run_whose_pool_breaks_while_it_takes_it_has_ended_as_the_pools_others(
    make_replica: MakeReplica,
    connection: psycopg.Connection[Any],
    hanging: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else nobody would report it, and its lease would be renewed until its maximum lock."""
    replica = make_replica(executor="processpool", max_workers=1)
    pool = pool_of(replica.executor)
    take = pool.submit

    def break_meanwhile(*arguments: Any) -> Any:
        """Raise what Python's raises if it starts another worker while it breaks."""
        take(*arguments)
        eventually(hanging.exists)
        os.kill(int(hanging.read_text()), signal.SIGKILL)
        eventually(lambda: is_broken(replica.executor))
        raise OSError("handle is closed")

    monkeypatch.setattr(pool, "submit", break_meanwhile)
    replica.run_once(pool_jobs.note_pid_and_hang, args=[str(hanging)])
    assert replica.one(EVENT_TASK_LOCK_LOST).reason == "died"
    assert row(connection)["over"]
    assert row(connection)["finished_at"] is None
    assert "handle is closed" in caplog.text
    replica.run_once(pool_jobs.decorated, job_id="next", args=[1])
    assert replica.one(EVENT_JOB_EXECUTED, "next").retval == 1


@pytest.mark.direct("it counts the library's connections in the server")
def test_a_replica_has_one_connection_and_its_workers_none(
    make_pooled: MakeReplica, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    replica = make_pooled()
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    replica.run_once(pool_jobs.wait_for, args=[str(go_on), str(begun)])
    eventually(begun.exists)
    assert len(claims.pids(connection)) == 1
    go_on.touch()
    replica.one(EVENT_JOB_EXECUTED)
    assert len(claims.pids(connection)) == 1
    replica.scheduler.shutdown()
    assert eventually(lambda: claims.pids(connection) == set())


@pytest.mark.direct("it counts the library's connections in the server")
def test_a_worker_closes_the_connection_on_which_it_has_extended_its_lock(
    make_replica: MakeReplica, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    fork = {"mp_context": multiprocessing.get_context("fork")}
    replica = make_replica(executor="processpool", max_workers=1, pool_kwargs=fork)
    go_on = tmp_path / "go on"
    replica.run_once(pool_jobs.extend, args=[36_000, str(go_on)])
    extended = "SELECT FROM task_lock WHERE run_until > started_at + interval '10 hours'"
    eventually(lambda: connection.execute(extended).rowcount == 1)
    try:
        eventually(lambda: len(claims.pids(connection)) == 1)
    finally:
        go_on.touch()
    replica.one(EVENT_JOB_EXECUTED)


@pytest.mark.nightly
@pytest.mark.direct("it counts the library's connections in the server")
@pytest.mark.parametrize("lease", [2, None])
def test_a_lock_that_a_worker_extends_stands_for_longer_and_its_parent_learns_of_it(
    make_pooled: MakeReplica,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
    lease: float | None,
) -> None:
    replica = make_pooled(lease=lease, jobs={"job": {"min_lock": 0, "max_lock": 4}})
    start_worker(replica)
    go_on = tmp_path / "go on"
    replica.run_once(pool_jobs.extend, args=[60, str(go_on)])
    replica.one(EVENT_TASK_LOCK_GRANTED)
    eventually(lambda: row(connection)["run_until"] - row(connection)["started_at"] > A_MINUTE)
    eventually(lambda: len(claims.pids(connection)) == 1)
    # Beyond its first maximum lock, which the parent renews for the last time right before.
    eventually(lambda: now(connection) > row(connection)["started_at"] + timedelta(seconds=6))
    assert not row(connection)["over"]
    # If the last renewal came after the extension, the next one takes back what it has noted.
    eventually(lambda: not row(connection)["overran"])
    go_on.touch()
    left_before, left, lost = replica.one(EVENT_JOB_EXECUTED).retval
    assert 0 < left_before <= 4
    assert 60 < left <= 64
    assert not lost
    replica.idle()
    assert replica.codes() == RUN
    assert row(connection)["last_outcome"] == "ok"


@pytest.mark.nightly
def test_a_lock_is_lost_in_its_worker_when_its_maximum_lock_ends(
    make_pooled: MakeReplica,
) -> None:
    replica = make_pooled(lease=None, jobs={"job": {"min_lock": 0, "max_lock": 3}})
    start_worker(replica)
    replica.run_once(pool_jobs.until_lost)
    assert replica.one(EVENT_JOB_EXECUTED).retval == "lost"


def test_a_forked_child_does_not_use_its_parents_connection(
    make_pooled: MakeReplica, make_replica: MakeReplica
) -> None:
    """The parent has an idle connection when the pool forks its worker."""
    replica = make_replica()
    replica.run_once(lambda: None)
    replica.one(EVENT_JOB_EXECUTED)
    pooled = make_pooled(replica.executor.user.settings.database)
    pooled.run_once(pool_jobs.decorated, job_id="pooled", args=[1])
    pooled.one(EVENT_JOB_EXECUTED, "pooled")
    replica.run_once(lambda: 2, job_id="after")
    assert replica.one(EVENT_JOB_EXECUTED, "after").retval == 2


@SPAWNED
def test_an_engines_url_serves_a_worker_that_extends_its_lock(
    engine: Engine, make_pooled: MakeReplica, tmp_path: Path
) -> None:
    replica = make_pooled(engine)
    go_on = tmp_path / "go on"
    go_on.touch()
    replica.run_once(pool_jobs.extend, args=[9000, str(go_on)])
    left_before, left, lost = replica.one(EVENT_JOB_EXECUTED).retval
    assert left - left_before > 8000  # what the extension adds, without the time between the two
    assert not lost


def test_a_pool_can_be_given_as_an_instance(make_replica: MakeReplica, database_url: str) -> None:
    replica = make_replica(database_url, ProcessPoolExecutor(1))
    assert isinstance(replica.executor, TaskLockExecutor)
    replica.run_once(pool_jobs.decorated, args=[1])
    assert replica.one(EVENT_JOB_EXECUTED).retval == 1


@pytest.mark.usefixtures("unhurried_stop")
def test_what_waits_for_a_worker_is_not_claimed(
    make_pooled: MakeReplica, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """Neither while the one worker is busy, nor after the shutdown."""
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    replica = make_pooled()
    for number in range(6):
        replica.run_once(pool_jobs.wait_for, args=[str(go_on), str(begun)], job_id=f"job {number}")
    eventually(begun.exists)

    def claimed() -> list[Any]:
        query = "SELECT task_name FROM task_lock WHERE kind IS NOT NULL"
        return connection.execute(query).fetchall()

    assert claimed() == [("job 0",)]
    stopping = threading.Thread(target=replica.scheduler.shutdown)
    stopping.start()
    eventually(lambda: replica.executor.user.closed)
    go_on.touch()
    stopping.join(60)
    assert claimed() == [("job 0",)]
    assert row(connection, "job 0")["finished_at"] is not None
    assert not instances(replica.executor)


@SPAWNED
def test_the_history_keeps_what_a_function_of_the_parent_leaves_of_a_message(
    make_pooled: MakeReplica, database_url: str
) -> None:
    """That function need not be one that worker processes can import."""
    replica = make_pooled(redact=lambda error: f"redacted {type(error).__name__}")
    replica.run_once(pool_jobs.fail)
    assert str(replica.one(EVENT_JOB_ERROR).exception) == "in the pool"
    replica.idle()
    with closing(TaskLocks(database_url)) as operator:
        assert [run.error for run in operator.runs()] == ["redacted ValueError"]


def test_the_history_keeps_a_workers_frames_on_request(
    make_pooled: MakeReplica, database_url: str
) -> None:
    """The messages are redacted in the parent, which knows only the exception itself."""
    replica = make_pooled(redact=lambda error: f"redacted {error}", tracebacks=True)
    replica.run_once(pool_jobs.fail_after_a_secret)
    with closing(TaskLocks(database_url)) as operator:
        [run] = eventually(operator.runs)
    assert run.traceback is not None
    lines = run.traceback.splitlines()
    functions = [line.rpartition(", in ")[2] for line in lines if line.startswith("  File")]
    assert functions == ["fail_after_a_secret", "connect", "fail_after_a_secret"]
    assert lines[2] == "OSError"
    assert lines[-1] == "ValueError: redacted in the pool"
    assert "hunter2" not in run.traceback


@SPAWNED
@pytest.mark.parametrize(
    ("function", "args"),
    [(lambda: None, []), (len, [threading.Lock()])],
    ids=["function", "argument"],
)
def test_what_cannot_be_pickled_has_failed_once(
    make_pooled: MakeReplica,
    connection: psycopg.Connection[Any],
    caplog: pytest.LogCaptureFixture,
    function: Callable[..., Any],
    args: list[Any],
) -> None:
    """No other replica would do better."""
    replica = make_pooled(failover=True)
    replica.run_once(function, args=args)
    eventually(lambda: "Error running job job" in caplog.text)
    eventually(lambda: row(connection)["finished_at"])
    replica.idle()
    assert row(connection)["last_outcome"] == "error"
    assert not row(connection)["handed_over"]
    assert replica.codes() == [EVENT_TASK_LOCK_GRANTED, EVENT_TASK_LOCK_RELEASED]
    assert caplog.text.count("Error running job job") == 1
    replica.run_once(pool_jobs.decorated, job_id="next", args=[1])
    assert replica.one(EVENT_JOB_EXECUTED, "next").retval == 1


def test_an_id_forges_no_line_of_apschedulers_log(
    make_pooled: MakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_pooled()
    replica.run_once(pool_jobs.return_a_lock, job_id="a\x1b[2J\nINFO: all is well")
    eventually(lambda: "Error running job" in caplog.text)
    replica.idle()
    told = [record.getMessage() for record in caplog.records]
    [line] = [each for each in told if each.startswith("Error running job")]
    assert line.isprintable()


def test_a_result_that_cannot_be_pickled_is_a_run_that_has_failed(
    make_pooled: MakeReplica, connection: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As APScheduler has it, which has no event then. It is not run again."""
    replica = make_pooled(failover=True)
    replica.run_once(pool_jobs.return_a_lock)
    eventually(lambda: "Error running job job" in caplog.text)
    replica.idle()
    eventually(lambda: row(connection)["finished_at"])
    assert "cannot pickle" in caplog.text
    assert (row(connection)["last_outcome"], row(connection)["error_type"]) == (
        "error",
        "TypeError",
    )


@pytest.mark.parametrize("options", [{}, {"enabled": False}], ids=["lock", "off"])
def test_a_generator_that_a_function_returns_is_told_of_by_its_worker(
    make_replica: MakeReplica, options: dict[str, Any]
) -> None:
    """It cannot be pickled, which tells nobody what is wrong."""
    replica = make_replica(executor="processpool", max_workers=1, **options)
    replica.run_once(pool_jobs.return_a_generator)
    error = replica.one(EVENT_JOB_ERROR).exception
    assert "'job': its function has returned a generator, which nobody iterates" in str(error)


def test_a_slow_listener_holds_up_no_worker_and_hears_of_each_grant_first(
    make_pooled: MakeReplica,
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    replica = make_pooled()
    run = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]

    def block(_event: Any) -> None:
        entered.set()
        go_on.wait(60)

    replica.scheduler.add_listener(block, EVENT_TASK_LOCK_GRANTED)
    replica.run_once(pool_jobs.decorated, job_id="first", args=[1])
    assert entered.wait(60)
    replica.run_once(pool_jobs.decorated, job_id="second", args=[1])
    eventually(lambda: not instances(replica.executor))
    go_on.set()
    eventually(lambda: replica.codes("second") == replica.codes("first") == run)


@pytest.mark.nightly
@pytest.mark.skipif(sys.version_info < (3, 11), reason="max_tasks_per_child is new in 3.11")
def test_a_worker_may_be_replaced_after_each_job(make_replica: MakeReplica) -> None:
    one_job_each = {"mp_context": multiprocessing.get_context("spawn"), "max_tasks_per_child": 1}
    replica = make_replica(executor="processpool", max_workers=1, pool_kwargs=one_job_each)
    pids = set()
    for number in range(2):
        replica.run_once(pool_jobs.lock_and_process, job_id=f"job {number}")
        pids.add(replica.one(EVENT_JOB_EXECUTED, f"job {number}").retval[-2])
        replica.idle()
        assert replica.codes(f"job {number}") == RUN
    assert len(pids) == 2


@pytest.mark.usefixtures("unhurried_stop")
def test_while_the_application_keeps_its_pool_busy_nothing_more_is_claimed(
    make_replica: MakeReplica, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """What was given and has not begun is handed over at a shutdown."""
    go_on = tmp_path / "go on"
    fork = {"mp_context": multiprocessing.get_context("fork")}
    replica = make_replica(executor="processpool", max_workers=1, pool_kwargs=fork)
    # One that runs, and one more that waits in the pool's queue for processes.
    own = [pool_of(replica.executor).submit(pool_jobs.wait_for, str(go_on)) for _ in range(3)]
    for number in range(3):
        replica.run_once(pool_jobs.decorated, job_id=f"job {number}", args=[1])
    eventually(lambda: connection.execute(A_CLAIM).rowcount == 1)
    stopping = threading.Thread(target=replica.scheduler.shutdown)
    stopping.start()
    eventually(lambda: row(connection, "job 0")["handed_over"])
    go_on.touch()
    stopping.join(60)
    assert [future.result() for future in own] == [None] * 3
    assert connection.execute(A_CLAIM).rowcount == 1
    assert EVENT_JOB_EXECUTED not in replica.codes("job 0")


SLOW = """
import sys, time

class Slowly:
    def find_spec(self, name, path, target=None):
        if name == "sqlalchemy":
            time.sleep(8)

sys.meta_path.insert(0, Slowly())
"""


@pytest.mark.nightly
def test_that_a_new_worker_loads_the_library_makes_no_run_time_late(
    make_replica: MakeReplica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain APScheduler's does not, and has begun both jobs by then."""
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spawn = {"mp_context": multiprocessing.get_context("spawn")}
    one = make_replica(executor="processpool", max_workers=1, pool_kwargs=spawn)
    for job_id in ("first", "second"):
        one.run_once(pool_jobs.lock_and_process, job_id=job_id, misfire_grace_time=7)
    for job_id in ("first", "second"):
        one.one(EVENT_JOB_EXECUTED, job_id)
    one.idle()
    assert one.codes("first") == one.codes("second") == RUN
