"""The gate's plugin: the timeouts of a slow machine, and the CPU time of tests."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator
from typing import Any

import pytest

from tests.gate.exceptions import FILE, read
from tests.support.slow_machine import FACTOR

# CPU seconds that a test of the gate may take, its processes that have ended included. A busy
# machine makes them more, so one that is told is a failure from `--cpu-limit` on only.
MOST_CPU = 5.0

CPU = "cpu_seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-limit",
        type=float,
        help="fail if a test of the gate takes more CPU seconds, and is no exception",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        listed = [test for rule, test in read(FILE.read_text()).entries if rule == "cpu"]
        config.pluginmanager.register(CpuTimes(config.getoption("--cpu-limit"), listed))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Multiply each test's timeout on a slow machine, those that tests have of their own too."""
    factor = float(os.environ.get(FACTOR, "1"))
    if factor == 1:
        return
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds = float(marker.args[0] if marker else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(seconds * factor), append=False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    before = sum(os.times()[:4])
    yield
    if not any(map(item.get_closest_marker, ("nightly", "simulate"))):
        item.user_properties.append((CPU, sum(os.times()[:4]) - before))


class CpuTimes:
    """What the reports of a run tell of the CPU time of its tests, in its first process.

    :param limit: in seconds; ``None``: nothing fails
    :param listed: the tests of the list of exceptions
    """

    def __init__(self, limit: float | None, listed: Collection[str]) -> None:
        self.limit = limit
        self.listed = listed
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "call" else ():
            if name == CPU and isinstance(value, float):
                test = report.nodeid.partition("[")[0].removeprefix("tests/")
                self.seconds[test] = max(value, self.seconds.get(test, 0.0))

    def complaints(self) -> list[str]:
        """Return which tests take too much, and which exceptions are no longer needed."""
        if self.limit is None:
            return []
        too_much = [
            f"{test} took {seconds:.1f} CPU seconds, and is not on the list of exceptions"
            for test, seconds in self.seconds.items()
            if seconds > self.limit and test not in self.listed
        ]
        return too_much + [
            f"{test} took {self.seconds[test]:.1f} CPU seconds: take it off the list of exceptions"
            for test in self.listed
            if self.seconds.get(test, MOST_CPU) < MOST_CPU / 2
        ]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        costly = {test: sec for test, sec in self.seconds.items() if sec > MOST_CPU}
        if costly or self.complaints():
            terminalreporter.section(f"tests of the gate above {MOST_CPU:g} CPU seconds")
        for test, seconds in sorted(costly.items(), key=lambda one: -one[1]):
            terminalreporter.write_line(f"{seconds:6.1f} s  {test}")
        for complaint in self.complaints():
            terminalreporter.write_line(complaint, red=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.complaints() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
