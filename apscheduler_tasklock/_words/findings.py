"""Findings: the one verdict on tasks and replicas, as a function of rows and a time.

``check``, the dashboard's overview and the metrics of tasks tell these findings and no others. So
the same rows, read at the same time, give the same finding everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from math import inf
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

from apscheduler_tasklock._database.rejections import CLAIMS, JOB_STORE, LIST_OF_JOBS, LOOKS
from apscheduler_tasklock._lock.outcomes import outcome_named
from apscheduler_tasklock._lock.words import rfc3339, seconds_in_words
from apscheduler_tasklock._values import cut
from apscheduler_tasklock._words.replicas import begins_runs, of_each_application
from apscheduler_tasklock._words.tasks import last_failure_in_words, pause_in_words
from apscheduler_tasklock.status import (
    Finding,
    JobState,
    JobStatus,
    Misses,
    Overview,
    Pause,
    ReplicaState,
    ReplicaStatus,
    Silence,
    TaskState,
    TaskStatus,
)

# The levels of findings, each with its severity, which is the exit status of ``check``.
SEVERITIES: Mapping[str, int] = MappingProxyType(
    {"note": 0, "warning": 1, "critical": 2, "unknown": 3}
)
NOTE, WARNING, CRITICAL, UNKNOWN = SEVERITIES

# What findings are about besides the states of tasks.
PAUSED, PAUSED_LONG, NO_LEADER = "paused", "paused for long", "no leader"
NO_MATCH, UNREAD, NOT_LISTED = "no match", "not read", "not listed"
HEALING, STOPPING, VERSIONS, RELEASES = "healing", "stopping", "versions", "releases"
EMPTY, NO_REPLICA, FEW_REPLICAS = "empty", "no replica", "few replicas"

# Limits the seconds within which failover finds a dead run and runs it again: two poll intervals,
# and with failover the task's grace time before that.
_TWO_POLLS = 10.0

# The grace time, in seconds, of a task that is not due again.
SHORTEST_GRACE = 60.0

# Limits how long a pause of all tasks is no problem, and how long ago a replica may have died to be
# told.
_A_DAY = timedelta(days=1)
# The seconds from which durations are told in hours and days.
_AN_HOUR = 3600.0

# Limits the seconds without a leader that are no problem. After a start of all replicas it takes 10
# to 12 s until one of them leads, and with hundreds of replicas three looks, which come less often
# the more replicas there are.
LONGEST_WITHOUT_LEADER = 30.0
_WITHOUT_LEADER_OF_EACH = 0.15

# Limits the seconds without a sign of life of a replica that are no problem: three times the
# interval between two signs, and longer than the 60 s that a lease has by default.
LONGEST_SILENCE = 90.0
# The seconds after which it is critical that no replica is alive.
NO_REPLICA_AFTER = 300.0

# How many missed run times of a recurring task are a finding: in a row, and of the last ten.
MISSED_IN_A_ROW = 3
MISSED_OF_TEN = 5

# Limits the characters of a finding's words.
_LONGEST = 300

# Why no replica claims any stored job, if there is none.
_NONE_ALIVE = "none is alive"
# The rejected work without which a replica claims no stored job.
_KEEP_FROM_CLAIMING = (CLAIMS, LOOKS, JOB_STORE, LIST_OF_JOBS)
# Limits the replicas that are named as having a task.
_MOST_HAVING = 3

# The states of replicas that have stopped without a word.
GONE_SILENT = (ReplicaState.DIED.value, ReplicaState.SILENT.value)

_MISSING_RIGHT = "`doctor` names the missing right"
_RUN_IT_NOW = "if it cannot wait for its next run time: run it now"
_RESUME, _PAUSED_TASKS = "resume them if the pause was forgotten", "tasks?state=paused"


@dataclass(frozen=True)
class FindingKind:
    """What findings are about, and what they say unless a case tells more.

    :ivar level: the level of the worst case
    :ivar remedy: what to do; ``""`` for nothing
    :ivar link: the address of the page, as in :class:`Finding`
    :ivar said: how the overview's first line counts them, of one and of several; ``()``: each of
        them is told in its own words
    """

    name: str
    level: str
    remedy: str = ""
    link: str = ""
    said: tuple[str, ...] = ()


# The kinds in the order in which they are told within a level.
_KINDS = (
    FindingKind(
        *(NO_REPLICA, CRITICAL),
        "start a replica, and see its log if it does not stay alive; if none is to come, as in a "
        "copy of the database: `forget --replica`",
        "replicas",
    ),
    FindingKind(
        *("overdue", CRITICAL, "if no live replica has the task, start one; `why` tells more"),
        said=("task is overdue", "tasks are overdue"),
    ),
    FindingKind("dead", CRITICAL, _RUN_IT_NOW, said=("task is dead", "tasks are dead")),
    FindingKind(
        *("too long", CRITICAL, "if it hangs, restart the replica"),
        said=("task runs too long", "tasks run too long"),
    ),
    FindingKind(
        *("unreadable", WARNING, "its next run may mend the row, or else an UPDATE"),
        said=("task is unreadable", "tasks are unreadable"),
    ),
    FindingKind(
        *("late", WARNING, "wait for the end of its grace time"),
        said=("task is late", "tasks are late"),
    ),
    FindingKind(
        *("missed", WARNING, "`why` tells the reason; add the job again, or acknowledge it"),
        said=("task missed a run time", "tasks missed run times"),
    ),
    FindingKind(
        *("cut", WARNING, _RUN_IT_NOW), said=("task was cut by a stop", "tasks were cut by a stop")
    ),
    FindingKind(
        *("failing", WARNING, "see its error; acknowledge the failure if it can wait"),
        said=("task is failing", "tasks are failing"),
    ),
    FindingKind(FEW_REPLICAS, WARNING, "see `replicas`", "replicas"),
    FindingKind(PAUSED_LONG, WARNING, _RESUME, _PAUSED_TASKS),
    FindingKind(NO_LEADER, WARNING, "see the replicas' logs", "replicas"),
    FindingKind(NOT_LISTED, WARNING, link="tasks?order=urgency"),
    FindingKind(EMPTY, UNKNOWN, "start a scheduler, or see its log"),
    FindingKind(NO_MATCH, UNKNOWN),
    FindingKind(UNREAD, UNKNOWN),
    FindingKind(HEALING, NOTE, said=("failure is being healed", "failures are being healed")),
    FindingKind(STOPPING, NOTE, "", "replicas", ("replica stops", "replicas stop")),
    FindingKind(VERSIONS, NOTE, "finish the deployment", "replicas"),
    FindingKind(RELEASES, NOTE, "finish the deployment", "replicas"),
    FindingKind("died", NOTE, "", "replicas", ("replica has died", "replicas have died")),
    FindingKind("silent", NOTE, "", "replicas", ("replica is silent", "replicas are silent")),
    FindingKind(PAUSED, NOTE, _RESUME, _PAUSED_TASKS),
)
FINDING_KINDS: Mapping[str, FindingKind] = {each.name: each for each in _KINDS}
# The kinds of what is not well with a task.
_STATES = {state.value for state in TaskState}
COUNTED = tuple(each.name for each in _KINDS if each.name in _STATES and each.level != NOTE)


class _Plain:
    """Writes times for findings, which programs read."""

    def moment(self, moment: datetime | None) -> str:
        return "" if moment is None else rfc3339(moment, "seconds")

    def seconds(self, seconds: float | None) -> str:
        return "" if seconds is None else _lasting(seconds)


_PLAIN = _Plain()


@dataclass(frozen=True)
class WatchedRows:
    """The rows that findings are made of.

    :ivar now: when they were read, by the database's clock
    :ivar tasks: the tasks that a finding can be about; others are left out
    :ivar more: how many more of these tasks there are, which were not read
    :ivar replicas: the replicas; ``None``: they cannot be read
    :ivar silences: the namespaces that need a live replica and have none
    :ivar misses: the missed run times of recurring tasks that missed several; ``None``: the run
        history cannot be read
    :ivar no_replica_after: seconds after which it is critical that a namespace has none; ``None``:
        that is never more than a warning
    :ivar expect_replicas: how many replicas have to be alive
    :ivar jobs: the stored jobs that no replica has claimed in time, by the names of their tasks. Of
        each task it is the job that has been due the longest. A job that no replica has claimed so
        far may lack a task; its id then stands for the name
    :ivar having: the live replicas that list the tasks of these jobs, by task. Each lists those of
        the recurring jobs whose executor it has; ``None``: the replicas cannot be read
    :ivar pauses_of_all: the pauses of all tasks that concern some of the tasks that were asked for
    :ivar all_paused: the tasks that are paused, or some of them, if all tasks that were asked for
        are; else none
    :ivar is_empty: whether there is neither a task nor a stored job, whatever was asked for
    :ivar unmatched: names and patterns that no task and no such job matches
    :ivar unread: why a part of the rows could not be read, in words
    """

    now: datetime
    tasks: Sequence[TaskStatus] = ()
    more: int = 0
    replicas: Sequence[ReplicaStatus] | None = ()
    jobs: Mapping[str, JobStatus] = field(default_factory=dict)
    having: Mapping[str, Sequence[str]] | None = field(default_factory=dict)
    pauses_of_all: Sequence[Pause] = ()
    all_paused: Sequence[TaskStatus] = ()
    is_empty: bool = False
    unmatched: Sequence[str] = ()
    unread: Sequence[str] = ()
    silences: Sequence[Silence] = ()
    misses: Sequence[Misses] | None = ()
    no_replica_after: float | None = NO_REPLICA_AFTER
    expect_replicas: int = 0


def findings_of(rows: WatchedRows) -> list[Finding]:
    """Return the findings, the worst first. A task has one at most, the worst."""
    found = [finding for task in rows.tasks if (finding := finding_of_task(task, rows.now))]
    told = {finding.task for finding in found if finding.level == CRITICAL}
    jobs = [_of_job(name, job, rows) for name, job in rows.jobs.items() if name not in told]
    found = _each_once([*jobs, *found, *_of_misses(rows)])
    found += _of_pauses(rows)
    found += _without_leader(rows)
    found += _of_replicas(rows)
    found += _of_deployments(rows)
    found += _without_replica(rows)
    if rows.misses is None:
        says = "the run history cannot be read, so that it is not known which run times were missed"
        found.append(_found(UNREAD, says, level=NOTE, remedy=_MISSING_RIGHT))
    if rows.more:
        says = f"{rows.more} more tasks are not well or were not looked at"
        found.append(_found(NOT_LISTED, says))
    if rows.is_empty:
        says = "no task was ever registered here: is this the right database?"
        found.append(_found(EMPTY, says))
    elif rows.unmatched:
        names = ", ".join(map(repr, rows.unmatched))
        found.append(_found(NO_MATCH, says=f"no task matches {names}"))
    found += map(unread, rows.unread)
    return sorted(found, key=_place)


def unread(why: str) -> Finding:
    """Return the finding of what cannot be read or written, with why in words."""
    return _found(UNREAD, says=why)


def _found(what: str, short: str = "", **case: Any) -> Finding:
    """Return a finding as its kind is, but for the ``case``. The words ``short`` are cut."""
    kind = FINDING_KINDS[what]
    found = Finding(what, kind.level, cut(short, _LONGEST), kind.remedy, link=kind.link)
    return replace(found, **case)


def _each_once(findings: Iterable[Finding]) -> list[Finding]:
    """Return the first of the worst findings of each task."""
    worst: dict[str | None, Finding] = {}
    for finding in findings:
        known = worst.get(finding.task)
        if known is None or SEVERITIES[finding.level] > SEVERITIES[known.level]:
            worst[finding.task] = finding
    return list(worst.values())


def with_findings(overview: Overview, rows: WatchedRows) -> Overview:
    """Return an overview with its findings and the numbers of its replicas."""
    findings = tuple(findings_of(rows))
    # Of a stored job that lacks a task, too.
    late = [
        (rows.now - each.since).total_seconds()
        for each in findings
        if each.what == TaskState.OVERDUE.value and each.since is not None
    ]
    overview = replace(overview, findings=findings, late_by=max(overview.late_by, *late, 0.0))
    if rows.replicas is None:
        return replace(overview, alive=None, silent=None)
    return replace(
        overview,
        alive=sum(replica.alive for replica in rows.replicas),
        silent=sum(finding.what in GONE_SILENT for finding in findings),
    )


def severity_of(findings: Sequence[Finding]) -> int:
    """Return the severity of all findings together, the exit status of ``check``.

    Unknown does not replace critical, because the critical task is known.
    """
    levels = {finding.level for finding in findings}
    if CRITICAL in levels:
        return SEVERITIES[CRITICAL]
    return max((SEVERITIES[level] for level in levels), default=SEVERITIES[NOTE])


def finding_of_task(task: TaskStatus, now: datetime) -> Finding | None:
    """Return what is not well with a task, or ``None``.

    There is none of a task that is gone, unless its row cannot be read, because then nobody knows
    whether the task is gone. Of a paused task, only a run that takes too long is a finding.
    """
    if task.unreadable:
        return _of_task(task, TaskState.UNREADABLE.value, ", ".join(task.unreadable), None)
    if task.gone or (task.paused and task.state is not TaskState.TOO_LONG):
        return None
    if task.state is TaskState.PAUSED:  # its stored job is
        return None
    return (
        _of_what_runs(task, now)
        or _of_what_is_overdue(task)
        or _of_miss(task)
        or _of_cut(task)
        or _of_lateness(task)
        or _of_failure(task, now)
    )


def _of_what_runs(task: TaskStatus, now: datetime) -> Finding | None:
    """Return the finding of a run that takes too long or is dead."""
    if task.state is TaskState.TOO_LONG:
        since, says = task.started_at, f"for {_lasting(task.took or 0)} on {task.holder}"
        if task.stuck:
            since = task.stuck[0].since
            says = f"since {rfc3339(since, 'seconds')} on {task.stuck[0].replica}"
        return _of_task(task, TaskState.TOO_LONG.value, says, since)
    if task.state is not TaskState.DEAD:
        return None
    says, dead_for = f"on {task.holder}", (now - task.locked_until).total_seconds()
    if dead_for >= _TWO_POLLS + (_grace(task) if task.failover else 0.0):
        return _of_task(task, TaskState.DEAD.value, says, task.locked_until)
    if task.failover:
        # After an outage it may go on, or may have ended: its replica could report neither.
        says = f"the lease of its run {says} has ended, and failover runs it again unless that run"
        return _of_healing(task, f"{says} is reported to be over")
    return None


def _of_what_is_overdue(task: TaskStatus) -> Finding | None:
    if task.state is not TaskState.OVERDUE:
        return None
    return _of_task(task, TaskState.OVERDUE.value, f"by {_lasting(task.late_by or 0)}", task.due_at)


def _of_miss(task: TaskStatus) -> Finding | None:
    if task.missed_at is None or task.acknowledged:
        return None
    says = f"at {rfc3339(task.missed_at, 'seconds')}"
    return _of_task(task, TaskState.MISSED.value, says, task.missed_at)


def _of_misses(rows: WatchedRows) -> Iterator[Finding]:
    """Yield a finding of each recurring task that regularly misses its run times."""
    for missed in rows.misses or ():
        if missed.in_a_row >= MISSED_IN_A_ROW:
            says = f"{missed.in_a_row} run times in a row"
        elif missed.of_ten >= MISSED_OF_TEN:
            says = f"{missed.of_ten} of the last 10 run times"
        else:
            continue
        says += f", the last at {rfc3339(missed.last_at, 'seconds')}"
        says += f": {missed.reason}" if missed.reason else ""
        yield _found(
            TaskState.MISSED.value,
            says,
            remedy="`why` tells more; acknowledge them if they can wait",
            task=missed.task,
            since=missed.since,
            link=f"task?{urlencode({'name': missed.task})}",
        )


def _of_cut(task: TaskStatus) -> Finding | None:
    if task.cut_for is None or task.acknowledged or task.cut_for <= _grace(task) / 2:
        return None
    at = task.locked_until if task.finished_at is None else task.finished_at
    return _of_task(task, TaskState.CUT.value, f"{_lasting(task.cut_for)} ago", at)


def _of_lateness(task: TaskStatus) -> Finding | None:
    if task.late_by is None or task.late_by <= _grace(task) / 2:
        return None
    return _of_task(task, TaskState.LATE.value, f"by {_lasting(task.late_by)}", task.due_at)


def _of_healing(task: TaskStatus, says: str) -> Finding:
    """Return the note of a failure that failover or a retry is healing."""
    return _of_task(task, HEALING, says, task.failed_at)


def _of_failure(task: TaskStatus, now: datetime) -> Finding | None:
    """Return the finding of the last failure.

    It is told also while the task runs again, so that an alarm stays until a run ends well.
    """
    if task.state is TaskState.RETRYING:
        at = "" if task.retry_at is None else f", due at {rfc3339(task.retry_at, 'seconds')}"
        return _of_healing(task, f"attempt {task.attempt} failed, and a retry follows{at}")
    if not task.failures or task.acknowledged:
        return None
    says = last_failure_in_words(task, ())
    goes_on = task.state in (TaskState.RUNNING, TaskState.HOLDER_SILENT)
    is_takeover = goes_on and task.kind == "takeover"
    if task.failures == 1 and is_takeover and task.failed_at is not None:
        # A takeover counts the death when it begins.
        heals_until = task.failed_at + timedelta(seconds=_TWO_POLLS + _grace(task))
        if now < heals_until:
            return _of_healing(task, f"{says}, and {task.holder} runs it again")
    says = f"{task.failures} times, {says}" if task.failures > 1 else says.removeprefix("the last ")
    found = _of_task(task, TaskState.FAILING.value, says, task.failed_at)
    how = task.outcome if task.failure is None else task.failure
    return replace(found, remedy=outcome_named(how or "").remedy or found.remedy)


def _of_task(task: TaskStatus, what: str, says: str, since: datetime | None) -> Finding:
    link = f"task?{urlencode({'name': task.name})}"
    return _found(what, says, task=task.name, since=since, link=link)


def _of_job(name: str, job: JobStatus, rows: WatchedRows) -> Finding:
    late_by = 0.0 if job.next_run_time is None else (rows.now - job.next_run_time).total_seconds()
    having = None if rows.having is None else rows.having.get(job.task or "", ())
    why = _why_unclaimed(job, rows.replicas, having)
    which = "a stored job" if name.endswith(job.id) else f"the stored job {job.id!r}"
    remedy = (
        f"see whether a live replica has its executor {cut(job.executor, 50)!r} and its function; "
        "the replicas' logs say why they do not run it"
    )
    return _found(
        JobState.OVERDUE.value,
        f"by {_lasting(late_by)}, {which} that no replica claims{why and ': '}{why}",
        remedy="start a replica" if why == _NONE_ALIVE else remedy,
        task=name,
        since=job.next_run_time,
        link=f"job?{urlencode({'id': job.id})}",
    )


def why_unclaimed(job: JobStatus, replicas: Sequence[ReplicaStatus] | None) -> str:
    """Return that no replica claims a stored job, and why; ``""`` if the job is not overdue.

    :param replicas: the replicas, each with its tasks; ``None``: they cannot be read
    """
    if job.state is not JobState.OVERDUE:
        return ""
    having = None
    if replicas is not None:
        having = [
            each.replica_id for each in replicas if begins_runs(each) and job.task in each.tasks
        ]
    why = _why_unclaimed(job, replicas, having)
    return f"no replica claims it{why and ': '}{why}"


def _why_unclaimed(
    job: JobStatus, replicas: Sequence[ReplicaStatus] | None, having: Sequence[str] | None
) -> str:
    """Return why no replica claims an overdue job, as far as rows tell; ``""`` if they do not.

    :param having: the replicas that begin runs and list its task; ``None``: it is not known
    """
    if job.unreadable:
        return f"its row has in {', '.join(job.unreadable)} what no replica writes"
    why = "" if replicas is None else _why_none_claims(replicas)
    if why or job.task is None or job.is_one_off or having is None:
        return why
    if not having:
        return "no live one lists it: none has both its executor and its job store"
    listed = ", ".join(having[:_MOST_HAVING]) + (" and others" if having[_MOST_HAVING:] else "")
    lists = "lists it, but does" if len(having) == 1 else "list it, but do"
    return (
        f"{listed} {lists} not claim it, because something that it needs is missing there, such as "
        "its function, or because no worker is free"
    )


def _why_none_claims(replicas: Sequence[ReplicaStatus]) -> str:
    """Return why no replica claims any stored job; ``""`` if rows do not tell."""
    alive = [replica for replica in replicas if replica.alive]
    if not alive:
        return _NONE_ALIVE
    if all(replica.stopping_since is not None for replica in alive):
        return "each live one stops"
    for replica in alive:
        for entry in replica.rejected:
            what, _, why = entry.partition(": ")
            if what in _KEEP_FROM_CLAIMING:
                return f"on {replica.replica_id} the database rejects the {what}: {why}"
    return ""


def _of_pauses(rows: WatchedRows) -> Iterator[Finding]:
    """Yield a finding of each pause of all tasks, which somebody may have forgotten after a day.

    If all tasks are paused one by one, the pauses of the first of them are told.
    """
    pauses: Iterable[Pause] = rows.pauses_of_all
    if rows.all_paused and not rows.pauses_of_all:
        pauses = rows.all_paused[0].pauses
    for pause in dict.fromkeys(pauses):
        which = f" of {pause.namespace!r}" * bool(pause.namespace)
        of_all = replace(pause, namespace=None, job=None)
        says = f"all tasks{which} {pause_in_words(of_all, _PLAIN, with_since=True)}"
        is_long = pause.namespace is not None and rows.now - pause.since > _A_DAY
        yield _found(PAUSED_LONG if is_long else PAUSED, says, since=pause.since)


def _without_leader(rows: WatchedRows) -> Iterator[Finding]:
    """Yield a finding of each namespace that nobody leads although replicas follow."""
    replicas = rows.replicas or ()
    leaderless: dict[str, float] = {}
    of_fleet = _WITHOUT_LEADER_OF_EACH * sum(replica.alive for replica in replicas)
    longest = max(LONGEST_WITHOUT_LEADER, of_fleet)
    for replica in replicas:
        namespace, seconds = replica.leader_namespace, replica.leaderless_for or 0.0
        asks = replica.alive and bool(replica.tasks) and seconds > longest
        if namespace is not None and asks:
            leaderless[namespace] = max(seconds, leaderless.get(namespace, 0.0))
    for namespace, seconds in sorted(leaderless.items()):
        says = f"nobody leads{f' {namespace!r}' * bool(namespace)} for {_lasting(seconds)}"
        yield _found(NO_LEADER, says, since=rows.now - timedelta(seconds=seconds))


def _without_replica(rows: WatchedRows) -> Iterator[Finding]:
    """Yield a finding of each namespace without a live replica, and of too few replicas.

    A claim, a renewal and a release are signs of life, too, because a replica may work although the
    database rejects what it reports of itself.
    """
    for silence in rows.silences:
        of = f" of {silence.namespace!r}" * bool(silence.namespace)
        since = max(silence.seen_at, silence.sign_at or silence.seen_at)
        seconds = (rows.now - since).total_seconds()
        critical_after = inf if rows.no_replica_after is None else rows.no_replica_after
        level, last = WARNING, silence.replica
        says = f"no replica{of} is alive for {_lasting(seconds)}; last seen: {last}"
        if silence.is_stopped:
            level, says = NOTE, f"all replicas{of} have stopped in good order, last {last}"
        elif seconds < LONGEST_SILENCE:
            continue
        elif seconds >= critical_after:
            level = CRITICAL
        yield _found(NO_REPLICA, says, level=level, since=since)
    if rows.expect_replicas:
        alive = sum(replica.alive and bool(replica.tasks) for replica in rows.replicas or ())
        if alive < rows.expect_replicas:
            says = f"{alive} of {rows.expect_replicas} expected replicas are alive"
            yield _found(FEW_REPLICAS, says)


def _of_replicas(rows: WatchedRows) -> Iterator[Finding]:
    """Yield a note of each replica that has died or fallen silent in the last day."""
    if rows.replicas is None:
        says = "the replicas cannot be read, so that it is not known which are alive"
        yield _found(UNREAD, says, level=NOTE, remedy=_MISSING_RIGHT, link="replicas")
    for replica in rows.replicas or ():
        unseen = rows.now - replica.seen_at
        if replica.state.value in GONE_SILENT and unseen < _A_DAY:
            ago = seconds_in_words(unseen.total_seconds())
            says, name = (
                f"{replica.state_in_words}, last sign of life {ago} ago",
                replica.replica_id,
            )
            yield _found(replica.state.value, says, replica=name, since=replica.seen_at)


def _of_deployments(rows: WatchedRows) -> Iterator[Finding]:
    """Yield a note of each replica that stops, and one if live replicas differ.

    Replicas of one application may differ in the version of this library, and in the release of the
    application. Replicas whose release is not known do not count.
    """
    alive = [replica for replica in rows.replicas or () if replica.alive]
    for replica in alive:
        if replica.stopping_since is not None:
            since = rfc3339(replica.stopping_since, "seconds")
            says = f"it has been stopping since {since}, and waits for "
            says += ", ".join(run.task for run in replica.running) or "its runs"
            name = replica.replica_id
            yield _found(STOPPING, says, replica=name, since=replica.stopping_since)
    for fleet in of_each_application(alive):
        yield from _differing(VERSIONS, [each.version for each in fleet])
        releases = (each.release for each in fleet)
        yield from _differing(RELEASES, [each for each in releases if each is not None])


def _differing(what: str, values: Iterable[str]) -> Iterator[Finding]:
    numbers = Counter(values)
    if len(numbers) > 1:
        told = ", ".join(
            f"{number} with {cut(value, 50)}" for value, number in sorted(numbers.items())
        )
        says = f"live replicas with common tasks have several {what}: {told}"
        yield _found(what, says)


def _lasting(seconds: float) -> str:
    """Return a duration: in seconds below an hour, else in its two largest units."""
    return f"{seconds:.0f} s" if seconds < _AN_HOUR else seconds_in_words(seconds)


def _grace(task: TaskStatus) -> float:
    """Return the task's grace time in seconds; the shortest if no run is due."""
    if task.due_at is None or task.overdue_at is None:
        return SHORTEST_GRACE
    return (task.overdue_at - task.due_at).total_seconds()


# The levels in the order in which they are told.
_LEVELS = (CRITICAL, UNKNOWN, WARNING, NOTE)


def _place(finding: Finding) -> tuple[int, int, bool, float, str]:
    """Return the place of a finding: by its level, its kind, since when it is so, and its name."""
    since = 0.0 if finding.since is None else finding.since.timestamp()
    name = finding.task or finding.replica or finding.says
    place = _LEVELS.index(finding.level), list(FINDING_KINDS).index(finding.what)
    return *place, finding.since is None, since, name
