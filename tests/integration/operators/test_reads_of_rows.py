"""What is read of rows as replicas write them: the dataclasses that tests of words begin with."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock._database.connection import raw_cursor
from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock.schema.table import task_lock_table
from tests.support.rows import (
    READ,
    ROWS,
    action_read,
    add_action,
    add_job,
    add_miss,
    add_replica,
    add_run,
    add_task,
    job_status,
    miss_read,
    replica_status,
    run_read,
    task_status,
)

Connection = psycopg.Connection[Any]

OPERATIONS = Operations(task_lock_table())


@pytest.fixture
def now(connection: Connection) -> Iterator[datetime]:
    """The database's time, at which rows are added and read: that of one transaction."""
    with connection.transaction():
        found = connection.execute("SELECT now()").fetchone()
        assert found is not None
        yield found[0]


def test_each_task_is_read_as_the_tests_of_words_have_it(
    connection: Connection, now: datetime
) -> None:
    for name, columns in ROWS.items():
        add_task(connection, name, **columns)
    found = {task.name: task for task in OPERATIONS.tasks(raw_cursor(connection))}
    assert found.keys() == READ.keys()
    for name, columns in READ.items():
        assert found[name] == task_status(name, now, **columns), name


@pytest.mark.parametrize("details", ["[]", "{", '{"options": {"a": 1}}', '{"zone": 1}'])
def test_details_that_no_replica_writes_are_left_out(
    connection: Connection, now: datetime, details: str
) -> None:
    add_task(connection, "sync", details=f"'{details}'")
    assert OPERATIONS.tasks(raw_cursor(connection)) == [task_status("sync", now)]


def test_a_run_a_miss_and_what_an_operator_did_are_read_as_the_tests_of_words_have_them(
    connection: Connection, now: datetime
) -> None:
    add_run(connection, "sync", 1)
    add_miss(connection, "sync", 1)
    add_action(connection, "sync", 1)
    found = OPERATIONS.runs(raw_cursor(connection), "sync")
    assert found == [run_read(now), miss_read(now), action_read(now)]


def test_a_replica_is_read_as_the_tests_of_words_have_it(
    connection: Connection, now: datetime
) -> None:
    add_replica(connection, "one", ["sync"])
    found = OPERATIONS.replicas(raw_cursor(connection))
    assert found == [replica_status("one", now, tasks=("sync",))]


def test_a_stored_job_is_read_as_the_tests_of_words_have_it(
    connection: Connection, now: datetime
) -> None:
    add_job(connection, "job")
    assert OPERATIONS.jobs(raw_cursor(connection)) == [job_status("job", now)]
