"""Actions: what operators can do in the dashboard. Each is confirmed on a page of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from urllib.parse import urlencode

from apscheduler_tasklock.dashboard.matching import MOST_MATCHING, Shown, TaskFilter
from apscheduler_tasklock.dashboard.queries import Query, is_pattern
from apscheduler_tasklock.errors import TaskLockNotFoundError, TaskLockOptionError
from apscheduler_tasklock.locks import TaskLocks

# How long a pause may last, by what the forms send.
DURATIONS = {
    "900": "15 minutes",
    "3600": "1 hour",
    "14400": "4 hours",
    "28800": "8 hours",
    "86400": "1 day",
    "": "until it is resumed",
}

# The actions that can be about all tasks that match a filter.
OF_MATCHING = ("pause", "resume")

# Limits the tasks that are chosen in a form.
_MOST_NAMES = 1_000


@dataclass(frozen=True)
class Asked:
    """What a form asks for.

    :ivar names: the names of tasks, or the ids of jobs
    :ivar fields: its other fields
    :ivar namespace: what the names of all tasks of this dashboard begin with
    :ivar zone: the zone of times; ``None``: this machine's
    :ivar by: the operator's name; ``None``: this process's user and host
    :ivar matching: the filter that the tasks match, if it is about all that do
    """

    names: tuple[str, ...]
    fields: Query
    namespace: str
    zone: tzinfo | None
    by: str | None
    matching: TaskFilter | None = None

    @property
    def shown(self) -> Shown:
        """What the form that was sent had of the tasks that match."""
        return Shown.in_form(self.fields)

    @property
    def is_of_others(self) -> bool:
        """Whether other tasks match now than the operator was shown."""
        return self.matching is not None and self.shown != Shown.of(self.names)

    @property
    def form(self) -> dict[str, str]:
        """The fields of a form that asks about all tasks that match."""
        kept = {} if self.matching is None else self.matching.fields
        return {"all": "matching", **kept, **Shown.of(self.names).fields}

    @property
    def name(self) -> str:
        """The only name.

        :raises TaskLockOptionError: there is none, or more than one
        """
        if len(self.names) != 1:
            raise TaskLockOptionError("this can be done with one task or job at a time")
        return self.names[0]

    @property
    def is_forced(self) -> bool:
        """Whether the form asks to free a run that may be alive, or to end the pauses of others."""
        return self.fields.text("force") == "on"

    @property
    def runs_again(self) -> bool:
        """Whether the form asks to open the run's window again."""
        return self.fields.text("run_again") == "on"

    def duration(self) -> float | None:
        """Return the seconds of a pause; ``None``: until it is resumed.

        :raises TaskLockOptionError: it is none of the durations, and must not be taken for a pause
            without an end
        """
        text = self.fields.text("duration") or ""
        if text not in DURATIONS:
            known = ", ".join(filter(None, DURATIONS))
            raise TaskLockOptionError(
                f"duration must be one of {known} seconds, or empty, not {text[:100]!r}"
            )
        return float(text) if text else None

    def token(self) -> str:
        """Return the token of the run that the operator was shown.

        :raises TaskLockOptionError: it is missing
        """
        token = self.fields.text("token")
        if token is None:
            raise TaskLockOptionError("the token of the last run is missing")
        return token


@dataclass(frozen=True)
class Action:
    """Something that an operator can do.

    :ivar title: what it is called on its button
    :ivar question: what the operator is asked; ``{names}`` stands for the tasks or jobs
    :ivar effect: what it does, in words
    :ivar done: what is said afterwards
    :ivar carry_out: does it
    :ivar page: the page that is shown afterwards
    :ivar is_of_all: whether it is about all tasks, and goes without a name
    :ivar fields: the fields that the operator can fill in while confirming
    :ivar kept: the fields that the form takes over from the page before
    """

    title: str
    question: str
    effect: str
    done: str
    carry_out: Callable[[TaskLocks, Asked], object]
    page: str = "task"
    is_of_all: bool = False
    fields: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def _exactly(names: Sequence[str], locks: TaskLocks) -> None:
    """Check that tasks exist, because an unknown name with ``*`` would be taken for a pattern.

    :raises TaskLockNotFoundError: a task does not exist
    """
    for name in names:
        if is_pattern(name) and name not in {task.name for task in locks.tasks(name)}:
            raise TaskLockNotFoundError([name])


def _pause(locks: TaskLocks, asked: Asked) -> None:
    _exactly(asked.names, locks)
    locks.pause(
        *asked.names, duration=asked.duration(), by=asked.by, reason=asked.fields.text("reason")
    )


def _resume(locks: TaskLocks, asked: Asked) -> None:
    _exactly(asked.names, locks)
    locks.resume(*asked.names, by=asked.by, force=asked.is_forced)


def _pause_all(locks: TaskLocks, asked: Asked) -> None:
    locks.pause_all(
        duration=asked.duration(),
        namespace=asked.namespace,
        by=asked.by,
        reason=asked.fields.text("reason"),
    )


def _resume_all(locks: TaskLocks, asked: Asked) -> None:
    locks.resume_all(namespace=asked.namespace, by=asked.by, force=asked.is_forced)


def _run(locks: TaskLocks, asked: Asked) -> None:
    locks.request_run(asked.name, by=asked.by)


def _free(locks: TaskLocks, asked: Asked) -> None:
    locks.free(
        asked.name,
        asked.token(),
        force=asked.is_forced,
        run_again=asked.runs_again,
        by=asked.by,
    )


