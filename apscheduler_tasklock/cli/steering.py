"""The commands that change a task, such as ``pause``, ``run``, ``free`` and ``ack``."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from apscheduler_tasklock._lock.patterns import is_pattern
from apscheduler_tasklock._words.actions import (
    acknowledged_in_words,
    freed_in_words,
    gone_in_words,
    paused_in_words,
    requested_in_words,
    resumed_in_words,
)
from apscheduler_tasklock._words.runs import error_in_words, took_in_words
from apscheduler_tasklock._words.tasks import pause_of_all_in_words, paused_tasks_in_words
from apscheduler_tasklock.cli.exits import (
    FAILED,
    FORBIDDEN,
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
from apscheduler_tasklock.cli.target import name_of, task_locks
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockNotFoundError,
    TaskLockOptionError,
)
from apscheduler_tasklock.locks import TaskLocks, find_task
from apscheduler_tasklock.status import Pause, Run, RunRequest, TaskState, TaskStatus

# Limits the seconds between two reads of the awaited run's row.
_INTERVAL = 1.0

# Limits the reads in a row that find the lease of a run ended. After so many reads the run is
# reported as dead.
_LOOKS_DEAD = 3
_OTHERS = "the pauses of others stay; --force takes them out, and --as NAME those of that name"
_NOT_PAUSED = (
    "not paused are code under `hold`, jobs with task_lock: False or without an id, manual runs, "
    "runs that go on, and replicas with on_database_error='run' while the database is unavailable"
)

# Outcomes of runs that may have been taken over.
_CUT = ("died", "cancelled")


def pause(options: argparse.Namespace) -> int:
    """Pause tasks."""
    if _is_of_all(options):
        return _pause_all(options)
    given, shown = _names(options), output()
    with task_locks(options) as locks:
        changes = locks.pause(
            *given, duration=options.duration, reason=options.reason, by=options.name
        )
    names = [change.task for change in changes]
    if options.json:
        ends = {change.task: change.paused_until for change in changes}
        print_json({"paused": names, "paused_until": ends})
    else:
        for change in changes:
            shown.print(f"{change.task}: {paused_in_words(change, shown)}")
    patterns = [pattern for pattern in given if pattern not in names]
    if patterns:
        told = ", ".join(map(repr, patterns))
        say(f"{_count(names)} paused; tasks that appear later and match {told} are not covered")
    return OK


def resume(options: argparse.Namespace) -> int:
    """Take one's own pauses of tasks out; with ``--force``, all pauses."""
    if _is_of_all(options):
        return _resume_all(options)
    given, shown = _names(options), output()
    with task_locks(options) as locks:
        changes = locks.resume(*given, by=options.name, force=options.force)
    names = [change.task for change in changes if change.is_resumed]
    left = [change for change in changes if change.is_paused]
    if options.json:
        paused = {change.task: change.left for change in left}
        ended = {change.task: change.ended for change in left}
        print_json({"resumed": names, "still_paused": paused, "ended": ended})
    else:
        for change in changes:
            if change.was_paused or change.task in given:
                shown.print(f"{change.task}: {resumed_in_words(change, shown)}")
    if not {change.task for change in changes}.issuperset(given):
        say(f"{_count(names)} resumed")
    return _told_of_others([pause for change in left for pause in change.left])


def _told_of_others(left: Sequence[Pause], resumed: str | None = None) -> int:
    """Say which pauses are left and what ends them, and return the exit status.

    :param resumed: the namespace whose tasks were resumed; ``None``: single tasks were resumed
    """
    for namespace in dict.fromkeys(pause.namespace for pause in left):
        if namespace == resumed:
            say(_OTHERS)
        elif namespace is not None:
            of_some = f" --namespace {shlex.quote(namespace)}" if namespace else ""
            say(f"{paused_tasks_in_words(namespace)} are paused; `resume --all{of_some}` ends that")
    return FORBIDDEN if left else OK


def _is_of_all(options: argparse.Namespace) -> bool:
    """Return whether a command is for all tasks.

    :raises TaskLockOptionError: both or neither of names and ``--all`` are given
    """
    if options.all_tasks and options.tasks:
        raise TaskLockOptionError("give tasks' names or --all, and not both")
    if not (options.all_tasks or options.tasks):
        raise TaskLockOptionError("give tasks' names, or --all for all tasks")
    return bool(options.all_tasks)


def _pause_all(options: argparse.Namespace) -> int:
    if options.duration is None and not options.until_resumed:
        raise TaskLockOptionError("--all needs --for D or --until-resumed")
    with task_locks(options) as locks:
        made = locks.pause_all(
            duration=options.duration,
            namespace=options.namespace,
            by=options.name,
            reason=options.reason,
        )
    say(_NOT_PAUSED)
    if options.json:
        print_json({"paused": made})
    else:
        output().print(pause_of_all_in_words(made, output()))
    return OK


