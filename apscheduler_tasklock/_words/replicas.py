"""Replicas in words: how one is, what becomes of its runs if it is killed, and its own tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from apscheduler_tasklock._words.formats import Formats
from apscheduler_tasklock.status import (
    ReplicaState,
    ReplicaStatus,
    Run,
    RunningRun,
    TaskStatus,
)

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
    removed = [each.started_at for each in entries if each.outcome == "job-removed"]
    having = (each for each in replicas if task in each.tasks)
    return [each for each in having if all(each.seen_at > at for at in removed)]


def none_begins(having: Sequence[ReplicaStatus]) -> str:
    """Return that no replica begins runs of a task, in words; ``""`` if one does.

    :param having: the replicas that have the task
    """
    if any(map(begins_runs, having)):
        return ""
    stops = any(each.alive for each in having)
    return "each live replica that has it is stopping" if stops else "no live replica has it"


def replica_headline(replica: ReplicaStatus, formats: Formats) -> str:
    """Return how a replica is, since when, whether it leads, and for what it stops."""
    seen = formats.moment(replica.seen_at)
    died = f"died: a run of it was found dead, and it was seen last at {seen}"
    if replica.stopping_since is not None:
        # An operator may have freed its run, so that no run was found dead.
        died = f"died while it was stopping, and was seen last at {seen}"
    words = {
        ReplicaState.ALIVE: f"alive since {formats.moment(replica.started_at)}, seen last at "
        f"{seen}",
        ReplicaState.STOPPED: f"stopped in good order at {seen}",
        ReplicaState.DIED: died,
        ReplicaState.SILENT: f"silent since {seen}: it is dead, hangs, or cannot reach the "
        "database",
        ReplicaState.UNREADABLE: "unreadable: its row has values that no replica writes, seen "
        f"last at {seen}",
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
    *,
    has_ended: bool = False,
) -> str:
    """Return what becomes of a run if its replica is killed now, or is dead, as far as rows tell.

    :param task: the run's task; ``None``: not known
    :param replicas: all replicas; ``None``: not known
    :param has_ended: whether the run's lease has ended
    """
    if run.lost:
        return "nothing changes for others: its lock is lost, so they may run the task already"
    is_other = task is not None and (task.token != run.token or task.finished_at is not None)
    if task is None or task.unreadable or is_other or replicas is None:
        return "not known"
    if not has_ended:
        return _what_follows(run, task, replicas, formats, formats.moment(task.locked_until))
    # After an outage it may go on: its replica could not renew the lease.
    ended = f"its lease ended at {formats.moment(task.locked_until)}, and its end is not reported"
    return f"{ended}; {_what_follows(run, task, replicas, formats, '')}"


def _what_follows(
    run: RunningRun,
    task: TaskStatus,
    replicas: Sequence[ReplicaStatus],
    formats: Formats,
    until: str,
) -> str:
    """Return what follows the death of a run.

    :param until: when the run's lease ends; ``""``: it has ended
    """
    if task.kind == "hold":
        return f"nobody runs it again; its name is free{f' from {until} on' if until else ''}"
    others = [
        each.replica_id
        for each in replicas
        if begins_runs(each) and each.replica_id != run.replica and task.name in each.tasks
    ]
    more = len(others) - _MOST_REPLICAS
    names = ", ".join(others[:_MOST_REPLICAS]) + (f" and {more} more" if more > 0 else "")
    if not task.failover:
        due = f", due at {formats.moment(task.due_at)}" if task.due_at else ""
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


def tasks_of_one(replica: ReplicaStatus, replicas: Sequence[ReplicaStatus]) -> list[str]:
    """Return the tasks that a replica has, and no other live replica that is not stopping."""
    others = {
        name
        for each in replicas
        if begins_runs(each) and each.replica_id != replica.replica_id
        for name in each.tasks
    }
    return [name for name in replica.tasks if name not in others]
