"""Windows that nobody ran while a replica lived that should have.

A run time of a replica that is well is run, unless

- its window is owned by another run time, or a later one was claimed before: the row remembers the
  last window only;
- the task still runs, and is not run twice at a time;
- a dead run stands before it, which is run again first.

Of a replica that is stopped, cut off or without a server, nothing is expected until it has had time
to notice that this is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest

from tests.chaos.finding import Finding
from tests.chaos.history import Event
from tests.chaos.records import Claim, Records
from tests.chaos.repeats import UNDER_WAY
from tests.chaos.tasks import CLAIM_TIMEOUT, ChaosTask

MISSED = "window missed"

# Seconds that a statement waits for an answer that does not come: the library's share of the claim
# timeout.
ATTEMPT = CLAIM_TIMEOUT / 3

# Seconds within which a replica that is well claims a run time, on a busy machine.
REACTION = 1.0

# Seconds after a trouble until a replica is well: an attempt that still waits for an answer, the
# next one, and the pause between them.
RECOVERY = 2 * ATTEMPT + 1.0

# Seconds after a trouble, however short, until a replica believes that a holder is dead: an attempt
# and 2.5 s, for releases that are owed to arrive.
SETTLING = ATTEMPT + 2.5 + 0.5


def check(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find windows that were missed, dead runs that were left, and claims without a run."""
    claims = records.claims[task.name]
    yield from _unclaimed(records, task, claims)
    yield from _silent(records, task)
    yield from _unrun(records, task, claims)
    if task.failover is not None:
        yield from _left_dead(records, task, claims)


def _unclaimed(records: Records, task: ChaosTask, claims: Sequence[Claim]) -> Iterator[Finding]:
    """Find run times that nobody claimed, and that nothing stood against."""
    for fire in records.fires:
        begun, ended = fire.at - RECOVERY, fire.at + REACTION
        if fire.task != task.name or not _was_well(records, fire.replica, begun, ended):
            continue
        if not any(_stands_against(claim, fire, task) for claim in claims):
            text = f"nobody claimed the run time {fire.due:.3f} of {fire.replica}, which was well"
            yield Finding(MISSED, task.name, fire.at, text)


def _was_well(records: Records, replica: str, begun: float, ended: float) -> bool:
    """Tell whether it was well, as far back as it lives."""
    life = records.lives.get(replica)
    if life is None:
        return False
    if not records.well(replica, max(begun, life.begun), ended):
        return False
    return records.well(replica, ended - REACTION, ended, blips=True)


def _stands_against(claim: Claim, fire: Event, task: ChaosTask) -> bool:
    assert fire.due is not None
    if claim.at > fire.at + REACTION:
        return False
    if claim.released is None or claim.released > fire.at:
        # It runs. Or it is dead: then it is run again first, or is over for good.
        return task.failover is not None or claim.until > fire.at
    return claim.kept and claim.window > fire.due - task.window - UNDER_WAY


def _silent(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find replicas whose scheduler stopped firing."""
    longest = 2 * task.period + max(task.takes) + RECOVERY
    for replica, life in records.lives.items():
        fires = [e.at for e in records.fires if (e.replica, e.task) == (replica, task.name)]
        marks = [life.begun, *sorted(fires), life.ended]
        for before, after in pairwise(marks):
            troubles = [s.ended for s in records.troubles(replica) if s.begun < after]
            silent_since = max([before, *(end for end in troubles if end > before)])
            if after - silent_since > longest:
                text = f"{replica} did not fire from {silent_since:.3f} to {after:.3f}"
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
        over = min(
            [moment for moment in (claim.released, after and after.at) if moment is not None],
            default=float("inf"),
        )
        if not claim.is_dead(claim.until):
            continue
        if after is not None and over == after.at and after.window != claim.window:
            text = f"{claim}, died, and {after}, was of another window"
            yield Finding(MISSED, task.name, after.at, text)
        left = _left_by(records, task, claim.until, over)
        if left:
            text = f"{claim}, died {claim.until:.3f}, and {left} was well and left it"
            yield Finding(MISSED, task.name, claim.until, text)


def _left_by(records: Records, task: ChaosTask, died: float, over: float) -> str | None:
    """Return a replica that had the time to run a dead run's window again, and did not."""
    takes = SETTLING + task.period + REACTION
    for replica, life in records.lives.items():
        ends = [stretch.ended for stretch in records.troubles(replica, blips=True)]
        for since in [life.begun, died - SETTLING, *ends]:
            start = max(since, died - SETTLING, life.begun)
            if start + takes >= over or not records.well(
                replica, start + 1e-6, start + takes, blips=True
            ):
                continue
            if not _is_busy(records, task, replica, start, start + takes):
                return replica
    return None


def _is_busy(records: Records, task: ChaosTask, replica: str, begun: float, ended: float) -> bool:
    """Tell whether it ran the task: an instance that is running may be all that is allowed."""
    return any(
        run.replica == replica and run.begun < ended and (run.ended or ended) > begun
        for run in records.runs[task.name]
    )
