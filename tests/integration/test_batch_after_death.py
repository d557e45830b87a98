"""A batch of claims whose second statement fails, after the first has granted some of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psycopg

from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.messages import ClaimRequest
from tests.support.claims import die, held
from tests.support.polling import eventually


def request(task: str) -> ClaimRequest:
    return ClaimRequest(task, min_lock=9.0, max_lock=50.0, runs="jobs:job", lease=20.0)


def test_what_was_granted_beside_a_death_that_cannot_be_noted_is_handed_over(
    make_locks: Callable[..., LockClient], connection: psycopg.Connection, direct_url: str
) -> None:
    """The history that gets the death's entry is locked, until this replica is stopped."""
    [name] = connection.execute("SELECT current_database()").fetchone() or ()
    connection.execute(f"ALTER DATABASE \"{name}\" SET lock_timeout = '400ms'")
    before = make_locks(replica_id="before")
    before.release(held(before, "free", runs="jobs:job"))
    die(before, held(before, "dead", runs="jobs:job", lease=0.1))
    connection.execute(
        "UPDATE task_lock SET started_at = now() - interval '100 s',"
        " window_start = now() - interval '100 s', window_until = now() - interval '90 s',"
        " locked_until = now() - interval '1 s'"
    )
    locks = make_locks(claim_timeout=20.0)
    eventually(lambda: locks.ask(lambda cursor: cursor.execute("SELECT 1")) and locks.stable)
    is_busy, go_on = threading.Event(), threading.Event()

    def keep_busy(_cursor: object) -> None:
        is_busy.set()
        assert go_on.wait(30)

    def claim(task: str) -> None:
        try:
            locks.claim(request(task))
        except Exception as error:  # noqa: BLE001  # of which the row tells
            print(task, error)

    with psycopg.connect(direct_url) as blocker:
        blocker.execute("LOCK TABLE task_lock_run IN ACCESS EXCLUSIVE MODE")
        busy = threading.Thread(target=locks.ask, args=(keep_busy,))
        busy.start()
        assert is_busy.wait(30)
        claims = [threading.Thread(target=claim, args=(task,)) for task in ("dead", "free")]
        for thread in claims:
            thread.start()
        eventually(lambda: locks.waiting == 2)
        go_on.set()
        granted = "SELECT true FROM task_lock WHERE task_name = 'free' AND finished_at IS NULL"
        eventually(lambda: connection.execute(granted).fetchone())
        locks.stop_claiming()
        for thread in [busy, *claims]:
            thread.join(30)
    locks.close(blocking=True)
    found = connection.execute(
        "SELECT handed_over, locked_until > clock_timestamp() FROM task_lock"
        " WHERE task_name = 'free'"
    ).fetchone()
    assert found == (True, False)
