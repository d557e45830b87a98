"""The executor contract under gevent, which patches a whole process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.executors.conftest import gevent_patched
from tests.support.postgres import Server


@pytest.mark.slow
@pytest.mark.skipif(gevent_patched(), reason="this is the process that gevent has patched")
@pytest.mark.timeout(600)
def test_the_executor_contract_holds_under_gevent(server: Server, checkout: Path) -> None:
    patched = [sys.executable, "-m", "gevent.monkey", "--module", "pytest"]
    finished = subprocess.run(
        [*patched, "tests/executors", "-q", "--postgres-url", server.url],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "passed" in finished.stdout
