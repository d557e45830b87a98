"""Task locks in memory. The rule in Python decides on claims, not the database's statements."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from typing import Any
from uuid import UUID, uuid4

from apscheduler_tasklock._lock.always_granted import empty_answer, monotonic_now
from apscheduler_tasklock._lock.forking import replace_in_each_child
from apscheduler_tasklock._lock.protocol import HISTORY
from apscheduler_tasklock._lock.protocol_messages import (
    Answer,
    Claim,
    ClaimAnswer,
    Claims,
    ClaimTimes,
    EndLease,
    Extend,
    GiveUp,
    Lead,
    LockEnds,
    Message,
    PruneOneOffs,
    ReadTasks,
    Registered,
    Registration,
    Registrations,
    ReleaseAnswer,
    ReleaseRequest,
    Releases,
    Renewal,
    Renewals,
    RerunRequest,
    Reruns,
    Resign,
    Retire,
    SignOfLife,
    Stop,
    TaskRow,
)
from apscheduler_tasklock.status import Run
from apscheduler_tasklock.testing import rule
from apscheduler_tasklock.testing.rule import Row, Ruling

_LONG_AGO = datetime(1970, 1, 1, tzinfo=timezone.utc)


class MemoryTaskLocks:
    """The rows of tasks and the history of their runs, in this process. Safe between threads.

    :param now: returns the time of rulings, with a time zone
    :param history: for each task, the history keeps so many runs that ended well, and as many that
        did not
    """

    def __init__(self, now: Callable[[], datetime] = monotonic_now, history: int = HISTORY) -> None:
        self.now = now
        self.history = history
        self._replace_in_child()
        self.rows: dict[str, Row] = {}
        self.tasks_of: dict[str, frozenset[str]] = {}  # by replica
        # By task, and by whether the runs ended well.
        self._runs: dict[str, dict[bool, deque[Run]]] = {}
        replace_in_each_child(self)

    def _replace_in_child(self) -> None:
        """Replace the lock, which a thread of the parent may have."""
        self.lock = threading.RLock()

    def protocol(self, replica_id: str) -> MemoryProtocol:
        """Return the protocol of a replica."""
        return MemoryProtocol(self, replica_id)

    def runs(self, task_name: str) -> list[Run]:
        """Return the history of a task, the oldest run first."""
        with self.lock:
            rings = self._runs.get(task_name, {}).values()
            return sorted(chain.from_iterable(rings), key=lambda run: run.token or 0)

    def decide(
        self, task_name: str, decide: Callable[[Row | None, datetime], Ruling[Answer]]
    ) -> Answer:
        """Decide on a request by the rule; store the task's new row and entries of the history."""
        with self.lock:
            ruling = decide(self.rows.get(task_name), self.now())
            if ruling.row is not None:
                self.rows[task_name] = ruling.row
            for run in ruling.ended:
                rings = self._runs.setdefault(task_name, {})
                rings.setdefault(rule.ended_well(run), deque(maxlen=self.history)).append(run)
            return ruling.answer

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

    def execute(self, cursor: Any, message: Message[Answer]) -> Answer:
        """Carry out a message, and return its answer."""
        how = _HOW.get(type(message))
        with self._locks.lock:
            answer: Answer = how(self, message) if how else empty_answer(cursor, message)
            return answer

    def _decide(self, request: Any) -> Any:
        """Decide on a request that needs only the task's row."""
        decide = _BY_RULE[type(request)]
        return self._locks.decide(request.task_name, lambda row, now: decide(row, request, now))

    def _claim(self, message: Claim) -> ClaimAnswer:
        request = message.request
        return self._locks.decide(
            request.task_name,
            lambda row, now: rule.claim(row, request, message.times, self._replica_id, now),
        )

    def _claim_many(self, message: Claims) -> dict[UUID, ClaimAnswer]:
        known, now = dict(self._locks.rows), self._locks.now()
        granted = {
            request.claim_id
            for request in message.requests
            if (row := known.get(request.task_name)) is not None
            and row.is_granted(request.claim_id, now)
        }
        answers = {}
        for request, lag in zip(message.requests, message.lags, strict=True):
            if (request.task_name in known) is not message.are_first:
                is_beyond = message.most is not None and len(granted) >= message.most
                # A claim beyond the limit is refused in the same way as an expired claim.
                not_after = _LONG_AGO if is_beyond else message.times.not_after
                times = replace(message.times, lag=lag, not_after=not_after)
                answer = answers[request.claim_id] = self._claim(Claim(request, times))
                if answer.granted:
                    granted.add(request.claim_id)
        return answers

    def _rerun_all(self, message: Reruns) -> dict[UUID, ClaimAnswer]:
        return _answers(message.requests, partial(self._rerun, message.times))

    def _rerun(self, times: ClaimTimes, request: RerunRequest) -> ClaimAnswer | None:
        return self._locks.decide(
            request.task_name,
            lambda row, now: rule.rerun(row, request, times, self._replica_id, now),
        )

    def _release(self, request: ReleaseRequest) -> ReleaseAnswer | None:
        answer: ReleaseAnswer | None = self._decide(request)
        if answer is None or answer.is_late:
            self._locks.note_late(request)
        return answer

    def _release_all(self, message: Releases) -> dict[UUID, ReleaseAnswer | None]:
        return _answers(message.requests, self._release)

    def _renew_all(self, message: Renewals) -> dict[UUID, LockEnds]:
        return _answers(message.requests, self._decide)

    def _read(self, message: ReadTasks) -> tuple[list[TaskRow], datetime]:
        now, always = self._locks.now(), message.always
        rows = [self._locks.rows[n] for n in message.task_names if n in self._locks.rows]
        found = [
            row for row in rows if row.task_name in always or rule.calls_for_something(row, now)
        ]
        return [rule.state_of(row, now) for row in found], now

    def _register_all(self, message: Registrations) -> list[Registered]:
        return [self._decide(task) for task in message.tasks]

    def _report_replica(self, message: SignOfLife) -> tuple[datetime, int]:
        self._locks.tasks_of[self._replica_id] = frozenset(message.tasks)
        return message.started_at or self._locks.now(), len(self._locks.tasks_of)

    def _stop(self, _message: Stop) -> int:
        return int(self._locks.tasks_of.pop(self._replica_id, None) is not None)

    def _retire(self, message: Retire) -> int:
        rows = self._locks.rows
        dropped = frozenset(message.dropped).difference(*self._locks.tasks_of.values())
        retired = {name: rule.retire(rows[name]) for name in dropped if name in rows}
        rows.update(retired)
        return len(retired)

    def _prune(self, message: PruneOneOffs) -> int:
        now, rows = self._locks.now(), self._locks.rows
        old = [name for name, row in rows.items() if rule.is_over(row, message.age, now)]
        for name in old:
            self._locks.forget(name)
        return len(old)


