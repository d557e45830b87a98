"""What operators see: tasks, their runs, and the replicas. All times are the database's."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any
from uuid import UUID


class TaskState(str, Enum):
    """What a task is doing, or how it fares. The first of these that is true, from the top.

    A task that runs is never late, and one that is paused never overdue.
    """

    UNREADABLE = "unreadable"
    """Its row has a value that no replica writes, such as a ``schedule`` that is no JSON.

    Which ones, ``TaskStatus.unreadable`` tells. What else is known of the task is uncertain.
    """
    TOO_LONG = "too long"
    """It runs for longer than ``max_runtime``, by default its maximum lock.

    Also while another replica runs a later window: see ``TaskStatus.stuck``.
    """
    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"
    """The holder of its last run was killed, or has lost the database; its lease has ended."""
    OVERDUE = "overdue"
    """It was due, and neither then nor in the grace time after that has anybody run it."""
    LATE = "late"
    """It is due, and its grace time has not passed."""
    CUT = "cut"
    """A stop has cut its last run, as that of a coroutine, and nobody has run its window."""
    FAILING = "failing"
    """Its last run failed."""
    NEW = "new"
    """A replica has it, and it has never run."""
    OK = "ok"


@dataclass(frozen=True)
class RunningRun:
    """A run that goes on.

    :ivar task: the task's name
    :ivar token: its fencing token
    :ivar replica: who runs it
    :ivar since: when it was granted
    :ivar lost: whether its lock is lost, so that others may run the task: it has outlived its
        maximum lock, or was taken for dead, or freed
    """

    task: str
    token: int
    replica: str
    since: datetime
    lost: bool = False

    @property
    def reported(self) -> dict[str, Any]:
        """What the replica's row has of it. The time is in seconds since 1970."""
        since = self.since.timestamp()
        return {"task": self.task, "token": self.token, "since": since, "lost": self.lost}


