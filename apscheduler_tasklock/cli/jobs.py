"""The command ``jobs``: the jobs of the job store."""

from __future__ import annotations

import argparse

from apscheduler_tasklock.cli.exits import OK, say
from apscheduler_tasklock.cli.output import Cell, Output, Table, output, print_json
from apscheduler_tasklock.cli.schedules import trigger_in_words
from apscheduler_tasklock.cli.target import check_names, task_locks
from apscheduler_tasklock.cli.text import unreadable_in_words
from apscheduler_tasklock.status import JobState, JobStatus

_COLUMNS = ("job", "state", "trigger", "next run", "last run", "function", "executor", "notes")

# On a narrow terminal, so that an id is whole and can be copied.
_DROPPED = ("executor", "last run", "function", "notes", "trigger", "next run")

_STYLES = {
    JobState.UNREADABLE: "bold red",
    JobState.ENDED: "cyan",
    JobState.HANDED_OUT: "bold blue",
    JobState.PAUSED: "magenta",
    JobState.DUE: "yellow",
    JobState.WAITING: "green",
}


def jobs(options: argparse.Namespace) -> int:
    """Show the jobs of the job store."""
    with task_locks(options) as locks:
        found = locks.jobs(*options.patterns)
    if options.namespace:
        found = [job for job in found if (job.task or "").startswith(options.namespace)]
    check_names(options.patterns, [job.id for job in found], "job")
    if options.json:
        print_json(found)
        return OK
    shown = output()
    rows = [_row(job, shown) for job in found]
    shown.print_table(
        Table(_COLUMNS, rows, dispensable=frozenset({"notes"}), dropped=_DROPPED, first_share=1.0)
    )
    if not found:
        say("no jobs")
    return OK


def _row(job: JobStatus, shown: Output) -> list[Cell | str]:
    return [
        job.id,
        Cell(job.state.value, _STYLES[job.state]),
        trigger_in_words(job.trigger),
        shown.moment(job.next_run_time),
        shown.moment(job.last_run_time),
        job.function,
        job.executor,
        _notes(job, shown),
    ]


def _notes(job: JobStatus, shown: Output) -> str:
    """Return who has the job, and what keeps it from running."""
    notes = [unreadable_in_words(job.unreadable)] if job.unreadable else []
    if job.handed_to is not None:
        notes.append(f"handed out to {job.handed_to}")
    if job.holder is not None:
        notes.append(f"its task runs on {job.holder}")
    if job.task_paused:
        until = shown.moment(job.task_paused_until) or "resumed"
        notes.append(f"its task is paused until {until}")
    return "; ".join(notes)
