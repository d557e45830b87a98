"""Actions: what operators can do in the dashboard. Each is confirmed on a page of its own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from urllib.parse import urlencode

from apscheduler_tasklock._lock.patterns import is_pattern
from apscheduler_tasklock.dashboard.matching import MOST_MATCHING, Shown, TaskFilter
from apscheduler_tasklock.dashboard.queries import Query
from apscheduler_tasklock.errors import TaskLockNotFoundError, TaskLockOptionError
from apscheduler_tasklock.locks import TaskLocks, find_task
from apscheduler_tasklock.status import PauseChange

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

# Stands for what was done in a page's address, if that is not known.
IN_DOUBT = "unknown"

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
    :ivar whether: what may have been done if no answer came, in words
    :ivar done: what is said afterwards, by what was done
    :ivar carry_out: does it; returns what was done with each task or job, which are keys of
        ``done``
    :ivar page: the page that is shown afterwards
    :ivar is_of_all: whether it is about all tasks, and goes without a name
    :ivar fields: the fields that the operator can fill in while confirming
    :ivar kept: the fields that the form takes over from the page before
    """

    title: str
    question: str
    effect: str
    whether: str
    done: Mapping[str, str]
    carry_out: Callable[[TaskLocks, Asked], Sequence[str]]
    page: str = "task"
    is_of_all: bool = False
    fields: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def _exactly(names: Sequence[str], locks: TaskLocks) -> None:
    """Check that tasks exist, because an unknown name with ``*`` would be taken for a pattern.

    :raises TaskLockNotFoundError: a task does not exist
    """
    for name in names:
        if is_pattern(name):
            find_task(locks, name)


def _pause(locks: TaskLocks, asked: Asked) -> Sequence[str]:
    _exactly(asked.names, locks)
    made = locks.pause(
        *asked.names, duration=asked.duration(), by=asked.by, reason=asked.fields.text("reason")
    )
    return ["paused"] * len(made)


def _resume(locks: TaskLocks, asked: Asked) -> Sequence[str]:
    _exactly(asked.names, locks)
    made = locks.resume(*asked.names, by=asked.by, force=asked.is_forced)
    return [_resumed(change) for change in made]


def _resumed(change: PauseChange) -> str:
    """Return what a resume has done."""
    if not change.is_paused:
        return "resumed" if change.was_paused else "not-paused"
    return "partly" if change.ended else "others"


def _pause_all(locks: TaskLocks, asked: Asked) -> Sequence[str]:
    locks.pause_all(
        duration=asked.duration(),
        namespace=asked.namespace,
        by=asked.by,
        reason=asked.fields.text("reason"),
    )
    return ["paused"]


def _resume_all(locks: TaskLocks, asked: Asked) -> Sequence[str]:
    change = locks.resume_all(namespace=asked.namespace, by=asked.by, force=asked.is_forced)
    return [_resumed(change)]


def _run(locks: TaskLocks, asked: Asked) -> Sequence[str]:
    return ["asked" if locks.request_run(asked.name, by=asked.by).is_new else "already"]


def _free(locks: TaskLocks, asked: Asked) -> Sequence[str]:
    freed = locks.free(
        asked.name,
        asked.token(),
        force=asked.is_forced,
        run_again=asked.runs_again,
        by=asked.by,
    )
    return ["open" if freed.run_again else "freed"]


def _ack(locks: TaskLocks, asked: Asked) -> Sequence[str]:
    return ["new" if locks.ack(asked.name, asked.token(), by=asked.by) else "already"]


def _pause_job(locks: TaskLocks, asked: Asked) -> Sequence[str]:
    return ["paused" if locks.pause_job(asked.name, by=asked.by).is_changed else "already"]


def _resume_job(locks: TaskLocks, asked: Asked) -> Sequence[str]:
    return ["resumed" if locks.resume_job(asked.name, by=asked.by).is_changed else "not-paused"]


def _run_job(locks: TaskLocks, asked: Asked) -> Sequence[str]:
    request = locks.run_job(asked.name, by=asked.by)
    if request is None:
        return ["due"]
    return ["asked" if request.is_new else "already"]


def _move_job(locks: TaskLocks, asked: Asked) -> Sequence[str]:
    to = asked.fields.moment("to", asked.zone)
    if to is None:
        raise TaskLockOptionError("the time to which the job is moved is missing")
    moved = locks.move_job(asked.name, to, by=asked.by)
    if not moved.is_changed:
        return ["already"]
    return ["resumed" if moved.was_paused else "moved"]


def _remove_job(locks: TaskLocks, asked: Asked) -> Sequence[str]:
    return ["removed" if locks.remove_job(asked.name, by=asked.by) else "gone"]


# What is said of tasks that are already as somebody wants them.
_ASKED_BEFORE = "A run was asked for before, and has not begun. It is not asked for a second time."
_OTHERS = "It is still paused by somebody else."
# What is said of jobs that have no task, and so no history, so far.
_UNNOTED = "The run history has it if the job has run before."


