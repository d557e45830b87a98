"""Lock options: parsing, refusals, precedence."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from math import inf
from typing import Any

import pytest

from apscheduler_tasklock import TaskLockExecutor
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.options import (
    DEFAULT,
    DEFAULT_LEASE,
    DEFAULTS,
    LONGEST_SECONDS,
    LockOptions,
    parse_job_options,
    resolve,
)

WHERE = 'job "clean-up"'

FACTORS = ["min_factor", "max_factor"]
TIMES = ["min_lock", "max_lock", "period"]
NUMBERS = FACTORS + TIMES
ABOVE_0 = ["max_factor", "max_lock", "period"]
OTHERS = ["name", "failover", "max_takeovers", "cancel_on_lost", "on_failure"]


def parse(**options: Any) -> LockOptions:
    return LockOptions.parse(options, WHERE)


@pytest.mark.parametrize("option", NUMBERS)
@pytest.mark.parametrize(
    ("given", "parsed"), [(2, 2.0), (0.25, 0.25), ("30", 30.0), ("0.5", 0.5), (" 1e3 ", 1000.0)]
)
def test_numbers_may_be_strings(option: str, given: Any, parsed: float) -> None:
    value = getattr(parse(**{option: given}), option)
    assert (value, type(value)) == (parsed, float)


@pytest.mark.parametrize("option", TIMES)
def test_times_may_be_timedeltas(option: str) -> None:
    assert getattr(parse(**{option: timedelta(minutes=1, milliseconds=500)}), option) == 60.5


@pytest.mark.parametrize("option", ["min_factor", "min_lock"])
@pytest.mark.parametrize("zero", [0, "0", 0.0])
def test_minimum_may_be_0(option: str, zero: Any) -> None:
    assert getattr(parse(**{option: zero}), option) == 0


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        (30, 30.0),
        ("2.5", 2.5),
        (timedelta(minutes=1), 60.0),
        (1, 1.0),
        (None, inf),
        ("none", inf),
        ("None", inf),
        (DEFAULT, None),
    ],
)
def test_a_lease_is_a_time_or_none_for_the_maximum_lock(given: Any, parsed: float | None) -> None:
    assert parse(lease=given).lease == parsed


def test_a_lease_that_is_not_given_is_left_to_the_next_place() -> None:
    assert parse().lease is None
    assert parse().over(parse(lease=7), WHERE).lease == 7
    assert parse(lease=DEFAULT).over(parse(lease=7), WHERE).lease == 7
    assert parse(lease=None).over(parse(lease=7), WHERE).lease == inf
    assert parse(lease=7).over(parse(lease=None), WHERE).lease == 7


@pytest.mark.parametrize("given", [0, 0.5, "0.9", timedelta(milliseconds=999)])
def test_a_lease_too_short_to_renew_in_is_refused(given: Any) -> None:
    with pytest.raises(
        TaskLockOptionError, match="lease must be seconds or a timedelta, 1 s or more"
    ) as refused:
        parse(lease=given)
    assert "or None for the maximum lock" in str(refused.value)


@pytest.mark.parametrize("given", [True, False, "soon", "", -1, float("inf"), float("nan"), []])
def test_a_lease_that_is_no_time_is_refused(given: Any) -> None:
    with pytest.raises(TaskLockOptionError, match="lease must be seconds or a timedelta"):
        parse(lease=given)


@pytest.mark.parametrize(
    ("options", "max_lock", "lease"),
    [
        # Unset: the default or a third of the maximum lock, whichever is shorter.
        ({}, 1500, DEFAULT_LEASE),
        ({}, 3 * DEFAULT_LEASE, DEFAULT_LEASE),
        ({}, 1.5 * DEFAULT_LEASE, DEFAULT_LEASE / 2),
        ({}, 45, 15),
        ({}, 44, None),  # the maximum lock frees the task soon enough
        ({"failover": True}, 42, 14),
        ({"failover": True}, 3, 1),
        ({"failover": True}, 2.9, None),  # less than 1 s could not be renewed in time
        ({"lease": 14}, 44, 14),
        ({"lease": 30}, 1500, 30),
        ({"lease": 1500}, 1500, None),
        ({"lease": 1600}, 1500, None),
        ({"lease": None}, 1500, None),
    ],
)
def test_the_lease_follows_from_the_maximum_lock(
    options: dict[str, Any], max_lock: float, lease: float | None
) -> None:
    assert parse(**options).over(DEFAULTS, WHERE).lease_within(max_lock) == lease


@pytest.mark.parametrize("option", ["cancel_on_lost", "failover"])
@pytest.mark.parametrize(
    ("given", "parsed"), [(True, True), (False, False), ("true", True), ("False", False)]
)
def test_switches_may_be_strings(option: str, given: Any, parsed: bool) -> None:
    assert getattr(parse(**{option: given}), option) is parsed


@pytest.mark.parametrize("option", ["cancel_on_lost", "failover"])
@pytest.mark.parametrize("given", ["yes", 1, 0, "", [], 30, timedelta(seconds=30)])
def test_other_switches_are_refused(option: str, given: Any) -> None:
    with pytest.raises(TaskLockOptionError, match=f"{option} must be True or False"):
        parse(**{option: given})


@pytest.mark.parametrize("given", [30, "30", 0, timedelta(seconds=30), "yes"])
def test_a_failover_in_seconds_is_refused_with_a_hint_at_the_lease(given: Any) -> None:
    with pytest.raises(TaskLockOptionError, match="the option 'lease'"):
        parse(failover=given)


@pytest.mark.parametrize(("given", "parsed"), [(0, 0), (3, 3), ("5", 5), (2.0, 2)])
def test_the_number_of_takeovers_is_whole(given: Any, parsed: int) -> None:
    value = parse(max_takeovers=given).max_takeovers
    assert (value, type(value)) == (parsed, int)


@pytest.mark.parametrize("given", [-1, 0.5, "1.5", True, "many", float("inf"), timedelta(1)])
def test_another_number_of_takeovers_is_refused(given: Any) -> None:
    message = "max_takeovers must be a whole number, 0 or more"
    with pytest.raises(TaskLockOptionError, match=message):
        parse(max_takeovers=given)


@pytest.mark.parametrize("given", ["off", 1, None, ""])
def test_enabled_is_a_yes_or_no(given: Any) -> None:
    with pytest.raises(TaskLockOptionError, match="enabled must be True or False"):
        TaskLockExecutor("postgresql://localhost/app", enabled=given)


@pytest.mark.parametrize("option", ["min_lock", "max_lock", "period"])
def test_a_hundred_years_are_the_longest_time(option: str) -> None:
    assert getattr(parse(**{option: timedelta(days=36500)}), option) == LONGEST_SECONDS


@pytest.mark.parametrize(
    ("option", "value"), [("name", "sync"), ("on_failure", "keep"), ("on_failure", "release")]
)
def test_texts_are_taken_as_they_are(option: str, value: str) -> None:
    assert getattr(parse(**{option: value}), option) == value


@pytest.mark.parametrize("option", [*NUMBERS, *OTHERS])
def test_none_is_unset(option: str) -> None:
    assert parse(**{option: None}) == LockOptions()


def test_factor_that_is_none_leaves_room_for_the_absolute_time() -> None:
    assert parse(min_factor=None, min_lock=5, max_factor=3, max_lock=None) == LockOptions(
        min_lock=5.0, max_factor=3.0
    )


NO_NUMBERS = [
    -1,
    -1e-9,
    "-1",
    float("nan"),
    "nan",
    float("inf"),
    "inf",
    "1e400",
    10**400,
    "soon",
    "",
    True,
    False,
    [5],
    {"seconds": 5},
    b"\xff",
]


ALLOWED = {
    "min_factor": "a number, 0 or more",
    "max_factor": "a number above 0",
    "min_lock": "seconds or a timedelta, from 0 to 100 years",
    "max_lock": "seconds or a timedelta, above 0 and at most 100 years",
    "period": "seconds or a timedelta, above 0 and at most 100 years",
}


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        *((option, value, ALLOWED[option]) for option in NUMBERS for value in NO_NUMBERS),
        *((option, zero, ALLOWED[option]) for option in ABOVE_0 for zero in (0, "0", 0.0)),
        *((option, timedelta(0), ALLOWED[option]) for option in ABOVE_0 if option in TIMES),
        *((option, timedelta(seconds=-1), ALLOWED[option]) for option in TIMES),
        *((option, timedelta(seconds=1), ALLOWED[option]) for option in FACTORS),
        *((option, timedelta(days=36501), ALLOWED[option]) for option in TIMES),
        *((option, 1e300, ALLOWED[option]) for option in TIMES),
        *(("name", value, "a text that is not empty") for value in ("", 5, b"sync", True, ["a"])),
        *(
            ("on_failure", value, "'keep' or 'release'")
            for value in ("ignore", "", "KEEP", True, [], 1)
        ),
    ],
)
def test_impossible_value_is_refused_with_job_option_and_what_is_allowed(
    option: str, value: Any, allowed: str
) -> None:
    with pytest.raises(TaskLockOptionError) as refused:
        parse(**{option: value})
    message = str(refused.value)
    assert message.startswith(f"{WHERE}: {option} must be ")
    assert allowed in message
    if not isinstance(value, timedelta):  # which may be shown in seconds
        assert repr(value)[:50] in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"min_factor": 3, "max_factor": 2},
            "min_factor (3) must not be above max_factor (2)",
        ),
        (
            {"min_lock": timedelta(minutes=1), "max_lock": "59.5"},
            "min_lock (60) must not be above max_lock (59.5)",
        ),
        ({"min_factor": 0.5, "min_lock": 5}, "give min_factor or min_lock, not both"),
        ({"max_factor": 2, "max_lock": 5}, "give max_factor or max_lock, not both"),
        ({"min_factor": 0, "min_lock": 0}, "give min_factor or min_lock, not both"),
    ],
)
def test_impossible_pair_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskLockOptionError) as refused:
        LockOptions.parse(options, WHERE)
    assert str(refused.value) == f"{WHERE}: {message}"


def test_a_maximum_below_the_default_minimum_is_refused() -> None:
    said = r"min_factor \(0.9\) must not be above max_factor \(0.5\)"
    with pytest.raises(TaskLockOptionError, match=said):
        TaskLockExecutor("postgresql://db/app", max_factor=0.5)


@pytest.mark.parametrize("options", [{"max_factor": 0.9}, {"min_factor": 0.5, "max_factor": 0.5}])
def test_a_maximum_that_the_default_minimum_allows_is_possible(options: dict[str, Any]) -> None:
    assert TaskLockExecutor("postgresql://db/app", **options)


def test_equal_minimum_and_maximum_are_possible() -> None:
    assert parse(min_factor=2, max_factor=2).max_factor == 2
    assert parse(min_lock=2, max_lock=2).max_lock == 2


@pytest.mark.parametrize("option", ["max_facto", "", "task_lock", 5, None])
def test_unknown_option_is_refused_with_those_that_are_known(option: Any) -> None:
    with pytest.raises(TaskLockOptionError) as refused:
        LockOptions.parse({option: None}, WHERE)
    message = str(refused.value)
    assert message.startswith(f"{WHERE}: unknown task lock option {option!r}; allowed are ")
    for known in [*NUMBERS, *OTHERS, "lease"]:
        assert known in message


# Precedence


@pytest.mark.parametrize(
    ("stronger", "weaker", "merged"),
    [
        ({}, {"name": "a", "period": 5}, {"name": "a", "period": 5}),
        ({"name": "b"}, {"name": "a", "period": 5}, {"name": "b", "period": 5}),
        ({"on_failure": "keep"}, {"on_failure": "release"}, {"on_failure": "keep"}),
        ({"min_factor": 0}, {"min_factor": 0.5}, {"min_factor": 0}),
        ({"min_lock": 0}, {"min_factor": 0.5}, {"min_lock": 0}),
        ({"min_factor": 0.5}, {"min_lock": 7}, {"min_factor": 0.5}),
        ({"max_lock": 9}, {"max_factor": 3}, {"max_lock": 9}),
        ({"max_factor": 3}, {"max_lock": 9}, {"max_factor": 3}),
        (
            {"max_lock": 9},
            {"min_factor": 0.9, "max_factor": 5},
            {"min_factor": 0.9, "max_lock": 9},
        ),
        (
            {"min_lock": 1, "max_factor": 2},
            {"min_factor": 0.9, "max_lock": 9, "name": "a"},
            {"min_lock": 1, "max_factor": 2, "name": "a"},
        ),
    ],
)
def test_stronger_option_replaces_the_weaker_one_in_either_form(
    stronger: dict[str, Any], weaker: dict[str, Any], merged: dict[str, Any]
) -> None:
    over = parse(**stronger).over(parse(**weaker), WHERE)
    assert over == parse(**merged)


@pytest.mark.parametrize(
    ("stronger", "weaker", "message"),
    [
        ({"min_factor": 6}, {"max_factor": 5}, "min_factor (6) must not be above max_factor (5)"),
        ({"max_lock": 5}, {"min_lock": 6}, "min_lock (6) must not be above max_lock (5)"),
    ],
)
def test_options_that_are_impossible_together_are_refused(
    stronger: dict[str, Any], weaker: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskLockOptionError) as refused:
        parse(**stronger).over(parse(**weaker), WHERE)
    assert str(refused.value) == f"{WHERE}: {message}"


@pytest.mark.parametrize(
    "both", [{"min_factor": 1, "min_lock": 3}, {"max_factor": 2, "max_lock": 9}]
)
def test_a_factor_and_a_time_in_one_place_are_refused_and_not_both_dropped(
    both: dict[str, Any],
) -> None:
    for stronger, weaker in [
        (LockOptions(**both), DEFAULTS),
        (LockOptions(), LockOptions(**both)),
    ]:
        with pytest.raises(TaskLockOptionError, match=f"give {' or '.join(both)}, not both"):
            stronger.over(weaker, WHERE)


def test_strongest_place_wins_option_by_option() -> None:
    options = resolve(
        {"max_factor": 2},
        None,
        parse(name="from-jobs", max_lock=50, min_lock=3),
        DEFAULTS,
        where=WHERE,
    )
    assert options == replace(DEFAULTS, name="from-jobs", min_lock=3, max_factor=2)


@pytest.mark.parametrize(
    ("places", "resolved"),
    [
        ((), LockOptions()),
        ((None, None), LockOptions()),
        ((False,), False),
        ((None, False, {"max_factor": 2}), False),
        ((False, {"max_factor": 2}, False), False),
        (({"max_factor": 2}, False), LockOptions(max_factor=2)),
        (({"max_factor": 2}, False, {"name": "a"}), LockOptions(max_factor=2, name="a")),
        # Options, although there are none: this job has a lock again.
        (({}, False, {"name": "a"}), LockOptions(name="a")),
    ],
)
def test_false_holds_only_in_the_strongest_place_that_says_anything(
    places: tuple[Any, ...], resolved: Any
) -> None:
    assert resolve(*places, where=WHERE) == resolved


@pytest.mark.parametrize(
    "places",
    [
        ({"max_factor": 0},),
        ({"max_factor": 2}, {"min_lock": -1}),
        (False, {"oops": 1}),
        (LockOptions(min_factor=1, min_lock=3), DEFAULTS),
        (LockOptions(min_lock=9, max_lock=3),),
    ],
)
def test_impossible_options_are_refused_in_every_place(places: tuple[Any, ...]) -> None:
    with pytest.raises(TaskLockOptionError, match=WHERE):
        resolve(*places, where=WHERE)


@pytest.mark.parametrize("options", [True, 0, 1, "max_factor=2", ["max_factor"], ("a", 1)])
def test_job_options_are_a_mapping_or_false(options: Any) -> None:
    with pytest.raises(TaskLockOptionError) as refused:
        parse_job_options(options, WHERE)
    assert str(refused.value).startswith(f"{WHERE}: task_lock must be a dict of options, or False")
    assert repr(options) in str(refused.value)


def test_checked_job_options_pass_unchanged() -> None:
    options = parse(max_factor=2)
    assert parse_job_options(options, "elsewhere") is options
    assert parse_job_options(False, "elsewhere") is False


# Lock times


@pytest.mark.parametrize(
    ("options", "period", "times"),
    [
        ({}, 300, (270, 1500)),
        ({}, 86400, (77760, 432000)),
        ({"min_lock": 20}, 300, (20, 1500)),
        ({"max_lock": 400}, 300, (270, 400)),
        ({"min_lock": 20, "max_lock": 40}, 300, (20, 40)),
        ({"min_factor": 0}, 300, (0, 1500)),
        ({"min_lock": 0}, 300, (0, 1500)),
        # An absolute time stays what it is, also where that leaves the maximum below the minimum:
        # a daily job whose dead holder is given up after a minute.
        ({"min_lock": 100}, 10, (100, 50)),
        ({"max_lock": 60}, 86400, (77760, 60)),
        # Nor is any of them longer than PostgreSQL's timestamps reach.
        ({}, LONGEST_SECONDS, (0.9 * LONGEST_SECONDS, LONGEST_SECONDS)),
        ({"min_factor": 1e300, "max_factor": 1e308}, 1e9, (LONGEST_SECONDS, LONGEST_SECONDS)),
    ],
)
def test_lock_times_follow_from_the_period(
    options: dict[str, Any], period: float, times: tuple[float, float]
) -> None:
    assert parse(**options).over(DEFAULTS, WHERE).lock_times(period) == pytest.approx(times)
