"""Real lock clients on a virtual clock, whose statements go to rows in memory or meet faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from math import inf
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import psycopg

from apscheduler_tasklock import _shutdown, lock, locks
from apscheduler_tasklock._database import (
    awaited_request,
    outage,
    rejections,
    thread,
)
from apscheduler_tasklock._database.session import NoCursor, Session
from apscheduler_tasklock._database.thread import ReplicaThread
from apscheduler_tasklock._lock import claim_attempts, heartbeat, releases, replica
from apscheduler_tasklock._lock.replica import LockSettings, Replica
from apscheduler_tasklock._runs import driven_queue, leadership, presence
from tests.simulation.faults import CLAIM_TIMEOUT, Place, Plan
from tests.simulation.world import (
    BEGIN,
    CLOCK,
    Chance,
    Failures,
    Giver,
    Inbox,
    Process,
    VirtualFuture,
    VirtualThreading,
    World,
    call_application,
    replaced,
)
from tests.support.waist import (
    LockClient,
    MemoryTaskLocks,
    OnTheWay,
    Sent,
    database_clock,
    executor_run,
    executor_runs,
    held_locks,
    misfires,
    missed_runs,
    rights,
    user,
    user_database,
)

ASKS_THE_TIME = (
    awaited_request,
    claim_attempts,
    user_database,
    database_clock,
    held_locks,
    rights,
    user,
    _shutdown,
    executor_run,
    executor_runs,
    heartbeat,
    driven_queue,
    leadership,
    lock,
    locks,
    misfires,
    missed_runs,
    outage,
    presence,
    rejections,
    releases,
    replica,
    thread,
)


class Connection:
    """Stands in for a connection of psycopg.

    :ivar ended_by: why the other side has ended the connection; ``None``: it has not ended
    :ivar wire: its wire
    """

    ended_by: str | None = None
    wire: Any = None

    def __init__(self) -> None:
        status = psycopg.pq.TransactionStatus.IDLE
        self.info = SimpleNamespace(transaction_status=status)

    def close(self) -> None:
        pass


class Wire:
    """Stands in for the wire of a simulated connection."""

    is_direct = False

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        connection.wire = self
        self.seconds, self.over_at = 0.0, lambda: inf

    def ended(self) -> str | None:
        return self.connection.ended_by

    def close(self) -> None:
        pass

    def limit(self) -> float:
        """Return the seconds that a statement which begins now waits for its answer."""
        return max(0.0, min(self.seconds, self.over_at() - CLOCK.monotonic()))

    def cursor(self) -> Cursor:
        return Cursor(self)


class Cursor(NoCursor):
    """A cursor with the limit of the wait for its answers."""

    def __init__(self, wire: Wire) -> None:
        self.limit = wire.limit


def _no_connection(_first: int, _left: float) -> Any:
    raise NotImplementedError


class SimulatedSession(Session):
    """The real session, with simulated connections."""

    def __init__(self, world: World, process: Process, replica: Replica) -> None:
        super().__init__(_no_connection, replica.attempt, replica.outage.idle_connection_ended)
        self._database: Any = replica.settings.stand_in
        self._world = world
        self._process = process

    def _connected(self) -> Any:
        if self._world.now < self._process.cut_until:
            self._world.sleep(0.01)
            raise psycopg.OperationalError("connection refused")
        connection = self._process.connection = Connection()
        return Wire(connection)

    def prove(self, seconds: float) -> None:
        def send(cursor: Any) -> None:
            self._database.step(self._process, "probe", "probe", lambda: None, cursor.limit())

        self.run(send, seconds)


class SimulatedThread(ReplicaThread):
    """The real thread of a replica, as a thread of a world."""

    def __init__(self, session: SimulatedSession, *arguments: Any) -> None:
        super().__init__(session, *arguments)
        self._inbox: Any = Inbox(session._world)
        session._world.start(session._process, self._go_on, daemon=True)

    @property
    def has_thread(self) -> bool:
        return True

    @property
    def _linger(self) -> float:
        return inf

    def _start(self) -> bool:
        return True

    def _go_on(self) -> None:
        CLOCK.world.attend(self._attend)
        self._session.wait_with(self._attend, self._inbox.wake, self._over_at)
        while True:
            self._turn()


class SimulatedReplica(Replica):
    """The real replica, in a process of a world."""

    def __init__(self, settings: LockSettings, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        super().__init__(settings)

    def _make_session(self) -> Session:
        return SimulatedSession(self._world, self._process, self)


class SimulatedClient(LockClient):
    """The real lock client, in a process of a world."""

    def __init__(self, settings: LockSettings, world: World, process: Process) -> None:
        super().__init__(settings, SimulatedReplica(settings, world, process))


class Database:
    """Rows in memory in place of the database. Each statement to them may meet a fault.

    :param lease: the lease of the scenario's claims
    """

    def __init__(self, world: World, plan: Plan, lease: float) -> None:
        self.rows = MemoryTaskLocks(world.database_time)
        self.locked_until: dict[str, float] = {}  # rows that another session has locked
        self._world = world
        self._plan = plan
        self._lease = lease
        self._count = count()

    def protocol(self, replica_id: str) -> Any:
        [process] = [each for each in self._world.processes if each.name == replica_id]
        return self.on_the_way(process, self.rows.protocol(replica_id))

    def on_the_way(self, process: Process, rows: Any) -> Any:
        """Return what sends a process's statements to rows, past the planned faults."""

        def send(sent: Sent) -> Any:
            what = f"{sent.name} {sent.tasks}"
            return self.step(process, what, sent.group, sent.carry_out, sent.cursor.limit())

        return OnTheWay(rows, send, self._is_locked)

    def _is_locked(self, task: str) -> bool:
        return self.locked_until.get(task, -inf) > self._world.now

    def step(
        self,
        process: Process,
        what: str,
        group: str,
        carry_out: Callable[[], Any] | None = None,
        limit: float = inf,
    ) -> Any:
        """Carry out a statement or step, with its planned fault if there is one."""
        at = self._world.now - BEGIN
        place = Place(
            self._world, process, next(self._count), what, group, carry_out, limit, self._lease, at
        )
        return self._plan.pass_through(place)


