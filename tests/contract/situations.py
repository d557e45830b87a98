"""What a random history of claims came across, in a few words, so that a run can tell of it."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from tests.contract.model import Ask, Row

# What a run must have come across, or it has shown nothing.
EXPECTED = {
    "first claim",
    "new window",
    "taken over",
    "taken over, the own window left",
    "dead run forgotten",
    "granted before",
    "taken over before",
    "held up until after the release",
    "held up until after the end",
    "refused: running",
    "refused: window",
    "refused: dead run left",
    "refused: old only because of the bound",
    "released in time",
    "released after the end",
    "released twice",
    "released, the window opened",
    "not released",
    "renewed",
    "renewed: no longer than it was",
    "renewed: up to the maximum lock",
    "not renewed: ended",
    "not renewed: released",
    "not renewed: never granted, or taken by another",
    "extended",
    "not extended",
    "read: running",
    "read: dead",
    "read: finished",
}


def of_claim(before: Row | None, after: Row, ask: Ask, now: float, lag: float) -> str:
    """Return what a claim came across, in a few words."""
    if before is None:
        return "first claim"
    if after is not before:
        if after.claim_id != ask.claim_id:
            left = ask.is_new_after(before)
            return "taken over, the own window left" if left else "taken over"
        return "dead run forgotten" if before.dead(now) else "new window"
    return why_not_written(before, ask, now, lag)


def why_not_written(before: Row, ask: Ask, now: float, lag: float) -> str:
    if before.claim_id in ask.ids:
        if before.running(now):
            return "granted before" if before.claim_id == ask.claim_id else "taken over before"
        ended = before.finished_at is None
        return f"held up until after the {'end' if ended else 'release'}"
    if before.running(now):
        return "refused: running"
    if before.dead(now) and ask.dead_run == "leave":
        return "refused: dead run left"
    unbound = replace(ask, fired=now - lag)
    bound = unbound.is_new_after(before)
    return "refused: old only because of the bound" if bound else "refused: window"


def of_release(before: Row | None, after: Row | None, now: float, *, keep_window: bool) -> str:
    if before is None or after is None:
        return "not released"
    if before.finished_at is not None:
        return "released twice"
    if not keep_window:
        return "released, the window opened"
    return "released in time" if before.running(now) else "released after the end"


def of_renewal(before: Row | None, after: Row | None, claim_id: UUID, wanted: float) -> str:
    if before is None or before.claim_id != claim_id:
        return "not renewed: never granted, or taken by another"
    if after is None:
        ended = before.finished_at is None
        return f"not renewed: {'ended' if ended else 'released'}"
    if after.locked_until == before.locked_until:
        return "renewed: no longer than it was"
    return "renewed" if after.locked_until == wanted else "renewed: up to the maximum lock"
