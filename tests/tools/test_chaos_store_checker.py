"""The judge of the job store's chaos, on ledgers made by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from tests.chaos_store.checker import check
from tests.chaos_store.guard import IS_AHEAD, IS_BACK
from tests.chaos_store.ledger import Entry
from tests.chaos_store.replica import FIXED, FLOATING, GRACE, IN_GRACE, PERIOD, STEADY
from tests.chaos_store.slot import CLOCKS, newcomers


def run(key: str, number: int, *, token: int = 0, takeover: bool = False) -> list[Entry]:
    """Return the begin and the end of a run for a run time, the so manieth."""
    return run_of(key, number * PERIOD, token=token or number, takeover=takeover)


def run_of(
    key: str, run_time: float, *, late: float = 0.1, token: int = 0, takeover: bool = False
) -> list[Entry]:
    """Return the begin and the end of a run for a run time. Tokens grow with them."""
    begin = Entry(
        "begin", run_time + late, "replica", key, token or round(run_time * 10), run_time, takeover
    )
    return [begin, replace(begin, kind="end", at=begin.at + 0.3)]


def runs_of(key: str, *run_times: float) -> list[Entry]:
    return [entry for run_time in run_times for entry in run_of(key, run_time)]


def declared(
    at: float, period: float, *, by: str = "one", until: float = 0.0, error: str = ""
) -> list[Entry]:
    """Return what a replica writes down when it starts."""
    told = Entry("declare", at, by, period=period)
    return [told, replace(told, kind="declared", at=until or at + 0.1, error=error)]


def steady() -> list[Entry]:
    """Return a ledger in which nothing is amiss."""
    return [*stays(), *changes()]


def stays() -> list[Entry]:
    """Return the part of it that is about jobs whose interval does not change."""
    return [entry for key in STEADY for number in range(1, 5) for entry in run(key, number)]


def changes() -> list[Entry]:
    """Return the part of it that is about jobs whose interval becomes 3 s, and 2 s again."""
    return [
        *declared(0.0, 2),
        *declared(5.0, 3, by="two"),
        *declared(14.5, 2, by="three"),
        *runs_of(FIXED, 2, 4, 6, 9, 12, 16, 18),
        *runs_of(FLOATING, 2.7, 4.7, 7.7, 10.7, 13.7, 15.7, 17.7),
    ]


def without(entries: list[Entry], key: str, run_time: float) -> list[Entry]:
    return [entry for entry in entries if (entry.key, entry.run_time) != (key, run_time)]


def found(
    entries: list[Entry], server_log: str = "", said: str = "", *, offset: float = 0.0
) -> str:
    findings = check(sorted(entries, key=lambda entry: entry.at), server_log, said, offset)
    return "\n".join(findings)


def test_nothing_is_found_where_nothing_is_amiss() -> None:
    added = Entry("add", 0.5, key="once-1", until=0.6)
    assert found([*steady(), added, *run("once-1", 1)]) == ""


def test_a_run_time_that_nobody_ran_is_found() -> None:
    lost = run(STEADY[0], 2)
    assert "did not run to its end" in found([one for one in steady() if one not in lost])


def test_a_run_that_died_is_found_unless_it_was_taken_over() -> None:
    end = run(STEADY[0], 2)[1]
    entries = [one for one in steady() if one != end]
    assert "did not run to its end" in found(entries)
    assert found([*entries, *run(STEADY[0], 2, token=1002, takeover=True)]) == ""


def test_a_run_time_that_is_claimed_again_is_found_also_after_a_takeover() -> None:
    assert "claimed twice" in found([*steady(), *run(STEADY[0], 2, token=1002)])
    takeover = run("once-1", 1, token=1, takeover=True)
    assert "claimed twice" in found([*steady(), *takeover, *run("once-1", 1, token=2)])


def test_a_token_that_is_used_twice_is_found() -> None:
    entries = [*steady(), *run(STEADY[0], 2, takeover=True)]
    assert "was used 2 times" in found(entries)


def test_a_one_off_job_that_was_added_and_did_not_run_is_found() -> None:
    added = Entry("add", 0.5, key="once-1", until=0.6)
    assert "never began" in found([*steady(), added])
    assert "never ended" in found([*steady(), added, run("once-1", 1)[0]])
    assert found([*steady(), replace(added, error="the database is away")]) == ""


def test_a_run_after_a_pause_is_found_unless_its_replica_was_stopped_before_it() -> None:
    pause = Entry("pause", 1.0, key="paused-1", until=1.1)
    entries = [*steady(), pause, *run("paused-1", 5)]
    assert "after its pause" in found(entries)
    stop = Entry("stop", 1.0, replica="replica", until=10.05)
    assert found([*entries, stop]) == ""
    assert found([*entries, Entry("resume", 5.0, key="paused-1", until=5.1)]) == ""
    assert found([*entries, Entry("resume", 1.05, key="paused-1")]) == "", "which came last?"


def test_a_run_time_that_falls_and_a_thread_that_ends_are_found() -> None:
    line = "ERROR:  next_run_time of a falls from 2 to 1"
    assert line in found(steady(), server_log=line)
    assert "said" in found(steady(), said="Exception in thread tasklock-jobs")


@pytest.mark.parametrize("wrong", [f"{IS_AHEAD} 00:01:30", f"{IS_BACK} 2026-01-01"])
def test_a_next_run_time_by_a_wrong_clock_is_found(wrong: str) -> None:
    line = f"WARNING:  next_run_time of a {wrong}"
    assert line in found(steady(), server_log=line)
    assert found(steady(), server_log="LOG:  checkpoint starting") == ""


def test_a_run_before_its_run_time_is_found() -> None:
    late = 0.1 - 90.0
    assert "began 89.90 s before its run time" in found(
        [*steady(), *run_of("once-1", 100, late=late)]
    )
    assert found([*steady(), *run_of("once-1", 100, late=late)], offset=90.0) == ""


def test_a_run_time_that_is_missed_is_found_unless_its_grace_time_was_over() -> None:
    key = IN_GRACE[0]
    rest = without(steady(), key, 4.0)
    missed = Entry("missed", 4.0 + GRACE - 1, "replica", key, run_time=4.0)
    assert "counts as missed 59.0 s after" in found([*rest, missed])
    assert found([*rest, replace(missed, at=4.0 + GRACE)]) == ""


def test_a_gap_of_no_version_in_force_is_found() -> None:
    pushed = without(without(steady(), FLOATING, 15.7), FLOATING, 17.7)
    assert "3.40 s lie between" in found([*pushed, *runs_of(FLOATING, 17.1)])
    assert "4.00 s lie between" in found(without(steady(), FLOATING, 15.7))
    # The interval of a version of which the last replica is gone.
    assert "2.00 s lie between" in found(
        [*without(without(steady(), FLOATING, 10.7), FLOATING, 13.7), *runs_of(FLOATING, 9.7)]
    )


def test_a_job_that_is_pushed_ahead_by_each_restart_is_found() -> None:
    restarts = [
        entry
        for number in range(6)
        for entry in declared(18.5 + number, 3 - number % 2, by=f"restarts-{number}")
    ]
    # The first run is 3 s after the last restart: it should be 3 s after the last run.
    ends = "lie between its run times 17.700 and 26.500"
    assert ends in found([*steady(), *restarts, *runs_of(FLOATING, 26.5)])
    assert found([*steady(), *restarts, *runs_of(FLOATING, 20.7, 23.7, 25.7)]) == ""


def test_a_run_time_of_the_version_in_force_that_nobody_ran_is_found() -> None:
    assert f"{FIXED}: 9 did not run" in found(without(steady(), FIXED, 9))
    assert f"{FIXED}: 16 did not run" in found(without(steady(), FIXED, 16))


def test_a_run_time_that_a_change_of_version_replaced_is_not_missed() -> None:
    rest = without(steady(), FIXED, 16)
    assert f"{FIXED}: 16 did not run" in found(rest)
    assert found([*rest, *declared(16.2, 3, by="four"), *declared(16.4, 2, by="five")]) == ""


def test_what_nobody_knows_to_be_declared_may_be_in_force() -> None:
    two_seconds = without(without(steady(), FLOATING, 10.7), FLOATING, 13.7)
    two_seconds += runs_of(FLOATING, 9.7, 11.7, 13.7)
    assert "lie between" in found(two_seconds)
    # It was killed, or gave up, and others of its version may have done so as well.
    unknown = [entry for at in (8.0, 10.0, 12.0) for entry in declared(at, 2, by=f"{at}")[:1]]
    gone = [Entry("gone", entry.at + 0.5, entry.replica) for entry in unknown]
    assert found([*two_seconds, *unknown, *gone]) == ""
    failed = [declared(entry.at, 2, by=entry.replica, error="away") for entry in unknown]
    assert found([*two_seconds, *(entry for pair in failed for entry in pair)]) == ""


def test_a_run_time_of_no_version_in_force_is_found() -> None:
    assert "is no multiple of" in found([*steady(), *run_of(FIXED, 11)])


def test_a_run_time_before_one_that_ran_is_found() -> None:
    assert "after 18.000" in found([*steady(), *run_of(FIXED, 8, late=11, token=1000)])
    assert "lie between" in found([*steady(), *run_of(FLOATING, 8.7, late=11, token=1000)])


@pytest.mark.parametrize("key", [FIXED, FLOATING])
def test_a_run_of_a_job_that_changes_is_judged_as_any_other(key: str) -> None:
    middle = [entry for entry in steady() if entry.key == key][4]
    end = replace(middle, kind="end", at=middle.at + 0.3)
    assert "did not run to its end" in found([entry for entry in steady() if entry != end])
    again = run_of(key, middle.run_time, late=0.5, token=middle.token + 1)
    assert "claimed twice" in found([*steady(), *again])
    taken_over = [replace(entry, is_takeover=True) for entry in again]
    assert found([*(entry for entry in steady() if entry != end), *taken_over]) == ""
    assert f"{key}: never ran" in found([entry for entry in steady() if entry.key != key])


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
