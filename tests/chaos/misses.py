"""Windows that nobody ran while a replica lived that should have.

A run time of a replica that is well is run, unless

- its window is owned by another run time, or a later one was claimed before: the row remembers the
  last window only;
- the task still runs, and is not run twice at a time;
- a dead run stands before it, which is run again first.

Of a replica that is stopped, or without a server for long, nothing is expected until it has had
time to notice that this is over. An outage much shorter than the claim timeout costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from math import inf

from tests.chaos.finding import Finding
from tests.chaos.history import Event
from tests.chaos.records import ANY, BLIP, PATH, PROCESS, Claim, Records
from tests.chaos.repeats import ATTEMPT, RECOVERY, UNDER_WAY
from tests.chaos.tasks import CLAIM_TIMEOUT, ChaosTask

MISSED = "window missed"

# Seconds within which a replica that is well claims a run time, on a busy machine.
REACTION = 1.0

# Seconds after a fire for which the server may be away without that costing anything: until the
# claim timeout there is time for an attempt that is under way, a pause, and another attempt.
PATIENCE = CLAIM_TIMEOUT / 2

# Seconds after a trouble, however short, until a replica believes that a holder is dead: an attempt
# and 2.5 s, for releases that are owed to arrive.
SETTLING = ATTEMPT + 2.5 + 0.5

# Seconds after the end of a lease at which a replica that was refused looks whether it was renewed.
WATCHING = 0.3

# Seconds. What one reckons a run time to be at two moments differs by less.
_SAME = 0.05


def check(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find windows that were missed, dead runs that were left, and claims without a run."""
    claims = records.claims[task.name]
    yield from _unclaimed(records, task, claims)
    yield from _silent(records, task)
    yield from _unrun(records, task, claims)
    if task.failover is not None:
        yield from _left_dead(records, task, claims)


def _unclaimed(records: Records, task: ChaosTask, claims: Sequence[Claim]) -> Iterator[Finding]:
    """Find run times that were given up, or nobody claimed while nothing stood against them."""
    for fire in records.fires:
        if fire.task != task.name:
            continue
        answered = _answered_by(records, fire)
        if answered is None:
            continue
        if _gave_up(records, fire, answered):
            text = f"{fire.replica} was able to claim its run time {fire.due:.3f}, and skipped it"
            yield Finding(MISSED, task.name, fire.at, text)
        elif not any(
            _stands_against(claim, after, fire, task, answered)
            for claim, after in zip_longest(claims, claims[1:])
        ):
            text = (
                f"nobody claimed the run time {fire.due:.3f} of {fire.replica}, which was able to"
            )
            yield Finding(MISSED, task.name, fire.at, text)


def _gave_up(records: Records, fire: Event, answered: float) -> bool:
    """Tell whether a replica gave a fire up, and not because of what came later.

    A run time that was refused is claimed again if the holder dies, and that may fail in its turn.
    """
    for skip in records.skips:
        assert skip.due is not None
        assert fire.due is not None
        same = (skip.replica, skip.task) == (fire.replica, fire.task)
        if same and abs(skip.due - fire.due) < _SAME:
            return skip.at <= answered or records.well(fire.replica, answered, skip.at, ANY)
    return False


def _answered_by(records: Records, fire: Event) -> float | None:
    """Return by when a fire's claim must have been answered; ``None`` if that need not be."""
    life = records.lives.get(fire.replica)
    if life is None:
        return None
    since = max(life.begun, fire.at - RECOVERY)
    by = fire.at + REACTION
    if records.well(fire.replica, since, by) and records.well(fire.replica, fire.at, by, ANY):
        return by
    # It is asked again until the replica reaches the server.
    paths = [
        trouble.ended
        for trouble in records.troubles(fire.replica, PATH + BLIP)
        if trouble.begun <= by and trouble.ended >= since
    ]
    over = max([fire.at, *paths])
    by = over + RECOVERY
    if over > fire.at + PATIENCE or not records.well(fire.replica, since, by, PROCESS):
        return None
    return by if records.well(fire.replica, over + 1e-6, by, ANY) else None


