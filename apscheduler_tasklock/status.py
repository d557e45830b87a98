"""The status of tasks, jobs, runs and replicas, for operators. All times are database times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any
from uuid import UUID


class TaskState(str, Enum):
    """The state of a task: the first member of this list that is true of the task.

    For example, a running task never has the state late, because RUNNING comes before LATE.
    """

    UNREADABLE = "unreadable"
    """The task's row has a value that no replica writes, such as a ``schedule`` that is no JSON.

    ``TaskStatus.unreadable`` has the columns. The rest of the status is uncertain.
    """
    TOO_LONG = "too long"
    """A run of the task goes on for longer than ``max_runtime``, by default its maximum lock.

    The task has this state also while another replica runs a later window; see
    ``TaskStatus.stuck``.
    """
    HOLDER_SILENT = "holder silent"
    """The last run is not over, and its replica has died or is silent, as its state says. Nobody
    knows whether the run goes on. No other replica runs the task before the lease has ended."""
    RUNNING = "running"
    """A run of the task goes on, on a replica that is alive as far as rows tell."""
    PAUSED = "paused"
    """The task is paused, or its stored job is, and no run of it is going on or dead."""
    DEAD = "dead"
    """The last run's lease has ended: its holder was killed, or cannot reach the database."""
    OVERDUE = "overdue"
    """The task was due, its grace time has passed, and no replica has run it."""
    LATE = "late"
    """The task is due, and its grace time has not passed."""
    MISSED = "missed"
    """The task is that of a one-off job, and no replica has run its last run time."""
    CUT = "cut"
    """A shutdown has cancelled the last run, and no replica has run the run's window again."""
    RETRYING = "retrying"
    """The last run failed, and is run again soon; see ``TaskStatus.retry_at``."""
    FAILING = "failing"
    """The last run failed, or an operator has freed it."""
    GONE = "gone"
    """The task was removed: there are live replicas, and none of them has it."""
    NEW = "new"
    """A replica has the task, and the task has never run."""
    OK = "ok"


# The states in the order of urgency: the worst one first.
URGENCY = (
    *(TaskState.UNREADABLE, TaskState.TOO_LONG, TaskState.DEAD, TaskState.OVERDUE),
    *(TaskState.FAILING, TaskState.MISSED, TaskState.CUT, TaskState.LATE, TaskState.RETRYING),
    *(TaskState.HOLDER_SILENT, TaskState.RUNNING, TaskState.PAUSED, TaskState.GONE),
    *(TaskState.NEW, TaskState.OK),
)
# The orders in which ``TaskLocks.tasks`` returns tasks.
ORDERS = ("name", "due", "started", "duration", "failures", "urgency")
# The orders in which ``TaskLocks.runs`` and ``TaskLocks.jobs`` return entries and jobs.
RUN_ORDERS, JOB_ORDERS = ("newest", "name", "duration"), ("due", "name")


@dataclass(frozen=True)
class RunningRun:
    """A run that has not ended.

    :ivar task: the task's name
    :ivar token: the run's fencing token
    :ivar replica: the replica that runs it
    :ivar since: when it was granted
    :ivar lost: whether its lock is lost, so that another replica may run the task: the run has
        outlived its maximum lock, was taken over, or was freed
    """

    task: str
    token: int
    replica: str
    since: datetime
    lost: bool = False

    @property
    def reported(self) -> dict[str, Any]:
        """The run as a JSON-like dict for the replica's row; ``since`` in seconds since 1970."""
        since = self.since.timestamp()
        return {"task": self.task, "token": self.token, "since": since, "lost": self.lost}


@dataclass(frozen=True)
class Pause:
    """A pause that has not ended.

    :ivar by: who has paused; ``""``: not known, because an application has paused its stored job
    :ivar since: when it was made; of a stored job, when the job was changed last
    :ivar until: its end; ``None``: until it is resumed
    :ivar reason: the reason
    :ivar namespace: the text with which the names of the paused tasks begin; ``""``: all tasks are
        paused; ``None``: one task is paused
    :ivar job: the id of the stored job that is paused, by ``TaskLocks.pause_job`` or by the
        application; ``None``: no job is paused, but tasks
    """

    by: str
    since: datetime
    until: datetime | None
    reason: str | None
    namespace: str | None = None
    job: str | None = None


