"""The queue of runs: it decides which runs are claimed, given to the executor, or missed.

A run waits here until a worker is free for it. Then the run is claimed, and given to the executor
if the claim is granted. The queue only decides. The replica's thread tells it by calls what has
happened, and then asks what is to be done, and does it. The time, the answers of the database and
random pauses come from outside, so that a simulation can drive the queue on its own clock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from apscheduler_tasklock._database.jitter import LOCKED_BACKOFF
from apscheduler_tasklock._lock.outcomes import ClaimOutcome
from apscheduler_tasklock._runs.deferred_runs import Outlook
from apscheduler_tasklock._runs.misfires import is_misfire, lateness
from apscheduler_tasklock._runs.run import JobKey, QueuedRun, RunKind, State
from apscheduler_tasklock._runs.workers import WorkerModel

# Limit the runs that are asked for at once. While none is refused, as many are asked for as workers
# are free. After a refusal, more are asked for, because other replicas claim the same runs, so that
# most claims are refused: `ASKED_PER_WORKER` for each free worker, but at least `FEWEST_ASKED` and
# at most `MOST_ASKED`.
FEWEST_ASKED = 16
ASKED_PER_WORKER = 4
MOST_ASKED = 256
# Seconds for which no run is claimed or given after the executor did not take a run.
PAUSE_AFTER_FAILURE = 1.0
# Seconds for which a run waits for a worker until a log line says that all workers are busy.
FULL_AFTER = 10.0
# Seconds between two log lines that all workers are busy.
FULL_INTERVAL = 600.0
# Seconds for which the workers that an ask has reserved stay free for the runs of that ask. After
# these seconds, a run that needs no lock may get one of these workers.
PATIENCE = 0.1


@dataclass
class Ask:
    """Runs of one kind, each of another task, whose claims are to be asked for together.

    :ivar runs: the runs, in the order in which they are to be granted
    :ivar most: limits how many claims are granted; ``None``: all may be granted
    """

    runs: list[QueuedRun]
    most: int | None


@dataclass(frozen=True)
class AllBusy:
    """The data of a log line that says that all workers have been busy for long.

    :ivar workers: how many workers there are
    :ivar waiting: how many runs wait
    :ivar longest: seconds for which the first of these runs has waited
    """

    workers: int
    waiting: int
    longest: float


@dataclass
class ToDo:
    """What is to be done: the queue's decisions, which the replica's thread carries out.

    :ivar asks: the asks to send
    :ivar given: the runs to give to the executor
    :ivar refused: the runs that were refused for good, or could not be claimed
    :ivar withdrawn: the runs that do not begin because of a stop. If such a run was granted, its
        window is to be handed over.
    :ivar is_look_due: whether a look is due, because a run waits until a look has decided on an
        earlier, deferred run of its job
    :ivar all_busy: set if a log line is to say that all workers are busy
    :ivar wakes_at: when to step again if no input comes before; on the monotonic clock
    """

    asks: list[Ask] = field(default_factory=list)
    given: list[QueuedRun] = field(default_factory=list)
    refused: list[tuple[QueuedRun, ClaimOutcome]] = field(default_factory=list)
    withdrawn: list[QueuedRun] = field(default_factory=list)
    is_look_due: bool = False
    all_busy: AllBusy | None = None
    wakes_at: float = inf


class RunQueue:
    """The runs of one executor that are not over, in the order in which they came.

    :param jitter: returns a random pause that is near a given pause
    :ivar is_idle: whether no run waits, and no claim is under way, as of the last call of ``next``
    :ivar room: how many workers are free, less one for each waiting or asked run, as of that call;
        at least 0
    """

    def __init__(self, jitter: Callable[[float], float]) -> None:
        self._jitter = jitter
        self._waiting: list[QueuedRun] = []  # waiting and deferred runs
        self._numbers = count()
        self._asked: set[QueuedRun] = set()
        # The outcomes of the current asks, as far as they are answered.
        self._outcomes: set[ClaimOutcome] = set()
        self._granted: list[QueuedRun] = []  # since the last call of `next`
        self._asked_at = inf
        self._reserved = 0  # workers that stay free for the runs of the current ask
        self._free_since = inf  # since when a worker is free; `inf`: none is free
        self._unbegun: set[QueuedRun] = set()
        # Multiplies the size of an ask. It is doubled while all runs are refused, and 0 while none
        # is.
        self._growth = 0
        self._not_before = -inf
        self._no_ask_before = -inf
        self._unanswered = 0  # how many asks in a row had no answer
        self._full_reported_at = -inf
        self._stopped = False
        self._workers = WorkerModel()
        self.is_idle = True
        self.room: float = inf
        self._todo = ToDo()  # what was decided since the last call of `next`

    # ---- what has happened; times are on the monotonic clock -------------------------------------

    def came(self, run: QueuedRun) -> None:
        """Take a run that was submitted."""
        run.number = next(self._numbers)
        insort(self._waiting, run, key=_place)

    def begun(self, run: QueuedRun, now: float) -> None:
        """Note that a worker has begun a run."""
        if run.state is State.GIVEN:
            run.state, run.began_at = State.BEGUN, min(run.began_at, now)
        self._unbegun.discard(run)

    def freed(self, run: QueuedRun, took: float) -> None:
        """Note that the worker of a run is free.

        :param took: seconds that the run took
        """
        self._unbegun.discard(run)
        if run.following is not None:
            # A missed run had no virtual worker that the next run could go on with.
            run.following.goes_on = not run.is_missed
        self._end(run, self._workers.leave(run, took))

    def not_given(self, run: QueuedRun, now: float) -> None:
        """Note that the executor did not take a run."""
        self.freed(run, 0.0)
        self._not_before = now + self._jitter(PAUSE_AFTER_FAILURE)

    def answered(self, run: QueuedRun, outcome: ClaimOutcome, now: float) -> None:
        """Take the outcome of the claim of a run that was asked for."""
        self._asked.discard(run)
        self._outcomes.add(outcome)
        run.is_unanswered = outcome is ClaimOutcome.UNANSWERED
        if outcome is ClaimOutcome.GRANTED:
            self._granted.append(run)
        elif outcome in (ClaimOutcome.REFUSED, ClaimOutcome.FAILED):
            self._todo.refused.append((run, outcome))
            self._end(run, run.earliest)
        else:
            self._wait_again(run, now, outcome)
        if not self._asked:
            self._reserved, self._asked_at = 0, inf
            outcomes, self._outcomes = self._outcomes, set()
            self._note_outcomes(now, outcomes)

    def found(self, run: QueuedRun, outlook: Outlook, as_of: float, now: float) -> None:
        """Let a deferred run wait for a worker again, or end it, as a look at its task's row says.

        The seconds for which the run was deferred do not count as its lateness.

        :param as_of: when the look began
        """
        run.looked_at = max(run.looked_at, as_of)
        # The run may have been withdrawn since the look began.
        if outlook is Outlook.WAITS or run.state is not State.DEFERRED:
            return
        for each in run.backlog:
            each.excused += now - run.deferred_at
        if outlook is Outlook.ASKED_AGAIN:
            run.state = State.WAITING
            return
        self._waiting.remove(run)
        if outlook is Outlook.DROPPED:
            for each in run.backlog:
                each.state = State.OVER
                self._todo.refused.append((each, ClaimOutcome.REFUSED))
        else:
            self._todo.refused.append((run, ClaimOutcome.REFUSED))
            self._end(run, run.earliest)

    def stop(self) -> None:
        """Let no run begin any more."""
        self._stopped = True

    # ---- what is to be done ----------------------------------------------------------------------

    def next(self, now: float, workers: int | None) -> ToDo:
        """Return what is to be done, after all that has happened since the last call.

        :param workers: how many workers the executor has; ``None``: there is no limit of workers
        """
        self._workers.note_count(workers)
        self._deal_with_granted(now)
        free = self._workers.free
        self._free_since = min(self._free_since, now) if free - self._reserved >= 1 else inf
        wakes_at = inf
        if self._waiting:
            if self._stopped:
                self._withdraw_all(now)
            elif now >= self._not_before:
                self._deal(now, free)
                self._report_all_busy(now)
            wakes_at = self._wakes_at(now)
        busy = len(self._asked)
        if self._waiting:
            busy += len([run for run in self._waiting if run.state is State.WAITING])
        self.is_idle, self.room = busy == 0, max(0, self._workers.free - busy)
        todo, self._todo = self._todo, ToDo()
        todo.wakes_at = wakes_at
        return todo

    def _deal_with_granted(self, now: float) -> None:
        """Give the runs that were granted to the executor, or withdraw them after a stop."""
        granted, self._granted = self._granted, []
        for run in granted:
            if self._stopped:
                self._todo.withdrawn.append(run)
                self._end(run, run.earliest)
            else:
                # A run that needs no lock may have taken the reserved worker by now. Then this
                # granted run waits for the next free worker in the executor's own queue.
                self._give(run, now)

    def _note_outcomes(self, now: float, outcomes: set[ClaimOutcome]) -> None:
        """Decide how large the next asks are, and when they go out.

        :param outcomes: the outcomes of the last asks, of all kinds of runs together
        """
        if ClaimOutcome.UNANSWERED in outcomes:
            # So that what is still to be asked for does not wait until these claims have failed.
            self._growth = max(1, self._growth)
            pause = LOCKED_BACKOFF[min(self._unanswered, len(LOCKED_BACKOFF) - 1)]
            self._no_ask_before = now + self._jitter(pause)
            self._unanswered += 1
        elif outcomes:
            self._unanswered = 0
            if outcomes <= {ClaimOutcome.REFUSED, ClaimOutcome.DEFERRED}:
                self._growth = min(MOST_ASKED, max(1, self._growth * 2))
            else:
                self._growth = 0 if outcomes <= {ClaimOutcome.GRANTED, ClaimOutcome.BEYOND} else 1

    def _wait_again(self, run: QueuedRun, now: float, outcome: ClaimOutcome) -> None:
        """Put a run back at its place among the waiting runs."""
        run.state = State.WAITING
        if outcome is ClaimOutcome.DEFERRED:
            run.state, run.deferred_at = State.DEFERRED, now
        elif outcome is ClaimOutcome.UNLOCKED:
            run.claims = False
        elif outcome in (ClaimOutcome.LOCKED, ClaimOutcome.UNANSWERED):
            if outcome is ClaimOutcome.LOCKED:
                pause = LOCKED_BACKOFF[min(run.locked, len(LOCKED_BACKOFF) - 1)]
                run.not_before = now + self._jitter(pause)
                run.locked += 1
            # From now on the run is no misfire, because a worker was free for it in time. It may
            # begin late all the same, because that worker may have got another run by then.
            run.grace = None
        insort(self._waiting, run, key=_place)

    def _withdraw_all(self, now: float) -> None:
        """Withdraw the waiting runs that need a claim, and give the others to the executor."""
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            if run.claims:
                for each in run.backlog:
                    each.state = State.OVER
                    self._todo.withdrawn.append(each)
            else:
                self._give(run, now)

    def _deal(self, now: float, free: float) -> None:
        """Decide which waiting runs get the free workers, or are claimed for them."""
        if now < self._asked_at + PATIENCE:
            free -= self._reserved
        # While a run pauses because its task's row was locked, no other run of the task is claimed,
        # so that the task's runs stay in their order.
        pausing = {run.task_name for run in self._waiting if run.not_before > now}
        first: list[QueuedRun] = []
        others: list[QueuedRun] = []
        for run in self._waiting:
            if run.state is State.WAITING and run.task_name not in pausing:
                (first if run.kind.goes_first else others).append(run)
        # If a job runs the first run time of a backlog, later run times of the job wait for the
        # rest of the backlog. If they were claimed first, the rest of the backlog would be refused.
        # Runs that were deferred are such a backlog, too. If the next one were claimed while one of
        # them has a worker, its claim would be refused because of that run.
        backlogs = {
            run.job
            for run in self._workers.given
            if run.claims and (run.following is not None or run.excused)
        }
        others = [run for run in others if run.job not in backlogs]
        deferred: dict[JobKey, list[QueuedRun]] = {}
        for run in self._waiting:
            if run.state is State.DEFERRED:
                deferred.setdefault(run.job, []).append(run)
        others = [
            run
            for run in others
            if not (run.is_held or deferred) or not self._is_held(run, deferred.get(run.job, ()))
        ]
        # Takeovers and manual runs go first. If other runs are ready too, takeovers and manual runs
        # get at most half of the free workers, but at least one. The other runs get the rest. Runs
        # without an answer may be granted, and count toward the limit only of an ask that has them.
        # So each of them gets a worker before any run that was not asked for.
        unanswered, of_others = _unanswered_first(first), _unanswered_first(others)
        share = free
        if first and others and free < inf:
            share = max(unanswered, min(max(1.0, free // 2), free - of_others))
        taken = self._deal_to(first, min(free, share), now)
        self._deal_to(others, free - taken, now)
        for ask in self._todo.asks:
            self._asked_at = now
            self._asked.update(ask.runs)
            self._reserved += ask.most or 0
        stay = (State.WAITING, State.DEFERRED)
        self._waiting = [run for run in self._waiting if run.state in stay]

    def _is_held(self, run: QueuedRun, deferred: Sequence[QueuedRun]) -> bool:
        """Return whether a run waits until a look has read the row of an earlier, deferred run.

        Both are runs of one job. The run because of which the earlier run is deferred may be over,
        which only a look can find out. If the later run were claimed before that look, the earlier
        run and its backlog would be refused. A look from before a worker was free does not count,
        because the run in the way may have ended while the later run waited for the worker.
        """
        looked_at = [each.looked_at for each in deferred if each.due_at < run.due_at]
        is_held = min(looked_at, default=inf) < max(run.came, self._free_since)
        if not is_held or self._free_since < inf:
            if is_held and not run.is_held:
                self._todo.is_look_due = True
            run.is_held = is_held
        return is_held

    def _report_all_busy(self, now: float) -> None:
        """Decide whether a log line is to say that all workers have been busy for long."""
        workers = self._workers.count
        # No run has come before the first one's place in the queue.
        is_early = now <= _place(self._waiting[0])[0] + FULL_AFTER if self._waiting else True
        if workers is None or self._workers.free >= 1 or is_early:
            return
        waiting = [run for run in self._waiting if run.state is State.WAITING]
        longest = max((self._workers.wait_for_one(run, now) for run in waiting), default=0.0)
        if longest > FULL_AFTER and now > self._full_reported_at + FULL_INTERVAL:
            self._full_reported_at = now
            self._todo.all_busy = AllBusy(workers, len(waiting), longest)

    def _deal_to(self, ready: Sequence[QueuedRun], free: float, now: float) -> int:
        """Give ready runs to free workers, or ask for their claims.

        :return: how many workers these runs take
        """
        # No claims are asked for while an ask is under way, or shortly after one without an answer,
        # or while a given run has not begun. In the last case the executor's workers may be busy
        # with work that is not the scheduler's.
        pauses = now < self._no_ask_before
        asks = not (self._asked or pauses or (self._workers.count is not None and self._unbegun))
        asking = _Asking(free, self._growth) if asks else _Asking(0, 0)
        taken = 0
        for run in ready:
            has_worker = taken + 1 <= free
            if not (has_worker or asking.has_room_for(run)):
                break
            begins_at = self._workers.begins_at(run, now)
            run.is_missed, run.late_by = is_misfire(run, begins_at), lateness(run, begins_at)
            if run.claims and not run.is_missed:
                taken += asking.add(run, has_worker=has_worker)
            elif has_worker:
                run.overtakes = not run.is_missed and now >= self._asked_at + PATIENCE
                self._give(run, now)
                taken += 1
        self._todo.asks += asking.asks()
        return taken

    def _give(self, run: QueuedRun, now: float) -> None:
        """Give a run to the executor."""
        self._workers.give(run, now)
        run.state = State.GIVEN
        self._unbegun.add(run)
        self._todo.given.append(run)

    def _end(self, run: QueuedRun, at: float) -> None:
        """Note that a run is over, and put the next run of its submission into the queue."""
        run.state = State.OVER
        if run.following is not None:
            run.following.earliest = at
            run.following.number = run.number
            insort(self._waiting, run.following, key=_place)

    def _wakes_at(self, now: float) -> float:
        """Return when the next decision is possible, if no input comes before."""
        times = [self._asked_at + PATIENCE, self._not_before, self._no_ask_before]
        times += [run.not_before for run in self._waiting if run.state is State.WAITING]
        return min((time for time in times if time > now), default=inf)


class _Asking:
    """Collects the runs to ask for, in one ask for each kind of run.

    :param free: how many workers are free for these runs
    :param growth: multiplies the size of the asks; 0: only as many are asked for as are free
    """

    def __init__(self, free: float, growth: int) -> None:
        self._has_limit = free < inf
        size = max(FEWEST_ASKED, ASKED_PER_WORKER * free) * growth if growth else free
        self._size = min(MOST_ASKED, size if free >= 1 else 0)
        self._asks: dict[RunKind, Ask] = {}
        self._tasks: set[str] = set()

    def has_room_for(self, run: QueuedRun) -> bool:
        """Return whether the asks have room for a run. All runs without an answer have room."""
        return self._size > 0 and (run.is_unanswered or len(self._tasks) < self._size)

    def add(self, run: QueuedRun, *, has_worker: bool) -> bool:
        """Add a run, unless the asks have no room, or have another run of its task.

        A claim of a kind without a limit is granted if it can be. So such a run is added only if it
        has a worker, or if it may be granted already.

        :param has_worker: whether a worker is free for the run
        :return: whether the run reserves a worker
        """
        if self._has_limit and not has_worker and not run.kind.has_limit:
            has_worker = run.is_unanswered
            if not has_worker:
                return False
        if run.task_name in self._tasks or not self.has_room_for(run):
            return False
        self._tasks.add(run.task_name)
        ask = self._asks.setdefault(run.kind, Ask([], 0 if self._has_limit else None))
        ask.runs.append(run)
        if ask.most is None:
            return False
        ask.most += has_worker
        return has_worker

    def asks(self) -> list[Ask]:
        """Mark the runs as asked, and return the asks, except those for which no worker is left."""
        asks = [ask for ask in self._asks.values() if ask.most != 0]
        for run in (run for ask in asks for run in ask.runs):
            run.state = State.ASKED
        return asks


def _unanswered_first(runs: list[QueuedRun]) -> int:
    """Put the runs whose last claim had no answer first; return how many there are."""
    count = sum([run.is_unanswered for run in runs])
    if count:
        runs.sort(key=lambda run: not run.is_unanswered)
    return count


def _place(run: QueuedRun) -> tuple[float, int]:
    return min(run.came, run.retry_at), run.number