def _resume_all(options: argparse.Namespace) -> int:
    namespace, shown = options.namespace, output()
    with task_locks(options) as locks:
        change = locks.resume_all(namespace=namespace, by=options.name, force=options.force)
    ended, left = change.ended, change.left
    if options.json:
        print_json({"still_paused": left, "ended": ended})
    elif not left:
        words = "resumed" if change.was_paused else "were not paused with --all"
        shown.print(f"{paused_tasks_in_words(namespace)}: {words}")
    else:
        for what, pauses in (("no longer ", ended), ("still ", left)):
            for pause in pauses:
                shown.print(pause_of_all_in_words(pause, shown, what))
    return _told_of_others(left, namespace)


def ack(options: argparse.Namespace) -> int:
    """Acknowledge a failure or a cut."""
    with task_locks(options) as locks:
        name = _one_name(options, locks)
        token = options.token
        if token is None:
            token = find_task(locks, name).token
        is_new = locks.ack(name, token, by=options.name, until=options.until)
    told = {"acknowledged": [name], "token": token, "until": options.until, "is_new": is_new}
    words = acknowledged_in_words(token, options.until, output(), is_new=is_new)
    tell(options, told, words, [name])
    return OK


def forget(options: argparse.Namespace) -> int:
    """Delete a task that no longer exists, or replicas that will not come back."""
    if len(options.tasks) != (options.replica is None):
        raise TaskLockOptionError("forget: give one task's name, or --replica, and not both")
    with task_locks(options) as locks:
        if options.replica is not None:
            found = locks.forget_replicas(options.replica)
            what = gone_in_words("forgotten", is_done=bool(found))
            what += ", as a replica" if found else ""
            tell(options, {"forgotten_replicas": found}, what, found or [options.replica])
            return OK
        name = _one_name(options, locks)
        is_done = locks.forget(name)
    told = {"forgotten": [name] if is_done else [], "gone": [name]}
    tell(options, told, gone_in_words("forgotten", is_done=is_done), [name])
    return OK


def free(options: argparse.Namespace) -> int:
    """Finish a run in place of its holder."""
    with task_locks(options) as locks:
        name = _one_name(options, locks)
        if not options.yes and is_asked() and not _is_confirmed(find_task(locks, name), options):
            say(f"task {name!r} is not freed")
            return FAILED
        freed = locks.free(
            name,
            options.token,
            force=options.force,
            run_again=options.run_again,
            by=options.name,
        )
    # The other fields as they are in the run.
    told = {"freed": [name], **{key: value for key, value in vars(freed).items() if key != "task"}}
    tell(options, told, freed_in_words(freed, output()), [name])
    return OK


def run(options: argparse.Namespace) -> int:
    """Ask for a run, and wait for it with ``--wait``."""
    with task_locks(options) as locks:
        name = _one_name(options, locks)
        request = locks.request_run(name, by=options.name)
        if not options.wait:
            tell(options, {"request": request}, requested_in_words(request, output()), [name])
            return OK
        awaited = AwaitedRun(request)
        ended = _wait(locks, awaited, options.wait)
    return _tell_of_run(options, request, awaited, ended)


@dataclass(frozen=True)
class End:
    """How the awaited run ended. ``run`` is ``None`` if the history does not have the run."""

    outcome: str
    run: Run | None


def _wait(locks: TaskLocks, awaited: AwaitedRun, seconds: float) -> End | None:
    """Return how the run ended, or ``None`` if the wait ran out."""
    over_at = time.monotonic() + seconds
    is_unavailable = False
    while True:
        try:
            ended = _look(locks, awaited)
            if ended is not None:
                return ended
            is_unavailable = False
        except TaskLockDatabaseError as error:
            if not is_unavailable:
                say(f"{message_of(error)}; trying again")
            is_unavailable = True
            awaited.not_seen()
        left = over_at - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(_INTERVAL, left))


def _look(locks: TaskLocks, awaited: AwaitedRun) -> End | None:
    # Read the row before the history. If the run has ended in this row, the history that is
    # read afterwards has the run's entry.
    try:
        task = find_task(locks, awaited.request.task)
    except TaskLockNotFoundError:  # because somebody has used `forget`
        return End("forgotten", None)
    return awaited.look(task, runs_of(locks, awaited.request.task, 20))


