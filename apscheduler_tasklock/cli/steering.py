"""The commands that change a task: ``pause``, ``resume``, ``run``, ``free`` and ``forget``."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from apscheduler_tasklock.cli.exits import (
    FAILED,
    OK,
    RUN_FAILED,
    WAIT_OVER,
    confirms,
    is_asked,
    message_of,
    say,
)
from apscheduler_tasklock.cli.output import output, print_json
from apscheduler_tasklock.cli.runs import runs_of
from apscheduler_tasklock.cli.target import find_task, name_of, task_locks
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockNotFoundError,
)
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.status import Run, RunRequest, TaskStatus

# Seconds between two looks whether the run has ended.
_INTERVAL = 1.0


def pause(options: argparse.Namespace) -> int:
    """Pause tasks."""
    names = _names(options)
    with task_locks(options) as locks:
        locks.pause(*names, duration=options.duration, reason=options.reason)
        until = _paused_until(locks, names[0])
    shown = output()
    how_long = "until it is resumed"
    if options.duration is not None:
        how_long = (
            f"until {shown.moment(until)}" if until else f"for {shown.seconds(options.duration)}"
        )
    _tell(options, {"paused": names, "until": until}, f"paused {how_long}")
    return OK


def _paused_until(locks: TaskLocks, name: str) -> datetime | None:
    """Return until when a task is paused, which it is by now, whether or not that can be read."""
    try:
        return find_task(locks, name).paused_until
    except TaskLockError as error:
        say(f"until when could not be read: {message_of(error)}")
        return None


def resume(options: argparse.Namespace) -> int:
    """End the pause of tasks."""
    names = _names(options)
    with task_locks(options) as locks:
        locks.resume(*names)
    _tell(options, {"resumed": names}, "resumed")
    return OK


def forget(options: argparse.Namespace) -> int:
    """Delete a task that no longer exists."""
    with task_locks(options) as locks:
        locks.forget(_names(options)[0])
    _tell(options, {"forgotten": _names(options)}, "forgotten")
    return OK


def free(options: argparse.Namespace) -> int:
    """End a claim in the place of its holder."""
    [name] = _names(options)
    with task_locks(options) as locks:
        if not options.yes and is_asked() and not _is_confirmed(find_task(locks, name), options):
            say(f"task {name!r} is not freed")
            return FAILED
        locks.free(name, options.token, force=options.force, run_again=options.run_again)
    told = {"freed": [name], "token": options.token, "run_again": options.run_again}
    _tell(options, told, "freed" + (", and its window is open again" if options.run_again else ""))
    return OK


def run(options: argparse.Namespace) -> int:
    """Ask for a run, and wait for it if that is wanted."""
    [name] = _names(options)
    with task_locks(options) as locks:
        request = locks.request_run(name)
        if not options.wait:
            _tell(options, {"request": request}, "a run is asked for")
            return OK
        ended = _wait(locks, request, options.wait)
    return _tell_of_run(options, request, ended)


@dataclass(frozen=True)
class _End:
    """How the awaited run ended; of a task without a run history without the run itself."""

    outcome: str
    run: Run | None


def _wait(locks: TaskLocks, request: RunRequest, seconds: float) -> _End | None:
    """Return how the run ended, or ``None`` if the wait ran out."""
    over_at = time.monotonic() + seconds
    is_unavailable = False
    while True:
        try:
            ended = _end_of(locks, request)
            if ended is not None:
                return ended
            is_unavailable = False
        except TaskLockDatabaseError as error:
            if not is_unavailable:
                say(f"{message_of(error)}; it is asked again")
            is_unavailable = True
        left = over_at - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(_INTERVAL, left))


def _end_of(locks: TaskLocks, request: RunRequest) -> _End | None:
    # Before its runs, so that a run that has ended here has its entry there.
    try:
        task = find_task(locks, request.task)
    except TaskLockNotFoundError:  # forgotten meanwhile
        return _End("forgotten", None)
    for run in reversed(runs_of(locks, request.task, 20)):
        if run.kind == "manual" and run.token > request.token:
            return _End(run.outcome, run)
    if _has_ended_by_hand(task, request):  # a task without a history
        return _End("error" if task.failures else "ok", None)
    return None


def _has_ended_by_hand(task: TaskStatus, request: RunRequest) -> bool:
    return task.kind == "manual" and task.token > request.token and task.finished_at is not None


def _tell_of_run(options: argparse.Namespace, request: RunRequest, ended: _End | None) -> int:
    outcome = ended.outcome if ended else None
    run = ended.run if ended else None
    told = {"request": request, "outcome": outcome, "run": run}
    if outcome is None:
        _tell(options, told, f"the wait of {options.wait:g} s ran out; the run may still begin")
        return WAIT_OVER
    words = f"ended: {outcome}"
    if run is not None:
        error = ": ".join(part for part in (run.error_type, run.error) if part)
        words += f", took {output().seconds(run.took)} on {run.replica}"
        words += f", {error}" if error else ""
    _tell(options, told, words)
    return OK if outcome == "ok" else RUN_FAILED


def _names(options: argparse.Namespace) -> list[str]:
    return [name_of(options, task) for task in options.tasks]


def _tell(options: argparse.Namespace, told: dict[str, Any], what: str) -> None:
    """Print what was done, once for each task."""
    if options.json:
        print_json(told)
        return
    for name in _names(options):
        output().print(f"{name}: {what}")


def _is_confirmed(task: TaskStatus, options: argparse.Namespace) -> bool:
    """Ask whether to free a task."""
    lease = _until(task.locked_until)
    say(
        f"task {task.name!r} (token {options.token}) is held by {task.holder!r} {lease}. If that "
        "still runs, its run may overlap with the next one for a third of its lease."
    )
    return confirms("Free it?")


def _until(moment: datetime) -> str:
    return f"until {output().moment(moment)}"
