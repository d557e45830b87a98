"""What a random history of claims came across, in a few words, so that a run can tell of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from apscheduler_tasklock.testing.rule import TOLERANCE, DatedClaim, Row
from tests.support.waist import Renewal, RerunRequest, TaskRow

# What a run must have come across, or it has shown nothing.
EXPECTED = {
    "first claim",
    "first claim after the row was pruned",
    "new window",
    "new window: opened again",
    "new window: the shorter minimum lock",
    "new window: the gap after an older schedule",
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
    "refused: window of a newer schedule",
    "refused: one run time once",
    "refused: old only because of the bound",
    "refused: the run time is not believed",
    "refused: paused",
    "not paused: sent again after the pause has ended",
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


def of_claim(before: Row | None, after: Row, claim: DatedClaim, unbound: datetime) -> str:
    """Return what a claim came across, in a few words.

    :param unbound: when it would have fired without a bound on the database's clock
    """
    if before is None:
        return "first claim"
    if after is not before:
        return why_new(before, claim)
    return why_not_written(before, claim, unbound)


def why_new(before: Row, claim: DatedClaim) -> str:
    if not before.finished:
        if before.handed_over:
            return "new window after a hand-over"
        same = before.runs and before.runs == claim.request.runs
        waited = same and before.failover and claim.request.failover
        return "new window after a death" + (": the maximum lock has passed" if waited else "")
    if before.window_until < before.window_start:
        return "new window: opened again"
    if not replace(claim, request=replace(claim.request, least_gap=None)).is_new_after(before):
        return "new window: the gap after an older schedule"
    shorter = claim.fired < before.window_until
    return "new window" + (": the shorter minimum lock" if shorter else "")


def why_not_written(before: Row, claim: DatedClaim, unbound: datetime) -> str:
    if before.claim_id == claim.request.claim_id:
        return why_granted_before_or_not(before, claim.now)
    if before.is_running(claim.now):
        return "refused: running"
    if claim.is_new_after(before):
        if claim.is_paused(before):
            is_paused = before.is_paused(claim.now)
            return "refused: " + ("paused" if is_paused else "the run time was in a pause")
        if before.handed_over:
            return "waits: a run that was handed over comes first"
        stable = claim.stable
        return "waits: " + ("a dead run comes first" if stable else "the rows are not believed")
    return why_old(before, claim, unbound)


def why_granted_before_or_not(before: Row, now: datetime) -> str:
    if before.stands(now):
        return "granted before" + ("" if before.is_running(now) else ", its lease has ended")
    if before.handed_over:
        return "held up until after it was handed over"
    return f"held up until after the {'release' if before.finished else 'end'}"


def why_old(before: Row, claim: DatedClaim, unbound: datetime) -> str:
    request = claim.request
    if request.run_time is not None and abs(request.run_time - claim.reckoned) > TOLERANCE:
        return "refused: the run time is not believed"
    not_exact = replace(claim, request=replace(request, run_time=None, exact=False))
    if request.exact and not_exact.is_new_after(before):
        return "refused: one run time once"
    if replace(claim, reckoned=unbound).is_new_after(before):
        return "refused: old only because of the bound"
    of_a_job = replace(claim, request=replace(request, runs="a job"))
    if of_a_job.is_new_after(replace(before, runs="a job")):
        return "refused: window of a hold"
    of_newest = replace(claim, request=replace(request, schedule_for=-1000.0))
    if request.schedule_for is not None and of_newest.is_new_after(before):
        return "refused: window of a newer schedule"
    return "refused: window"


def of_takeover(before: Row | None, after: Row | None, request: RerunRequest, now: datetime) -> str:
    if before is None or after is None:
        return "not taken over: no row"
    if after is before:
        return why_not_taken_over(before, request, now)
    if before.handed_over:
        return "taken over after a hand-over"
    lease = request.lease
    short = lease is not None and after.locked_until < now + timedelta(seconds=lease)
    return "taken over" + (": up to the maximum lock" if short else "")


def why_not_taken_over(before: Row, request: RerunRequest, now: datetime) -> str:
    if before.is_granted(request.claim_id, now):
        return "taken over before"
    if before.claim_id != request.cause:
        return "not taken over: another claim"
    if before.finished:
        return "not taken over: finished"
    if before.is_dead(now) and before.is_paused(now):
        return "not taken over: paused"
    late = now >= before.run_until
    return f"not taken over: {'the maximum lock has passed' if late else 'running'}"


def of_release(before: Row | None, after: Row | None, now: datetime, *, keep_window: bool) -> str:
    """Return it of a release; ``after`` is ``None`` where the claim did not stand, as below."""
    if before is None or after is None:
        return "not released"
    if before.finished:
        return "released twice"
    if before.handed_over:
        return "released after it was handed over"
    if not keep_window:
        return "released, the window opened"
    if before.deaths:
        return "released after deaths"
    return "released in time" if before.is_running(now) else "released after the end"


def of_end_of_lease(
    before: Row | None, after: Row | None, claim_id: UUID, *, handed_over: bool
) -> str:
    if before is None or before.claim_id != claim_id:
        return "lease not ended: never granted, or taken by another"
    if after is None:
        return f"lease not ended: {'finished' if before.finished else 'another holder'}"
    if before.handed_over and not handed_over:
        return "lease ended: had been handed over before"
    return "lease ended" + (": handed over" if handed_over else "")


def of_giving_up(before: Row | None, claim_id: UUID, *, is_given_up: bool) -> str:
    if before is None or before.claim_id != claim_id:
        return "not given up: never granted, or taken by another"
    if not is_given_up:
        return f"not given up: {'finished' if before.finished else 'running'}"
    return "given up" + (" after a hand-over" if before.handed_over else "")


def of_renewal(before: Row | None, after: Row | None, renewal: Renewal, now: datetime) -> str:
    if before is None or before.claim_id != renewal.claim_id:
        return "not renewed: never granted, or taken by another"
    if after is None:
        if before.finished:
            return "not renewed: released"
        handed_over = before.handed_over
        return f"not renewed: {'handed over' if handed_over else 'the maximum lock has passed'}"
    if before.is_dead(now):
        return "renewed: revived"
    if after.locked_until == before.locked_until:
        return "renewed: no longer than it was"
    wanted = now + timedelta(seconds=renewal.lease or 0)
    return "renewed" if after.locked_until == wanted else "renewed: up to the maximum lock"


def of_extension(before: Row | None, after: Row | None, now: datetime) -> str:
    if before is None or after is None:
        return "not extended"
    if before.is_dead(now) and not after.is_dead(now):
        return "extended: revived"
    leased = after.locked_until < after.run_until
    return "extended" + (": not beyond its lease" if leased else "")


def of_state(state: TaskRow) -> Iterator[str]:
    yield "read: " + ("finished" if state.finished else "dead" if state.dead else "running")
    if state.expired:
        yield "read: expired"
    if state.handed_over:
        yield "read: handed over"
