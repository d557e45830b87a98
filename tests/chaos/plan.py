"""The monkey's plan: what is done to whom and when, drawn from a seed.

It goes from one episode to the next: those of ordinary life, such as a deployment, a burst of jobs
or a stall of the database, and storms of random faults. Every run begins with the former.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.tasks import CLAIM_TIMEOUT, POOLED, TASKS, OneOff

# Seconds of peace at the start, for all replicas to be there, and at the end, for all that was
# begun to be run again: a recovery grace, a lease, a poll, and the run itself.
PEACE_BEFORE, PEACE_AFTER = 5.0, 13.0

# Seconds from one fault to the next in a storm, on average; and how long a storm lasts.
PAUSE = 1.3
STORM = (8.0, 14.0)

# Seconds from one episode to the next, at least and at most.
CALM = (0.3, 1.5)

# How often each fault comes in a storm, and how long it lasts, at least and at most.
FAULTS: dict[str, tuple[float, tuple[float, float]]] = {
    "kill": (3, (0.3, 3.0)),  # until another replica joins
    "stop": (4, (0.2, 8.0)),
    "hang": (2, (0.2, 6.0)),  # what is sent arrives late
    "swallow": (2, (0.2, 6.0)),  # what is sent never arrives
    "mute": (2, (0.2, 6.0)),  # what is sent arrives, but no answer
    "cut": (3, (0.0, 0.0)),
    "terminate": (2, (0.0, 0.0)),
    "leave": (3, (0.3, 3.0)),  # a graceful end; until another replica joins
    "restart fast": (0.6, (0.0, 4.0)),
    "restart immediate": (0.6, (0.0, 4.0)),
}

# The same for what concerns pools of worker processes, from one to the next, and how often.
POOL_FAULTS: dict[str, tuple[float, tuple[float, float]]] = {
    "kill worker": (3, (0.0, 0.0)),
    "stop worker": (2, (0.2, 8.0)),
    "stop parent": (2, (3.5, 8.0)),  # for longer than the lease of `pool-3s`; the workers go on
    "kill parent": (2, (0.3, 3.0)),  # the workers live on; until another replica joins
    "end group": (2, (0.3, 3.0)),  # SIGTERM to all its processes; until another replica joins
}
POOL_PAUSE = (2.5, 4.5)

# The lease of the one would tell if a dead worker's task were not free. That of the other ends, and
# its window is run again, while its run still goes on, or would if it did not end.
POOL_AIMS = {"kill worker": "pool-4s", "stop parent": "pool-3s", "kill parent": "pool-3s"}

# Seconds by which clocks are off at most: of replicas that have tasks with shared run times, which
# are late by the difference if the replica with the fastest clock dies; and of other replicas.
NEAR_SKEW, LARGEST_SKEW = 1.5, 180.0
LARGEST_OFFSET = 1.5

# Seconds that newcomers are given to be there.
JOINING = 2.5

# Jobs of a burst, at least and at most, and how long each takes.
BURST = (100, 140)
BURST_TAKES = 0.02

# Seconds of a burst's leases, so that a renewal may be answered late in a stall.
BURST_LEASE = 15.0

# The share of a burst's jobs with ids that look as if APScheduler had made them up.
RANDOM_IDS = 0.2

# Seconds by which the database's answers are late in a stall, and how long that lasts after jobs
# were due: the claim timeout is longer.
LATE_BY = 2.0
STALL = (1.0, 2.5)


@dataclass(frozen=True)
class Newcomer:
    """How a replica starts.

    :ivar offset: seconds by which its schedule is behind
    :ivar skew: seconds by which its clock is ahead
    :ivar pool: how the worker processes of its pool start; ``""`` if it has none, and runs in
        threads what others run in worker processes
    :ivar loop: ``""`` for a background scheduler; else one on an event loop, and how that ends
        after ``scheduler.shutdown()``: ``"cancels"`` what is left on it, is ``"left"`` as it is, or
        the process ends by the ``"signal"`` that it got, as under uvicorn
    """

    offset: float
    skew: float
    loop: str = ""
    pool: str = ""


@dataclass(frozen=True)
class Action:
    """A fault, or a piece of ordinary life.

    :ivar at: seconds from the start
    :ivar aim: a task, so that the replica which runs it at that moment is meant
    :ivar slot: the place of the replica that is meant if none runs the task. A restart concerns all
    :ivar lasts: seconds
    :ivar newcomers: the replicas that join in place of those that go
    """

    at: float
    kind: str
    aim: str
    slot: int
    lasts: float
    newcomers: Sequence[Newcomer]


@dataclass(frozen=True)
class Plan:
    """All that is random."""

    first: Sequence[Newcomer]
    actions: Sequence[Action]
    one_offs: Sequence[OneOff]


def draw(seed: int, seconds: float, replicas: int, *, skewed: bool) -> Plan:
    """Draw a plan. The same arguments give the same one.

    :param skewed: whether replicas' clocks differ
    """
    return _Draft(random.Random(seed), seconds, replicas, skewed).draw()  # noqa: S311  # repeatable


class _Draft:
    """A plan that is being drawn.

    Each episode takes the moment at which it begins, and returns the one at which it is over.
    """

    def __init__(self, dice: random.Random, seconds: float, replicas: int, skewed: bool) -> None:
        self._dice = dice
        self._end = seconds - PEACE_AFTER
        self._replicas = replicas
        self._skewed = skewed
        self._actions: list[Action] = []
        self._one_offs: list[OneOff] = []

    def draw(self) -> Plan:
        first = [self._newcomer(slot) for slot in range(self._replicas)]
        ordinary = [self._deployment, self._outage]
        others = [
            self._burst,
            self._unrefused,
            self._replaced,
            self._unanswered,
            self._storm,
            self._storm,
        ]
        at = PEACE_BEFORE
        while at < self._end:
            self._dice.shuffle(ordinary)
            self._dice.shuffle(others)
            for episode in [*ordinary, self._burst_in_a_stall, *others]:
                if at < self._end:
                    at = episode(at) + self._dice.uniform(*CALM)
        self._pool_faults(PEACE_BEFORE)
        actions = sorted(self._actions, key=lambda action: action.at)
        return Plan(first, [action for action in actions if action.at < self._end], self._one_offs)

    def _storm(self, at: float) -> float:
        end = at + self._dice.uniform(*STORM)
        kinds, weights = list(FAULTS), [weight for weight, _ in FAULTS.values()]
        while (at := at + self._dice.expovariate(1 / PAUSE)) < end:
            kind = self._dice.choices(kinds, weights)[0]
            lasts = self._dice.uniform(*FAULTS[kind][1])
            aim, slot = self._dice.choice(TASKS).name, self._dice.randrange(self._replicas)
            self._do(at, kind, lasts, slot, aim)
        return end

    def _pool_faults(self, at: float) -> None:
        """Meanwhile let worker processes, or the replicas that have them, be killed or stopped."""
        kinds = list(POOL_FAULTS)
        self._dice.shuffle(kinds)
        while (at := at + self._dice.uniform(*POOL_PAUSE)) < self._end:
            often = list(POOL_FAULTS), [weight for weight, _ in POOL_FAULTS.values()]
            kind = kinds.pop() if kinds else self._dice.choices(*often)[0]
            lasts = self._dice.uniform(*POOL_FAULTS[kind][1])
            slot = self._dice.randrange(1, self._replicas)
            self._do(at, kind, lasts, slot, POOL_AIMS.get(kind) or self._dice.choice(POOLED))

    def _deployment(self, at: float) -> float:
        """Replace each replica in turn; some do not end in time, and are killed."""
        for slot in self._shuffled():
            kind = "leave" if _is_loop(slot) or self._dice.random() < 0.6 else "kill"
            self._do(at, kind, self._dice.uniform(0.2, 0.6), slot)
            at += self._dice.uniform(0.4, 1.2)
        return at + JOINING

    def _burst(self, at: float) -> float:
        """Let many one-off jobs be due at once."""
        number = len(self._one_offs)
        due = at + 1.0
        for index in range(self._dice.randint(*BURST)):
            looks_random = self._dice.random() < RANDOM_IDS
            name = self._random_id() if looks_random else f"burst-{number + index}"
            # With failover, because the history has the names of such tasks only if they begin.
            failover = looks_random or self._dice.random() < 0.5
            self._one_offs.append(OneOff(name, due, BURST_TAKES, failover, lease=BURST_LEASE))
        return due + 1.5

    def _burst_in_a_stall(self, at: float) -> float:
        after = self._dice.uniform(*STALL)
        due = at + 1.0 + NEAR_SKEW
        # The stall begins before the run times of the fastest clock.
        self._do(due - NEAR_SKEW - 0.5, "stall", 0.5 + 2 * NEAR_SKEW + after)
        self._burst(due - 1.0)
        return due + NEAR_SKEW + after + LATE_BY + JOINING

    def _outage(self, at: float) -> float:
        """Take the server away for longer than leases; a replica starts when it is back."""
        lasts = self._dice.uniform(3.5, 5.0)
        how = self._dice.choice(["restart fast", "restart immediate"])
        self._do(at, how, lasts)
        back = at + lasts
        for slot in [slot for slot in self._shuffled() if not _is_loop(slot)][:2]:
            # A replica's start takes about as long as the server's.
            self._do(at + 0.2, "kill", lasts - 0.4, slot)
        return back + JOINING

    def _unrefused(self, at: float) -> float:
        """Replace all but a holder in its run, by replicas that were not refused; then kill it."""
        name = f"hourly-{len(self._one_offs)}"
        due = at + 1.0
        failover = self._dice.random() < 0.75
        self._one_offs.append(OneOff(name, due, 9.0, failover, cron=True))
        self._do(due + NEAR_SKEW + 0.3, "replace others", 0.3, aim=name)
        self._do(due + NEAR_SKEW + 3.5, "kill", 2.0, aim=name)
        return due + NEAR_SKEW + 5.0

    def _replaced(self, at: float) -> float:
        """Kill the holder of a one-off job whose id has been given to a job of much later."""
        name = f"replaced-{len(self._one_offs)}"
        due = at + 1.0
        self._one_offs.append(OneOff(name, due, 6.0, True, replaced=True))
        self._do(due + 2 * NEAR_SKEW + 1.5, "kill", 2.0, aim=name)
        return due + 2 * NEAR_SKEW + 2.0

    def _unanswered(self, at: float) -> float:
        """Lose the answer to a claim for longer than it is tried, and for less than its lease."""
        name = f"unanswered-{len(self._one_offs)}"
        due = at + 1.0 + NEAR_SKEW
        lasts = NEAR_SKEW + CLAIM_TIMEOUT + 2.0
        lease = 3 * CLAIM_TIMEOUT
        self._one_offs.append(OneOff(name, due, 1.0, True, cron=True, lease=lease))
        self._do(due - NEAR_SKEW - 0.5, "mute claim", lasts, aim=name)
        return due - NEAR_SKEW + lasts + JOINING

    def _do(self, at: float, kind: str, lasts: float, slot: int = 0, aim: str = "") -> None:
        lasts = max(0.0, min(lasts, self._end - at))
        joining = {"replace others": range(self._replicas - 1)}
        joining |= dict.fromkeys(
            ("kill", "leave", "kill parent", "end group"), range(slot, slot + 1)
        )
        newcomers = [self._newcomer(place) for place in joining.get(kind, [])]
        self._actions.append(Action(at, kind, aim, slot, lasts, newcomers))

    def _random_id(self) -> str:
        return uuid.UUID(int=self._dice.getrandbits(128), version=4).hex

    def _shuffled(self) -> list[int]:
        slots = list(range(self._replicas))
        self._dice.shuffle(slots)
        return slots

    def _newcomer(self, slot: int) -> Newcomer:
        dice = self._dice
        offset, kind = dice.uniform(0, LARGEST_OFFSET), dice.random()
        # Only one place in the fleet has clocks that are far off, so that others have all tasks.
        largest = LARGEST_SKEW if slot == 0 and kind > 0.7 else NEAR_SKEW
        skew = dice.uniform(-largest, largest) if self._skewed and kind > 0.4 else 0.0
        how = dice.choice(["cancels", "left", "signal"])
        loop = how if _is_loop(slot) else ""
        # No fork with a clock of its own, because a thread may have faketime's lock at that moment.
        pools = ["forkserver", "forkserver", ""] if skew else [*3 * ["fork"], "forkserver", ""]
        pool = dice.choice(pools)
        return Newcomer(round(offset, 3), round(skew, 3), loop, pool)


def _is_loop(slot: int) -> bool:
    """Tell whether a place of the fleet has replicas on event loops."""
    return slot % 2 == 1
