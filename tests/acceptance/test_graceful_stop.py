"""Applications that are stopped by SIGTERM while a coroutine job runs, or its claim waits."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import ReplicaProcess, Rows
from tests.acceptance.test_examples import free_port
from tests.support.claims import AHEAD
from tests.support.faults import CLAIM
from tests.support.polling import eventually
from tests.support.proxy import Gate, Proxy, proxy_to

StartReplica = Callable[..., ReplicaProcess]

pytestmark = pytest.mark.nightly

APP = "tests.acceptance.asgi:app"
# A third of the default lease is the time between two renewals: what is stranded stays so for long.
SOON = 20.0


def uvicorn(workers: int) -> list[str]:
    return ["-m", "uvicorn", APP, "--workers", str(workers), "--port", str(free_port())]


def gunicorn(worker_class: str, *more: str) -> list[str]:
    address = f"127.0.0.1:{free_port()}"
    # `uvicorn.workers` says that it is deprecated, which these tests have no use for.
    module = ["-W", "ignore::DeprecationWarning", "-m", "gunicorn"]
    return [*module, APP, "--workers", "2", "--bind", address, "-k", worker_class, *more]


def plain() -> list[str]:
    """Return the command of an application that is one call of ``asyncio.run``."""
    return ["-m", "tests.acceptance.replica"]


APPLICATIONS = {
    "asyncio.run": plain,
    "uvicorn with one worker": lambda: uvicorn(1),
    "uvicorn with three workers": lambda: uvicorn(3),
    "gunicorn with uvicorn's workers": lambda: gunicorn("uvicorn.workers.UvicornWorker"),
    # With uvloop, a SIGTERM that comes while they import the application is lost, whatever that is.
    "gunicorn with its own workers": lambda: gunicorn("asgi", "--asgi-loop", "asyncio"),
}


def daily(folder: Path, **options: Any) -> dict[str, Any]:
    """Return a job that a replica fires when it starts, and then every day at that time."""
    now = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S}"
    return {
        "executor": "asyncio",
        "function": "work_async",
        "kwargs": {"folder": str(folder)},
        "trigger": "interval",
        "days": 1,
        "start_date": now,  # an exact time, which a takeover tells exactly
        "next_run_time": now,
        "options": {"poll_interval": 0.5, **options},
    }


@pytest.fixture(params=APPLICATIONS)
def application(request: pytest.FixtureRequest) -> list[str]:
    """Command of an application with an event loop."""
    command: list[str] = APPLICATIONS[request.param]()
    return command


def test_a_job_that_a_stop_cuts_without_failover_keeps_its_window_and_is_not_locked(
    start_replica: StartReplica, application: list[str], rows: Rows, tmp_path: Path
) -> None:
    stopped = start_replica(*application, **daily(tmp_path))
    stopped.says("runs")
    before = rows["job"]
    stopped.stop()
    after = rows["job"]
    assert after["finished_at"] is not None
    for column in ("token", "window_start", "window_until"):
        assert after[column] == before[column]
    assert after["locked_until"] == after["window_until"] > after["now"]
    assert len(stopped.runs) == 1


def test_another_replica_runs_the_window_of_a_job_that_a_stop_cut_with_failover(
    start_replica: StartReplica, application: list[str], rows: Rows, tmp_path: Path
) -> None:
    job = daily(tmp_path, failover=True)
    stopped = start_replica(*application, **job)
    stopped.says("runs")
    before = rows["job"]
    other = start_replica(*uvicorn(1), **job)
    other.says("refused")
    stopped.stop()
    other.says("runs", SOON)
    after = rows["job"]
    assert [(run.run_time, run.how) for run in (*stopped.runs[:1], *other.runs)] == [
        (stopped.runs[0].run_time, "first"),
        (stopped.runs[0].run_time, "again"),
    ]
    for column in ("window_start", "window_until"):
        assert after[column] == before[column]
    Path(tmp_path, str(other.runs[0].token)).touch()
    eventually(lambda: rows["job"]["finished_at"])


@pytest.mark.parametrize("executor", ["threadpool", "processpool"])
def test_what_comes_due_while_the_interpreter_ends_is_left_to_other_replicas(
    start_replica: StartReplica, executor: str, tmp_path: Path
) -> None:
    """The interpreter waits for a pool's jobs before ``atexit`` shuts the scheduler down."""
    # Two workers, as a run that waited for the busy one would keep further ones from coming due.
    working = {**daily(tmp_path, max_workers=2), "executor": executor, "function": "work"}
    every_second = {"function": "sleep", "kwargs": {"takes": 0}, "trigger": "interval"}
    due = {**every_second, "id": "due", "seconds": 1}
    stopped = start_replica(leaves=True, jobs=[due], **working)
    stopped.says("begins job")
    stopped.leave()
    stopped.says("INFO Task 'due': the run time")
    for run in stopped.runs:
        Path(tmp_path, str(run.token)).touch()
    assert stopped.wait() == 0
    assert "Traceback (most recent call last):" not in stopped.said
    assert any(line.startswith("ends") and line.endswith("held") for line in stopped.said)