def _answers(requests: Sequence[Any], answer_to: Callable[[Any], Any]) -> dict[UUID, Any]:
    """Return the answers to requests by their claim ids, without those that are ``None``."""
    answers = {each.claim_id: answer_to(each) for each in requests}
    return {claim_id: each for claim_id, each in answers.items() if each is not None}


# The rule for the requests that need only the task's row.
_BY_RULE: dict[type, Callable[..., Ruling[Any]]] = {
    EndLease: rule.end_lease,
    Extend: rule.extend,
    GiveUp: rule.give_up,
    Lead: rule.lead,
    Registration: lambda row, task, now: rule.register(row, task, uuid4(), now),
    ReleaseRequest: rule.release,
    Renewal: rule.renew,
    Resign: rule.resign,
}
_HOW: dict[type[Message[Any]], Callable[[MemoryProtocol, Any], Any]] = {
    **dict.fromkeys((EndLease, Extend, GiveUp, Lead, Resign), MemoryProtocol._decide),
    Claim: MemoryProtocol._claim,
    Claims: MemoryProtocol._claim_many,
    Reruns: MemoryProtocol._rerun_all,
    ReleaseRequest: MemoryProtocol._release,
    Releases: MemoryProtocol._release_all,
    Renewals: MemoryProtocol._renew_all,
    ReadTasks: MemoryProtocol._read,
    Registrations: MemoryProtocol._register_all,
    SignOfLife: MemoryProtocol._report_replica,
    Stop: MemoryProtocol._stop,
    Retire: MemoryProtocol._retire,
    PruneOneOffs: MemoryProtocol._prune,
}
