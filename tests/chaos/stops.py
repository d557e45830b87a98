"""Graceful stops: whether they leave locks behind, or take too long."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from apscheduler_tasklock.demo.judge import Finding
from tests.chaos.bounds import BURST_REACTION, RECOVERY, SHUTDOWN
from tests.chaos.history import POOL
from tests.chaos.records import ANY, PROCESS, Records
from tests.chaos.stretch import Stretch
from tests.chaos.tasks import ChaosTask

STRANDED = "lock left behind"
SLOW_STOP = "slow stop"


def check(records: Records, task: ChaosTask) -> Iterator[Finding]:
    """Find locks that a replica held when it had ended as it was told to."""
    for claim in records.claims[task.name]:
        gone = records.gone.get(claim.replica)
        told = records.leaving.get(claim.replica)
        if gone is None or told is None or claim.at > gone:
            continue
        if min(claim.over, claim.handed_over, claim.lease_ended) <= gone or claim.until < told:
            continue
        # Only troubles count, and not its life, which ended on purpose. It was well when it last
        # wrote to its rows.
        end = Stretch(max(told - RECOVERY, records.wrote_before(claim.replica, gone)), gone)
        if not any(_meets(end, trouble) for trouble in records.troubles(claim.process, ANY)):
            text = f"{claim}, was held when its replica had ended, {gone:.3f}"
            yield Finding(STRANDED, task.name, gone, text)


def check_replicas(records: Records) -> Iterator[Finding]:
    """Find replicas that took longer to end than what they ran."""
    for replica, told in records.leaving.items():
        gone = records.gone.get(replica)
        if gone is None or replica.endswith(POOL):
            continue
        parts = [part for part in (replica, replica + POOL) if part in records.lives]
        ends = [
            run.over
            for runs in records.runs.values()
            for run in runs
            if run.replica in parts and run.over < inf
        ]
        # It may be told while it still starts.
        stretch = Stretch(max([told, records.lives[replica].begun, *ends]), gone)
        stopped = any(_meets(stretch, trouble) for trouble in records.troubles(replica, PROCESS))
        if gone - stretch.begun > len(parts) * SHUTDOWN + BURST_REACTION and not stopped:
            text = f"{replica} took {gone - stretch.begun:.3f} s after its last run"
            yield Finding(SLOW_STOP, "", gone, text)


def _meets(one: Stretch, other: Stretch) -> bool:
    # Being gone is a trouble as well; not one of those in which it ended.
    return one.begun <= other.ended and other.begun < one.ended
