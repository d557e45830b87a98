"""Judges what the replicas did: nothing is lost, and nothing begins twice but by a takeover."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime

from tests.chaos_store.guard import SIGNS
from tests.chaos_store.ledger import Entry
from tests.chaos_store.replica import GRACE, PERIOD, STEADY
from tests.chaos_store.versions import changing, run_times

# Seconds that a user's call goes on at most.
LONGEST_CALL = 2.5
# Seconds for which a run that was claimed just before a pause or removal may take to begin, on a
# replica that was not stopped meanwhile; the claim's first answer may have been lost.
CLAIMED_BEFORE = 6.0
# Seconds by which a run may begin before its run time, because two processes read their clocks at
# different moments. Replicas' clocks are off by much more.
EARLY = 0.05


def check(entries: Sequence[Entry], server_log: str, said: str, offset: float = 0.0) -> list[str]:
    """Return all findings, each as a text.

    :param entries: the ledger, in order
    :param server_log: the server's log, in which the database's triggers report wrong times
    :param said: the replicas' logs
    :param offset: what to add to a time of the ledger for one of the database's clock
    """
    findings = [*_once(entries), *_one_offs(entries), *_steady(entries, said), *_withdrawn(entries)]
    findings += [*_on_time(entries, offset), *changing(entries, offset)]
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


def _once(entries: Sequence[Entry]) -> Iterator[str]:
    """Find run times that were claimed again: only a takeover may begin what was begun."""
    tokens: dict[tuple[str, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.kind == "begin":
            tokens[entry.key, entry.token].append(entry)
    for key in sorted({key for key, _ in tokens}):
        for runs in run_times(entries, key):
            first, *others = sorted(runs, key=lambda run: run.token)
            if not all(run.is_takeover for run in others):
                yield f"{key}: a run time was claimed twice: {[first, *others]}"
    for (key, token), runs in tokens.items():
        if len(runs) > 1:
            yield f"{key}: the token {token} was used {len(runs)} times: {runs}"


def _one_offs(entries: Sequence[Entry]) -> Iterator[str]:
    """Find one-off jobs that were added and did not run to their end."""
    ended = {entry.key for entry in entries if entry.kind == "end"}
    begun: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.kind == "begin":
            begun[entry.key].append(entry)
    for entry in entries:
        if entry.kind != "add":
            continue
        if not entry.error and entry.key not in ended:
            what = "began and never ended" if begun[entry.key] else "never began"
            yield f"{entry.key}: was added at {entry.at:.3f}, and {what}: {begun[entry.key]}"


_MISSED_TOO = r"Job '{key}': its run times from (\S+ \S+) on and before (\S+ \S+) are missed"


def _steady(entries: Sequence[Entry], said: str) -> Iterator[str]:
    """Find run times of jobs that nobody pauses or removes that did not run to their end."""
    for key in STEADY:
        ends = [entry for entry in entries if entry.kind == "end" and entry.key == key]
        ran = {round(entry.run_time / PERIOD) for entry in ends}
        if not ran:
            yield f"{key}: never ran"
            continue
        # Whether the misfire is right is judged elsewhere.
        missed = {
            round(e.run_time / PERIOD) for e in entries if e.kind == "missed" and e.key == key
        }
        # Those before the latest that came while the job's own run went on are told in the log.
        for first, latest in re.findall(_MISSED_TOO.format(key=key), said):
            since, until = (datetime.fromisoformat(each).timestamp() for each in (first, latest))
            missed |= set(range(round(since / PERIOD), round(until / PERIOD)))
        lost = sorted(set(range(min(ran), max(ran))) - ran - missed)
        for number in lost:
            near = [e for e in entries if e.key == key and abs(e.run_time - number * PERIOD) < 1]
            yield f"{key}: {number * PERIOD} did not run to its end: {near}"


def _on_time(entries: Sequence[Entry], offset: float) -> Iterator[str]:
    """Find runs before their run time, and misfires within the grace time: by a wrong clock."""
    for entry in entries:
        late = entry.at + offset - entry.run_time
        if entry.kind == "begin" and late < -EARLY:
            yield f"{entry.key}: began {-late:.2f} s before its run time: {entry}"
        if entry.kind == "missed" and late < GRACE:
            yield f"{entry.key}: counts as missed {late:.1f} s after its run time: {entry}"


def _withdrawn(entries: Sequence[Entry]) -> Iterator[str]:
    """Find runs that began after their job was paused or removed."""
    gone: dict[str, Entry] = {}
    for at, entry in _moments(entries):
        if entry.kind in ("pause", "remove"):
            gone[entry.key] = entry
        elif entry.kind == "resume":
            gone.pop(entry.key, None)
        elif entry.key in gone:
            change = gone[entry.key]
            if at > change.until + CLAIMED_BEFORE and not _was_stopped(entries, entry, change):
                since = at - change.until
                yield f"{entry.key}: began {since:.1f} s after its {change.kind}: {entry}"


def _moments(entries: Sequence[Entry]) -> list[tuple[float, Entry]]:
    """Return what matters for pauses, and when.

    A user's change holds from its answer on, and is over once another one is asked for.
    """
    moments = []
    for entry in entries:
        if entry.kind in ("pause", "remove") and not entry.error:
            if not _may_be_resumed(entries, entry):
                moments.append((entry.until, entry))
        elif entry.kind == "resume" or (entry.kind == "begin" and not entry.is_takeover):
            moments.append((entry.at, entry))
    return sorted(moments, key=lambda moment: moment[0])


def _may_be_resumed(entries: Sequence[Entry], pause: Entry) -> bool:
    """Tell whether a job was resumed at the same time, so that either change may be the last."""
    return any(
        entry.kind == "resume"
        and entry.key == pause.key
        and pause.at - LONGEST_CALL < entry.at < pause.until
        for entry in entries
    )


def _was_stopped(entries: Sequence[Entry], run: Entry, change: Entry) -> bool:
    """Tell whether a run's replica was stopped between the claim and the run, as it may be."""
    return any(
        entry.replica == run.replica
        and entry.at < run.at
        and entry.until > change.until - CLAIMED_BEFORE
        for entry in entries
        if entry.kind == "stop"
    )
