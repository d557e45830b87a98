"""Run times that wait for a worker, and which of them other replicas have run meanwhile.

When hundreds of jobs are due at once, every replica submits all of them, and its workers would
claim, one after the other, what others have taken long before. So when a claim is refused, one
statement tells which windows are taken of all that wait for a worker. Their workers do not ask any
more. Nothing is granted by it: what is free is claimed right before it runs, as ever.

Where many replicas are after the same windows, most of their claims are in vain, and cost the time
of whoever runs the jobs. So a replica whose claims are refused, again and again, asks less often.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from apscheduler_tasklock._database.exchange import MOST_TOGETHER, Outcome
from apscheduler_tasklock._database.retry import jittered
from apscheduler_tasklock._lock.claim import Decision
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.protocol import ClaimRequest
from apscheduler_tasklock._scheduler.request import request_of
from apscheduler_tasklock._scheduler.submission import Submission
from apscheduler_tasklock.errors import TaskLockError

logger = logging.getLogger(__name__)

# So many have to wait; else their claims, which travel together, are no more work.
FEWEST = 5
# The first pause is so many times what the refused claim took, so that nobody notices it: where a
# database answers within 2 ms, 6 ms. The next is twice as long, unless a claim was granted.
FIRST_PAUSE = 3.0
# Seconds that a pause takes at most.
LONGEST_PAUSE = 0.5


@dataclass
class QueuedRun:
    """A run time that waits for a worker.

    :ivar request: its claim, if it was made already
    :ivar refused: what would become of its claim, if its window is known to be taken
    """

    submission: Submission
    request: ClaimRequest | None = None
    refused: Outcome[Decision] | None = None


class QueuedRuns:
    """The run times of one executor that wait for a worker of its pool of threads."""

    def __init__(self) -> None:
        self._waiting: dict[object, QueuedRun] = {}  # the oldest first
        self._asking = threading.Lock()
        self._asked_at = 0.0  # on the monotonic clock
        self._in_vain = 0  # how often it has asked, less the claims that were granted since

    def add(self, submission: Submission) -> None:
        """Note a submission that is about to wait for a worker."""
        if submission.claims_one_window:
            self._waiting[submission.claim_ids[0]] = QueuedRun(submission)

    def take(self, submission: Submission) -> QueuedRun | None:
        """Return what is known of a submission that waits no longer."""
        return self._waiting.pop(submission.claim_ids[0], None)

    def note_granted(self) -> None:
        """Note that a claim was granted."""
        self._in_vain = max(0, self._in_vain - 1)

    def ask(self, locks: LockClient, since: float) -> None:
        """Find out which of the windows are taken, after a claim was refused. May wait.

        :param since: when that claim was sent, on the monotonic clock
        """
        took = time.monotonic() - since
        with self._asking:  # the other workers have nothing better to do than to wait for this
            if len(self._waiting) < FEWEST or self._asked_at > since:
                return
            pause = min(LONGEST_PAUSE, took * FIRST_PAUSE * 2.0 ** min(self._in_vain, 16))
            self._in_vain += 1
            if locks.wait(jittered(pause)):
                return
            self._asked_at = time.monotonic()
            try:
                self._find_taken(locks)
            except TaskLockError as error:  # their claims find out
                logger.debug("Which windows are taken is not known: %s", error)

    def _find_taken(self, locks: LockClient) -> None:
        waiting = {}
        for queued in list(self._waiting.values())[:MOST_TOGETHER]:
            if queued.refused is None and (request := _request_of(queued)) is not None:
                waiting[request.claim_id] = request, queued
        taken = locks.find_taken([request for request, _ in waiting.values()])
        for claim_id, decision in taken.items():
            _, queued = waiting[claim_id]
            queued.refused = Outcome(decision)


def _request_of(queued: QueuedRun) -> ClaimRequest | None:
    """Return its claim; ``None`` if it cannot be made, as its worker will tell."""
    submission = queued.submission
    if queued.request is None:
        with suppress(Exception):  # of a custom trigger, an application's own code
            request = request_of(submission, submission.run_times[0], submission.claim_ids[0])
            assert isinstance(request, ClaimRequest)
            queued.request = request
    return queued.request