def _stands_against(
    claim: Claim, after: Claim | None, fire: Event, task: ChaosTask, answered: float
) -> bool:
    assert fire.due is not None
    if claim.at > answered:
        return False
    # A fire is told of when a worker has it already.
    asked = max(fire.due, fire.at - REACTION)
    ends = [claim.released, None if after is None else after.at]
    if all(end is None or end > asked for end in ends):
        # It runs. Or it is dead: then it is run again first, or is over for good.
        return task.failover is not None or claim.until > asked
    return claim.kept and claim.window > fire.due - task.window - UNDER_WAY


def _silent(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find replicas whose scheduler stopped firing, except while an instance of the job ran."""
    longest = 2 * task.period + RECOVERY
    for replica, life in records.lives.items():
        fires = [e.at for e in records.fires if (e.replica, e.task) == (replica, task.name)]
        marks = [life.begun, *sorted(fires), life.ended]
        runs = [run for run in records.runs[task.name] if run.replica == replica]
        for before, after in pairwise(marks):
            busy = [run.ended or after for run in runs if run.begun < after]
            troubles = [trouble.ended for trouble in records.troubles(replica)]
            since = max([before, *(end for end in [*busy, *troubles] if before < end)])
            if after - since > longest:
                text = f"{replica} did not fire from {since:.3f} to {after:.3f}"
                yield Finding(MISSED, task.name, after, text)


def _unrun(records: Records, task: ChaosTask, claims: Sequence[Claim]) -> Iterator[Finding]:
    """Find windows that were released as done, and were not."""
    ended = {run.token for run in records.runs[task.name] if run.ended is not None}
    for claim in claims:
        if claim.released is not None and claim.kept and claim.token not in ended:
            text = f"{claim}, was released {claim.released:.3f} without a run to its end"
            yield Finding(MISSED, task.name, claim.released, text)


def _left_dead(records: Records, task: ChaosTask, claims: Sequence[Claim]) -> Iterator[Finding]:
    """Find dead runs that were not run again."""
    for claim, after in zip_longest(claims, claims[1:]):
        over = inf if claim.released is None else claim.released
        if after is not None:
            over = min(over, after.at)
        if after is not None and over == after.at and after.window != claim.window:
            text = f"{claim}, died, and {after}, was of another window"
            yield Finding(MISSED, task.name, after.at, text)
        left = _left_by(records, task, claim.until, over) or _unwatched_by(records, claim, over)
        if left:
            text = f"{claim}, died {claim.until:.3f}, and {left} was well and left it"
            yield Finding(MISSED, task.name, claim.until, text)


def _left_by(records: Records, task: ChaosTask, died: float, over: float) -> str | None:
    """Return a replica that had the time to run a dead run's window again, and did not."""
    takes = SETTLING + task.period + REACTION
    for replica, life in records.lives.items():
        ends = [stretch.ended for stretch in records.troubles(replica, ANY)]
        for since in [life.begun, died - SETTLING, *ends]:
            start = max(since, died - SETTLING, life.begun)
            if start + takes >= over or not records.well(replica, start + 1e-6, start + takes, ANY):
                continue
            if not _is_busy(records, task.name, replica, start, start + takes):
                return replica
    return None


def _unwatched_by(records: Records, claim: Claim, over: float) -> str | None:
    """Return a replica that was refused because of a run that died, and did not watch it."""
    by = claim.until + WATCHING + REACTION
    if over <= by:
        return None
    for fire in records.fires:
        if fire.task != claim.task or not claim.at < fire.at < claim.until - REACTION:
            continue
        if _is_busy(records, claim.task, fire.replica, fire.at, by):
            continue
        settled = min(fire.at, claim.until - SETTLING)
        answered = records.well(fire.replica, fire.at - RECOVERY, by)
        if answered and records.well(fire.replica, settled, by, ANY):
            return fire.replica
    return None


def _is_busy(records: Records, task: str, replica: str, begun: float, ended: float) -> bool:
    """Tell whether it ran the task: an instance that is running may be all that is allowed."""
    return any(
        run.replica == replica and run.begun < ended and (run.ended or ended) > begun
        for run in records.runs[task]
    )
