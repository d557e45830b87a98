"""Shutdowns in a network that is a black hole: real processes, and the promised 5 seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from apscheduler_tasklock._lock.replica import LockSettings
from tests.support.claims import held
from tests.support.faults import READ
from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxy_to
from tests.support.waist import LockClient

# What is promised of ``scheduler.shutdown()``, and until when Docker waits for the process.
SHUTDOWN = 5.0
EXIT = 10.0
# Seconds without a statement after which a look, with what follows from it, is over.
QUIET = 1.5

pytestmark = pytest.mark.nightly

# What a process has, unless a test says otherwise.
ONE = {
    "jobs": 1,
    "executors": 1,
    "own_engine": False,
    "own_replicas": False,
    "store": False,
    "options": {},
}
PLAIN = [
    pytest.param({"asyncio": False}, id="threads"),
    pytest.param({"asyncio": True}, id="asyncio"),
]
SETUPS = [
    pytest.param(
        {"asyncio": asyncio, "own_engine": own_engine, "options": options},
        id="-".join(("asyncio" if asyncio else "threads", *["engine"] * own_engine, *options)),
    )
    for asyncio in (False, True)
    for own_engine in (False, True)
    for options in ({}, {"claim_timeout": 60})
]


class BlackHole:
    """Swallows all that goes through a proxy, from when it is opened.

    :ivar looked: whether a look at the tasks was answered before, and what follows from it, as
        their registration, is over; the next look is 4 s later
    :ivar has_looked: whether a look at the tasks was answered
    :ivar swallowed: the numbers of the connections on which a client sent something
    """

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._proxy.tap = self._pass_on
        self._looks: set[int] = set()
        self.has_looked = False
        self._passed_at = 0.0
        self.swallowed: set[int] = set()

    @property
    def looked(self) -> bool:
        return self.has_looked and time.monotonic() - self._passed_at > QUIET

    def open(self, *, cut: bool = False) -> None:
        """Swallow from now on.

        :param cut: whether to cut what is connected, so that a new connection has to be opened
        """
        self._proxy.tap = self._swallow
        if cut:
            self._proxy.cut_all()
            eventually(lambda: not self._proxy.connected)

    def _pass_on(self, number: int, to_server: bool, data: bytes) -> bytes:
        self._passed_at = time.monotonic()
        if not to_server:
            self.has_looked = self.has_looked or number in self._looks
        elif READ in data:
            self._looks.add(number)
        return data

    def _swallow(self, number: int, to_server: bool, _data: bytes) -> bytes:
        if to_server:
            self.swallowed.add(number)
        return b""


class Process:
    """A process that runs ``tests.acceptance.shutting_down``."""

    def __init__(self, log: Path, database_url: str, checkout: Path, wanted: Any) -> None:
        self._log = log
        wanted = {**ONE, **wanted}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.acceptance.shutting_down"],
                cwd=checkout,
                env={**os.environ, "DATABASE_URL": database_url, "SCHEDULER": json.dumps(wanted)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        eventually(lambda: self.lines("ready"))

    def lines(self, start: str) -> list[str]:
        return [line for line in self._log.read_text().splitlines() if line.startswith(start)]

    def tell(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n".encode())
        self._process.stdin.flush()

    def shut_down(self) -> tuple[float, float]:
        """Return how long the shutdown took, and how long it was until the process was gone."""
        begun = time.monotonic()
        self.tell("shut down")
        self._process.wait(120)
        took = time.monotonic() - begun
        (line,) = self.lines("shut down")
        assert self._process.returncode == 0
        said = self._log.read_text()
        # APScheduler logs a coroutine that it cancels as it logs any exception.
        assert said.count("Traceback") == len(self.lines("asyncio.exceptions.CancelledError"))
        return float(line.split()[-1]), took

    def leave(self) -> float:
        """End it without a shutdown; return how long it was until the process was gone."""
        begun = time.monotonic()
        self.tell("leave")
        self._process.wait(120)
        return time.monotonic() - begun

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


Start = Callable[..., tuple[Process, BlackHole]]


@pytest.fixture
def start(tmp_path: Path, database_url: str, checkout: Path) -> Iterator[Start]:
    """Start a process whose database is behind what can become a black hole."""
    with ExitStack() as ending:

        def start(**wanted: Any) -> tuple[Process, BlackHole]:
            proxy = ending.enter_context(proxy_to(database_url))
            black_hole = BlackHole(proxy)
            process = Process(tmp_path / "log", proxy.url, checkout, wanted)
            ending.callback(process.end)
            # It opens no connection by itself for a while then; but a job store always looks.
            eventually(lambda: black_hole.looked or (wanted.get("store") and black_hole.has_looked))
            return process, black_hole

        yield start


def ends_in_time(process: Process) -> None:
    took, until_exit = process.shut_down()
    assert took <= SHUTDOWN
    assert until_exit <= EXIT


@pytest.mark.parametrize("wanted", SETUPS)
def test_a_shutdown_ends_while_a_claim_waits_for_its_answer(
    start: Start, wanted: dict[str, Any]
) -> None:
    process, black_hole = start(**wanted)
    black_hole.open()
    process.tell("run jobs")
    eventually(lambda: black_hole.swallowed)
    ends_in_time(process)


@pytest.mark.parametrize("wanted", SETUPS)
def test_a_shutdown_ends_while_a_claim_opens_a_connection(
    start: Start, wanted: dict[str, Any]
) -> None:
    process, black_hole = start(**wanted)
    black_hole.open(cut=True)
    process.tell("run jobs")
    eventually(lambda: black_hole.swallowed)
    ends_in_time(process)


@pytest.mark.parametrize("wanted", SETUPS)
def test_a_shutdown_ends_while_a_release_waits_for_its_answer(
    start: Start, wanted: dict[str, Any]
) -> None:
    process, black_hole = start(**wanted)
    process.tell("run jobs")
    eventually(lambda: process.lines("runs"))
    black_hole.open()
    process.tell("end jobs")
    eventually(lambda: black_hole.swallowed)
    ends_in_time(process)


@pytest.mark.parametrize("wanted", SETUPS)
def test_a_shutdown_that_waits_for_a_job_or_cuts_it_ends_soon_after_it(
    start: Start, wanted: dict[str, Any]
) -> None:
    process, black_hole = start(**wanted)
    process.tell("run jobs")
    eventually(lambda: process.lines("runs"))
    black_hole.open()
    # A function ends as the shutdown begins, and is released in it. A coroutine is cut.
    ends_in_time(process)
    assert black_hole.swallowed


@pytest.mark.parametrize("wanted", PLAIN)
def test_a_shutdown_ends_while_many_claims_wait_for_the_connection(
    start: Start, wanted: dict[str, Any]
) -> None:
    process, black_hole = start(jobs=40, options={"claim_timeout": 60}, **wanted)
    black_hole.open()
    process.tell("run jobs")
    eventually(lambda: len(process.lines("submitted")) == 40)
    eventually(lambda: black_hole.swallowed)
    ends_in_time(process)


SEVERAL = [
    pytest.param({"executors": 3, "asyncio": asyncio, **more}, id="-".join([kind, *more]))
    for kind, asyncio in (("threads", False), ("asyncio", True))
    for more in ({}, {"own_replicas": True}, {"store": True})
]


@pytest.mark.parametrize("begins", ["claims", "releases", "nothing"])
@pytest.mark.parametrize("wanted", SEVERAL)
def test_a_shutdown_of_several_executors_ends_as_soon_as_that_of_one(
    start: Start, wanted: dict[str, Any], begins: str
) -> None:
    """They are shut down one after the other, while each waits for what is not answered."""
    process, black_hole = start(jobs=2, **wanted)
    if begins == "claims":
        black_hole.open()
        process.tell("run jobs")
    else:
        process.tell("run jobs")
        eventually(lambda: len(process.lines("runs")) == 6)
        black_hole.open()
    if begins == "releases":
        process.tell("end jobs")
    if begins != "nothing":
        eventually(lambda: black_hole.swallowed)
    ends_in_time(process)


@pytest.mark.parametrize("failover", [False, True])
def test_a_loop_that_ends_without_a_shutdown_does_not_wait_for_each_release(
    start: Start, failover: bool
) -> None:
    process, black_hole = start(jobs=40, options={"failover": failover}, asyncio=True)
    process.tell("run jobs")
    eventually(lambda: len(process.lines("runs")) == 40)
    black_hole.open()
    assert process.leave() <= 2 * EXIT


def test_a_shutdown_ends_while_a_release_that_began_after_the_stop_is_tried(
    database_url: str,
) -> None:
    """It was begun after claiming was stopped, and before the shutdown came to it."""

    from apscheduler_tasklock._shutdown import SHORTEST_CLOSING, SHUTDOWN_LIMIT

    with (
        proxy_to(database_url) as proxy,
        closing(LockClient(LockSettings(proxy.url, "replica"))) as locks,
    ):
        lock = held(locks, min_lock=0, max_lock=600)
        black_hole = BlackHole(proxy)
        black_hole.open()
        locks.stop_claiming()
        stopped = time.monotonic()
        locks.begin_release(lock)
        eventually(lambda: len(black_hole.swallowed) == 2)  # it is tried for the second time
        locks.close(blocking=True)
        assert time.monotonic() - stopped <= SHUTDOWN_LIMIT + 2 * SHORTEST_CLOSING
