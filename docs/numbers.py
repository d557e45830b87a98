"""Writes the defaults into the sentences that tell them: `make reference`.

`TOLD` has these sentences, by the page or module that has them, with names in place of numbers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore, TaskLocks
from apscheduler_tasklock._lock.statements.replicas import ALIVE_FOR, SILENT_AFTER
from apscheduler_tasklock.options import (
    DEFAULT_LEASE,
    DEFAULT_LEASE_SHARE,
    DEFAULT_MIN_FACTOR,
    LONGEST_GRACE,
    ONE_OFF_MIN_LOCK,
    SHORTEST_DEFAULT_LEASE,
    SHORTEST_GRACE,
)
from docs.commands import commands

ROOT = Path(__file__).parent.parent


def _defaults(function: Any) -> dict[str, Any]:
    return {name: one.default for name, one in inspect.signature(function).parameters.items()}


def _at(seconds: float) -> str:
    """Return a time of day in the example that begins at 10:00:00."""
    return f"{datetime(2026, 1, 1, 10) + timedelta(seconds=seconds):%H:%M:%S}"


_EXECUTOR, _TIMINGS = _defaults(TaskLockExecutor), TaskLockExecutor.timings
_PERIOD, _LOOK = _EXECUTOR["period"].total_seconds(), _EXECUTOR["poll_interval"]
_DELAY, _BACKOFF = _EXECUTOR["retry_delay"], _EXECUTOR["retry_backoff"]
_FAILOVER = (
    DEFAULT_LEASE + _LOOK + 1
)  # a takeover begins so many seconds after a kill at the latest

# What stands in the sentences for the names of `TOLD`: words, or a number, of seconds if of a time.
NUMBERS: dict[str, Any] = {
    **_EXECUTOR,
    "lease": DEFAULT_LEASE,
    "lease_in_words": "a minute" if DEFAULT_LEASE == 60 else f"{DEFAULT_LEASE:g} seconds",
    "lease_at": _at(DEFAULT_LEASE),
    "renewal": DEFAULT_LEASE * DEFAULT_LEASE_SHARE,
    "renewal_at": _at(DEFAULT_LEASE * DEFAULT_LEASE_SHARE),
    "no_lease_below": SHORTEST_DEFAULT_LEASE,
    "failover": _FAILOVER,
    "failover_at": _at(_FAILOVER),
    "min_factor": DEFAULT_MIN_FACTOR,
    "min_of_300": DEFAULT_MIN_FACTOR * 300,
    "room_of_300": 300 - DEFAULT_MIN_FACTOR * 300,
    "max_of_300": _EXECUTOR["max_factor"] * 300,
    "period": "an hour" if _PERIOD == 3600 else f"{_PERIOD:g} seconds",
    "one_off": ONE_OFF_MIN_LOCK,
    "minutes_of_period": DEFAULT_MIN_FACTOR * _PERIOD / 60,
    "second_delay": _DELAY * _BACKOFF,
    "third_delay": _DELAY * _BACKOFF**2,
    "shortest_grace": SHORTEST_GRACE,
    "grace_minutes": LONGEST_GRACE / 60,
    "looks": 3 * _LOOK,
    "late_without_leader": 2 + _LOOK,
    "store_poll_interval": _defaults(TaskLockJobStore)["poll_interval"],
    "days_of_one_offs": _EXECUTOR["keep_one_offs"].days,
    "answer": _TIMINGS.longest_answer,
    "recovery": _TIMINGS.recovery_grace,
    "answer_and_recovery": _TIMINGS.longest_answer + _TIMINGS.recovery_grace,
    "timeout": commands()["pause"].get_default("timeout"),
    "silent_after": SILENT_AFTER,
    "alive_for": ALIVE_FOR,
    "gone_minutes": _defaults(TaskLocks.overview)["no_replica_after"] / 60,
}

# Each has text on both sides of a number.
TOLD: dict[str, list[str]] = {
    "README.md": [
        "The lock of its run ends within {lease_in_words}.",
        "within {failover} seconds by default",
        "A replica tries for {claim_timeout} seconds (`claim_timeout`)",
        "A run's lock ends after {max_factor} times (`max_factor`)",
        "a job that is due every {retry_delay} seconds or more often needs a `retry_delay` as well",
    ],
    "CHANGELOG.md": [
        "a claim stands for {lease} s by default",
        "a dead holder blocks its task for {lease_in_words} at most",
        "by default {days_of_one_offs} days",
        "for {timeout} s by a command (`--timeout`)",
    ],
    "examples/compose/app.py": [
        "the run of a killed replica would be taken over after {lease_in_words}."
    ],
    "docs/command-line.md": [
        "within `--timeout`, {timeout} s by default",
        "no replica has been alive for {gone_minutes} minutes, or for `--no",
        "`silent` (not heard of for {silent_after} seconds)",
        "or no replica has been alive for {alive_for} seconds",
    ],
    "docs/how-to/asyncio-and-processes.md": [
        "counts as alive, until {silent_after} seconds after the process has"
    ],
    "docs/reference/tables.md": [
        "After {silent_after} seconds it is silent, after {alive_for} it counts as gone."
    ],
    "apscheduler_tasklock/status.py": [
        "has sent a sign of life in the last {silent_after} seconds.",
        "No sign of life for {silent_after} seconds: the replica is dead",
    ],
    "apscheduler_tasklock/cli/parser.py": ["which is 1 after {alive_for} seconds;"],
    "docs/dashboard.md": ["the durations of its last {history} runs"],
    "docs/how-to/dashboard.md": ["A page whose reads have taken {answer} s"],
    "docs/how-to/database-failover.md": ["one limit of an answer ({answer} s by default)"],
    "docs/job-store.md": [
        "within `poll_interval` ({store_poll_interval} s)",
        "Dead runs are looked for every {poll_interval} s",
    ],
    "docs/operating.md": [
        "`history={history}` of the executor",
        "if nobody has heard of it for {silent_after} seconds",
        "From {alive_for} seconds on it is a warning.",
        "for {timeout} s, or `--timeout D`",
        "has no live replica for {gone_minutes} minutes; `check --no-replica-after D`",
        "at least {shortest_grace} seconds and at most {grace_minutes} minutes",
    ],
    "docs/tutorial.md": [
        "The default is {lease} seconds, which is too long for a tutorial",
        "Each asks for {claim_timeout} seconds (`claim_timeout`).",
    ],
    "docs/decisions/0002-window-of-the-run-time.md": [
        "The **minimum lock** is {min_factor} x the period, and {one_off} s for a one-off job.",
        "The **maximum lock** is {max_factor} x the period.",
        "**{minutes_of_period} minutes of minimum lock for one-off jobs** "
        "({min_factor} x the default period)",
    ],
    "docs/decisions/0004-lease-and-maximum-lock.md": [
        "by default {lease} s or a third of the maximum lock",
        "No lease below {no_lease_below} s is chosen by default without failover.",
        "It lasts for the limit of one answer and {recovery} s",
        "A job that runs for {renewal} s or longer costs a statement every {renewal} s",
    ],
    "docs/decisions/0013-one-thread-for-the-database.md": [
        "a third of `claim_timeout`, at most {answer} s"
    ],
    "docs/decisions/0020-one-look-at-the-rows.md": ["every `poll_interval` ({poll_interval} s)"],
    "docs/decisions/0024-a-ring-for-the-run-history.md": ["`history` slots ({history} by default)"],
    "docs/explanation/costs.md": [
        "takes longer than a third of its lease** ({renewal} s by default)",
        "by each replica every {poll_interval} s (`poll_interval`)",
        "a third of `claim_timeout`, at least 1 s and at most {answer} s",
        "a lease below {looks} seconds has its replicas look three times in a lease",
    ],
    "docs/explanation/guarantees.md": [
        "a one-off job whose id was used less than {one_off} s before (its minimum lock)",
        "within {answer_and_recovery} s of the others",
    ],
    "docs/explanation/holder-dies.md": [
        "{lease} seconds, or a third of the maximum lock if that is shorter",
        "there is none if that would be less than {no_lease_below} seconds",
        "the default is above a period that is shorter than {lease} s",
        "looks every {poll_interval} seconds (`poll_interval`)",
        "a replica waits {recovery} s and the [limit of an answer](costs.md#statements-and-"
        "connections) ({answer_and_recovery} s by default)",
        "It is taken over {max_takeovers} times (`max_takeovers`)",
        "| `min_factor` | {min_factor}. ",
    ],
    "docs/explanation/other-rules.md": [
        "the lease: {lease} s by default, less for short periods",
        "of this library here, {min_factor} and {max_factor}.",
    ],
    "docs/explanation/windows.md": [
        "{min_factor} by default (`min_factor`); of a one-off job {one_off} s",
        "a multiple of the period, {max_factor} by default (`max_factor`)",
        "reads, every {poll_interval} seconds, whether runs are dead",
        "it is the option `period`, {period} by default",
        "Its minimum lock is {one_off} s, unless",
        "Its minimum lock is {min_factor} x 300 s = {min_of_300} s, its maximum lock "
        "{max_factor} x 300 s = {max_of_300} s.",
        "Why the minimum lock is {min_factor} and not 1",
        "With {min_factor} there are {room_of_300} s of room.",
        "before its first renewal at {renewal_at}. Its lease of {lease} s ends at {lease_at}.",
        "by {failover_at}. That is the lease, a poll interval of {poll_interval} s, and",
    ],
    "docs/how-to/from-django-apscheduler.md": [
        "keeps {history} runs of each task, and {history} that failed"
    ],
    "docs/how-to/from-lock-table.md": [
        "a minimum lock of {min_of_300} s and a maximum lock of {max_of_300} s"
    ],
    "docs/how-to/from-other-locks.md": ["within {lease} seconds by default"],
    "docs/how-to/leader-mode.md": [
        "That is {late_without_leader} seconds at most with the default `poll_interval`",
        "`leader_lease` ({leader_lease} s) after its last look",
    ],
    "docs/how-to/migrations.md": ["after they are over, by default {days_of_one_offs} days"],
    "docs/how-to/monitoring.md": [
        "a warning of `check` after {alive_for} seconds, critical",
        "at least {shortest_grace} seconds and at most {grace_minutes} minutes",
        "So a nightly job is overdue after {grace_minutes} minutes.",
        "critical after {gone_minutes} minutes",
    ],
    "docs/how-to/outside-apscheduler.md": [
        "by default {lease} s or a third of `max_lock`, whichever is shorter, and none where that "
        "is below {no_lease_below} s",
    ],
    "docs/how-to/pager.md": [
        "which `check` tells from {alive_for} seconds on",
        "max_factor {max_factor} (default), max_takeovers {max_takeovers} (default), "
        "min_factor {min_factor} (default)",
    ],
    "docs/reference/commands.md": [
        "no replica has been alive for {gone_minutes} minutes, which is 1"
    ],
    "docs/reference/messages.md": [
        "a third of `claim_timeout`, at least 1 s and at most {answer} s"
    ],
    "docs/how-to/retries.md": [
        "{retry_delay} s after the end of attempt 1: `retry_delay`",
        "{second_delay} s after the end of attempt 2: the last delay times `retry_backoff`, "
        "which is {retry_backoff}",
        "{third_delay} s after the end of attempt 3",
        "up to `poll_interval` ({poll_interval} s) later",
        "the second delay of {second_delay} s",
    ],
    "apscheduler_tasklock/options.py": [
        "{min_factor}; of one-off jobs {one_off} s instead",
        "By default {lease} s, or a third of the maximum lock if that is shorter; none where that "
        "is below {no_lease_below} s",
        "at least {shortest_grace} s and at most {grace_minutes} min",
        "{min_factor} and not 1.0, because",
    ],
    "apscheduler_tasklock/locks.py": [
        "by default {lease} s or a third of ``max_lock``, whichever is shorter, and ``max_lock`` "
        "itself if that third is below {no_lease_below} s",
    ],
    "apscheduler_tasklock/_words/findings.py": ["longer than the {lease} s that a lease has"],
}

# A number, or words in its place.
_TOLD = r"(an? \w+|\d+ seconds|[\w.:]+)"


def pattern(sentence: str) -> str:
    """Return a pattern of a sentence of ``TOLD``, whatever its numbers and its breaks of lines."""
    parts = re.split(r"\{\w+\}", sentence)
    return _TOLD.join(re.escape(part).replace("\\ ", r"\s+(?:# )?") for part in parts)


def places(text: str, sentence: str) -> Iterator[tuple[int, int, str]]:
    """Yield where a number of a sentence of ``TOLD`` stands in a text, and what has to stand there.

    :raises LookupError: the text does not have the sentence
    """
    found = list(re.finditer(pattern(sentence), text))
    if not found:
        raise LookupError(f"no sentence like this, with its numbers: {sentence}")
    for match in found:
        for group, name in enumerate(re.findall(r"\{(\w+)\}", sentence), 1):
            number = NUMBERS[name]
            yield *match.span(group), number if isinstance(number, str) else f"{number:g}"


def filled(page: str) -> str:
    """Return a page or a module with the numbers that the code has."""
    text = (ROOT / page).read_text()
    for sentence in TOLD[page]:
        for start, end, number in sorted(places(text, sentence), reverse=True):
            text = text[:start] + number + text[end:]
    return text


def main() -> None:
    """Write the pages and modules."""
    for page in TOLD:
        (ROOT / page).write_text(filled(page))


if __name__ == "__main__":
    main()
