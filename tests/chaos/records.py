"""A history, sorted into runs, claims, fires, and the replicas' troubles."""

from __future__ import annotations

import json
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from apscheduler_tasklock.demo import history
from apscheduler_tasklock.demo.history import Event
from tests.chaos.bounds import BURST, BURST_NEAR, BURST_REACTION, POOL_BACK, REACTION, RECOVERY
from tests.chaos.history import ALONE, FAR, POOL
from tests.chaos.pools import Pools
from tests.chaos.tasks import ChaosTask, OneOff


@dataclass(eq=False)
class Run(history.JudgedRun):
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

    @property
    def has_ended_alive(self) -> bool:
        """Whether it was released by its holder, and not handed over."""
        return self.over <= self.until and self.handed_over == inf

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


# Kinds of trouble. A replica is stopped or dead, or a worker process of its is stopped; it does not
# reach the server; gets its answers late; is slow for a moment, on a busy machine; or lost its
# connections, which it should survive.
STOPPED, PATH, LATE, SLOW, BLIP = "W", "N", "L", "S", "B"
PROCESS = "P" + STOPPED
UNABLE = PROCESS + PATH + LATE + SLOW
ANY = UNABLE + BLIP

# Seconds of the longest stall that counts as slow. A longer one counts as a stop.
_LONGEST_SLOW = 1.5

# What begins a trouble, its kind, and what ends it. A kill ends the stop of a worker process, too,
# since that process cannot be continued. What is left is its kill.
_TROUBLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "killed": ("P", ()),
    "gone": ("P", ()),
    "stopped": ("P", ("continued",)),
    "hung": (PATH, ("freed",)),
    "down": (PATH, ("up",)),
    "slowed": (LATE, ("quick",)),
    "cut off": (BLIP, ()),
    "terminated": (BLIP, ()),
    "stalled": (SLOW, ()),
    "worker stopped": (STOPPED, ("worker continued", "worker killed")),
    "worker killed": ("P", ()),
}

# Seconds of troubles that nothing ends. A pool of which a worker process was killed is replaced
# when it is next needed, which ends what else waits in it.
_LASTS = {"cut off": 0.0, "terminated": 0.0, "worker killed": POOL_BACK}

# What a run tells of itself.
_BELIEFS = ("begin", "holds", "end", "cut")

# What is done to a replica's process, and so to its pool.
_OF_THE_PROCESS = (
    *("killed", "stopped", "continued", "hung", "freed", "cut off", "terminated", "leaving"),
    *("gone", "stalled"),
)

# What the task lock table shows.
_ROWS = ("claimed", "renewed", "released", "handed over", "given up", "lease ended")


@dataclass(frozen=True)
class Stretch:
    """A stretch of time: a replica's life, or when it could not do as usual.

    :ivar kind: of trouble, one of the letters above
    :ivar worker: the worker process that had it; 0 if it was not a single one
    """

    begun: float
    ended: float
    kind: str = ""
    worker: int = 0

    def meets(self, begun: float, ended: float) -> bool:
        """Tell whether it has a moment in common with another one."""
        return self.begun <= ended and begun <= self.ended


