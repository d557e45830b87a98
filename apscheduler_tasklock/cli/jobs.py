"""The command ``jobs`` and its actions, which change jobs of the job store."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress

from apscheduler_tasklock._lock.schedules import stored_trigger_in_words
from apscheduler_tasklock._lock.words import unreadable_in_words
from apscheduler_tasklock._words.actions import (
    UNNOTED,
    gone_in_words,
    job_in_words,
    requested_in_words,
)
from apscheduler_tasklock._words.findings import why_unclaimed
from apscheduler_tasklock._words.tasks import pauser_in_words
from apscheduler_tasklock.cli.exits import OK, message_of, say, status_of
from apscheduler_tasklock.cli.output import Cell, Output, Table, output, print_json
from apscheduler_tasklock.cli.steering import tell
from apscheduler_tasklock.cli.target import check_names, task_locks
from apscheduler_tasklock.errors import (
    TaskLockNotFoundError,
    TaskLockSchemaError,
    TaskLockStateError,
)
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.status import JobMoved, JobState, JobStatus, ReplicaStatus

# What may follow `jobs` directly, as a part of the command's name.
ACTIONS = ("pause", "resume", "run", "move", "remove")

_COLUMNS = ("job", "state", "trigger", "next run", "last run", "function", "executor", "notes")

# A narrow terminal leaves these columns out, so that ids are whole and can be copied.
_DROPPED = ("executor", "last run", "function", "notes", "trigger", "next run")

_STYLES = {
    JobState.UNREADABLE: "bold red",
    JobState.RETRYING: "yellow",
    JobState.ENDED: "cyan",
    JobState.PAUSED: "magenta",
    JobState.OVERDUE: "bold red",
    JobState.DUE: "yellow",
    JobState.WAITING: "green",
}


def jobs(options: argparse.Namespace) -> int:
    """Show the jobs of the job store."""
    with task_locks(options) as locks:
        found = locks.jobs(*options.patterns)
        replicas = _replicas(locks, found)
    if options.namespace:
        found = [job for job in found if _is_within(options.namespace, job)]
    ids = [job.id for job in found]
    if options.patterns and options.patterns[0] in ACTIONS and options.patterns[0] not in ids:
        say(f"`{options.patterns[0]}` has to follow `jobs` directly, before any option")
    check_names(options.patterns, ids, "job")
    if options.json:
        print_json(found)
        return OK
    shown = output()
    shown.print_table(job_table(found, replicas, shown))
    if not found:
        say("no jobs")
    return OK


def _replicas(locks: TaskLocks, found: Sequence[JobStatus]) -> list[ReplicaStatus] | None:
    """Return the replicas if a job is overdue; ``None`` also if they cannot be read."""
    with suppress(TaskLockSchemaError):
        if any(job.state is JobState.OVERDUE for job in found):
            return locks.replicas()
    return None


def job_table(
    found: Sequence[JobStatus], replicas: Sequence[ReplicaStatus] | None, shown: Output
) -> Table:
    """Return a table of stored jobs.

    :param replicas: the replicas, for overdue jobs; ``None``: they are not known
    """
    rows = [_row(job, replicas, shown) for job in found]
    return Table(
        _COLUMNS, rows, dispensable=frozenset({"notes"}), dropped=_DROPPED, first_share=1.0
    )


def _row(
    job: JobStatus, replicas: Sequence[ReplicaStatus] | None, shown: Output
) -> list[Cell | str]:
    return [
        job.id,
        Cell(job.state.value, _STYLES[job.state]),
        stored_trigger_in_words(job.trigger),
        shown.cell(job.next_run_time),
        shown.cell(job.last_run_time),
        job.function,
        job.executor,
        _notes(job, replicas, shown),
    ]


def _notes(job: JobStatus, replicas: Sequence[ReplicaStatus] | None, shown: Output) -> str:
    """Return which replica runs the job, and what keeps the job from running."""
    notes = [unreadable_in_words(job.unreadable)] if job.unreadable else []
    if job.paused_since is not None:
        notes.append(pauser_in_words(job.paused_by, job.paused_since, shown))
    if job.holder is not None:
        notes.append(f"its task runs on {job.holder}")
    if job.task_paused:
        until = shown.moment(job.task_paused_until) or "resumed"
        notes.append(f"its task is paused until {until}")
    notes.append(why_unclaimed(job, replicas))
    return "; ".join(filter(None, notes))


def pause(options: argparse.Namespace) -> int:
    """Pause jobs."""

    def paused(locks: TaskLocks, job: JobStatus) -> JobMoved:
        return locks.pause_job(job.id, by=options.name)

    return _change_each(options, "paused", paused)


def resume(options: argparse.Namespace) -> int:
    """Resume jobs."""

    def resumed(locks: TaskLocks, job: JobStatus) -> JobMoved:
        return locks.resume_job(job.id, by=options.name)

    return _change_each(options, "resumed", resumed)


def remove(options: argparse.Namespace) -> int:
    """Remove jobs."""

    def removed(locks: TaskLocks, job: JobStatus) -> bool:
        return locks.remove_job(job.id, by=options.name)

    return _change_each(options, "removed", removed)


def run(options: argparse.Namespace) -> int:
    """Let one replica run a job now."""
    with task_locks(options) as locks:
        [job] = _chosen(options, locks)
        request = locks.run_job(job.id, by=options.name)
    what = "due now"
    if request is not None:
        what = requested_in_words(request, output(), f"a run of its task {request.task}")
    tell(options, {"run": job.id, "request": request}, what, [job.id])
    return OK


def move(options: argparse.Namespace) -> int:
    """Move the next run time of a job."""
    with task_locks(options) as locks:
        [job] = _chosen(options, locks)
        moved = locks.move_job(job.id, options.to, by=options.name)
    told = {"moved": job.id, "next_run_time": moved.next_run_time}
    tell(options, told, _in_words("moved", moved, job), [job.id])
    return OK


def _change_each(
    options: argparse.Namespace,
    key: str,
    change: Callable[[TaskLocks, JobStatus], JobMoved | bool],
) -> int:
    """Change each chosen job, and print the changes.

    If a job's state forbids the change, the other jobs are changed nevertheless.

    :param key: what becomes of the jobs; the key of the changed jobs' ids in the JSON document
    :param change: changes a job; returns what has become of it
    """
    status, done = OK, dict[str, JobMoved | bool]()
    with task_locks(options) as locks:
        chosen = _chosen(options, locks)
        try:
            for job in chosen:
                try:
                    done[job.id] = change(locks, job)
                except (TaskLockStateError, TaskLockNotFoundError) as error:
                    say(message_of(error))
                    status = max(status, status_of(error))
        finally:  # also after an outage has begun, because some jobs may be changed already
            if options.json:
                print_json({key: [name for name, what in done.items() if _is_done(what)]})
            else:
                for job in chosen:
                    if job.id in done:
                        output().print(f"{job.id}: {_in_words(key, done[job.id], job)}")
    return status


def _is_done(what: JobMoved | bool) -> bool:
    return what if isinstance(what, bool) else what.is_changed


def _in_words(key: str, what: JobMoved | bool, job: JobStatus) -> str:
    if isinstance(what, bool):
        words = gone_in_words(key, is_done=what)
    else:
        words = job_in_words(key, what, output())
    return f"{words} ({UNNOTED})" if _is_done(what) and not job.has_task else words


def _chosen(options: argparse.Namespace, locks: TaskLocks) -> list[JobStatus]:
    """Return the jobs whose ids are given, or match a pattern that is given.

    If a job has exactly the id that a pattern spells, the pattern matches only that job. A pattern
    does not match jobs that have ended.

    :raises TaskLockNotFoundError: an id or a pattern matches no job
    """
    chosen, missing = dict[str, JobStatus](), list[str]()
    for given in options.jobs:
        found = locks.jobs(given)
        exact = [job for job in found if job.id == given]
        if exact:
            # A job whose task no replica has registered yet counts as one of the namespace.
            found = [job for job in exact if not job.task or _is_within(options.namespace, job)]
        elif options.patterns:
            found = [job for job in found if _is_within(options.namespace, job)]
            found = [job for job in found if job.state is not JobState.ENDED]
        else:
            if found:
                say("exact ids are needed here, and no patterns")
            found = []
        chosen.update({job.id: job for job in found})
        if not found:
            missing.append(given)
    if missing:
        raise TaskLockNotFoundError(missing, "job")
    return list(chosen.values())


def _is_within(namespace: str, job: JobStatus) -> bool:
    return not namespace or (job.task or "").startswith(namespace)
