"""Judges what the replicas did: nothing is lost, and nothing begins twice but by a takeover."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime

from apscheduler_tasklock.demo.history import Event, JudgedRun, runs
from apscheduler_tasklock.demo.judge import repeats, went_back
from tests.chaos_store.guard import SIGNS
from tests.chaos_store.replica import FIXED, FLOATING, GRACE, PERIOD, STEADY

# Seconds by which a run may begin before its run time, because two processes read their clocks at
# different moments. Replicas' clocks are off by much more.
EARLY = 0.05
# Seconds by which two entries of one run time may differ, because a takeover's is not exact. Run
# times of different versions are equal, or a second apart.
SAME = 0.3


def check(events: Sequence[Event], server_log: str, said: str, offset: float = 0.0) -> list[str]:
    """Return all findings, each as a text.

    :param events: the ledger, in order
    :param server_log: the server's log, in which the database's triggers report wrong times
    :param said: the replicas' logs
    :param offset: what to add to a time of the ledger for one of the database's clock
    """
    findings = [*_once(events), *_one_offs(events), *_declared(events, said)]
    findings += _on_time(events, offset)
    findings += [
        f"the database said: {line}"
        for line in server_log.splitlines()
        if any(sign in line for sign in SIGNS) and "EXCEPTION" not in line
    ]
    signs = ("Exception in thread", "could not be looked at", "Error getting due jobs")
    findings += [
        f"a replica said: {line}" for line in said.splitlines() if any(s in line for s in signs)
    ]
    return findings


def _once(events: Sequence[Event]) -> Iterator[str]:
    """Find run times that were claimed again: only a takeover may begin what was begun."""
    for key in sorted({event.task for event in events if event.kind == "begin"}):
        begun = runs(events, key)
        for pair in repeats(begun, _serve_one_run_time, lambda _earlier, later: later.takeover):
            yield f"{key}: a run time was claimed twice: {pair}"
        tokens = sorted((run.token, number) for number, run in enumerate(begun))
        for one, other in went_back(tokens):
            yield f"{key}: a token was used twice: {begun[one]}, {begun[other]}"


def _serve_one_run_time(earlier: JudgedRun, later: JudgedRun) -> bool:
    """Return whether two runs of a job are of one run time. A one-off job has only one."""
    return earlier.task.startswith("once-") or bool(later.due - earlier.due < SAME)


def _one_offs(events: Sequence[Event]) -> Iterator[str]:
    """Find one-off jobs that were added and did not run to their end."""
    for event in events:
        if event.kind != "add" or event.error:
            continue
        begun = runs(events, event.task)
        if not any(run.ended is not None for run in begun):
            what = "began and never ended" if begun else "never began"
            yield f"{event.task}: was added at {event.at:.3f}, and {what}: {begun}"


_MISSED_TOO = r"Job '{key}': its run times from (\S+ \S+) on and before (\S+ \S+) are missed"


def _declared(events: Sequence[Event], said: str) -> Iterator[str]:
    """Find run times of jobs that nobody pauses or removes that did not run to their end."""
    for key in (*STEADY, FIXED, FLOATING):
        begun = runs(events, key)
        ends = [run.due for run in begun if run.ended is not None]
        if not ends:
            yield f"{key}: never ran"
            continue
        # Whether the misfire is right is judged elsewhere.
        done = [*ends, *(e.due for e in events if e.kind == "missed" and e.task == key)]
        # Those before the latest that came while the job's own run went on are told in the log.
        for first, latest in re.findall(_MISSED_TOO.format(key=key), said):
            since, until = (datetime.fromisoformat(each).timestamp() for each in (first, latest))
            done += range(round(since), round(until), PERIOD)
        wanted = [run.due for run in begun]
        if key in STEADY:  # all multiples; the database watches which the others are
            wanted = [
                number * PERIOD
                for number in range(round(min(ends) / PERIOD), round(max(ends) / PERIOD))
            ]
        for due in wanted:
            if due < max(ends) and not any(abs(due - other) < SAME for other in done):
                near = [run for run in begun if abs(run.due - due) < 1]
                yield f"{key}: {due} did not run to its end: {near}"


def _on_time(events: Sequence[Event], offset: float) -> Iterator[str]:
    """Find runs before their run time, and misfires within the grace time: by a wrong clock."""
    for event in events:
        if event.due is None:
            continue
        late = event.at + offset - event.due
        if event.kind == "begin" and late < -EARLY:
            yield f"{event.task}: began {-late:.2f} s before its run time: {event}"
        if event.kind == "missed" and late < GRACE:
            yield f"{event.task}: counts as missed {late:.1f} s after its run time: {event}"
