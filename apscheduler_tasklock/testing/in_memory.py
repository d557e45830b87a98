"""The rows of tasks, kept in memory: the rule decides on them in place of the statements."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, TypeVar
from uuid import UUID, uuid4

from apscheduler_tasklock._lock.messages import (
    ClaimAnswer,
    ClaimRequest,
    LockTimes,
    ManualRequest,
    ReadTimes,
    Registered,
    Registration,
    ReleaseAnswer,
    ReleaseRequest,
    Renewal,
    RunState,
    TakeoverRequest,
)
from apscheduler_tasklock._lock.protocol import HISTORY
from apscheduler_tasklock._lock.unlocked import monotonic_now
from apscheduler_tasklock.status import Run, RunningRun
from apscheduler_tasklock.testing import rule
from apscheduler_tasklock.testing.rule import Decision, Row

Answer = TypeVar("Answer")

_READ_NOW = ReadTimes()
_LONG_AGO = datetime(1970, 1, 1, tzinfo=timezone.utc)


class MemoryTaskLocks:
    """The rows of tasks and the history of their runs, in this process. Safe between threads.

    :param now: returns the time by which all is decided, with a time zone
    :param history: how many runs of each task are kept
    """

    def __init__(self, now: Callable[[], datetime] = monotonic_now, history: int = HISTORY) -> None:
        self.now = now
        self.history = history
        self.lock = threading.RLock()
        self.rows: dict[str, Row] = {}
        self.tasks_of: dict[str, frozenset[str]] = {}  # by replica
        self._runs: dict[str, deque[Run]] = {}

    def protocol(self, replica_id: str) -> MemoryProtocol:
        """Return what a replica asks."""
        return MemoryProtocol(self, replica_id)

    def runs(self, task_name: str) -> list[Run]:
        """Return the runs of a task that are over, the oldest first."""
        with self.lock:
            return sorted(self._runs.get(task_name, ()), key=lambda run: run.token)

    def decide(
        self, task_name: str, decide: Callable[[Row | None, datetime], Decision[Answer]]
    ) -> Answer:
        """Let the rule decide on a task now; keep the row and the runs that ended."""
        with self.lock:
            decision = decide(self.rows.get(task_name), self.now())
            if decision.row is not None:
                self.rows[task_name] = decision.row
            for run in decision.ended:
                self._runs.setdefault(task_name, deque(maxlen=self.history)).append(run)
            return decision.answer

    def note_late(self, request: ReleaseRequest) -> None:
        """Correct the history after a release whose claim no longer stood."""
        with self.lock:
            runs = self._runs.get(request.task_name)
            if runs:
                late = rule.overtaken(runs, request, self.now())
                self._runs[request.task_name] = deque(late, self.history)

    def forget(self, task_name: str) -> None:
        """Delete a task, with its history."""
        self.rows.pop(task_name, None)
        self._runs.pop(task_name, None)


class MemoryProtocol:
    """What a replica asks of task locks in memory, as of ``LockProtocol``.

    :param locks: the rows
    :param replica_id: who asks
    """

    def __init__(self, locks: MemoryTaskLocks, replica_id: str) -> None:
        self._locks = locks
        self._replica_id = replica_id

    def claim(
        self, cursor: Any, request: ClaimRequest, times: ReadTimes = _READ_NOW
    ) -> ClaimAnswer:
        """Try to take the task for one run time. A refused claim changes nothing."""
        return self._locks.decide(
            request.task_name,
            lambda row, now: rule.claim(row, request, times, self._replica_id, now),
        )

    def claim_handed_out(
        self, cursor: Any, request: ClaimRequest, *, stable: bool
    ) -> ClaimAnswer | None:
        """Raise an error: in memory there is no job store that hands anything out.

        :raises TaskLockError: always
        """
        cursor.execute(f"claim {request.task_name!r} ({stable=})")
        return None

    def claim_many(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
        most: int | None = None,
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take so many tasks, each once. Those without a row are missing in the answers."""
        return self._claims(cursor, requests, lags, times, most, have_rows=True)

    def first_claim_many(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
        most: int | None = None,
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take so many tasks that have no row. Those that have one are missing."""
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
                    # It is answered as one that nobody waits for.
                    not_after = _LONG_AGO if is_beyond else times.not_after
                    asked = replace(times, lag=lag, not_after=not_after)
                    answer = answers[request.claim_id] = self.claim(cursor, request, asked)
                    if answer.granted:
                        granted.add(request.claim_id)
            return answers

    def find_taken(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
    ) -> dict[UUID, ClaimAnswer]:
        """Tell which of many claims would be refused, since their windows are taken."""
        taken = {}
        with self._locks.lock:
            now, rows = self._locks.now(), self._locks.rows
            for request, lag in zip(requests, lags, strict=True):
                row = rows.get(request.task_name)
                asked = rule.Claim.of(request, replace(times, lag=lag), now)
                if row is not None and asked.is_taken(row):
                    taken[request.claim_id] = asked.found(row)
        return taken

    def claim_requested(
        self,
        cursor: Any,
        request: ManualRequest,
        *,
        stable: bool,
        not_after: datetime | None = None,
    ) -> ClaimAnswer | None:
        """Try to begin a manual run. ``None``: the task has no row."""
        return self._locks.decide(
            request.task_name,
            lambda row, now: rule.claim_manual(
                row, request, self._replica_id, now, stable=stable, not_after=not_after
            ),
        )

    def take_over_many(
        self,
        cursor: Any,
        requests: Sequence[TakeoverRequest],
        times: ReadTimes = _READ_NOW,
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take over many claims. Those of tasks without a row are missing."""
        answers = {each.claim_id: self._take_over(each, times) for each in requests}
        return {claim_id: each for claim_id, each in answers.items() if each is not None}

    def _take_over(self, request: TakeoverRequest, times: ReadTimes) -> ClaimAnswer | None:
        return self._locks.decide(
            request.task_name,
            lambda row, now: rule.take_over(row, request, self._replica_id, now, times),
        )

    def release(self, cursor: Any, request: ReleaseRequest) -> ReleaseAnswer | None:
        """End a claim. ``None`` means that it no longer stood, and that nothing was changed."""
        with self._locks.lock:
            answer = self._locks.decide(
                request.task_name, lambda row, now: rule.release(row, request, now)
            )
            if answer is None:
                self._locks.note_late(request)
            return answer

    def release_many(
        self, cursor: Any, requests: Sequence[ReleaseRequest]
    ) -> dict[UUID, ReleaseAnswer | None]:
        """End many claims; return the answers of those that stood."""
        answers = {request.claim_id: self.release(cursor, request) for request in requests}
        return {claim_id: each for claim_id, each in answers.items() if each is not None}

    def end_lease(
        self, cursor: Any, task_name: str, claim_id: UUID, holders: Sequence[str]
    ) -> ReleaseAnswer | None:
        """End the lease of a run whose holder, one of these, is known to be dead."""
        return self._locks.decide(
            task_name, lambda row, now: rule.end_lease(row, claim_id, holders, now)
        )

    def give_up(self, cursor: Any, task_name: str, claim_id: UUID) -> bool:
        """Finish a dead run that is not to be run again; tell whether this replica did."""
        return self._locks.decide(task_name, lambda row, now: rule.give_up(row, claim_id, now))

    def extend(
        self, cursor: Any, task_name: str, claim_id: UUID, by: float, lease: float | None
    ) -> LockTimes | None:
        """Move the end of a claim's maximum lock by seconds. ``None``: it stands no more."""
        return self._locks.decide(
            task_name, lambda row, now: rule.extend(row, claim_id, by, lease, now)
        )

    def renew(self, cursor: Any, renewals: Sequence[Renewal]) -> dict[UUID, LockTimes]:
        """Let claims stand for another lease each. One that is missing stands no more."""
        with self._locks.lock:
            answers = {each.claim_id: self._renew(each) for each in renewals}
        return {claim_id: times for claim_id, times in answers.items() if times is not None}

    def _renew(self, renewal: Renewal) -> LockTimes | None:
        return self._locks.decide(renewal.task_name, lambda row, now: rule.renew(row, renewal, now))

    def read(
        self, cursor: Any, task_names: Sequence[str], always: Sequence[str] = ()
    ) -> tuple[list[RunState], datetime]:
        """Return which of these tasks call for something, and the time.

        :param always: tasks whose last run is returned whatever its state
        """
        with self._locks.lock:
            now = self._locks.now()
            rows = [self._locks.rows[name] for name in task_names if name in self._locks.rows]
            found = [
                row for row in rows if row.task_name in always or rule.calls_for_something(row, now)
            ]
            return [rule.state_of(row, now) for row in found], now

    def register(self, cursor: Any, tasks: Sequence[Registration]) -> list[Registered]:
        """Tell of the tasks that a replica has. None has to be told again."""
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
    ) -> tuple[datetime, int]:
        """Note the replica's tasks; return since when it is known, and how many are."""
        with self._locks.lock:
            self._locks.tasks_of[self._replica_id] = frozenset(tasks)
            return started_at or self._locks.now(), len(self._locks.tasks_of)

    def retire(self, cursor: Any, successor_of: Sequence[str], dropped: Sequence[str]) -> None:
        """Let nobody wait for a task that it has dropped, unless another replica has it."""
        with self._locks.lock:
            rows = self._locks.rows
            for name in frozenset(dropped).difference(*self._locks.tasks_of.values()):
                if name in rows:
                    rows[name] = rule.retire(rows[name])

    def stop_replica(self, cursor: Any, running: Sequence[RunningRun] = ()) -> None:
        """Forget the replica's tasks."""
        with self._locks.lock:
            self._locks.tasks_of.pop(self._replica_id, None)

    def remove_replicas(self, cursor: Any, age: float) -> None:
        """Do nothing: when replicas were last seen is not kept."""

    def shorten_history(self, cursor: Any, task_names: Sequence[str]) -> None:
        """Do nothing: the history is as long as it was made."""

    def prune(self, cursor: Any, age: float) -> int:
        """Delete rows of one-off jobs that were over so many seconds ago; return how many."""
        with self._locks.lock:
            now = self._locks.now()
            old = [name for name, row in self._locks.rows.items() if rule.is_over(row, age, now)]
            for name in old:
                self._locks.forget(name)
            return len(old)
