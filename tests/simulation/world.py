"""A virtual clock for several processes with several threads each, all in one real thread.

A thread is a greenlet here. A wait is an entry of a heap, and the clock jumps to the next entry.
Entries are ordered by their times, and entries of equal times by their insertion, so that a world
that is made again goes the same way.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone, tzinfo
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

import greenlet

from tests.support.waist import PlainFuture

# The monotonic clock and the date at which each world begins.
BEGIN = 1_000.0
START = datetime(2026, 3, 1, tzinfo=timezone.utc)
# Limits how often threads go on without progress of the clock.
MOST_TURNS = 100_000


class GoesRoundError(Exception):
    """Threads go on without progress of the clock."""


@dataclass(eq=False)
class Process:
    """A replica's process.

    :ivar skew: seconds by which its wall clock is ahead
    :ivar pauses: the times in which the process is paused, each with begin and end
    :ivar killed_at: when the process was killed
    :ivar cut_until: until when the process is cut off from the database
    :ivar out_of_touch: the times in which the process was cut off while others may have reached the
        database, each with begin and end on the virtual clock
    :ivar silent: the times in which the process was cut off, also in outages
    :ivar connection: the connection that the process has opened last
    """

    name: str
    skew: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)
    killed_at: float | None = None
    cut_until: float = -inf
    out_of_touch: list[tuple[float, float]] = field(default_factory=list)
    silent: list[tuple[float, float]] = field(default_factory=list)
    connection: Any = None

    @property
    def paused_until(self) -> float:
        """Until when the process is paused."""
        return max((until for _, until in self.pauses), default=-inf)

    def pause(self, since: float, seconds: float) -> None:
        """Pause the process. It loses touch with the database, too."""
        self.pauses.append((since, since + seconds))
        self.lose_touch(since, seconds)

    def lose_touch(self, since: float, seconds: float, *, alone: bool = True) -> None:
        """Note that the process is cut off: alone, or together with all others in an outage."""
        self.silent.append((since, since + seconds))
        if alone:
            self.out_of_touch.append((since, since + seconds))

    @property
    def silences(self) -> list[tuple[float, float]]:
        """The times of ``silent``, with adjacent ones joined."""
        merged: list[tuple[float, float]] = []
        for since, until in sorted(self.silent):
            if merged and since <= merged[-1][1] + 1.0:
                merged[-1] = (merged[-1][0], max(until, merged[-1][1]))
            else:
                merged.append((since, until))
        return merged

    @property
    def is_dead(self) -> bool:
        return self.killed_at is not None


@dataclass(eq=False)
class _Wait:
    thread: Any
    process: Process
    is_over: bool = False


class World:
    """Several processes on one clock.

    :param start: the date at the beginning
    :ivar database_ahead: seconds by which the database's clock is ahead
    :ivar steps_ahead: when the database's clock was set ahead
    :ivar slow_until: until when the database answers late
    :ivar trace: the events: time, place and text
    :ivar failures: errors after which the library went on, and which it has logged
    """

    def __init__(self, seed: int = 0, start: datetime = START) -> None:
        self.start_time = start
        self.now = BEGIN
        self.database_ahead = 0.0
        self.steps_ahead: list[float] = []
        self.slow_until = -inf
        self.processes: list[Process] = []
        self.random = random.Random(seed)  # noqa: S311  # no secret
        self.trace: list[tuple[float, str, str]] = []
        self.failures: list[BaseException] = []
        self._hub = greenlet.getcurrent()
        self._heap: list[tuple[float, int, _Wait | Callable[[], object]]] = []
        self._order = count()
        self._threads: list[tuple[Any, Process]] = []
        self._jobs: list[tuple[Any, Process]] = []  # the threads that are no daemons
        self._calls = 0  # number of functions to be called
        self._current: Process | None = None
        self._attends: dict[Any, Callable[[tuple[int, ...], float], object]] = {}
        self._is_over = False

    def database_time(self) -> datetime:
        """Return the time of the database's clock."""
        return self.start_time + timedelta(seconds=self.now - BEGIN + self.database_ahead)

    def step_database(self, seconds: float) -> None:
        """Set the database's clock ahead by so many seconds, or back by negative ones."""
        self.database_ahead += seconds
        if seconds > 0:
            self.steps_ahead.append(self.now)

    def wall_time(self) -> float:
        """Return the time of the current process's wall clock."""
        skew = 0.0 if self._current is None else self._current.skew
        return self.start_time.timestamp() + self.now - BEGIN + skew

    @property
    def current(self) -> Process | None:
        """The current process."""
        return self._current

    @contextmanager
    def acting(self, process: Process) -> Iterator[None]:
        """Make a process the current one. The code inside must not wait."""
        before, self._current = self._current, process
        try:
            yield
        finally:
            self._current = before

    @property
    def next_at(self) -> float:
        """The time of the next entry of the heap; ``inf``: there is none."""
        return self._heap[0][0] if self._heap else inf

    def note(self, who: str, what: str) -> None:
        """Add a line to the trace."""
        self.trace.append((self.now - BEGIN, who, what))

    def start(
        self,
        process: Process,
        function: Callable[[], object],
        after: float = 0.0,
        *,
        daemon: bool = False,
    ) -> None:
        """Start a thread of a process. A daemon does not keep the world busy."""
        thread = greenlet.greenlet(function, parent=self._hub)
        self._threads.append((thread, process))
        if not daemon:
            self._jobs.append((thread, process))
        self._push(self.now + after, _Wait(thread, process))

    def call_at(self, at: float, function: Callable[[], object]) -> None:
        """Call a function at a time. The function must not wait."""
        self._calls += 1
        self._push(at, function)

    @property
    def is_idle(self) -> bool:
        """Whether only daemons are left."""
        self._jobs = [(job, process) for job, process in self._jobs if not job.dead]
        return not self._calls and all(process.is_dead for _, process in self._jobs)

    def sleep(self, seconds: float) -> None:
        """Let the calling thread wait, and do what else it has to do if it attends to something."""
        attend, until = self._attends.get(greenlet.getcurrent()), self.now + seconds
        if attend is None or not seconds:
            self.wait(until, lambda _wake: None)
            return
        while self.now < until:
            attend((), until - self.now)

    def attend(self, attend: Callable[[tuple[int, ...], float], object]) -> None:
        """From now on, let the calling thread do other work in its waits.

        :param attend: waits for messages for so many seconds at most, and takes them
        """
        self._attends[greenlet.getcurrent()] = attend

    def wait(self, until: float, register: Callable[[Callable[[], None]], object]) -> None:
        """Let the calling thread wait until a time, or until it is woken.

        :param register: gets the function that wakes the thread
        """
        if self._is_over:
            raise greenlet.GreenletExit
        process = self._current
        assert process is not None
        wait = _Wait(greenlet.getcurrent(), process)
        register(lambda: self._push(self.now, wait))
        if until < inf:
            self._push(until, wait)
        self._hub.switch()
        if self._is_over:
            raise greenlet.GreenletExit

    def run(self, until: float) -> None:
        """Let all threads go on until a time of the virtual clock."""
        for _ in range(MOST_TURNS):
            if not self._heap or self._heap[0][0] > until:
                self.now = until
                return
            at, _, due = heappop(self._heap)
            if not isinstance(due, _Wait):
                self.now = max(self.now, at)
                self._calls -= 1
                due()
            elif not (due.is_over or due.process.is_dead):
                if due.process.paused_until > at:
                    self._push(due.process.paused_until, due)
                    continue
                due.is_over = True
                self.now = max(self.now, at)
                self._current = due.process
                due.thread.switch()
                self._current = None
        raise GoesRoundError(f"{MOST_TURNS} turns, and it is {self.now - BEGIN:.3f}")

    def close(self) -> None:
        """End all threads."""
        self._is_over = True
        for thread, process in self._threads:
            self._current = process
            while not thread.dead:
                thread.throw()
        self._current = None

    def _push(self, at: float, what: _Wait | Callable[[], object]) -> None:
        heappush(self._heap, (at, next(self._order), what))


