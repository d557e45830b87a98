"""What a shell completes of a command line, as argcomplete asks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.commands import environment
from tests.support.polling import eventually
from tests.support.rows import add_job, add_replica, add_task

# The command. A shell waits for names for two seconds, in which a busy machine may give no answer.
PATIENT = """
import runpy
from apscheduler_tasklock.cli import completion
completion._TIMEOUT = 60.0
runpy.run_module("apscheduler_tasklock", run_name="__main__")
"""

# The command with a mock in place of the task locks, because a wait is not to be measured.
NOTING = """
import os, runpy
from apscheduler_tasklock.cli import completion
completion.task_locks = lambda options: open(os.environ["ASKED"], "w").write(str(options.timeout))
runpy.run_module("apscheduler_tasklock", run_name="__main__")
"""


def asking(line: str, written: Path) -> dict[str, str]:
    """Return the environment with which a shell asks what can stand at the end of a line."""
    typed = f"apscheduler-tasklock {line}"
    return {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(written),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": typed,
        "COMP_POINT": str(len(typed)),
    }


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("sta", ["status"]),
        ("jo", ["jobs"]),
        ("status --st", ["--state"]),
        ("status --state too", ["too-long"]),
        ("show rep", ["report"]),
        ("runs --outcome error,mis", ["error,missed"]),
        ("runs --replica we", ["web-1"]),
        ("pause --namespace shop: re", ["reorder"]),
        ("jobs rem", ["remove", "reminder"]),
        ("jobs pause rem", ["reminder"]),
    ],
)
def test_a_shell_is_told_what_can_stand_at_the_cursor(
    line: str,
    found: list[str],
    database_url: str,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
) -> None:
    add_task(connection, "report")
    add_task(connection, "shop:reorder")
    add_job(connection, "reminder")
    add_replica(connection, "web-1", ["report"])
    written = tmp_path / "written"

    def told() -> list[str]:
        subprocess.run(
            [sys.executable, "-c", PATIENT],
            env=environment(database_url, **asking(line, written)),
            timeout=60,
            check=False,
        )
        return sorted(written.read_text().split())

    # A shell is told nothing if the database answers too late, and asks again at the next key.
    eventually(lambda: told() == sorted(found), instead=told)


@pytest.mark.parametrize("line", ["status rep", "pause rep", "jobs pause rem", "runs --replica we"])
def test_a_shell_waits_for_no_command_longer_than_for_others(line: str, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    env = environment("", **asking(line, tmp_path / "written"), ASKED=str(asked))
    subprocess.run([sys.executable, "-c", NOTING], env=env, timeout=60, check=False)
    assert asked.read_text() == "2.0"
