"""A place for one replica after the other, with a proxy before the database."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.fleet import skewed_clock
from tests.chaos_store.ledger import Ledger
from tests.chaos_store.replica import VERSIONS, Settings, command
from tests.support.proxy import Proxy, pass_on

# Seconds by which replicas' clocks are ahead.
CLOCKS = (0.0, 90.0, -90.0)
# The schedulers of replicas: whether they are on an event loop, and whether jobs are coroutines. A
# background scheduler comes as often as both others together.
SCHEDULERS = ((False, False), (True, True), (False, False), (True, False))


@dataclass(frozen=True)
class Newcomer:
    """How a replica starts.

    :ivar clock: seconds by which its clock is ahead
    :ivar on_loop: whether its scheduler is an ``AsyncIOScheduler``
    :ivar coroutines: whether its jobs are coroutines
    """

    clock: float
    on_loop: bool
    coroutines: bool


def newcomers(seed: int, place: int, *, skewed: bool) -> Iterator[Newcomer]:
    """Yield the newcomers of a place, one after the other; the same for the same seed.

    They have dice of their own, because it depends on time when each of them comes. Each of the
    first ones has another clock and another scheduler than its neighbours.
    """
    clocks, schedulers = list(CLOCKS), list(SCHEDULERS)
    shuffled = random.Random(seed)  # noqa: S311  # repeatable
    shuffled.shuffle(clocks)
    turn = shuffled.randrange(len(schedulers))
    dice = random.Random(f"{seed} {place}")  # noqa: S311  # repeatable
    clock = clocks[place % len(clocks)]
    scheduler = schedulers[(place + turn) % len(schedulers)]
    while True:
        yield Newcomer(clock if skewed else 0.0, *scheduler)
        clock, scheduler = dice.choice(CLOCKS), dice.choice(SCHEDULERS)


class Slot:
    """The place.

    :ivar version: the next replica's version of the application: an interval of ``VERSIONS``
    """

    def __init__(
        self, number: int, url: str, folder: Path, ledger: Ledger, comers: Iterator[Newcomer]
    ) -> None:
        self.proxy = Proxy(url)
        self.generation = 0
        self.stopped_at: float | None = None
        self.muted_at: float | None = None
        self.version = VERSIONS[0]
        self._number = number
        self._folder = folder
        self._ledger = ledger
        self._comers = comers
        self.start()

    def start(self) -> None:
        """Start a replica, after the one before is gone."""
        self.generation += 1
        self.name = f"replica-{self._number}.{self.generation}"
        self.newcomer = next(self._comers)
        settings = Settings(
            self.name,
            str(self._ledger.path),
            self.version,
            self.newcomer.on_loop,
            self.newcomer.coroutines,
        )
        with (self._folder / f"{self.name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                command(settings),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                env={
                    **os.environ,
                    **skewed_clock(self.newcomer.clock),
                    "DATABASE_URL": self.proxy.url,
                },
            )

    def tell(self, kind: str, key: str, **details: float) -> None:
        """Let the replica do something, if it lives."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"kind": kind, "key": key, **details}) + "\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        """Stop the process, as a container is frozen."""
        self.stopped_at = time.monotonic()
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        if self.stopped_at is not None:
            self._ledger.write("stop", self.stopped_at, replica=self.name, until=time.monotonic())
            self.stopped_at = None
            self.process.send_signal(signal.SIGCONT)

    def replace(self) -> None:
        """Kill the replica, and start a new one."""
        self.go_on()
        self.process.kill()
        self.process.wait()
        self.start()

    def mute(self) -> None:
        """Lose the answer to the next claim, and all after it."""
        name = self.name.encode()

        def watch(data: bytes) -> bytes:
            names_job = any(part in data for part in (b"steady-", b"once-", b"changing-"))
            # A look names jobs too, and a user's change.
            is_other = any(part in data for part in (b'"free"', b"misfire"))
            if name in data and names_job and not is_other:
                self.proxy.to_client = lambda _data: b""
                self.muted_at = self.muted_at or time.monotonic()
            return data

        self.proxy.to_server = watch

    def unmute(self) -> None:
        """Let answers through again, on new connections."""
        self.muted_at = None
        self.proxy.to_server = self.proxy.to_client = pass_on
        self.proxy.cut_all()

    def close(self) -> None:
        """End the replica and the proxy."""
        self.go_on()
        self.process.kill()
        self.process.wait()
        self.proxy.close()
