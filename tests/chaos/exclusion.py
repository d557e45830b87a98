"""Who held a lock, and with which token: one at a time, and ever later ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from tests.chaos.bounds import BURST_REACTION, RECOVERY
from tests.chaos.finding import Finding
from tests.chaos.records import LATE, PATH, PROCESS, Records, Run
from tests.chaos.tasks import ChaosTask

OVERLAP = "overlap"
TOKEN_WENT_BACK = "token went back"
OLD_TOKEN_WRITTEN = "old token written"

# Seconds. A moment of the server's wall clock and one of the monotonic clock may be read in the
# wrong order: the one may be slewed against the other by 500 ppm, 7.5 ms in 15 s.
SLEW = 0.008


def check(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find overlapping claims and runs, tokens that went back, and writes with old tokens."""
    yield from _granted_twice(records, task)
    yield from _overlaps(records, task)
    yield from _tokens(records, task)
    yield from _writes(records, task)


def _believers(records: Records, task: ChaosTask) -> list[Run]:
    """Return the runs that were told at their begin that they held the lock."""
    return [run for run in records.runs[task.name] if run.believed is not None]


def _granted_twice(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find claims that were granted while the one before stood."""
    for before, claim in pairwise(records.claims[task.name]):
        ends = (before.released, before.handed_over, before.given_up, before.until)
        if min(end for end in ends if end is not None) > claim.at + SLEW:
            text = f"{claim}, while {before}, stood until {before.until:.3f}"
            yield Finding(OVERLAP, task.name, claim.at, text)


def _overlaps(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find runs that both believed at one moment, of which the first had the time to learn better.

    A lock that is lost stays so. So who was told at two moments that it was not held it, by its own
    belief, all the time between them.
    """
    last: Run | None = None
    for run in _believers(records, task):
        assert run.believed is not None
        if last is not None:
            assert last.believed is not None
            if run.begun + SLEW < last.believed and not _had_no_answer(records, task, last):
                together = min(run.believed, last.believed) - run.begun
                text = f"{last} still held the lock when {run}, for {together:.3f} s"
                yield Finding(OVERLAP, task.name, run.begun, text)
            if last.believed > run.believed:
                continue
        last = run


def _had_no_answer(records: Records, task: ChaosTask, run: Run) -> bool:
    """Tell whether a run that last believed may not have learned yet that its lock was lost.

    A lease that has ended is no loss: the renewal that revives it, or finds another claim, tells.
    So a holder that was stopped, or cut off, believes until its next renewal is answered. That
    renewal is due at once when the trouble is over, a third of the lease after the one before; it
    may have to wait for an attempt that still waits for an answer, and be sent again. A worker
    process renews by itself, whatever becomes of its replica's process and of other workers.
    """
    assert run.believed is not None
    bound = max(RECOVERY, task.lease / 3 + BURST_REACTION)
    return any(
        trouble.begun <= run.believed and trouble.ended >= run.believed - bound
        for trouble in records.troubles(run.holder, PROCESS + PATH + LATE)
    )


def _tokens(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find tokens that do not grow from one holder to the next.

    Runs that were told at their begin that the lock is lost may begin in any order.
    """
    last: Run | None = None
    for run in _believers(records, task):
        if last is not None and run.token <= last.token:
            yield Finding(TOKEN_WENT_BACK, task.name, run.begun, f"after {last} came {run}")
        else:
            last = run


def _writes(records: Records, task: ChaosTask) -> Iterator[Finding]:
    newest = 0
    for write in records.writes[task.name]:
        if write.token < newest:
            text = f"{write.replica} wrote with token {write.token} after {newest} was written"
            yield Finding(OLD_TOKEN_WRITTEN, task.name, write.at, text)
        newest = max(newest, write.token)