@dataclass(frozen=True)
class PauseChange:
    """What has become of a task's pauses, by its row as a pause or a resume has left it.

    :ivar task: the task's name; for all tasks of a namespace, the pattern of their names
    :ivar ended: the pauses that were taken out
    :ivar left: the pauses that are left, those of all tasks last
    :ivar was_paused: whether the task was paused before
    :ivar is_paused: whether the task is paused now
    """

    task: str
    ended: tuple[Pause, ...]
    left: tuple[Pause, ...]
    was_paused: bool
    is_paused: bool

    @property
    def is_resumed(self) -> bool:
        """Whether the task was paused and is not paused any more."""
        return self.was_paused and not self.is_paused

    @property
    def paused_until(self) -> datetime | None:
        """When the last pause ends; ``None``: it has no end, or there is none."""
        ends = [pause.until for pause in self.left]
        return None if None in ends else max(filter(None, ends), default=None)


@dataclass(frozen=True)
class Freed:
    """A run that an operator has finished in place of its holder, and its task's row after that.

    :ivar task: the task's name
    :ivar token: the run's fencing token
    :ivar holder: the replica that ran it
    :ivar since: when the run began
    :ivar window_until: when the run's window ends, before which no run time is run; ``None`` if the
        task had only manual runs
    :ivar due_at: when the task is due next; ``None`` if it is not known, or no run follows
    :ivar overdue_at: from when that run counts as overdue
    :ivar run_again: whether the window is open again, so that its run time can be run again
    """

    task: str
    token: int
    holder: str
    since: datetime
    window_until: datetime | None
    due_at: datetime | None
    overdue_at: datetime | None
    run_again: bool


@dataclass(frozen=True)
class OptionSource:
    """The value of a task's option, and where it is set.

    :ivar value: the value; ``None``: no limit
    :ivar place: ``"job"``: in the job's kwargs; ``"jobs"``: in the executor's option ``jobs``;
        ``"function"``: by its decorator; ``"executor"``; or ``"default"``
    """

    value: Any
    place: str


@dataclass(frozen=True)
class TaskStatus:
    """The status of a task, read from its row.

    :ivar name: the task's name
    :ivar state: the state
    :ivar schedule: the trigger in canonical form, as JSON-like data, with its end, and with the
        start of a calendar interval; if the parts of a combination have several time zones, with
        these; ``None``: not registered
    :ivar kind: kind of the last run: ``"schedule"``, ``"takeover"``, ``"retry"``, ``"manual"`` or
        ``"hold"``
    :ivar token: fencing token of the last run
    :ivar holder: replica of the last run
    :ivar scheduled_at: run time of the last run
    :ivar started_at: when the last run began; ``None`` if the task has never run
    :ivar finished_at: when the last run ended; ``None`` while the run goes on, and if its holder
        died
    :ivar window_until: when the window of the last run ends. Run times before that are not run.
    :ivar locked_until: until when the task is locked, unless its claim is renewed or released
    :ivar run_until: when the maximum lock of the last run ends
    :ivar due_at: when the next run is due; ``None`` if there is none, or its time is not known
    :ivar overdue_at: from when the next run counts as overdue
    :ivar late_by: seconds since ``due_at``; ``None`` unless the task is late or overdue
    :ivar took: seconds that the last run took, or has taken so far, at most if its holder is
        silent; for a run that died or was handed over, the seconds until its lease ended
    :ivar outcome: outcome of the last run: as in :class:`Run`, or ``"cut"`` if a shutdown has
        cut the run or handed it over; ``None`` while the run goes on, and if it is not known
    :ivar cut_for: seconds since a stop cut the last run or handed it over; ``None`` if no stop did,
        or if a replica has run the window again
    :ivar acknowledged: whether its last failure, cut or miss raises no alarm any more, because an
        operator has acknowledged it, or it is older than a day and the task is a one-off job
    :ivar stuck: runs that go on although their lock is lost and they have taken longer than
        ``max_runtime``, by default their maximum lock; the oldest first
    :ivar succeeded_at: when a run last ended without an error
    :ivar failed_at: when a run last failed, or was found dead
    :ivar failures: how many run times in a row have failed, without one whose retry is to come or
        goes on
    :ivar error_type: class of the last run's exception
    :ivar paused: whether the task is paused, so that no claim of it is granted
    :ivar paused_until: end of its last pause; ``None``: until somebody resumes the task
    :ivar pauses: its pauses that have not ended, in the order in which they were made, then those
        of all tasks, and then that of its stored job, which also stands here if ``paused`` is false
    :ivar requested_by: who has asked for a manual run that has not begun yet
    :ivar requested_at: when that manual run was asked for
    :ivar gone: whether the task was removed: there are live replicas, and none of them has it
    :ivar failover: whether the window of the last run is run again if the run's holder dies
    :ivar function: reference of the job's function; ``None``: only ``hold`` uses the task
    :ivar unreadable: columns of the row that cannot be read. An unreadable schedule is ``None``.
    :ivar missed_at: the last run time of a one-off job, if no replica has run it; ``None`` for
        other tasks
    :ivar options: the lock options of its job by name, as a replica has registered them
    :ivar zone: the name of its trigger's time zone; ``None`` if it is not known
    :ivar attempt: which attempt at its run time the last run is: 1, or more for a retry
    :ivar retry_at: when the failed last run is run again; ``None``: it is not
    :ivar failure: how the last failure came about, also while the next run goes on: ``"error"``,
        ``"died"``, ``"overran"`` or ``"freed"``; ``None`` if it is not known, and if ``failures``
        is 0
    :ivar silent_until: until when its failures, cuts and misses raise no alarm, because an operator
        wants it so; ``None``: they do
    """

    name: str
    state: TaskState
    schedule: Any
    kind: str | None
    token: int
    holder: str
    scheduled_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    window_until: datetime | None
    locked_until: datetime
    run_until: datetime
    due_at: datetime | None
    overdue_at: datetime | None
    late_by: float | None
    took: float | None
    outcome: str | None
    cut_for: float | None
    acknowledged: bool
    stuck: tuple[RunningRun, ...]
    succeeded_at: datetime | None
    failed_at: datetime | None
    failures: int
    error_type: str | None
    paused: bool
    paused_until: datetime | None
    pauses: tuple[Pause, ...]
    requested_by: str | None
    requested_at: datetime | None
    gone: bool
    failover: bool
    function: str | None = None
    unreadable: tuple[str, ...] = ()
    missed_at: datetime | None = None
    options: Mapping[str, OptionSource] = field(default_factory=dict)
    zone: str | None = None
    attempt: int = 1
    retry_at: datetime | None = None
    failure: str | None = None
    silent_until: datetime | None = None

    @property
    def delay(self) -> float | None:
        """Seconds from the last run's run time until it began, as a rule its wait for a worker.

        It is ``None`` unless the last run is of the kind ``"schedule"``.
        """
        if self.kind != "schedule" or self.scheduled_at is None or self.started_at is None:
            return None
        return max(0.0, (self.started_at - self.scheduled_at).total_seconds())


