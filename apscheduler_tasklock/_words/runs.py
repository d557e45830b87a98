"""Runs, missed run times, and what operators did, in words."""

from __future__ import annotations

from apscheduler_tasklock._lock import outcomes
from apscheduler_tasklock._lock.protocol_messages import MOST_COUNTED
from apscheduler_tasklock._words.formats import Formats
from apscheduler_tasklock.status import Run

# What operators do, in words. Other outcomes are shown as they are.
_DID = {
    "run": "a run asked for",
    "job-paused": "its job paused",
    "job-resumed": "its job resumed",
    "job-moved": "its job moved",
    "job-removed": "its job removed",
}


def did_in_words(action: Run) -> str:
    """Return what an operator did."""
    return _DID.get(action.outcome, action.outcome)


def action_in_words(action: Run, formats: Formats) -> str:
    """Return by whom, until when and why an operator did something."""
    is_pause = action.outcome in ("paused", "job-paused")
    end = formats.moment(action.until) or ("resumed" if is_pause else "")
    words = [f"by {action.by or 'nobody'}", end and f"until {end}"]
    words.append(f"({action.reason})" if action.reason else "")
    return " ".join(filter(None, words))


def miss_in_words(miss: Run, formats: Formats) -> str:
    """Return which run times were missed, and why."""
    words = formats.moment(miss.scheduled_at)
    if miss.run_times is not None and miss.run_times > 1:
        count = f"more than {MOST_COUNTED:,}" if miss.run_times > MOST_COUNTED else miss.run_times
        words = f"{count} run times from {words} to {formats.moment(miss.last_scheduled_at)}"
    return f"{words}: {miss.reason or 'the reason is not known'}"


def error_in_words(run: Run) -> str:
    """Return the class and the message of a run's exception; ``""`` for none."""
    return outcomes.error_in_words(run.error_type, run.error)


def ending_in_words(run: Run) -> str:
    """Return how a run ended that has no exception; ``""`` for one that ended as it should."""
    return {
        "died": "its replica died, or could not reach the database",
        "overran": "it took longer than its maximum lock",
        "freed": "an operator freed the task",
        "overtaken": "it was taken for dead, and ended later",
    }.get(run.outcome, "")


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
