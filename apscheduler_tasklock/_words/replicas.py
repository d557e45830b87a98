"""Replicas in words: how one is, what becomes of its runs if it is killed, and its own tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from apscheduler_tasklock._words.formats import Formats
from apscheduler_tasklock._words.next_run_times import due_of
from apscheduler_tasklock.status import (
    ReplicaState,
    ReplicaStatus,
    Run,
    RunningRun,
    TaskStatus,
)

_REMOVED = "job-removed"
_GONE = (ReplicaState.STOPPED, ReplicaState.DIED)
# Limits the replicas that are named, because a fleet may have hundreds.
_MOST_REPLICAS = 5


def begins_runs(replica: ReplicaStatus) -> bool:
    """Return whether a replica begins runs, as far as its row shows: those that stop do not."""
    return replica.alive and replica.stopping_since is None


def that_have(
    task: str, replicas: Sequence[ReplicaStatus], entries: Iterable[Run]
) -> list[ReplicaStatus]:
    """Return the replicas that have a task, as far as their rows show.

    A replica lists the tasks of stored jobs once in a while, so its row may have the task of a job
    that an operator has removed since.

    :param entries: the task's entries in the run history
    """
    removed = [each.started_at for each in entries if each.outcome == _REMOVED]
    having = (each for each in replicas if task in each.tasks)
    return [each for each in having if all(each.seen_at > at for at in removed)]


def is_removed(entries: Iterable[Run]) -> bool:
    """Return whether an operator has removed the stored job of a task.

    :param entries: the task's entries in the run history
    """
    return any(each.outcome == _REMOVED for each in entries)


def begun_by_others(having: Iterable[ReplicaStatus], but: Sequence[str]) -> list[str]:
    """Return the ids of the replicas that begin runs of a task, but for some.

    :param having: the replicas that have the task
    """
    return [each.replica_id for each in having if begins_runs(each) and each.replica_id not in but]


def named(names: Sequence[str]) -> str:
    """Return the names of replicas in words, of which there may be hundreds."""
    more = len(names) - _MOST_REPLICAS
    return ", ".join(names[:_MOST_REPLICAS]) + (f" and {more} more" if more > 0 else "")


def who_runs_meanwhile(task: TaskStatus, having: Iterable[ReplicaStatus] | None) -> str:
    """Return who can run a task while a run that has lost its lock still goes on.

    A run that hangs keeps its own replica from beginning another one, unless the job has more
    ``max_instances``.

    :param having: the replicas that have the task; ``None``: not known
    """
    if having is None:
        return "other replicas may run the task meanwhile"
    others = begun_by_others(having, [run.replica for run in task.stuck])
    if not others:
        return "no other live replica can run the task until that run ends"
    return f"{named(others)} can run the task meanwhile"


def none_begins(having: Sequence[ReplicaStatus]) -> str:
    """Return that no replica begins runs of a task, in words; ``""`` if one does.

    :param having: the replicas that have the task
    """
    if any(map(begins_runs, having)):
        return ""
    stops = any(each.alive for each in having)
    return "each live replica that has it is stopping" if stops else "no live replica has it"


def last_sign_of(replica: ReplicaStatus) -> datetime:
    """Return the time of a replica's last sign of life, as far as rows tell.

    The begin of a run is a sign of life, too. Those of runs that are over are in the history alone.
    """
    return max([replica.seen_at, *(run.since for run in (*replica.running, *replica.unfinished))])


def why_silent(replica_id: str, replicas: Iterable[ReplicaStatus] | None, formats: Formats) -> str:
    """Return that a replica has died or is silent, in words; ``""`` if it is not known to be so.

    :param replicas: all replicas, or some; ``None``: not known
    """
    for each in replicas or ():
        if each.replica_id == replica_id and each.state is ReplicaState.DIED:
            return f"{replica_id} has died"
        if each.replica_id == replica_id and each.state is ReplicaState.SILENT:
            return f"{replica_id} has been silent since {formats.moment(last_sign_of(each))}"
    return ""


def replica_headline(replica: ReplicaStatus, formats: Formats) -> str:
    """Return how a replica is, since when, whether it leads, and for what it stops."""
    seen = formats.moment(last_sign_of(replica))
    last_sign = f"its last sign of life was at {seen}"
    died = f"died: a run of it was found dead, and {last_sign}"
    if replica.stopping_since is not None:
        # An operator may have freed its run, so that no run was found dead.
        died = f"died while it was stopping, and {last_sign}"
    words = {
        ReplicaState.ALIVE: f"alive since {formats.moment(replica.started_at)}, {last_sign}",
        ReplicaState.STOPPED: f"stopped in good order at {seen}",
        ReplicaState.DIED: died,
        ReplicaState.SILENT: f"silent since {seen}: it is dead, hangs, or cannot reach the "
        "database",
        ReplicaState.UNREADABLE: "unreadable: its row has values that no replica writes, and "
        f"{last_sign}",
    }[replica.state]
    if replica.leader_namespace is not None:
        of = f" {replica.leader_namespace}" if replica.leader_namespace else ""
        words += f"; it {'leads' if replica.leads and replica.alive else 'does not lead'}{of}"
    if replica.stopping_since is not None:
        tasks = ", ".join(dict.fromkeys(run.task for run in replica.running))
        since = formats.moment(replica.stopping_since)
        if replica.alive:
            words += (
                f"; it has been stopping since {since}, and waits for {tasks or 'its last runs'}"
            )
        else:
            words += f"; its stop had begun at {since}, and was not over"
    return f"{words[:1].upper()}{words[1:]}."


def runs_nothing_in_words(replica: ReplicaStatus) -> str:
    """Return what is known of a replica of which no row tells a run that is not over."""
    if "running" in replica.unreadable:
        return "What it runs cannot be read."
    if replica.alive or replica.state is ReplicaState.STOPPED:
        return "It runs nothing."
    return "No row tells of a run of it that is not over."


def fate_of(
    run: RunningRun,
    task: TaskStatus | None,
    replicas: Sequence[ReplicaStatus] | None,
    formats: Formats,
    now: datetime,
    *,
    has_ended: bool = False,
) -> str:
    """Return what becomes of a run if its replica is killed now, or is dead, as far as rows tell.

    :param task: the run's task; ``None``: not known
    :param replicas: all replicas; ``None``: not known
    :param now: the database's time
    :param has_ended: whether the run's lease has ended
    """
    if run.lost:
        return "nothing changes for others: its lock is lost, so they may run the task already"
    is_other = task is not None and (task.token != run.token or task.finished_at is not None)
    if task is None or task.unreadable or replicas is None:
        return "not known"
    if is_other:
        return "it has ended since"
    if not has_ended:
        until = formats.moment(task.locked_until)
        return _what_follows(run, task, replicas, formats, now, until)
    # After an outage it may go on: its replica could not renew the lease.
    ended = f"its lease ended at {formats.moment(task.locked_until)}, and its end is not reported"
    return f"{ended}; {_what_follows(run, task, replicas, formats, now, '')}"


def _what_follows(
    run: RunningRun,
    task: TaskStatus,
    replicas: Sequence[ReplicaStatus],
    formats: Formats,
    now: datetime,
    until: str,
) -> str:
    """Return what follows the death of a run.

    :param until: when the run's lease ends; ``""``: it has ended
    """
    if task.kind == "hold":
        return f"nobody runs it again; its name is free{f' from {until} on' if until else ''}"
    having = (each for each in replicas if task.name in each.tasks)
    others = begun_by_others(having, [run.replica])
    names = named(others)
    if not task.failover:
        due_at = due_of(task, now)
        due = f", due at {formats.moment(due_at)}" if due_at else ""
        goes_on = f"{names} can run its next run time{due}"
        goes_on += f", when the lease has ended at {until}" if until else ""
        if not others:
            goes_on = "no other live replica has the task for its next run time"
        return f"it is not run again, because it has no failover; {goes_on}"
    if not others:
        return "nobody runs it again, because no other live replica has the task"
    after = f"soon after {until}, when its lease ends" if until else "soon"
    if task.paused:
        after = "when the task is no longer paused"
    return f"it is run again {after}, by {names}"


def of_each_application(replicas: Iterable[ReplicaStatus]) -> list[list[ReplicaStatus]]:
    """Return replicas by their applications. Replicas with a common task are of one application."""
    applications: list[tuple[set[str], list[ReplicaStatus]]] = []
    for each in replicas:
        tasks, of_one = set(each.tasks), [each]
        others = []
        for known in applications:
            if tasks.isdisjoint(known[0]):
                others.append(known)
            else:
                tasks, of_one = tasks | known[0], [*known[1], *of_one]
        applications = [*others, (tasks, of_one)]
    return [of_one for _, of_one in applications]


def has_no_own_in_words(replica: ReplicaStatus) -> str:
    """Return that there is no task that only this replica can run, and why."""
    if replica.state in _GONE:
        return "Nothing any more."
    if not replica.tasks:
        return "It has no tasks."
    return "Nothing: other live replicas have each of its tasks."


def tasks_of_one(replica: ReplicaStatus, replicas: Sequence[ReplicaStatus]) -> list[str]:
    """Return the tasks that a replica has, and no other live replica that is not stopping.

    A replica that has stopped or died can run none of those that it had. They may be tasks whose
    jobs were removed since.
    """
    if replica.state in _GONE:
        return []
    others = {
        name
        for each in replicas
        if begins_runs(each) and each.replica_id != replica.replica_id
        for name in each.tasks
    }
    return [name for name in replica.tasks if name not in others]
