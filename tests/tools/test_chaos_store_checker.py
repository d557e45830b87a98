"""The judge of the job store's chaos, on ledgers made by hand, and the database's watch."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock.demo.history import Event
from tests.chaos_store.checker import check
from tests.chaos_store.guard import IS_AHEAD, IS_BACK, IS_OFF, WATCHES
from tests.chaos_store.replica import FIXED, FLOATING, GRACE, IN_GRACE, STEADY
from tests.chaos_store.slot import CLOCKS, newcomers


def run(
    key: str, due: float, *, late: float = 0.1, token: int = 0, takeover: bool = False
) -> list[Event]:
    """Return the begin and the end of a run for a run time. Tokens grow with them."""
    begin = Event(due + late, "begin", "replica", key, token or round(due * 10), due)
    begin = replace(begin, takeover=takeover)
    return [begin, replace(begin, kind="end", at=begin.at + 0.3)]


def without(key: str, *run_times: float, kinds: Sequence[str] = ("begin", "end")) -> list[Event]:
    """Return the right ledger without some run times of a job, or all."""
    return [
        event
        for event in RIGHT
        if event.task != key
        or event.kind not in kinds
        or (run_times and event.due not in run_times)
    ]


# A ledger in which nothing is amiss: jobs whose interval does not change, and jobs whose interval
# becomes 3 s, and 2 s again.
RUN_TIMES = {
    **dict.fromkeys(STEADY, (2.0, 4.0, 6.0, 8.0)),
    FIXED: (2.0, 4.0, 6.0, 9.0, 12.0, 16.0, 18.0),
    FLOATING: (2.7, 4.7, 7.7, 10.7, 13.7, 15.7, 17.7),
}
RIGHT = [event for key, dues in RUN_TIMES.items() for due in dues for event in run(key, due)]


def found(
    events: Sequence[Event], server_log: str = "", said: str = "", *, offset: float = 0.0
) -> str:
    findings = check(sorted(events, key=lambda event: event.at), server_log, said, offset)
    return "\n".join(findings)


ONE, END = STEADY[0], ["end"]
ADDED = Event(0.5, "add", task="once-1", until=0.6)
ONCE, AGAIN, EARLY = run("once-1", 2), run("once-1", 2, token=2), run("once-1", 100, late=-89.9)
MISSED = Event(4.0 + GRACE - 1, "missed", "replica", IN_GRACE[0], due=4.0)
TAKEN_OVER = run("once-1", 2, token=1, takeover=True)
DIED = "did not run to its end"

# What a ledger has in it, and a part of what is found; "" for nothing.
LEDGERS: dict[str, tuple[Sequence[Event], str]] = {
    "right": ([*RIGHT, ADDED, *ONCE], ""),
    "a run time that nobody ran": (without(ONE, 4), DIED),
    "claimed again after a takeover": ([*RIGHT, *TAKEN_OVER, *AGAIN], "claimed twice"),
    "a token used twice": ([*RIGHT, *run(ONE, 4, takeover=True)], "token was used twice"),
    "a one-off job that never began": ([*RIGHT, ADDED], "never began"),
    "a one-off job that never ended": ([*RIGHT, ADDED, ONCE[0]], "never ended"),
    "a one-off job that was not added": ([*RIGHT, replace(ADDED, error="away")], ""),
    "before its run time": ([*RIGHT, *EARLY], "began 89.90 s before"),
    "missed in its grace time": ([*without(ONE, 4), MISSED], "counts as missed 59.0 s after"),
    "missed after its grace time": ([*without(ONE, 4), replace(MISSED, at=4.0 + GRACE)], ""),
}
for _key, _due in ((ONE, 4.0), (FIXED, 9.0), (FLOATING, 10.7)):
    _again = run(_key, _due + 0.1, late=0.5, token=200)
    _died = without(_key, _due, kinds=END)
    LEDGERS |= {
        f"{_key}: never ran": (without(_key), f"{_key}: never ran"),
        f"{_key}: died": (_died, DIED),
        f"{_key}: died, and was taken over": (
            [*_died, *(replace(event, takeover=True) for event in _again)],
            "",
        ),
        f"{_key}: claimed again": ([*RIGHT, *_again], "claimed twice"),
    }


@pytest.mark.parametrize("case", LEDGERS)
def test_a_ledger_is_judged(case: str) -> None:
    events, expected = LEDGERS[case]
    findings = found(events)
    assert (expected in findings) if expected else (findings == "")


def test_a_run_time_is_by_the_databases_clock() -> None:
    assert found([*RIGHT, *EARLY], offset=90.0) == ""


@pytest.mark.parametrize(
    ("server_log", "said", "is_found"),
    [
        ("ERROR:  next_run_time of a falls from 2 to 1", "", True),
        (f"WARNING:  next_run_time of a {IS_AHEAD} 00:01:30", "", True),
        (f"WARNING:  next_run_time of a {IS_BACK} 2026-01-01", "", True),
        (f"WARNING:  next_run_time of a {IS_OFF} 00:00:02", "", True),
        ("LOG:  checkpoint starting", "", False),
        ("", "Exception in thread tasklock", True),
    ],
)
def test_what_logs_say_is_judged(server_log: str, said: str, is_found: bool) -> None:
    findings = found(RIGHT, server_log, said)
    assert (server_log + said in findings and "said" in findings) if is_found else findings == ""


# An interval, the microseconds of its start, the last run and the next run time, in seconds from
# now, which is a multiple of all intervals; and what the database says.
GIVEN, DEFAULT = 0, 700_000
WRITES: dict[str, tuple[int, int, float | None, float, list[str]]] = {
    "multiples of an interval": (3, GIVEN, 60, 63, []),
    "an interval after the last run": (3, DEFAULT, 60.7, 63.7, []),
    "an interval after now, without a run": (3, DEFAULT, None, 2.7, []),
    "several intervals that have passed": (2, DEFAULT, -60.3, -40.3, []),
    "a gap of two intervals": (2, DEFAULT, 60.7, 64.7, [IS_AHEAD]),
    "far away": (2, GIVEN, -60, 90, [IS_AHEAD]),
    "pushed ahead by a restart": (3, DEFAULT, -3.3, 1.5, [IS_OFF]),
    "the interval of another version": (3, DEFAULT, 60.7, 62.7, [IS_OFF]),
    "a multiple of another version's": (3, GIVEN, 60, 62, [IS_OFF]),
    "the last run's": (3, DEFAULT, 60.7, 60.7, [IS_BACK]),
    "before the last run": (2, GIVEN, 60, 58, [IS_BACK]),
}


@pytest.mark.parametrize("case", WRITES)
def test_the_database_watches_next_run_times(
    connection: psycopg.Connection[Any], case: str
) -> None:
    length, microseconds, last, due, expected = WRITES[case]
    trigger = {
        "type": "interval",
        "length": [0, length, 0],
        "start_date": f"2020-01-01T00:00:00.{microseconds:06}+00:00",
    }
    now, said = time.time() // 6 * 6, list[str]()
    connection.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))
    with connection.transaction(force_rollback=True):
        connection.execute(
            "CREATE TEMPORARY TABLE task_lock_job (id text, trigger jsonb,"
            " last_run_time timestamptz, next_run_time timestamptz, changed_id uuid, added_id uuid)"
        )
        connection.execute(WATCHES.encode())
        connection.execute(
            "INSERT INTO task_lock_job VALUES ('job', %s, to_timestamp(%s), to_timestamp(%s))",
            [json.dumps(trigger), None if last is None else now + last, now + due],
        )
    signs = [sign for text in said for sign in (IS_AHEAD, IS_BACK, IS_OFF) if sign in text]
    assert signs == expected


def test_newcomers_are_those_of_the_seed_and_the_first_ones_differ() -> None:
    def some(seed: int, *, skewed: bool = True) -> list[list[object]]:
        return [list(islice(newcomers(seed, place, skewed=skewed), 20)) for place in range(3)]

    assert some(1) == some(1)
    assert some(1) != some(2)
    for seed in range(20):
        firsts = [next(newcomers(seed, place, skewed=True)) for place in range(3)]
        assert {one.clock for one in firsts} == set(CLOCKS)
        assert {one.on_loop for one in firsts} == {True, False}
    assert all(
        not one.clock for place in range(3) for one in islice(newcomers(1, place, skewed=False), 9)
    )
