"""A few real lock clients on a virtual clock, which a test moves step by step.

The scenarios look for broken promises at every place. Here a test says what happens, and when, and
looks at the statements and the rows. So each rule has a story of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.testing.rule import Row
from tests.simulation.faults import CLAIM_TIMEOUT, FAULTS, Place, Plan
from tests.simulation.side import Database, SimulatedReplica
from tests.simulation.world import BEGIN, CLOCK, START, Process, World
from tests.support.internals import end_database_threads
from tests.support.waist import (
    ClaimRequest,
    LockClient,
    MemoryProtocol,
    MemoryTaskLocks,
    Message,
    Retire,
    TaskRow,
)

LEASE = 15.0
MAX_LOCK = 1_000.0


def claim_of(task: str, **changes: Any) -> ClaimRequest:
    """Return a claim of a task's run time at the beginning."""
    request = ClaimRequest(
        task,
        min_lock=0.0,
        max_lock=MAX_LOCK,
        run_time=START,
        exact=True,
        lease=LEASE,
        runs=f"job of {task}",
    )
    return replace(request, **changes)


@dataclass
class _Planned:
    what: str
    fault: Callable[[Place], Any]
    since: float
    until: float
    times: float


class Faults(Plan):
    """Injects faults at statements by their names and times, and records all statements."""

    def __init__(self) -> None:
        super().__init__()
        self._faults: list[_Planned] = []

    def plan(
        self,
        what: str,
        fault: str | Callable[[Place], Any],
        since: float = 0.0,
        until: float = inf,
        times: float = inf,
    ) -> None:
        """Plan a fault.

        :param what: how the names of the statements begin
        :param since: when the first statement with the fault may begin, in seconds from the begin
        :param until: when no statement has the fault any more, in seconds from the begin
        :param times: limits how many statements have the fault
        """
        kind = FAULTS[fault] if isinstance(fault, str) else fault
        self._faults.append(_Planned(what, kind, since, until, times))

    def pass_through(self, place: Place) -> Any:
        """Pass through a statement, with its planned fault if there is one."""
        self.places.append(place)
        place.world.note(place.process.name, place.what)
        for each in self._faults:
            if not (place.what.startswith(each.what) and each.since <= place.at < each.until):
                continue
            if each.times > 0:
                each.times -= 1
                return each.fault(place)
        return place.send()


@dataclass(eq=False)
class Call:
    """A call in a thread of a replica.

    :ivar result: what it has returned
    :ivar error: what it has raised
    :ivar ended: when it ended, in seconds from the begin
    """

    result: Any = None
    error: BaseException | None = None
    ended: float = inf

    @property
    def held(self) -> HeldLock:
        """The lock that a claim has returned."""
        assert isinstance(self.result, HeldLock), self.result or self.error
        return self.result


class _Rows(MemoryTaskLocks):
    """Rows in memory that record which tasks were to be retired."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.world.database_time)
        self.stage = stage

    def protocol(self, replica_id: str) -> MemoryProtocol:
        return _Protocol(self, replica_id)


class _Protocol(MemoryProtocol):
    _locks: _Rows

    def execute(self, cursor: Any, message: Any) -> Any:
        if isinstance(message, Retire):
            stage = self._locks.stage
            stage.retired.append((stage.now, (message.tasks, message.dropped)))
        return super().execute(cursor, message)


@dataclass(eq=False, repr=False)
class Stage:
    """A world with replicas, of which a test moves the clock.

    :ivar timings: the waits of all replicas
    """

    timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        self.world = CLOCK.world = World()
        self.faults = Faults()
        self.database = Database(self.world, self.faults, LEASE)
        # When tasks were to be retired, with the tasks whose successor a replica is, and with
        # those whose jobs were removed. The rule in memory does not know of successors.
        self.retired: list[tuple[float, tuple[Sequence[str], Sequence[str]]]] = []
        self.database.rows = _Rows(self)

    @property
    def now(self) -> float:
        """The time in seconds from the begin."""
        return self.world.now - BEGIN

    def replica(
        self, name: str = "A", beside: LockClient | None = None, **settings: Any
    ) -> LockClient:
        """Return the client of a new replica, or of another user of a replica.

        :param beside: the client that shares its replica with the new client
        """
        made = LockSettings(
            "postgresql://app@db/app",
            name,
            CLAIM_TIMEOUT,
            stand_in=self.database,
            timings=self.timings,
        )
        made = replace(made, **settings)
        if beside is not None:
            return LockClient(made, beside.replica)
        process = Process(name)
        self.world.processes.append(process)
        return LockClient(made, SimulatedReplica(made, self.world, process))

    def process_of(self, client: LockClient) -> Process:
        """Return the process of a client."""
        [found] = [each for each in self.world.processes if each.name == client.replica_id]
        return found

    def call(self, client: LockClient, function: Callable[..., Any], *arguments: Any) -> Call:
        """Call a function in a new thread of a client's process. The clock does not move."""
        call = Call()

        def run() -> None:
            try:
                call.result = function(*arguments)
            except Exception as error:  # noqa: BLE001  # the test looks at it
                call.error = error
            call.ended = self.now

        self.world.start(self.process_of(client), run)
        return call

    def go_on(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self.world.run(self.world.now + seconds)

    def go_to(self, seconds: float) -> None:
        """Let the time pass until so many seconds from the begin."""
        self.world.run(BEGIN + seconds)

    def claim(self, client: LockClient, task: str = "t", **changes: Any) -> HeldLock:
        """Claim a task, and return the held lock."""
        call = self.call(client, client.claim, claim_of(task, **changes))
        self.go_on(0.1)
        return call.held

    def release(self, client: LockClient, held: HeldLock, *outcome: Any) -> Call:
        """Begin a release."""
        return self.call(client, client.release, held, *outcome)

    def end_interpreter(self, client: LockClient) -> Call:
        """Begin what is done at the end of an interpreter without a shutdown."""
        return self.call(client, end_database_threads)

    def look(self, client: LockClient, task: str = "t") -> TaskRow | None:
        """Read the row of a task; return ``None`` if the look finds nothing that is to be done."""
        call = self.call(client, lambda: client.ask(client.reading([task])))
        self.go_on(0.1)
        if call.error is not None:
            raise call.error
        states: list[TaskRow] = call.result
        return states[0] if states else None

    def row(self, task: str = "t") -> Row:
        """Return the row of a task."""
        return self.database.rows.rows[task]

    def sent(self, what: str, of: LockClient | None = None) -> list[float]:
        """Return when the statements were sent whose names begin so, in seconds from the begin."""
        return [
            round(place.at, 3)
            for place in self.faults.places
            if place.what.startswith(what) and (of is None or place.process is self.process_of(of))
        ]

    def statements(self, since: float = 0.0) -> list[str]:
        """Return the statements that were sent, in their order."""
        return [place.what for place in self.faults.places if place.at >= since]

    def change(self, client: LockClient, message: Message[Any]) -> Any:
        """Carry out a message at once, on another connection."""
        return self.database.rows.protocol(client.replica_id).execute(None, message)

    def close(self) -> None:
        """End all threads."""
        self.world.close()


def slow(seconds: float) -> Callable[[Place], Any]:
    """Return a fault: the answer takes so many seconds."""

    def answer_late(place: Place) -> Any:
        assert place.carry_out is not None
        place.world.sleep(0.001)
        answer = place.carry_out()
        place.answer_in(seconds)
        return answer

    return answer_late


def then(function: Callable[[], object]) -> Callable[[Place], Any]:
    """Return a fault that calls a function before the statement is carried out."""

    def call(place: Place) -> Any:
        function()
        return place.send()

    return call
