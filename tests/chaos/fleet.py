"""The replicas as the monkey sees them: processes, each behind a proxy of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path

from apscheduler_tasklock.demo.history import Event
from apscheduler_tasklock.demo.server import die_with_parent
from tests.chaos.plan import NEAR_SKEW, Newcomer
from tests.chaos.settings import ONE_OFFS, Settings
from tests.chaos.work import SHOW_STACKS
from tests.support.proxy import Proxy, Rule, pass_on, proxy_to

CHECKOUT = Path(__file__).parent.parent.parent

# The folders of faketime, in Debian and other distributions.
_FAKETIME = ("lib/*/faketime/libfaketimeMT.so.1", "lib*/faketime/libfaketimeMT.so.1")

# Seconds that replicas may take to end their jobs.
_END_TIMEOUT = 30.0

# Seconds that worker processes may outlive their replica.
_LAST_WORKERS = 5.0
# Seconds in which a process that hangs writes its stacks.
_SHOWING = 0.5

_WORKERS_LEFT = "worker processes outlived its end"

Note = Callable[[Event], None]


def find_faketime() -> Path | None:
    """Return the library that makes a process's clock wrong, or ``None``."""
    found = [path for pattern in _FAKETIME for path in sorted(Path("/usr").glob(pattern))]
    return found[0] if found else None