def _ack(locks: TaskLocks, asked: Asked) -> None:
    locks.ack(asked.name, asked.token(), by=asked.by)


def _move_job(locks: TaskLocks, asked: Asked) -> None:
    to = asked.fields.moment("to", asked.zone)
    if to is None:
        raise TaskLockOptionError("the time to which the job is moved is missing")
    locks.move_job(asked.name, to, by=asked.by)


ACTIONS: Mapping[str, Action] = {
    "pause": Action(
        "Pause",
        "Pause {names}?",
        "No replica begins a run until the pause has ended, except for a manual run. A run that "
        "goes on is not stopped. Run times in the pause are not made up for.",
        "Paused.",
        _pause,
        fields=("duration", "reason"),
    ),
    "resume": Action(
        "Resume",
        "Resume {names}?",
        "Your own pauses end now. The task stays paused as long as a pause of somebody else is in "
        "force, unless you end these, too.",
        "Your pauses have ended. A task that is still paused has a pause of somebody else.",
        _resume,
        fields=("others",),
    ),
    "pause-all": Action(
        "Pause all tasks",
        "Pause all tasks?",
        "No replica begins a run of any task until the pause has ended, except for manual runs. "
        "Runs that go on are not stopped. Run times in the pause are not made up for.",
        "All tasks are paused.",
        _pause_all,
        "tasks",
        is_of_all=True,
        fields=("duration", "reason"),
    ),
    "resume-all": Action(
        "Resume all tasks",
        "Resume all tasks?",
        "Your own pauses of all tasks end now. Pauses of single tasks, and those of somebody else, "
        "stay in force, unless you end the latter, too.",
        "Your pauses of all tasks have ended. Those of somebody else stay in force.",
        _resume_all,
        "tasks",
        is_of_all=True,
        fields=("others",),
    ),
    "run": Action(
        "Run now",
        "Run {names} now?",
        "One of the replicas that have it runs it once, after a run that goes on. The schedule "
        "does not change. If no replica begins it within an hour, it is dropped.",
        "The run is asked for. A live replica begins it within seconds if it has a free worker, or "
        "else later.",
        _run,
    ),
    "free": Action(
        "Free",
        "Free {names}?",
        "Its run is ended in the place of its holder, which is dead or hangs. A holder that is "
        "alive may go on for a third of its lease. If a retry is pending, it is not begun.",
        "Freed.",
        _free,
        fields=("run_again", "force"),
        kept=("token",),
    ),
    "ack": Action(
        "Acknowledge",
        "Acknowledge the last failure of {names}?",
        "Monitors do not alarm because of it any more. A later failure alarms again.",
        "Acknowledged.",
        _ack,
        kept=("token",),
    ),
    "job-pause": Action(
        "Pause job",
        "Pause the job {names}?",
        "It has no next run time until somebody resumes it. A run that goes on is not stopped.",
        "The job is paused.",
        lambda locks, asked: locks.pause_job(asked.name, by=asked.by),
        "jobs",
    ),
    "job-resume": Action(
        "Resume job",
        "Resume the job {names}?",
        "It is run at the first time of its trigger from now on. A one-off job whose date has "
        "passed runs at once.",
        "The job is resumed.",
        lambda locks, asked: locks.resume_job(asked.name, by=asked.by),
        "jobs",
    ),
    "job-run": Action(
        "Run job now",
        "Run the job {names} now?",
        "One replica runs it once. Its schedule does not change. A one-off job runs in place of "
        "its date.",
        "The run is asked for. A replica begins it within seconds.",
        lambda locks, asked: locks.run_job(asked.name, by=asked.by),
        "jobs",
    ),
    "job-move": Action(
        "Move job",
        "Move the next run time of the job {names}?",
        "The run times after it come from the trigger. A time that has passed makes it due at "
        "once. A paused job is resumed.",
        "The job is moved.",
        _move_job,
        "jobs",
        fields=("to",),
    ),
    "job-remove": Action(
        "Remove job",
        "Remove the job {names}?",
        "It is deleted from the job store, and not run any more. A run that goes on is not "
        "stopped.",
        "The job is removed.",
        lambda locks, asked: locks.remove_job(asked.name, by=asked.by),
        "jobs",
    ),
}


def check_asked(action: Action, asked: Asked) -> None:
    """Check which tasks or jobs a form is about.

    :raises TaskLockOptionError: there is none, or there are too many
    :raises TaskLockNotFoundError: a task is of another namespace
    """
    if action.is_of_all:
        return
    most = _MOST_NAMES if asked.matching is None else MOST_MATCHING
    if not 1 <= len(asked.names) <= most:
        raise TaskLockOptionError(
            f"{action.title}: choose at least one and at most {most:,} of them"
        )
    others = [name for name in asked.names if not name.startswith(asked.namespace)]
    if others and action.page != "jobs":
        raise TaskLockNotFoundError(others)


def page_of(action: Action, asked: Asked, done: str | None = None) -> str:
    """Return the address, relative to the dashboard, of the page that an action belongs to.

    :param done: the action's code, if the page is to say that the action was carried out
    """
    parameters = {} if done is None else {"done": done}
    page = action.page
    if page == "task" and len(asked.names) == 1:
        parameters["name"] = asked.name
    elif page == "task":
        page = "tasks"
    if asked.matching is not None:
        page, parameters = "tasks", parameters | asked.matching.fields
    return f"{page}?{urlencode(parameters)}" if parameters else page