@dataclass(frozen=True)
class Overview:
    """What an operator sees at a glance: how the tasks and the replicas are now.

    Each list has at most as many tasks as were asked for; ``counts`` tells how many there are. A
    task can be in several lists.

    :ivar now: the time of the overview, by the database's clock
    :ivar counts: how many tasks have each state; 0 for a state that no task has
    :ivar gone: how many tasks are gone, of whatever state
    :ivar late_by: seconds for which the latest task has been due, if it is not gone; 0: none is due
    :ivar findings: what an operator should know, the worst first. They are what
        ``apscheduler-tasklock check`` tells, and no list limits them.
    :ivar running: tasks with the states running, holder silent and too long, the run that began
        first first
    :ivar due_next: tasks that are due in the future and not paused, the soonest first
    :ivar paused: tasks that are paused or whose stored job is, also those of which a run goes on.
        Tasks with pauses of their own come first.
    :ivar pauses_of_all: the pauses of all tasks that have not ended
    :ivar alive: how many replicas are alive; ``None``: the replicas cannot be read
    :ivar silent: how many replicas have given a sign of life in the last day, and are now silent or
        dead, without having reported their shutdown; ``None``: the replicas cannot be read
    """

    now: datetime
    counts: Mapping[TaskState, int]
    gone: int
    late_by: float
    findings: tuple[Finding, ...]
    running: tuple[TaskStatus, ...]
    due_next: tuple[TaskStatus, ...]
    paused: tuple[TaskStatus, ...]
    pauses_of_all: tuple[Pause, ...]
    alive: int | None
    silent: int | None


_NO_REPLICA = "no live replica has it, or can import its function, not counting those that stop"
_OVERDUE = "it is due, and no live replica takes it, or can import its function"


