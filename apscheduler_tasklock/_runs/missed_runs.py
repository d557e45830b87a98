"""Missed runs: a replica remembers why it did not run a run time, and notes it in the run history.

Another replica may still run the run time. So a look notes the run time only when it counts as
overdue, and the statement leaves out run times that were run. Until then the reason is in this
replica's memory.

A changed schedule is noted, too, and may be the reason why the old schedule's run time is not run.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from itertools import islice, takewhile
from math import inf
from typing import TypeVar

from apscheduler_tasklock._database.rejections import RUN_HISTORY
from apscheduler_tasklock._database.sequences import Statements
from apscheduler_tasklock._database.sqlstates import NotSentError, RowLockedError
from apscheduler_tasklock._lock.protocol_messages import (
    ClaimRequest,
    Message,
    MissedTimes,
    MissNote,
    MissNotes,
    Refusal,
    Registered,
    Registration,
    ScheduleNote,
    ScheduleNotes,
)
from apscheduler_tasklock._lock.schedules import schedule_text_in_words
from apscheduler_tasklock._lock.statements.misses import NOTED_APART
from apscheduler_tasklock._lock.user import ReplicaUser
from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock._values import cut, logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError, TaskLockSchemaError
from apscheduler_tasklock.status import MissCause

logger = logger_of(__name__)

# Limits the notes of one look, because other work waits for the look.
MOST_NOTES = 256
# Limits how many comparisons the statement of one look makes: it compares each run time with the
# entries of its task in the history.
MOST_COMPARED = 200_000
# Limits the run times of one task that are kept one by one. Further ones are counted.
MOST_RUN_TIMES = 256
# Limits the tasks whose missed run times are remembered.
MOST_TASKS = 10_000
# Limits the age of a one-off job's run time, as a share of `keep_one_offs`. Of an older one, the
# row that tells that the job ran may have been deleted. That a stored job ran is seen in its own
# row.
ONE_OFF_AGE = 6 / 7
# A run within so many seconds before the old schedule's run time counts as its run, because a
# registered due time has the difference of the replicas' clocks.
MOVED_SLACK = 60.0
# Limits how many jobs are named in a reason.
MOST_NAMED = 5
# The reason in a pause, if the run history does not tell who has paused the task.
IN_PAUSE = "the task was paused"
# The reason in an outage that is known.
NOT_ANSWERED = "the database did not answer"
# The reason if the last run of the job on this replica still waits for the answer to its claim.
RUN_BEFORE_NOT_ANSWERED = "the database did not answer, and the run before it still waited for that"
_Note = TypeVar("_Note", MissNote, ScheduleNote)
# The order of the causes. If a run time has two causes, the first one is reported.
_WORTH = {cause: place for place, cause in enumerate(MissCause)}


@dataclass(frozen=True)
class _Miss:
    """A run time that this replica has missed.

    :ivar ripe_at: when to note it, on the monotonic clock
    :ivar request: the request of its claim, or what such a request would have
    :ivar more: how many run times before it were missed, too, and are only counted
    """

    run_time: datetime
    ripe_at: float
    cause: MissCause
    reason: str
    request: ClaimRequest
    more: int = 0

    @property
    def group(self) -> tuple[MissCause, str]:
        """The key of the missed run times that are noted together.

        Run times with the same cause are noted together, with the reason of the last one. Their
        reasons may differ in figures, such as the seconds of a misfire.
        """
        return self.cause, self.reason if self.cause in NOTED_APART else ""


@dataclass
class _OfTask:
    """The missed run times of one task, until they are noted.

    :ivar schedule: the task's trigger in canonical form
    :ivar jitter: seconds for which the notes wait longer, because other replicas may have the same
        notes
    :ivar misses: the missed run times that are kept one by one, by run time
    """

    schedule: str
    jitter: float
    misses: dict[datetime, _Miss] = field(default_factory=dict)

    def add(self, miss: _Miss) -> None:
        """Add a missed run time. Of two causes, keep the one that comes first in ``MissCause``."""
        known = self.misses.get(miss.run_time)
        if known is not None and _WORTH[known.cause] <= _WORTH[miss.cause]:
            return
        if known is None and len(self.misses) >= MOST_RUN_TIMES:
            last = self.misses.pop(max(self.misses))
            more = miss.more + last.more + 1
            miss = replace(max(miss, last, key=lambda each: each.run_time), more=more)
        self.misses[miss.run_time] = miss

    def ripe(self, now: float) -> list[_Miss]:
        """Return the first run times that can be noted now, as far as one note can have them."""
        in_order = [self.misses[run_time] for run_time in sorted(self.misses)]
        ripe = list(takewhile(lambda miss: miss.ripe_at <= now, in_order))
        return list(takewhile(lambda miss: miss.group == ripe[0].group, ripe))


class MissedRuns:
    """The run times that this replica has missed, until they are noted in the run history.

    Any thread may call :meth:`note`. Looks call :meth:`tell`.

    :param user: the executor as a user of its replica
    :param interval: the notes of replicas that have missed the same run times are spread over so
        many seconds
    :ivar started_at: when this replica started
    """

    def __init__(self, user: ReplicaUser, interval: float) -> None:
        self.started_at = datetime.now(timezone.utc)
        self._user = user
        self._interval = interval
        self._lock = threading.Lock()
        self._pending: dict[str, _OfTask] = {}
        self._rescheduled: dict[str, ScheduleNote] = {}  # by task

    def note_missed(
        self,
        request: ClaimRequest,
        cause: MissCause,
        reason: str,
        *,
        not_before: float = -inf,
        more: int = 0,
    ) -> None:
        """Remember a missed run time.

        :param request: the request that claims the run time, whether or not it was sent
        :param not_before: the earliest time to note it, on the monotonic clock
        :param more: how many run times before it were missed, too, and are only counted
        """
        if not self._user.settings.history or request.schedule is None:
            return
        assert request.run_time is not None
        now, longest = time.monotonic(), ONE_OFF_AGE * self._user.settings.keep_one_offs
        is_old = request.run_time.timestamp() < time.time() - longest
        if request.one_off and request.move is None and is_old:
            return
        overdue_in = request.run_time.timestamp() + request.grace - time.time()
        if not request.exact:  # another replica may run this window a period later
            overdue_in += request.next_in or 0.0
        if cause is MissCause.REFUSED:
            overdue_in = 0.0  # because no replica runs it any more
        if cause is MissCause.DATABASE:  # because an earlier try of the claim may still be granted
            not_before = now + self._user.locks.longest_doubt
        ripe_at = max(now + overdue_in, not_before)
        with self._lock:
            of_task = self._pending.get(request.task_name)
            if of_task is None and len(self._pending) >= MOST_TASKS:
                return
            if of_task is None or of_task.schedule != request.schedule:
                jitter = random.uniform(0, self._interval)  # noqa: S311  # no secret
                of_task = self._pending[request.task_name] = _OfTask(request.schedule, jitter)
            ripe_at += of_task.jitter
            of_task.add(_Miss(request.run_time, ripe_at, cause, reason, request, more))

    def note_unasked(
        self,
        request: ClaimRequest,
        run_times: Sequence[datetime],
        more: int,
        found_at: datetime,
    ) -> None:
        """Remember run times that no replica has asked for.

        :param request: a request that claims one of them
        :param more: how many there are before the last one, and are only counted
        :param found_at: when it was found that no replica has asked for them
        """
        not_before = time.monotonic() + self._user.settings.timings.unasked_after
        reason = f"nobody asked for it between {_moment(run_times[0])} and {_moment(found_at)}"
        for run_time in run_times[:-1]:
            asked = replace(request, run_time=run_time)
            self.note_missed(asked, MissCause.UNASKED, reason, not_before=not_before)
        asked = replace(request, run_time=run_times[-1])
        self.note_missed(asked, MissCause.UNASKED, reason, not_before=not_before, more=more)

    def note_stored(
        self, request: ClaimRequest, missed: Callable[[], Iterable[MissedTimes]]
    ) -> None:
        """Remember missed run times of a stored job, of which only the first and last are known.

        Called in the application's thread, because the job's trigger is asked for the run times.

        :param request: the request of a claim of the job
        :param missed: returns the run times
        """
        for each in missed():
            ends = {each.first: 0}
            ends[each.last] = max(0, each.count - 2)
            # The first is noted with the last, so that they are one entry.
            overdue_in = each.last.timestamp() + request.grace - time.time()
            now, cause, reason = time.monotonic(), each.cause, each.reason
            span = [now - time.time() + at.timestamp() for at in (each.first, each.last)]
            # In an outage no replica could claim it.
            if cause is MissCause.UNASKED and self._user.outage.has_covered(*span):
                cause, reason = MissCause.DATABASE, NOT_ANSWERED
            for run_time, more in ends.items():
                asked = replace(request, run_time=run_time)
                self.note_missed(asked, cause, reason, not_before=now + overdue_in, more=more)

    def note_rescheduled(self, task: Registration, registered: Registered) -> None:
        """Remember a changed schedule, and the old schedule's run time if no run follows by then.

        Schedules that differ only in what their words leave out, such as a start, are left out.

        :param registered: the answer to the registration that has changed the schedule
        """
        assert registered.was_schedule is not None
        was, now = (
            cut(schedule_text_in_words(schedule))
            for schedule in (registered.was_schedule, task.schedule)
        )
        if not self._user.settings.history or was == now:
            return
        with self._lock:
            if len(self._rescheduled) < MOST_TASKS:
                note = ScheduleNote(task.task_name, task.schedule, f"from {was} to {now}")
                self._rescheduled[task.task_name] = note
        was_due_at, due_at = registered.was_due_at, registered.due_at
        slack = timedelta(seconds=MOVED_SLACK)
        if was_due_at is None or due_at is None or due_at <= was_due_at + slack:
            return
        # A registered due time has the time that its statement took. Users' run times are whole
        # seconds.
        run_time = (was_due_at + timedelta(seconds=0.5)).replace(microsecond=0)
        request = ClaimRequest(
            task.task_name,
            0.0,
            0.0,
            run_time=run_time,
            exact=True,
            schedule=task.schedule,
            grace=task.grace,
            runs=task.runs,
        )
        found_at = datetime.now(timezone.utc)
        if was_due_at < found_at - slack:  # it had passed before the schedule was changed
            self.note_unasked(request, [run_time], 0, found_at)
            return
        reason = f"the schedule was moved from {was} to {now} by {self._user.replica_id}"
        self.note_missed(request, MissCause.MOVED, reason)

    def tell(self) -> Statements[None]:
        """Note the changed schedules, and the run times that can be noted now.

        A note that fails stays pending, and a later look sends it again.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        is_idle = not self._pending and not self._rescheduled
        if is_idle or self._user.rejections.is_left_out(RUN_HISTORY):
            return
        try:
            yield from self._send(self._changes(), ScheduleNotes)
            yield from self._send(self._ripe(), MissNotes)
        except TaskLockSchemaError:  # the next look finds which right is missing
            self._user.rejections.suspected = True

    def _changes(self) -> list[ScheduleNote]:
        with self._lock:
            return list(islice(self._rescheduled.values(), MOST_NOTES))

    def _ripe(self) -> list[MissNote]:
        """Return a note for each task with run times that can be noted now."""
        now, notes = time.monotonic(), []
        left = MOST_COMPARED // self._user.settings.history
        with self._lock:
            for of_task in self._pending.values():
                ripe = of_task.ripe(now)
                if ripe:
                    notes.append(_note_of(ripe, self.started_at))
                    left -= len(ripe)
                if left <= 0 or len(notes) >= MOST_NOTES:
                    break
        return notes

    def _send(
        self, notes: Sequence[_Note], message: Callable[[Sequence[_Note]], Message[set[str]]]
    ) -> Statements[None]:
        if not notes:
            return
        again: set[str] = set()
        try:
            again = yield self._user.database.carrying_out(message(notes))
        except (TaskLockDatabaseError, TaskLockSchemaError):
            raise
        except TaskLockError as error:
            if len(notes) > 1:  # alone, so that one task's mistake does not affect the others
                for note in notes:
                    yield from self._send([note], message)
                return
            logger.debug("Task %r: not noted: %s", notes[0].task_name, error)
        self._forget([note for note in notes if note.task_name not in again])

    def _forget(self, noted: Sequence[MissNote | ScheduleNote]) -> None:
        with self._lock:
            for note in noted:
                if isinstance(note, ScheduleNote):
                    if self._rescheduled.get(note.task_name) == note:
                        del self._rescheduled[note.task_name]
                    continue
                of_task = self._pending[note.task_name]
                for run_time in note.run_times:
                    of_task.misses.pop(run_time, None)
                if not of_task.misses:
                    del self._pending[note.task_name]


