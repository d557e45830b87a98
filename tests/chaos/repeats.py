"""Whether each run was in its own window, or in that of a dead run or a hand-over."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf

from apscheduler_tasklock.demo.judge import Breach
from tests.chaos.bounds import ATTEMPT, RECOVERY, UNDER_WAY
from tests.chaos.plan import LATE_BY
from tests.chaos.records import ANY, PATH, PROCESS, UNABLE, Claim, Records, Run
from tests.chaos.tasks import ChaosTask

RUN_TWICE = "window run twice"

# The share of a lease for which a holder that loses it was in trouble. A lease is renewed after a
# third, so it is most of the other two thirds; the rest is left for the ways of statements.
TROUBLE_SHARE = 0.3


def check(records: Records, task: ChaosTask) -> Iterator[Breach]:
    """Find windows that were run twice without a dead holder.

    A run owns its run time and the minimum lock after it. The next claim's run time is beyond that,
    or it takes the window over from a holder that died, or that handed it over.
    """
    runs = {(run.replica, run.token): run for run in records.runs[task.name]}
    claims = records.claims[task.name]
    window: float | None = None
    for before, claim in pairwise([None, *claims]):
        assert claim is not None
        run = runs.get((claim.replica, claim.token))
        if claim.takes_over(before) or (run is not None and run.takeover):
            begun = claim.at if run is None else run.begun
            nothing = "there was nothing to take over"
            reason = nothing if before is None else _unfounded(records, task, before, claim)
            if reason:
                yield Breach(RUN_TWICE, task.name, begun, f"{run or claim}, but {reason}")
            continue
        own = claim.window if run is None else run.due
        if before is not None and window is not None:
            yield from _too_close(task, own - window, before, run or claim)
        window = own


def _too_close(task: ChaosTask, apart: float, before: Claim, run: Run | Claim) -> Iterator[Breach]:
    # A run that raised opens its window again, from half a window before, because there other
    # replicas' run times of the same window may be.
    owned = task.window if before.kept else -task.window / 2
    if apart < owned - UNDER_WAY:
        at = run.begun if isinstance(run, Run) else run.at
        text = f"{run}, is of a run time {apart:.3f} s after that of the token before"
        yield Breach(RUN_TWICE, task.name, at, text)


def _unfounded(records: Records, task: ChaosTask, before: Claim, claim: Claim) -> str | None:
    """Return why a takeover should not have been, or ``None``."""
    runs = [run for run in records.runs[task.name] if run.token == before.token]
    if before.released <= claim.at:
        return f"{before}, was released {before.released:.3f}"
    if before.run_until <= claim.at:
        return f"{before}, was to be given up: its maximum lock ended {before.run_until:.3f}"
    if before.handed_over <= claim.at:
        return _kept_back(task, before, claim.at, runs)
    if not task.failover:
        return "the task has no failover"
    return _alive(records, before, claim.at, runs)


def _kept_back(task: ChaosTask, before: Claim, at: float, runs: list[Run]) -> str | None:
    """Return why a claim should not have been handed over, or ``None``."""
    if any(run.ended is not None and run.ended <= at for run in runs):
        return f"{before}, had ended when it was handed over"
    if runs and not task.failover:
        return f"{before}, had begun, and the task has no failover"
    return None


def _alive(records: Records, before: Claim, at: float, runs: list[Run]) -> str | None:
    """Return why a claim that has ended should not count as dead, or ``None``."""
    pools, of = records.pools, (before.replica, before.worker, before.at)
    if pools.may_have_broken(*of) <= before.lease_ended < inf:
        return None  # because its replica ended the lease when the worker process was dead
    if pools.broken(*of).dead <= at:
        return None
    since, until = before.renewed, before.until
    # A renewal is given a third of the lease to be answered.
    unable = UNABLE if until - since < 3 * (LATE_BY + ATTEMPT) else PROCESS + PATH
    troubles = records.troubles(before.process, unable)
    troubled = sum(max(0.0, min(one.ended, until) - max(one.begun, since)) for one in troubles)
    if troubled < TROUBLE_SHARE * (until - since):
        return f"{before}, was not renewed after {since:.3f} by a replica without trouble"
    over = [run.ended for run in runs if run.over < inf]
    if records.well(before.replica, at - RECOVERY, at, ANY) and all(
        ended is not None and ended < at - RECOVERY for ended in over
    ):
        return f"{before}, was of a replica that was able to renew it, or to release it"
    return None
