"""Whose window a run was: its own, or one that a dead holder left."""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.finding import Finding
from tests.chaos.records import ANY, Claim, Records, Run
from tests.chaos.tasks import CLAIM_TIMEOUT, ChaosTask

RUN_TWICE = "window run twice"

# The database learns a run time as "now, minus so many seconds", and so places it later by as long
# as the claim was under way, in seconds.
UNDER_WAY = 0.05

# A lease is renewed when a third of it has passed. A holder that loses it was in trouble for most
# of the other two; this share of the lease leaves some for the ways to and fro.
TROUBLE_SHARE = 0.3

# Seconds that a statement waits for an answer that does not come: the library's share of the claim
# timeout.
ATTEMPT = CLAIM_TIMEOUT / 3

# Seconds after a trouble until a replica is well: an attempt that still waits for an answer, the
# next one, and the pause between them.
RECOVERY = 2 * ATTEMPT + 1.0


def check(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find windows that were run twice without a dead holder.

    A run owns its run time and the minimum lock after it. The next claim's run time is beyond that,
    or it takes the window over from a holder that died.
    """
    runs = {run.token: run for run in records.runs[task.name]}
    claims = records.claim_of[task.name]
    windows: dict[int, float] = {}
    for token in sorted({*runs, *claims}):
        run, claim, before = runs.get(token), claims.get(token), claims.get(token - 1)
        windows[token] = _window(run, claim, windows.get(token - 1))
        if run is not None and run.takeover:
            reason = _unfounded(records, task, before, claim)
            if reason:
                yield Finding(RUN_TWICE, task.name, run.begun, f"{run}, but {reason}")
        elif token - 1 in windows and _in_order(runs, claims, token):
            yield from _too_close(task, windows, before, run or claim)


def _in_order(runs: dict[int, Run], claims: dict[int, Claim], token: int) -> bool:
    """Tell whether a token came after the one before. Else it went back, and was found for that."""
    moments = [
        claims[number].at if number in claims else runs[number].begun
        for number in (token - 1, token)
    ]
    return moments[0] < moments[1]


def _window(run: Run | None, claim: Claim | None, before: float | None) -> float:
    """Return the run time of the window; of one taken over, what it was of the dead holder."""
    if run is not None:
        return before if run.takeover and before is not None else run.due
    assert claim is not None
    return claim.window  # its job never began


def _too_close(
    task: ChaosTask, windows: dict[int, float], before: Claim | None, run: Run | Claim | None
) -> Iterator[Finding]:
    assert run is not None
    # A run that raised, or that was given back, opens its window again, and that for half a window
    # before, where other replicas' run times of the same window may be.
    opened = before is not None and before.released is not None and not before.kept
    owned = -task.window / 2 if opened else task.window
    apart = windows[run.token] - windows[run.token - 1]
    if isinstance(run, Claim) and before is not None and run.window == before.window:
        return  # a takeover whose job never began
    if apart < owned - UNDER_WAY:
        at = run.begun if isinstance(run, Run) else run.at
        text = f"{run}, is of a run time {apart:.3f} s after that of the token before"
        yield Finding(RUN_TWICE, task.name, at, text)


def _unfounded(
    records: Records, task: ChaosTask, before: Claim | None, claim: Claim | None
) -> str | None:
    """Return why a takeover should not have been, or ``None``."""
    if task.failover is None:
        return "the task has no failover"
    if before is None or claim is None:
        return "there was nothing to take over"
    if before.released is not None and before.released <= claim.at:
        return f"{before}, was released {before.released:.3f}"
    if before.until > claim.at:
        return f"{before}, stood until {before.until:.3f}"
    return _alive(records, task, before, claim.at)


def _alive(records: Records, task: ChaosTask, before: Claim, at: float) -> str | None:
    """Return why a claim that has ended should not count as dead, or ``None``."""
    troubled = sum(
        stretch.shared_with(before.renewed, before.until)
        for stretch in records.troubles(before.replica)
    )
    if troubled < TROUBLE_SHARE * (before.until - before.renewed):
        return f"{before}, was not renewed after {before.renewed:.3f} by a replica without trouble"
    ended = [run.ended for run in records.runs[task.name] if run.token == before.token]
    able = records.well(before.replica, at - RECOVERY, at, ANY)
    if able and any(end is not None and end < at - RECOVERY for end in ended):
        return f"{before}, had ended, and its replica was able to release it"
    return None