@dataclass(frozen=True)
class TaskStatus:
    """A task, as its row tells of it.

    :ivar name: the task's name
    :ivar state: what it is doing, or how it fares
    :ivar schedule: its trigger in canonical form, as JSON-like data; ``None`` if nobody has told it
    :ivar kind: of its last run: ``"schedule"``, ``"takeover"``, ``"manual"`` or ``"hold"``
    :ivar token: fencing token of its last run
    :ivar holder: replica of its last run
    :ivar scheduled_at: the run time of that
    :ivar started_at: when it began; ``None`` if the task has never run
    :ivar finished_at: when it ended; ``None`` while it runs, and if its holder died
    :ivar window_until: when the window of that ends: an earlier run time is not run
    :ivar locked_until: until when the task is held if nothing changes
    :ivar run_until: when the maximum lock of the last run ends
    :ivar due_at: when the next run is due; ``None`` if none is, or nobody knows
    :ivar overdue_at: when that counts as overdue
    :ivar late_by: seconds for which it is due; ``None`` if it is not, or runs, or is paused
    :ivar took: seconds that the last run took, or takes so far; of one that died or was cut, until
        its lease ended
    :ivar outcome: how the last run ended, as of :class:`Run`, or ``"cut"`` by a stop; ``None``
        while it goes on, and if nobody knows
    :ivar cut_for: seconds since its last run was cut, if it was and nobody has run its window
    :ivar stuck: runs that go on although they have outlived their maximum lock, the oldest first
    :ivar succeeded_at: when a run last ended well
    :ivar failed_at: when a run last failed, or was found to have died
    :ivar failures: how many in a row have failed since the last that ended well
    :ivar error_type: class of the last run's exception
    :ivar paused: whether it is paused
    :ivar paused_until: until when; ``None``: until somebody resumes it
    :ivar paused_by: who paused it
    :ivar pause_reason: why
    :ivar requested_by: who has asked for a run that has not begun yet
    :ivar requested_at: when that was
    :ivar gone: whether replicas live, and none of them has it
    :ivar failover: whether its last run is run again if its holder dies
    :ivar unreadable: columns of its row that cannot be read. Such a schedule comes as ``None``.
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
    stuck: tuple[RunningRun, ...]
    succeeded_at: datetime | None
    failed_at: datetime | None
    failures: int
    error_type: str | None
    paused: bool
    paused_until: datetime | None
    paused_by: str | None
    pause_reason: str | None
    requested_by: str | None
    requested_at: datetime | None
    gone: bool
    failover: bool
    unreadable: tuple[str, ...] = ()


class JobState(str, Enum):
    """What a job of the job store is waiting for. The first of these that is true, from the top."""

    UNREADABLE = "unreadable"
    """Its row has a value that no replica writes; see ``JobStatus.unreadable``."""
    ENDED = "ended"
    """Its last run time was claimed. It goes when that run is over."""
    HANDED_OUT = "handed out"
    """It is due, and a replica has it, which has not begun it yet."""
    PAUSED = "paused"
    """It has no next run time, until somebody resumes it."""
    DUE = "due"
    """Its run time has come, and no replica has it."""
    WAITING = "waiting"
    """Its next run time is in the future."""


@dataclass(frozen=True)
class JobStatus:
    """A job of the job store, as its row tells of it.

    :ivar id: the job's id
    :ivar state: what it is waiting for
    :ivar name: its name, as APScheduler has it; ``None`` if its row lacks one
    :ivar function: reference of its function, as ``"myapp.jobs:send"``
    :ivar trigger: its trigger as it is stored, as JSON-like data
    :ivar executor: alias of its executor
    :ivar next_run_time: when it is due; ``None`` if it is paused or has ended
    :ivar last_run_time: the run time that was claimed last; ``None`` if none was
    :ivar handed_to: the replica that it is handed out to; ``None`` if it is handed out to nobody
    :ivar handed_until: until when, if that replica does not say more
    :ivar task: the task that it is; ``None`` if no replica has told it
    :ivar holder: the replica on which its task runs; ``None`` if it does not run
    :ivar task_paused: whether its task is paused, by ``TaskLocks.pause``
    :ivar task_paused_until: until when; ``None``: until somebody resumes it
    :ivar unreadable: columns of its row that cannot be read. Such a trigger comes as ``None``.
    """

    id: str
    state: JobState
    name: str | None
    function: str
    trigger: Any
    executor: str
    next_run_time: datetime | None
    last_run_time: datetime | None
    handed_to: str | None
    handed_until: datetime | None
    task: str | None
    holder: str | None
    task_paused: bool
    task_paused_until: datetime | None
    unreadable: tuple[str, ...] = ()


# How a run can end; see :class:`Run`.
OUTCOMES = ("ok", "error", "cancelled", "died", "overran", "overtaken", "freed", "missed")


@dataclass(frozen=True)
class Run:
    """A run that is over, as the run history tells of it.

    :ivar task: the task's name
    :ivar token: its fencing token
    :ivar scheduled_at: its run time; ``None`` of a manual run and of ``hold``
    :ivar started_at: when it was granted
    :ivar ended_at: when it was released; of one that died or overran, when its lease ended
    :ivar replica: who ran it
    :ivar kind: ``"schedule"``, ``"takeover"``, ``"manual"`` or ``"hold"``
    :ivar outcome: ``"ok"``, ``"error"``, ``"cancelled"``; ``"died"`` with its holder;
        ``"overran"``: it outlived its maximum lock, while its holder lived; ``"freed"`` by an
        operator; ``"overtaken"``: it was taken for dead, or freed, and ended
        later; ``"missed"``: the last run time of a job of the job store, which never began
    :ivar error_type: class of its exception
    :ivar error: what that said, 500 characters at most
    """

    task: str
    token: int
    scheduled_at: datetime | None
    started_at: datetime
    ended_at: datetime
    replica: str
    kind: str
    outcome: str
    error_type: str | None
    error: str | None

    @property
    def took(self) -> float:
        """Seconds from its grant to its end."""
        return (self.ended_at - self.started_at).total_seconds()


class ReplicaState(str, Enum):
    """What is known of a replica. The first of these that is true, from the top."""

    UNREADABLE = "unreadable"
    """Its row has a value that no replica writes; see ``ReplicaStatus.unreadable``."""
    STOPPED = "stopped"
    """It was shut down in good order."""
    DIED = "died"
    """A run of it has died, and nobody has heard of it since."""
    ALIVE = "alive"
    """It has said so in the last 45 seconds; it does every 30 seconds."""
    SILENT = "silent"
    """Nobody has heard of it for 45 seconds: it was killed, hangs, or cannot reach the database."""


@dataclass(frozen=True)
class ReplicaStatus:
    """A replica: one running scheduler process.

    :ivar replica_id: its id
    :ivar host: the host's name
    :ivar version: of this library
    :ivar started_at: when it started
    :ivar seen_at: when it last said that it is alive; it does so every 30 seconds
    :ivar state: what is known of it
    :ivar tasks: the tasks that it has, by name
    :ivar running: what it runs, by the tasks' names
    :ivar rejected: what the database rejects of its work, each as ``"history: <why, and what to
        do>"``; empty if nothing
    :ivar unreadable: columns of its row that cannot be read; of such tasks, rejections and runs
        those that can be read are told
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
        """Whether it is alive, for all that is known."""
        return self.state is ReplicaState.ALIVE

    rejected: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Health:
    """How an executor fares, for probes. None of it asks the database.

    :ivar live: whether its scheduler goes on: its thread is alive, and no job in memory has been
        due for more than a minute; and the thread that the lock has for the database is not stuck.
        If not, only a restart helps.
    :ivar ready: whether it has started and seen its table once. A database that goes away later
        does not change that.
    :ivar degraded: why not all is well, as a database that is unavailable, a right that is missing,
        tasks that are overdue, or an application's trigger or job store that hangs; empty if all
        is. For a database and a right, a restart does not help.
    """

    live: bool
    ready: bool
    degraded: tuple[str, ...]


@dataclass(frozen=True)
class RunRequest:
    """A run that was asked for by hand, and has not begun.

    :ivar request_id: the same for all who asked while it was open
    :ivar task: the task's name
    :ivar token: of the last run when it was asked for; that of the run is larger
    :ivar requested_by: who asked first
    :ivar requested_at: when
    :ivar until: when it expires, if no replica begins it before
    """

    request_id: UUID
    task: str
    token: int
    requested_by: str
    requested_at: datetime
    until: datetime