class JobState(str, Enum):
    """The state of a stored job: the first member of this list that is true of the job."""

    UNREADABLE = "unreadable"
    """The job's row has a value that no replica writes; see ``JobStatus.unreadable``."""
    RETRYING = "retrying"
    """The run of the job's last run time has failed, and is run again soon."""
    ENDED = "ended"
    """The job's last run time was claimed. The job is removed when that run is over."""
    PAUSED = "paused"
    """The job has no next run time, until somebody resumes the job."""
    OVERDUE = "overdue"
    """The job has been due for longer than a minute and its ``misfire_grace_time``, and no replica
    has claimed it, although no pause, no run and no retry of its task is in the way."""
    DUE = "due"
    """The job's run time has come, and no replica has claimed the run time."""
    WAITING = "waiting"
    """The job's next run time is in the future."""


@dataclass(frozen=True)
class JobStatus:
    """The status of a job of the job store, read from its row.

    :ivar id: the job's id
    :ivar state: the state
    :ivar name: its APScheduler name; ``None`` if its row lacks one
    :ivar function: reference of its function, such as ``"myapp.jobs:send"``
    :ivar trigger: its trigger as it is stored, as JSON-like data
    :ivar executor: alias of its executor
    :ivar next_run_time: its next run time; ``None`` if the job is paused or has ended
    :ivar last_run_time: the run time that was claimed last; ``None``: no run time was claimed
    :ivar task: its task's name; ``None``: not registered
    :ivar holder: the replica on which its task runs; ``None`` if it does not run
    :ivar task_paused: whether its task is paused, by ``TaskLocks.pause``
    :ivar task_paused_until: end of that pause; ``None``: until somebody resumes the task
    :ivar unreadable: columns of its row that cannot be read. An unreadable trigger is ``None``.
    :ivar argument_names: the names of its arguments: ``"args[0]"`` and so on for positional ones,
        and then the names of the keyword arguments, sorted. Empty if its arguments are pickled.
    :ivar has_replica: whether a live replica that is not stopping has its task, and so can import
        its function; ``None`` if that is not known
    :ivar has_task: whether its task has a row, and so a page and a status: from its first claim on
    :ivar paused_since: when it was paused; if it was changed since, when it was changed last;
        ``None``: it is not paused
    :ivar paused_by: who has paused it; ``None``: not known, or it is not paused
    """

    id: str
    state: JobState
    name: str | None
    function: str
    trigger: Any
    executor: str
    next_run_time: datetime | None
    last_run_time: datetime | None
    task: str | None
    holder: str | None
    task_paused: bool
    task_paused_until: datetime | None
    unreadable: tuple[str, ...] = ()
    argument_names: tuple[str, ...] = ()
    has_replica: bool | None = None
    has_task: bool = False
    paused_since: datetime | None = None
    paused_by: str | None = None

    @property
    def why_not_run(self) -> str | None:
        """Why the job cannot be run now, in words; ``None``: it can, as far as its row tells.

        A one-off job that is overdue would have been run by a replica that can import its function.
        """
        if self.state is JobState.UNREADABLE:
            return "its row cannot be read; it can be paused and removed"
        if self.state in (JobState.RETRYING, JobState.ENDED):
            return None
        if self.is_one_off:
            return _OVERDUE if self.state is JobState.OVERDUE else None
        if self.task is None:
            return "no replica has registered its task"
        return _NO_REPLICA if self.has_replica is False else None

    @property
    def is_one_off(self) -> bool:
        """Whether the job has only one run time, because its trigger is a date."""
        return isinstance(self.trigger, dict) and self.trigger.get("type") == "date"


# The kinds of a run; see :class:`Run`.
KINDS = ("schedule", "takeover", "retry", "manual", "hold", "operator")


@dataclass(frozen=True)
class JobMoved:
    """A stored job whose next run time an operator has set, as its row has been left.

    :ivar job_id: the job's id
    :ivar next_run_time: its next run time; ``None``: it is paused
    :ivar was_paused: whether it was paused before
    :ivar is_changed: whether the call has changed it; otherwise it had that next run time already
    """

    job_id: str
    next_run_time: datetime | None
    was_paused: bool
    is_changed: bool


class MissCause(str, Enum):
    """Why no replica has run a run time: the values of ``Run.cause``.

    If a replica knows two causes of one run time, it tells the cause that comes first here: what
    is true for all replicas before what is so on one of them.
    """

    PAUSED = "paused"
    """An operator had paused the task."""
    DATABASE = "database"
    """The database did not answer the claim, or rejected it."""
    RUNNING = "running"
    """An earlier run of the task was not known to be over."""
    MISFIRE = "misfire"
    """No worker was free within the job's grace time, or the scheduler came too late."""
    UNASKED = "unasked"
    """No replica asked for it."""
    MOVED = "moved"
    """The schedule was changed before it, and the new schedule does not have it."""
    REFUSED = "refused"
    """The application has set it, by ``modify_job`` or ``add_job``, inside the window of a run."""