def _note_of(ripe: Sequence[_Miss], started_at: datetime) -> MissNote:
    last = ripe[-1]
    request, is_moved = last.request, last.cause is MissCause.MOVED
    covers = request.min_lock
    if request.exact and not (request.next_in and request.min_lock >= request.next_in):
        covers = 0.0  # because the minimum lock is shorter than the time until the next run time
    if is_moved:
        covers = MOVED_SLACK
    return MissNote(
        request.task_name,
        request.schedule or "",
        tuple(miss.run_time for miss in ripe),
        request.exact,
        request.min_lock,
        covers,
        last.cause.value,
        last.reason,
        more=sum(miss.more for miss in ripe),
        # A one-off job may have another run date on each replica, and a replica may still have the
        # old schedule.
        any_later=request.one_off or is_moved or not request.exact,
        one_off=request.one_off,
        runs=request.runs,
        is_witness=ripe[0].run_time >= started_at,
    )


# ---- the reasons, in words -----------------------------------------------------------------------


def late(seconds: float, grace: float) -> str:
    """Return in words that a run time is a misfire."""
    return f"late by {in_seconds(seconds)}, over its grace time of {in_seconds(grace)}"


def all_busy(workers: int, jobs: Sequence[str]) -> str:
    """Return in words that all workers were busy.

    :param jobs: the id of the job of each busy worker, as far as they are known
    """
    counts = {job: jobs.count(job) for job in jobs}
    in_order = sorted(counts, key=lambda job: (-counts[job], job))
    named = [f"`{job}` {counts[job]}" for job in in_order[:MOST_NAMED]]
    if len(in_order) > MOST_NAMED:
        named.append(f"others {sum(counts[job] for job in in_order[MOST_NAMED:])}")
    which = f" ({', '.join(named)})" if named else ""
    return f"all {workers} workers were busy{which}"


