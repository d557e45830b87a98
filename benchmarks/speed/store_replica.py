"""A replica whose jobs are in the shared store, a process of its own, as the benchmarks see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore, current_lock

# The executor that only replicas which run jobs have; who adds them has none of that name.
WORKERS = "workers"

# Seconds for what is waited for; then what is missing is reported.
PATIENCE = 300.0

_URL, _SCHEDULERS = "TASKLOCK_BENCH_DATABASE", "TASKLOCK_BENCH_SCHEDULERS"


def make_scheduler(url: str, **options: Any) -> BackgroundScheduler:
    """Return a scheduler on the shared store.

    :param options: of its executor for the jobs; with none it only adds jobs
    """
    store = TaskLockJobStore(url, functions=["benchmarks.speed.store_replica"])
    executors = {WORKERS: TaskLockExecutor(url, **options)} if options else {}
    return BackgroundScheduler(jobstores={"default": store}, executors=executors)


def job(*_arguments: Any) -> None:
    """Tell the benchmark that this has begun."""
    begun = time.time()
    held = current_lock()
    assert held is not None
    line = json.dumps({"task": held.name, "begun": begun, "arguments": _arguments})
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


class StoreReplica:
    """Such a process, seen from outside.

    :param schedulers: how many it has, each of which is a replica of its own
    """

    def __init__(self, url: str, schedulers: int = 1) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.speed.store_replica"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, _URL: url, _SCHEDULERS: str(schedulers)},
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Wait until its scheduler looks for jobs."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "a replica did not start"

    def next(self) -> dict[str, Any] | None:
        """Return the next run that it begins; ``None`` once it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def stop(self) -> None:
        """Tell it to end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self) -> None:
        """Wait until it has ended."""
        self.stop()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Begun:
    """Collects what replicas begin, in threads."""

    def __init__(self, replicas: list[StoreReplica]) -> None:
        self.by_replica: list[list[dict[str, Any]]] = [[] for _ in replicas]
        for replica, share in zip(replicas, self.by_replica, strict=True):
            threading.Thread(target=self._collect, args=(replica, share), daemon=True).start()

    @property
    def count(self) -> int:
        """How many runs have begun."""
        return sum(map(len, self.by_replica))

    def wait(self, count: int) -> None:
        """Wait until so many have begun, for some minutes at most."""
        deadline = time.monotonic() + PATIENCE
        while self.count < count and time.monotonic() < deadline:
            time.sleep(0.05)

    @staticmethod
    def _collect(replica: StoreReplica, share: list[dict[str, Any]]) -> None:
        while (told := replica.next()) is not None:
            share.append(told)


@contextmanager
def store_replicas(url: str, count: int, schedulers: int = 1) -> Iterator[list[StoreReplica]]:
    """Start some of them, each with so many schedulers, and end them after it."""
    replicas = [StoreReplica(url, schedulers) for _ in range(count)]
    try:
        for replica in replicas:
            replica.wait_until_ready()
        yield replicas
    finally:
        for replica in replicas:
            replica.stop()
        for replica in replicas:
            replica.end()


def main() -> None:
    """Run jobs until standard input ends."""
    url, count = os.environ[_URL], int(os.environ[_SCHEDULERS])
    run_until_input_ends([make_scheduler(url, max_workers=10) for _ in range(count)])


@contextmanager
def processes(module: str, count: int, *arguments: str) -> Iterator[list[int]]:
    """Run a module that calls :func:`run_until_input_ends` so many times; yield the process ids."""
    command = [sys.executable, "-m", module, *arguments]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n", "a replica did not start"
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.communicate(timeout=60)


def run_until_input_ends(schedulers: Sequence[Any]) -> None:
    """Run schedulers until standard input ends, and say when they have started."""
    for scheduler in schedulers:
        scheduler.start()
    os.write(sys.stdout.fileno(), b"ready\n")
    sys.stdin.read()
    for scheduler in schedulers:
        scheduler.shutdown()


if __name__ == "__main__":
    main()