@dataclass(frozen=True)
class Run:
    """A run that is over, a missed run time, or what an operator did, read from the run history.

    :ivar task: the task's name
    :ivar token: the run's fencing token; ``None`` for a missed run time, and for what an operator
        did
    :ivar scheduled_at: its run time; for missed run times, the first one; ``None`` for a manual run
        and for ``hold``
    :ivar started_at: when the run was granted, when a replica noted that the run time was missed,
        or when the operator did it
    :ivar ended_at: when it was released; for a run that died or overran, when its lease ended; for
        missed run times, when the last one was noted
    :ivar replica: the replica that ran it, or was the first to note that it was missed; empty for
        what an operator did, and for missed run times before the start of the replica that noted
        them
    :ivar kind: ``"schedule"``, ``"takeover"``, ``"retry"``, ``"manual"`` or ``"hold"``;
        ``"operator"`` for what an operator did
    :ivar outcome: ``"ok"``, ``"error"`` or ``"cancelled"``; ``"died"``: its holder died, or has not
        reported the run's end yet; ``"overran"``: it outlived its maximum lock, while its holder
        lived; ``"freed"``: an operator freed its task, and the run has not reported its end;
        ``"overtaken"``: it was taken over or freed, and has ended afterwards; ``"missed"``: no
        replica has run the run time, see ``reason``. For what an operator did: ``"paused"``,
        ``"resumed"``, ``"run"`` (a manual run was asked for), ``"freed"`` or ``"acknowledged"``;
        with a job of the job store ``"job-paused"``, ``"job-resumed"``, ``"job-moved"`` or
        ``"job-removed"``. ``"rescheduled"``: a replica has changed the task's schedule
    :ivar error_type: class of its exception
    :ivar error: message of its exception, 500 characters at most
    :ivar traceback: its exception's frames, chain and group, 4,000 characters at most; ``None``
        unless the option ``tracebacks`` is on
    :ivar by: the operator's name, or the replica that has changed the schedule; ``None`` for a run
    :ivar until: when the operator's pause ends, or the request for a manual run expires; ``None``:
        it has no end
    :ivar reason: the operator's reason for a pause; for a change of a job, its next run time in
        words; for a changed schedule, the old and the new one; for missed run times, why no replica
        ran them
    :ivar cause: for missed run times, the reason in one word for programs, a value of
        :class:`MissCause`; ``None`` for all other entries
    :ivar last_scheduled_at: for missed run times, the last one; ``None`` for all other entries
    :ivar run_times: for missed run times, how many they are, where a number above 10,000 means more
        than 10,000; ``None`` for all other entries
    :ivar attempt: which attempt at its run time it was: 1, or more for a retry; ``None`` if the
        entry is of no run
    :ivar retry_at: when the failed run was to be run again; ``None``: it was not
    :ivar release: the release of the application that ran it; ``None``: it is not known, or the
        entry is of no run
    """

    task: str
    token: int | None
    scheduled_at: datetime | None
    started_at: datetime
    ended_at: datetime
    replica: str
    kind: str
    outcome: str
    error_type: str | None
    error: str | None
    by: str | None = None
    until: datetime | None = None
    reason: str | None = None
    traceback: str | None = None
    cause: str | None = None
    last_scheduled_at: datetime | None = None
    run_times: int | None = None
    attempt: int | None = None
    retry_at: datetime | None = None
    release: str | None = None

    @property
    def took(self) -> float:
        """Seconds from the run's grant to its end."""
        return (self.ended_at - self.started_at).total_seconds()


@dataclass(frozen=True)
class LaneEntry:
    """What lies on a lane: a run, a missed run time, or several too short to be told apart.

    :ivar task: the task's name; ``None``: they are of several tasks
    :ivar replica: the replica that ran it, or noted that it was missed; ``None``: several did
    :ivar kind: as in :class:`Run`
    :ivar outcome: as in :class:`Run`, all have the same; ``"running"``: the run goes on;
        ``"too long"``: it goes on, and for longer than it may; ``"holder silent"``: it is not over,
        and its replica has died or is silent
    :ivar since: when the run began, or the missed run time; of several, of the first one
    :ivar until: when the run ended; of several, the last one; ``None``: it is not over
    :ivar count: how many runs or missed run times these are
    :ivar run: the history's entry, if there is one and it stands alone
    """

    task: str | None
    replica: str | None
    kind: str
    outcome: str
    since: datetime
    until: datetime | None
    count: int = 1
    run: Run | None = None


