"""The command ``check``: one line for a monitor, in the form of Nagios' plugins."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from apscheduler_tasklock._lock.words import printable, rfc3339
from apscheduler_tasklock._values import cut
from apscheduler_tasklock.cli.exits import message_of, remedy_after
from apscheduler_tasklock.cli.output import print_json
from apscheduler_tasklock.cli.target import name_of, patterns_of, task_locks, unmatched
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError, TaskLockSchemaError
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.status import JobState, JobStatus, ReplicaStatus, TaskState, TaskStatus

OK = 0
WARNING = 1
CRITICAL = 2
UNKNOWN = 3

_WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")

# Limits the seconds within which failover finds a dead run and runs it again: two poll intervals.
_TWO_POLLS = 10.0

# The grace time, in seconds, of a task that is not due again.
SHORTEST_GRACE = 60.0

# Limits the seconds of a pause of all tasks that is no problem.
LONGEST_PAUSE = 24 * 3600.0

# Limits the seconds without a leader that are no problem. After a start of all replicas it takes 10
# to 12 s until one of them leads, and with hundreds of replicas three looks, which come less often
# the more replicas there are.
LONGEST_WITHOUT_LEADER = 30.0
_WITHOUT_LEADER_OF_EACH = 0.15

# Limits the tasks that are named for each kind of problem.
_MOST_NAMES = 5

# Limits the characters of a task's name and its detail together.
_LONGEST_NAMED = 300

_ALARMS = (TaskState.OVERDUE, TaskState.DEAD, TaskState.TOO_LONG)
_WARNINGS = (
    TaskState.UNREADABLE,
    TaskState.LATE,
    TaskState.MISSED,
    TaskState.CUT,
    TaskState.FAILING,
)


@dataclass(frozen=True)
class Problem:
    """What is wrong with a task.

    :ivar task: the task's name; of a stored job that no replica has claimed so far, the job's id
    :ivar problem: the name of the task's state
    :ivar detail: how late the task is, or on which replica it runs, in words
    :ivar exit_status: the exit status of the command if no other problem is worse
    """

    task: str
    problem: str
    detail: str
    exit_status: int


@dataclass(frozen=True)
class Verdict:
    """The answer to a monitor.

    :ivar exit_status: 0 to 3
    :ivar message: what is wrong, in one line
    :ivar problems: at most one for each task
    :ivar metrics: numbers for a graph, by name. If a name ends with ``_seconds``, its number is in
        seconds.
    """

    exit_status: int
    message: str
    problems: Sequence[Problem] = ()
    metrics: dict[str, float] | None = None


def check(options: argparse.Namespace) -> int:
    """Print one line on the tasks, and return 0 to 3."""
    patterns = patterns_of(options, options.patterns)
    with task_locks(options) as locks:
        tasks = locks.tasks(*patterns)
        if not tasks:
            locks.check()  # because a policy may hide the rows
        replicas = _replicas(locks)
        jobs, unknown = _overdue_jobs(options, locks, patterns)
        # At last, because what was read is told all the same.
        unknown += _without_writes(locks)
    missing = unmatched(patterns, [*jobs, *(task.name for task in tasks)])
    if missing:
        unknown.append(f"no task matches {', '.join(map(repr, missing))}")
    verdict = judge(tasks, unknown, datetime.now(timezone.utc), replicas, jobs)
    return _tell(verdict, as_json=options.json)


def _replicas(locks: TaskLocks) -> Sequence[ReplicaStatus]:
    """Return the replicas; none if their table cannot be read, which says nothing of the tasks."""
    try:
        return locks.replicas()
    except TaskLockError:
        return ()


def _without_writes(locks: TaskLocks) -> list[str]:
    """Return why the database takes no writes, so that no task can run, although reads work."""
    try:
        locks.check_writes()
    except TaskLockDatabaseError as error:
        return [f"the database takes no writes: {error}{remedy_after(error)}"]
    return []


def _overdue_jobs(
    options: argparse.Namespace, locks: TaskLocks, patterns: Sequence[str]
) -> tuple[dict[str, JobStatus], list[str]]:
    """Return the stored jobs that are overdue, and why they are unknown.

    They are by the names of their tasks, of which each has the job that is due the longest. A job
    that no replica has claimed so far may lack its task's name. Its id then stands for the name, in
    whichever namespace was asked for.

    Without rights on the jobs' table, as a monitor of an application without the job store may be,
    there are none.
    """
    try:
        jobs = locks.jobs(overdue=True)
    except TaskLockSchemaError:
        return {}, []
    except TaskLockError as error:
        return {}, [f"the stored jobs cannot be read: {message_of(error)}"]
    found: dict[str, JobStatus] = {}
    for job in jobs:
        name = job.task or name_of(options, job.id)
        if not patterns or len(unmatched(patterns, [name])) < len(patterns):
            found.setdefault(name, job)
    return found, []


def answer_monitor(answer: Callable[[], int], *, as_json: bool) -> int:
    """Return the exit status, which is 3 for each failure of the command itself."""
    try:
        return answer()
    except TaskLockError as error:
        return _tell(Verdict(UNKNOWN, message_of(error)), as_json=as_json)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # the statuses 1 and 2 are about tasks
        said = " ".join(str(error).split()) or type(error).__name__
        return _tell(Verdict(UNKNOWN, said), as_json=as_json)


def judge(
    tasks: Sequence[TaskStatus],
    unknown: Sequence[str],
    now: datetime,
    replicas: Sequence[ReplicaStatus] = (),
    jobs: Mapping[str, JobStatus] | None = None,
) -> Verdict:
    """Return the answer to a monitor about these tasks.

    :param unknown: what is not known, in words, such as patterns that no task matches
    :param now: this machine's time
    :param replicas: the replicas, of which some may be in leader mode
    :param jobs: the stored jobs that are overdue, by the names of their tasks
    """
    problems = [problem for task in tasks if (problem := problem_of(task, now)) is not None]
    told = {problem.task for problem in problems if problem.exit_status == CRITICAL}
    late = {name: job for name, job in (jobs or {}).items() if name not in told}
    problems = [problem for problem in problems if problem.task not in late]
    problems += [_of_job(name, job, now) for name, job in late.items()]
    status = max((problem.exit_status for problem in problems), default=OK)
    parts = _parts(problems)
    noted = [*_forgotten_pauses(tasks, now), *_without_leader(tasks, replicas)]
    if noted:
        status = max(status, WARNING)
        parts += noted
    if unknown:
        # Unknown does not replace critical, because the critical task is known.
        status = status if status == CRITICAL else UNKNOWN
        parts += unknown
    count = f"{len(tasks)} task{'s' * (len(tasks) != 1)}"
    message = "; ".join([*parts, count]) if parts else count
    return Verdict(status, message, problems, _metrics(tasks, problems))


def _forgotten_pauses(tasks: Sequence[TaskStatus], now: datetime) -> list[str]:
    """Return the pauses of all tasks that are older than a day, in words."""
    pauses = dict.fromkeys(
        pause
        for task in tasks
        for pause in task.pauses
        if pause.namespace is not None and (now - pause.since).total_seconds() > LONGEST_PAUSE
    )
    return [
        cut(
            f"all tasks{f' of {pause.namespace!r}' * bool(pause.namespace)} paused by {pause.by} "
            f"since {rfc3339(pause.since, 'seconds')}",
            _LONGEST_NAMED,
        )
        for pause in pauses
    ]


def _without_leader(tasks: Sequence[TaskStatus], replicas: Sequence[ReplicaStatus]) -> list[str]:
    """Return the namespaces of these tasks that nobody leads although replicas follow, in words."""
    leaderless: dict[str, float] = {}
    of_fleet = _WITHOUT_LEADER_OF_EACH * sum(replica.alive for replica in replicas)
    longest = max(LONGEST_WITHOUT_LEADER, of_fleet)
    for replica in replicas:
        namespace, seconds = replica.leader_namespace, replica.leaderless_for or 0.0
        asks = replica.alive and bool(replica.tasks) and seconds > longest
        if namespace is not None and asks:
            leaderless[namespace] = max(seconds, leaderless.get(namespace, 0.0))
    return [
        cut(
            f"nobody leads{f' {namespace!r}' * bool(namespace)} for {seconds:.0f} s", _LONGEST_NAMED
        )
        for namespace, seconds in sorted(leaderless.items())
        if any(task.name.startswith(namespace) for task in tasks)
    ]


def problem_of(task: TaskStatus, now: datetime) -> Problem | None:
    """Return what is wrong with a task, or ``None``.

    A task that is paused or gone is no problem. A row that cannot be read is a problem, because
    nobody knows whether its task is paused or gone.
    """
    if task.unreadable:
        columns = ", ".join(task.unreadable)
        return Problem(task.name, TaskState.UNREADABLE.value, columns, WARNING)
    if task.gone or task.paused:
        return None
    if task.state in _ALARMS and not _may_be_taken_over(task, now):
        return Problem(task.name, task.state.value, _detail(task), CRITICAL)
    return _warning_of(task)


def _of_job(name: str, job: JobStatus, now: datetime) -> Problem:
    late_by = 0.0 if job.next_run_time is None else (now - job.next_run_time).total_seconds()
    which = "a stored job" if name.endswith(job.id) else f"the stored job {job.id!r}"
    detail = f"by {late_by:.0f} s, {which} that no replica claims"
    return Problem(name, JobState.OVERDUE.value, detail, CRITICAL)


def _warning_of(task: TaskStatus) -> Problem | None:
    if task.missed_at is not None and not task.acknowledged:
        at = f"at {rfc3339(task.missed_at, 'seconds')}"
        return Problem(task.name, TaskState.MISSED.value, at, WARNING)
    is_cut = task.cut_for is not None and not task.acknowledged
    if is_cut and task.cut_for is not None and task.cut_for > _grace(task) / 2:
        cut = f"{task.cut_for:.0f} s ago"
        return Problem(task.name, TaskState.CUT.value, cut, WARNING)
    if task.state is TaskState.LATE and _is_well_late(task):
        return Problem(task.name, task.state.value, _detail(task), WARNING)
    if (
        task.failures and not task.acknowledged
    ):  # also while it runs again, so that an alarm stays until a run ends well
        return Problem(task.name, TaskState.FAILING.value, _failed(task), WARNING)
    return None


def _may_be_taken_over(task: TaskStatus, now: datetime) -> bool:
    """Return whether a lease ended so recently that failover may not have found the dead run yet.

    This machine's clock decides. If the clock is wrong by more than two poll intervals, a dead run
    is a problem at once.
    """
    ended = (now - task.locked_until).total_seconds()
    return task.state is TaskState.DEAD and 0 <= ended < _TWO_POLLS


def _is_well_late(task: TaskStatus) -> bool:
    """Return whether more than half of the grace time has passed."""
    return task.late_by is not None and task.late_by > _grace(task) / 2


def _grace(task: TaskStatus) -> float:
    """Return the task's grace time in seconds; the shortest if no run is due."""
    if task.due_at is None or task.overdue_at is None:
        return SHORTEST_GRACE
    return (task.overdue_at - task.due_at).total_seconds()