def not_claimed(error: TaskLockError, asked_at: float | None) -> str:
    """Return why a claim was neither granted nor refused.

    :param asked_at: when the claim was first asked for, on the monotonic clock
    """
    tried = in_seconds(0.0 if asked_at is None else time.monotonic() - asked_at)
    if isinstance(error, RowLockedError):
        return f"another session had its row locked for {tried}"
    if isinstance(error, NotSentError):
        return f"its claim could not be sent for {tried}"
    if isinstance(error, TaskLockDatabaseError):
        return f"the database did not answer for {tried}"
    return f"the database rejected its claim: {cut(error)}"


def still_running(refusal: Refusal) -> str:
    """Return which run was in the way: it went on, or had died and its lease had not ended."""
    what = f"its run of {_moment(refusal.window_start)}"
    if refusal.is_manual:
        what = "its manual run"
    elif not refusal.runs:
        what = "a hold of its lock"
    return f"{what} on {refusal.holder} (token {refusal.token}) was not known to be over"


def inside_window(refusal: Refusal) -> str:
    """Return into which window a run time falls."""
    words = f"it falls into the window of the run time {_moment(refusal.window_start)}"
    if refusal.unfinished:
        return f"{words}, and the run on {refusal.holder} (token {refusal.token}) is not over"
    return f"{words}, which ends at {_moment(refusal.locked_until)}"


