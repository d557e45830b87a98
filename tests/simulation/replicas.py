"""Replicas of an application on a clock that the test moves, and their runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from math import ceil
from typing import Any
from uuid import UUID

from apscheduler_tasklock._database.connection import attempt_limit
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock.errors import TaskLockOptionError, TaskLockStateError
from apscheduler_tasklock.events import EVENT_TASK_LOCK_ALL, TaskLockEvent
from apscheduler_tasklock.options import parse_positive_seconds, parse_seconds
from apscheduler_tasklock.testing import rule
from tests.simulation.replica import (
    ReplicaRun,
    SimulatedExecutor,
    SimulatedScheduler,
    is_in_a_job,
    simulating,
    sleep,
)
from tests.simulation.timeline import timeline
from tests.simulation.world import BEGIN, Process, World
from tests.support.waist import (
    Claim,
    ClaimRequest,
    ClaimTimes,
    MemoryTaskLocks,
    MissNote,
    ReleaseRequest,
    RunOutcome,
    ScheduleNote,
    Statements,
)

# The begin of most simulations.
MIDNIGHT = datetime(2026, 3, 1, tzinfo=timezone.utc)
# Limits the seconds within which the replicas of a deployment start.
STARTS_WITHIN = 2.0
# Added to a row's times, because a look finds the row only after such a time.
JUST_AFTER = timedelta(milliseconds=1)


@dataclass(eq=False)
class SimulatedRun:
    """A run of a job on a simulated replica. Its times are in the time zone of the start.

    :ivar job_id: the job's id
    :ivar run_time: the run time, by the replica's scheduler
    :ivar replica: the name of the replica
    :ivar began_at: when the job's function was called, by a correct clock
    :ivar ended_at: when the run ended, was cut, or died with its replica; ``None`` while it goes on
    :ivar kind: ``"schedule"``, ``"takeover"`` of another replica's run, ``"retry"`` of a run that
        has failed, or ``"manual"``
    :ivar outcome: ``"ok"``, ``"error"``, ``"cancelled"`` by a stop, ``"died"`` with its replica;
        ``""`` while it goes on
    :ivar token: the fencing token; ``None`` for a job without a lock
    :ivar attempt: which attempt at its run time it is
    """

    job_id: str
    run_time: datetime
    replica: str
    began_at: datetime
    ended_at: datetime | None
    kind: str
    outcome: str
    token: int | None
    attempt: int = 1


@dataclass(frozen=True)
class SimulatedMiss:
    """A run time that a replica's look has noted as missed.

    :ivar noted_at: by a correct clock
    :ivar replica: the name of the replica
    """

    task_name: str
    run_time: datetime
    cause: str
    reason: str
    noted_at: datetime
    replica: str


class SimulatedReplica:
    """A replica. :class:`SimulatedReplicas` makes it.

    :ivar name: the replica's name, which is also its replica id
    :ivar scheduler: the running scheduler, to which jobs and listeners can be added
    :ivar events: the lock's events that its listeners got
    """

    def __init__(
        self,
        name: str,
        scheduler: SimulatedScheduler,
        executor: SimulatedExecutor,
        process: Process,
        started_at: datetime,
        clock_offset: timedelta,
    ) -> None:
        self.name = name
        self.scheduler = scheduler
        self.events: list[TaskLockEvent] = []
        self.executor = executor
        self.process = process
        self.started_at = started_at
        self.clock_offset = clock_offset
        self.gone_at: datetime | None = None
        self.looked_at: datetime | None = None
        self.seen = -1  # the number of the rows' last change that it has seen
        scheduler.add_listener(self.events.append, EVENT_TASK_LOCK_ALL)

    @property
    def is_alive(self) -> bool:
        """Whether the replica was neither killed nor stopped."""
        return self.gone_at is None

    def __repr__(self) -> str:
        return f"<SimulatedReplica {self.name!r}{'' if self.is_alive else ' gone'}>"


class SimulatedReplicas:
    """Replicas of an application that share their tasks, on a clock that the test moves.

    Each replica has a scheduler of APScheduler and a ``TaskLockExecutor``. The application's own
    functions are called at run times of APScheduler's own triggers. The library's own code decides
    in memory which replica runs them. Nothing sleeps and nothing runs in parallel, so that a
    simulation with the same seed goes the same way each time, if the application's functions do.

    .. code-block:: python

        start = datetime(2026, 3, 1, tzinfo=timezone.utc)
        simulation = SimulatedReplicas(3, start=start, add_jobs=add_jobs)
        simulation.advance(hours=5)
        for run in simulation.runs_of("sync-prices"):
            print(run.run_time, run.replica, run.outcome)

    Simulated are the submissions of schedulers, the delay of claims, a pool of ten workers and an
    event loop, the lengths of runs, leases, renewals and takeovers, the poll, clocks that differ,
    and replicas that start, stop and are killed. A function is called when its run begins. The
    length of its run passes after its return, so that its effects remain if its replica is killed
    meanwhile.

    Not simulated are the database, and so outages other than :meth:`cut_off` and :meth:`reject`;
    paused processes; ``cancel_on_lost``; a ``TaskLockJobStore``; operations of operators; and the
    time after which a stopped replica counts as gone. ``datetime.now()`` and ``time.sleep()`` in
    the application's functions are real: use :attr:`now` and :meth:`sleep`.

    An interval without a start date begins when its job is added, in simulated time. Give other
    triggers by their aliases, or with all of their dates. The schedulers have only the executor
    ``default``. A job for another executor is not run, and an ERROR says so.

    :param replicas: the number of replicas at the beginning, called ``"replica-1"`` and so on
    :param start: the begin of the simulation, with the time zone of the schedulers
    :param add_jobs: the application's set-up, called with the scheduler of each replica that
        starts; :attr:`add_jobs` can be changed on the way, as by a new version
    :param durations: the lengths of runs by job id, as seconds or ``timedelta``; other runs take no
        time. The mapping can be changed on the way.
    :param clock_offsets: by how much the clocks of the first replicas are ahead, as seconds or
        ``timedelta``
    :param latency: the limit of a claim's random delay, in seconds or as ``timedelta``
    :param look_latency: how long after its statement each answer of a look comes; below the time
        between two looks
    :param seed: the seed of all random decisions, such as which replica is first; also of the
        module ``random`` while time passes, for jitter
    :param options: of the ``TaskLockExecutor``, as ``failover=True``
    :raises TaskLockOptionError: an option is invalid
    """

    def __init__(
        self,
        replicas: int = 2,
        *,
        start: datetime,
        add_jobs: Callable[[Any], object] | None = None,
        durations: Mapping[str, float | timedelta] | None = None,
        clock_offsets: Sequence[float | timedelta] = (),
        latency: float | timedelta = 0.05,
        look_latency: float | timedelta = 0.0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        where = type(self).__name__
        if start.tzinfo is None:
            raise TaskLockOptionError(f"{where}: start must have a time zone, as {start!r} has not")
        self.durations: dict[str, float | timedelta] = dict(durations or {})
        self.runs: list[SimulatedRun] = []
        self.start_time = start
        self._zone = start.tzinfo
        self._world = World(seed, start.astimezone(timezone.utc))
        self._locks = MemoryTaskLocks(self._world.database_time)
        self._latency = parse_seconds(latency, "latency", where)
        self._look_latency = parse_seconds(look_latency, "look_latency", where)
        self.misses: list[SimulatedMiss] = []
        # The replicas that have noted a changed schedule, and what they have noted.
        self.reschedulings: list[tuple[str, str]] = []
        self.add_jobs = add_jobs
        self._options = options
        self._seed = seed
        self._random = random.Random(seed)  # noqa: S311  # repeatable, not secret
        self._shared_random = self._random.getstate()
        self._replicas: list[SimulatedReplica] = []
        self._changes = 0
        self._requests = 0  # manual runs that were asked for
        self._under_way: dict[ReplicaRun, SimulatedRun] = {}
        for number in range(replicas):
            offset = clock_offsets[number] if number < len(clock_offsets) else 0.0
            self.start_replica(clock_offset=offset)

    @property
    def now(self) -> datetime:
        """The time, by a correct clock."""
        return self._now.astimezone(self._zone)

    @property
    def _now(self) -> datetime:
        return self._world.database_time()

    def __iter__(self) -> Iterator[SimulatedReplica]:
        """Iterate over the replicas that are alive."""
        return iter([replica for replica in self._replicas if replica.is_alive])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> SimulatedReplica:
        """Return the last replica of a name, also one that is gone.

        :raises KeyError: there is no such replica
        """
        for replica in reversed(self._replicas):
            if replica.name == name:
                return replica
        raise KeyError(name)

    def runs_of(self, job_id: str) -> list[SimulatedRun]:
        """Return the runs of a job, in the order in which they began."""
        return [run for run in self.runs if run.job_id == job_id]

    def start_replica(
        self,
        name: str | None = None,
        *,
        clock_offset: float | timedelta = 0.0,
        **options: Any,
    ) -> SimulatedReplica:
        """Start another replica within the next two seconds. Its jobs are added at once.

        :param name: the replica's name; by default the next number
        :param clock_offset: by how much the replica's clock is ahead, as seconds or ``timedelta``
        :param options: of its ``TaskLockExecutor``, in place of those of all replicas
        :raises TaskLockOptionError: a live replica has this name
        """
        name = name or f"replica-{len(self._replicas) + 1}"
        if any(replica.name == name for replica in self):
            raise TaskLockOptionError(f"there is a replica {name!r} already, which is alive")
        if isinstance(clock_offset, timedelta):
            offset = clock_offset
        else:
            offset = timedelta(seconds=clock_offset)
        started_at = self._now + timedelta(seconds=self._random.uniform(0.001, STARTS_WITHIN))

        def local_now() -> datetime:
            return (max(self._now, started_at) + offset).astimezone(self._zone)

        process = Process(name, skew=offset.total_seconds())
        self._world.processes.append(process)
        stable_from = started_at + timedelta(seconds=attempt_limit(10) + Timings().recovery_grace)
        with self._seeded(), simulating(self._world), self._world.acting(process):
            executor = SimulatedExecutor(
                self, self._world, process, self._locks, local_now, **{**self._options, **options}
            )
            executor.client.outage.is_stable = lambda: self._now >= stable_from
            scheduler = SimulatedScheduler(
                local_now, executors={"default": executor}, timezone=self._zone
            )
            scheduler.start()
            replica = SimulatedReplica(name, scheduler, executor, process, started_at, offset)
            scheduler.on_shutdown = partial(self._gone, replica)
            self._replicas.append(replica)
            if self.add_jobs is not None:
                self.add_jobs(scheduler)
        return replica

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Give the module ``random`` the simulation's seed, because triggers' jitter uses it."""
        before = random.getstate()
        random.setstate(self._shared_random)
        try:
            yield
        finally:
            self._shared_random = random.getstate()
            random.setstate(before)

    def kill(self, replica: SimulatedReplica | str) -> None:
        """Kill a replica, as SIGKILL does: its claims are neither renewed nor released.

        The replica may be stopping, as at the end of a container's grace period.
        """
        found = self._find(replica)
        is_gone = not (found.is_alive or found.executor.running)
        if is_gone or found.process.is_dead:
            raise _gone_already(found)
        found.process.killed_at = self._world.now
        for run in found.executor.running:
            self._note_end(run, "died")
        self._gone(found)
        self.changed()

    def stop(self, replica: SimulatedReplica | str) -> None:
        """Stop a replica, as its scheduler's shutdown does.

        The replica claims nothing more. Functions go on to their ends. Coroutines are cut, and with
        ``failover`` another replica runs their windows again.
        """
        found = self._find(replica)
        if not found.is_alive:
            raise _gone_already(found)
        with simulating(self._world), self._world.acting(found.process):
            found.scheduler.shutdown(wait=False)
        self.changed()

    def _find(self, replica: SimulatedReplica | str) -> SimulatedReplica:
        return self[replica] if isinstance(replica, str) else replica

    def _gone(self, replica: SimulatedReplica) -> None:
        if replica.gone_at is None:
            replica.gone_at = self._now

    def cut_off(self, replica: SimulatedReplica | str, duration: float | timedelta) -> None:
        """Let a replica's claims and looks have no answer. Its renewals and releases go on.

        :param duration: seconds or ``timedelta``
        """
        seconds = parse_seconds(duration, "duration", "cut_off()")
        self._find(replica).executor.client.lines.cut_until = self._world.now + seconds

    def reject(self, replica: SimulatedReplica | str, duration: float | timedelta) -> None:
        """Let the database reject a replica's claims and looks, as if a right was missing.

        :param duration: seconds or ``timedelta``
        """
        seconds = parse_seconds(duration, "duration", "reject()")
        self._find(replica).executor.client.lines.rejected_until = self._world.now + seconds

    def delay_answers(self, replica: SimulatedReplica | str, delay: float | timedelta) -> None:
        """Let the answers of a replica's claims come late, as if it was suspended meanwhile.

        :param delay: seconds or ``timedelta``
        """
        seconds = parse_seconds(delay, "delay", "delay_answers()")
        self._find(replica).executor.client.lines.answers_take = seconds

    def break_pool(self, replica: SimulatedReplica | str, duration: float | timedelta) -> None:
        """Let a replica's pool of workers raise an error for each run that it is given.

        :param duration: seconds or ``timedelta``
        """
        seconds = parse_seconds(duration, "duration", "break_pool()")
        self._find(replica).executor.pool.raises_until = self._world.now + seconds

    def pause(self, task_name: str) -> None:
        """Pause a task, as an operator does, for an hour."""
        rows = self._locks.rows
        rows[task_name] = rule.pause(rows[task_name], 3600.0, self._now, "operator")
        self.changed()

    def hold(self, task_name: str, duration: float | timedelta) -> int:
        """Hold a task's lock for a while, as ``TaskLocks.hold`` does; return the fencing token.

        :param duration: seconds or ``timedelta``
        """
        seconds = parse_seconds(duration, "duration", "hold()")
        holder = Statements(self._locks.protocol("holder"))
        claim_id = UUID(int=self._random.getrandbits(128))
        request = ClaimRequest(task_name, 0.0, 2 * seconds, claim_id=claim_id)
        token = holder.ask(Claim(request, ClaimTimes())).token

        def release() -> None:
            holder.ask(ReleaseRequest(task_name, claim_id, RunOutcome(outcome="ok")))
            self.changed()

        self._world.call_at(self._world.now + seconds, release)
        return token

    def request_run(self, task_name: str) -> None:
        """Ask for a manual run of a task, as an operator does."""
        rows, request_id = self._locks.rows, UUID(int=self._random.getrandbits(128))
        rows[task_name] = rule.request_run(
            rows[task_name], request_id, "operator", 3600.0, self._now
        )
        self._requests += 1
        self.changed()

    def sleep(self, duration: float | timedelta) -> None:
        """Let the job that calls this take longer.

        :param duration: seconds or ``timedelta``
        :raises TaskLockStateError: the caller is no job of the simulation
        """
        if not is_in_a_job():
            raise TaskLockStateError("sleep() is for a job; call advance() outside of one")
        sleep(self._world, parse_seconds(duration, "duration", "sleep()"))

    def advance(self, duration: timedelta | None = None, **units: float) -> list[SimulatedRun]:
        """Move the clock, and carry out all that comes due until then.

        :param duration: the distance
        :param units: the distance in the units of ``timedelta``, as ``hours=5``
        :return: the runs that began meanwhile
        :raises TaskLockStateError: the caller is a job
        :raises TaskLockOptionError: the distance is not above 0
        """
        if is_in_a_job():
            raise TaskLockStateError("a job cannot advance the clock; it can sleep()")
        duration = (duration or timedelta()) + timedelta(**units)
        parse_positive_seconds(duration, "duration", "advance()")
        until, before = self._now + duration, len(self.runs)
        with self._seeded(), simulating(self._world):
            while True:
                step = self._next()
                at = self._monotonic(until if step is None else min(until, step[0]))
                if self._world.next_at <= at:
                    self._world.run(self._world.next_at)
                    continue
                self._world.run(max(at, self._world.now))
                if step is None or step[0] > until:
                    break
                _, process, action = step
                with self._world.acting(process):
                    action()
        return self.runs[before:]

    def _monotonic(self, moment: datetime) -> float:
        return BEGIN + (moment - self._world.start_time).total_seconds()

    def _next(self) -> tuple[datetime, Process, Callable[[], None]] | None:
        """Return the next pass of a scheduler or the next look: its time, process and function."""
        found: list[tuple[datetime, Process, Callable[[], None]]] = []
        calls_at = self._calls_at()
        for replica in self._replicas:
            if replica.is_alive:
                due_at = replica.scheduler.due_at
                if due_at is not None:
                    at = max(due_at - replica.clock_offset, replica.started_at)
                    found.append((at, replica.process, replica.scheduler.process_jobs))
                look_at = self._looks_at(replica, calls_at)
                if look_at is not None:
                    found.append((look_at, replica.process, partial(self._look, replica)))
        return min(found, key=lambda step: step[0], default=None)

    def _calls_at(self) -> datetime | None:
        """Return the first moment at which a look finds a row, by the look's condition."""
        rows = list(self._locks.rows.values())
        times = [row.due_at if row.finished else row.locked_until for row in rows]
        times += [row.retry_at for row in rows if row.is_retry_pending(self._now)]
        return min((time for time in times if time is not None), default=None)

    def _looks_at(self, replica: SimulatedReplica, calls_at: datetime | None) -> datetime | None:
        """Return when a replica looks at the rows next.

        It looks at its interval. Looks that cannot find anything are left out.
        """
        if not replica.executor.looks:
            return None
        if replica.looked_at is None:
            return replica.started_at
        if replica.executor.is_woken:
            return max(self._now, replica.looked_at + JUST_AFTER)
        wanted = calls_at
        if replica.seen != self._changes and replica.executor.is_watching:
            wanted = self._now
        executor = replica.executor
        if executor.is_in_leader_mode or executor.has_notes or self._requests:
            wanted = replica.looked_at
        if wanted is None:
            return None
        wanted = max(wanted + JUST_AFTER, self._now, replica.looked_at + JUST_AFTER)
        interval = timedelta(seconds=replica.executor.poll_interval)
        return replica.started_at + interval * ceil((wanted - replica.started_at) / interval)

    def _look(self, replica: SimulatedReplica) -> None:
        replica.looked_at, replica.seen = self._now, self._changes
        replica.executor.look()

    # The methods of the protocol ``Simulation``, for the replicas.

    def latency(self) -> float:
        """Return the seconds that a claim takes to the database. For the simulation's own use."""
        return self._random.uniform(0, self._latency)

    def look_latency(self) -> float:
        """Return the seconds that each answer of a look takes. For the simulation's own use."""
        return self._look_latency

    def miss(self, replica: str, notes: Sequence[MissNote]) -> None:
        """Note run times that a look has noted as missed. For the simulation's own use."""
        self.misses += [
            SimulatedMiss(
                note.task_name,
                run_time.astimezone(self._zone),
                note.cause,
                note.reason,
                self.now,
                replica,
            )
            for note in notes
            for run_time in note.run_times
        ]

    def reschedule(self, replica: str, notes: Sequence[ScheduleNote]) -> None:
        """Note changes of schedules that a look has noted. For the simulation's own use."""
        self.reschedulings += [(replica, note.reason) for note in notes]

    def changed(self) -> None:
        """Note that rows have changed. For the simulation's own use."""
        self._changes += 1

    def begin(self, run: ReplicaRun) -> None:
        """Note the call of a run's function. For the simulation's own use."""
        held = run.held
        kind = "schedule"
        if held is not None and self._locks.rows[held.name].kind == "manual":
            kind = "manual"
        if held is not None and held.attempt > 1:
            kind = "retry"
        if held is not None and held.is_takeover:
            kind = "takeover"
        entry = SimulatedRun(
            run.job_id,
            run.run_time,
            run.replica,
            self.now,
            None,
            kind,
            "",
            None if held is None else held.token,
            1 if held is None else held.attempt,
        )
        self.runs.append(entry)
        self._under_way[run] = entry

    def duration(self, run: ReplicaRun) -> float:
        """Return how long a run goes on. For the simulation's own use."""
        return parse_seconds(self.durations.get(run.job_id, 0.0), "duration", run.job_id)

    def end(self, run: ReplicaRun, outcome: str) -> None:
        """Note that a run is over. For the simulation's own use."""
        if not self[run.replica].process.is_dead:
            self._note_end(run, outcome)

    def _note_end(self, run: ReplicaRun, outcome: str) -> None:
        entry = self._under_way.pop(run)
        entry.ended_at, entry.outcome = self.now, outcome

    def __str__(self) -> str:
        """Return a timeline: for each job the runs of each replica."""
        lives = [(replica.name, replica.started_at, replica.gone_at) for replica in self._replicas]
        return timeline(self.runs, lives, self.start_time, self.now)


def at(minutes: float) -> datetime:
    """Return the time so many minutes after midnight."""
    return MIDNIGHT + timedelta(minutes=minutes)


def simulated(
    add_jobs: Callable[[Any], object] | None = None, replicas: int = 1, **options: Any
) -> SimulatedReplicas:
    """Return replicas that start at midnight."""
    return SimulatedReplicas(replicas, start=MIDNIGHT, add_jobs=add_jobs, **options)


def _gone_already(replica: SimulatedReplica) -> TaskLockStateError:
    return TaskLockStateError(f"replica {replica.name!r} is gone already")
