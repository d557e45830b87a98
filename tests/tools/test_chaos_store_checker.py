"""The judge of the job store's chaos, on ledgers made by hand."""

from __future__ import annotations

from dataclasses import replace

from tests.chaos_store.checker import check
from tests.chaos_store.ledger import Entry
from tests.chaos_store.replica import PERIOD, STEADY


def run(key: str, number: int, *, token: int = 0, takeover: bool = False) -> list[Entry]:
    """Return the begin and the end of a run for a run time, the so manieth."""
    begin = Entry(
        "begin", number * PERIOD + 0.1, "replica", key, token or number, number * PERIOD, takeover
    )
    return [begin, replace(begin, kind="end", at=begin.at + 0.3)]


def steady() -> list[Entry]:
    """Return a ledger in which nothing is amiss."""
    return [entry for key in STEADY for number in range(1, 5) for entry in run(key, number)]


def found(entries: list[Entry], server_log: str = "", said: str = "") -> str:
    return "\n".join(check(sorted(entries, key=lambda entry: entry.at), server_log, said))


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


def test_a_run_time_that_falls_and_a_thread_that_ends_are_found() -> None:
    assert "fell" in found(steady(), server_log="ERROR:  next_run_time of a falls from 2 to 1")
    assert "said" in found(steady(), said="Exception in thread tasklock-jobs")
