"""Run the test suites of APScheduler and django-apscheduler with this library in its place.

Arguments are those of pytest.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psycopg

from apscheduler_tasklock import upgrade
from tests.foreign.sources import unpacked
from tests.foreign.suites import SUITES, Suite
from tests.support.postgres import CACHE, Server, start_server

HERE = Path(__file__).parent

PYTEST = ("-m", "pytest")
PATCHED_PYTEST = ("-m", "gevent.monkey", "--module", "pytest")


def main(arguments: list[str]) -> int:
    """Return 0 if all went as it is listed."""
    server = start_server(None, None)
    say(server.description)
    with server.close:
        failed = [suite for suite in SUITES if not passes(suite, server, arguments)]
    for suite in failed:
        say(f"{title(suite)}: FAILED")
    return 1 if failed else 0


def say(what: str) -> None:
    print(f"make test-foreign: {what}", flush=True)


def title(suite: Suite) -> str:
    if suite.store is not None:
        return f"{suite.sdist}, job stores with {' and '.join(suite.store)}"
    return f"{suite.sdist}{' under gevent' if suite.gevent else ''}"


def passes(suite: Suite, server: Server, arguments: list[str]) -> bool:
    """Run a suite, and tell whether it went as it is listed."""
    say(title(suite))
    folder = unpacked(suite.sdist, CACHE / "foreign")
    options = ["-ra", "--timeout=60", "-p", "no:cacheprovider", "-p", "tasklock_in_place"]
    if suite.django:
        for file in (HERE / "django").glob("*.py"):
            shutil.copy(file, folder / "tests")
        (folder / "tests" / "__init__.py").touch()
        options += ["--ds=tests.settings", "--reuse-db"]
    else:
        options += ["-p", "no:django"]
    if suite.django or suite.store is not None:
        # Not this project's configuration, nor one that needs more plugins.
        (folder / "pytest.ini").write_text("[pytest]\n")
    with server.database() as url, tempfile.TemporaryDirectory() as scratch:
        upgrade(url)
        used = Path(scratch) / "used.json"
        done = subprocess.run(
            [
                sys.executable,
                *(PATCHED_PYTEST if suite.gevent else PYTEST),
                *options,
                *(f"tests/{test}" for test in suite.tests),
                *arguments,
            ],
            cwd=folder,
            env=environment(suite, url, used),
            check=False,
        )
        if done.returncode:
            return False
        return bool(arguments) or was_used(suite, url, json.loads(used.read_text()))


def environment(suite: Suite, url: str, used: Path) -> dict[str, str]:
    """Return what the plugin has to know."""
    settings = {
        "database": url,
        "django": suite.django,
        "store": suite.store,
        "due": suite.due,
        "only": suite.only,
        "used": str(used),
        "differences": [
            {"test": test, "failure": difference.failure, "why": difference.why}
            for difference in suite.differences
            for test in difference.tests
        ],
        "left_out": [asdict(left_out) for left_out in suite.left_out],
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TASKLOCK_", "PYTEST_"))}
    return {
        **inherited,
        "TASKLOCK_FOREIGN": json.dumps(settings),
        "PYTHONPATH": str(HERE / "plugin"),
    }


def was_used(suite: Suite, url: str, used: dict[str, Any]) -> bool:
    """Tell whether the suite's jobs went through this library, and claimed their tasks."""
    if suite.project == "apscheduler" and suite.version != used["apscheduler"]:
        say(f"the tests of {suite.sdist} were run with APScheduler {used['apscheduler']}")
        return False
    if suite.store is not None:
        say(f"jobs found in the database: {used['stored']}")
        return bool(used["stored"])
    with psycopg.connect(url) as connection:
        [claimed] = connection.execute("SELECT count(*) FROM task_lock_run").fetchone() or [0]
    submitted = used["submitted"]
    say(f"jobs given to each executor: {submitted}; runs under a claim: {claimed}")
    missing = sorted(suite.executors - submitted.keys())
    if missing:
        say(f"no job was given to {', '.join(missing)}")
    if suite.claims and not claimed:
        say("no task was claimed")
    return not missing and (claimed > 0 or not suite.claims)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