ACTIONS: Mapping[str, Action] = {
    "pause": Action(
        "Pause",
        "Pause {names}?",
        "No replica begins a run until the pause has ended, except for a manual run. A run that "
        "goes on is not stopped. Run times in the pause are not made up for.",
        "the pause was made",
        {"paused": "Paused."},
        _pause,
        fields=("duration", "reason"),
    ),
    "resume": Action(
        "Resume",
        "Resume {names}?",
        "Your own pauses end now. The task stays paused as long as a pause of somebody else is in "
        "force, unless you end these, too.",
        "the pauses were ended",
        {
            "resumed": "Resumed.",
            "partly": f"Your pauses have ended. {_OTHERS}",
            # Also where the pauses ended whose answer was lost.
            "others": f"You have no pause of it now. {_OTHERS}",
            "not-paused": "It was not paused.",
        },
        _resume,
        fields=("others",),
    ),
    "pause-all": Action(
        "Pause all tasks",
        "Pause all tasks?",
        "No replica begins a run of any task until the pause has ended, except for manual runs. "
        "Runs that go on are not stopped. Run times in the pause are not made up for.",
        "the pause was made",
        {"paused": "All tasks are paused."},
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
        "the pauses were ended",
        {
            "resumed": "All pauses of all tasks have ended.",
            "partly": "Your pauses of all tasks have ended. All tasks are still paused by somebody "
            "else.",
            "others": "You have no pause of all tasks now. All tasks are still paused by somebody "
            "else.",
            "not-paused": "They were not paused all together.",
        },
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
        "a run was asked for",
        {
            "asked": "The run is asked for. A live replica begins it within seconds if it has a "
            "free worker, or else later.",
            "already": _ASKED_BEFORE,
        },
        _run,
    ),
    "free": Action(
        "Free",
        "Free {names}?",
        "Its run is ended in the place of its holder, which is dead or hangs. A holder that is "
        "alive may go on for a third of its lease. If a retry is pending, it is not begun. The "
        "run's window stays, and the next run is that of the next due time, unless you open it.",
        "the task was freed",
        {
            "freed": "Freed. The run's window stays, and the task is due as shown below.",
            "open": "Freed. The run's window is open again.",
        },
        _free,
        fields=("run_again", "force"),
        kept=("token",),
    ),
    "ack": Action(
        "Acknowledge",
        "Acknowledge the last failure of {names}?",
        "Monitors do not alarm because of it any more. A later failure alarms again.",
        "the failure was acknowledged",
        {"new": "Acknowledged.", "already": "It was acknowledged before."},
        _ack,
        kept=("token",),
    ),
    "job-pause": Action(
        "Pause job",
        "Pause the job {names}?",
        "It has no next run time until somebody resumes it. A run that goes on is not stopped. "
        f"{_UNNOTED}",
        "the job was paused",
        {"paused": "The job is paused.", "already": "The job was paused before."},
        _pause_job,
        "jobs",
    ),
    "job-resume": Action(
        "Resume job",
        "Resume the job {names}?",
        "It is run at the first time of its trigger from now on. A one-off job whose date has "
        f"passed runs at once. {_UNNOTED}",
        "the job was resumed",
        {"resumed": "The job is resumed.", "not-paused": "The job was not paused."},
        _resume_job,
        "jobs",
    ),
    "job-run": Action(
        "Run job now",
        "Run the job {names} now?",
        "One replica runs it once. Its schedule does not change. A one-off job runs in place of "
        "its date.",
        "a run was asked for",
        {
            "asked": "The run is asked for. A replica begins it within seconds.",
            "due": "The job is due now. A replica that has its function runs it within seconds.",
            "already": _ASKED_BEFORE,
        },
        _run_job,
        "jobs",
    ),
    "job-move": Action(
        "Move job",
        "Move the next run time of the job {names}?",
        "The run times after it come from the trigger. A time that has passed makes it due at "
        f"once. A paused job is resumed. {_UNNOTED}",
        "the job was moved",
        {
            "moved": "The job is moved.",
            "resumed": "The job is moved, and no longer paused.",
            "already": "The job was due at that time before.",
        },
        _move_job,
        "jobs",
        fields=("to",),
    ),
    "job-remove": Action(
        "Remove job",
        "Remove the job {names}?",
        "It is deleted from the job store, and not run any more. A run that goes on is not "
        f"stopped. {_UNNOTED}",
        "the job was removed",
        {
            "removed": "The job is removed.",
            "gone": "The job is not there any more. It is not known who has removed it.",
        },
        _remove_job,
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


def what_was_done(code: str, counts: str) -> str:
    """Return what is said after an action; ``""`` if there is no such action.

    :param code: the action's code
    :param counts: what was done, as :func:`page_of` writes it
    """
    action = ACTIONS.get(code)
    if action is None:
        return ""
    if counts == IN_DOUBT:
        return (
            f"It is not known whether {action.whether}, because no answer came. This page is read "
            "anew all the time, and shows it as soon as the database answers."
        )
    found = [re.fullmatch(r"([a-z-]+)\*(\d{1,4})", each) for each in counts.split(",")]
    done = {each[1]: int(each[2]) for each in found if each and each[1] in action.done}
    if done and sum(done.values()) == 1:
        return action.done[next(iter(done))]
    return " ".join(f"{number}: {action.done[what]}" for what, number in done.items())


def page_of(
    action: Action, asked: Asked, code: str | None = None, done: Sequence[str] | None = None
) -> str:
    """Return the address, relative to the dashboard, of the page that an action belongs to.

    :param code: the action's code, if the page is to say what has become of it
    :param done: what was done with each task or job; ``None``: this is not known
    """
    parameters = {}
    if code is not None:
        counts = ",".join(f"{what}*{number}" for what, number in Counter(done).items())
        parameters = {"done": code, "counts": IN_DOUBT if done is None else counts}
    page = action.page
    if page == "task" and len(asked.names) == 1:
        parameters["name"] = asked.name
    elif page == "task":
        page = "tasks"
    if asked.matching is not None:
        page, parameters = "tasks", parameters | asked.matching.fields
    return f"{page}?{urlencode(parameters)}" if parameters else page
