"""What a shell completes of a command line, as argcomplete asks for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psycopg

from tests.support.commands import environment
from tests.support.polling import eventually
from tests.support.rows import add_job, add_replica, add_task

# Answers shells, each in a process of its own, forked from one that has imported the command.
ANSWERING = """
import json, os, sys
from apscheduler_tasklock import cli
from apscheduler_tasklock.cli import completion
{change}
for environment in json.loads(sys.argv[1]):
    pid = os.fork()
    if not pid:
        os.environ.update(environment)
        os._exit(cli.main(["no", "command"]))  # what a shell that asks does not come to
    os.waitpid(pid, 0)
"""

# A shell waits for names for two seconds, in which a busy machine may give no answer.
PATIENT = "completion._TIMEOUT = 60.0"

# A mock in place of the task locks, because a wait is not to be measured.
NOTING = """
def noting(options):
    with open(os.environ["ASKED"], "w") as asked:
        asked.write(str(options.timeout))

completion.task_locks = noting
"""


def answer(change: str, database_url: str, shells: Iterable[dict[str, str]]) -> None:
    """Let the command answer shells, each of which is an environment."""
    subprocess.run(
        [sys.executable, "-c", ANSWERING.format(change=change), json.dumps([*shells])],
        env=environment(database_url),
        timeout=100,
        check=True,
    )


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


FOUND = {
    "sta": ["status"],
    "jo": ["jobs"],
    "status --st": ["--state"],
    "status --state too": ["too-long"],
    "show rep": ["report"],
    "runs --outcome error,mis": ["error,missed"],
    "runs --replica we": ["web-1"],
    "pause --namespace shop: re": ["reorder"],
    "jobs rem": ["reminder", "remove"],
    "jobs pause rem": ["reminder"],
}


def test_a_shell_is_told_what_can_stand_at_the_cursor(
    database_url: str, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    add_task(connection, "report")
    add_task(connection, "shop:reorder")
    add_job(connection, "reminder")
    add_replica(connection, "web-1", ["report"])
    written = {line: tmp_path / str(number) for number, line in enumerate(FOUND)}

    def told() -> dict[str, list[str]]:
        answer(PATIENT, database_url, (asking(line, file) for line, file in written.items()))
        return {line: sorted(file.read_text().split()) for line, file in written.items()}

    # A shell is told nothing if the database answers too late, and asks again at the next key.
    eventually(lambda: told() == FOUND, instead=told)


def test_a_shell_waits_for_no_command_longer_than_for_others(tmp_path: Path) -> None:
    lines = ["status rep", "pause rep", "jobs pause rem", "runs --replica we"]
    asked = {line: tmp_path / f"asked-{number}" for number, line in enumerate(lines)}
    shells = (
        {**asking(line, tmp_path / "written"), "ASKED": str(file)} for line, file in asked.items()
    )
    answer(NOTING, "", shells)
    assert {line: file.read_text() for line, file in asked.items()} == dict.fromkeys(lines, "2.0")