class Clock:
    """Stands in for the module ``time``, with the clocks of a world.

    :ivar world: the world, which each simulation replaces
    """

    world: World

    def monotonic(self) -> float:
        return self.world.now

    def time(self) -> float:
        return self.world.wall_time()

    def wait(self, seconds: float) -> None:
        """Wait, in place of an event that nobody sets."""
        self.world.sleep(seconds)

    def jittered(self, seconds: float) -> float:
        return seconds * self.world.random.uniform(0.8, 1.2)


CLOCK = Clock()


class VirtualDatetime(datetime):
    """Stands in for the class ``datetime``, with the wall clock of a world."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]  # no subclass
        return datetime.fromtimestamp(CLOCK.time(), tz)


class Chance:
    """Stands in for the module ``random``, with the chance of a world."""

    def __getattr__(self, name: str) -> Any:
        return getattr(CLOCK.world.random, name)


class Failures:
    """Stands in for a logger: notes the errors after which the library goes on."""

    def exception(self, *_message: object, **_options: object) -> None:
        error = sys.exc_info()[1]
        assert error is not None
        CLOCK.world.failures.append(error)

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return _log_nothing


def _log_nothing(*_message: object, **_options: object) -> None: ...


def call_application(function: Callable[[], object]) -> None:
    """Call a function in a thread of its own, in place of the application's thread."""
    world = CLOCK.world
    if world.current is None:
        function()
    else:
        world.start(world.current, function)


class Giver:
    """Stands in for the thread that gives: it gives at once, because nothing blocks here."""

    def __init__(self, _name: str, *, keeps_out: bool) -> None: ...

    def call_also_here(self, function: Callable[[], object]) -> None:
        function()

    def flush(self, _until: float) -> None: ...


class VirtualFuture(PlainFuture[Any]):
    """A future whose waits are a world's."""

    def wait(self, seconds: float) -> bool:
        if not self.done():
            until = CLOCK.world.now + max(0.0, seconds)
            CLOCK.world.wait(until, lambda wake: self.add_done_callback(lambda _future: wake()))
        return self.done()


class VirtualEvent:
    """An event whose waits are a world's."""

    def __init__(self) -> None:
        self._is_set = False
        self._wakes: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    def wait(self, timeout: float) -> bool:
        if not self._is_set:
            CLOCK.world.wait(CLOCK.world.now + timeout, self._wakes.append)
        return self._is_set


class VirtualThreading:
    """Stands in for the module ``threading``, with events of a world."""

    Event = VirtualEvent

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class Inbox:
    """A queue whose waits are a world's."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.messages: deque[Any] = deque()
        self._wakes: list[Callable[[], None]] = []

    def put(self, message: Any, *, wakes: bool = True) -> None:
        self.messages.append(message)
        if wakes:
            self.wake()

    def wake(self) -> None:
        waiting, self._wakes = self._wakes, []
        for wake in waiting:
            wake()

    def wait(self, _sockets: tuple[int, ...], seconds: float, *, writes: bool = False) -> bool:
        if not self.messages:
            self._world.wait(self._world.now + seconds, self._wakes.append)
        return False

    def open(self) -> None: ...

    def close(self) -> None: ...

    def take_all(self, take: Callable[[Any], object]) -> None:
        while self.messages:
            take(self.messages.popleft())


@contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes of modules and classes inside the context."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