@pytest.mark.parametrize("failover", [False, True])
def test_a_coroutine_that_a_stop_cuts_cleans_up_without_its_lock(
    start_replica: StartReplica, rows: Rows, tmp_path: Path, failover: bool
) -> None:
    stopped = start_replica(*plain(), **daily(tmp_path, failover=failover))
    stopped.says("runs")
    stopped.stop()
    stopped.says(f"cancelled {stopped.runs[0].token} lost", SOON)
    assert rows["job"]["free"]
    assert (rows["job"]["finished_at"] is None) == failover


@pytest.fixture
def proxy(direct_url: str) -> Iterator[Proxy]:
    """What the replica that is stopped has between it and the database."""
    with proxy_to(direct_url) as proxy:
        yield proxy


def stop_while_a_claim_waits(
    start: StartReplica, stopped: ReplicaProcess, rows: Rows, job: dict[str, Any]
) -> ReplicaProcess:
    """Stop it while its claim is granted, and the answer has not arrived; return another."""
    eventually(lambda: rows["job"]["token"] > AHEAD)
    other = start(*plain(), **job)
    other.says("refused job running")
    stopped.signal(signal.SIGTERM)
    stopped.says("stopping")
    return other


def ran_elsewhere(stopped: ReplicaProcess, other: ReplicaProcess) -> None:
    other.says("runs", SOON)
    eventually(lambda: stopped.exit_code is not None, SOON)
    assert stopped.runs == []
    assert len(other.runs) == 1


@pytest.mark.direct("the proxy leads to the server")
@pytest.mark.parametrize("failover", [False, True])
@pytest.mark.parametrize("name", ["asyncio.run", "uvicorn with one worker"])
def test_a_window_whose_claim_is_answered_after_the_stop_began_is_run_by_another_replica(
    start_replica: StartReplica,
    proxy: Proxy,
    rows: Rows,
    known_task: Callable[[str], None],
    tmp_path: Path,
    name: str,
    failover: bool,
) -> None:
    known_task("job")
    gate = Gate(proxy)

    def shut_at_the_claim(_number: int, to_server: bool, data: bytes) -> bytes:
        if to_server and CLAIM in data:
            gate.shut()
        return data

    proxy.tap = shut_at_the_claim
    job = daily(tmp_path, failover=failover)
    stopped = start_replica(*APPLICATIONS[name](), database=proxy.url, **job)
    try:
        other = stop_while_a_claim_waits(start_replica, stopped, rows, job)
    finally:
        gate.open()
    ran_elsewhere(stopped, other)


@pytest.mark.direct("the proxy leads to the server")
@pytest.mark.parametrize("failover", [False, True])
def test_a_window_whose_claims_answer_is_lost_in_a_stop_is_run_by_another_replica(
    start_replica: StartReplica,
    proxy: Proxy,
    rows: Rows,
    known_task: Callable[[str], None],
    tmp_path: Path,
    failover: bool,
) -> None:
    known_task("job")
    unanswered: set[int] = set()

    def swallow_the_answers(number: int, to_server: bool, data: bytes) -> bytes:
        # Also when it is asked for again, however long the other replica takes to start.
        if to_server and CLAIM in data:
            unanswered.add(number)
        return data if to_server or number not in unanswered else b""

    proxy.tap = swallow_the_answers
    job = daily(tmp_path, failover=failover, claim_timeout=90)
    stopped = start_replica(*plain(), database=proxy.url, **job)
    ran_elsewhere(stopped, stop_while_a_claim_waits(start_replica, stopped, rows, job))