@dataclass(frozen=True)
class Lane:
    """The runs and missed run times of one task, or of one replica, in a span of time.

    :ivar name: the name of the task or the replica; ``""``: run times that no replica has run
    :ivar known_since: before this time the history has not everything of the lane, since it keeps
        so many entries of each task; ``None``: it has everything. Of a replica, it is the time
        since which the runs of all tasks are kept.
    :ivar left_out: how many entries in the span are left out, because they are too many; they
        ended well, and are longer than a part of the span
    :ivar left_until: when the last of these ended; ``None``: none are left out
    :ivar entries: the first one first
    """

    name: str
    known_since: datetime | None
    left_out: int = 0
    left_until: datetime | None = None
    entries: tuple[LaneEntry, ...] = ()


@dataclass(frozen=True)
class Lanes:
    """Some of the lanes of a span of time, those with trouble first.

    :ivar now: the database's time
    :ivar known_since: the time since which the runs of all tasks that were asked for are kept;
        ``None``: the history has everything
    :ivar number: how many lanes there are, of which these are some
    :ivar pauses: pauses and resumptions of these tasks, and of all tasks of a namespace, that were
        made until the end of the span, the newest first
    :ivar outages: from which run time to which one the database did not answer, as the missed run
        times tell of it
    """

    now: datetime
    lanes: tuple[Lane, ...]
    number: int
    known_since: datetime | None = None
    pauses: tuple[Run, ...] = ()
    outages: tuple[tuple[datetime, datetime], ...] = ()


@dataclass(frozen=True)
class Spread:
    """How long the runs of a span took that ended well.

    :ivar runs: how many they are
    :ivar median: seconds that half of them took at most
    :ivar most: seconds that 95 of 100 of them took at most
    """

    runs: int
    median: float
    most: float


@dataclass(frozen=True)
class Durations:
    """How long the runs of a task took that ended well, as far as the run history reaches.

    :ivar last_day: the runs that began in the last 24 hours; ``None``: there are none
    :ivar week_before: those that began in the seven days before; ``None``: there are none, or the
        history does not reach so far back
    :ivar kept_since: when the oldest run began that the history has; ``None``: it has none
    """

    last_day: Spread | None
    week_before: Spread | None
    kept_since: datetime | None


class ReplicaState(str, Enum):
    """The state of a replica: the first member of this list that is true of the replica."""

    UNREADABLE = "unreadable"
    """The replica's row has a value that no replica writes; see ``ReplicaStatus.unreadable``."""
    STOPPED = "stopped"
    """The replica has reported its shutdown, and that no run of it goes on any more."""
    DIED = "died"
    """A run of the replica has died, and the replica has sent no sign of life since then. A replica
    that was killed while its shutdown waited for a run has died, too, also if an operator has freed
    that run. Before a takeover, a lease
    that has ended counts once another replica has sent a sign of life since its end, because in an
    outage of the database no replica can renew a lease."""
    ALIVE = "alive"
    """The replica has sent a sign of life in the last 45 seconds. It sends one every 30 seconds."""
    SILENT = "silent"
    """No sign of life for 45 seconds: the replica is dead, hangs, or cannot reach the database."""


