"""What is told of the recorded night is what its ledger has, and the checks find what is not."""

from __future__ import annotations

from collections.abc import Callable

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
