"""The output of a run of the chaos."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

from apscheduler_tasklock.demo.history import Event
from apscheduler_tasklock.demo.judge import Breach
from tests.chaos.records import Records
from tests.chaos.tasks import TASKS

# Seconds before and after a finding that its surroundings show.
_BEFORE, _AFTER = 6.0, 2.0

# The most findings that are listed.
_LISTED = 40

_HEADINGS = ("task", "runs", "windows", "takeovers", "handed over", "cut short", "lost")


def summary(events: Sequence[Event], done: Counter[str]) -> str:
    """Return a table of what ran, and a line of what was done to it."""
    records = Records(events)
    rows = [_HEADINGS, *(_row(records, events, task.name, [task.name]) for task in TASKS)]
    rows.append(_row(records, events, "one-offs", list(records.one_offs)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    faults = ", ".join(f"{count} x {kind}" for kind, count in sorted(done.items()))
    return "\n".join([*lines, f"faults: {faults or 'none'}"])


def _row(
    records: Records, events: Sequence[Event], heading: str, tasks: Sequence[str]
) -> tuple[str, ...]:
    runs = [run for task in tasks for run in records.runs[task]]
    wanted = set(tasks)
    lost = {(e.replica, e.task, e.token) for e in events if e.lost and e.task in wanted}
    claims = [claim for task in tasks for claim in records.claims[task]]
    counts = (
        len(runs),
        len({(claim.task, claim.window) for claim in claims}),
        sum(run.takeover for run in runs),
        sum(claim.handed_over < inf for claim in claims),
        sum(run.ended is None for run in runs),
        len(lost),
    )
    return (heading, *map(str, counts))


def surroundings(finding: Breach, events: Sequence[Event]) -> str:
    """Return what happened around a finding, to its task and to the replicas."""
    lines = [f"--- {finding}"]
    for event in sorted(events, key=lambda event: event.at):
        if not -_BEFORE < event.at - finding.at < _AFTER:
            continue
        if event.task in ("", finding.task) and event.kind not in ("holds", "stalled"):
            lines.append(_line(event, event.at - finding.at))
    return "\n".join(lines)


def _line(event: Event, at: float) -> str:
    words = [f"{at:+8.3f}", f"{event.replica:4}", event.kind, event.detail]
    words += [f"token {event.token}"] if event.token else []
    words += [f"due {event.due:.3f}"] if event.due is not None else []
    words += [f"until {event.until:.3f}"] if event.until is not None else []
    words += ["takeover"] * event.takeover + ["lost"] * event.lost + ["opened"] * (not event.kept)
    return " ".join(word for word in words if word)


def mixed(findings: Sequence[Breach]) -> list[Breach]:
    """Return the findings with the first one of each fault first, then the second ones, and so on.

    Otherwise a hundred findings of one fault would hide those of all others.
    """
    counts: Counter[str] = Counter()
    places = []
    for finding in findings:
        counts[finding.fault] += 1
        places.append(counts[finding.fault])
    in_order = sorted(zip(places, findings, strict=True), key=lambda one: one[0])
    return [finding for _, finding in in_order]


def describe(findings: Sequence[Breach]) -> str:
    """Return the first findings, a line each, and how many there are of which fault."""
    if not findings:
        return "findings: none"
    counts = Counter(finding.fault for finding in findings)
    total = ", ".join(f"{count} x {fault}" for fault, count in counts.items())
    lines = [str(finding) for finding in findings[:_LISTED]]
    if len(findings) > _LISTED:
        lines.append(f"... and {len(findings) - _LISTED} more")
    return "\n".join([*lines, f"findings: {total}"])
