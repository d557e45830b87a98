"""The judge of the job store's chaos, on ledgers made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest

from apscheduler_tasklock.demo.history import Event
from tests.chaos_store.checker import check
from tests.chaos_store.guard import IS_AHEAD, IS_BACK
from tests.chaos_store.replica import FIXED, FLOATING, GRACE, IN_GRACE, PERIOD, STEADY
from tests.chaos_store.slot import CLOCKS, newcomers


def run(key: str, number: int, *, token: int = 0, takeover: bool = False) -> list[Event]:
    """Return the begin and the end of a run for a run time, the so manieth."""
    return run_of(key, number * PERIOD, token=token or number, takeover=takeover)


def run_of(
    key: str, run_time: float, *, late: float = 0.1, token: int = 0, takeover: bool = False
) -> list[Event]:
    """Return the begin and the end of a run for a run time. Tokens grow with them."""
    token = token or round(run_time * 10)
    begin = Event(run_time + late, "begin", "replica", key, token, run_time, takeover=takeover)
    return [begin, replace(begin, kind="end", at=begin.at + 0.3)]


def runs_of(key: str, *run_times: float) -> list[Event]:
    return [event for run_time in run_times for event in run_of(key, run_time)]


def declared(
    at: float, period: float, *, by: str = "one", until: float = 0.0, error: str = ""
) -> list[Event]:
    """Return what a replica writes down when it starts."""
    told = Event(at, "declare", by, period=period)
    return [told, replace(told, kind="declared", at=until or at + 0.1, error=error)]


def without(events: Sequence[Event], key: str, *run_times: float) -> list[Event]:
    return [e for e in events if e.task != key or (e.due not in run_times and bool(run_times))]


# A ledger in which nothing is amiss: jobs whose interval does not change, and jobs whose interval
# becomes 3 s, and 2 s again.
STEADY_RUNS = [event for key in STEADY for number in range(1, 5) for event in run(key, number)]
RIGHT = [
    *STEADY_RUNS,
    *declared(0.0, 2),
    *declared(5.0, 3, by="two"),
    *declared(14.5, 2, by="three"),
    *runs_of(FIXED, 2, 4, 6, 9, 12, 16, 18),
    *runs_of(FLOATING, 2.7, 4.7, 7.7, 10.7, 13.7, 15.7, 17.7),
]


def found(
    events: Sequence[Event], server_log: str = "", said: str = "", *, offset: float = 0.0
) -> str:
    findings = check(sorted(events, key=lambda event: event.at), server_log, said, offset)
    return "\n".join(findings)


ONE = STEADY[0]
ENDLESS = [event for event in RIGHT if event != run(ONE, 2)[1]]
ONCE = run("once-1", 1)
ADDED = Event(0.5, "add", task="once-1", until=0.6)
RESTARTS = [
    event
    for number in range(6)
    for event in declared(18.5 + number, 3 - number % 2, by=f"restarts-{number}")
]
# The run times of the version of 2 s, declared at these times, instead of those of 3 s.
TWO_SECONDS = without(RIGHT, FLOATING, 10.7, 13.7) + runs_of(FLOATING, 9.7, 11.7, 13.7)
UNKNOWN = [declared(at, 2, by=f"{at}")[0] for at in (8.0, 10.0, 12.0)]
GONE = [Event(event.at + 0.5, "gone", event.replica) for event in UNKNOWN]
FAILED = [e for told in UNKNOWN for e in declared(told.at, 2, by=told.replica, error="away")]
MISSED = Event(4.0 + GRACE - 1, "missed", "replica", IN_GRACE[0], due=4.0)
NOT_IN_GRACE = without(RIGHT, IN_GRACE[0], 4.0)
DIED, DIED_FIXED = "did not run to its end", run_of(FIXED, 9)[1]
AGAIN = {key: run_of(key, due, late=0.5, token=200) for key, due in ((FIXED, 9), (FLOATING, 10.7))}
TAKEN_OVER = {
    key: [replace(event, takeover=True) for event in events] for key, events in AGAIN.items()
}

# What a ledger has in it, and a part of what is found; "" for nothing.
LEDGERS: dict[str, tuple[Sequence[Event], str]] = {
    "right": ([*RIGHT, ADDED, *ONCE], ""),
    "a run time that nobody ran": (without(RIGHT, ONE, 2 * PERIOD), DIED),
    "a run that died": (ENDLESS, DIED),
    "a run that died and was taken over": ([*ENDLESS, *run(ONE, 2, token=12, takeover=True)], ""),
    "never ran": (without(RIGHT, ONE), f"{ONE}: never ran"),
    "claimed again": ([*RIGHT, *run(ONE, 2, token=12)], "claimed twice"),
    "claimed again after a takeover": (
        [*RIGHT, *run("once-1", 1, token=1, takeover=True), *run("once-1", 1, token=2)],
        "claimed twice",
    ),
    "a token used twice": ([*RIGHT, *run(ONE, 2, takeover=True)], "token was used twice"),
    "a one-off job that never began": ([*RIGHT, ADDED], "never began"),
    "a one-off job that never ended": ([*RIGHT, ADDED, ONCE[0]], "never ended"),
    "a one-off job that was not added": ([*RIGHT, replace(ADDED, error="away")], ""),
    "before its run time": ([*RIGHT, *run_of("once-1", 100, late=-89.9)], "began 89.90 s before"),
    "missed in its grace time": ([*NOT_IN_GRACE, MISSED], "counts as missed 59.0 s after"),
    "missed after its grace time": ([*NOT_IN_GRACE, replace(MISSED, at=4.0 + GRACE)], ""),
    "pushed ahead": (
        [*without(RIGHT, FLOATING, 15.7, 17.7), *runs_of(FLOATING, 17.1)],
        "3.40 s lie between",
    ),
    "a gap of two intervals": (without(RIGHT, FLOATING, 15.7), "4.00 s lie between"),
    "a run time that came before a late run ended": (
        [*without(RIGHT, FLOATING, 13.7, 15.7), *run_of(FLOATING, 13.7, late=2.5)],
        "",
    ),
    "a run time that came after a late run ended": (
        [*without(RIGHT, FLOATING, 13.7, 15.7), *run_of(FLOATING, 13.7, late=1.0)],
        "4.00 s lie between",
    ),
    "the interval of a version that is gone": (
        [*without(RIGHT, FLOATING, 10.7, 13.7), *runs_of(FLOATING, 9.7)],
        "2.00 s lie between",
    ),
    # The first run is 3 s after the last restart: it should be 3 s after the last run.
    "pushed ahead by each restart": (
        [*RIGHT, *RESTARTS, *runs_of(FLOATING, 26.5)],
        "lie between its run times 17.700 and 26.500",
    ),
    "restarts": ([*RIGHT, *RESTARTS, *runs_of(FLOATING, 20.7, 23.7, 25.7)], ""),
    "a run time of 3 s": (without(RIGHT, FIXED, 9), f"{FIXED}: 9 did not run"),
    "a run time of 2 s": (without(RIGHT, FIXED, 16), f"{FIXED}: 16 did not run"),
    "a run time that a change replaced": (
        [
            *without(RIGHT, FIXED, 16),
            *declared(16.2, 3, by="four"),
            *declared(16.4, 2, by="five"),
        ],
        "",
    ),
    "a version that nobody declared": (TWO_SECONDS, "lie between"),
    # Replicas were killed, or gave up, and others of their version may have done so as well.
    "a version that may be declared": ([*TWO_SECONDS, *UNKNOWN, *GONE], ""),
    "a version whose declaration failed": ([*TWO_SECONDS, *FAILED], ""),
    "a run time of no version": ([*RIGHT, *run_of(FIXED, 11)], "is no multiple of"),
    "a fixed run time before one that ran": (
        [*RIGHT, *run_of(FIXED, 8, late=11, token=1000)],
        "after 18.000",
    ),
    "a floating run time before one that ran": (
        [*RIGHT, *run_of(FLOATING, 8.7, late=11, token=1000)],
        "lie between",
    ),
    "fixed: died": ([e for e in RIGHT if e != DIED_FIXED], DIED),
    "fixed: died and was taken over": (
        [*(e for e in RIGHT if e != DIED_FIXED), *TAKEN_OVER[FIXED]],
        "",
    ),
    "fixed: claimed again": ([*RIGHT, *AGAIN[FIXED]], "claimed twice"),
    "fixed: never ran": (without(RIGHT, FIXED), f"{FIXED}: never ran"),
    "floating: died": ([e for e in RIGHT if e != run_of(FLOATING, 10.7)[1]], DIED),
    "floating: died and was taken over": (
        [*(e for e in RIGHT if e != run_of(FLOATING, 10.7)[1]), *TAKEN_OVER[FLOATING]],
        "",
    ),
    "floating: claimed again": ([*RIGHT, *AGAIN[FLOATING]], "claimed twice"),
    "floating: never ran": (without(RIGHT, FLOATING), f"{FLOATING}: never ran"),
}


@pytest.mark.parametrize("case", LEDGERS)
def test_a_ledger_is_judged(case: str) -> None:
    events, expected = LEDGERS[case]
    findings = found(events)
    assert (expected in findings) if expected else (findings == "")


def test_a_run_time_is_by_the_databases_clock() -> None:
    assert found([*RIGHT, *run_of("once-1", 100, late=-89.9)], offset=90.0) == ""


@pytest.mark.parametrize(
    ("server_log", "said", "is_found"),
    [
        ("ERROR:  next_run_time of a falls from 2 to 1", "", True),
        (f"WARNING:  next_run_time of a {IS_AHEAD} 00:01:30", "", True),
        (f"WARNING:  next_run_time of a {IS_BACK} 2026-01-01", "", True),
        ("LOG:  checkpoint starting", "", False),
        ("", "Exception in thread tasklock-jobs", True),
    ],
)
def test_what_logs_say_is_judged(server_log: str, said: str, is_found: bool) -> None:
    findings = found(RIGHT, server_log, said)
    assert (server_log + said in findings and "said" in findings) if is_found else findings == ""


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
