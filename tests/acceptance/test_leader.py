"""Fleets in leader mode: real processes, real signals, and a job that is due every second."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

import pytest

from tests.acceptance.conftest import ReplicaProcess, Run
from tests.acceptance.test_graceful_stop import gunicorn
from tests.support.polling import eventually

pytestmark = pytest.mark.nightly

StartReplica = Callable[..., ReplicaProcess]

LEADS = "INFO This replica"
SECOND = timedelta(seconds=1)


def every_second(**more: Any) -> dict[str, Any]:
    """Return a job in leader mode. No run time of it is merged with another one, or missed."""
    options = {"leader": True, "leader_lease": 5, "poll_interval": 1, "failover": True, "lease": 5}
    return {
        "function": "sleep",
        "kwargs": {"takes": 0},
        "trigger": "cron",
        "second": "*",
        "coalesce": False,
        "max_instances": 10,
        **more,
        "options": {**options, **more.get("options", {})},
    }


def leads(replica: ReplicaProcess) -> bool:
    said = [line for line in replica.said if line.startswith(LEADS)]
    return bool(said) and " no longer " not in said[-1]


def start_fleet(start: StartReplica, count: int = 3, **more: Any) -> list[ReplicaProcess]:
    """Start replicas, of which the first one leads, and wait until all of them take part."""
    fleet = [start(**every_second(**more))]
    fleet[0].says(LEADS)
    fleet += [start(**every_second(**more)) for _ in range(count - 1)]
    for follower in fleet[1:]:
        follower.says("refused job window")
    return fleet


def runs_of(fleet: Sequence[ReplicaProcess]) -> list[Run]:
    return sorted((run for each in fleet for run in each.runs), key=lambda run: run.token)


def wait_for_runs(fleet: Sequence[ReplicaProcess], count: int) -> None:
    """Wait until so many further runs have begun."""
    enough = len(runs_of(fleet)) + count
    eventually(lambda: len(runs_of(fleet)) >= enough)


def check_each_second_once(fleet: Sequence[ReplicaProcess], killed: int = 0) -> None:
    """Check that each run time was begun once, in order, and that none is left out.

    :param killed: how many replicas may have been killed, or stopped for long, after a claim and
        before they told of the run; a takeover tells of its run time then
    """
    runs = runs_of(fleet)
    first = [run.run_time for run in runs if run.how == "first"]
    assert len(first) == len(set(first))
    begun = dict.fromkeys(run.run_time for run in runs)
    assert len(begun.keys() - set(first)) <= killed, runs
    times = [datetime.fromisoformat(f"2026-03-01 {run_time}") for run_time in begun]
    day = timedelta(days=1)
    gaps = [(later - earlier) % day for earlier, later in pairwise(times)]
    wrong = [f"{at:%H:%M:%S} +{gap}" for at, gap in zip(times, gaps, strict=False) if gap != SECOND]
    assert not wrong, [line for replica in fleet for line in replica.said]


def test_the_run_times_of_a_killed_leader_are_run_by_the_others(
    start_replica: StartReplica,
) -> None:
    fleet = start_fleet(start_replica)
    fleet[0].signal(signal.SIGKILL)
    eventually(lambda: any(leads(each) for each in fleet[1:]))
    wait_for_runs(fleet, 5)
    check_each_second_once(fleet, killed=1)


def test_a_leader_that_is_paused_past_its_lease_runs_nothing_again(
    start_replica: StartReplica,
) -> None:
    fleet = start_fleet(start_replica)
    fleet[0].signal(signal.SIGSTOP)
    eventually(lambda: any(leads(each) for each in fleet[1:]))
    wait_for_runs(fleet, 3)
    fleet[0].signal(signal.SIGCONT)
    eventually(lambda: not leads(fleet[0]))
    wait_for_runs(fleet, 5)
    check_each_second_once(fleet, killed=1)


def test_a_rolling_deployment_of_six_replicas_loses_nothing(start_replica: StartReplica) -> None:
    old = start_fleet(start_replica, 6)
    new = []
    for each in old:
        new.append(start_replica(**every_second()))
        each.stop()
        wait_for_runs([*old, *new], 2)
    eventually(lambda: any(leads(each) for each in new))
    wait_for_runs([*old, *new], 3)
    check_each_second_once([*old, *new])


def test_all_replicas_of_a_deployment_are_replaced_at_once(start_replica: StartReplica) -> None:
    old = start_fleet(start_replica)
    new = [start_replica(**every_second()) for _ in range(3)]
    for each in new:
        each.says("refused job window")
    for each in old:
        each.signal(signal.SIGTERM)
    eventually(lambda: any(leads(each) for each in new))
    wait_for_runs([*old, *new], 3)
    check_each_second_once([*old, *new])


def test_a_leader_that_blocks_its_event_loop_is_no_loss(start_replica: StartReplica) -> None:
    blocked_at = datetime.now(timezone.utc) + timedelta(seconds=10)
    block = {"id": "block", "function": "block", "kwargs": {"seconds": 8}, "trigger": "date"}
    jobs = [{**block, "run_date": str(blocked_at)}]
    leader = start_replica(**every_second(executor="asyncio", jobs=jobs))
    leader.says(LEADS)
    fleet = [leader, *(start_replica(**every_second()) for _ in range(2))]
    leader.says("begins block")
    eventually(lambda: runs_of(fleet[1:]))
    leader.says("executed block")
    wait_for_runs(fleet, 5)
    check_each_second_once(fleet)


@pytest.mark.parametrize("first", [True, False])
def test_a_fleet_of_which_some_are_not_in_leader_mode(
    start_replica: StartReplica, first: bool
) -> None:
    """As in the deployment that switches it on."""
    fleet = [start_replica(**every_second(options={"leader": first}))]
    fleet[0].says("runs")
    fleet += [start_replica(**every_second(options={"leader": not first})) for _ in range(2)]
    eventually(lambda: any(leads(each) for each in fleet))
    for each in fleet[1:]:
        each.says("refused job")
    fleet[0].signal(signal.SIGKILL)
    wait_for_runs(fleet, 10)
    check_each_second_once(fleet, killed=1)


def test_the_workers_of_gunicorn_have_one_leader(start_replica: StartReplica) -> None:
    server = start_replica(
        *gunicorn("asgi", "--asgi-loop", "asyncio"), **every_second(executor="asyncio")
    )
    server.says("refused job window")
    wait_for_runs([server], 5)
    assert len([line for line in server.said if line.startswith(LEADS)]) == 1
    check_each_second_once([server])
