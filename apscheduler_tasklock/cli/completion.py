"""What a shell completes: commands, options, states, and the names of tasks, jobs and replicas.

A shell asks by running the command with the environment that argcomplete expects.
"""

from __future__ import annotations

import argparse
import os
from contextlib import AbstractContextManager, suppress
from typing import Any

from apscheduler_tasklock._lock.outcomes import OUTCOMES
from apscheduler_tasklock.cli.jobs import ACTIONS
from apscheduler_tasklock.cli.parser import CommandParser
from apscheduler_tasklock.cli.target import task_locks
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.status import TaskState

# Limits the seconds that a shell waits for names, and how many it is given.
_TIMEOUT = 2.0
_MOST_NAMES = 1_000


def answer_shell(parser: CommandParser) -> None:
    """Answer a shell that asks what can stand at the cursor, and end the process then.

    Return if no shell asks, or if argcomplete is not installed.
    """
    if "_ARGCOMPLETE" not in os.environ:
        return
    with suppress(ImportError):
        import argcomplete

        for name, command in parser.commands.items():
            for action in command._actions:
                completer = _COMPLETERS.get(action.dest)
                if completer is _tasks and name == "jobs":
                    completer = _jobs_and_actions
                if completer is not None and action.nargs != 0:
                    action.completer = completer  # type: ignore[attr-defined]  # argcomplete's
        argcomplete.autocomplete(parser, exclude=[f"jobs {action}" for action in ACTIONS])


def _tasks(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Return the tasks' names that begin with a prefix; none if the database does not answer."""
    namespace = parsed_args.namespace
    with suppress(Exception), _locks(parsed_args) as locks:
        found = locks.tasks(f"{namespace}{prefix}*", limit=_MOST_NAMES)
        return [task.name.removeprefix(namespace) for task in found]
    return []


def _jobs(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Return the jobs' ids that begin with a prefix; none if the database does not answer."""
    with suppress(Exception), _locks(parsed_args) as locks:
        return [job.id for job in locks.jobs(f"{prefix}*")][:_MOST_NAMES]
    return []


def _jobs_and_actions(prefix: str, parsed_args: argparse.Namespace, **more: Any) -> list[str]:
    """Return what can follow ``jobs``: ids, and directly after it also an action."""
    actions = [] if parsed_args.patterns else ACTIONS
    return [*actions, *_jobs(prefix, parsed_args, **more)]


def _states(**_: Any) -> list[str]:
    return [state.value.replace(" ", "-") for state in TaskState]


def _outcomes(prefix: str, **_: Any) -> list[str]:
    """Return the outcomes, each behind those that are written already."""
    written = prefix[: prefix.rfind(",") + 1]
    return [f"{written}{outcome}" for outcome in OUTCOMES if outcome not in written.split(",")]


def _replicas(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Return the replicas' ids; none if the database does not answer."""
    with suppress(Exception), _locks(parsed_args) as locks:
        return [each.replica_id for each in locks.replicas()][:_MOST_NAMES]
    return []


def _locks(parsed_args: argparse.Namespace) -> AbstractContextManager[TaskLocks]:
    """Open the task locks of a line that is not finished. A shell waits for less than a command."""
    parsed_args.locks, parsed_args.timeout = None, _TIMEOUT
    return task_locks(parsed_args)


# By the arguments' names in the parser.
_COMPLETERS = {
    "task": _tasks,
    "tasks": _tasks,
    "patterns": _tasks,
    "jobs": _jobs,
    "state": _states,
    "outcome": _outcomes,
    "replica": _replicas,
}