@contextmanager
def simulating() -> Iterator[None]:
    """Replace the clock and the threads of the library's modules by a world's."""
    with ExitStack() as stack:
        stack.enter_context(replaced(*((module, "time", CLOCK) for module in ASKS_THE_TIME)))
        stack.enter_context(
            replaced(
                (awaited_request, "PlainFuture", VirtualFuture),
                (user, "PlainFuture", VirtualFuture),
                (thread, "jittered", CLOCK.jittered),
                (thread, "_PAUSE", CLOCK),
                (thread, "_all", WeakSet()),
                (heartbeat, "jittered", CLOCK.jittered),
                (locks, "jittered", CLOCK.jittered),
                (replica, "ReplicaThread", SimulatedThread),
                (replica, "Rejections", partial(rejections.Rejections, clock=CLOCK.monotonic)),
                (thread, "threading", VirtualThreading()),
                (_shutdown, "threading", VirtualThreading()),
                (user, "flush_application", lambda _until: None),
                (thread, "flush_application", lambda _until: None),
                (lock, "call_application", call_application),
                (executor_run, "call_application", call_application),
                (executor_run, "random", Chance()),
                (executor_runs, "call_application", call_application),
                (executor_runs, "ApplicationThread", Giver),
                (executor_runs, "jittered", CLOCK.jittered),
                (executor_runs, "logger", Failures()),
                (driven_queue, "logger", Failures()),
                # The pool of the simulation is in place of one of APScheduler's.
                (executor_runs, "is_of_apscheduler", lambda _inner: True),
                (executor_runs, "worker_count", lambda inner: inner.workers.count),
            )
        )
        yield


def make_client(world: World, database: Database, process: Process) -> SimulatedClient:
    """Return a replica's client."""
    settings = LockSettings(
        "postgresql://app@db/app", process.name, CLAIM_TIMEOUT, stand_in=database
    )
    return SimulatedClient(settings, world, process)
