"""Task locks in memory. The rule in Python decides on claims, not the database's statements."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import chain
from typing import Any, TypeVar
from uuid import UUID, uuid4

from apscheduler_tasklock._lock.always_granted import monotonic_now
from apscheduler_tasklock._lock.protocol import HISTORY
from apscheduler_tasklock._lock.protocol_messages import (
    ClaimAnswer,
    ClaimRequest,
    ClosedRun,
    LockTimes,
    MissNote,
    ReadTimes,
    Registered,
    Registration,
    ReleaseAnswer,
    ReleaseRequest,
    Renewal,
    RerunRequest,
    RunState,
    ScheduleNote,
)
from apscheduler_tasklock.status import Run, RunningRun
from apscheduler_tasklock.testing import rule
from apscheduler_tasklock.testing.rule import Decision, Row

Answer = TypeVar("Answer")

_READ_NOW = ReadTimes()
_LONG_AGO = datetime(1970, 1, 1, tzinfo=timezone.utc)


class MemoryTaskLocks:
    """The rows of tasks and the history of their runs, in this process. Safe between threads.

    :param now: returns the time of decisions, with a time zone
    :param history: for each task, the history keeps so many runs that ended well, and as many that
        did not
    """

    def __init__(self, now: Callable[[], datetime] = monotonic_now, history: int = HISTORY) -> None:
        self.now = now
        self.history = history
        self.lock = threading.RLock()
        self.rows: dict[str, Row] = {}
        self.tasks_of: dict[str, frozenset[str]] = {}  # by replica
        # By task, and by whether the runs ended well.
        self._runs: dict[str, dict[bool, deque[Run]]] = {}

    def protocol(self, replica_id: str) -> MemoryProtocol:
        """Return the protocol of a replica."""
        return MemoryProtocol(self, replica_id)

    def runs(self, task_name: str) -> list[Run]:
        """Return the history of a task, the oldest run first."""
        with self.lock:
            rings = self._runs.get(task_name, {}).values()
            return sorted(chain.from_iterable(rings), key=lambda run: run.token or 0)

    def decide(
        self, task_name: str, decide: Callable[[Row | None, datetime], Decision[Answer]]
    ) -> Answer:
        """Decide on a request by the rule; store the task's new row and entries of the history."""
        with self.lock:
            decision = decide(self.rows.get(task_name), self.now())
            if decision.row is not None:
                self.rows[task_name] = decision.row
            for run in decision.ended:
                rings = self._runs.setdefault(task_name, {})
                rings.setdefault(rule.ended_well(run), deque(maxlen=self.history)).append(run)
            return decision.answer

    def note_late(self, request: ReleaseRequest) -> None:
        """Correct the history after a release whose run was closed before."""
        with self.lock:
            task_name, now = request.task_name, self.now()
            correct = rule.correction(self.rows.get(task_name), self.runs(task_name), request, now)
            rings = self._runs.get(task_name, {})
            for ended_well, runs in rings.items():
                rings[ended_well] = deque(map(correct, runs), self.history)

    def forget(self, task_name: str) -> None:
        """Delete a task, with its history."""
        self.rows.pop(task_name, None)
        self._runs.pop(task_name, None)


