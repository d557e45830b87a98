"""A task's headline: how the task is now in one sentence, and what an operator can do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from apscheduler_tasklock._lock.outcomes import FAILED, outcome_named
from apscheduler_tasklock._values import cut
from apscheduler_tasklock._words.findings import HEALING
from apscheduler_tasklock._words.formats import Formats
from apscheduler_tasklock._words.next_run_times import due_of
from apscheduler_tasklock._words.replicas import (
    begins_runs,
    none_begins,
    who_runs_meanwhile,
    why_silent,
)
from apscheduler_tasklock._words.runs import error_in_words, miss_in_words
from apscheduler_tasklock._words.tasks import last_failure_in_words, pauses_of, task_took_in_words
from apscheduler_tasklock.status import (
    Finding,
    ReplicaStatus,
    Run,
    TaskState,
    TaskStatus,
)

# Limits the characters of an error in a headline, and the replicas that it names.
_LONGEST_ERROR, _MOST_REPLICAS = 200, 3


@dataclass(frozen=True)
class Headline:
    """How a task is now.

    :ivar says: the state, since when it is so, where, why, and who has paused the task
    :ivar remedy: what to do; ``""`` for nothing
    """

    says: str
    remedy: str


@dataclass(frozen=True)
class _Known:
    """What is known of a task besides its row."""

    formats: Formats
    usual: float | None
    entries: Sequence[Run]
    replicas: Sequence[ReplicaStatus] | None
    now: datetime
    is_found: bool


def headline_of(
    task: TaskStatus,
    entries: Sequence[Run],
    formats: Formats,
    usual: float | None,
    replicas: Sequence[ReplicaStatus] | None,
    finding: Finding | None,
    now: datetime,
) -> Headline:
    """Return how a task is now, in one sentence.

    :param entries: the task's entries in the run history, the newest first
    :param usual: how long the task usually runs, in seconds; ``None``: not known
    :param replicas: the replicas that have the task; ``None``: not known
    :param finding: what is not well with the task
    :param now: the database's time
    """
    says = _SAYS[task.state](
        task, _Known(formats, usual, entries, replicas, now, finding is not None)
    )
    is_said = task.state in (TaskState.DEAD, TaskState.RETRYING)  # that the failure is being healed
    if finding is not None and finding.what not in (task.state.value, HEALING if is_said else ""):
        says += f"; {finding.what}: {finding.says}"
    if task.state is not TaskState.PAUSED:
        says = "; ".join([says, *pauses_of(task, formats)])
    if task.requested_by is not None:
        says += f"; a run was asked for by {task.requested_by}"
        says += f" at {formats.moment(task.requested_at)}" if task.requested_at else ""
    remedy = "" if finding is None else finding.remedy
    if task.state is TaskState.PAUSED:
        remedy = f"resume {'it' if task.paused else 'its job'} if the pause was forgotten"
    return Headline(f"{says[:1].upper()}{says[1:]}.", remedy)


def _running(task: TaskStatus, known: _Known) -> str:
    return f"running {_since(task.started_at, task.holder, task.took, known)}"


def _holder_silent(task: TaskStatus, known: _Known) -> str:
    silent = why_silent(task.holder, known.replicas, known.formats)
    words = silent or f"{task.holder} has died or is silent"
    since = _since(task.started_at, task.holder, task.took, known, at_most=True)
    until = known.formats.moment(task.locked_until)
    words += f", and nobody knows whether its run goes on: {since}"
    return f"{words}; no other replica runs the task before its lease has ended, at {until}"


def _too_long(task: TaskStatus, known: _Known) -> str:
    if not task.stuck:
        silent = why_silent(task.holder, known.replicas, known.formats)
        since = _since(task.started_at, task.holder, task.took, known, at_most=bool(silent))
        return f"running too long: {since}{silent and '; '}{silent}"
    first = task.stuck[0]
    took = (known.now - first.since).total_seconds()
    words = f"running too long: {_since(first.since, first.replica, took, known)}, although its "
    words += f"lock is lost; {who_runs_meanwhile(task, known.replicas)}"
    return words + (f"; {len(task.stuck) - 1} more runs are stuck" if len(task.stuck) > 1 else "")


def _since(
    since: datetime | None, where: str, took: float | None, known: _Known, *, at_most: bool = False
) -> str:
    lasting = f"{'at most ' if at_most else ''}{known.formats.seconds(took)}"
    words = f"since {known.formats.moment(since)} on {where}, for {lasting}"
    return words + (f" (usually {known.formats.seconds(known.usual)})" if known.usual else "")


def _paused(task: TaskStatus, known: _Known) -> str:
    return "; ".join(pauses_of(task, known.formats))


def _dead(task: TaskStatus, known: _Known) -> str:
    moment = known.formats.moment
    words = f"dead since {moment(task.locked_until)}: its run, begun at {moment(task.started_at)} "
    words += f"on {task.holder}, has not renewed its lease"
    if task.failover:
        why = "" if known.replicas is None else none_begins(known.replicas)
        if why:
            return f"{words}; failover cannot run it again, because {why}"
        return f"{words}; failover runs it again on a replica that has the task"
    due_at = due_of(task, known.now)
    due = f", which is due at {moment(due_at)}" if due_at else ""
    return f"{words}; nobody runs it again before its next run time{due}"


def _due(task: TaskStatus, known: _Known) -> str:
    words = f"{task.state.value} since {known.formats.moment(task.due_at)}, for "
    words += f"{known.formats.seconds(task.late_by)}: no replica has begun it"
    if known.replicas is None:
        return words
    alive = [each.replica_id for each in known.replicas if begins_runs(each)]
    if not alive:
        return f"{words}, and {none_begins(known.replicas)}"
    more = len(alive) - _MOST_REPLICAS
    names = ", ".join(alive[:_MOST_REPLICAS]) + (f" and {more} more" if more > 0 else "")
    return f"{words}, although {names} {'has' if len(alive) == 1 else 'have'} the task"


def _missed(task: TaskStatus, known: _Known) -> str:
    misses = [each for each in known.entries if each.outcome == "missed"]
    if misses:
        return f"missed: no replica ran {miss_in_words(misses[0], known.formats)}"
    return f"missed: no replica ran it at {known.formats.moment(task.missed_at)}"


def _cut(task: TaskStatus, known: _Known) -> str:
    at = task.locked_until if task.finished_at is None else task.finished_at
    words = f"cut at {known.formats.moment(at)}: a stop of {task.holder} ended its last run, and "
    return f"{words}nobody has run its window again"


def _retrying(task: TaskStatus, known: _Known) -> str:
    error = task.error_type or "an error"
    words = f"failed at {known.formats.moment(task.finished_at)} on {task.holder} with {error} "
    return (
        f"{words}(attempt {task.attempt}); a retry is due at {known.formats.moment(task.retry_at)}"
    )


def _failing(task: TaskStatus, known: _Known) -> str:
    runs = [each for each in known.entries if each.kind != "operator" and each.outcome != "missed"]
    words = f"failed at {known.formats.moment(task.failed_at)}"
    failed = next((each for each in runs if each.outcome in FAILED), None)
    words += f" on {failed.replica}" if failed is not None else ""
    words += f", {task.failures} times in a row" if task.failures > 1 else ""
    error = "" if failed is None else cut(error_in_words(failed), _LONGEST_ERROR)
    return f"{words}: {error or last_failure_in_words(task, runs)}"


def _gone(task: TaskStatus, known: _Known) -> str:
    words = "gone: no live replica has it any more, not counting those that stop"
    return f"{words}; {_last_run(task, known)}"


def _new(task: TaskStatus, known: _Known) -> str:
    return f"new: it has never run{_next(task, known)}"


def _unreadable(task: TaskStatus, _: _Known) -> str:
    columns = ", ".join(task.unreadable)
    return f"unreadable: its row has values that no replica writes, in {columns}"


def _ok(task: TaskStatus, known: _Known) -> str:
    is_well = task.outcome in (None, "ok") and not known.is_found
    return f"{'well: ' * is_well}{_last_run(task, known)}{_next(task, known)}"


def _last_run(task: TaskStatus, known: _Known) -> str:
    if task.started_at is None:
        return "it has never run"
    ended = outcome_named(task.outcome or "ok").ended
    words = f"its last run, at {known.formats.moment(task.started_at)} on {task.holder}, {ended} "
    return f"{words}after {task_took_in_words(task, known.formats)}"


def _next(task: TaskStatus, known: _Known) -> str:
    return f"; due next at {known.formats.moment(task.due_at)}" if task.due_at else ""


_SAYS: Mapping[TaskState, Callable[[TaskStatus, _Known], str]] = {
    TaskState.UNREADABLE: _unreadable,
    TaskState.TOO_LONG: _too_long,
    TaskState.HOLDER_SILENT: _holder_silent,
    TaskState.RUNNING: _running,
    TaskState.PAUSED: _paused,
    TaskState.DEAD: _dead,
    TaskState.OVERDUE: _due,
    TaskState.LATE: _due,
    TaskState.MISSED: _missed,
    TaskState.CUT: _cut,
    TaskState.RETRYING: _retrying,
    TaskState.FAILING: _failing,
    TaskState.GONE: _gone,
    TaskState.NEW: _new,
    TaskState.OK: _ok,
}
