"""Who held a lock, and with which token: one at a time, and ever later ones."""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.finding import Finding
from tests.chaos.records import Records, Run
from tests.chaos.tasks import ChaosTask

OVERLAP = "overlap"
TOKEN_WENT_BACK = "token went back"
OLD_TOKEN_WRITTEN = "old token written"

# Seconds. A lock ends by the server's wall clock for who takes it next, and by the monotonic clock
# for its holder. The one may be slewed against the other by 500 ppm: 7.5 ms in the longest maximum
# lock here, of 15 s. Nothing else is tolerated: the order of two beliefs is certain.
SLEW = 0.008


def check(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find overlapping runs, tokens that went back, and writes with old tokens."""
    yield from _overlaps(records, task)
    yield from _tokens(records, task)
    yield from _writes(records, task)


def _believers(records: Records, task: ChaosTask) -> list[Run]:
    """Return the runs that were told at their begin that they held the lock."""
    return [run for run in records.runs[task.name] if run.believed is not None]


def _overlaps(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find runs that both believed at one moment.

    A lock that is lost stays so. So who was told at two moments that it was not held it, by its own
    belief, all the time between them.
    """
    last: Run | None = None
    for run in _believers(records, task):
        assert run.believed is not None
        if last is not None:
            assert last.believed is not None
            if run.begun + SLEW < last.believed:
                together = min(run.believed, last.believed) - run.begun
                text = f"{last} still held the lock when {run}, for {together:.3f} s"
                yield Finding(OVERLAP, task.name, run.begun, text)
            if last.believed > run.believed:
                continue
        last = run


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
