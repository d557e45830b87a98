"""Holders that are killed or paused in mid-job: real processes, real signals."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.acceptance.conftest import ReplicaProcess
from tests.support.polling import eventually

pytestmark = pytest.mark.nightly

StartReplica = Callable[..., ReplicaProcess]


def every_second(takes: float, max_lock: float, lease: float | None = None) -> dict[str, Any]:
    return {
        "function": "sleep",
        "trigger": "interval",
        "seconds": 1,
        "kwargs": {"takes": takes, "task_lock": {"max_lock": max_lock, "lease": lease}},
    }


def row(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
    found = cursor.execute(
        "SELECT *, locked_until <= now() AS expired FROM task_lock WHERE task_name = 'job'"
    ).fetchone()
    assert found is not None
    return found


@pytest.mark.parametrize("lease", [None, 1])
def test_a_killed_holder_blocks_its_task_until_its_lease_ends_and_no_longer(
    start_replica: StartReplica, connection: psycopg.Connection[Any], lease: float | None
) -> None:
    max_lock = 20 if lease is None else 3600  # longer than the other one takes to start
    holder = start_replica(**every_second(takes=600, max_lock=max_lock, lease=lease))
    holder.says("runs")
    other = start_replica(**every_second(takes=0, max_lock=max_lock, lease=lease))
    other.says("refused")
    holder.signal(signal.SIGKILL)
    killed = row(connection)

    other.says("runs")
    taken = row(connection)
    assert killed["finished_at"] is None
    assert taken["started_at"] >= killed["locked_until"]
    assert taken["locked_by"] != killed["locked_by"]


def test_a_holder_paused_past_its_lock_hears_of_it_and_frees_nobody_elses(
    start_replica: StartReplica, connection: psycopg.Connection[Any]
) -> None:
    holder = start_replica(**every_second(takes=3, max_lock=2))
    holder.says("runs")
    holder.signal(signal.SIGSTOP)
    eventually(lambda: row(connection)["expired"])
    other = start_replica(**every_second(takes=600, max_lock=3600))
    other.says("runs")
    held = row(connection)

    holder.signal(signal.SIGCONT)
    holder.says("lost")
    assert any(said.endswith("lost") for said in holder.said if said.startswith("ends"))
    still = row(connection)
    assert {**still, "expired": None} == {**held, "expired": None}
    assert still["finished_at"] is None
