"""Tracebacks in the run history: which frames and exceptions they have, and how long they are."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures.process import _RemoteTraceback  # what a pool adds to an exception

import pytest

from apscheduler_tasklock._lock.outcomes import RunOutcome
from apscheduler_tasklock._lock.tracebacks import (
    LONGEST_TRACEBACK,
    MOST_EXCEPTIONS,
    MOST_FRAMES,
    sections_of,
    traceback_of,
)
from apscheduler_tasklock.schema.table import LONGEST_TEXTS


def frame(function: Callable[..., object], line: int) -> str:
    """Return the line of a frame, of a line of the function counted from its ``def``."""
    code = function.__code__
    return f'  File "{__file__}", line {code.co_firstlineno + line}, in {code.co_name}'


def raised_by(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except Exception as error:  # noqa: BLE001  # each test raises another class
        return error
    raise AssertionError("nothing was raised")


def hidden(error: BaseException) -> str | None:
    return None if "secret" in str(error) else str(error)


def connect() -> None:
    raise ConnectionError("with the secret hunter2")


def report() -> None:
    try:
        connect()
    except ConnectionError as error:
        raise ValueError("no report") from error


def clean_up() -> None:
    try:
        connect()
    except ConnectionError:
        raise KeyError("file") from None


def handle() -> None:
    try:
        connect()
    except ConnectionError:
        {}["key"]


def recurse(times: int = 100) -> None:
    if times:
        recurse(times - 1)
    raise ValueError("deep")


def chain() -> None:
    error = ValueError("0")
    for number in range(1, 1000):
        later = ValueError(str(number))
        later.__cause__, error = error, later
    raise error


class GroupError(Exception):
    """Has what a group of exceptions has, also with Python 3.10."""

    def __init__(self, message: str, exceptions: tuple[BaseException, ...]) -> None:
        super().__init__(message)
        self.exceptions = exceptions


def test_it_has_the_cause_first_and_nothing_that_redact_removes() -> None:
    error = raised_by(report)
    lines = traceback_of(error, hidden).splitlines()
    assert lines == [
        frame(report, 2),
        frame(connect, 1),
        "ConnectionError",
        "",
        "The exception above was the direct cause of this one:",
        "",
        frame(raised_by, 2),
        frame(report, 4),
        "ValueError: no report",
    ]


def test_a_context_is_told_unless_the_job_has_suppressed_it() -> None:
    assert "ConnectionError" not in traceback_of(raised_by(clean_up), hidden)
    text = traceback_of(raised_by(handle), hidden)
    assert "This one was raised while the exception above was handled:" in text
    assert text.endswith("KeyError: 'key'")


def test_each_exception_of_a_group_is_in_it() -> None:
    members = raised_by(report), ValueError("the secret"), TypeError("plain")
    text = traceback_of(GroupError("three", members), hidden)
    assert text.index("GroupError: three") < text.index("Exception 1 of the group above:")
    assert text.index("ValueError: no report") < text.index("Exception 2 of the group above:")
    assert text.endswith("TypeError: plain")
    assert "secret" not in text


def test_it_keeps_the_last_frames_without_source_lines() -> None:
    lines = traceback_of(raised_by(recurse), str).splitlines()
    assert len(lines) == MOST_FRAMES + 1
    assert lines[-2:] == [frame(recurse, 3), "ValueError: deep"]


def test_a_long_chain_keeps_the_exception_that_was_raised() -> None:
    error = raised_by(chain)
    assert len(sections_of(error)) == MOST_EXCEPTIONS
    assert traceback_of(error, str).endswith("ValueError: 999")


def test_an_exception_that_causes_itself_is_told_once() -> None:
    error = ValueError("circle")
    error.__cause__ = error
    assert traceback_of(error, str).count("circle") == 1


def test_it_is_cut_at_the_beginning_to_whole_lines() -> None:
    error = raised_by(chain)
    text = traceback_of(error, lambda _: "m" * 500)
    assert len(text) <= LONGEST_TRACEBACK
    first, second = text.splitlines()[:2]
    assert first == "(the beginning is left out)"
    assert second in ("", "  (its frames are not known)") or second.startswith(("The", "Value"))
    assert text.endswith("m")


def test_a_worker_sends_the_frames_and_no_message() -> None:
    error = raised_by(report)
    sent = pickle.loads(pickle.dumps(sections_of(error)))  # noqa: S301  # made by this test
    arrived = ValueError("no report")  # without frames and cause, as when it was pickled
    text = traceback_of(arrived, str, sent)
    assert "hunter2" not in text
    assert text == traceback_of(error, hidden)


def test_the_text_of_a_workers_traceback_is_left_out() -> None:
    error = TypeError("cannot pickle")
    error.__cause__ = _RemoteTraceback("the secret of a source line")
    assert traceback_of(error, str) == "  (its frames are not known)\nTypeError: cannot pickle"


@pytest.mark.parametrize("breaks", ["redact", "exceptions"])
def test_an_exception_that_breaks_it_does_not_break_the_outcome(breaks: str) -> None:
    class OddError(Exception):
        @property
        def exceptions(self) -> object:
            raise SystemExit if breaks == "exceptions" else AttributeError

    def redact(_: BaseException) -> str:
        raise SystemExit

    outcome = RunOutcome.of(OddError("odd"), redact=redact, tracebacks=True)
    assert (outcome.outcome, outcome.error) == ("error", None)
    assert (outcome.traceback is None) == (breaks == "exceptions")


def test_it_fits_into_the_database() -> None:
    outcome = RunOutcome.of(ValueError("\0 \ud800"), tracebacks=True)
    assert outcome.traceback == "  (its frames are not known)\nValueError: \ufffd ?"


def test_it_fits_into_a_database_that_counts_bytes() -> None:
    """One in SQL_ASCII, where a character is a byte."""
    sign = "\U0001f600"
    error = ValueError(sign * 500)
    for _ in range(15):
        error, cause = ValueError(sign * 500), error
        error.__cause__ = cause
    outcome = RunOutcome.of(error, tracebacks=True)
    assert outcome.error == sign * 500
    assert len(outcome.error.encode()) <= LONGEST_TEXTS["error"]
    assert outcome.traceback is not None
    assert 0 <= LONGEST_TEXTS["traceback"] - len(outcome.traceback.encode()) < len(sign.encode())


def test_there_is_none_unless_it_was_asked_for() -> None:
    assert RunOutcome.of(ValueError("no")).traceback is None
