"""Runs, missed run times, and what operators did, in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from apscheduler_tasklock._lock import outcomes
from apscheduler_tasklock._lock.protocol_messages import MOST_COUNTED
from apscheduler_tasklock._words.formats import Formats
from apscheduler_tasklock.status import Durations, Run, Spread


def did_in_words(action: Run) -> str:
    """Return what an operator did."""
    return outcomes.outcome_named(action.outcome).did or action.outcome


def action_in_words(action: Run, formats: Formats) -> str:
    """Return by whom, until when and why an operator did something."""
    is_pause = action.outcome in ("paused", "job-paused")
    end = formats.moment(action.until) or ("resumed" if is_pause else "")
    until = f"until {end}"
    if action.outcome == "run":
        until = f"(dropped at {end} if no replica has begun it)"
    words = [f"by {action.by or 'nobody'}", end and until]
    words.append(f"({action.reason})" if action.reason else "")
    return " ".join(filter(None, words))


def when_of(entry: Run) -> datetime:
    """Return when an entry is listed: missed run times at the first of them."""
    missed_at = entry.scheduled_at if entry.outcome == "missed" else None
    return missed_at or entry.started_at


def miss_in_words(miss: Run, formats: Formats) -> str:
    """Return which run times were missed, and why."""
    words = formats.moment(miss.scheduled_at)
    if miss.run_times is not None and miss.run_times > 1:
        count = f"more than {MOST_COUNTED:,}" if miss.run_times > MOST_COUNTED else miss.run_times
        words = f"{count} run times from {words} to {formats.moment(miss.last_scheduled_at)}"
    return f"{words}: {miss.reason or 'the reason is not known'}"


def missed_in_words(number: int) -> str:
    """Return how many run times were missed."""
    told = f"more than {MOST_COUNTED:,}" if number > MOST_COUNTED else f"{number:,}"
    return f"{told} missed run time{'s' if number > 1 else ''}"


def more_in_words(entries: Sequence[Run], healed: Collection[tuple[str, datetime | None]]) -> str:
    """Return how many more failures or misses there are than the first, and whether they healed.

    :param entries: the entries of one task with the same outcome
    :param healed: the tasks and run times that have succeeded at a retry
    """
    more = sum(entry.run_times or 1 for entry in entries[1:])
    words = [f"and {more} more{' run times' * (entries[0].outcome == 'missed')}"] if more else []
    retried = sum((entry.task, entry.scheduled_at) in healed for entry in entries)
    if retried:
        which = f"{retried} of {len(entries)}" if retried < len(entries) else "all" * (more > 0)
        words.append(f"{which} succeeded at a retry".strip())
    return "; ".join(words)


def error_in_words(run: Run) -> str:
    """Return the class and the message of a run's exception; ``""`` for none."""
    return outcomes.error_in_words(run.error_type, run.error)


def ending_in_words(run: Run) -> str:
    """Return how a run ended that has no exception; ``""`` for one that ended as it should."""
    return outcomes.outcome_named(run.outcome).why


def took_in_words(run: Run, formats: Formats) -> str:
    """Return how long a run took, as far as it is known.

    The end of a run that died is the end of its lease. A run that outlived its maximum lock may
    have gone on.
    """
    return outcomes.outcome_named(run.outcome or "").took.format(formats.seconds(run.took))


def longest_of(runs: Sequence[Run]) -> Run | None:
    """Return the run that took longest; ``None`` without runs.

    A run whose end is not known is one only if there is no other: of a run that died only the end
    of its lease is known, and of one that overran only that it took longer than its maximum lock.
    """
    ran = [run for run in runs if run.outcome != "missed"]
    timed = [run for run in ran if run.outcome not in outcomes.UNTIMED]
    return max(timed or ran, key=lambda run: run.took, default=None)


def run_notes(run: Run, formats: Formats) -> str:
    """Return notes on an entry of the history: on a run, a missed run time, or an operator."""
    if run.outcome == "missed":
        return miss_in_words(run, formats)
    if run.kind == "operator":
        return action_in_words(run, formats)
    return _attempt_in_words(run, formats)


def _attempt_in_words(run: Run, formats: Formats) -> str:
    """Return which attempt a run was, when it was to be run again, and of which release it was."""
    words = []
    if run.attempt is not None and run.attempt > 1:
        words.append(f"attempt {run.attempt}")
    if run.retry_at is not None:
        words.append(f"to be retried at {formats.moment(run.retry_at)}")
    if run.release is not None:
        words.append(f"release {run.release}")
    return ", ".join(words)


def durations_in_words(durations: Durations, formats: Formats, now: datetime) -> list[str]:
    """Return how long runs took in the last day and in the week before, a line for each.

    :param now: the database's time
    """
    spans = (
        ("in the last day", durations.last_day, now - timedelta(days=1)),
        ("in the week before", durations.week_before, now - timedelta(days=8)),
    )
    return [_spread_in_words(*span, durations.kept_since, formats) for span in spans]


def _spread_in_words(
    when: str, spread: Spread | None, since: datetime, kept_since: datetime | None, formats: Formats
) -> str:
    # A history that begins within the span may have had older runs, or may have none.
    is_whole = kept_since is None or kept_since <= since
    if spread is None:
        return f"{when}: no run that ended well" + ("" if is_whole else " is kept")
    begins = "" if is_whole else f", kept since {formats.moment(kept_since)}"
    runs = "1 run" if spread.runs == 1 else f"{spread.runs} runs"
    median, most = formats.seconds(spread.median), formats.seconds(spread.most)
    return f"{when}: median {median}, 95th percentile {most} ({runs} that ended well{begins})"
