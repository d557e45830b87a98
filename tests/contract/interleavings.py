"""Everything that two or three replicas and a user can do with one stored job, in any order.

The model has one job, which is due twice, the row of its task, and replicas that read, claim, run,
die, lose answers, and take over. Each action is one statement, or what happens to it on its way.
:func:`explore` goes through all states that can be reached, and so through all interleavings:
:attr:`Explored.paths` has their number. What is wrong is found by a ledger of what has begun and
ended, which knows nothing of the rows.

Time goes by in ticks. A claim is waited for within one. Its lease lasts for more than one and less
than two, and living holders renew theirs with each tick. The job is due at tick 0 and at tick 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

LAST_RUN_TIME = 1
LAST_TICK = 2
LEASE = 2
# How many steps it takes at most until all is done that can be done within a tick.
MOST_STEPS = 100

# A claim's id: its replica, and the number of its claims.
ClaimId = tuple[int, int]


class Fence(NamedTuple):
    """What was read of a job: the user's last change, and its next run time."""

    change: int
    run_time: int


class Job(NamedTuple):
    """The job's row.

    :ivar added: of the user's call that has set its next run time
    :ivar change: of the user's last change
    :ivar last: the run time that was claimed last
    """

    added: int
    change: int
    next: int | None
    last: int | None = None
    ended: bool = False


class Lock(NamedTuple):
    """The task's row.

    :ivar lease: the tick at which the lease has ended
    """

    claim: ClaimId
    run_time: int
    lease: int
    finished: bool = False
    handed_over: bool = False


class Replica(NamedTuple):
    """A replica, and what it knows.

    :ivar phase: ``idle``; ``read``; ``doubt``: its claim was sent, and no answer came; ``runs``;
        ``ended``: its release is to be sent; ``dead``
    :ivar claims: how many claims it has made
    :ivar not_after: the tick after which nobody waits for its claim
    """

    phase: str = "idle"
    fence: Fence | None = None
    claims: int = 0
    not_after: int = 0

    @property
    def alive(self) -> bool:
        return self.phase != "dead"


class Flying(NamedTuple):
    """A claim's statement that is held up on its way."""

    claim: ClaimId
    fence: Fence
    not_after: int


class World(NamedTuple):
    """All that there is.

    :ivar faults: how many may still happen
    :ivar changes: how many a user may still make; the number of the next one
    :ivar begun: the run times that have begun, each with the job that was added
    :ivar ended: those that have ended
    """

    replicas: tuple[Replica, ...]
    faults: int
    user: int
    clock: int = 0
    job: Job | None = Job(0, 0, 0)
    lock: Lock | None = None
    flying: tuple[Flying, ...] = ()
    change: int = 1
    begun: frozenset[tuple[int, int]] = frozenset()
    ended: frozenset[tuple[int, int]] = frozenset()
    runs: tuple[tuple[ClaimId, tuple[int, int]], ...] = ()


class Step(NamedTuple):
    """One action: what, by whom, and what it has answered."""

    name: str
    replica: int
    answer: str


# What a replica may do next: what, the world afterwards, and the answer.
Ways = Iterator[tuple[str, World, str]]


def become(world: World, number: int, **changes: Any) -> World:
    """Return the world in which a replica has changed."""
    replicas = list(world.replicas)
    replicas[number] = replicas[number]._replace(**changes)
    return world._replace(replicas=tuple(replicas))


class WrongError(Exception):
    """Something was lost, or has begun twice."""


