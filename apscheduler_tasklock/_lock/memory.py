"""The decision of who runs a window, in memory: the same rule as the statements, in Python.

It is for the tests of an application. The rows are those of the task lock table, with the same
columns; each request is decided at once, one after the other. What the statements say of
transactions, locked rows and the write-ahead log has no counterpart here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

from apscheduler_tasklock._lock.messages import (
    ClaimAnswer,
    ClaimRequest,
    Ending,
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
from apscheduler_tasklock._lock.unlocked import later, monotonic_now
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.status import Run, RunningRun

# What a task's times say that has never run.
NEVER = datetime(1970, 1, 1, tzinfo=timezone.utc)
# A due time that never comes: no run time follows.
FOREVER = datetime.max.replace(tzinfo=timezone.utc)

# How far a run time may be from what the replica's clock makes of it, to be believed.
TOLERANCE = timedelta(minutes=5)
# A release that opens the window again puts its end so far before its start, or half a window.
LONGEST_BEFORE = timedelta(seconds=1)
SHORTEST_BEFORE = timedelta(microseconds=1)

_READ_NOW = ReadTimes()


@dataclass
class TaskRow:
    """The row of a task. Its attributes are the columns of the task lock table."""

    task_name: str
    started_at: datetime
    locked_until: datetime
    window_start: datetime
    window_until: datetime
    locked_by: str
    claim_id: UUID
    token: int
    finished_at: datetime | None
    run_until: datetime
    failover: bool = False
    deaths: int = 0
    handovers: int = 0
    handed_over: bool = False
    runs: str = ""
    one_off: bool = False
    kind: str | None = None
    schedule: str | None = None
    due_at: datetime | None = None
    overdue_at: datetime | None = None
    overrun_at: datetime | None = None
    recorded: int = 0
    succeeded_at: datetime | None = None
    failed_at: datetime | None = None
    failures: int = 0
    error_type: str | None = None
    paused_at: datetime | None = None
    paused_until: datetime | None = None
    paused_by: str | None = None
    pause_reason: str | None = None
    request_id: UUID | None = None
    requested_by: str | None = None
    requested_at: datetime | None = None
    request_until: datetime | None = None
    last_outcome: str | None = None
    overran: bool = False

    @property
    def finished(self) -> bool:
        """Whether its last run was released."""
        return self.finished_at is not None

    def is_idle(self, now: datetime) -> bool:
        """Tell whether nobody runs it. A run that never finished counts until its lease ends."""
        return self.finished or self.locked_until <= now

    def is_dead(self, now: datetime) -> bool:
        """Tell whether its last run was not released, and its lease has ended."""
        return not self.finished and self.locked_until <= now

    def stands(self, now: datetime) -> bool:
        """Tell whether its holder may go on: also after its lease, until it is taken over."""
        return not (self.finished or self.handed_over) and self.run_until > now

    def is_paused(self, now: datetime) -> bool:
        """Tell whether it is paused."""
        return self.paused_until is not None and self.paused_until > now

    @property
    def due_in_pause(self) -> bool:
        """Whether it was due in a pause. Nobody makes up for that."""
        if self.due_at is None or self.paused_at is None or self.paused_until is None:
            return False
        return self.paused_at <= self.due_at < self.paused_until

    def is_due(self, now: datetime) -> bool:
        """Tell whether it was due, and is not paused."""
        return self.due_at is not None and self.due_at < now and not self.is_paused(now)

    def is_overdue(self, now: datetime) -> bool:
        """Tell whether it was due, nobody has run it since, and its grace time has passed."""
        return (
            self.finished
            and self.is_due(now)
            and self.due_at is not None
            and self.window_start < self.due_at
            and self.overdue_at is not None
            and self.overdue_at < now
            and not self.due_in_pause
        )


class MemoryTaskLocks:
    """The rows of tasks and the history of their runs, in this process. Safe between threads.

    :param now: returns the time by which all is decided, with a time zone
    :param history: which runs are kept
    """

    def __init__(
        self,
        now: Callable[[], datetime] = monotonic_now,
        history: int = HISTORY,
    ) -> None:
        self.now = now
        self.history = history
        self.lock = threading.RLock()
        self.rows: dict[str, TaskRow] = {}
        self.tasks_of: dict[str, frozenset[str]] = {}  # by replica
        self._runs: dict[str, deque[Run]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        raise TaskLockOptionError(
            "task locks in memory are this process's own, which the worker processes of a "
            "process pool cannot ask; test with a thread pool"
        )

    def protocol(self, replica_id: str) -> MemoryProtocol:
        """Return what a replica asks."""
        return MemoryProtocol(self, replica_id)

    def runs(self, task_name: str) -> list[Run]:
        """Return the runs of a task that are over, the oldest first."""
        with self.lock:
            return sorted(self._runs.get(task_name, ()), key=lambda run: run.token)

    def note_end(
        self,
        row: TaskRow,
        outcome: str,
        *,
        ended_at: datetime,
        error_type: str | None = None,
        error: str | None = None,
    ) -> None:
        """Note how a run ended, in the history and its row's count of entries.

        One that never began has no entry.
        """
        if not self.keeps(outcome):
            return
        row.recorded += 1
        kind = row.kind or "schedule"
        runs = self._runs.setdefault(row.task_name, deque(maxlen=self.history))
        runs.append(
            Run(
                task=row.task_name,
                token=row.token,
                scheduled_at=None if kind == "hold" else row.window_start,
                started_at=row.started_at,
                ended_at=ended_at,
                replica=row.locked_by,
                kind=kind,
                outcome=outcome,
                error_type=error_type,
                error=error,
            )
        )

    def keeps(self, outcome: str) -> bool:
        """Tell whether a run with this outcome gets an entry."""
        return bool(self.history and outcome)

    def note_overtaken(self, task_name: str, token: int | None) -> None:
        """Note that a run which was taken for dead has ended only now."""
        runs = self._runs.get(task_name, deque())
        for number, run in enumerate(runs):
            if run.token == token and run.outcome in ("died", "freed"):
                runs[number] = replace(run, outcome="overtaken", ended_at=self.now())

    def forget(self, task_name: str) -> None:
        """Delete a task, with its history."""
        self.rows.pop(task_name, None)
        self._runs.pop(task_name, None)


@dataclass(frozen=True)
class _Claim:
    """A claim as it is decided.

    :ivar fired: its run time, by the clock of the rows
    """

    request: ClaimRequest
    fired: datetime
    now: datetime
    stable: bool

    @classmethod
    def of(cls, request: ClaimRequest, times: ReadTimes, now: datetime) -> _Claim:
        """Return a claim whose run time is what the replica's clock makes of it, or exact."""
        latest = now if times.latest is None else min(now, times.latest)
        fired = later(latest, -times.lag)
        if request.exact and request.run_time is not None:
            run_time = request.run_time.astimezone(timezone.utc)
            fired = max(fired - TOLERANCE, min(fired + TOLERANCE, run_time))
        return cls(request, fired, now, times.stable)

    def is_new_after(self, row: TaskRow) -> bool:
        """Tell whether its window is new after that of the last claim."""
        end = row.window_until
        # An interval that a deployment has shortened takes effect at once; a hold's minimum lock
        # was promised to it.
        if row.runs and self.request.runs:
            end = min(end, later(row.window_start, self.request.min_lock))
        if self.fired < end:
            return False
        was_opened = row.window_until < row.window_start
        # One run time is run once, also with a minimum lock of 0.
        return not self.request.exact or self.fired > row.window_start or was_opened

    def waits_for(self, row: TaskRow) -> bool:
        """Tell whether a dead run stands against it: it comes first, or may not be dead."""
        if row.finished or row.run_until <= self.now:
            return False
        if not (row.handed_over or self.stable):
            return True
        is_same = row.runs != "" and row.runs == self.request.runs
        return is_same and (row.handed_over or (row.failover and self.request.failover))

    def is_paused(self, row: TaskRow) -> bool:
        """Tell whether the task is paused, or was when the run time was due."""
        if row.paused_until is None:
            return False
        return row.paused_until > self.now or self.fired < row.paused_until

    def is_granted(self, row: TaskRow) -> bool:
        """Tell whether it may take the task."""
        return (
            row.is_idle(self.now)
            and row.claim_id != self.request.claim_id
            and self.is_new_after(row)
            and not self.waits_for(row)
            and not self.is_paused(row)
        )

    def found(self, row: TaskRow) -> ClaimAnswer:
        """Return what is said of a row in which nothing was changed."""
        granted = row.claim_id == self.request.claim_id and row.stands(self.now)
        idle = row.is_idle(self.now)
        return answer(row, self.now)._replace(
            granted=granted,
            running=not idle,
            new_window=self.is_new_after(row) and not granted,
            waits=idle and self.waits_for(row),
            paused=self.is_paused(row),
        )

    def take(self, row: TaskRow, replica_id: str) -> None:
        """Change the row to that of this claim's run."""
        request, now = self.request, self.now
        row.started_at = now
        row.run_until = later(now, request.max_lock)
        row.locked_until = leased(now, request.lease, row.run_until)
        row.window_start = self.fired
        row.window_until = later(self.fired, request.min_lock)
        row.locked_by = replica_id
        row.claim_id = request.claim_id
        row.handovers, row.handed_over, row.overran = 0, False, False
        row.failover, row.runs, row.one_off = request.failover, request.runs, request.one_off
        row.finished_at = None
        row.kind = "schedule" if request.runs else "hold"
        row.schedule = request.schedule
        row.due_at = due(self.fired, request.next_in, is_last=request.is_last)
        row.overdue_at = None if row.due_at is None else later(row.due_at, request.grace)
        row.overrun_at = leased(now, request.max_runtime, row.run_until)


