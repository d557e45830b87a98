"""Run the test suites of APScheduler and django-apscheduler with this library's executor.

Arguments are those of pytest.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg

from apscheduler_tasklock import upgrade
from tests.foreign.sources import unpacked
from tests.foreign.suites import SUITES, Suite
from tests.support.postgres import CACHE, Server, start_server

HERE = Path(__file__).parent


def main(arguments: list[str]) -> int:
    """Return 0 if all went as it is listed."""
    server = start_server(None, None)
    print(f"make test-foreign: {server.description}", flush=True)
    with server.close:
        failed = [suite.project for suite in SUITES if not passes(suite, server, arguments)]
    if failed:
        print(f"make test-foreign: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def passes(suite: Suite, server: Server, arguments: list[str]) -> bool:
    """Run a suite, and tell whether it went as it is listed."""
    print(f"\nmake test-foreign: {suite.project}", flush=True)
    folder = unpacked(suite.project, CACHE / "foreign")
    plugins = ["tasklock_in_place"]
    if suite.django:
        for file in (HERE / "django").glob("*.py"):
            shutil.copy(file, folder / "tests")
        (folder / "pytest.ini").write_text("[pytest]\n")  # and not this project's configuration
        plugins.append("pytest_django")
    with server.database() as url, tempfile.TemporaryDirectory() as scratch:
        upgrade(url)
        used = Path(scratch) / "used.json"
        command = [sys.executable, "-m", "pytest", "-ra", "--timeout=60", "-p", "no:cacheprovider"]
        for plugin in plugins:
            command += ["-p", plugin]
        if suite.django:
            command += ["--ds=tests.settings", "--reuse-db"]
        files = [f"tests/{file}" for file in suite.files]
        done = subprocess.run(
            [*command, *files, *arguments], cwd=folder, env=environment(suite, url, used), check=False
        )
        if done.returncode:
            return False
        return bool(arguments) or was_used(suite, url, json.loads(used.read_text()))


def environment(suite: Suite, url: str, used: Path) -> dict[str, str]:
    """Return what the plugin has to know."""
    settings = {
        "database": url,
        "django": suite.django,
        "used": str(used),
        "differences": [
            {"test": test, "failure": difference.failure, "why": difference.why}
            for difference in suite.differences
            for test in difference.tests
        ],
        "deselected": [{"test": test, "why": why} for test, why in suite.deselected],
    }
    return {
        **os.environ,
        "TASKLOCK_FOREIGN": json.dumps(settings),
        "TASKLOCK_DATABASE_URL": url,
        "PYTHONPATH": str(HERE / "plugin"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "",
    }


def was_used(suite: Suite, url: str, submitted: dict[str, int]) -> bool:
    """Tell whether jobs of the suite ran under locks of this library."""
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(*) FROM task_lock WHERE token > 0").fetchone()
    assert row is not None
    print(f"make test-foreign: submitted to each executor: {submitted}; tasks claimed: {row[0]}")
    if missing := suite.executors - submitted.keys():
        print(f"make test-foreign: no job was submitted to {missing}", file=sys.stderr)
    if not row[0]:
        print("make test-foreign: nothing was claimed", file=sys.stderr)
    return not missing and row[0] > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
