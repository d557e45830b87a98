"""The thread for the application's own code, by itself."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from apscheduler_tasklock import _application
from apscheduler_tasklock._values import logger_of
from tests.support.polling import eventually

PATIENCE = 60
logger = logger_of("apscheduler_tasklock.tests")

AT_EXIT = """
import logging, sys, threading, time
from apscheduler_tasklock import TaskLocks, _application
from apscheduler_tasklock._database import thread as database_thread
from apscheduler_tasklock._values import logger_of

database_thread.ENDING_LIMIT = 60.0

class Slow(logging.StreamHandler):
    def emit(self, record):
        time.sleep(0.05)
        super().emit(record)

def work():
    _application.keep_application_out()
    for number in range(5):
        logger.warning("line %d", number)

TaskLocks("postgresql://nobody@127.0.0.1:1/nowhere")
logger = logger_of("apscheduler_tasklock.script")
logger.addHandler(Slow(sys.stdout))
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


class Blocking(logging.Handler):
    """A handler that blocks, and what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[logging.LogRecord, str]] = []
        self.go_on = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record, threading.current_thread().name))
        assert self.go_on.wait(PATIENCE)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record, _ in self.records]


@pytest.fixture
def handler() -> Iterator[Blocking]:
    blocking = Blocking()
    logger.addHandler(blocking)
    yield blocking
    blocking.go_on.set()
    _application.flush_application(time.monotonic() + PATIENCE)
    logger.removeHandler(blocking)


def in_a_thread(function: Callable[[], object], name: str = "ours") -> None:
    """Call a function in a thread in which no application's code may run."""

    def work() -> None:
        _application.keep_application_out()
        function()

    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == _application.NAME]


