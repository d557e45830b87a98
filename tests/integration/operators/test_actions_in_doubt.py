"""Operators' actions whose answer is lost: sent again under their ids, done once, told so."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock import TaskLockDatabaseError, TaskLocks, TaskLockUnknownError, upgrade
from apscheduler_tasklock.cli import main
from apscheduler_tasklock.dashboard.access import Access
from apscheduler_tasklock.dashboard.app import Dashboard
from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.support import rows
from tests.support.asgi_client import TestClient
from tests.support.commands import PatientTaskLocks
from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxy_to

Connection = psycopg.Connection[Any]

SAME = {"sec-fetch-site": "same-origin"}
# What only the statements of actions have in them.
_OF_ACTIONS = (b"action_id", b"forgotten AS (")


class LosesAnswers:
    """Cuts a proxy's connection in place of the answer to an action, which the server carries out.

    :param proxy: the proxy
    :param recovers: whether further connections are accepted after that
    :ivar lost: how many answers were lost
    """

    def __init__(self, proxy: Proxy, *, recovers: bool) -> None:
        self._proxy, self._recovers = proxy, recovers
        self._asks: int | None = None
        self.lost = 0
        proxy.tap = self._tap

    def _tap(self, number: int, to_server: bool, data: bytes) -> bytes | None:
        if to_server and not self.lost and any(mark in data for mark in _OF_ACTIONS):
            self._asks = number
        elif not to_server and self._asks == number and not self.lost:
            self.lost += 1
            self._proxy.accepting = self._recovers
            return None
        return data


GONE = "is not there any more; it is not known who has {} it"
TIME = r"[0-9:TZ.+-]+"
FREED = rf"task: freed: token 7, held by one since {TIME}; "
Row = Mapping[str, str]
# By the command: the task's row, what is said, what may have been done, and how many entries tell.
ACTIONS: Mapping[str, tuple[Row, str, str, int]] = {
    "pause task": ({}, "task: paused until it is resumed", "the pause was made", 1),
    "pause --all --for 1h": ({}, f"all tasks: paused by .* until {TIME}", "the pause was made", 1),
    "resume task --as me": (rows.paused("'me'"), "task: resumed", "the pauses were ended", 1),
    "run task": ({}, "task: a run is asked for", "a run was asked for", 1),
    "free task --token 7": (
        {**rows.DEAD, **rows.LATE},
        rf"{FREED}its window stays until {TIME}; it is skipped until it is due at {TIME}; "
        rf"overdue after {TIME}",
        "the task was freed",
        1,
    ),
    "free task --token 7 --run-again": (
        rows.DEAD,
        f"{FREED}its window is open again",
        "the task was freed",
        1,
    ),
    "free task --token 7 --yes": (rows.RETRYING, f"{FREED}.*", "the task was freed", 1),
    "ack task": (
        rows.FAILING,
        r"task: acknowledged \(token 7\)",
        "the failure was acknowledged",
        1,
    ),
    "forget old": ({}, f"old: {GONE.format('forgotten')}", "the task was forgotten", 0),
    "forget --replica gone": (
        {},
        f"gone: {GONE.format('forgotten')}",
        "the replicas were forgotten",
        0,
    ),
    "jobs pause job": ({}, "job: paused until it is resumed", "the job was paused", 1),
    "jobs resume paused": ({}, f"paused: resumed, due {TIME}", "the job was resumed", 1),
    "jobs run job": ({}, "job: a run of its task task is asked for", "a run was asked for", 1),
    "jobs move job --to now": ({}, f"job: moved to {TIME}", "the job was moved", 1),
    "jobs remove job": ({}, "job: removed", "the job was removed", 1),
    "jobs remove unknown": (
        {},
        f"unknown: {GONE.format('removed')}",
        "the job was removed",
        0,
    ),
}


def add_rows(connection: Connection, row: Row) -> None:
    """Add the rows of the tests.

    :param row: the task's columns
    """
    rows.add_task(connection, "task", **row)
    rows.add_task(connection, "old")
    rows.add_replica(connection, "one", ["task"], **rows.STAYS_ALIVE)
    rows.add_replica(connection, "gone", seen_at="now() - interval '10 min'")
    rows.add_job(connection, "job", task_name="'task'")
    rows.add_job(connection, "paused", task_name="'task'", next_run_time="NULL")
    rows.add_job(connection, "unknown")


@pytest.fixture
def tasks(connection: Connection) -> Callable[[Row], None]:
    """Return a function that adds the rows of the tests."""
    return lambda row: add_rows(connection, row)


@pytest.fixture(scope="module")
def own_server() -> Iterator[EmbeddedServer]:
    """A server whose processes can be stopped."""
    with EmbeddedServer({"fsync": "off"}, loopback=True) as server:
        upgrade(server.url)
        yield server


@pytest.fixture
def own_connection(own_server: EmbeddedServer) -> Iterator[Connection]:
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:
    """Return a function that calls another one in a thread."""
    with ThreadPoolExecutor() as threads:
        yield threads.submit


def entries(connection: Connection) -> int:
    found = connection.execute("SELECT count(*) FROM task_lock_run WHERE ring = 'actions'")
    [(number,)] = found.fetchall()
    return int(number)


@pytest.mark.parametrize("words", ACTIONS)
def test_an_action_whose_answer_is_lost_is_done_once_and_told_as_what_it_has_done(
    words: str,
    tasks: Callable[[Row], None],
    proxy: Proxy,
    connection: Connection,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row, says, _, noted = ACTIONS[words]
    tasks(row)
    loss = LosesAnswers(proxy, recovers=True)
    with PatientTaskLocks(proxy.url, claim_timeout=600.0) as locks:
        assert main(words.split(), locks=locks) == 0
    assert loss.lost == 1
    told = capsys.readouterr().out.removesuffix("\n")
    assert re.fullmatch(says, told), told
    assert entries(connection) == noted


def unknown(call: Callable[[TaskLocks], Any], proxy: Proxy, aside: Any) -> Any:
    """Return what becomes of a call whose answer is lost, and which ends while it is sent again."""
    LosesAnswers(proxy, recovers=False)
    locks = PatientTaskLocks(proxy.url, claim_timeout=600.0)
    called = aside(call, locks)
    eventually(lambda: proxy.refused or called.done())
    locks.close()
    return called


@pytest.mark.parametrize("words", ACTIONS)
def test_a_command_without_an_answer_says_that_nothing_is_known(
    words: str,
    tasks: Callable[[Row], None],
    proxy: Proxy,
    aside: Callable[..., Future[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    row, _, whether, _ = ACTIONS[words]
    tasks(row)
    called = unknown(lambda locks: main(words.split(), locks=locks), proxy, aside)
    assert called.result(60) == 7
    said = capsys.readouterr().err
    assert f": it is not known whether {whether}: " in said
    assert "could not be asked" not in said


@pytest.mark.parametrize(
    ("form", "whether"),
    [
        ({"action": "pause", "name": "task", "duration": ""}, "the pause was made"),
        ({"action": "pause-all", "duration": "3600"}, "the pause was made"),
        ({"action": "resume", "name": "task"}, "the pauses were ended"),
        ({"action": "run", "name": "task"}, "a run was asked for"),
        ({"action": "free", "name": "task", "token": "7"}, "the task was freed"),
        ({"action": "ack", "name": "task", "token": "7"}, "the failure was acknowledged"),
        ({"action": "job-remove", "name": "job"}, "the job was removed"),
    ],
)
def test_a_page_after_an_action_without_an_answer_says_that_it_is_not_known(
    form: dict[str, str],
    whether: str,
    tasks: Callable[[Row], None],
    proxy: Proxy,
    aside: Callable[..., Future[Any]],
    database_url: str,
) -> None:
    tasks({**rows.paused("'me'"), **rows.FAILING, **rows.DEAD})

    def post(locks: TaskLocks) -> Any:
        client = TestClient(of(locks), follow_redirects=False)
        return client.post("/act", data=form, headers=SAME)

    answer = unknown(post, proxy, aside).result(60)
    assert answer.status_code == 303
    with PatientTaskLocks(database_url) as locks:
        page = TestClient(of(locks)).get(answer.headers["location"]).text
    assert f"It is not known whether {whether}, because no answer came." in page
    assert "could not be asked" not in page


def of(locks: TaskLocks) -> Any:
    return Dashboard(locks, "", lambda _request: Access("operate", "me"), None).app()


def test_an_action_that_was_certainly_not_sent_is_no_doubt(
    tasks: Callable[[Row], None], proxy: Proxy, connection: Connection
) -> None:
    tasks({})
    proxy.accepting = False
    with (
        PatientTaskLocks(proxy.url, claim_timeout=600.0) as locks,
        pytest.raises(TaskLockDatabaseError) as raised,
    ):
        locks.pause("task")
    assert not isinstance(raised.value, TaskLockUnknownError)
    assert entries(connection) == 0


@pytest.mark.nightly
@pytest.mark.own_server
@pytest.mark.parametrize("words", ACTIONS)
def test_an_action_is_done_once_although_the_server_is_frozen_before_it_answers(
    words: str,
    own_server: EmbeddedServer,
    own_connection: Connection,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The frozen session gets the statement, and carries it out when nobody waits for it."""
    row, says, _, noted = ACTIONS[words]
    for table in ("task_lock", "task_lock_run", "task_lock_replica", "task_lock_job"):
        own_connection.execute(f"DELETE FROM {table}")
    add_rows(own_connection, row)
    others = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> %s"
    frozen: list[int] = []

    def tap(_number: int, to_server: bool, data: bytes) -> bytes:
        if to_server and not frozen and any(mark in data for mark in _OF_ACTIONS):
            frozen.append(pid)
            os.kill(pid, signal.SIGSTOP)
        return data

    with (
        proxy_to(own_server.url) as proxy,
        PatientTaskLocks(proxy.url, claim_timeout=600.0) as locks,
    ):
        locks.tasks()
        [(pid,)] = own_connection.execute(others, [own_connection.info.backend_pid]).fetchall()
        proxy.tap = tap
        try:
            status = main(words.split(), locks=locks)
        finally:
            os.kill(pid, signal.SIGCONT)
        gone = "SELECT FROM pg_stat_activity WHERE pid = %s"
        eventually(lambda: not own_connection.execute(gone, [pid]).fetchall())
    told = capsys.readouterr().out.removesuffix("\n")
    assert (status, frozen) == (0, [pid])
    if noted:
        assert re.fullmatch(says, told), told
    assert entries(own_connection) == noted