class Member:
    """One replica's process, and those of its pool. It dies with this process.

    It is started ahead of time, because that takes seconds on a busy machine, and begins when it
    gets its settings.
    """

    def __init__(self, name: str, newcomer: Newcomer, folder: Path, note: Note) -> None:
        self.name = name
        self.newcomer = newcomer
        self.stopped = self.leaving = self.killed = self._is_loaded = False
        self.on_loop = bool(newcomer.loop)
        self._note = note
        command = [sys.executable, "-m", "tests.chaos.replica", name]
        command += ["--loop"] * self.on_loop
        command += ["--forkserver"] * (newcomer.pool == "forkserver")
        with (folder / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*die_with_parent("KILL"), *command],
                cwd=CHECKOUT,
                env={**os.environ, **skewed_clock(newcomer.skew)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the monkey
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def begin(self, settings: Settings) -> None:
        """Let it start its scheduler."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(settings)).encode() + b"\n")
        self.process.stdin.flush()

    @property
    def alive(self) -> bool:
        """Whether the process is there, and was not told to end."""
        return not self.leaving and self.process.poll() is None

    def signal(self, which: signal.Signals) -> None:
        """Send it a signal."""
        self.stopped = which == signal.SIGSTOP
        self.process.send_signal(which)

    def kill(self, *, alone: bool = False) -> None:
        """Kill it, and wait until it is gone.

        :param alone: leave its worker processes alone
        """
        self.killed = self.leaving = True
        if alone:
            self.process.kill()
        else:
            self._signal_group(signal.SIGKILL)
        self.process.wait()

    def signal_worker(self, pid: int, which: signal.Signals) -> bool:
        """Send a signal to one of its worker processes; tell whether it was there."""
        if not self._has(pid):
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, which)
            return True
        return False

    def _has(self, pid: int) -> bool:
        """Tell whether a process is one of its group, because ids are used again."""
        try:
            return os.getpgid(pid) == self.process.pid
        except ProcessLookupError:
            return False

    def _signal_group(self, which: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, which)

    def leave(self, *, group: bool = False) -> None:
        """Tell it to end; a scheduler on an event loop by SIGTERM, as a server is told.

        :param group: whether its worker processes get the signal, too
        """
        # The signal would kill a process that has not loaded, and has no event loop.
        if group and self._is_loaded and not self.leaving:
            self._signal_group(signal.SIGTERM)
        elif self.on_loop and not self.leaving:
            self.process.send_signal(signal.SIGTERM)
        self.leaving = True
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    @property
    def failed(self) -> bool:
        """Whether it has ended in another way than it was told."""
        usual = (0, -signal.SIGTERM) if self.on_loop and self.leaving else (0,)
        return not self.killed and self.process.returncode not in usual

    def end(self, deadline: float = 0.0) -> None:
        """Wait until it is gone and all its events are noted; kill it at the deadline."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._signal_group(SHOW_STACKS)
            time.sleep(_SHOWING)
            self.process.kill()
            self.process.wait()
        if not self.killed:
            self._reader.join(max(_LAST_WORKERS, deadline - time.monotonic()))
            if self._reader.is_alive():
                self._note(Event(time.monotonic(), "died", self.name, detail=_WORKERS_LEFT))
        self._signal_group(signal.SIGKILL)  # worker processes of one that was killed
        self._reader.join()
        self.leave()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith(b"\n"):  # else it was killed while it wrote
                event = Event(**json.loads(line))
                self._is_loaded = self._is_loaded or event.kind == "loaded"
                self._note(event)
        if self.leaving and not self.killed:
            self._note(Event(time.monotonic(), "gone", self.name))


class Slot:
    """A place in the fleet: one replica after the other, behind the same proxy.

    :ivar member: the replica that is or was there last
    :ivar disturbed: how its path to the server is disturbed, or ``""``
    :ivar late_by: seconds by which the server's answers are late
    """

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.disturbed = ""
        self.late_by = 0.0
        self.member: Member | None = None
        self._gate = threading.Event()
        proxy.to_client = self._answer

    def hang(self) -> None:
        """Hold up what is sent, in both directions."""
        gate = self._gate = threading.Event()

        def hold_up(data: bytes) -> bytes:
            gate.wait()
            return data

        self._disturb("hang", hold_up)

    def swallow(self) -> None:
        """Let nothing through that is sent."""
        self._disturb("swallow", lambda _data: b"")

    def mute(self) -> None:
        """Let what is sent through, and no answer."""
        self.disturbed = "mute"
        self.proxy.to_client = lambda _data: b""

    def mute_after_claim(self, task: str, note: Callable[[], None]) -> None:
        """Lose the answer to a replica's first claim of a task, and all answers after it.

        A claim of a task that has no row takes two statements: the second one is granted.
        """
        assert self.member is not None
        texts = (task.encode(), self.member.name.encode())
        claims = count(1)

        def watch(data: bytes) -> bytes:
            if all(text in data for text in texts) and next(claims) == 2:
                self.proxy.to_client = lambda _data: b""
                note()
            return data

        self.disturbed = "mute"
        self.proxy.to_server = watch

    def free(self) -> None:
        """Let everything through again. Connections that lost something are cut."""
        lost = self.disturbed in ("swallow", "mute")
        self._disturb("", pass_on)
        self.proxy.to_client = self._answer
        self._gate.set()
        if lost:
            self.proxy.cut_all()

    def _answer(self, data: bytes) -> bytes:
        time.sleep(self.late_by)
        return data

    def _disturb(self, how: str, rule: Rule) -> None:
        self.disturbed = how
        self.proxy.to_server = self.proxy.to_client = rule


class Fleet:
    """All slots. As a context manager it leaves no process behind.

    :param folder: gets the replicas' logs, and has the one-off jobs
    :param offset: what to add to a wall clock time for the machine's monotonic one
    """

    def __init__(self, url: str, folder: Path, offset: float, note: Note) -> None:
        self.slots: list[Slot] = []
        self._url = url
        self._offset = offset
        self._folder = folder
        self._note = note
        self._members: list[Member] = []

    def prepare(self, newcomer: Newcomer) -> Member:
        """Start a process that waits to be a replica."""
        name = f"r{len(self._members) + 1}"
        self._members.append(Member(name, newcomer, self._folder, self._note))
        return self._members[-1]

    def begin(self, slot: Slot, member: Member) -> None:
        """Let a process that waits be the replica in a slot."""
        slot.member = member
        member.begin(
            Settings(
                start_after=member.newcomer.offset,
                loop=member.newcomer.loop,
                pool=member.newcomer.pool,
                far=abs(member.newcomer.skew) > NEAR_SKEW,
                locks=slot.proxy.url,
                one_offs=str(self._folder / ONE_OFFS),
                clock_offset=self._offset,
            )
        )

    def close(self) -> None:
        """Let all replicas end their jobs, and note those that cannot."""
        deadline = time.monotonic() + _END_TIMEOUT
        for slot in self.slots:
            slot.free()
        for member in self._members:
            member.leave()
        for member in self._members:
            member.end(deadline)
            if member.failed:
                self._note(_died(member, self._folder))

    @contextmanager
    def running(self, replicas: int) -> Iterator[Fleet]:
        """Have so many slots, without replicas yet."""
        with ExitStack() as stack:
            for _ in range(replicas):
                self.slots.append(Slot(stack.enter_context(proxy_to(self._url))))
                stack.callback(self.slots[-1].free)
            stack.callback(self._kill_all)
            yield self

    def _kill_all(self) -> None:
        for member in self._members:
            member.kill()
        for member in self._members:
            member.end()


def _died(member: Member, folder: Path) -> Event:
    said = (folder / f"{member.name}.log").read_text(errors="replace").strip().splitlines()
    last = said[-1] if said else "it said nothing"
    status = member.process.returncode
    return Event(time.monotonic(), "died", member.name, detail=f"status {status}: {last}")


def skewed_clock(skew: float) -> dict[str, str]:
    if not skew:
        return {}
    # The monotonic clock is left alone, which measures time also on a machine with a wrong date.
    return {
        "LD_PRELOAD": str(find_faketime()),
        "FAKETIME": f"{skew:+.3f}s",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        # Else waits on the monotonic clock end at wrong times, those for the interpreter's lock,
        # too: a thread then takes 100 ms to start, and a replica 10 s to end.
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
    }
