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
from apscheduler_tasklock.demo.judge import Breach
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
# The same for answers that are late: the last attempt in the claim timeout is answered, too.
LATE_PATIENCE = CLAIM_TIMEOUT - ATTEMPT + LATE_BY

# Seconds by which two readings of one run time may differ.
_SAME = 0.05


def check(records: Records, task: ChaosTask) -> Iterator[Breach]:
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


def _unclaimed(records: Records, task: ChaosTask, claims: Sequence[Claim]) -> Iterator[Breach]:
    """Find run times that were given up, or nobody claimed while nothing stood against them."""
    for fire in records.told("fire", task.name):
        answered = _answered_by(records, fire, task)
        if answered is None:
            continue
        # A one-off job is not missed if one replica gives up while answers are late and another one
        # claims it.
        if _gave_up(records, fire, answered) and not (task.once and claims):
            text = f"{fire.replica} was able to claim its run time {fire.due:.3f}, and skipped it"
            yield Breach(MISSED, task.name, fire.at, text)
        elif not any(_stands_against(records, claim, fire, task, answered) for claim in claims):
            text = (
                f"nobody claimed the run time {fire.due:.3f} of {fire.replica}, which was able to"
            )
            yield Breach(MISSED, task.name, fire.at, text)


def _gave_up(records: Records, fire: Event, answered: float) -> bool:
    """Tell whether a replica gave a fire up, and not because of what came later.

    A run time that was refused is claimed again if the holder dies, and that may fail in its turn.
    """
    return any(
        skip.at <= answered or records.well(fire.replica, answered, skip.at, ANY)
        for skip in records.told("skipped", fire.task)
        if skip.replica == fire.replica and abs(skip.due - fire.due) < _SAME
    )


def _misfired(records: Records, task: ChaosTask) -> Iterator[Breach]:
    """Find misfires of replicas that were never stopped: no job here keeps others waiting."""
    for misfire in records.told("misfired", task.name):
        life = records.lives.get(misfire.replica)
        if life is None or misfire.due < life.begun:
            continue  # due while it started
        since = max(life.begun, misfire.at - RECOVERY)
        if records.well(misfire.replica, since, misfire.at, PROCESS + SLOW):
            text = f"{misfire.replica} was never stopped, and took {misfire.due:.3f} for a misfire"
            yield Breach(MISSED, task.name, misfire.at, text)


def _answered_by(records: Records, fire: Event, task: ChaosTask) -> float | None:
    """Return by when a fire's claim must have been answered; ``None`` if that need not be.

    One that is due once may be late: no other one comes meanwhile, for which it is excused.
    """
    if (life := records.lives.get(fire.replica)) is None:
        return None
    slack = BURST_REACTION if task.once else 0.0
    unable, ever = (kinds.replace(SLOW, "") if task.once else kinds for kinds in (UNABLE, ANY))
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
        if trouble.meets(since, by)
    ]
    over = max([fire.at, *(trouble.ended for trouble in met)])
    is_late = any(trouble.kind == LATE for trouble in met)
    is_away = any(trouble.ended > fire.at for trouble in met if trouble.kind != LATE)
    patience, takes = PATIENCE, RECOVERY
    if is_late:
        patience, takes = LATE_PATIENCE, records.reaction(fire.at)
    by = over + takes + slack
    if (is_late and is_away) or over > fire.at + patience:
        return None
    is_well = records.well(fire.replica, since, by, PROCESS)
    return by if is_well and records.well(fire.replica, over + 1e-6, by, ever) else None


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
    return float(min(fire.at, max(fire.due, fire.at - records.reaction(fire.at))))


def _silent(records: Records, task: ChaosTask) -> Iterator[Breach]:
    """Find replicas whose scheduler stopped firing, except while an instance of the job ran."""
    longest = 2 * task.period + RECOVERY
    for replica, life in records.lives.items():
        if not records.has_job(task, replica):
            continue
        fires = [fire.at for fire in records.told("fire", task.name) if fire.replica == replica]
        runs = [run for run in records.runs[task.name] if run.replica == replica]
        troubles = [trouble.ended for trouble in records.troubles(replica)]
        for before, after in pairwise([life.begun, *fires, life.ended]):
            ends = [*troubles, *(run.over for run in runs if run.begun < after)]
            since = max([before, *ends])
            if after - since > longest:
                text = f"{replica} did not fire from {since:.3f} to {after:.3f}"
                yield Breach(MISSED, task.name, after, text)


def _unrun(records: Records, task: ChaosTask, claims: Sequence[Claim]) -> Iterator[Breach]:
    """Find claims that were released, as if their job had ended, and it had not.

    Without failover, a coroutine that a graceful stop cuts has had its only start.
    """
    begun = {run.token for run in records.runs[task.name]}
    ended = {run.token for run in records.runs[task.name] if run.ended is not None}
    for claim in claims:
        if claim.released == inf or claim.token in ended:
            continue
        is_leaving = records.leaving.get(claim.replica, inf) <= claim.released
        if claim.token in begun and not task.failover and claim.kept and is_leaving:
            continue
        if not _is_claimed_again(records, claim, claims):
            text = f"{claim}, was released {claim.released:.3f} without a run to its end"
            yield Breach(MISSED, task.name, claim.released, text)


