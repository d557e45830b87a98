"""Judges what the replicas did: nothing is lost, and nothing begins twice but by a takeover."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.chaos_store.ledger import Entry
from tests.chaos_store.replica import PERIOD, STEADY

# Seconds for which a run that was claimed just before a pause or removal may take to begin, on a
# replica that was not stopped meanwhile; the claim's first answer may have been lost.
CLAIMED_BEFORE = 6.0


def check(entries: Sequence[Entry], server_log: str, said: str) -> list[str]:
    """Return all findings, each as a text.

    :param entries: the ledger, in order
    :param server_log: in which the database's trigger tells of times that fall
    :param said: the replicas' logs
    """
    findings = [*_once(entries), *_one_offs(entries), *_steady(entries), *_withdrawn(entries)]
    findings += [
        f"next_run_time fell: {line}" for line in server_log.splitlines() if "falls from" in line
    ]
    signs = ("Exception in thread", "could not be looked at", "Error getting due jobs")
    findings += [
        f"a replica said: {line}" for line in said.splitlines() if any(s in line for s in signs)
    ]
    return findings


def _once(entries: Sequence[Entry]) -> Iterator[str]:
    """Find run times that were claimed again: only a takeover may begin what was begun."""
    begun: dict[tuple[str, int], list[Entry]] = defaultdict(list)
    tokens: dict[tuple[str, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.kind != "begin":
            continue
        tokens[entry.key, entry.token].append(entry)
        # A takeover learns the run time from the database, so that it is not exact.
        slot = 0 if entry.key.startswith("once-") else round(entry.run_time / PERIOD)
        begun[entry.key, slot].append(entry)
    for (key, _), runs in begun.items():
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


def _steady(entries: Sequence[Entry]) -> Iterator[str]:
    """Find run times of jobs that nobody pauses or removes that did not run to their end."""
    for key in STEADY:
        ends = [entry for entry in entries if entry.kind == "end" and entry.key == key]
        ran = {round(entry.run_time / PERIOD) for entry in ends}
        if not ran:
            yield f"{key}: never ran"
            continue
        lost = sorted(set(range(min(ran), max(ran))) - ran)
        for number in lost:
            near = [e for e in entries if e.key == key and abs(e.run_time - number * PERIOD) < 1]
            yield f"{key}: {number * PERIOD} did not run to its end: {near}"


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
            moments.append((entry.until, entry))
        elif entry.kind == "resume" or (entry.kind == "begin" and not entry.is_takeover):
            moments.append((entry.at, entry))
    return sorted(moments, key=lambda moment: moment[0])


def _was_stopped(entries: Sequence[Entry], run: Entry, change: Entry) -> bool:
    """Tell whether a run's replica was stopped between the claim and the run, as it may be."""
    return any(
        entry.replica == run.replica
        and entry.at < run.at
        and entry.until > change.until - CLAIMED_BEFORE
        for entry in entries
        if entry.kind == "stop"
    )
