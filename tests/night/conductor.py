"""The conductor of the night: starts the replicas, does what befalls them, and takes moments."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg

from apscheduler_tasklock import TaskLocks, upgrade
from apscheduler_tasklock.demo import history
from apscheduler_tasklock.demo.history import Event
from apscheduler_tasklock.demo.server import EmbeddedServer, die_with_parent
from apscheduler_tasklock.status import TaskState, TaskStatus
from tests.night.plan import BATCH, NEW, OLD, SHOP, STORE, UNKNOWN_FUNCTION
from tests.night.recording import Moment, Night, read_rows
from tests.night.replica import Settings
from tests.night.tellers import Tellers
from tests.support.polling import eventually

ROOT = Path(__file__).parent.parent.parent

# Limits the seconds for which the conductor waits for what is to happen.
PATIENCE = 180.0

_REPLICA = "from tests.night.replica import main; main()"

ANN, BEN = "ann@ops", "ben@ops"

# The control files of jobs: a run of the task hangs, fails, or goes on.
HANG, FAIL, WAKE = "hang", "fail", "wake"

# The kind of an operator's command that finds nothing to do.
NOTHING = "nothing"


class Member:
    """A replica's process. It dies with this process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.name = settings.name
        self.is_over = False
        with Path(settings.folder, f"{self.name.replace(':', '-')}.log").open("wb") as log:
            self.process = subprocess.Popen(
                # Stored jobs find their function under the module's name.
                [*die_with_parent("KILL"), sys.executable, "-c", _REPLICA],
                cwd=ROOT,
                env={
                    **os.environ,
                    "NIGHT": json.dumps(asdict(settings)),
                    "TASKLOCK_RELEASE": settings.release,
                },
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def begin(self, at: float) -> None:
        """Let it start its scheduler."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{at}\n".encode())
        self.process.stdin.flush()

    def close(self) -> None:
        """End it, if it has not ended."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


class Conductor:
    """Lives through the night. A context manager, which leaves no process behind.

    :param folder: gets the ledger and the logs
    :param say: is told what happens
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._closing = ExitStack()
        self._ledger = folder / "ledger.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self._ledger.touch()
        self._members: list[Member] = []
        self.moments: list[Moment] = []
        self.begin = 0.0

    def __enter__(self) -> Conductor:
        for name in (HANG, FAIL, WAKE):
            (self._folder / name).mkdir(parents=True)
        try:
            self.server = self._closing.enter_context(EmbeddedServer(loopback=True))
            upgrade(self.server.url)
            self.locks = self._closing.enter_context(TaskLocks(self.server.url))
            self._tellers = self._closing.enter_context(Tellers(self.server.url, self._folder))
        except BaseException:
            self._closing.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.close()
        self._closing.close()

    # ---- the ledger

    def note(self, kind: str, **details: Any) -> None:
        """Write an event into the ledger."""
        with self._ledger.open("ab") as ledger:
            ledger.write(Event(time.time(), kind, **details).line.encode())

    def events(self) -> list[Event]:
        """Return the events so far, in their order."""
        lines = self._ledger.read_bytes().splitlines(keepends=True)
        found = [Event(**json.loads(line)) for line in lines if line.endswith(b"\n")]
        return sorted(found, key=lambda event: event.at)

    def until(self, kind: str, since: float = 0.0, **wanted: Any) -> Event:
        """Wait for an event, and return the first one since a time."""

        def found() -> Event | None:
            self._check_members()
            for event in self.events():
                is_wanted = event.kind == kind and event.at >= since
                if is_wanted and all(getattr(event, k) == value for k, value in wanted.items()):
                    return event
            return None

        event: Event = eventually(found, PATIENCE, instead=lambda: f"no {kind} {wanted}")
        return event

    def _check_members(self) -> None:
        """Make sure that no replica has ended by itself.

        :raises AssertionError: one has
        """
        for member in self._members:
            status = member.process.poll()
            if status is not None and not member.is_over:
                raise AssertionError(f"{member.name} has ended with the status {status}")

    # ---- what can be done

    def at(self, seconds: float) -> None:
        """Wait until so many seconds after the begin of the night."""
        time.sleep(max(0.0, self.begin + seconds - time.time()))

    def prepare(self, name: str, application: str, release: str, *, adds: bool = False) -> Member:
        """Start a process that waits to be a replica."""
        settings = Settings(
            name, application, release, self.server.url, str(self._folder), adds=adds
        )
        self._members.append(Member(settings))
        return self._members[-1]

    def start(self, *members: Member) -> None:
        """Let processes be replicas, once they are loaded; wait until their schedulers run."""
        for member in members:
            self.until("loaded", replica=member.name)
        for member in members:
            self.note("started", replica=member.name, detail=member.settings.release)
            member.begin(self.begin)
        for member in members:
            self.until("ready", replica=member.name)

    def member(self, name: str) -> Member:
        """Return the process of a replica."""
        return next(each for each in self._members if each.name == name)

    def kill(self, name: str) -> None:
        """Kill a replica, in the middle of a second.

        Run times are whole seconds. A claim at that moment would be in a row and not in the ledger.
        """
        time.sleep((0.5 - time.time()) % 1)
        self._say(f"{name} is killed")
        member = self.member(name)
        self.note("killing", replica=name)
        member.process.kill()
        member.process.wait()
        self.note("killed", replica=name)
        member.is_over = True

    def terminate(self, name: str) -> None:
        """Tell a replica to stop in good order."""
        self.note("terminated", replica=name)
        self.member(name).process.send_signal(signal.SIGTERM)

    def wait_for_end(self, name: str) -> None:
        """Wait until a replica that was told to stop has ended."""
        member = self.member(name)
        member.process.wait(PATIENCE)
        self.note("gone", replica=name)
        member.is_over = True

    def alive(self, application: str, release: str | None = None) -> list[str]:
        """Return the names of the replicas that were not ended."""
        return [
            each.name
            for each in self._members
            if not each.is_over
            and each.settings.application == application
            and release in (None, each.settings.release)
        ]

    def tell(self, what: str, task: str) -> Path:
        """Tell a task's runs to hang, to fail, or to go on."""
        path = self._folder / what / task.replace("/", "+")
        path.touch()
        return path

    def act(self, kind: str, task: str, *command: str, by: str, **details: Any) -> None:
        """Let an operator give a command. The ledger has when it began and was done, and its words.

        :param kind: what is done; :data:`NOTHING` if the command finds nothing to do
        """
        self._say(f"{kind} {task}".strip())
        details["detail"] = f"{by}{details.get('detail', '')}"
        self.note(f"{kind} asked", task=task, **details)
        answer = self._tellers.do(*command, "--as", by)
        self.note(kind, task=task, **details)
        self.note("answered", task=task, detail=answer)

    def ask(self, command: str) -> Any:
        """Return what a command tells as JSON."""
        return self._tellers.ask(command)

    def moment(self, name: str) -> None:
        """Note the rows, and what commands and pages tell."""
        before = time.time()
        with psycopg.connect(self.server.url, autocommit=True) as connection:
            now, rows = read_rows(connection)
        told = self._tellers.tell()
        self.moments.append(
            Moment(name, now, rows, {"since": before, **told, "until": time.time()})
        )
        self._say(f"moment {len(self.moments)}: {name}")

    def night(self) -> Night:
        """Return the night so far."""
        return Night(self.begin, self.events(), self.moments)


def conduct(folder: Path, say: Callable[[str], None]) -> Night:
    """Live through the night, and return what is known of it."""
    with Conductor(folder, say) as conductor:
        _Script(conductor).play()
        night = conductor.night()
    history.write(night.events, folder / "history.jsonl")
    return night


class _Script:
    """What happens in the night, in this order."""

    def __init__(self, conductor: Conductor) -> None:
        self.on = conductor

    def play(self) -> None:
        """Play the whole night."""
        for part in (
            self.evening,
            self.deaths,
            self.failures,
            self.outage,
            self.frozen,
            self.pause_of_all,
            self.deployment,
            self.operators,
            self.leaders,
            self.darkness,
            self.morning,
        ):
            part()

    def evening(self) -> None:
        """Let five replicas start, and one task be paused."""
        on = self.on
        on.moment("nothing is there")
        first = [
            *(on.prepare(f"web-{n}:41{n}", SHOP, OLD, adds=n == 1) for n in (1, 2, 3)),
            *(on.prepare(f"batch-{n}:72{n}", BATCH, "1.0") for n in (1, 2)),
        ]
        for member in first:
            on.until("loaded", replica=member.name)
        # A whole minute, so that cron and intervals have run times in common. It may be past.
        on.begin = float(math.floor(time.time() / 60) * 60)
        if time.time() - on.begin > 15:
            on.begin += 60
        on.note("begin of the night", due=on.begin)
        on.start(*first)
        with psycopg.connect(on.server.url, autocommit=True) as connection:
            connection.execute(
                "UPDATE task_lock_job SET func = 'shop.jobs:find' WHERE id = %s", [UNKNOWN_FUNCTION]
            )
        on.at(3)
        on.moment("the first seconds")
        on.at(11)
        reason = "migration of orders"
        self._pause("clean-up", 40, reason, ANN)
        on.act("job-paused", "feed", "jobs", "pause", "feed", by=BEN)
        on.at(16)
        on.moment("a task and a stored job are paused")

    def _pause(self, task: str, seconds: int, reason: str, by: str) -> None:
        """Pause a task, or all of them, for a while."""
        named = "--all" if task == "*" else task
        command = ("pause", named, "--for", f"{seconds}s", "--reason", reason)
        self.on.act("paused", task, *command, by=by, until=seconds, detail=f": {reason}")

    def deaths(self) -> None:
        """Kill two replicas in their runs: one with failover, and one without."""
        on = self.on
        begun = on.until("begin", task="daily-report")
        on.kill(begun.replica)
        on.moment("a replica was killed in its run")
        again = on.prepare("web-4:5230", SHOP, OLD)
        taken = on.until("begin", task="daily-report", since=begun.at + 0.001)
        on.moment("its run is taken over")
        on.until("end", task="daily-report", token=taken.token)
        begun = on.until("begin", task="nightly-backup")
        on.kill(begun.replica)
        on.start(again)
        time.sleep(7)
        on.moment("a run without failover is dead")
        self._free("nightly-backup")
        on.start(on.prepare("web-5:5231", SHOP, OLD))

    def failures(self) -> None:
        """Let a run hang beyond its maximum lock, and others fail."""
        on = self.on
        since = time.time()
        on.tell(HANG, "warehouse-export")
        fails = [on.tell(FAIL, task) for task in ("thumbnails", "sync-prices", "batch/rollup")]
        self.hangs = on.until("hangs", task="warehouse-export")
        first = on.until("end", task="sync-prices", since=since, error="UpstreamError")
        on.until("released", task="sync-prices", token=first.token)
        on.moment("a retry is to come")
        second = on.until("end", task="thumbnails", since=since, error="UpstreamError")
        second = on.until("end", task="thumbnails", since=second.at + 0.001)
        on.until("released", task="thumbnails", token=second.token)
        on.moment("tasks are failing")
        for path in fails[1:]:
            path.unlink()
        time.sleep(max(0.0, self.hangs.at + 18 - time.time()))
        on.moment("a run hangs beyond its maximum lock")
        on.act("acked", "thumbnails", "ack", "thumbnails", by=ANN)
        on.moment("a failure is acknowledged")
        fails[0].unlink()

    def outage(self) -> None:
        """Stop the database's server for a while."""
        on = self.on
        on.note("outage")
        on.server.stop(signal.SIGINT)
        time.sleep(2)
        told = on.ask("check")
        if told["status"] != "UNKNOWN" or told["exit_status"] != 3:
            raise AssertionError(f"check told in an outage: {told}")
        time.sleep(7)
        on.server.start()
        on.note("outage over")
        on.moment("the database is back")
        time.sleep(9)
        on.moment("some seconds after the outage")

    def frozen(self) -> None:
        """Let all schedulers of the shop stand still for a while."""
        on = self.on
        frozen = [on.member(name) for name in on.alive(SHOP)]
        on.note("frozen")
        for member in frozen:
            member.process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        for member in frozen:
            member.process.send_signal(signal.SIGCONT)
        on.note("thawed")

    def pause_of_all(self) -> None:
        """Pause all tasks for a while."""
        on = self.on
        self._pause("*", 600, f"deploy of {NEW}", ANN)
        time.sleep(7)
        on.moment("all tasks are paused")
        on.act("resumed", "*", "resume", "--all", by=ANN)
        time.sleep(2)
        on.moment("all tasks are resumed")

    def deployment(self) -> None:
        """Replace the shop's replicas one by one. One is killed while it stops."""
        on = self.on
        old = [name for name in on.alive(SHOP) if name != self.hangs.replica]
        new = [on.prepare(f"web-{n}:60{n}", SHOP, NEW) for n in (6, 7, 8)]
        on.start(new[0])
        on.moment("two releases run")
        # The first one is killed while it waits for its run of `archive`, if it has that run.
        begun = on.until("begin", task="archive", since=time.time() - 10)
        victim = begun.replica if begun.replica in on.alive(SHOP) else old[0]
        on.terminate(victim)
        on.until("stopping", replica=victim)
        time.sleep(1.5)
        on.moment("a replica is stopping")
        if victim != self.hangs.replica:
            on.kill(victim)
        else:
            self._wake()
            on.wait_for_end(victim)
        time.sleep(1)
        on.moment("it was killed while it was stopping")
        self._free("archive")
        on.tell(FAIL, "remind-customers")
        hanging = self.hangs.replica
        others = [name for name in on.alive(SHOP, OLD) if name != hanging]
        for name, member in zip(others, new[1:], strict=False):
            on.start(member)
            on.terminate(name)
            on.wait_for_end(name)
        self._wake()
        for member in new[1:]:
            if member.name not in {each.replica for each in on.events() if each.kind == "ready"}:
                on.start(member)
        for name in on.alive(SHOP, OLD):
            on.terminate(name)
            on.wait_for_end(name)
        time.sleep(3)
        on.moment("the new release runs alone")

    def _free(self, task: str, *options: str) -> None:
        """Free a task whose run is dead, once that is seen, unless it runs again before."""

        def found() -> TaskStatus | None:
            [task_] = self.on.locks.tasks(task)
            is_over = task_.finished_at is not None or task_.state is TaskState.DEAD
            return task_ if is_over else None

        dead: TaskStatus = eventually(found, PATIENCE)
        if dead.state is TaskState.DEAD:
            command = ("free", task, "--token", str(dead.token), "--yes", *options)
            self.on.act("freed", task, *command, by=ANN)

    def _wake(self) -> None:
        """Let the run that hangs go on."""
        self.on.tell(WAKE, "warehouse-export")

    def operators(self) -> None:
        """Do what operators do."""
        on = self.on
        on.act("run asked for", "invoices", "run", "invoices", by=BEN)
        on.until("end", task="invoices")
        on.act("job-resumed", "feed", "jobs", "resume", "feed", by=BEN)
        on.act(NOTHING, "feed", "jobs", "resume", "feed", by=BEN)
        on.act("paused", "year-end", "pause", "year-end", by=BEN)
        self._pause("year-end", 600, "audit of the year", ANN)
        on.act("resumed", "year-end", "resume", "year-end", by=ANN)
        on.act(NOTHING, "invoices", "resume", "invoices", by=ANN)
        moved = "invoice-4711"
        on.act("job-paused", moved, "jobs", "pause", moved, by=BEN)
        on.act(NOTHING, moved, "jobs", "pause", moved, by=BEN)
        later = datetime.now(timezone.utc) + timedelta(hours=5)
        self._move(moved, later, BEN)
        on.act(NOTHING, moved, "jobs", "move", moved, "--to", later.isoformat(), by=BEN)
        on.act("job-removed", "loyalty-points", "jobs", "remove", "loyalty-points", by=BEN)
        time.sleep(2)
        on.moment("operators have been at work")

    def _move(self, job: str, to: datetime, by: str) -> None:
        moved = ("jobs", "move", job, "--to", to.isoformat())
        self.on.act("job-moved", job, *moved, by=by, due=to.timestamp())

    def leaders(self) -> None:
        """Kill the leader of the batch application, and then stop a replica in its run."""
        on = self.on
        leader = next(e.replica for e in reversed(on.events()) if e.kind == "leads")
        if leader in on.alive(BATCH):
            on.kill(leader)
        killed_at = time.time()
        on.moment("the leader was killed")
        [other] = on.alive(BATCH)
        on.until("leads", replica=other, since=self.on.begin)
        third = on.prepare("batch-3:733", BATCH, "1.0")
        on.start(third)
        on.moment("another replica leads")
        begun = on.until("begin", task="batch/big-copy", since=max(killed_at, time.time() - 15))
        on.terminate(begun.replica)
        on.wait_for_end(begun.replica)
        time.sleep(4)
        on.moment("a stop has cut a run")
        cut = "batch/big-copy"
        on.act("acked", cut, "ack", cut, by=BEN)
        on.act(NOTHING, cut, "ack", cut, by=BEN)
        on.moment("a cut is acknowledged")

    def darkness(self) -> None:
        """Stop the batch application in good order, and kill the shop."""
        on = self.on
        for name in on.alive(BATCH):
            on.terminate(name)
            on.wait_for_end(name)
        for name in on.alive(SHOP):
            on.kill(name)
        died = time.time()
        time.sleep(10)
        on.moment("all replicas are gone")
        self._free("archive", "--run-again")
        on.act("run asked for", "audit", "run", "audit", by=BEN)
        on.act(NOTHING, "audit", "run", "audit", by=ANN)
        # It is run until five seconds later, which nobody can.
        self._move("invoice-4711", datetime.now(timezone.utc) + timedelta(seconds=20), ANN)
        time.sleep(max(0.0, died + 50 - time.time()))
        on.moment("all have been gone for a while")
        time.sleep(max(0.0, died + 100 - time.time()))
        on.moment("all have been gone for long")

    def morning(self) -> None:
        """Start again."""
        on = self.on
        on.start(on.prepare("web-9:811", SHOP, NEW), on.prepare("batch-4:744", BATCH, "1.0"))
        time.sleep(12)
        on.moment("it is morning")
        missed = f"{STORE}:invoice-4711"
        on.act("acked", missed, "ack", missed, by=ANN)
        on.moment("a miss is acknowledged")
