"""What is told of the recorded night is what its ledger has, and the checks find what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.night.checks import CHECKS, untrue_of
from tests.night.judge import known_untrue
from tests.night.recording import FILE, LARGEST, Moment, Night
from tests.night.said import Said
from tests.night.sentences import table
from tests.night.truth import Truth

Shown = Callable[[Moment], Said]

# The moments that the gate looks at; the others are looked at by night.
GATE = (
    "nothing is there",
    "a task and a stored job are paused",
    "its run is taken over",
    "a run hangs beyond its maximum lock",
    "some seconds after the outage",
    "it was killed while it was stopping",
    "a stop has cut a run",
    "all have been gone for long",
)
NIGHTLY = (
    "the first seconds",
    "a replica was killed in its run",
    "a run without failover is dead",
    "a retry is to come",
    "tasks are failing",
    "a failure is acknowledged",
    "the database is back",
    "all tasks are paused",
    "all tasks are resumed",
    "two releases run",
    "a replica is stopping",
    "the new release runs alone",
    "operators have been at work",
    "the leader was killed",
    "another replica leads",
    "all replicas are gone",
    "all have been gone for a while",
    "it is morning",
)


def test_the_recording_has_these_moments_and_is_small(recorded: Night) -> None:
    assert {moment.name for moment in recorded.moments} == {*GATE, *NIGHTLY}
    assert FILE.stat().st_size < LARGEST


@pytest.mark.parametrize(
    "name", [*GATE, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)]
)
def test_what_is_told_at_a_moment_is_true(
    recorded: Night, truth: Truth, shown: Shown, name: str
) -> None:
    found = untrue_of(shown(recorded.moment(name)), truth)
    known = known_untrue()
    assert "\n".join(str(each) for each in found if each.check not in known) == ""


def test_each_known_kind_of_sentence_has_a_check_that_exists() -> None:
    named = {*table().checked.values(), *known_untrue()}
    assert named <= CHECKS.keys()


def test_each_kind_that_no_check_compares_has_a_reason() -> None:
    assert all(table().reasons.values())


# A check, a moment at which it finds nothing, and a change of the rows that makes something untrue.
CHANGES = {
    "what is said to run runs": (
        "its run is taken over",
        "UPDATE task_lock SET finished_at = NULL, locked_until = now() + interval '1 h'"
        " WHERE task_name = 'audit'",
    ),
    "what runs is said to run": (
        "its run is taken over",
        "UPDATE task_lock SET finished_at = now(), locked_until = now()"
        " WHERE task_name = 'daily-report'",
    ),
    "a hanging run is told": (
        "a run hangs beyond its maximum lock",
        "UPDATE task_lock SET overrun_at = now() + interval '1 h',"
        " run_until = now() + interval '1 h';"
        " UPDATE task_lock_replica SET running = '[]'",
    ),
    "each entry is of a run that was begun": (
        "its run is taken over",
        "UPDATE task_lock_run SET replica = 'batch-1:721' WHERE task_name = 'thumbnails'",
    ),
    "each entry has the outcome of its run": (
        "its run is taken over",
        "UPDATE task_lock_run SET outcome = 'error', error_type = 'UpstreamError'"
        " WHERE task_name = 'thumbnails'",
    ),
    "each entry has the times of its run": (
        "its run is taken over",
        "UPDATE task_lock_run SET ended_at = ended_at - interval '1 min',"
        " started_at = started_at - interval '1 min' WHERE task_name = 'thumbnails'",
    ),
    "no ended run is missing": (
        "its run is taken over",
        "DELETE FROM task_lock_run WHERE task_name = 'thumbnails'",
    ),
    "failures are counted as they were": (
        "its run is taken over",
        "UPDATE task_lock SET failures = 2 WHERE task_name = 'thumbnails'",
    ),
    "check names each failing task and no other": (
        "its run is taken over",
        "UPDATE task_lock SET failures = 2, failed_at = now() WHERE task_name = 'thumbnails'",
    ),
    "show tells how often it failed": (
        "its run is taken over",
        "UPDATE task_lock SET failures = 2, error_type = 'UpstreamError'"
        " WHERE task_name = 'thumbnails'",
    ),
    "what is paused is told and nothing else": (
        "a task and a stored job are paused",
        "UPDATE task_lock SET pauses = NULL, paused_until = NULL, paused_at = NULL",
    ),
    "that all is paused is told": (
        "all tasks are paused",
        "DELETE FROM task_lock WHERE task_name = e'\\x01pauses'",
    ),
    "what operators did is in the history": (
        "a task and a stored job are paused",
        "DELETE FROM task_lock_run WHERE ring = 'actions'",
    ),
    "who lives is alive and who is dead is not": (
        "a task and a stored job are paused",
        "UPDATE task_lock_replica SET seen_at = now() - interval '5 min'",
    ),
    "who is stopped has stopped in good order": (
        "its run is taken over",
        "UPDATE task_lock_replica SET stopped_at = now()",
    ),
    "who leads leads": (
        "its run is taken over",
        "UPDATE task_lock SET locked_by = (SELECT replica_id FROM task_lock_replica"
        " WHERE leader_namespace IS NOT NULL AND replica_id <> locked_by)"
        " WHERE task_name LIKE e'\\x01leader%'",
    ),
    "what is due next is a run time": (
        "its run is taken over",
        "UPDATE task_lock SET due_at = due_at + interval '3 s' WHERE task_name = 'archive'",
    ),
    "show tells the next run times": (
        "its run is taken over",
        "UPDATE task_lock SET due_at = due_at + interval '3 s' WHERE task_name = 'archive'",
    ),
    "what is late or overdue was not run": (
        "all have been gone for long",
        "UPDATE task_lock SET due_at = window_start, window_start = '2026-01-01Z',"
        " overdue_at = now() - interval '1 h'"
        " WHERE task_name = 'audit'",
    ),
    "what nobody runs is overdue": (
        "all have been gone for long",
        "UPDATE task_lock SET due_at = now() + interval '1 h', overdue_at = now() + interval '2 h'",
    ),
    "what is said to be missed was not run": (
        "its run is taken over",
        "UPDATE task_lock_run SET outcome = 'missed', run_times = 1, cause = 'misfire',"
        " last_scheduled_at = scheduled_at WHERE task_name = 'thumbnails'",
    ),
    "the reason of a miss is true": (
        "some seconds after the outage",
        "UPDATE task_lock_run SET cause = 'moved' WHERE cause = 'database'",
    ),
    "what is gone is in no live replica": (
        "its run is taken over",
        "UPDATE task_lock SET due_at = NULL, overdue_at = NULL WHERE task_name = 'audit';"
        " UPDATE task_lock_replica SET tasks = array_remove(tasks, 'audit')",
    ),
    "a stored job is what it is said to be": (
        "a task and a stored job are paused",
        "UPDATE task_lock_job SET next_run_time = now()",
    ),
    "metrics tell what status tells": (
        "its run is taken over",
        "UPDATE task_lock SET succeeded_at = succeeded_at - interval '1 min'",
    ),
    "why tells where the history begins": (
        "its run is taken over",
        "DELETE FROM task_lock_run WHERE task_name = 'thumbnails'",
    ),
    "why tells how the last run ended": (
        "its run is taken over",
        "UPDATE task_lock_run SET outcome = 'overtaken' WHERE task_name = 'daily-report'",
    ),
    "why names replicas that were there": (
        "some seconds after the outage",
        "UPDATE task_lock_replica SET seen_at = now(), stopped_at = NULL",
    ),
    "show tells the state as it is": (
        "its run is taken over",
        "UPDATE task_lock SET last_outcome = 'cut' WHERE task_name = 'thumbnails'",
    ),
}


@pytest.mark.parametrize("check", CHANGES)
def test_a_check_finds_what_is_untrue(
    recorded: Night,
    truth: Truth,
    shown: Shown,
    connection: psycopg.Connection[Any],
    check: str,
) -> None:
    name, change = CHANGES[check]
    said = shown(recorded.moment(name))
    assert list(CHECKS[check](said, truth)) == []
    connection.execute(change)
    assert list(CHECKS[check](said.again(), truth)) != []
