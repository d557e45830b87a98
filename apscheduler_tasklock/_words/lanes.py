"""What lies on lanes, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from apscheduler_tasklock._lock.outcomes import FAILED
from apscheduler_tasklock._values import cut
from apscheduler_tasklock._words.formats import Formats
from apscheduler_tasklock._words.runs import (
    ending_in_words,
    error_in_words,
    miss_in_words,
    missed_in_words,
    took_in_words,
)
from apscheduler_tasklock.status import Lane, LaneEntry

# Limits the characters of a name or an error in a title.
LONGEST_TITLE = 120

# What is said of a run that is not over, by the outcome of its entry.
_GOES_ON = {
    "running": "goes on",
    "too long": "goes on for longer than it may",
    "holder silent": "its replica has died or is silent, and nobody knows whether it goes on",
}
# The outcomes that are told first.
_FIRST = {*FAILED, *_GOES_ON} - {"freed"}


def entries_in_words(entries: Sequence[LaneEntry], formats: Formats) -> str:
    """Return what a shape stands for: one entry of a lane, or several.

    :param entries: one or more, the first one first
    """
    if len(entries) > 1 or (entries[0].run is None and entries[0].count > 1):
        return _several_in_words(entries, formats)
    [entry] = entries
    task = cut(entry.task or "", LONGEST_TITLE)
    if entry.outcome in _GOES_ON:
        return f"{task} since {formats.moment(entry.since)}, {_GOES_ON[entry.outcome]}"
    run = entry.run
    if run is None:  # it is over, but no claim has followed that closes it
        return (
            f"{task} {formats.moment(entry.since)}, its lease ended at "
            f"{formats.moment(entry.until)}, and it has not reported its end"
        )
    if entry.outcome == "missed":
        return f"{task}: nobody ran {cut(miss_in_words(run, formats), 3 * LONGEST_TITLE)}"
    kind = "" if run.kind == "schedule" else f" ({run.kind})"
    words = f"{task}{kind} {formats.moment(run.started_at)}, {run.outcome}"
    words += f" after {took_in_words(run, formats)}"
    if why := error_in_words(run) or ending_in_words(run):
        words += f": {cut(why, LONGEST_TITLE)}"
    return words


def _several_in_words(entries: Sequence[LaneEntry], formats: Formats) -> str:
    """Return how many of each outcome there are, and between which times."""
    tasks = {entry.task for entry in entries}
    task = next(iter(tasks)) if len(tasks) == 1 else None
    first = min(entry.since for entry in entries)
    last = max(entry.until or entry.since for entry in entries)
    between = formats.moment(first)
    if formats.moment(last) != between:
        between += f" to {formats.moment(last)}"
    return f"{cut(task, LONGEST_TITLE) + ' ' if task else ''}{between}: {_counted(entries)}"


def _counted(entries: Sequence[LaneEntry]) -> str:
    """Return how many runs and missed run times there are, and how the runs ended."""
    counts: Counter[str] = Counter()
    for entry in entries:
        counts[entry.outcome] += entry.count
    missed = counts.pop("missed", 0)
    runs = sum(counts.values())
    words = []
    if runs:
        total = "1 run" if runs == 1 else f"{runs:,} runs"
        # "Ended well" goes without saying if nothing else has happened.
        told = "" if set(counts) == {"ok"} else _told(counts)
        words.append(f"{total} ({told})" if told else total)
    if missed:
        words.append(missed_in_words(missed))
    return ", ".join(words)


def _told(counts: Counter[str]) -> str:
    names = sorted(counts, key=lambda name: (name not in _FIRST, name == "ok", name))
    return ", ".join(f"{counts[name]:,} {name}" for name in names)


def lane_in_words(lane: Lane, by: str, formats: Formats) -> str:
    """Return how much lies on a lane, and from when on it is known."""
    words = [_counted(lane.entries)] if lane.entries else []
    if lane.known_since is not None:
        words.append(not_kept_in_words(lane, by, formats))
    if lane.left_out:
        words.append(left_out_in_words(lane, formats))
    return "; ".join(words) or "nothing ran"


def not_kept_in_words(lane: Lane, by: str, formats: Formats) -> str:
    """Return from when on a lane is known."""
    since = formats.moment(lane.known_since)
    if not lane.name:
        return f"not kept: some missed run times before {since}"
    whose = "of the task" if by == "task" else "of some of the tasks"
    return f"not kept: runs {whose} before {since}, of which the history has only some"


def left_out_in_words(lane: Lane, formats: Formats) -> str:
    """Return how many entries of a lane are left out, and where."""
    number = f"{lane.left_out:,} more run{'s' if lane.left_out > 1 else ''}"
    return f"not kept here: {number} that ended well until {formats.moment(lane.left_until)}"