def _detail(task: TaskStatus) -> str:
    if task.late_by is not None:
        return f"by {task.late_by:.0f} s"
    if task.state is TaskState.DEAD:
        return f"on {task.holder}"
    if task.stuck:
        return f"since {rfc3339(task.stuck[0].since, 'seconds')} on {task.stuck[0].replica}"
    return f"for {task.took or 0:.0f} s on {task.holder}"


def _failed(task: TaskStatus) -> str:
    return f"{task.failures} times" if task.failures > 1 else task.error_type or "once"


def _parts(problems: Sequence[Problem]) -> list[str]:
    parts = []
    for state in (*_ALARMS, *_WARNINGS):
        those = [problem for problem in problems if problem.problem == state.value]
        named = [
            cut(f"{problem.task} {problem.detail}", _LONGEST_NAMED)
            for problem in those[:_MOST_NAMES]
        ]
        if len(those) > _MOST_NAMES:
            named.append(f"{len(those) - _MOST_NAMES} more")
        if those:
            parts.append(f"{len(those)} {state.value} ({', '.join(named)})")
    return parts


def _metrics(tasks: Sequence[TaskStatus], problems: Sequence[Problem]) -> dict[str, float]:
    metrics: dict[str, float] = {"tasks": len(tasks)}
    for state in (*_ALARMS, *_WARNINGS):
        name = state.value.replace(" ", "_")
        metrics[name] = sum(problem.problem == state.value for problem in problems)
    for state in (TaskState.RUNNING, TaskState.PAUSED):
        metrics[state.value] = sum(task.state is state for task in tasks)
    metrics["gone"] = sum(task.gone for task in tasks)
    late_by = (task.late_by for task in tasks if task.late_by is not None and not task.gone)
    metrics["late_by_seconds"] = round(max(late_by, default=0.0), 3)
    return metrics


def _tell(verdict: Verdict, *, as_json: bool) -> int:
    """Print a verdict, and return its exit status."""
    told: dict[str, Any] = {
        "status": _WORDS[verdict.exit_status],
        "exit_status": verdict.exit_status,
        "message": verdict.message,
        "problems": verdict.problems,
        "metrics": verdict.metrics or {},
    }
    if as_json:
        print_json(told)
    else:
        print(line_of(verdict), flush=True)
    return verdict.exit_status


def line_of(verdict: Verdict) -> str:
    """Return a verdict as one line, with the numbers for a graph at its end."""
    message = printable(verdict.message).replace("|", "\\x7c")  # because the numbers follow a |
    line = f"TASKLOCK {_WORDS[verdict.exit_status]} - {message}"
    if not verdict.metrics:
        return line
    numbers = (
        f"{_label(name)}={value:.10g}{_unit(name)}" for name, value in verdict.metrics.items()
    )
    return f"{line} | {' '.join(numbers)}"


def _label(metric: str) -> str:
    return metric.removesuffix("_seconds")


def _unit(metric: str) -> str:
    return "s" if metric.endswith("_seconds") else ""