class MemoryProtocol:
    """What a replica asks of task locks in memory, as of ``LockProtocol``.

    :param locks: the rows
    :param replica_id: who asks
    """

    def __init__(self, locks: MemoryTaskLocks, replica_id: str) -> None:
        self._locks = locks
        self._replica_id = replica_id

    def claim(
        self,
        cursor: Any,
        request: ClaimRequest,
        times: ReadTimes = _READ_NOW,
    ) -> ClaimAnswer:
        """Try to take the task for one run time. A refused claim changes nothing."""
        locks = self._locks
        with locks.lock:
            now, row = locks.now(), locks.rows.get(request.task_name)
            claim = _Claim.of(request, times, now)
            if row is None:
                row = locks.rows[request.task_name] = self._new_row(request.task_name, now)
                claim.take(row, self._replica_id)
                return answer(row, now)._replace(granted=True)
            if not claim.is_granted(row):
                return claim.found(row)
            row.last_outcome = None
            self._note_death(row)
            row.token += 1
            claim.take(row, self._replica_id)
            return answer(row, now)._replace(granted=True)

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
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take many tasks, each once. Those without a row are missing in the answers."""
        with self._locks.lock:
            known = set(self._locks.rows)
            return self._claims(cursor, requests, lags, times, lambda name: name in known)

    def first_claim_many(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take many tasks that have no row. Those that have one are missing."""
        with self._locks.lock:
            known = set(self._locks.rows)
            return self._claims(cursor, requests, lags, times, lambda name: name not in known)

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
                if request.task_name in rows:
                    claim = _Claim.of(request, replace(times, lag=lag), now)
                    found = claim.found(rows[request.task_name])
                    if not (found.granted or found.new_window):
                        taken[request.claim_id] = found
        return taken

    def _claims(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
        is_asked: Callable[[str], bool],
    ) -> dict[UUID, ClaimAnswer]:
        return {
            request.claim_id: self.claim(cursor, request, replace(times, lag=lag))
            for request, lag in zip(requests, lags, strict=True)
            if is_asked(request.task_name)
        }

    def claim_requested(
        self, cursor: Any, request: ManualRequest, *, stable: bool
    ) -> ClaimAnswer | None:
        """Return nothing: where there is no database, nobody asks for runs by hand."""

    def take_over(self, cursor: Any, request: TakeoverRequest) -> ClaimAnswer | None:
        """Try to take over the claim of a dead holder. ``None``: the task has no row."""
        with self._locks.lock:
            now, row = self._locks.now(), self._locks.rows.get(request.task_name)
            if row is None:
                return None
            may_take_over = (
                row.claim_id == request.dead_claim_id
                and row.is_dead(now)
                and row.run_until > now
                and not row.is_paused(now)
            )
            if not may_take_over:
                return self._found(row, request.claim_id, now, paused=row.is_paused(now))
            was_handed_over = row.handed_over
            row.last_outcome = None
            self._note_death(row)
            row.overran = False
            row.token += 1
            if row.overrun_at is not None:
                row.overrun_at = min(now + (row.overrun_at - row.started_at), row.run_until)
            row.started_at = now
            row.locked_until = leased(now, request.lease, row.run_until)
            row.locked_by, row.claim_id = self._replica_id, request.claim_id
            row.kind = "takeover"
            row.handovers += was_handed_over
            row.handed_over = False
            row.failover = request.failover
            return answer(row, now)._replace(granted=True)

    def take_over_many(
        self, cursor: Any, requests: Sequence[TakeoverRequest]
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take over many claims. Those of tasks without a row are missing."""
        answers = {request.claim_id: self.take_over(cursor, request) for request in requests}
        return {claim_id: each for claim_id, each in answers.items() if each is not None}

    def release(self, cursor: Any, request: ReleaseRequest) -> ReleaseAnswer | None:
        """End a claim. ``None`` means that it no longer stood, and that nothing was changed."""
        end, locks = request.end, self._locks
        with locks.lock:
            now, row = locks.now(), locks.rows.get(request.task_name)
            hands_over = end.ending is Ending.HAND_OVER
            if row is None or row.claim_id != request.claim_id:
                if not hands_over:
                    locks.note_overtaken(request.task_name, request.token)
                return None
            if hands_over:
                if row.finished:
                    return None
                if not row.handed_over:
                    self._note_end(row, request)
                    if end.outcome == "overran":
                        row.failures += 1
                        row.failed_at, row.error_type = now, None
                row.locked_until = min(row.locked_until, now)
                row.handed_over = True
                row.last_outcome = end.last_outcome
            else:
                self._finish(row, request, now)
            return ReleaseAnswer(row.locked_until, now)

    def _finish(self, row: TaskRow, request: ReleaseRequest, now: datetime) -> None:
        """End a run. One that has ended already stays as it is."""
        end = request.end
        if not row.finished:
            self._note_end(row, request)
            if end.outcome == "ok":
                row.succeeded_at, row.failures = now, 0
            elif end.outcome in ("error", "overran"):
                row.failed_at, row.failures = now, row.failures + 1
            if end.outcome in ("ok", "error", "overran"):
                row.error_type = end.error_type
            row.last_outcome = end.last_outcome
            if end.ending is Ending.OPEN:
                half = (row.window_until - row.window_start) / 2
                row.window_until = row.window_start - max(
                    SHORTEST_BEFORE, min(LONGEST_BEFORE, half)
                )
        self._move_due_time(row, request, now)
        row.finished_at = row.finished_at or now
        row.locked_until = max(now, row.window_until)
        row.deaths = row.handovers = 0
        row.handed_over = False

    @staticmethod
    def _move_due_time(row: TaskRow, request: ReleaseRequest, now: datetime) -> None:
        """Note when the next run is due, where its run time has come while this one went on."""
        if row.due_at is None or row.overdue_at is None or row.due_at > now:
            return
        end, grace = request.end, row.overdue_at - row.due_at
        if end.is_last or end.next_in is not None:
            row.due_at = due(now, end.next_in, is_last=end.is_last)
            row.overdue_at = later(row.due_at or now, grace.total_seconds())

    def _note_end(self, row: TaskRow, request: ReleaseRequest) -> None:
        end = request.end
        self._locks.note_end(
            row,
            end.outcome,
            ended_at=self._locks.now(),
            error_type=end.error_type,
            error=end.error,
        )

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
        with self._locks.lock:
            now, row = self._locks.now(), self._of_claim(task_name, claim_id)
            if row is None or row.finished or row.locked_by not in holders:
                return None
            row.locked_until = min(row.locked_until, now)
            return ReleaseAnswer(row.locked_until, now)

    def give_up(self, cursor: Any, task_name: str, claim_id: UUID) -> bool:
        """Finish a dead run that is not to be run again; tell whether this replica did."""
        with self._locks.lock:
            now, row = self._locks.now(), self._of_claim(task_name, claim_id)
            if row is None or not row.is_dead(now):
                return False
            if row.handed_over:
                row.deaths += 1
            else:
                self._note_death(row)
            row.finished_at = now
            row.locked_until = max(now, row.window_until)
            row.handed_over = False
            return True

    def extend(
        self, cursor: Any, task_name: str, claim_id: UUID, by: float, lease: float | None
    ) -> LockTimes | None:
        """Move the end of a claim's maximum lock by seconds. ``None``: it stands no more."""
        with self._locks.lock:
            now, row = self._locks.now(), self._of_claim(task_name, claim_id)
            if row is None or not row.stands(now):
                return None
            row.run_until, row.overran = later(row.run_until, by), False
            row.locked_until = max(row.locked_until, leased(now, lease, row.run_until))
            return LockTimes(row.locked_until, row.run_until, now)

    def renew(self, cursor: Any, renewals: Sequence[Renewal]) -> dict[UUID, LockTimes]:
        """Let claims stand for another lease each. One that is missing stands no more."""
        with self._locks.lock:
            now, renewed = self._locks.now(), {}
            for each in renewals:
                row = self._of_claim(each.task_name, each.claim_id)
                if row is not None and row.stands(now):
                    until = leased(now, each.lease, row.run_until)
                    row.locked_until = max(row.locked_until, until)
                    row.overran = each.is_last
                    renewed[each.claim_id] = LockTimes(row.locked_until, row.run_until, now)
            return renewed

    def read(
        self, cursor: Any, task_names: Sequence[str], always: Sequence[str] = ()
    ) -> tuple[list[RunState], datetime]:
        """Return which of these tasks call for something, and the time.

        :param always: tasks whose last run is returned whatever its state
        """
        with self._locks.lock:
            now = self._locks.now()
            rows = [self._locks.rows[name] for name in task_names if name in self._locks.rows]
            states = [
                _state(row, now)
                for row in rows
                if row.task_name in always or row.is_dead(now) or (row.finished and row.is_due(now))
            ]
            return states, now

    def register(self, cursor: Any, tasks: Sequence[Registration]) -> list[Registered]:
        """Tell of the tasks that a replica has. None has to be told again."""
        with self._locks.lock:
            now = self._locks.now()
            return [Registered(task.task_name, self._register(task, now)) for task in tasks]

    def _register(self, task: Registration, now: datetime) -> int | None:
        """Return the token of a task's last run, if its row has the registered schedule now."""
        row = self._locks.rows.get(task.task_name)
        if row is None:
            return self._insert(task, now).token
        if task.repeated and row.schedule not in (None, task.schedule):
            return None
        if (
            row.schedule != task.schedule
            or task.moved
            or (row.due_at is None and task.next_in is not None)
            or row.due_in_pause
        ):
            _reschedule(row, task, now)
        return row.token

    def _insert(self, task: Registration, now: datetime) -> TaskRow:
        row = self._locks.rows[task.task_name] = self._new_row(task.task_name, NEVER, now)
        row.finished_at = NEVER
        row.runs, row.schedule = task.runs, task.schedule
        row.due_at = due(now, task.next_in)
        row.overdue_at = None if row.due_at is None else later(row.due_at, task.grace)
        return row

    def report_replica(
        self,
        cursor: Any,
        host: str,
        version: str,
        tasks: Sequence[str],
        started_at: datetime | None = None,
        rejected: Sequence[str] = (),
        running: Sequence[RunningRun] = (),
    ) -> datetime:
        """Note the replica's tasks; return since when it is known."""
        with self._locks.lock:
            self._locks.tasks_of[self._replica_id] = frozenset(tasks)
            return started_at or self._locks.now()

    def retire(self, cursor: Any, successor_of: Sequence[str], dropped: Sequence[str]) -> None:
        """Let nobody wait for a task that it has dropped, unless another replica has it."""
        with self._locks.lock:
            for name in frozenset(dropped).difference(*self._locks.tasks_of.values()):
                row = self._locks.rows.get(name)
                if row is not None and row.finished and not row.one_off:
                    row.due_at = row.overdue_at = None

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
            before = later(self._locks.now(), -age)
            old = [row.task_name for row in self._over(before)]
            for name in old:
                self._locks.forget(name)
            return len(old)

    def _over(self, before: datetime) -> Iterable[TaskRow]:
        for row in self._locks.rows.values():
            times = (row.finished_at or NEVER, row.window_until, row.run_until)
            if row.one_off and max(times) < before:
                yield row

    def _of_claim(self, task_name: str, claim_id: UUID) -> TaskRow | None:
        row = self._locks.rows.get(task_name)
        return row if row is not None and row.claim_id == claim_id else None

    def _note_death(self, row: TaskRow) -> None:
        """Note that the last run's holder died, if it did, as another claim follows it."""
        if row.finished or row.handed_over:
            return
        row.last_outcome = "overran" if row.overran else "died"
        self._locks.note_end(row, row.last_outcome, ended_at=row.locked_until)
        row.deaths += not row.overran
        row.failures += 1
        row.failed_at, row.error_type = row.locked_until, None

    def _new_row(self, task_name: str, then: datetime, now: datetime | None = None) -> TaskRow:
        # The first token comes from the clock: the tokens of a row that comes back are larger.
        token = round(((now or then) - NEVER) / timedelta(milliseconds=1))
        return TaskRow(task_name, then, then, then, then, "", uuid4(), token, None, then)

    @staticmethod
    def _found(row: TaskRow, claim_id: UUID, now: datetime, *, paused: bool) -> ClaimAnswer:
        """Return what is said of a row to a takeover, or a run by hand, that was not granted."""
        return answer(row, now)._replace(
            granted=row.claim_id == claim_id and row.stands(now),
            running=not row.is_idle(now),
            paused=paused,
        )


def answer(row: TaskRow, now: datetime) -> ClaimAnswer:
    """Return what a row says of its last claim, as one that runs."""
    return ClaimAnswer(
        granted=False,
        running=True,
        new_window=False,
        unfinished=not row.finished,
        waits=False,
        paused=False,
        window_start=row.window_start,
        holder=row.locked_by,
        token=row.token,
        locked_until=row.locked_until,
        run_until=row.run_until,
        database_time=now,
        claim_id=row.claim_id,
    )


def leased(now: datetime, seconds: float | None, most: datetime) -> datetime:
    """Return when a lease ends: with the maximum lock at the latest."""
    return most if seconds is None else min(later(now, seconds), most)


def due(since: datetime, next_in: float | None, *, is_last: bool = False) -> datetime | None:
    """Return when the next run time is due: never after the last one; ``None``: nobody knows."""
    if is_last:
        return FOREVER
    return None if next_in is None else later(since, next_in)


def _reschedule(row: TaskRow, task: Registration, now: datetime) -> None:
    """Note another schedule, whose first run time is not to be taken for one of the old window."""
    next_due = due(now, task.next_in)
    window_until = row.window_until
    if row.schedule is not None and row.schedule != task.schedule and task.next_in is not None:
        # A second sooner, as in the statement, which has been on its way.
        first_run = max(later(now, task.next_in - 1), later(row.window_start, task.least_gap))
        window_until = min(window_until, first_run)
    if next_due is not None and next_due < window_until:
        # A run time inside the window is refused: the one after it is due.
        following = window_until if task.period is None else later(next_due, task.period)
        next_due = max(following, window_until)
    row.schedule, row.window_until = task.schedule, window_until
    row.due_at = next_due
    row.overdue_at = None if next_due is None else later(next_due, task.grace)


def _state(row: TaskRow, now: datetime) -> RunState:
    # A run that died and is not run again stands against no later one.
    died = row.locked_until <= now and not (row.failover or row.handed_over)
    return RunState(
        task_name=row.task_name,
        claim_id=row.claim_id,
        token=row.token,
        finished=row.finished,
        dead=row.is_dead(now),
        expired=row.run_until <= now,
        failover=row.failover,
        deaths=row.deaths,
        handovers=row.handovers,
        handed_over=row.handed_over,
        runs=row.runs,
        window_start=row.window_start,
        holder=row.locked_by,
        database_time=now,
        schedule=row.schedule,
        due_at=row.due_at if (row.finished or died) and row.is_due(now) else None,
        overdue=row.is_overdue(now),
        paused=row.is_paused(now),
        due_in_pause=row.due_in_pause,
    )