def _is_claimed_again(records: Records, given_back: Claim, claims: Sequence[Claim]) -> bool:
    """Tell whether a claim was released to be claimed again, as one that is answered too late."""
    by = given_back.released + records.reaction(given_back.released)
    return not given_back.kept and any(
        claim is not given_back
        and given_back.released <= claim.at <= by
        and abs(claim.window - given_back.window) < UNDER_WAY
        for claim in claims
    )


def _left(records: Records, task: ChaosTask, claims: Sequence[Claim]) -> Iterator[Breach]:
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
                yield Breach(MISSED, task.name, after.at, text)
            continue
        if left := _left_by(records, task, claim):
            text = f"{claim}, {how} {died:.3f}, and {left} was well and left it"
            yield Breach(MISSED, task.name, died, text)


def _left_by(records: Records, task: ChaosTask, claim: Claim) -> str | None:
    """Return a replica that had the time to run a window again, and did not.

    That a lease has ended needs a grace. A window that was handed over needs none: its holder said
    so.
    """
    recovery = RECOVERY if claim.handed_over < inf else SETTLING
    for replica, life in records.lives.items():
        since = max(claim.until, life.begun + recovery)
        by = records.able_by(replica, since, POLL_INTERVAL, ANY, recovery)
        if (
            by < min(claim.over, claim.run_until, life.ended)
            and _knows(records, task, replica, claim.until)
            and not _is_busy(records, task.name, replica, claim.until, by)
        ):
            return replica
    return None


def _knows(records: Records, task: ChaosTask, replica: str, at: float) -> bool:
    """Tell whether a replica has the job of a task; a one-off job only if it has asked for it."""
    one_off = records.one_offs.get(task.name)
    if one_off is None or one_off.cron:
        return records.has_job(task, replica)
    fires, misfires = (records.told(kind, task.name) for kind in ("fire", "misfired"))
    has_fired = any(fire.replica == replica and fire.at < at for fire in fires)
    has_missed = any(misfire.replica == replica and misfire.at < at for misfire in misfires)
    return has_fired and not has_missed and records.has_job(task, replica)


def _forgotten(records: Records, task: ChaosTask, claims: Sequence[Claim]) -> Iterator[Breach]:
    """Find run times that were refused because of a run that died, and that were not run then."""
    for number, claim in enumerate(claims):
        if claim.has_ended_alive:
            continue
        done = claim.until
        if task.failover or claim.handed_over < inf:  # it is run again before
            again = [later for later in claims[number:] if later.window == claim.window]
            done = min(again[-1].released, again[-1].given_up)
        for fire in records.told("fire", task.name):
            if not claim.at < _asked(records, fire) < claim.over:
                continue
            if fire.due - task.window - UNDER_WAY < claim.window:
                continue  # it is the run's own window
            by = _asked_again_by(records, fire, done, claims[number + 1 :])
            if (
                by is not None
                and records.well(fire.replica, fire.at - RECOVERY, by, ANY)
                and not _is_busy(records, task.name, fire.replica, fire.at, by)
                and not _is_claimed_by(by, fire, task, claims)
            ):
                text = (
                    f"the run time {fire.due:.3f} of {fire.replica} was refused because of {claim},"
                    f" which died {claim.until:.3f}, and was not claimed by {by:.3f}"
                )
                yield Breach(MISSED, task.name, fire.at, text)


def _asked_again_by(
    records: Records, fire: Event, done: float, later: Sequence[Claim]
) -> float | None:
    """Return by when a run time must be claimed that was refused because of a run that died.

    Another replica may have an earlier run time in mind, which goes first. If its run dies, too,
    the run time is claimed after that, and else not at all: ``None``.

    :param done: when the run that died was over
    :param later: the claims after it
    """
    takes = POLL_INTERVAL + records.reaction(fire.at)
    by = max(fire.at, done) + takes
    for claim in later:
        if claim.at <= by < claim.over:
            if claim.has_ended_alive:
                return None
            by = max(by, claim.until + takes)
    return by


def _is_claimed_by(by: float, fire: Event, task: ChaosTask, claims: Sequence[Claim]) -> bool:
    return any(
        claim.at <= by and claim.window > fire.due - task.window - UNDER_WAY for claim in claims
    )


def _left_to_the_lease(
    records: Records, task: ChaosTask, claims: Sequence[Claim]
) -> Iterator[Breach]:
    """Find claims of broken pools that a replica that was well did not end.

    It may when all processes of the pool are dead.
    """
    for claim in claims:
        pool = records.pools.broken(claim.replica, claim.worker, claim.at)
        ended = min(claim.until, claim.over)
        by = records.able_by(claim.process, pool.dead, FREED)
        if pool.broke <= ended and by < min(ended, records.lives[claim.process].ended):
            text = f"{claim}, of a pool that was dead {pool.dead:.3f}, stood until {ended:.3f}"
            yield Breach(SILENT, task.name, by, text)


def _is_busy(records: Records, task: str, replica: str, begun: float, ended: float) -> bool:
    """Tell whether it ran the task: an instance that is running may be all that is allowed."""
    return any(
        run.replica == replica and run.begun < ended and run.over > begun
        for run in records.runs[task]
    )
