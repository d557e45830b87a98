"""A history, sorted into runs, claims, fires, and the replicas' troubles."""

from __future__ import annotations

import json
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from apscheduler_tasklock.demo import history
from apscheduler_tasklock.demo.history import Event
from tests.chaos.bounds import BURST, BURST_NEAR, BURST_REACTION, POOL_BACK, REACTION, RECOVERY
from tests.chaos.history import ALONE, END_GROUP, FAR, POOL
from tests.chaos.pools import Pools
from tests.chaos.stretch import Stretch
from tests.chaos.tasks import OneOff


@dataclass(eq=False)
class Run(history.Run):
    """A run of a job, from its own events.

    :ivar died: when its worker process was dead before the run had ended; ``None`` if it was not
    :ivar believed: the last time at which its lock was not lost, as it found; ``None`` for never
    :ivar cut: when its coroutine was cancelled; ``None`` if it was not, or could not tell
    :ivar worker: the worker process that it was in; 0 for none
    :ivar seen: the time of its last event
    """

    believed: float | None = None
    cut: float | None = None
    worker: int = 0
    seen: float = -inf

    @property
    def process(self) -> str:
        """Who renews: the replica's own process, also for its pool."""
        return self.replica.removesuffix(POOL)

    @property
    def over(self) -> float:
        """When it ended, was cut, or its worker process was dead; ``inf`` for none of these."""
        return super().over if self.cut is None or self.ended is not None else self.cut

    def __str__(self) -> str:
        how = "takeover" if self.takeover else "run"
        return f"{how} of token {self.token} on {self.replica}, begun {self.begun:.3f}"


@dataclass(eq=False)
class Claim:
    """A claim, as the task lock table shows it.

    :ivar at: when it was granted
    :ivar window: where its window starts
    :ivar renewed: when it was last renewed, or granted
    :ivar until: when it ends if it is not renewed again
    :ivar released: when it was; infinity for never, here and below
    :ivar kept: whether its window stayed taken then
    :ivar handed_over: when its window was handed over to whoever takes it
    :ivar given_up: when another replica ended it for good
    :ivar lease_ended: when its own replica ended its lease, of a worker process that is dead, which
        leaves it to whoever takes it over
    :ivar after: the next claim of the task
    :ivar run_until: when its maximum lock ends
    :ivar worker: the worker process that ran it; 0 if none did
    """

    task: str
    replica: str
    token: int
    at: float
    window: float
    renewed: float
    until: float
    released: float = inf
    kept: bool = True
    handed_over: float = inf
    given_up: float = inf
    lease_ended: float = inf
    after: Claim | None = None
    run_until: float = inf
    worker: int = 0

    @property
    def process(self) -> str:
        """Who renews: the replica's own process, also for its pool."""
        return self.replica.removesuffix(POOL)

    @property
    def over(self) -> float:
        """When it was released, given up or followed by another one."""
        return min(self.released, self.given_up, inf if self.after is None else self.after.at)

    def end_before(self, after: Claim) -> None:
        """Let it have ended when another one was granted, if the row has had its end by then.

        A statement's time is that of its begin. On a busy server, one that began before a release
        may look at the row after it.
        """
        self.after = after
        for end in ("released", "handed_over", "given_up"):
            if after.at < getattr(self, end) < inf:
                setattr(self, end, after.at)

    def takes_over(self, before: Claim | None) -> bool:
        """Tell whether it took the window of the claim before it over."""
        if before is None or before.window != self.window or before.given_up < inf:
            return False
        return before.released > self.at

    def __str__(self) -> str:
        return f"claim of token {self.token} by {self.replica}, granted {self.at:.3f}"


# Kinds of trouble. A replica is stopped or dead; does not reach the server; gets its answers late;
# is slow for a moment, on a busy machine; or lost its connections, which it should survive.
PROCESS, PATH, LATE, SLOW, BLIP = "P", "N", "L", "S", "B"
UNABLE = PROCESS + PATH + LATE + SLOW
ANY = UNABLE + BLIP

# Seconds of the longest stall that counts as slow. A longer one counts as a stop.
_LONGEST_SLOW = 1.5


