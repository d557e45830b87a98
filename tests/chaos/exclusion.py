"""Who held a lock, and with which token: one at a time, and ever later ones.

In a worker process nobody tells a run that its lock is lost: it believes until its maximum lock has
ended, or its replica's own process is dead.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf

from apscheduler_tasklock.demo.judge import Breach, overlaps, went_back
from tests.chaos.bounds import BURST_REACTION, ORPHANED, RECOVERY
from tests.chaos.history import ALONE
from tests.chaos.records import LATE, PATH, PROCESS, STOPPED, Records, Run
from tests.chaos.tasks import ChaosTask

OVERLAP = "overlap"
TOKEN_WENT_BACK = "token went back"
OUTLIVED = "run outlived its lock"

# Seconds by which times of the server's wall clock and of the monotonic clock may be in the wrong
# order, because one may be slewed against the other by 500 ppm, which is 7.5 ms in 15 s.
SLEW = 0.008


def check(records: Records, task: ChaosTask) -> Iterator[Breach]:
    """Find overlapping claims and runs, and tokens that went back."""
    yield from _granted_twice(records, task)
    yield from _overlaps(records, task)
    yield from _outlived(records, task)
    yield from _tokens(records, task)


def _believers(records: Records, task: ChaosTask) -> list[Run]:
    """Return the runs that were told at their begin that they held the lock."""
    return [run for run in records.runs[task.name] if run.believed is not None]


def _granted_twice(records: Records, task: ChaosTask) -> Iterator[Breach]:
    """Find claims that were granted while the one before stood."""
    for before, claim in pairwise(records.claims[task.name]):
        ends = (before.released, before.handed_over, before.given_up, before.until)
        if min(ends) > claim.at + SLEW:
            text = f"{claim}, while {before}, stood until {before.until:.3f}"
            yield Breach(OVERLAP, task.name, claim.at, text)


def _overlaps(records: Records, task: ChaosTask) -> Iterator[Breach]:
    """Find two runs that believed at one moment that they held the lock, if the first could know.

    A lock that is lost stays so. So who was told at two moments that it was not held it, by its own
    belief, all the time between them.
    """

    def is_excused(earlier: Run, _later: Run) -> bool:
        return _had_no_answer(records, task, earlier)

    believers = _believers(records, task)
    for earlier, run in overlaps(believers, is_excused, lambda run: _belief(run) - SLEW):
        together = min(_belief(run), _belief(earlier)) - run.begun
        text = f"{earlier} still held the lock when {run}, for {together:.3f} s"
        yield Breach(OVERLAP, task.name, run.begun, text)


def _belief(run: Run) -> float:
    assert run.believed is not None
    return run.believed


def _had_no_answer(records: Records, task: ChaosTask, run: Run) -> bool:
    """Tell whether a run may not know yet that its lock was lost.

    A lease that has ended is no loss: the renewal that revives it, or finds another claim, tells.
    So a holder that was stopped, or cut off, believes until its next renewal is answered. That
    renewal is due at once when the trouble is over, a third of the lease after the one before; it
    may have to wait for an attempt that still waits for an answer, and be sent again. A run in a
    worker process does not learn it at all, if its replica's own process was not able to renew.
    """
    until = _belief(run)
    since = until - max(RECOVERY, task.lease / 3 + BURST_REACTION)
    if run.worker:
        if _outlived_at(records, task, run) is not None:
            return False
        if claim := records.claim_of[task.name].get(run.token):
            since, until = claim.renewed, claim.until
    troubles = records.troubles(run.process, PROCESS + PATH + LATE)
    return any(trouble.meets(since, until) for trouble in troubles)


def _outlived(records: Records, task: ChaosTask) -> Iterator[Breach]:
    """Find runs in worker processes that went on, or believed in their lock, for too long."""
    for run in records.runs[task.name]:
        at = _outlived_at(records, task, run) if run.worker else None
        if at is not None:
            text = f"{run}, went on until {at:.3f}, which was to end with its lock or its replica"
            yield Breach(OUTLIVED, task.name, at, text)


def _outlived_at(records: Records, task: ChaosTask, run: Run) -> float | None:
    """Return a time at which a run in a worker process went on although it had to be over.

    Its lock is lost at the end of its maximum lock. When its replica's own process is dead, it is
    lost at once; with failover the worker process ends, so that the run does not go on either.
    """
    claim = records.claim_of[task.name].get(run.token)
    run_until = inf if claim is None else claim.run_until
    if run.believed is not None and run.believed > run_until + SLEW:
        return run.believed
    orphaned = records.when("killed", ALONE).get(run.process)
    went_on = run.seen if task.failover else run.believed
    if orphaned is None or went_on is None:
        return None
    by = records.able_by(run.replica, orphaned, ORPHANED, STOPPED, 0.0, run.worker)
    return went_on if went_on > by else None


def _tokens(records: Records, task: ChaosTask) -> Iterator[Breach]:
    """Find tokens that do not grow from one holder to the next.

    Runs that were told at their begin that the lock is lost may begin in any order.
    """
    told = ((run.token, run) for run in _believers(records, task))
    for last, run in went_back(told):
        yield Breach(TOKEN_WENT_BACK, task.name, run.begun, f"after {last} came {run}")
