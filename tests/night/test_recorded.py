"""What is told of the recorded night is what its ledger has, and the checks find what is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from tests.night.checks import CHECKS, untrue_of
from tests.night.judge import known_untrue
from tests.night.recording import FILE, LARGEST, Moment, Night
from tests.night.said import Said
from tests.night.sayings import MOMENT, REPLICA, Told, untrue_in
from tests.night.sentences import kinds, table
from tests.night.truth import Truth
from tests.support.waist import UNNOTED

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
    "a miss is acknowledged",
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
    "a cut is acknowledged",
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


def test_the_table_has_the_kinds_of_the_source_and_no_others() -> None:
    listed = {template.strip() for template in (*table().checked, *table().reasons)}
    there = {kind.template.strip() for kind in kinds()}
    gone, new = sorted(listed - there), sorted(there - listed)
    assert (gone, new) == ([], []), "take the gone ones out of sentences.txt, and add the new ones"


# A check, a moment at which it finds nothing, and a change of the rows that makes something untrue.
CHANGES = {
    "what is said to run runs": (
        "its run is taken over",
        "UPDATE task_lock SET finished_at = NULL, locked_until = now() + interval '1 h'"
        " WHERE task_name = 'thumbnails'",
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
        " WHERE task_name = 'thumbnails'",
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
    "the headline of a task is true": (
        "its run is taken over",
        "UPDATE task_lock SET started_at = started_at - interval '1 min'"
        " WHERE task_name = 'thumbnails'",
    ),
    "the facts of show are true": (
        "its run is taken over",
        "UPDATE task_lock SET last_outcome = 'cut' WHERE task_name = 'thumbnails'",
    ),
    "the words of each finding are true": (
        "a stop has cut a run",
        "UPDATE task_lock SET finished_at = finished_at - interval '30 s'"
        " WHERE task_name = 'batch/big-copy'",
    ),
    "the durations of runs are true": (
        "its run is taken over",
        "UPDATE task_lock_run SET ended_at = ended_at + interval '5 s'"
        " WHERE task_name = 'thumbnails'",
    ),
    "the page of a replica is true": (
        "its run is taken over",
        "UPDATE task_lock_replica SET started_at = started_at - interval '1 h'",
    ),
    "the words of why are true": (
        "its run is taken over",
        "UPDATE task_lock_run SET outcome = 'overtaken' WHERE task_name = 'daily-report'",
    ),
    "what why tells of an earlier moment is true": (
        "some seconds after the outage",
        "UPDATE task_lock_run SET outcome = 'error' WHERE outcome = 'ok'",
    ),
    "what why tells of a job without a task is true": (
        "a task and a stored job are paused",
        "UPDATE task_lock_job SET next_run_time = next_run_time + interval '1 h'",
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


# What is changed in a sentence that is true: another time, another replica, another operator.
WRONG = {
    MOMENT: "2026-01-02T03:04:05Z",
    REPLICA: "web-8:608",
    r"\w+@ops": "eve@ops",
}


def _sentences(said: Said, truth: Truth) -> Iterator[tuple[str, str, Told]]:
    """Yield headlines of tasks and replicas, and answers to operators, with what reads them."""
    for name in said.tasks:
        headline = said.screen(f"/task?name={name}").data["headline"].says
        yield "headline", headline, Told(said, truth, name)
        told = said.show(name)["last run"]
        yield "last run", told, Told(said, truth, name)
    for name in said.replicas:
        headline = said.screen(f"/replica?id={name}").drawn["headline"]
        yield "replica", headline, Told(said, truth, name)
    for event in truth.events:
        if event.kind == "answered" and event.at < said.at and event.task != "*":
            [words, *_] = event.detail.splitlines()
            words = words.removeprefix(f"{event.task}: ").removesuffix(f" ({UNNOTED})")
            yield "answer", words, Told(said, truth, event.task, {"then": event.at})


def test_a_sentence_with_another_value_is_untrue(
    recorded: Night, truth: Truth, shown: Shown
) -> None:
    said = shown(recorded.moment("operators have been at work"))
    changed = set()
    for source, words, told in _sentences(said, truth):
        assert list(untrue_in(source, words, told)) == []
        for pattern, value in WRONG.items():
            wrong = re.sub(pattern, value, words)
            if wrong != words and value != told.about:
                changed.add((source, pattern))
                assert list(untrue_in(source, wrong, told)) != [], wrong
    assert {source for source, _ in changed} == {"headline", "last run", "replica", "answer"}


def test_a_sentence_that_no_pattern_reads_is_untrue(
    recorded: Night, truth: Truth, shown: Shown
) -> None:
    told = Told(shown(recorded.moment("it is morning")), truth, "thumbnails")
    assert list(untrue_in("headline", "its last run was a success", told)) != []