def went_on(since: datetime) -> str:
    """Return that a run was in the way, of which only its begin is known."""
    return f"a run that began at {_moment(since)} was not known to be over"


def unclaimed(since: datetime, until: datetime) -> str:
    """Return that no replica has claimed run times of a stored job."""
    return f"no replica claimed it between {_moment(since)} and {_moment(until)}"


def too_many_instances(
    submission: Submission,
    user: ReplicaUser,
    *,
    is_running: bool,
    is_deferred: bool,
    waits_for_worker: bool,
) -> tuple[MissCause, str]:
    """Return why a run time is missed if its job has ``max_instances`` runs on this replica.

    That is so on this replica alone. So an outage of the database comes before it, and a run that
    has the task's lock: both keep all replicas from running it.

    :param submission: of these run times
    :param user: the executor as a user of its replica
    :param is_running: whether one of these runs has begun
    :param is_deferred: whether one of these runs is deferred, because of another run
    :param waits_for_worker: whether one of these runs waits for a worker, and not for the database
    """
    if not (is_running or is_deferred or waits_for_worker):
        return MissCause.DATABASE, RUN_BEFORE_NOT_ANSWERED
    if user.outage.reason is not None:
        return MissCause.DATABASE, NOT_ANSWERED
    for run in user.locks.what_runs() if is_running else ():
        if run.task == submission.task_name and not run.lost:
            which = f"its run that began at {_moment(run.since)} on {run.replica}"
            return MissCause.RUNNING, f"{which} (token {run.token}) was still going on"
    what = "still going on"
    if not is_running:
        what = "still waiting for " + ("another run" if is_deferred else "a worker")
    words = f"its last run on {user.replica_id} was {what}"
    return MissCause.RUNNING, f"{words} (max_instances {submission.job.max_instances})"


def _moment(moment: datetime) -> str:
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S UTC}"


def in_seconds(seconds: float) -> str:
    """Return seconds without needless digits, as in ``65 s`` and ``1.2 s``."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{round(seconds, 1):g} s"
