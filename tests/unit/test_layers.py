"""The lock is used where APScheduler is not installed.

Which module may import which is checked by import-linter, as pyproject.toml has it, and who uses
private attributes of others by ``tests/layers.py``. `make lint` runs both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# What a script begins with that is to find no APScheduler, as where it is not installed.
WITHOUT_APSCHEDULER = """
import os
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "apscheduler":
            raise ImportError(f"{name} is blocked")
        return None

sys.meta_path.insert(0, Blocked())
url = os.environ["DATABASE_URL"]
"""

HOLDS = """
from apscheduler_tasklock import TaskLockRefusedError, TaskLocks, current_lock

locks, other = TaskLocks(url, replica_id="one"), TaskLocks(url, replica_id="other")
locks.check()
with locks.hold("task", min_lock=0, max_lock=60) as held:
    assert current_lock() is held
    try:
        other.hold("task", min_lock=0, max_lock=60).__enter__()
    except TaskLockRefusedError as refused:
        print("refused by", refused.holder)
with other.hold("task", min_lock=0, max_lock=60) as again:
    print("tokens grow", again.token > held.token)
locks.close()
other.close()
"""

CLAIMS = """
from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock._lock.user import ReplicaUser
from apscheduler_tasklock._lock.protocol_messages import (ClaimRequest)
from apscheduler_tasklock.lock import HeldLock

user = ReplicaUser(LockSettings(url, "one"))
locks = user.locks
held = locks.claim(ClaimRequest("task", min_lock=0, max_lock=60, lease=20))
assert isinstance(held, HeldLock)
refusal = locks.claim(ClaimRequest("task", min_lock=0, max_lock=60))
print("refused by", refusal.holder)
assert locks.release(held) is not None
again = locks.claim(ClaimRequest("task", min_lock=0, max_lock=60))
print("tokens grow", again.token > held.token)
assert locks.release(again) is not None
user.close()
"""


def run_without_apscheduler(
    script: str, database_url: str, checkout: Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_APSCHEDULER + script],
        cwd=checkout,
        env={**os.environ, "DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("script", [HOLDS, CLAIMS], ids=["TaskLocks", "ReplicaUser"])
def test_the_lock_is_used_without_apscheduler(
    database_url: str, checkout: Path, script: str
) -> None:
    finished = run_without_apscheduler(script, database_url, checkout)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == ["refused by one", "tokens grow True"]


@pytest.mark.parametrize("name", ["TaskLockExecutor", "TaskLockEvent"])
def test_what_needs_apscheduler_says_so_without_it(
    database_url: str, checkout: Path, name: str
) -> None:
    """Else the test above would block nothing."""
    script = f"from apscheduler_tasklock import {name}"
    finished = run_without_apscheduler(script, database_url, checkout)
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1].startswith("ImportError: apscheduler")
