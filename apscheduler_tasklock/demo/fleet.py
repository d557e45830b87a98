"""The replicas, as the demo sees them: processes to start and stop, and what they tell."""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from apscheduler_tasklock.demo.account import Run
from apscheduler_tasklock.demo.ledger import Ledger
from apscheduler_tasklock.demo.replica import DATABASE_VARIABLE

# The replicas' starts are this far apart, in seconds, within one period of the interval job.
_OFFSET = 0.7
_OFFSETS_WITHIN = 2.0

# The jobs that count from a common start run first so many seconds after it: when all replicas,
# with their offsets, have scheduled them.
_FIRST_COMMON_RUN = 2

# How long a replica may take to end its running jobs, in seconds, before it is killed.
_STOP_TIMEOUT = 30.0


@dataclass(frozen=True)
class Event:
    """What a replica told.

    :ivar replica: number of the replica
    :ivar kind: ``ready``, ``granted``, ``refused``, ``released``, ``lost``, ``raised`` (as it was
        meant to), ``error``, ``exited``, or ``killed`` (by the demo, in the run in question); with
        a shared store also ``added`` and ``removed``
    :ivar at: when, in seconds since 1970
    :ivar run_time: the run time in question, likewise
    :ivar detail: what went wrong
    """

    replica: int
    kind: str
    at: float
    task: str = ""
    run_time: float = 0.0
    token: int | None = None
    holder: str | None = None
    reason: str | None = None
    detail: str = ""


class Replica:
    """One replica's process.

    It has a session of its own: Ctrl-C is for the demo, which then stops the replicas in order.

    :param events: gets what it tells
    :param module: what it runs
    """

    def __init__(
        self, number: int, ledger: Ledger, events: queue.Queue[Event], module: str
    ) -> None:
        self.number = number
        self._events = events
        self._killed_in: Run | None = None
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # see close()
        offset = (number - 1) * _OFFSET % _OFFSETS_WITHIN
        url = ledger.url.render_as_string(hide_password=False)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(number), f"{offset:.3f}", ledger.schema],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, DATABASE_VARIABLE: url},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def go(self, start: float) -> None:
        """Let it schedule its jobs, of which one counts from that moment on."""
        self.tell(str(start))

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        if self.process.stdin.closed:  # it was told to stop
            return
        with suppress(BrokenPipeError):  # it has died; its exit will be told
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def stop(self) -> None:
        """Tell it to end what it runs, and then itself.

        Not by a signal: one that the system hands to another thread than the main one does not wake
        that one, and the replica would run on.
        """
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def kill_in(self, run: Run) -> None:
        """Kill it with SIGKILL in the middle of a run."""
        self._killed_in = run
        self.process.kill()
        self.process.wait()

    def wait(self, deadline: float) -> None:
        """Wait until it has ended and all that it told is in the queue; kill it at the deadline."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()

    def failure(self) -> str | None:
        """Return why the ended process counts as failed, with what it wrote to standard error."""
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip()
        meant = -signal.SIGKILL if self._killed_in else 0
        if self.process.returncode == meant and not said:
            return None
        ended = f"replica {self.number} ended with status {self.process.returncode}"
        return f"{ended}:\n{said}" if said else ended

    def close(self) -> None:
        """Close what the ended process leaves open here."""
        for stream in (self.process.stdin, self.process.stdout, self._stderr):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(Event(self.number, **json.loads(line)))
        run = self._killed_in
        if run is None:
            self._events.put(Event(self.number, "exited", time.time()))
        else:
            killed = Event(self.number, "killed", time.time(), run.task, run.run_time, run.token)
            self._events.put(killed)


class Fleet:
    """All replicas. As a context manager it starts them, and leaves none behind.

    :param module: what their processes run
    """

    def __init__(self, ledger: Ledger, count: int, module: str) -> None:
        self._module = module
        self._ledger = ledger
        self._count = count
        self._events: queue.Queue[Event] = queue.Queue()
        self._replicas: list[Replica] = []
        self._start = 0.0

    def __enter__(self) -> Fleet:
        try:
            for _ in range(self._count):
                self.start_replica()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        deadline = time.monotonic() + _STOP_TIMEOUT
        for replica in self._replicas:
            replica.wait(deadline)
            replica.close()

    def __len__(self) -> int:
        """Return how many replicas were started so far; they are numbered from 1 on."""
        return len(self._replicas)

    def start_replica(self) -> None:
        """Start one more. It says when it is ready to go."""
        self._replicas.append(Replica(len(self) + 1, self._ledger, self._events, self._module))

    def go(self) -> None:
        """Let all replicas schedule their jobs, each after its offset."""
        self._start = math.ceil(time.time()) + _FIRST_COMMON_RUN
        for replica in self._replicas:
            replica.go(self._start)

    def go_too(self, number: int) -> None:
        """Let a replica that was started later schedule the same jobs."""
        self._replicas[number - 1].go(self._start)

    def tell(self, number: int, line: str) -> None:
        """Write a line to a replica's standard input."""
        self._replicas[number - 1].tell(line)

    def kill_in(self, run: Run) -> None:
        """Kill the replica of a run with SIGKILL, and wait until it is gone."""
        self._replicas[run.replica - 1].kill_in(run)

    def next_event(self, timeout: float) -> Event | None:
        """Return the next event, or ``None`` if there was none for so many seconds."""
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def stop(self) -> None:
        """Tell all replicas to end what they run, and then themselves."""
        for replica in self._replicas:
            replica.stop()

    def wait(self) -> list[str]:
        """Wait for all replicas, which were told to stop; return why any of them failed."""
        deadline = time.monotonic() + _STOP_TIMEOUT
        for replica in self._replicas:
            replica.wait(deadline)
        return [failure for replica in self._replicas if (failure := replica.failure())]