@dataclass(frozen=True)
class ReplicaStatus:
    """The status of a replica, read from its row.

    :ivar replica_id: its id
    :ivar host: the host's name
    :ivar version: the version of this library
    :ivar started_at: when it started
    :ivar seen_at: time of its last sign of life; a replica sends one every 30 seconds
    :ivar state: the state
    :ivar tasks: the names of its tasks, sorted
    :ivar running: its running runs, sorted by task
    :ivar unfinished: its other runs that are not over, sorted by task: their leases have ended, so
        that they are dead, or could not be renewed
    :ivar rejected: what the database rejects of its work, each as ``"history: <why, and what to
        do>"``; empty if nothing
    :ivar unreadable: columns of its row that cannot be read completely. ``tasks``, ``rejected`` and
        ``running`` have the entries that can be read.
    :ivar leader_namespace: the namespace in which it leads or follows; ``None``: it is not in
        leader mode
    :ivar leads: whether it leads the replicas of its namespace
    :ivar leaderless_for: seconds since its start for which nobody has led its namespace; ``None``:
        a replica leads, or this one is not in leader mode
    :ivar stopping_since: since when its shutdown waits for its runs, or when it began if the
        replica has died or fallen silent before its end; ``None``: it has not begun, or is over
    :ivar release: the release of the application that runs there; ``None``: it is not known
    """

    replica_id: str
    host: str
    version: str
    started_at: datetime
    seen_at: datetime
    state: ReplicaState
    tasks: tuple[str, ...]
    running: tuple[RunningRun, ...]

    @property
    def alive(self) -> bool:
        """Whether the replica is alive, as far as its row shows."""
        return self.state is ReplicaState.ALIVE

    @property
    def state_in_words(self) -> str:
        """The state, whether the replica leads, and whether it stops or was stopping."""
        words = [self.state.value]
        if self.leads and self.alive:
            words.append("leads")
        if self.stopping_since is not None:
            words.append("stopping" if self.alive else "while it was stopping")
        return " ".join(words) if not self.alive else ", ".join(words)

    rejected: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    leader_namespace: str | None = None
    leads: bool = False
    leaderless_for: float | None = None
    stopping_since: datetime | None = None
    release: str | None = None
    unfinished: tuple[RunningRun, ...] = ()


@dataclass(frozen=True)
class Silence:
    """A namespace with a recurring task that is not paused, and without a live replica.

    :ivar namespace: what the names of its tasks begin with; ``""``: no executor of it has one
    :ivar replica: the replica that was seen last
    :ivar seen_at: when it was seen
    :ivar is_stopped: whether it has reported its shutdown
    :ivar sign_at: when a task of the namespace was last claimed, renewed or released
    """

    namespace: str
    replica: str
    seen_at: datetime
    is_stopped: bool
    sign_at: datetime | None


@dataclass(frozen=True)
class Misses:
    """Missed run times among the last ten of a recurring task, but for those in a pause.

    Run times of an earlier schedule count neither, nor those that the application has set inside
    the window of a run.

    :ivar task: the task's name
    :ivar in_a_row: how many run times were missed since the last one that was run
    :ivar of_ten: how many of the last ten run times were missed
    :ivar since: the first missed one since the last that was run; if there is none, the last one
    :ivar last_at: the last missed one
    :ivar reason: why no replica has run that one
    """

    task: str
    in_a_row: int
    of_ten: int
    since: datetime
    last_at: datetime
    reason: str | None


class Verdict(str, Enum):
    """What became of the run time that a :class:`Story` is about."""

    RUNNING = "running"
    """The run goes on, or its holder is dead and the run is not over."""
    RAN = "ran"
    """A replica has run it, and the run is over."""
    MISSED = "missed"
    """No replica has run it."""
    DUE = "due"
    """It is due, no replica has run it so far, and no reason is noted."""
    UNKNOWN = "unknown"
    """The history does not reach back so far, or the task has never been due."""


@dataclass(frozen=True)
class DueTimes:
    """Run times that have come, that nobody has begun, and of which no reason is noted.

    :ivar first: the first one
    :ivar last: the last one; if they are not counted, the last one that was computed
    :ivar run_times: how many they are; ``None``: more than are counted
    :ivar is_exact: whether these are the schedule's own times. If not, each replica has times of
        its own, and these are only near them.
    :ivar is_due: whether the task's row says that it is due. If not, only its schedule says so: the
        job may have been moved, or was not there.
    :ivar cause: why, as far as it is known by now: ``"paused"``, ``"running"``, or ``"unasked"`` if
        no replica with the task was alive, or each one was stopping; ``None``: it is not known
    :ivar reason: the cause in words
    :ivar noted_from: from when on a replica that lived at the first one notes the reason; ``None``:
        it is not known, or there is no such replica
    """

    first: datetime
    last: datetime
    run_times: int | None
    is_exact: bool
    is_due: bool
    cause: str | None
    reason: str | None
    noted_from: datetime | None


