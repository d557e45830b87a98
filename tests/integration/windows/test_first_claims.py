"""A batch of claims whose second statement fails, after the first has granted some of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psycopg
import pytest

from apscheduler_tasklock._database.timings import Timings
from tests.support.claims import held
from tests.support.internals import waiting_in
from tests.support.polling import eventually
from tests.support.waist import ClaimRequest, LockClient

# The key of the advisory lock that a new row waits for.
INSERTS = 7


def request(task: str) -> ClaimRequest:
    return ClaimRequest(task, min_lock=9.0, max_lock=3000.0, runs="jobs:job", lease=600.0)


@pytest.mark.usefixtures("unhurried_stop")
def test_what_was_granted_beside_a_first_claim_that_fails_is_handed_over(
    make_locks: Callable[..., LockClient], connection: psycopg.Connection, direct_url: str
) -> None:
    """The task without a row cannot get one, and its claim fails when this replica was stopped."""
    before = make_locks(replica_id="before")
    before.release(held(before, "known", runs="jobs:job"))
    connection.execute(
        "UPDATE task_lock SET started_at = now() - interval '100 s',"
        " window_start = now() - interval '100 s', window_until = now() - interval '90 s',"
        " locked_until = now() - interval '1 min'"
    )
    connection.execute(f"""
        CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN
            WHILE NOT pg_try_advisory_xact_lock({INSERTS}) LOOP  -- no wait that lock_timeout ends
                PERFORM pg_sleep(0.01);
            END LOOP;
            RAISE EXCEPTION ''too late'' USING ERRCODE = ''lock_not_available'';
        END'
    """)
    connection.execute(
        "CREATE TRIGGER wait BEFORE INSERT ON task_lock FOR EACH ROW EXECUTE FUNCTION wait()"
    )
    # An answer is waited for longer than it is held up.
    locks = make_locks(
        claim_timeout=180.0, timings=Timings(longest_answer=60.0, closing_timeout=60.0)
    )
    locks.check()
    locks.outage.believe()
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
        blocker.execute("SELECT pg_advisory_lock(%s)", [INSERTS])
        busy = threading.Thread(target=locks.ask, args=(keep_busy,))
        busy.start()
        assert is_busy.wait(30)
        claims = [threading.Thread(target=claim, args=(task,)) for task in ("new", "known")]
        for thread in claims:
            thread.start()
        eventually(lambda: waiting_in(locks.thread) == 2)
        go_on.set()
        granted = "SELECT true FROM task_lock WHERE task_name = 'known' AND finished_at IS NULL"
        eventually(lambda: connection.execute(granted).fetchone())
        locks.stop_claiming()
        blocker.rollback()
        blocker.execute("SELECT pg_advisory_unlock(%s)", [INSERTS])
        for thread in [busy, *claims]:
            thread.join(30)
    locks.close(blocking=True)
    found = connection.execute(
        "SELECT handed_over, locked_until > clock_timestamp() FROM task_lock"
        " WHERE task_name = 'known'"
    ).fetchone()
    assert found == (True, False)
