"""What each layer of the library knows: the lock, nothing of APScheduler; nobody, others' secrets.

Which module may import which is checked by import-linter, as pyproject.toml has it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
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
    print("tokens", again.token - held.token)
locks.close()
other.close()
"""

CLAIMS = """
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock._lock.protocol_messages import (ClaimRequest)
from apscheduler_tasklock.lock import HeldLock

locks = LockClient(LockSettings(url, "one"))
held = locks.claim(ClaimRequest("task", min_lock=0, max_lock=60, lease=20))
assert isinstance(held, HeldLock)
refusal = locks.claim(ClaimRequest("task", min_lock=0, max_lock=60))
print("refused by", refusal.holder)
assert locks.release(held) is not None
again = locks.claim(ClaimRequest("task", min_lock=0, max_lock=60))
print("tokens", again.token - held.token)
assert locks.release(again) is not None
locks.close()
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


@pytest.mark.parametrize("script", [HOLDS, CLAIMS], ids=["TaskLocks", "LockClient"])
def test_the_lock_is_used_without_apscheduler(
    database_url: str, checkout: Path, script: str
) -> None:
    finished = run_without_apscheduler(script, database_url, checkout)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == ["refused by one", "tokens 1"]


@pytest.mark.parametrize("name", ["TaskLockExecutor", "TaskLockEvent"])
def test_what_needs_apscheduler_says_so_without_it(
    database_url: str, checkout: Path, name: str
) -> None:
    """Else the test above would block nothing."""
    script = f"from apscheduler_tasklock import {name}"
    finished = run_without_apscheduler(script, database_url, checkout)
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1].startswith("ImportError: apscheduler")


# The one that knows APScheduler's private attributes.
ADAPTER = "_runs/adapter.py"

# Public all the same: without the underscore they could be fields.
NAMED_TUPLES = {"_field_defaults", "_fields", "_replace"}

# What others have no public name for, elsewhere.
ALLOWED = {
    "_database/thread.py": {"_register_atexit"},  # likewise
    "flask/extension.py": {"_register_atexit"},  # likewise
    "flask/servers.py": {"_loaded_app"},  # Flask's
    "django/management/commands/runscheduler.py": {"_exit"},  # Python's
    "_runs/worker_process.py": {"_exit"},  # likewise
    "schema/migrations.py": {"_downgrade_revs", "_upgrade_revs"},  # Alembic's
    "jobstore/scheduler_inside.py": {  # APScheduler's, for the job store
        "_executors",
        "_getframe",  # Python's
        "_instances",
        "_jobstore_alias",
        "_jobstores",
        "_jobstores_lock",
        "_max_workers",
        "_pool",
        "_real_add_job",
        "_scheduler",
    },
}

_OF_OBJECTS = ("getattr", "setattr", "hasattr", "delattr")


@cache  # several tests walk through the same trees, which takes seconds
def modules(folder: Path) -> dict[str, ast.Module]:
    """Return the modules in a folder by their paths in it."""
    found = sorted(folder.rglob("*.py"))
    return {path.relative_to(folder).as_posix(): ast.parse(path.read_text()) for path in found}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_itself(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def accesses(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the private attributes of others that a module uses, and where."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Attribute | ast.Call):  # because patterns are slow
            continue
        match node:
            case ast.Attribute(value=owner, attr=name) if not is_itself(owner):
                pass
            case ast.Call(
                func=ast.Name(id=function), args=[owner, ast.Constant(value=str(name)), *_]
            ) if function in _OF_OBJECTS and not is_itself(owner):
                pass
            case _:
                continue
        if is_private(name):
            yield name, node.lineno


def own(module: ast.Module) -> set[str]:
    """Return the private attributes that a module's own classes have."""
    names = set()
    for node in ast.walk(module):
        match node:
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store()) if is_itself(owner):
                names.add(name)
            case ast.ClassDef(body=body):
                for statement in body:
                    match statement:
                        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                            names.add(name)
                        case ast.AnnAssign(target=ast.Name(id=name)):
                            names.add(name)
                        case ast.Assign(targets=[ast.Name(id=name)]):
                            names.add(name)
    return names


def test_private_attributes_of_others_are_used_only_where_that_is_allowed(checkout: Path) -> None:
    """Classes of one module may know each other's; of APScheduler's one module knows."""
    found = modules(checkout / "apscheduler_tasklock")
    apschedulers = {name for name, _ in accesses(found[ADAPTER])}
    assert {"_dispatch_event", "_jobstores", "_pool"} <= apschedulers
    wrong = [
        f"{path}:{line}: {name}"
        for path, module in found.items()
        if path != ADAPTER
        for its_own in [own(module)]
        for name, line in accesses(module)
        if name not in NAMED_TUPLES.union(ALLOWED.get(path, ()))
        and (name in apschedulers or name not in its_own)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_private_is_imported_from_another_module(checkout: Path) -> None:
    wrong = [
        f"{path}:{node.lineno}: {alias.name}"
        for path, module in modules(checkout / "apscheduler_tasklock").items()
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if is_private(alias.name)
    ]
    assert not wrong, "\n".join(wrong)


# What executors and instrumentation override, which tests do as well; and Python's own.
OVERRIDDEN = {"_do_submit_job", "_run_job_success", "_run_job_error", "_dispatch_event"}
# The last two are asyncio's for those who write an event loop, as of a simulated world.
PYTHONS = {
    *("_exit", "_getframe", "_current_frames", "_get_running_loop", "_set_running_loop"),
    *NAMED_TUPLES,
}


def test_tests_use_private_attributes_in_their_support_only(checkout: Path) -> None:
    """And where this library is put into APScheduler's place, whose own tests use them."""
    wrong = [
        f"{path}:{line}: {name}"
        for path, module in modules(checkout / "tests").items()
        if not path.startswith(("support/", "foreign/"))
        for names in [own(module) | OVERRIDDEN | PYTHONS]
        for name, line in accesses(module)
        if name not in names
    ]
    assert not wrong, "\n".join(wrong)
