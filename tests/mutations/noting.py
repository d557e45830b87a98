"""A plugin of pytest: notes in a file how each test went, and which package was tested."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

import apscheduler_tasklock


def _note(**what: Any) -> None:
    with Path(os.environ["MUTATIONS_NOTES"]).open("a", encoding="utf-8") as file:
        print(json.dumps(what), file=file)


def pytest_sessionstart() -> None:
    _note(what="package", name=apscheduler_tasklock.__file__)


def pytest_collection_finish() -> None:
    """Let Hypothesis look for no shorter example, because any failure is enough."""
    settings.register_profile("any", settings(phases=[Phase.explicit, Phase.generate]))
    settings.load_profile("any")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note(what="broken", name=report.nodeid, why=str(report.longrepr))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.failed:
        _note(what="failed", name=report.nodeid, why=str(getattr(crash, "message", "")))
    elif report.when == "call" and report.passed:
        _note(what="passed", name=report.nodeid, why="")