class MemoryProtocol:
    """A replica's claims, releases and renewals of task locks in memory; a ``LockProtocol``.

    :param locks: the task locks
    :param replica_id: the replica's id
    """

    def __init__(self, locks: MemoryTaskLocks, replica_id: str) -> None:
        self._locks = locks
        self._replica_id = replica_id

    def claim(
        self, cursor: Any, request: ClaimRequest, times: ReadTimes = _READ_NOW
    ) -> ClaimAnswer:
        """Claim a task for one run time. A refused claim changes nothing."""
        return self._locks.decide(
            request.task_name,
            lambda row, now: rule.claim(row, request, times, self._replica_id, now),
        )

    def claim_and_move(
        self, cursor: Any, requests: Sequence[ClaimRequest], times: ReadTimes, most: int
    ) -> dict[UUID, ClaimAnswer]:
        """Raise an error, because there is no job store in memory.

        :raises TaskLockError: always
        """
        cursor.execute(f"claim {len(requests)} run times of stored jobs ({times}, {most=})")
        return {}

    def claim_many(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
        most: int | None = None,
    ) -> dict[UUID, ClaimAnswer]:
        """Claim many tasks, each once. A task without a row has no answer."""
        return self._claims(cursor, requests, lags, times, most, have_rows=True)

    def first_claim_many(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
        most: int | None = None,
    ) -> dict[UUID, ClaimAnswer]:
        """Claim many tasks that have no row. A task with a row has no answer."""
        return self._claims(cursor, requests, lags, times, most, have_rows=False)

    def _claims(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
        most: int | None,
        *,
        have_rows: bool,
    ) -> dict[UUID, ClaimAnswer]:
        with self._locks.lock:
            known = dict(self._locks.rows)
            now = self._locks.now()
            granted = {
                request.claim_id
                for request in requests
                if (row := known.get(request.task_name)) is not None
                and row.is_granted(request.claim_id, now)
            }
            answers = {}
            for request, lag in zip(requests, lags, strict=True):
                if (request.task_name in known) is have_rows:
                    is_beyond = most is not None and len(granted) >= most
                    # A claim beyond the limit is refused in the same way as an expired claim.
                    not_after = _LONG_AGO if is_beyond else times.not_after
                    asked = replace(times, lag=lag, not_after=not_after)
                    answer = answers[request.claim_id] = self.claim(cursor, request, asked)
                    if answer.granted:
                        granted.add(request.claim_id)
            return answers

    def rerun(
        self, cursor: Any, requests: Sequence[RerunRequest], times: ReadTimes = _READ_NOW
    ) -> dict[UUID, ClaimAnswer]:
        """Claim takeovers, retries and manual runs. A task without a row has no answer."""
        answers = {each.claim_id: self._rerun(each, times) for each in requests}
        return {claim_id: each for claim_id, each in answers.items() if each is not None}

    def _rerun(self, request: RerunRequest, times: ReadTimes) -> ClaimAnswer | None:
        return self._locks.decide(
            request.task_name,
            lambda row, now: rule.rerun(row, request, times, self._replica_id, now),
        )

    def release(self, cursor: Any, request: ReleaseRequest) -> ReleaseAnswer | None:
        """Release a claim, or hand its window over; ``None`` if the claim no longer stands."""
        with self._locks.lock:
            answer = self._locks.decide(
                request.task_name, lambda row, now: rule.release(row, request, now)
            )
            if answer is None or answer.is_late:
                self._locks.note_late(request)
            return answer

    def release_many(
        self, cursor: Any, requests: Sequence[ReleaseRequest]
    ) -> dict[UUID, ReleaseAnswer | None]:
        """Release many claims; return the answers for the claims that stood until now."""
        answers = {request.claim_id: self.release(cursor, request) for request in requests}
        return {claim_id: each for claim_id, each in answers.items() if each is not None}

    def end_lease(
        self, cursor: Any, task_name: str, claim_id: UUID, holders: Sequence[str]
    ) -> ReleaseAnswer | None:
        """End the lease of a run if its holder is among ``holders``, which are known to be dead."""
        return self._locks.decide(
            task_name, lambda row, now: rule.end_lease(row, claim_id, holders, now)
        )

    def give_up(self, cursor: Any, task_name: str, claim_id: UUID) -> ClosedRun | None:
        """Give up a dead run; return the run if this call has finished it, else ``None``."""
        return self._locks.decide(task_name, lambda row, now: rule.give_up(row, claim_id, now))

    def extend(
        self, cursor: Any, task_name: str, claim_id: UUID, by: float, lease: float | None
    ) -> LockTimes | None:
        """Extend a claim's maximum lock by seconds; ``None`` if the claim no longer stands."""
        return self._locks.decide(
            task_name, lambda row, now: rule.extend(row, claim_id, by, lease, now)
        )

    def renew(self, cursor: Any, renewals: Sequence[Renewal]) -> dict[UUID, LockTimes]:
        """Renew claims. A claim that no longer stands has no answer."""
        with self._locks.lock:
            answers = {each.claim_id: self._renew(each) for each in renewals}
        return {claim_id: times for claim_id, times in answers.items() if times is not None}

    def _renew(self, renewal: Renewal) -> LockTimes | None:
        return self._locks.decide(renewal.task_name, lambda row, now: rule.renew(row, renewal, now))

    def read(
        self, cursor: Any, task_names: Sequence[str], always: Sequence[str] = ()
    ) -> tuple[list[RunState], datetime]:
        """Return the states of the tasks on which a replica has to act, and the time.

        :param always: tasks whose states are returned in any case
        """
        with self._locks.lock:
            now = self._locks.now()
            rows = [self._locks.rows[name] for name in task_names if name in self._locks.rows]
            found = [
                row for row in rows if row.task_name in always or rule.calls_for_something(row, now)
            ]
            return [rule.state_of(row, now) for row in found], now

    def register(self, cursor: Any, tasks: Sequence[Registration]) -> list[Registered]:
        """Register the tasks of the replica."""
        with self._locks.lock:
            return [self._register(task) for task in tasks]

    def _register(self, task: Registration) -> Registered:
        return self._locks.decide(
            task.task_name, lambda row, now: rule.register(row, task, uuid4(), now)
        )

    def report_replica(
        self,
        cursor: Any,
        host: str,
        version: str,
        tasks: Sequence[str],
        started_at: datetime | None = None,
        rejected: Sequence[str] = (),
        running: Sequence[RunningRun] = (),
        leader_namespace: str | None = None,
    ) -> tuple[datetime, int]:
        """Note the replica's tasks; return when it was first seen, and the number of replicas."""
        with self._locks.lock:
            self._locks.tasks_of[self._replica_id] = frozenset(tasks)
            return started_at or self._locks.now(), len(self._locks.tasks_of)

    def retire(self, cursor: Any, successor_of: Sequence[str], dropped: Sequence[str]) -> None:
        """Clear the due time of dropped tasks that no replica has any more."""
        with self._locks.lock:
            rows = self._locks.rows
            for name in frozenset(dropped).difference(*self._locks.tasks_of.values()):
                if name in rows:
                    rows[name] = rule.retire(rows[name])

    def lead(self, cursor: Any, row: str, leader_id: str, lease: float) -> bool:
        """Lead the replicas of a namespace, unless another does; return whether this one leads."""
        return self._locks.decide(
            row, lambda found, now: rule.lead(found, row, leader_id, lease, now)
        )

    def resign(self, cursor: Any, row: str, leader_id: str) -> None:
        """Give the leadership up, if this replica leads."""
        self._locks.decide(row, lambda found, now: rule.resign(found, leader_id, now))

    def stop_replica(self, cursor: Any, running: Sequence[RunningRun] = ()) -> None:
        """Forget the replica and its tasks."""
        with self._locks.lock:
            self._locks.tasks_of.pop(self._replica_id, None)

    def remove_replicas(self, cursor: Any, age: float) -> None:
        """Do nothing, because replicas leave no sign of life in memory."""

    def shorten_history(self, cursor: Any, task_names: Sequence[str]) -> None:
        """Do nothing, because the history has a fixed length."""

    def note_misses(self, cursor: Any, notes: Sequence[MissNote], sent_at: datetime) -> set[str]:
        """Write nothing, because the history in memory has no missed run times."""
        return set()

    def note_reschedulings(self, cursor: Any, notes: Sequence[ScheduleNote]) -> set[str]:
        """Write nothing, because the history in memory has no changed schedules."""
        return set()

    def prune(self, cursor: Any, age: float) -> int:
        """Delete rows of one-off jobs that have been over for ``age`` seconds; return how many."""
        with self._locks.lock:
            now = self._locks.now()
            old = [name for name, row in self._locks.rows.items() if rule.is_over(row, age, now)]
            for name in old:
                self._locks.forget(name)
            return len(old)
