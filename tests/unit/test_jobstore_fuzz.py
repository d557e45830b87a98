"""Random JSON in a job's row: it is a job, or it is unreadable; and nothing goes on for ever."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

from apscheduler.triggers.base import BaseTrigger

from apscheduler_tasklock._runs.task_names import canonical_schedule
from apscheduler_tasklock._runs.trigger_times import (
    first_run_time,
    is_shared,
    next_after,
    nominal_time,
    period_after,
)
from apscheduler_tasklock.jobstore.definition import Definition, JobCodec
from apscheduler_tasklock.jobstore.next_run_time import due_run_time
from apscheduler_tasklock.jobstore.stored_triggers import encode_trigger
from apscheduler_tasklock.jobstore.stored_values import UnreadableError, encode
from apscheduler_tasklock.jobstore.trust import AllowedFunctions
from tests.support.hostile_json import hostile_columns, random_moment

CASES = 150


def use(rng: random.Random, columns: dict[str, Any]) -> bool:
    """Do with a row what readers and schedulers do; tell whether it could be read."""
    definition = Definition(func="tests.support.stored_jobs:note", executor="default", **columns)
    try:
        attributes = JobCodec(AllowedFunctions(["tests."])).decode(definition)
    except UnreadableError:
        return False
    trigger = attributes["trigger"]
    assert isinstance(trigger, BaseTrigger)
    # What can be read can be written again, as by `pause_job`; and is compared, as by `add_job`.
    encode([*attributes["args"]], "args")
    encode(attributes["kwargs"], "kwargs")
    encode_trigger(trigger)
    assert definition.schedule
    assert canonical_schedule(trigger)
    first, now = random_moment(rng), random_moment(rng)
    nominal_time(trigger, first)
    # Whatever is raised here concerns the one job, as of a run time in the year 10000.
    for ask in (
        lambda: first_run_time(trigger, now),
        lambda: due_run_time(trigger, first, now, rng.choice([first, now])),
        lambda: period_after(trigger, first),
        lambda: is_shared(trigger, first),
        lambda: next_after(trigger, first, now.timestamp()),
    ):
        with suppress(Exception):
            ask()
    return True


def test_random_rows_are_jobs_or_unreadable(rng: random.Random) -> None:
    readable = 0
    for _ in range(CASES):
        columns = hostile_columns(rng)
        try:
            readable += use(rng, columns)
        except BaseException:
            print(json.dumps(columns))
            raise
    assert 0 < readable < CASES
