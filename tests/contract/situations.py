"""What a random history of claims came across, in a few words, so that a run can tell of it."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from tests.contract.model import TOLERANCE, Ask, Row, Takeover

# What a run must have come across, or it has shown nothing.
EXPECTED = {
    "first claim",
    "first claim after the row was pruned",
    "new window",
    "new window: opened again",
    "new window: the shorter minimum lock",
    "new window after a death",
    "new window after a hand-over",
    "new window after a death: the maximum lock has passed",
    "granted before",
    "granted before, its lease has ended",
    "held up until after the release",
    "held up until after the end",
    "held up until after it was handed over",
    "refused: running",
    "refused: window",
    "refused: window of a hold",
    "refused: one run time once",
    "refused: old only because of the bound",
    "refused: the run time is not believed",
    "refused: paused",
    "refused: the run time was in a pause",
    "waits: the rows are not believed",
    "waits: a dead run comes first",
    "waits: a run that was handed over comes first",
    "taken over",
    "taken over after a hand-over",
    "taken over: up to the maximum lock",
    "taken over before",
    "not taken over: running",
    "not taken over: finished",
    "not taken over: another claim",
    "not taken over: the maximum lock has passed",
    "not taken over: no row",
    "not taken over: paused",
    "released in time",
    "released after the end",
    "released after it was handed over",
    "released twice",
    "released, the window opened",
    "released after deaths",
    "not released",
    "lease ended",
    "lease ended: handed over",
    "lease ended: had been handed over before",
    "lease not ended: finished",
    "lease not ended: another holder",
    "lease not ended: never granted, or taken by another",
    "given up",
    "given up after a hand-over",
    "not given up: running",
    "not given up: finished",
    "not given up: never granted, or taken by another",
    "renewed",
    "renewed: no longer than it was",
    "renewed: up to the maximum lock",
    "renewed: revived",
    "not renewed: the maximum lock has passed",
    "not renewed: handed over",
    "not renewed: released",
    "not renewed: never granted, or taken by another",
    "extended",
    "extended: revived",
    "extended: not beyond its lease",
    "not extended",
    "pruned",
    "not pruned: not old enough",
    "not pruned: recurring",
    "read: running",
    "read: dead",
    "read: finished",
    "read: expired",
    "read: handed over",
}


def of_claim(before: Row | None, after: Row, ask: Ask, now: float, unbound: float) -> str:
    """Return what a claim came across, in a few words.

    :param unbound: when it would have fired without a bound on the database's clock
    """
    if before is None:
        return "first claim"
    if after is not before:
        return why_new(before, ask, now)
    return why_not_written(before, ask, now, unbound)


def why_new(before: Row, ask: Ask, now: float) -> str:
    if before.finished_at is None:
        if before.handed_over:
            return "new window after a hand-over"
        same = before.runs and before.runs == ask.runs and before.failover and ask.failover
        return "new window after a death" + (": the maximum lock has passed" if same else "")
    if before.window_until < before.window_start:
        return "new window: opened again"
    return "new window" + (": the shorter minimum lock" if ask.fired < before.window_until else "")


def why_not_written(before: Row, ask: Ask, now: float, unbound: float) -> str:
    if before.claim_id == ask.claim_id:
        return why_granted_before_or_not(before, now)
    if before.running(now):
        return "refused: running"
    if ask.is_new_after(before):
        if ask.is_paused(before, now):
            return "refused: " + ("paused" if before.paused(now) else "the run time was in a pause")
        if before.handed_over:
            return "waits: a run that was handed over comes first"
        return "waits: " + ("a dead run comes first" if ask.stable else "the rows are not believed")
    return why_old(before, ask, unbound)


def why_granted_before_or_not(before: Row, now: float) -> str:
    if before.stands(now):
        return "granted before" + ("" if before.running(now) else ", its lease has ended")
    if before.handed_over:
        return "held up until after it was handed over"
    return f"held up until after the {'end' if before.finished_at is None else 'release'}"


def why_old(before: Row, ask: Ask, unbound: float) -> str:
    if ask.run_time is not None and abs(ask.run_time - ask.reckoned) > TOLERANCE:
        return "refused: the run time is not believed"
    if ask.run_time is not None and replace(ask, run_time=None).is_new_after(before):
        return "refused: one run time once"
    if replace(ask, reckoned=unbound).is_new_after(before):
        return "refused: old only because of the bound"
    if replace(ask, runs="a job").is_new_after(replace(before, runs="a job")):
        return "refused: window of a hold"
    return "refused: window"


def of_takeover(before: Row | None, after: Row | None, ask: Takeover, now: float) -> str:
    if before is None or after is None:
        return "not taken over: no row"
    if after is before:
        return why_not_taken_over(before, ask, now)
    if before.handed_over:
        return "taken over after a hand-over"
    short = ask.lease is not None and after.locked_until < now + ask.lease
    return "taken over" + (": up to the maximum lock" if short else "")


def why_not_taken_over(before: Row, ask: Takeover, now: float) -> str:
    if before.claim_id == ask.claim_id and before.stands(now):
        return "taken over before"
    if before.claim_id != ask.dead_claim_id:
        return "not taken over: another claim"
    if before.finished_at is not None:
        return "not taken over: finished"
    if before.dead(now) and before.paused(now):
        return "not taken over: paused"
    late = now >= before.run_until
    return f"not taken over: {'the maximum lock has passed' if late else 'running'}"


def of_release(before: Row | None, after: Row | None, now: float, *, keep_window: bool) -> str:
    if before is None or after is None:
        return "not released"
    if before.finished_at is not None:
        return "released twice"
    if before.handed_over:
        return "released after it was handed over"
    if not keep_window:
        return "released, the window opened"
    if before.deaths:
        return "released after deaths"
    return "released in time" if before.running(now) else "released after the end"


def of_end_of_lease(
    before: Row | None, after: Row | None, claim_id: UUID, *, handed_over: bool
) -> str:
    if before is None or before.claim_id != claim_id:
        return "lease not ended: never granted, or taken by another"
    if after is None:
        finished = before.finished_at is not None
        return f"lease not ended: {'finished' if finished else 'another holder'}"
    if before.handed_over and not handed_over:
        return "lease ended: had been handed over before"
    return "lease ended" + (": handed over" if handed_over else "")


def of_giving_up(before: Row | None, after: Row | None, claim_id: UUID) -> str:
    if before is None or before.claim_id != claim_id:
        return "not given up: never granted, or taken by another"
    if after is None:
        return f"not given up: {'running' if before.finished_at is None else 'finished'}"
    return "given up" + (" after a hand-over" if before.handed_over else "")


def of_renewal(
    before: Row | None, after: Row | None, claim_id: UUID, now: float, wanted: float
) -> str:
    if before is None or before.claim_id != claim_id:
        return "not renewed: never granted, or taken by another"
    if after is None:
        if before.finished_at is not None:
            return "not renewed: released"
        handed_over = before.handed_over
        return f"not renewed: {'handed over' if handed_over else 'the maximum lock has passed'}"
    if before.dead(now):
        return "renewed: revived"
    if after.locked_until == before.locked_until:
        return "renewed: no longer than it was"
    return "renewed" if after.locked_until == wanted else "renewed: up to the maximum lock"


def of_extension(before: Row | None, after: Row | None, now: float) -> str:
    if before is None or after is None:
        return "not extended"
    if before.dead(now) and not after.dead(now):
        return "extended: revived"
    leased = after.locked_until < after.run_until
    return "extended" + (": not beyond its lease" if leased else "")