class AwaitedRun:
    """A manual run that was asked for, as its task's row and history show it.

    If the run dies and the task has failover, the takeover is awaited in its place.

    :param request: the request for the run
    """

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self._task: TaskStatus | None = None  # as of the last look
        self._token: int | None = None  # of the run, or of its last takeover; None if not begun
        self._looks_dead = 0  # reads in a row that found the run dead

    def not_seen(self) -> None:
        """Note that the task could not be read."""
        self._looks_dead = 0

    def look(self, task: TaskStatus, runs: Sequence[Run]) -> End | None:
        """Return how the run ended, or ``None`` if it has not, so far.

        :param task: the task as its row shows it
        :param runs: its last runs, the newest first, read after the row
        """
        self._task = task
        cut = {run.token for run in runs if run.outcome in _CUT and task.failover}
        claims = {run.token: run.kind for run in runs if run.token is not None}
        self._follow({**claims, task.token: task.kind}, cut)
        is_open = task.token == self._token and task.finished_at is None
        if is_open and task.state is TaskState.DEAD and not task.failover:
            self._looks_dead += 1
            # Several reads must find the run dead, because the holder may only have lost its
            # connection, and may still renew the lease.
            return End("died", None) if self._looks_dead >= _LOOKS_DEAD else None
        self._looks_dead = 0
        for run in runs:
            # A run that died gets its entry with the next claim. If that claim is the takeover,
            # self._token already has the takeover's token.
            if run.token == self._token and not is_open:
                return End(run.outcome, run)
        if task.token == self._token and not is_open:  # a task without a history
            return End(task.outcome or ("error" if task.failures else "ok"), None)
        return None

    def _follow(self, claims: Mapping[int, str | None], cut: Collection[int | None]) -> None:
        """Find the run and its takeovers.

        :param claims: the kinds of the task's claims, by their tokens
        :param cut: tokens of runs that died or were cut. A manual run that follows such a run is
            its takeover.
        """
        claims = dict(claims)
        if self._token is not None:  # a task without a history has only its last claim
            claims.setdefault(self._token, "manual")
        before: int | None = None
        for token in sorted(claims):
            kind = claims[token]
            if self._token is None:
                is_ours = kind == "manual" and token > self.request.token
            else:
                # A takeover is the first claim after the run. A later one may be the takeover of
                # another run.
                takes_over = kind == "takeover" or (kind == "manual" and self._token in cut)
                is_ours = takes_over and before == self._token
            if is_ours:
                self._token = token
            before = token

    def when_it_ran_out(self, now: datetime) -> str:
        """Return in words what has become of the run by the end of the wait.

        :param now: this machine's time
        """
        task = self._task
        if task is None:
            return "the state of the run is not known"
        if self._token is None:
            return self._what_became_of_the_request(task, now)
        if task.token != self._token:
            return "the run has ended, and the history does not have its outcome"
        if task.state in (TaskState.RUNNING, TaskState.TOO_LONG):
            return f"the run goes on, on {task.holder}"
        if task.state is TaskState.HOLDER_SILENT:
            return f"its holder {task.holder} has died or is silent"
        return f"its holder {task.holder} died or was stopped, and its takeover has not begun"

    def _what_became_of_the_request(self, task: TaskStatus, now: datetime) -> str:
        """Return in words why the run's begin was not seen."""
        if task.requested_by is not None:
            return "the run may still begin"
        if now < self.request.until:  # so a run has ended the request
            return "the run has begun, and the history does not have it"
        return "the request has expired"


def _tell_of_run(
    options: argparse.Namespace, request: RunRequest, awaited: AwaitedRun, ended: End | None
) -> int:
    outcome = ended.outcome if ended else None
    run = ended.run if ended else None
    told = {"request": request, "outcome": outcome, "run": run}
    if outcome is None:
        stands = awaited.when_it_ran_out(datetime.now(timezone.utc))
        over = f"the wait of {options.wait:g} s ran out; {stands}"
        tell(options, told, over, [request.task])
        return WAIT_OVER
    words = f"ended: {outcome}"
    if run is not None:
        error = error_in_words(run)
        words += f", took {took_in_words(run, output())} on {run.replica}"
        words += ", as a takeover" if run.kind == "takeover" else ""
        words += f", {error}" if error else ""
    tell(options, told, words, [request.task])
    return OK if outcome == "ok" else RUN_FAILED


def _names(options: argparse.Namespace) -> list[str]:
    return [name_of(options, task) for task in options.tasks]


def _one_name(options: argparse.Namespace, locks: TaskLocks) -> str:
    """Return the full name of the one task that a command is about.

    :raises TaskLockNotFoundError: the name looks like a pattern, and no task has that name
    """
    [name] = _names(options)
    if is_pattern(name):
        try:
            find_task(locks, name)
        except TaskLockNotFoundError:
            say(f"`{options.run.__name__}` takes one task's exact name, and no pattern")
            raise
    return name


def _count(names: Sequence[str]) -> str:
    if len(names) == 1:
        return "1 task is"
    return f"{len(names) or 'no'} task{'s are' if names else ' is'}"


def tell(
    options: argparse.Namespace, told: dict[str, Any], what: str, names: Sequence[str]
) -> None:
    """Print what was done, once for each task."""
    if options.json:
        print_json(told)
        return
    for name in names:
        output().print(f"{name}: {what}")


def _is_confirmed(task: TaskStatus, options: argparse.Namespace) -> bool:
    """Ask whether to free a task."""
    shown = output()
    window = "is open again after that, so that its run time can be run again"
    if not options.run_again:
        window = "stays, so that the next run is that of the next due time"
    say(
        f"task {task.name!r} (token {task.token}) is held by {task.holder!r} since "
        f"{shown.moment(task.started_at)}, locked until {shown.moment(task.locked_until)}. Its "
        f"window {window}. If this holder is alive, its run may overlap with the next run for a "
        "third of its lease."
    )
    return confirms("Free it?")