class TestLogRecords:
    def test_of_a_thread_without_the_applications_code_are_handled_in_another(
        self, handler: Blocking
    ) -> None:
        begun = time.time()
        in_a_thread(lambda: logger.warning("one %s", "line"))
        written = time.time()
        eventually(lambda: handler.records)
        [(record, where)] = handler.records
        assert where == _application.NAME
        assert (record.threadName, record.getMessage()) == ("ours", "one line")
        assert begun <= record.created <= written

    def test_keep_their_order_while_a_handler_blocks(self, handler: Blocking) -> None:
        in_a_thread(lambda: [logger.warning("%d", number) for number in range(10)])
        eventually(lambda: handler.records)
        assert len(handler.records) == 1
        handler.go_on.set()
        eventually(lambda: handler.messages == [str(number) for number in range(10)])

    def test_of_others_are_handled_at_once(self, handler: Blocking) -> None:
        handler.go_on.set()
        logger.warning("here")
        assert [where for _, where in handler.records] == [threading.current_thread().name]

    def test_pass_the_applications_filters_there(self, handler: Blocking) -> None:
        handler.go_on.set()
        seen: list[str] = []

        def note(record: logging.LogRecord) -> bool:
            seen.append(threading.current_thread().name)
            return record.getMessage() != "left out"

        logger.addFilter(note)
        try:
            in_a_thread(lambda: (logger.warning("left out"), logger.warning("told")))
            eventually(lambda: handler.messages == ["told"])
        finally:
            logger.removeFilter(note)
        assert set(seen) == {_application.NAME}

    def test_that_a_filter_cannot_stand_keep_no_others_back(
        self, handler: Blocking, capsys: pytest.CaptureFixture[str]
    ) -> None:
        handler.go_on.set()

        def refuse(record: logging.LogRecord) -> bool:
            return bool(1 / (record.getMessage() != "bad"))

        logger.addFilter(refuse)
        try:
            in_a_thread(lambda: (logger.warning("bad"), logger.warning("good")))
            eventually(lambda: handler.messages == ["good"])
        finally:
            logger.removeFilter(refuse)
        assert "ZeroDivisionError" in capsys.readouterr().err

    def test_are_written_before_the_interpreter_ends(self) -> None:
        ended = subprocess.run(
            [sys.executable, "-c", AT_EXIT],
            check=False,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert ended.stdout.split("\n") == [*(f"line {number}" for number in range(5)), ""]
        assert (ended.returncode, ended.stderr) == (0, "")


class TestTheThread:
    def test_is_waited_for_as_long_as_there_is_time(self, handler: Blocking) -> None:
        in_a_thread(lambda: logger.warning("blocks"))
        _application.flush_application(
            time.monotonic() - 1
        )  # comes back, although the handler blocks
        handler.go_on.set()
        in_a_thread(lambda: logger.warning("and another"))
        _application.flush_application(time.monotonic() + PATIENCE)
        assert handler.messages == ["blocks", "and another"]

    def test_leaves_what_does_not_come_back_to_itself_and_goes_on_in_another(self) -> None:
        go_on, called = threading.Event(), threading.Event()
        hung: list[threading.Thread] = []

        def hang() -> None:
            hung.append(threading.current_thread())
            assert go_on.wait(PATIENCE)

        most = _application.MOST_HANGING
        for function in (*[hang] * (most + 1), called.set):
            _application.call_application(function)
        eventually(lambda: len(hung) == 1)
        _application.relieve_application(PATIENCE)  # it has not been waited for that long
        for hanging in range(1, most + 1):
            assert len(hung) == hanging
            _application.relieve_application(0.0)
            eventually(lambda hanging=hanging: len(hung) == hanging + 1)
        _application.relieve_application(0.0)  # so many are the most
        assert len(threads()) == len(set(hung)) == most + 1
        assert not called.is_set()
        go_on.set()
        assert called.wait(PATIENCE)
        eventually(lambda: len(threads()) <= 1)  # the last one may have ended for want of work

    def test_does_not_wait_for_itself(self) -> None:
        """As where a listener shuts the scheduler down."""
        flushed: list[float] = []

        def flush() -> None:
            begun = time.monotonic()
            _application.flush_application(begun + PATIENCE)
            flushed.append(time.monotonic() - begun)

        _application.call_application(flush)
        eventually(lambda: flushed)
        assert flushed[0] < PATIENCE / 2

    def test_ends_when_there_is_nothing_to_do_and_starts_again(
        self, handler: Blocking, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handler.go_on.set()
        # Not 0, with which Python 3.10 waits for ever if it is over before the wait begins.
        monkeypatch.setattr(_application, "LINGER", 0.05)
        _application.call_application(lambda: None)  # the next wait is the short one
        for number in range(20):
            in_a_thread(lambda number=number: logger.warning("%d", number))
            eventually(lambda: threads() == [])
        assert handler.messages == [str(number) for number in range(20)]

    # That what is called raises is what is tried here.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_goes_on_after_an_error(self) -> None:
        called: list[int] = []

        def fail() -> None:
            raise ZeroDivisionError

        _application.call_application(fail)
        _application.call_application(lambda: called.append(1))
        eventually(lambda: called)

    def test_that_cannot_be_started_is_done_without_at_a_flush(
        self, handler: Blocking, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handler.go_on.set()
        monkeypatch.setattr(_application, "_thread", _application.ApplicationThread())
        start = threading.Thread.start

        def no_thread(thread: threading.Thread) -> None:
            if thread.name == _application.NAME:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", no_thread)
        in_a_thread(lambda: logger.warning("kept"))
        assert handler.messages == []
        _application.flush_application(time.monotonic() + PATIENCE)
        assert handler.messages == ["kept"]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
    # The parent has threads, and the child does little.
    @pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
    def test_is_another_one_in_a_forked_child(self, handler: Blocking) -> None:
        in_a_thread(lambda: [logger.warning("the parent's") for _ in range(2)])
        eventually(lambda: handler.records)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            called: list[Any] = []
            _application.call_application(lambda: called.append(threading.current_thread().name))
            _application.flush_application(time.monotonic() + PATIENCE)
            os.write(writing, ",".join([*called, *handler.messages]).encode())
            os._exit(0)
        os.waitpid(child, 0)
        told = os.read(reading, 1000).decode()
        os.close(reading)
        os.close(writing)
        assert told == f"{_application.NAME},the parent's"
