"""What operators' actions have done, in words: by the row as the action's statement has left it."""

from __future__ import annotations

from datetime import datetime

from apscheduler_tasklock._words.formats import Formats
from apscheduler_tasklock._words.tasks import pause_in_words
from apscheduler_tasklock.status import Freed, JobMoved, PauseChange, RunRequest

NOT_PAUSED = "was not paused"
# What operators do with a stored job is in the history of its task.
UNNOTED = "not in the run history, which its task has from the job's first run on"


def paused_in_words(change: PauseChange, formats: Formats) -> str:
    """Return until when a task is paused."""
    return f"paused until {formats.moment(change.paused_until) or 'it is resumed'}"


def resumed_in_words(change: PauseChange, formats: Formats) -> str:
    """Return whether a task was resumed, which of its pauses have ended, and which are left."""
    if not change.is_paused:
        return "resumed" if change.was_paused else NOT_PAUSED
    words = [f"no longer {pause_in_words(pause, formats)}" for pause in change.ended]
    left = "; ".join(pause_in_words(pause, formats, with_since=True) for pause in change.left)
    return "; ".join([*words, f"still {left or 'paused'}"])


def requested_in_words(request: RunRequest, formats: Formats, what: str = "a run") -> str:
    """Return whether a run is asked for now, or was before.

    :param what: what is asked for
    """
    if request.is_new:
        return f"{what} is asked for"
    since = formats.moment(request.requested_at)
    return f"{what} was asked for already, by {request.requested_by} at {since}"


def freed_in_words(freed: Freed, formats: Formats) -> str:
    """Return which run was freed, and what follows."""
    since = formats.moment(freed.since)
    words = [f"freed: token {freed.token}, held by {freed.holder} since {since}"]
    if freed.run_again:
        return f"{words[0]}; its window is open again"
    if freed.window_until is not None:
        words.append(f"its window stays until {formats.moment(freed.window_until)}")
    if freed.due_at is not None:
        words.append(f"it is skipped until it is due at {formats.moment(freed.due_at)}")
        # Of a one-off job whose retry is dropped, the row has only this time.
        if freed.overdue_at is not None:
            words.append(f"overdue after {formats.moment(freed.overdue_at)}")
    return "; ".join(words)


def acknowledged_in_words(
    token: int | str, until: datetime | None, formats: Formats, *, is_new: bool
) -> str:
    """Return whether a failure was acknowledged now, or before, and until when later ones are."""
    words = f"{'' if is_new else 'was already '}acknowledged (token {token})"
    if until is None or not is_new:
        return words
    return f"{words}; later failures and misses alarm no more until {formats.moment(until)}"


def gone_in_words(what: str, *, is_done: bool) -> str:
    """Return whether a task was forgotten, or a job removed.

    :param what: what was asked for: ``"forgotten"`` or ``"removed"``
    :param is_done: whether this call has done it; otherwise nothing tells who has
    """
    return what if is_done else f"is not there any more; it is not known who has {what} it"


def job_in_words(outcome: str, moved: JobMoved, formats: Formats) -> str:
    """Return what has become of a stored job that was to be paused, resumed or moved.

    :param outcome: ``"paused"``, ``"resumed"`` or ``"moved"``
    """
    moment = formats.moment(moved.next_run_time)
    if outcome == "paused":
        return "paused until it is resumed" if moved.is_changed else "was already paused"
    if outcome == "resumed":
        return f"resumed, due {moment}" if moved.is_changed else NOT_PAUSED
    what = f"moved to {moment}" if moved.is_changed else f"was already due {moment}"
    return f"{what}, and no longer paused" if moved.is_changed and moved.was_paused else what