@dataclass(frozen=True)
class Rule:
    """What the statements decide on, and what replicas do. Each mutation has one part less."""

    looks_for_own_id: bool = True
    fence_has_run_time: bool = True
    fence_has_change: bool = True
    claim_minds_dead_runs: bool = True
    read_minds_dead_runs: bool = True
    has_not_after: bool = True
    hands_over: bool = True
    failover: bool = True

    def claim(self, world: World, claim: ClaimId, fence: Fence) -> tuple[World, str]:
        """Claim and move: return the rows afterwards, and the answer."""
        job, lock = world.job, world.lock
        is_own = lock is not None and lock.claim == claim
        if self.looks_for_own_id and is_own and self.stands(lock):
            return world, "granted"
        if job is None or job.next is None or not self.is_fenced(job, fence):
            return world, "withdrawn"
        if is_own or not self.may_be_claimed(world, minds_dead_runs=self.claim_minds_dead_runs):
            return world, "refused"
        if job.change != fence.change:
            raise WrongError("what is run was changed, and the user's call has returned")
        following = fence.run_time + 1 if fence.run_time < LAST_RUN_TIME else None
        job = job._replace(next=following, last=fence.run_time, ended=following is None)
        lock = Lock(claim, fence.run_time, world.clock + LEASE)
        return world._replace(job=job, lock=lock), "granted"

    def is_fenced(self, job: Job, fence: Fence) -> bool:
        return (not self.fence_has_run_time or job.next == fence.run_time) and (
            not self.fence_has_change or job.change == fence.change
        )

    def stands(self, lock: Lock | None) -> bool:
        return lock is not None and not (lock.finished or lock.handed_over)

    def is_dead(self, world: World) -> bool:
        lock = world.lock
        return lock is not None and not lock.finished and lock.lease <= world.clock

    def is_run_again(self, world: World) -> bool:
        """Tell whether a dead run is the job's own and is to be run again."""
        lock, job = world.lock, world.job
        if lock is None or job is None or not self.is_dead(world):
            return False
        return (self.failover or lock.handed_over) and job.last == lock.run_time

    def may_be_claimed(self, world: World, *, minds_dead_runs: bool) -> bool:
        if world.lock is None or world.lock.finished:
            return True
        return self.is_dead(world) and not (minds_dead_runs and self.is_run_again(world))

    def read(self, world: World) -> Fence | None:
        job = world.job
        if job is None or job.next is None or job.next > world.clock:
            return None
        if not self.may_be_claimed(world, minds_dead_runs=self.read_minds_dead_runs):
            return None
        return Fence(job.change, job.next)

    def hand_over(self, world: World, claim: ClaimId) -> World:
        lock = world.lock
        if lock is None or lock.claim != claim or not self.stands(lock):
            return world
        return world._replace(lock=lock._replace(handed_over=True, lease=world.clock))

    # ---- what may happen -----------------------------------------------------------------------

    def steps(self, world: World) -> Iterator[tuple[Step, World]]:
        """Yield all that may happen next."""
        for number, replica in enumerate(world.replicas):
            if replica.alive:
                for name, after, answer in self.by_replica(world, number, replica):
                    yield Step(name, number, answer), after
        for flying in world.flying:
            arrived, answer = self.arrive(world, flying)
            yield Step("arrives", flying.claim[0], answer), arrived
        if world.clock < LAST_TICK and not any(self.is_urgent(world, r) for r in world.replicas):
            yield Step("tick", -1, ""), self.tick(world)
        if world.user:
            for name, changed in self.by_user(world):
                yield Step(name, -1, ""), changed

    def by_replica(self, world: World, number: int, replica: Replica) -> Ways:
        phases = {
            "idle": self.by_idle,
            "read": self.by_reader,
            "doubt": self.by_doubtful,
            "runs": self.by_runner,
            "ended": self.by_releaser,
        }
        yield from phases[replica.phase](world, number, replica)
        if world.faults and sum(each.alive for each in world.replicas) > 1:
            dead = become(world, number, phase="dead", fence=None)
            yield "die", dead._replace(faults=world.faults - 1), ""

    def by_idle(self, world: World, number: int, replica: Replica) -> Ways:
        fence, claims = self.read(world), replica.claims + 1
        if fence is not None:
            read = become(world, number, phase="read", fence=fence, claims=claims)
            yield "read", read, f"{fence.run_time}"
        lock = world.lock
        if lock is not None and self.is_run_again(world) and self.may_take_over(world):
            mine = (number, claims)
            taken = lock._replace(claim=mine, lease=world.clock + LEASE, handed_over=False)
            after = become(world._replace(lock=taken), number, phase="runs", claims=claims)
            yield "take over", self.begin(after, mine, lock.run_time, again=True), "granted"

    def by_reader(self, world: World, number: int, replica: Replica) -> Ways:
        claim, fence = (number, replica.claims), replica.fence
        assert fence is not None
        after, answer = self.claim(world, claim, fence)
        yield "claim", self.hear(after, claim, fence, answer), answer
        if not world.faults:
            return
        doubt = {"phase": "doubt", "not_after": world.clock}
        faults = world.faults - 1
        yield "claim, answer lost", become(after, number, **doubt)._replace(faults=faults), answer
        flying = (*world.flying, Flying(claim, fence, world.clock))
        held_up = become(world, number, **doubt)
        yield "claim, held up", held_up._replace(flying=flying, faults=faults), ""

    def by_doubtful(self, world: World, number: int, replica: Replica) -> Ways:
        claim, fence = (number, replica.claims), replica.fence
        assert fence is not None
        if world.clock <= replica.not_after:
            after, answer = self.claim(world, claim, fence)
            yield "ask again", self.hear(after, claim, fence, answer), answer
        else:
            handed = self.hand_over(world, claim) if self.hands_over else world
            yield "hand over", become(handed, number, phase="idle"), ""

    def by_runner(self, world: World, number: int, replica: Replica) -> Ways:
        run = dict(world.runs)[number, replica.claims]
        yield "end", become(world._replace(ended=world.ended | {run}), number, phase="ended"), ""

    def by_releaser(self, world: World, number: int, replica: Replica) -> Ways:
        lock = world.lock
        if lock is not None and lock.claim == (number, replica.claims) and self.stands(lock):
            world = world._replace(lock=lock._replace(finished=True))
        yield "release", become(world, number, phase="idle"), ""

    def hear(self, world: World, claim: ClaimId, fence: Fence, answer: str) -> World:
        if answer != "granted":
            return become(world, claim[0], phase="idle", fence=None)
        return self.begin(become(world, claim[0], phase="runs"), claim, fence.run_time)

    def begin(self, world: World, claim: ClaimId, run_time: int, *, again: bool = False) -> World:
        assert world.job is not None or not again
        run = (world.job.added if world.job else -1, run_time)
        if run in world.begun and not again:
            raise WrongError(f"run time {run_time} has begun twice")
        return world._replace(begun=world.begun | {run}, runs=(*world.runs, (claim, run)))

    def may_take_over(self, world: World) -> bool:
        """Tell whether the job is there, and not paused. One that has ended is."""
        return world.job is not None and (world.job.next is not None or world.job.ended)

    def arrive(self, world: World, flying: Flying) -> tuple[World, str]:
        rest = tuple(each for each in world.flying if each != flying)
        world = world._replace(flying=rest)
        if self.has_not_after and world.clock > flying.not_after:
            return world, "late"
        return self.claim(world, flying.claim, flying.fence)

    def is_urgent(self, world: World, replica: Replica) -> bool:
        """Tell whether a replica acts within this tick: it hands over what nobody waits for."""
        return replica.phase == "doubt" and world.clock > replica.not_after

    def tick(self, world: World) -> World:
        world = world._replace(clock=world.clock + 1)
        lock = world.lock
        if self.stands(lock):
            assert lock is not None
            replica = world.replicas[lock.claim[0]]
            if replica.phase in ("runs", "ended") and replica.claims == lock.claim[1]:
                world = world._replace(lock=lock._replace(lease=world.clock + LEASE))
        return world

    def by_user(self, world: World) -> Iterator[tuple[str, World]]:
        job, number = world.job, world.change
        world = world._replace(user=world.user - 1, change=number + 1)
        if job is None:
            yield "add", world._replace(job=Job(number, number, world.clock))
        elif not job.ended:
            yield "rename", world._replace(job=job._replace(change=number))
            if job.next is None:
                changed = job._replace(added=number, change=number, next=world.clock)
                yield "resume", world._replace(job=changed)
            else:
                yield "pause", world._replace(job=job._replace(change=number, next=None))
            yield "remove", world._replace(job=None)

    # ---- what must come of it ------------------------------------------------------------------

    def check_end(self, world: World) -> None:
        """Let all go on without faults, and look whether something was lost."""
        world = world._replace(faults=0, user=0)
        for _ in range(4):  # after which nothing waits for a lease, or for the end of a claim
            world = self.tick(self.settle(world))
        job = world.job
        if job is None or (job.next is None and not job.ended):  # removed, or paused
            return
        if not job.ended:
            raise WrongError(f"run time {job.next} is never run")
        if not (self.failover or all(replica.alive for replica in world.replicas)):
            return  # what dies without failover is not run again
        claimed = {job.last} if job.change else set(range(LAST_RUN_TIME + 1))
        runs = {(job.added, run_time) for run_time in claimed if run_time is not None}
        if lost := runs - world.begun:
            raise WrongError(f"{lost} has never begun")
        if lost := runs - world.ended:
            raise WrongError(f"{lost} was begun, and nobody has ended it")

    def settle(self, world: World) -> World:
        """Do all that can be done within a tick."""
        for _ in range(MOST_STEPS):
            ways = [after for step, after in self.steps(world) if step.name != "tick"]
            if not ways:
                return world
            world = ways[0]
        raise WrongError("what is read is refused, over and over")

    def check_read(self, world: World) -> None:
        """Look whether a claim right after a read is granted; else it is read over and over."""
        fence = self.read(world)
        if fence is not None and self.claim(world, (-1, 0), fence)[1] != "granted":
            raise WrongError("what is read is refused, over and over")


