"""The executor contract under gevent, which patches a whole process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.executors.conftest import gevent_patched
from tests.support.postgres import Server


@pytest.mark.nightly
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


TWO_THREADS = """
import sys, threading, time
from datetime import datetime, timezone
from apscheduler.schedulers.gevent import GeventScheduler
from apscheduler_tasklock import EVENT_TASK_LOCK_RELEASED, TaskLockExecutor

ended = threading.Event()
scheduler = GeventScheduler(executors={"default": TaskLockExecutor(sys.argv[1])})
scheduler.add_listener(lambda _event: ended.set(), EVENT_TASK_LOCK_RELEASED)
scheduler.start()
hourly = {"trigger": "interval", "hours": 1, "misfire_grace_time": None}
scheduler.add_job(lambda: None, id="job", next_run_time=datetime.now(timezone.utc), **hourly)
assert ended.wait(60)
names = {each.name for each in threading.enumerate()}
print(*sorted(name for name in names if name.startswith("tasklock")))
scheduler.shutdown()
"""


@pytest.mark.skipif(gevent_patched(), reason="this is the process that gevent has patched")
def test_a_patched_process_has_two_greenlets_of_the_library(
    database_url: str, tmp_path: Path
) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO_THREADS)
    finished = subprocess.run(
        [sys.executable, "-m", "gevent.monkey", str(script), database_url],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["tasklock", "tasklock-application"]
