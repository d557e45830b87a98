"""What becomes of a dead holder's window that two replicas ask for at the same moment."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg

from tests.contract.conftest import Replica
from tests.polling import eventually

_WAITING = """
    SELECT FROM pg_stat_activity
    WHERE wait_event_type = 'Lock' AND query LIKE '%claimed%' AND datname = current_database()
"""


def test_the_loser_is_told_who_runs_it(
    other: Replica,
    connection: psycopg.Connection[Any],
    direct_url: str,
    travel: Callable[[float], None],
) -> None:
    one = Replica("one", connection)
    assert Replica("dead", connection).granted(lease=2)
    travel(3)
    with ThreadPoolExecutor() as pool, psycopg.connect(direct_url, autocommit=True) as watching:
        with connection.transaction():
            _, won = one.claim(lag=3, lease=2, dead_run="take over")
            losing = pool.submit(other.claim, lag=3, lease=2, dead_run="take over")
            eventually(lambda: watching.execute(_WAITING).rowcount == 1)
        _, lost = losing.result()

    assert (won.granted, won.dead_holder) == (True, "dead")
    assert (lost.granted, lost.running, lost.new_window) == (False, True, False)
    assert (lost.holder, lost.token) == ("one", won.token)


def test_a_holder_that_releases_late_is_not_taken_over_any_more(
    other: Replica,
    connection: psycopg.Connection[Any],
    direct_url: str,
    travel: Callable[[float], None],
) -> None:
    late = Replica("late", connection)
    claim_id, _ = late.claim(lease=2)
    travel(10)
    with ThreadPoolExecutor() as pool, psycopg.connect(direct_url, autocommit=True) as watching:
        with connection.transaction():
            assert late.release(claim_id)
            claiming = pool.submit(other.claim, lag=0, lease=2, dead_run="take over")
            eventually(lambda: watching.execute(_WAITING).rowcount == 1)
        _, answer = claiming.result()

    assert (answer.granted, answer.dead_holder, answer.new_window) == (True, None, False)
