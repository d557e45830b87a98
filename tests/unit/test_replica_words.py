"""A replica in words, and what becomes of its runs if it is killed."""

from __future__ import annotations

from datetime import timezone
from typing import Any

import pytest

from apscheduler_tasklock.dashboard.formats import Formats
from apscheduler_tasklock.status import ReplicaState, RunningRun
from tests.support.rows import NOW, READ, replica_status, seconds, task_status
from tests.support.waist import (
    fate_of,
    of_each_application,
    replica_headline,
    runs_nothing_in_words,
    tasks_of_one,
)

FORMATS = Formats(timezone.utc, NOW)
RUN = RunningRun("sync", 7, "one", NOW - seconds(60))
STOPPING = {"stopping_since": seconds(-20), "running": (RUN,)}


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({}, "Alive since 11:00:00, its last sign of life was at 12:00:00."),
        (
            {"leader_namespace": "", "leads": True},
            "Alive since 11:00:00, its last sign of life was at 12:00:00; it leads.",
        ),
        (
            {"leader_namespace": "shop:"},
            "Alive since 11:00:00, its last sign of life was at 12:00:00; it does not lead shop:.",
        ),
        (
            STOPPING,
            "Alive since 11:00:00, its last sign of life was at 12:00:00; it has been stopping "
            "since 11:59:40, and waits for sync.",
        ),
        (
            {**STOPPING, "state": ReplicaState.DIED, "seen_at": seconds(-90), "running": ()},
            "Died while it was stopping, and its last sign of life was at 11:58:30; its stop had "
            "begun at 11:59:40, and was not over.",
        ),
        (
            {"state": ReplicaState.DIED, "seen_at": seconds(-90)},
            "Died: a run of it was found dead, and its last sign of life was at 11:58:30.",
        ),
        ({"state": ReplicaState.STOPPED}, "Stopped in good order at 12:00:00."),
        (
            {"state": ReplicaState.SILENT, "seen_at": seconds(-90)},
            "Silent since 11:58:30: it is dead, hangs, or cannot reach the database.",
        ),
        (  # The begin of a run is a sign of life, too.
            {"state": ReplicaState.SILENT, "seen_at": seconds(-90), "running": (RUN,)},
            "Silent since 11:59:00: it is dead, hangs, or cannot reach the database.",
        ),
        (
            {"state": ReplicaState.DIED, "seen_at": seconds(-90), "unfinished": (RUN,)},
            "Died: a run of it was found dead, and its last sign of life was at 11:59:00.",
        ),
    ],
)
def test_a_replica_in_one_sentence(columns: dict[str, Any], says: str) -> None:
    assert replica_headline(replica_status(**columns), FORMATS) == says


