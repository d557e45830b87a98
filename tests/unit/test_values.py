"""Values of rows in messages and log lines: each is cut, and says how long it was."""

from __future__ import annotations

import logging
import pkgutil
import sys
from importlib import import_module
from typing import Any

import pytest

import apscheduler_tasklock
from apscheduler_tasklock._runs.skipped_jobs import MOST_LINES, SkippedJobsLog
from apscheduler_tasklock._values import LONGEST_MESSAGE, LONGEST_VALUE, cut, logger_of, shown

LONG = "x" * 1_000_000


def test_what_is_short_is_shown_as_it_is() -> None:
    assert (cut("a job"), shown("a job"), shown({"a": 1})) == ("a job", "'a job'", "{'a': 1}")


@pytest.mark.parametrize("value", [LONG, [LONG], {LONG: 1}, LONG.encode()])
def test_what_is_long_is_shown_cut(value: Any) -> None:
    text = shown(value)
    assert len(text) < LONGEST_VALUE + 50
    assert "characters)" in text
    assert cut(ValueError(LONG)).endswith("x... (1000000 characters)")


@pytest.fixture
def logger() -> logging.Logger:
    return logger_of("apscheduler_tasklock.tests")


def test_each_value_of_a_log_line_is_cut_by_itself(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    logger.error("Job %r: %s; free %d", LONG, ValueError(LONG), 3)
    [record] = caplog.records
    assert record.getMessage().endswith("(1000000 characters); free 3")
    assert len(record.getMessage()) < 3 * LONGEST_MESSAGE
    logger.error("Job %r: %s", "a job", 1.5)
    assert caplog.records[1].args == ("a job", 1.5)


@pytest.mark.parametrize("values", [([LONG],), (["a"] * 1_000_000,), {"name": LONG}])
def test_a_log_line_is_cut_whatever_its_values_are(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture, values: Any
) -> None:
    if isinstance(values, dict):
        logger.error("Job %(name)s", values)
    else:
        logger.error("Job %s", *values)
    assert len(caplog.messages[0]) < 20_000


def test_a_traceback_is_cut(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError(LONG)  # noqa: TRY301  # so that it has a traceback
    except ValueError:
        logger.exception("It failed")
    assert "ValueError: xxx" in caplog.text
    assert len(caplog.text) < 20_000


def test_a_value_that_cannot_be_written_ends_nobody(logger: logging.Logger) -> None:
    class Bad:
        def __str__(self) -> str:
            raise RuntimeError

    record = logger.makeRecord(logger.name, logging.ERROR, "", 1, "Job %s", (Bad(),), None)
    assert logger.filter(record)


def test_all_loggers_of_the_package_cut() -> None:
    names = [
        module.name
        for module in pkgutil.walk_packages(
            apscheduler_tasklock.__path__, "apscheduler_tasklock.", onerror=lambda _name: None
        )
        if module.name in sys.modules or ".jobstore" in module.name or "._" in module.name
    ]
    loggers = {
        name: module.logger
        for name in names
        if "__main__" not in name and "versions" not in name
        if isinstance(getattr(module := import_module(name), "logger", None), logging.Logger)
    }
    assert len(loggers) > 20
    filters = logger_of("apscheduler_tasklock.tests").filters
    assert [name for name, logger in loggers.items() if logger.filters != filters] == []


def test_many_jobs_are_told_of_by_few_lines_and_their_number(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    notices = SkippedJobsLog()
    for _ in range(2):
        for number in range(MOST_LINES + 311):
            notices.log(f"job {number}", logger, logging.ERROR, "Job %d is bad", number)
        notices.sum_up()
    assert len(caplog.messages) == MOST_LINES + 1
    assert caplog.messages[-1].startswith("And 311 more jobs are not run here")


def test_a_job_that_is_bad_again_is_told_of_again(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    notices = SkippedJobsLog()
    for _ in range(2):
        notices.log("job", logger, logging.ERROR, "Job %r is bad", "job")
        notices.log("job", logger, logging.ERROR, "Job %r is bad", "job")
        notices.forget("job")
        notices.sum_up()
    assert caplog.messages == ["Job 'job' is bad"] * 2