@dataclass(frozen=True)
class Story:
    """What is known of a task around a moment: the answer to the question why it did not run.

    :ivar task: the task's status now
    :ivar at: the moment
    :ivar verdict: what became of the last run time that is known until that moment
    :ivar scheduled_at: that run time; for a manual run or a ``hold``, when it began; ``None`` if no
        run time is known
    :ivar runs: the ended runs of that run time, the earlier first: more than one if a dead run was
        taken over. A run that goes on is in ``task`` alone.
    :ivar miss: the entry of that run time if no replica has run it, with the reason
    :ivar before: the run before that run time
    :ivar after: the run after it
    :ivar actions: the pauses that were in force at the run ``before``, and then what operators did
        and changes of the schedule, from that run until the run ``after``, the earlier first. If
        ``before`` is ``None``, all that are known until ``after``
    :ivar replicas: the replicas that have the task, as far as they have given a sign of life in the
        last hour
    :ivar history_begins_at: the time from which the run history is complete. Before it nothing is
        known but failures and misses. ``None``: there is no history.
    :ivar read_at: when all this was read
    :ivar running: the runs of the task that had begun at the moment and go on, the earlier first:
        also those whose lock is lost, because they were taken over
    :ivar due: the run times until the moment that nobody has begun and that no entry tells of, the
        earlier first; times with the same cause are together
    :ivar not_known_after: the time after which the task's run times until the moment are not known,
        such as those of a trigger of the application; ``None``: they are known
    :ivar misses_begin_at: the time from which all missed run times are kept; ``None``: none has
        been overwritten so far
    """

    task: TaskStatus
    at: datetime
    verdict: Verdict
    scheduled_at: datetime | None
    runs: tuple[Run, ...]
    miss: Run | None
    before: Run | None
    after: Run | None
    actions: tuple[Run, ...]
    replicas: tuple[ReplicaStatus, ...]
    history_begins_at: datetime | None
    read_at: datetime | None = None
    running: tuple[RunningRun, ...] = ()
    due: tuple[DueTimes, ...] = ()
    not_known_after: datetime | None = None
    misses_begin_at: datetime | None = None


@dataclass(frozen=True)
class Health:
    """The health of an executor, for probes. No statement is sent to the database to find it.

    :ivar live: whether the scheduler works: its thread is alive, no job in memory has been due for
        more than a minute, and the lock's own threads are not stuck. If ``False``, only a restart
        helps.
    :ivar ready: whether the executor has started, and has read its table once. A later outage does
        not change ``ready``.
    :ivar degraded: the faults, such as an unavailable database, a missing right, overdue tasks, or
        a trigger or job store of the application that hangs; empty if there are none. A restart
        does not help against an unavailable database or a missing right.
    :ivar locked_jobs: how many jobs of the executor have a lock, without those of a
        ``TaskLockJobStore``
    :ivar unlocked_jobs: how many jobs of the executor have no lock, and so run on this replica
        whatever others do
    """

    live: bool
    ready: bool
    degraded: tuple[str, ...]
    locked_jobs: int = 0
    unlocked_jobs: int = 0


@dataclass(frozen=True)
class Finding:
    """What an operator should know of the set-up, of a task, or of the replicas.

    ``TaskLocks.doctor`` finds what is wrong with the set-up. ``TaskLocks.overview`` finds what is
    not well with the tasks, and this is what ``apscheduler-tasklock check`` tells.

    :ivar what: what the finding is about, such as ``"connection"`` or ``"overdue"``
    :ivar level: of ``doctor``: ``"ok"``; ``"note"``: worth knowing, and the task lock works; or
        ``"wrong"``. Of ``overview``: ``"note"``, ``"warning"``, ``"critical"`` or ``"unknown"``
    :ivar says: the state that was found, without secrets
    :ivar remedy: what to do; ``""`` for nothing
    :ivar task: the task's name; of a stored job that no replica has claimed so far, the job's id
    :ivar replica: the replica's id
    :ivar since: since when it is so; ``None``: it is not known
    :ivar link: the address of its page, relative to the dashboard's; ``""``: there is none
    """

    what: str
    level: str
    says: str
    remedy: str = ""
    task: str | None = None
    replica: str | None = None
    since: datetime | None = None
    link: str = ""


@dataclass(frozen=True)
class RunRequest:
    """A manual run that was asked for, and has not begun.

    :ivar request_id: the id, which is the same for all who asked before the run began
    :ivar task: the task's name
    :ivar token: the task's last fencing token when the run was asked for. The run itself will get a
        larger token.
    :ivar requested_by: who asked first
    :ivar requested_at: when it was asked for first
    :ivar until: when it expires, if no replica begins it before
    :ivar is_new: whether this call has asked first; otherwise the run was asked for before
    """

    request_id: UUID
    task: str
    token: int
    requested_by: str
    requested_at: datetime
    until: datetime
    is_new: bool = True