OTHERS = [replica_status(name, tasks=("sync",)) for name in ("one", "two", "three")]
RUNS = READ["running"]
FAILOVER = {**RUNS, "failover": True}
FATES: dict[str, tuple[dict[str, Any], str]] = {
    "with failover": (
        {"task": FAILOVER},
        "it is run again soon after 12:01:00, when its lease ends, by two, three",
    ),
    "with failover, paused": (
        {"task": {**FAILOVER, "paused": True}},
        "it is run again when the task is no longer paused, by two, three",
    ),
    "with failover, and nobody else has it": (
        {"task": FAILOVER, "replicas": [*OTHERS[:1], replica_status("two")]},
        "nobody runs it again, because no other live replica has the task",
    ),
    "with failover, and the others stop or are dead": (
        {
            "task": FAILOVER,
            "replicas": [
                replica_status("two", tasks=("sync",), **STOPPING),
                replica_status("three", tasks=("sync",), state=ReplicaState.SILENT),
            ],
        },
        "nobody runs it again, because no other live replica has the task",
    ),
    "without failover": (
        {"task": RUNS},
        "it is not run again, because it has no failover; two, three can run its next run time, "
        "due at 12:04:00, when the lease has ended at 12:01:00",
    ),
    "without failover, and a run time has come meanwhile": (
        {"task": {**RUNS, "due_at": seconds(-30), "zone": "UTC"}},
        "it is not run again, because it has no failover; two, three can run its next run time, "
        "due at 12:04:30, when the lease has ended at 12:01:00",
    ),
    "a hold": (
        {"task": {**RUNS, "kind": "hold"}},
        "nobody runs it again; its name is free from 12:01:00 on",
    ),
    "with failover, dead": (
        {"task": FAILOVER, "has_ended": True},
        "its lease ended at 12:01:00, and its end is not reported; it is run again soon, by two, "
        "three",
    ),
    "without failover, dead": (
        {"task": RUNS, "has_ended": True, "replicas": OTHERS[:1]},
        "its lease ended at 12:01:00, and its end is not reported; it is not run again, because it "
        "has no failover; no other live replica has the task for its next run time",
    ),
    "a hold, dead": (
        {"task": {**RUNS, "kind": "hold"}, "has_ended": True},
        "its lease ended at 12:01:00, and its end is not reported; nobody runs it again; its name "
        "is free",
    ),
    "its lock is lost": (
        {"task": RUNS, "run": RunningRun("sync", 7, "one", NOW, lost=True)},
        "nothing changes for others: its lock is lost, so they may run the task already",
    ),
    "another run has the row": ({"task": {**RUNS, "token": 8}}, "it has ended since"),
    "the run has ended": ({"task": READ["ok"]}, "it has ended since"),
    "the row cannot be read": ({"task": {**RUNS, "unreadable": ("schedule",)}}, "not known"),
    "the replicas are not known": ({"task": RUNS, "replicas": None}, "not known"),
    "the task is not known": ({"task": None}, "not known"),
}


@pytest.mark.parametrize("case", FATES)
def test_what_becomes_of_a_run_if_its_replica_is_killed(case: str) -> None:
    given, fate = FATES[case]
    task = None if given["task"] is None else task_status(**given["task"])
    run, replicas = given.get("run", RUN), given.get("replicas", OTHERS)
    has_ended = given.get("has_ended", False)
    assert fate_of(run, task, replicas, FORMATS, NOW, has_ended=has_ended) == fate


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({}, "It runs nothing."),
        ({"state": ReplicaState.STOPPED}, "It runs nothing."),
        ({"state": ReplicaState.SILENT}, "No row tells of a run of it that is not over."),
        ({"state": ReplicaState.DIED}, "No row tells of a run of it that is not over."),
        (
            {"state": ReplicaState.UNREADABLE, "unreadable": ("running",)},
            "What it runs cannot be read.",
        ),
    ],
)
def test_only_of_a_replica_that_tells_its_runs_it_is_said_that_it_runs_nothing(
    columns: dict[str, Any], says: str
) -> None:
    assert runs_nothing_in_words(replica_status(**columns)) == says


@pytest.mark.parametrize(
    ("tasks", "applications"),
    [
        ({"a": ("x",), "b": ("x", "y"), "c": ("z",)}, ["ab", "c"]),
        ({"a": ("x",), "b": ("z",), "c": ("x", "y"), "d": ("y", "z")}, ["abcd"]),
        ({"a": (), "b": ()}, ["a", "b"]),
    ],
)
def test_replicas_with_a_common_task_are_of_one_application(
    tasks: dict[str, tuple[str, ...]], applications: list[str]
) -> None:
    replicas = [replica_status(name, tasks=has) for name, has in tasks.items()]
    found = [
        "".join(sorted(each.replica_id for each in of_one))
        for of_one in of_each_application(replicas)
    ]
    assert sorted(found) == applications


def test_tasks_that_only_one_replica_has() -> None:
    one = replica_status("one", tasks=("a", "b", "c", "d"))
    others = [
        replica_status("two", tasks=("a",)),
        replica_status("three", tasks=("b",), state=ReplicaState.STOPPED),
        replica_status("four", tasks=("c",), **STOPPING),
    ]
    assert tasks_of_one(one, [one, *others]) == ["b", "c", "d"]
    for state in (ReplicaState.STOPPED, ReplicaState.DIED):  # which can run nothing any more
        gone = replica_status("one", tasks=("a", "b"), state=state)
        assert tasks_of_one(gone, [gone, *others]) == []