@dataclass(frozen=True)
class Trouble(Stretch):
    """When a replica could not do as usual.

    :ivar kind: one of the letters above
    """

    kind: str


class Records:
    """A history, sorted. A replica's pool of worker processes is a replica of its own here.

    :param events: in any order, but for the rows of tables, which are in the order of the tables
    :ivar runs: by task, in the order in which they began
    :ivar claims: by task, in the order in which they were granted
    :ivar claim_of: the last claim with a token, by task and token
    :ivar fires: of the replicas' schedulers, by task
    :ivar lives: by replica, from when it had its jobs until it ends or is told to
    :ivar skips: fires whose claims were given up, because the database was unavailable, by task
    :ivar misfires: by task
    :ivar early: runs of jobs that are not due for long
    :ivar one_offs: jobs that are due once, by id
    :ivar leaving: by replica, when it was told to end
    :ivar gone: by replica that was told to end, when it had
    :ivar far: replicas whose clock is far off
    :ivar died: replicas that ended on their own
    :ivar errors: what they logged as errors
    :ivar ended_groups: by replica, when it and its worker processes got SIGTERM
    :ivar killed_workers: by the id of a worker process, whose it was, and when it was killed
    :ivar orphaned: by replica, when its own process was killed, and no worker process of its
    :ivar pools: the worker processes, and when their pools broke
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.runs: dict[str, list[Run]] = defaultdict(list)
        self.claims: dict[str, list[Claim]] = defaultdict(list)
        self.claim_of: dict[str, dict[int, Claim]] = defaultdict(dict)
        self.fires: dict[str, list[Event]] = defaultdict(list)
        self.lives: dict[str, Stretch] = {}
        self.skips: dict[str, list[Event]] = defaultdict(list)
        self.misfires: dict[str, list[Event]] = defaultdict(list)
        self.early: list[Event] = []
        self.one_offs: dict[str, OneOff] = {}
        self.leaving: dict[str, float] = {}
        self.gone: dict[str, float] = {}
        self.far: set[str] = set()
        self.died = [event for event in events if event.kind == "died"]
        self.errors = [event for event in events if event.kind == "erred"]
        self._open: dict[tuple[str, str, int], Run] = {}
        self._wrote: dict[str, list[float]] = defaultdict(list)
        # Ids of tasks by their names, which differ if the id looks made up; see `_take_in_run`.
        self._ids: dict[str, str] = {}
        self.killed_workers: dict[int, tuple[str, float]] = {}
        for event in events:
            if event.kind == "worker killed":
                self.killed_workers.setdefault(event.worker, (event.replica, event.at))
        self.ended_groups = {
            event.replica: event.at
            for event in events
            if event.kind == "leaving" and event.detail == END_GROUP
        }
        self.orphaned = {
            event.replica: event.at
            for event in events
            if event.kind == "killed" and event.detail == ALONE
        }
        self._pools = {event.replica for event in events if event.kind == "ready"}
        self._pools = {replica for replica in self._pools if replica.endswith(POOL)}
        # The tasks that replicas with a pool run in it.
        self._pooled = {event.task for event in events if event.replica in self._pools}
        events = list(self._with_pools(events))
        # The sort is stable, so that events of one moment stay in the order of their lines.
        ordered = sorted(events, key=lambda event: event.at)
        self.pools = Pools(ordered)
        for event in ordered:
            self._take_in(event)
        for run in [run for runs in self.runs.values() for run in runs if run.worker]:
            self._kill(run)
        # Not in the order of time, because a row's time is from before it waited for a lock.
        for event in events:
            if event.kind in _ROWS:
                self._take_in_claim(event)
        self._live(ordered)
        self._troubles = _troubles(ordered, self.lives)
        self._fired = sorted(fire.at for fires in self.fires.values() for fire in fires)

    def _with_pools(self, events: Sequence[Event]) -> Iterator[Event]:
        """Yield all events. What concerns a replica concerns its pool."""
        for event in events:
            pool = event.replica + POOL
            if pool not in self._pools:
                yield event
            elif event.kind in _ROWS and event.task in self._pooled:
                yield replace(event, replica=pool)
            else:
                yield event
                if event.kind in _OF_THE_PROCESS:
                    yield replace(event, replica=pool)

    def troubles(self, replica: str, kinds: str = UNABLE) -> Iterator[Trouble]:
        """Yield when a replica was not able to do as usual."""
        for trouble in self._troubles[replica]:
            if trouble.kind in kinds:
                yield trouble

    def well(self, replica: str, begun: float, ended: float, kinds: str = UNABLE) -> bool:
        """Tell whether a replica lived, and had no such trouble, in a stretch of time."""
        life = self.lives.get(replica)
        if life is None or begun < life.begun or ended > life.ended:
            return False
        return not any(
            trouble.begun <= ended and begun <= trouble.ended
            for trouble in self.troubles(replica, kinds)
        )

    def able_by(self, replica: str, at: float, takes: float, kinds: str = ANY) -> float:
        """Return by when a replica has had so many seconds without trouble since then."""
        by = at + takes
        for trouble in sorted(self.troubles(replica, kinds), key=lambda trouble: trouble.begun):
            if trouble.begun <= by and trouble.ended + RECOVERY >= at:
                by = max(by, trouble.ended + RECOVERY + takes)
        return by

    def worker_able_by(self, run: Run, at: float, takes: float) -> float:
        """Return by when a run's worker process has had so many seconds without being stopped."""
        by = at + takes
        for stop in sorted(self.pools.stops(run.worker), key=lambda stop: stop.begun):
            if stop.begun <= by and stop.ended >= at:
                by = max(by, stop.ended + takes)
        return by

    def runs_there(self, task: str, replica: str) -> bool:
        """Tell whether it is this part of a replica that runs a task: it, or its pool."""
        if replica in self._pools:
            return task in self._pooled
        return task not in self._pooled or replica + POOL not in self._pools

    def wrote_before(self, replica: str, at: float) -> float:
        """Return when a replica last changed a row before that; so it reached the server then."""
        return max((moment for moment in self._wrote[replica] if moment < at), default=-inf)

    def reaction(self, at: float) -> float:
        """Return within how many seconds a replica that is well does what is due."""
        near = bisect(self._fired, at + BURST_NEAR) - bisect(self._fired, at - BURST_NEAR)
        return BURST_REACTION if near >= BURST else REACTION

    def _take_in(self, event: Event) -> None:
        by_task = {"fire": self.fires, "skipped": self.skips, "misfired": self.misfires}
        if event.kind in by_task:
            by_task[event.kind][event.task].append(event)
        elif event.kind in _BELIEFS:
            self._take_in_run(event)
        elif event.kind == "early":
            self.early.append(event)
        elif event.kind == "gone":
            self.gone[event.replica] = event.at
        elif event.kind == "ready" and event.detail == FAR:
            self.far.add(event.replica)
        elif event.kind == "planned":
            one_off = OneOff(**json.loads(event.detail))
            self.one_offs[one_off.id] = one_off

    def _take_in_claim(self, event: Event) -> None:
        task = self._ids.get(event.task, event.task)
        self._wrote[event.replica].append(event.at)
        if event.kind == "claimed":
            claim = Claim(
                task, event.replica, event.token, event.at, event.due, event.at, event.until
            )
            claim.run_until = inf if event.run_until is None else event.run_until
            run = self._open.get((task, event.replica, event.token))
            claim.worker = 0 if run is None else run.worker
            if self.claims[task]:
                self.claims[task][-1].end_before(claim)
            self.claims[task].append(claim)
            self.claim_of[task][event.token] = claim
            return
        claim = self.claim_of[task][event.token]
        match event.kind:
            case "renewed":
                claim.renewed, claim.until = event.at, event.until
                claim.lease_ended = inf
            case "released":
                claim.released, claim.kept = event.at, event.kept
            case "handed over":
                claim.handed_over, claim.until = event.at, event.until
            case "lease ended":
                claim.lease_ended, claim.until = event.at, event.until
            case _:
                claim.given_up = event.at

    def _take_in_run(self, event: Event) -> None:
        key = (event.task, event.replica, event.token)
        if event.kind == "begin":
            due = event.at if event.due is None else event.due
            run = Run(event.task, event.replica, due, event.at, token=event.token)
            run.takeover, run.worker = event.takeover, event.worker
            self._open[key] = run
            self.runs[event.task].append(run)
            if event.detail:
                self._ids[event.detail] = event.task
        run = self._open[key]
        run.seen = event.at
        if not event.lost:
            run.believed = event.at
        if event.kind == "end":
            run.ended = event.at
        elif event.kind == "cut":
            run.cut = event.at

    def _kill(self, run: Run) -> None:
        """Note when a run was over since its worker process was dead."""
        broke = self.pools.may_have_broken(run.replica, run.worker, run.begun)
        lost = min(broke, self.orphaned.get(run.process, inf))
        if run.ended is None and lost < inf:
            run.died = max(lost, self.pools.ended(run.worker))

    def _live(self, ordered: Sequence[Event]) -> None:
        ready = {event.replica: event.at for event in ordered if event.kind == "ready"}
        closing = [event.at for event in ordered if event.kind == "closing"]
        last = ordered[-1].at if ordered else 0.0
        gone = {
            event.replica: event.at
            for event in reversed(ordered)
            if event.kind in ("killed", "leaving", "died")
        }
        for replica, begun in ready.items():
            ended = min(gone.get(replica, inf), *closing, last)
            self.lives[replica] = Stretch(begun, ended)
        killed = {event.replica for event in ordered if event.kind in ("killed", "died")}
        told = {event.replica: event.at for event in ordered if event.kind == "leaving"}
        for replica in self.lives:
            if replica not in killed and (replica in told or closing):
                self.leaving[replica] = told.get(replica, *closing)


