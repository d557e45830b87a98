"""Graceful stops: whether they leave locks behind, or take too long."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from apscheduler_tasklock.demo.judge import Breach
from tests.chaos.bounds import BURST_REACTION, RECOVERY, SHUTDOWN
from tests.chaos.history import POOL
from tests.chaos.records import ANY, PROCESS, Records
from tests.chaos.tasks import ChaosTask

STRANDED = "lock left behind"
SLOW_STOP = "slow stop"


def check(records: Records, task: ChaosTask) -> Iterator[Breach]:
    """Find locks that a replica held when it had ended as it was told to."""
    ended = records.when("gone")
    for claim in records.claims[task.name]:
        gone, told = ended.get(claim.replica), records.leaving.get(claim.replica)
        if gone is None or told is None or claim.at > gone:
            continue
        if min(claim.over, claim.handed_over, claim.lease_ended) <= gone or claim.until < told:
            continue
        # It was well when it last wrote to its rows.
        since = max(told - RECOVERY, records.wrote_before(claim.replica, gone))
        if not _was_in_trouble(records, claim.process, since, gone, ANY):
            text = f"{claim}, was held when its replica had ended, {gone:.3f}"
            yield Breach(STRANDED, task.name, gone, text)


def check_replicas(records: Records) -> Iterator[Breach]:
    """Find replicas that took longer to end than what they ran."""
    for replica, gone in records.when("gone").items():
        if replica not in records.leaving or replica.endswith(POOL):
            continue
        parts = [part for part in (replica, replica + POOL) if part in records.lives]
        runs = [run for runs in records.runs.values() for run in runs if run.replica in parts]
        # It may be told while it still starts.
        begun = max(records.leaving[replica], records.lives[replica].begun)
        since = max([begun, *(run.over for run in runs if run.over < inf)])
        limit = len(parts) * SHUTDOWN + BURST_REACTION
        if gone - since > limit and not _was_in_trouble(records, replica, since, gone, PROCESS):
            text = f"{replica} took {gone - since:.3f} s after its last run"
            yield Breach(SLOW_STOP, "", gone, text)


def _was_in_trouble(records: Records, replica: str, since: float, gone: float, kinds: str) -> bool:
    """Tell whether a replica was in trouble as it ended, other than that it was gone."""
    troubles = records.troubles(replica, kinds)
    return any(trouble.meets(since, gone) for trouble in troubles if trouble.begun < gone)
