"""Windows that nobody ran while a replica lived that should have.

A run time of a replica that is well is run, unless

- its window is owned by another run time, or a later one was claimed before: the row remembers the
  last window only;
- the task still runs, and is not run twice at a time. If that run turns out dead, the run time is
  claimed after all.

A dead run's window is run again with failover, and one that was handed over always, by any replica
that is well. Of a replica that is stopped, or without a server for long, nothing is expected until
it has had time to notice that this is over. An outage much shorter than the claim timeout costs
nothing, nor do late answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf

from apscheduler_tasklock.demo.history import Event
from apscheduler_tasklock.demo.judge import Finding
from tests.chaos.bounds import (
    ATTEMPT,
    BURST_REACTION,
    COMMIT,
    FREED,
    RECOVERY,
    SETTLING,
    UNDER_WAY,
)
from tests.chaos.plan import LATE_BY
from tests.chaos.records import ANY, BLIP, LATE, PATH, PROCESS, SLOW, UNABLE, Claim, Records
from tests.chaos.tasks import CLAIM_TIMEOUT, POLL_INTERVAL, ChaosTask

MISSED = "window missed"
SILENT = "lease too long"

# Seconds after a fire for which the server may be away without a missed window, because until the
# claim timeout there is time for an attempt that is under way, a pause, and another attempt.
PATIENCE = CLAIM_TIMEOUT / 2

# Seconds by which two readings of one run time may differ.
_SAME = 0.05


def check(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find windows that were missed, dead runs that were left, and claims without a run."""
    claims = records.claims[task.name]
    yield from _unclaimed(records, task, claims)
    yield from _misfired(records, task)
    if not task.once:
        yield from _silent(records, task)
    yield from _unrun(records, task, claims)
    yield from _left(records, task, claims)
    yield from _forgotten(records, task, claims)
    yield from _left_to_the_lease(records, task, claims)


def _unclaimed(records: Records, task: ChaosTask, claims: Sequence[Claim]) -> Iterator[Finding]:
    """Find run times that were given up, or nobody claimed while nothing stood against them."""
    for fire in records.fires[task.name]:
        answered = _answered_by(records, fire, task)
        if answered is None:
            continue
        # A one-off job is not missed if one replica gives up while answers are late and another one
        # claims it.
        if _gave_up(records, fire, answered) and not (task.once and claims):
            text = f"{fire.replica} was able to claim its run time {fire.due:.3f}, and skipped it"
            yield Finding(MISSED, task.name, fire.at, text)
        elif not any(_stands_against(records, claim, fire, task, answered) for claim in claims):
            text = (
                f"nobody claimed the run time {fire.due:.3f} of {fire.replica}, which was able to"
            )
            yield Finding(MISSED, task.name, fire.at, text)


def _gave_up(records: Records, fire: Event, answered: float) -> bool:
    """Tell whether a replica gave a fire up, and not because of what came later.

    A run time that was refused is claimed again if the holder dies, and that may fail in its turn.
    """
    for skip in records.skips[fire.task]:
        if skip.replica == fire.replica and abs(skip.due - fire.due) < _SAME:
            return skip.at <= answered or records.well(fire.replica, answered, skip.at, ANY)
    return False