@dataclass
class Explored:
    """What was gone through.

    :ivar states: how many states
    :ivar paths: how many ways there are from the beginning to a state where nothing can happen
    """

    states: int
    paths: int


def explore(rule: Rule, replicas: int, faults: int, user: int) -> Explored:
    """Go through all interleavings.

    :raises WrongError: something was lost or doubled
    """
    begin = World(tuple(Replica() for _ in range(replicas)), faults, user)
    known: dict[World, int] = {}
    stack: list[tuple[World, list[World] | None]] = [(begin, None)]
    while stack:
        world, following = stack.pop()
        if following is None:
            if world in known:
                continue
            rule.check_read(world)
            following = [after for _, after in rule.steps(world)]
            stack.append((world, following))
            stack.extend((after, None) for after in following if after not in known)
        elif world not in known:
            known[world] = sum(known[after] for after in following) or 1
            if not following:
                rule.check_end(world)
    return Explored(len(known), known[begin])


# What each part is there for. Without failover nobody takes over what was forgotten.
MUTATIONS = {
    "a claim's own id is not looked for": Rule(looks_for_own_id=False, failover=False),
    "the fence has no run time": Rule(fence_has_run_time=False),
    "the fence has no change": Rule(fence_has_change=False),
    "the read does not mind dead runs": Rule(read_minds_dead_runs=False),
    "a claim can be granted when nobody waits for it": Rule(has_not_after=False, failover=False),
    "a claim is not handed over": Rule(hands_over=False, failover=False),
}
