"""The command ``why``: what is known of a task around a moment, such as why it did not run."""

from __future__ import annotations

import argparse
from contextlib import suppress

from apscheduler_tasklock._words.stories import story_lines
from apscheduler_tasklock.cli.exits import OK, say
from apscheduler_tasklock.cli.output import Output, output, print_json
from apscheduler_tasklock.cli.target import name_of, task_locks
from apscheduler_tasklock.errors import TaskLockError, TaskLockNotFoundError
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.status import JobState, JobStatus, Story, Verdict

_STYLES = {
    Verdict.RAN: "",
    Verdict.RUNNING: "bold blue",
    Verdict.MISSED: "bold red",
    Verdict.DUE: "yellow",
    Verdict.UNKNOWN: "magenta",
}


def why(options: argparse.Namespace) -> int:
    """Tell what is known of a task around a moment."""
    with task_locks(options) as locks:
        try:
            story = locks.why(name_of(options, options.task), options.at)
        except TaskLockNotFoundError:
            _tell_of_job(locks, options.task, name_of(options, options.task))
            raise
    if options.json:
        print_json(story)
        return OK
    print_story(story, output())
    return OK


def print_story(story: Story, shown: Output) -> None:
    """Print what is known of a task around a moment."""
    lines = story_lines(story, shown)
    shown.print(lines.headline)
    for line in lines.verdict:
        shown.print(f"  {line}", _STYLES[story.verdict])
    for name, section in lines.sections.items():
        for place, line in enumerate(section):
            shown.print(f"{'' if place else name:<11}{line}")


def _tell_of_job(locks: TaskLocks, job_id: str, task: str) -> None:
    """Say that the name is a stored job's, whose task has no row before its first claim."""
    with suppress(TaskLockError):  # the error that there is no such task is told anyway
        for job in [*locks.jobs(job_id), *locks.jobs(overdue=True)]:
            if job.id == job_id or job.task == task:
                say(_in_words(job))
                return


def _in_words(job: JobStatus) -> str:
    told = f"the job store has a job {job.id!r}, which is {job.state.value}"
    if job.next_run_time is not None:
        told += f", with the run time {output().moment(job.next_run_time)}"
    if job.state is JobState.OVERDUE:
        told += "; `apscheduler-tasklock doctor` says what to do"
    if job.task is not None:
        told += f"; its task is {job.task!r}"
    return told
