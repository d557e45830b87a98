"""Run times that wait for a worker, and which of them other replicas have run meanwhile.

When hundreds of jobs are due at once, every replica submits all of them, and its workers would
claim, one after the other, what others have taken long before. So when a claim is refused, one
statement tells which windows are taken of all that wait for a worker. Their workers do not ask any
more. Nothing is granted by it: what is free is claimed right before it runs, as ever.

Where many replicas are after the same windows, most of their claims are in vain, and cost the time
of whoever runs the jobs. So a replica whose claims are refused, again and again, asks less often.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from uuid import UUID

from apscheduler_tasklock._database.side import MOST_TOGETHER
from apscheduler_tasklock._database.timings import Timings, jittered
from apscheduler_tasklock._lock.claim import Decision
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.messages import ClaimRequest
from apscheduler_tasklock._scheduler.request import request_of
from apscheduler_tasklock._scheduler.submission import Submission
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

logger = logger_of(__name__)

# So many have to wait; else their claims, which travel together, are no more work.
FEWEST = 5
# The first pause is so many times what the refused claim took, so that nobody notices it: where a
# database answers within 2 ms, 6 ms. The next is twice as long, unless a claim was granted.
FIRST_PAUSE = 3.0
# Seconds that a pause takes at most.
LONGEST_PAUSE = 0.5
# The most that the pause is doubled, so that some grants make it short again.
MOST_DOUBLINGS = 8
# Seconds for which it does not ask after the database has rejected that.
REJECTED_FOR = 5.0
# Seconds for which claims are made of jobs' triggers, an application's own code, before it asks.
MAKING_LIMIT = 0.05


@dataclass
class QueuedRun:
    """A run time that waits for a worker.

    :ivar request: its claim, if it was made already
    :ivar refused: what would become of its claim, if its window is known to be taken
    """

    submission: Submission
    request: ClaimRequest | None = None
    refused: Decision | None = None


class QueuedRuns:
    """The run times of one executor that wait for a worker of its pool of threads.

    :param timings: has the age of a refusal
    :param clock: a monotonic clock, in seconds
    """

    def __init__(
        self, timings: Timings | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._refusal_age = (timings or Timings()).refusal_age
        self._clock = clock
        self._waiting: dict[UUID, QueuedRun] = {}  # by their claims, the oldest first
        self._asking = threading.Lock()
        self._asked_at = 0.0  # on the monotonic clock
        self._doublings = 0  # one each time that it asks, less the claims that were granted since
        self._rejected_until = 0.0  # on the monotonic clock

    def add(self, submission: Submission) -> None:
        """Note a submission that is about to wait for a worker."""
        if not self._waiting:
            self._doublings = 0  # of the last burst
        if submission.claims_one_window:
            self._waiting[submission.claim_ids[0]] = QueuedRun(submission)

    def take(self, submission: Submission) -> QueuedRun:
        """Return what is known of a submission that waits no longer."""
        queued = self._waiting.pop(submission.claim_ids[0], None) or QueuedRun(submission)
        if queued.refused is not None:
            age = self._clock() - queued.refused.sent
            if age > self._refusal_age:
                return replace(queued, refused=None)
        return queued

    def note_granted(self) -> None:
        """Note that a claim was granted."""
        self._doublings = max(0, self._doublings - 1)

    def ask(self, locks: LockClient, since: float) -> None:
        """Find out which of the windows are taken, after a claim was refused. May wait.

        :param since: when that claim was sent, on the monotonic clock
        """
        took = self._clock() - since
        with self._asking:  # the other workers have nothing better to do than to wait for this
            is_known = self._asked_at > since
            is_left_out = self._clock() < self._rejected_until
            if is_known or is_left_out or len(self._undecided()) < FEWEST:
                return
            pause = min(LONGEST_PAUSE, took * FIRST_PAUSE * 2.0**self._doublings)
            self._doublings = min(MOST_DOUBLINGS, self._doublings + 1)
            if locks.wait(jittered(pause)):
                return
            self._asked_at = self._clock()
            try:
                self._find_taken(locks)
            except TaskLockDatabaseError as error:  # their claims find out
                logger.debug("Which windows are taken is not known: %s", error)
            except TaskLockError as error:
                self._rejected_until = self._clock() + REJECTED_FOR  # their claims tell of it
                logger.debug("Which windows are taken is not asked for now: %s", error)

    def _undecided(self) -> list[QueuedRun]:
        """Return those that nothing is known of, the oldest first."""
        return [queued for queued in list(self._waiting.values()) if queued.refused is None]

    def _find_taken(self, locks: LockClient) -> None:
        requests = []
        until = self._clock() + MAKING_LIMIT
        for queued in self._undecided()[:MOST_TOGETHER]:
            if (request := _request_of(queued)) is not None:
                requests.append(request)
            if self._clock() > until:
                break
        for claim_id, decision in locks.find_taken(requests).items():
            waiting = self._waiting.get(claim_id)
            if waiting is not None:  # else a worker has taken it meanwhile
                waiting.refused = decision


def _request_of(queued: QueuedRun) -> ClaimRequest | None:
    """Return its claim; ``None`` if it cannot be made, as its worker will tell."""
    submission = queued.submission
    if queued.request is None:
        with suppress(BaseException):  # a custom trigger's own code, which may exit
            request = request_of(submission, submission.run_times[0], submission.claim_ids[0])
            assert isinstance(request, ClaimRequest)
            queued.request = request
    return queued.request
