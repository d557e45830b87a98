"""The replicas as processes that the demo starts and stops, and their events."""

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from apscheduler_tasklock.demo.history import JudgedRun
from apscheduler_tasklock.demo.ledger import Ledger
from apscheduler_tasklock.demo.replica import DATABASE_VARIABLE

# Seconds until the common start, so that all replicas have scheduled their jobs before the start.
_FIRST_COMMON_RUN = 2

# Limits the seconds that a replica may take to end its running jobs before it is killed.
_STOP_TIMEOUT = 30.0


@dataclass(frozen=True)
class ReplicaEvent:
    """An event of a replica.

    :ivar replica: number of the replica
    :ivar kind: ``ready``, ``granted``, ``refused``, ``released``, ``lost``, ``raised`` (on
        purpose), ``error``, ``exited``, or ``killed`` (by the demo, in the run in question); with
        a shared store also ``added`` and ``removed``; in leader mode also ``leads`` and ``follows``
    :ivar at: when, in seconds since 1970
    :ivar run_time: the run time in question, in seconds since 1970
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


class ReplicaProcess:
    """One replica's process.

    The process has its own session, so that Ctrl-C reaches only the demo, which then stops the
    replicas.

    :param events: the queue of the replica's events
    :param module: the module that the process runs, and arguments for it
    """

    def __init__(
        self, number: int, ledger: Ledger, events: queue.Queue[ReplicaEvent], module: Sequence[str]
    ) -> None:
        self.number = number
        self._events = events
        self._killed_in: JudgedRun | None = None
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # see close()
        url = ledger.url.render_as_string(hide_password=False)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module[0], str(number), ledger.schema, *module[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, DATABASE_VARIABLE: url},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def go(self, start: float) -> None:
        """Let the replica schedule its jobs, whose intervals count from ``start``."""
        self.tell(str(start))

    def tell(self, line: str) -> None:
        """Write a line to the replica's standard input."""
        assert self.process.stdin is not None
        if self.process.stdin.closed:  # the replica was told to stop
            return
        with suppress(BrokenPipeError):  # the replica has died, which will be an event
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def stop(self) -> None:
        """Tell the replica to end its jobs, and then itself, by the end of its standard input.

        No signal is sent, because the system may deliver a signal to another thread, so that the
        main thread does not wake up.
        """
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def kill_in(self, run: JudgedRun) -> None:
        """Kill the replica with SIGKILL in the middle of a run."""
        self._killed_in = run
        self.process.kill()
        self.process.wait()

    def wait(self, deadline: float) -> None:
        """Wait until the replica has ended and all its events are in the queue.

        At the deadline, kill the replica.
        """
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()

    def failure(self) -> str | None:
        """Return why the ended process has failed, with its standard error; else ``None``."""
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip()
        meant = -signal.SIGKILL if self._killed_in else 0
        if self.process.returncode == meant and not said:
            return None
        ended = f"replica {self.number} ended with status {self.process.returncode}"
        return f"{ended}:\n{said}" if said else ended

    def close(self) -> None:
        """Close this side of the ended process's pipes, and the file of its standard error."""
        for stream in (self.process.stdin, self.process.stdout, self._stderr):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(ReplicaEvent(self.number, **json.loads(line)))
        run = self._killed_in
        if run is None:
            self._events.put(ReplicaEvent(self.number, "exited", time.time()))
        else:
            killed = ReplicaEvent(self.number, "killed", time.time(), run.task, run.due, run.token)
            self._events.put(killed)


class Fleet:
    """All replicas. As a context manager, the fleet starts and ends them.

    :param module: the module that their processes run, and arguments for it
    """

    def __init__(self, ledger: Ledger, count: int, module: Sequence[str]) -> None:
        self._module = module
        self._ledger = ledger
        self._count = count
        self._events: queue.Queue[ReplicaEvent] = queue.Queue()
        self._replicas: list[ReplicaProcess] = []
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
        """Return how many replicas were started so far."""
        return len(self._replicas)

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the replicas that were started so far."""
        return range(1, len(self) + 1)

    def start_replica(self) -> None:
        """Start one more replica. Its event ``ready`` says when it can go."""
        self._replicas.append(
            ReplicaProcess(len(self) + 1, self._ledger, self._events, self._module)
        )

    def go(self) -> None:
        """Let all replicas schedule their jobs."""
        self._start = math.ceil(time.time()) + _FIRST_COMMON_RUN
        for replica in self._replicas:
            replica.go(self._start)

    def go_too(self, number: int) -> None:
        """Let a replica that was started later schedule the same jobs."""
        self._replicas[number - 1].go(self._start)

    def tell(self, number: int, line: str) -> None:
        """Write a line to a replica's standard input."""
        self._replicas[number - 1].tell(line)

    def kill_in(self, run: JudgedRun) -> None:
        """Kill the replica of a run with SIGKILL, and wait until it is gone."""
        self._replicas[int(run.replica) - 1].kill_in(run)

    def next_event(self, timeout: float) -> ReplicaEvent | None:
        """Return the next event, or ``None`` if there was none for so many seconds."""
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def stop(self) -> None:
        """Tell all replicas to end their jobs, and then themselves."""
        for replica in self._replicas:
            replica.stop()

    def wait(self) -> list[str]:
        """Wait for all replicas, which were told to stop; return a text for each that failed."""
        deadline = time.monotonic() + _STOP_TIMEOUT
        for replica in self._replicas:
            replica.wait(deadline)
        return [failure for replica in self._replicas if (failure := replica.failure())]