class Records:
    """A history, sorted. A replica's pool of worker processes is a replica of its own here.

    :param events: in any order, but for the rows of tables, which are in the order of the tables
    :ivar runs: by task, in the order in which they began
    :ivar claims: by task, in the order in which they were granted
    :ivar claim_of: the last claim with a token, by task and token
    :ivar lives: by replica, from when it had its jobs until it ends or is told to
    :ivar one_offs: jobs that are due once, by id
    :ivar leaving: by replica that was not killed, when it was told to end
    :ivar pools: the worker processes, and when their pools broke
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.runs: dict[str, list[Run]] = defaultdict(list)
        self.claims: dict[str, list[Claim]] = defaultdict(list)
        self.claim_of: dict[str, dict[int, Claim]] = defaultdict(dict)
        self.lives: dict[str, Stretch] = {}
        self._told: dict[tuple[str, str | None], list[Event]] = defaultdict(list)
        self._open: dict[tuple[str, str, int], Run] = {}
        self._wrote: dict[str, list[float]] = defaultdict(list)
        # Ids of tasks by their names, which differ if the id looks made up; see `_take_in_run`.
        self._ids: dict[str, str] = {}
        ready = {event.replica for event in events if event.kind == "ready"}
        self._with_pool = {replica for replica in ready if replica.endswith(POOL)}
        # The tasks that replicas with a pool run in it.
        self._pooled = {event.task for event in events if event.replica in self._with_pool}
        events = list(self._with_pools(events))
        # The sort is stable, so that events of one moment stay in the order of their lines.
        ordered = sorted(events, key=lambda event: event.at)
        self.pools = Pools(ordered)
        for event in ordered:
            self._told[event.kind, None].append(event)
            self._told[event.kind, event.task].append(event)
            if event.kind in _BELIEFS:
                self._take_in_run(event)
        for run in [run for runs in self.runs.values() for run in runs if run.worker]:
            self._kill(run)
        # Not in the order of time, because a row's time is from before it waited for a lock.
        for event in events:
            if event.kind in _ROWS:
                self._take_in_claim(event)
        self._far = set(self.when("ready", FAR))
        planned = [OneOff(**json.loads(event.detail)) for event in self.told("planned")]
        self.one_offs = {one_off.id: one_off for one_off in planned}
        self._live(ordered[-1].at if ordered else 0.0)
        self._troubles = _troubles(ordered, self.lives)
        self._fired = [fire.at for fire in self.told("fire")]

    def _with_pools(self, events: Sequence[Event]) -> Iterator[Event]:
        """Yield all events. What concerns a replica concerns its pool."""
        for event in events:
            pool = event.replica + POOL
            if pool not in self._with_pool:
                yield event
            elif event.kind in _ROWS and event.task in self._pooled:
                yield replace(event, replica=pool)
            else:
                yield event
                if event.kind in _OF_THE_PROCESS:
                    yield replace(event, replica=pool)

    def told(self, kind: str, task: str | None = None) -> Sequence[Event]:
        """Return the events of a kind, of a task or of all, in the order of time."""
        return self._told.get((kind, task), [])

    def when(self, kind: str, detail: str | None = None) -> dict[str, float]:
        """Return when there last was such an event, by replica."""
        return {e.replica: e.at for e in self.told(kind) if detail in (None, e.detail)}

    def troubles(self, replica: str, kinds: str = UNABLE) -> list[Stretch]:
        """Return when a replica was not able to do as usual, in the order of time."""
        return [trouble for trouble in self._troubles[replica] if trouble.kind in kinds]

    def well(self, replica: str, begun: float, ended: float, kinds: str = UNABLE) -> bool:
        """Tell whether a replica lived, and had no such trouble, in a stretch of time."""
        life = self.lives.get(replica)
        if life is None or begun < life.begun or ended > life.ended:
            return False
        return not any(trouble.meets(begun, ended) for trouble in self.troubles(replica, kinds))

    def able_by(
        self,
        replica: str,
        at: float,
        takes: float,
        kinds: str = ANY,
        recovery: float = RECOVERY,
        worker: int = 0,
    ) -> float:
        """Return by when a replica that is well from then on has done what is due.

        :param takes: seconds that it takes, beyond the replica's reaction
        :param recovery: seconds after a trouble until the replica is well
        :param worker: the worker process whose troubles alone count
        """
        by = at + takes + self.reaction(at)
        for trouble in self.troubles(replica, kinds):
            well = trouble.ended + recovery
            if trouble.begun <= by and well >= at and worker in (0, trouble.worker):
                by = max(by, well + takes + self.reaction(well))
        return by

    def has_job(self, task: ChaosTask, replica: str) -> bool:
        """Tell whether it is this part of a replica that runs a task: it, or its pool."""
        if task.exact and replica in self._far:
            return False
        if replica in self._with_pool:
            return task.name in self._pooled
        return task.name not in self._pooled or replica + POOL not in self._with_pool

    def wrote_before(self, replica: str, at: float) -> float:
        """Return when a replica last changed a row before that; so it reached the server then."""
        return max((moment for moment in self._wrote[replica] if moment < at), default=-inf)

    def reaction(self, at: float) -> float:
        """Return within how many seconds a replica that is well does what is due."""
        near = bisect(self._fired, at + BURST_NEAR) - bisect(self._fired, at - BURST_NEAR)
        return BURST_REACTION if near >= BURST else REACTION

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
        lost = min(broke, self.when("killed", ALONE).get(run.process, inf))
        if run.ended is None and lost < inf:
            run.died = max(lost, self.pools.ended(run.worker))

    def _live(self, last: float) -> None:
        closing = [event.at for event in self.told("closing")]
        told, killed = self.when("leaving"), {**self.when("killed"), **self.when("died")}
        self.leaving: dict[str, float] = {}
        for replica, begun in self.when("ready").items():
            ends = [self.when(kind).get(replica, inf) for kind in ("killed", "leaving", "died")]
            self.lives[replica] = Stretch(begun, min([*ends, *closing, last]))
            if replica not in killed and (replica in told or closing):
                self.leaving[replica] = told.get(replica, *closing)


def _troubles(ordered: Sequence[Event], replicas: Iterable[str]) -> dict[str, list[Stretch]]:
    """Return the troubles of each replica, in the order of time."""
    found: dict[str, list[Stretch]] = defaultdict(list)
    for number, event in enumerate(ordered):
        if event.kind not in _TROUBLES:
            continue
        kind, ends = _TROUBLES[event.kind]
        if event.kind == "stalled":
            ended = event.until
            kind = SLOW if ended - event.at < _LONGEST_SLOW else "P"
        elif event.kind in _LASTS:
            ended = event.at + _LASTS[event.kind]
        else:
            whose = (event.replica, event.worker)
            later = (e for e in ordered[number:] if e.kind in ends)
            ended = next((e.at for e in later if (e.replica, e.worker) == whose), inf)
        for replica in [event.replica] if event.replica else replicas:
            found[replica].append(Stretch(event.at, ended, kind, event.worker))
    return found