def _misfired(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find misfires of replicas that were never stopped: no job here keeps others waiting."""
    for misfire in records.misfires[task.name]:
        life = records.lives.get(misfire.replica)
        if life is None or misfire.due < life.begun:
            continue  # due while it started
        since = max(life.begun, misfire.at - RECOVERY)
        if records.well(misfire.replica, since, misfire.at, PROCESS + SLOW):
            text = f"{misfire.replica} was never stopped, and took {misfire.due:.3f} for a misfire"
            yield Finding(MISSED, task.name, misfire.at, text)


def _answered_by(records: Records, fire: Event, task: ChaosTask) -> float | None:
    """Return by when a fire's claim must have been answered; ``None`` if that need not be.

    One that is due once may be late: no other one comes meanwhile, for which it is excused.
    """
    life = records.lives.get(fire.replica)
    slack = BURST_REACTION if task.once else 0.0
    unable, ever = (kinds.replace(SLOW, "") if task.once else kinds for kinds in (UNABLE, ANY))
    if life is None:
        return None
    since = max(life.begun, fire.at - RECOVERY)
    by = fire.at + records.reaction(fire.at) + slack
    if records.well(fire.replica, since, by, unable) and records.well(
        fire.replica, fire.at, by, ever
    ):
        return by
    # A claim is asked again until the replica reaches the server. A late answer counts.
    met = [
        trouble
        for trouble in records.troubles(fire.replica, PATH + LATE + BLIP)
        if trouble.begun <= by and trouble.ended >= since
    ]
    over = max([fire.at, *(trouble.ended for trouble in met)])
    away = max([fire.at, *(trouble.ended for trouble in met if trouble.kind != LATE)])
    by = over + RECOVERY + slack
    if away > fire.at + PATIENCE or not records.well(fire.replica, since, by, PROCESS):
        return None
    if any(trouble.kind == LATE for trouble in met):
        if away > fire.at:
            return None
        by = over + records.reaction(fire.at) + slack
        if over - LATE_BY > fire.at + CLAIM_TIMEOUT - ATTEMPT:
            return None
    return by if records.well(fire.replica, over + 1e-6, by, ever) else None


def _stands_against(
    records: Records,
    claim: Claim,
    fire: Event,
    task: ChaosTask,
    answered: float,
) -> bool:
    if claim.at > answered:
        return False
    asked = _asked(records, fire)
    if claim.over + COMMIT > asked:
        # The task runs; or its run is dead or handed over, which comes first, see `_forgotten`.
        return True
    return claim.kept and claim.window > fire.due - task.window - UNDER_WAY


def _asked(records: Records, fire: Event) -> float:
    """Return the earliest time at which a fire's claim may have been sent."""
    return min(fire.at, max(fire.due, fire.at - records.reaction(fire.at)))


def _silent(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find replicas whose scheduler stopped firing, except while an instance of the job ran."""
    longest = 2 * task.period + RECOVERY
    for replica, life in records.lives.items():
        if not records.runs_there(task.name, replica) or (task.exact and replica in records.far):
            continue
        fires = [e.at for e in records.fires[task.name] if e.replica == replica]
        marks = [life.begun, *sorted(fires), life.ended]
        runs = [run for run in records.runs[task.name] if run.replica == replica]
        for before, after in pairwise(marks):
            busy = [run.over for run in runs if run.begun < after]
            troubles = [trouble.ended for trouble in records.troubles(replica)]
            since = max([before, *(end for end in [*busy, *troubles] if before < end)])
            if after - since > longest:
                text = f"{replica} did not fire from {since:.3f} to {after:.3f}"
                yield Finding(MISSED, task.name, after, text)


def _unrun(records: Records, task: ChaosTask, claims: Sequence[Claim]) -> Iterator[Finding]:
    """Find claims that were released, as if their job had ended, and it had not.

    Without failover, a coroutine that a graceful stop cuts has had its only start.
    """
    begun = {run.token for run in records.runs[task.name]}
    ended = {run.token for run in records.runs[task.name] if run.ended is not None}
    for claim in claims:
        if claim.released == inf or claim.token in ended:
            continue
        told = records.leaving.get(claim.replica, inf)
        if claim.token in begun and not task.failover and claim.kept and told <= claim.released:
            continue
        if _is_claimed_again(records, claim, claims):
            continue
        text = f"{claim}, was released {claim.released:.3f} without a run to its end"
        yield Finding(MISSED, task.name, claim.released, text)


def _is_claimed_again(records: Records, given_back: Claim, claims: Sequence[Claim]) -> bool:
    """Tell whether a claim was released to be claimed again, as one that is answered too late."""
    by = given_back.released + records.reaction(given_back.released)
    return not given_back.kept and any(
        claim is not given_back
        and given_back.released <= claim.at <= by
        and abs(claim.window - given_back.window) < UNDER_WAY
        for claim in claims
    )


def _left(records: Records, task: ChaosTask, claims: Sequence[Claim]) -> Iterator[Finding]:
    """Find windows of dead runs, and windows that were handed over, that were not run again."""
    for claim in claims:
        after, is_handed_over = claim.after, claim.handed_over < inf
        if not task.failover and not is_handed_over:
            continue
        died = claim.handed_over if is_handed_over else claim.until
        how = "was handed over" if is_handed_over else "died"
        is_passed_over = after is not None and after.window != claim.window
        if after is not None and is_passed_over and after.at < min(claim.released, claim.given_up):
            if after.at < claim.run_until:
                text = f"{claim}, {how}, and {after}, was of another window"
                yield Finding(MISSED, task.name, after.at, text)
            continue
        left = _left_by(records, task, claim, claim.over)
        if left:
            text = f"{claim}, {how} {died:.3f}, and {left} was well and left it"
            yield Finding(MISSED, task.name, died, text)


def _left_by(records: Records, task: ChaosTask, claim: Claim, over: float) -> str | None:
    """Return a replica that had the time to run a window again, and did not."""
    for replica, life in records.lives.items():
        if not _knows(records, task, replica, claim.until):
            continue
        troubles = [trouble.ended for trouble in records.troubles(replica, ANY)]
        for since in [life.begun, *troubles]:
            by = _noticed_by(records, claim, since)
            if since < life.begun or by >= min(over, claim.run_until):
                continue
            if records.well(replica, since + 1e-6, by, ANY) and not _is_busy(
                records, task.name, replica, claim.until, by
            ):
                return replica
    return None


def _noticed_by(records: Records, claim: Claim, since: float) -> float:
    """Return by when a replica that is without trouble since then runs a claim's window again.

    Who was handed a window needs no grace: its holder said so. That its lease has ended needs one.
    """
    if claim.handed_over < inf:
        begun = max(since + RECOVERY, claim.handed_over)
    else:
        begun = max(since + SETTLING, claim.until)
    return begun + POLL_INTERVAL + records.reaction(begun)


def _knows(records: Records, task: ChaosTask, replica: str, at: float) -> bool:
    """Tell whether a replica has the job of a task; a one-off job only if it was due there."""
    if not records.runs_there(task.name, replica) or (task.exact and replica in records.far):
        return False
    one_off = records.one_offs.get(task.name)
    if one_off is None or one_off.cron:
        return True
    return any(fire.replica == replica and fire.at < at for fire in records.fires[task.name])


def _forgotten(records: Records, task: ChaosTask, claims: Sequence[Claim]) -> Iterator[Finding]:
    """Find run times that were refused because of a run that died, and that were not run then."""
    for number, claim in enumerate(claims):
        if claim.over <= claim.until and claim.handed_over == inf:
            continue  # it ended alive
        done = _done_by(task, claims[number:])
        for fire in records.fires[task.name]:
            if not claim.at < _asked(records, fire) < claim.over:
                continue
            if fire.due - task.window - UNDER_WAY < claim.window:
                continue  # it is the run's own window
            by = _believed_by(records, fire, done) + POLL_INTERVAL + records.reaction(fire.at)
            if (
                by < inf
                and records.well(fire.replica, fire.at - RECOVERY, by, ANY)
                and not _is_busy(records, task.name, fire.replica, fire.at, by)
                and not _is_claimed_by(by, fire, task, claims)
            ):
                text = (
                    f"the run time {fire.due:.3f} of {fire.replica} was refused because of {claim},"
                    f" which died {claim.until:.3f}, and was not claimed by {by:.3f}"
                )
                yield Finding(MISSED, task.name, fire.at, text)


def _done_by(task: ChaosTask, claims: Sequence[Claim]) -> float:
    """Return when a dead run stands against no claim any more, because it has been run again."""
    if not task.failover and claims[0].handed_over == inf:
        return claims[0].until
    again = [claim for claim in claims if claim.window == claims[0].window]
    return min(again[-1].released, again[-1].given_up)


def _believed_by(records: Records, fire: Event, done: float) -> float:
    """Return from when on a replica believes a run dead that was over at a time."""
    since = records.lives[fire.replica].begun if fire.replica in records.lives else inf
    ends = [trouble.ended for trouble in records.troubles(fire.replica, ANY)]
    return max([fire.at, done, *(end + SETTLING for end in [since, *ends] if end < fire.at)])


def _is_claimed_by(by: float, fire: Event, task: ChaosTask, claims: Sequence[Claim]) -> bool:
    return any(
        claim.at <= by and claim.window > fire.due - task.window - UNDER_WAY for claim in claims
    )


def _left_to_the_lease(
    records: Records, task: ChaosTask, claims: Sequence[Claim]
) -> Iterator[Finding]:
    """Find claims of broken pools that a replica that was well did not end.

    It may when all processes of the pool are dead.
    """
    for claim in claims:
        broke = records.pools.broke(claim.replica, claim.worker, claim.at)
        ended = min(claim.until, claim.over)
        if broke is None or broke > ended:
            continue
        dead = records.pools.dead(claim.replica, claim.worker, claim.at)
        by = records.able_by(claim.process, dead, FREED + records.reaction(dead))
        if ended > by and by < records.lives[claim.process].ended:
            text = f"{claim}, of a pool that was dead {dead:.3f}, stood until {ended:.3f}"
            yield Finding(SILENT, task.name, by, text)


def _is_busy(records: Records, task: str, replica: str, begun: float, ended: float) -> bool:
    """Tell whether it ran the task: an instance that is running may be all that is allowed."""
    return any(
        run.replica == replica and run.begun < ended and run.over > begun
        for run in records.runs[task]
    )
