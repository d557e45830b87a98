"""The command ``check``: one line for a monitor, in the form of Nagios' plugins."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from apscheduler_tasklock._lock.words import printable
from apscheduler_tasklock._values import cut
from apscheduler_tasklock._words.findings import (
    COUNTED,
    EMPTY,
    PAUSED,
    SEVERITIES,
    severity_of,
)
from apscheduler_tasklock.cli.exits import message_of, remedy_after, without_passwords
from apscheduler_tasklock.cli.output import print_json
from apscheduler_tasklock.cli.target import patterns_of, task_locks
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.locks import read_findings
from apscheduler_tasklock.status import Finding, Overview, TaskState

UNKNOWN = SEVERITIES["unknown"]

# The words of a plugin by its exit status.
_WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")

# Limits the tasks that are named for each kind of finding.
_MOST_NAMES = 5

# Limits the characters of a task's name and its words together.
_LONGEST_NAMED = 300


def check(options: argparse.Namespace) -> int:
    """Print one line on the tasks, and return 0 to 3."""
    patterns = patterns_of(options, options.patterns)
    with task_locks(options) as locks:
        overview, findings = read_findings(
            locks,
            *patterns,
            in_words=lambda error: f"{error}{remedy_after(error)}",
            namespace=options.namespace,
            no_replica_after=options.no_replica_after,
            expect_replicas=options.expect_replicas,
        )
    if options.allow_empty:
        findings = [finding for finding in findings if finding.what != EMPTY]
    numbers = numbers_of(overview)
    return _tell(
        severity_of(findings),
        message_of_findings(findings, overview),
        findings,
        numbers,
        as_json=options.json,
    )


def answer_monitor(answer: Callable[[], int], *, as_json: bool) -> int:
    """Return the exit status, which is 3 for each failure of the command itself."""
    try:
        return answer()
    except TaskLockError as error:
        return _tell(UNKNOWN, message_of(error), as_json=as_json)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # the statuses 1 and 2 are about tasks
        said = " ".join(str(error).split()) or type(error).__name__
        return _tell(UNKNOWN, said, as_json=as_json)


def message_of_findings(findings: Sequence[Finding], overview: Overview) -> str:
    """Return the findings in one line, the worst first, and how many tasks there are.

    Of the notes, only pauses of all tasks are told, because nothing runs meanwhile.
    """
    parts = []
    told = (each for each in findings if each.level != "note" or each.what == PAUSED)
    for kind in dict.fromkeys(finding.what for finding in told):
        those = [finding for finding in findings if finding.what == kind]
        if those[0].task is None:
            parts += [finding.says for finding in those]
            continue
        named = [cut(f"{each.task} {each.says}", _LONGEST_NAMED) for each in those[:_MOST_NAMES]]
        if len(those) > _MOST_NAMES:
            named.append(f"{len(those) - _MOST_NAMES} more")
        parts.append(f"{len(those)} {kind} ({', '.join(named)})")
    count = sum(overview.counts.values())
    return "; ".join([*parts, f"{count} task{'s' * (count != 1)}"])


def numbers_of(overview: Overview) -> dict[str, float]:
    """Return numbers for a graph, by name. One that ends with ``_seconds`` is in seconds."""
    numbers: dict[str, float] = {"tasks": sum(overview.counts.values())}
    for kind in COUNTED:
        name = kind.replace(" ", "_")
        numbers[name] = sum(finding.what == kind for finding in overview.findings)
    for state in (TaskState.RUNNING, TaskState.PAUSED):
        numbers[state.value] = overview.counts[state]
    return {**numbers, "gone": overview.gone, "late_by_seconds": round(overview.late_by, 3)}


def _tell(
    status: int,
    message: str,
    findings: Sequence[Finding] = (),
    numbers: dict[str, float] | None = None,
    *,
    as_json: bool,
) -> int:
    """Print a verdict, and return its exit status."""
    message = without_passwords(message)
    told: dict[str, Any] = {
        "status": _WORDS[status],
        "exit_status": status,
        "message": message,
        "findings": findings,
        "metrics": numbers or {},
    }
    if as_json:
        print_json(told)
    else:
        print(line_of(status, message, numbers), flush=True)
    return status


def line_of(status: int, message: str, numbers: dict[str, float] | None = None) -> str:
    """Return a verdict as one line, with the numbers for a graph at its end."""
    shown = printable(message).replace("|", "\\x7c")  # because the numbers follow a |
    line = f"TASKLOCK {_WORDS[status]} - {shown}"
    if not numbers:
        return line
    return f"{line} | {' '.join(map(_number, numbers, numbers.values()))}"


def _number(name: str, value: float) -> str:
    is_seconds = name.endswith("_seconds")
    return f"{name.removesuffix('_seconds')}={value:.10g}{'s' * is_seconds}"