# What a run tells of itself.
_BELIEFS = ("begin", "holds", "end", "cut")

# What is done to a replica's process, and so to its pool.
_OF_THE_PROCESS = (
    *("killed", "stopped", "continued", "hung", "freed", "cut off", "terminated", "leaving"),
    *("gone", "stalled"),
)

# What the task lock table shows.
_ROWS = ("claimed", "renewed", "released", "handed over", "given up", "lease ended")

# What begins a trouble, what ends it, and its kind.
_LASTING: dict[str, tuple[tuple[str, ...], str]] = {
    "killed": ((), PROCESS),
    "stopped": (("continued",), PROCESS),
    "hung": (("freed",), PATH),
    "down": (("up",), PATH),
    "slowed": (("quick",), LATE),
    # A kill ends it as well, since that process cannot be continued. What is left is its kill.
    "worker stopped": (("worker continued", "worker killed"), PROCESS),
}


def _troubles(ordered: Sequence[Event], lives: dict[str, Stretch]) -> dict[str, list[Trouble]]:
    found: dict[str, list[Trouble]] = defaultdict(list)
    for number, event in enumerate(ordered):
        trouble = _trouble(event, ordered[number:])
        if trouble is None:
            continue
        for replica in [event.replica] if event.replica else list(lives):
            found[replica].append(trouble)
    return found


def _trouble(event: Event, events: Sequence[Event]) -> Trouble | None:
    """Return the trouble of a replica that begins with an event, the first of these."""
    match event.kind:
        case "gone":
            return Trouble(event.at, inf, PROCESS)
        case "stalled":
            slow = event.until - event.at < _LONGEST_SLOW
            return Trouble(event.at, event.until, SLOW if slow else PROCESS)
        case "worker killed":
            # Its pool is replaced when it is next needed, which ends what else waits in it.
            return Trouble(event.at, event.at + POOL_BACK, PROCESS)
        case "cut off" | "terminated":
            return Trouble(event.at, event.at, BLIP)
    return _lasting(event, events) if event.kind in _LASTING else None


def _lasting(event: Event, events: Sequence[Event]) -> Trouble:
    ends, kind = _LASTING[event.kind]
    return Trouble(event.at, _end(events, *ends), kind)


def _end(events: Sequence[Event], *kinds: str) -> float:
    """Return when what the first event began was over: at the first of these kinds of event."""
    whose = (events[0].replica, events[0].worker)
    ends = (e.at for e in events if e.kind in kinds and (e.replica, e.worker) == whose)
    return next(ends, inf)
