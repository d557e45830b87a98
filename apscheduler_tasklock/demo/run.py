"""The demo from its start to the judgement, and its ends by signals and errors."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock.demo.fires import Fires
from apscheduler_tasklock.demo.fleet import Fleet, ReplicaEvent
from apscheduler_tasklock.demo.judgement import judged
from apscheduler_tasklock.demo.ledger import Ledger, new_schema_name
from apscheduler_tasklock.demo.server import EmbeddedServer
from apscheduler_tasklock.demo.story import (
    LEADER,
    SHARED_STORE,
    WITHOUT_STORE,
    Conductor,
    DemoStory,
)
from apscheduler_tasklock.demo.views import (
    PlainView,
    View,
    describe_tasks,
    explain_summary,
    summary,
)
from apscheduler_tasklock.errors import TaskLockError, TaskLockOptionError
from apscheduler_tasklock.schema.migrations import upgrade

# Exit statuses. Shells use 128 plus a signal's number for a process that the signal ended.
OK, FAULTS, NO_DEMO, INTERRUPTED, NOBODY_READS = 0, 1, 2, 128 + 2, 128 + 13

_READY_TIMEOUT = 60.0
# Seconds from one picture of the timeline to the next.
_FRAME = 0.1

# The part of a second in which the replicas are stopped. No job may be due in this part, because no
# replica would be left to run a window that the stop hands over. Jobs are due at the beginning of a
# second. With a shared store no job is due at the end, because the recurring job is removed before.
_LULL = (0.5, 0.65)


class InterruptedDemo(Exception):  # noqa: N818  # not an error
    """A signal asks the demo to end."""


class Interrupts:
    """Notes SIGINT, SIGTERM and SIGHUP, so that the demo ends at its next look at them.

    The handlers raise nothing, because an exception could come between the start of a process and
    the note that the process must be ended.
    """

    def __init__(self) -> None:
        self.noted = False

    def check(self) -> None:
        """Raise :class:`InterruptedDemo` if one of the signals has come."""
        if self.noted:
            raise InterruptedDemo

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # not under nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, _number: int, _frame: object) -> None:
        self.noted = True


def run_demo(
    database: str | None,
    replicas: int,
    seconds: float,
    *,
    shared_store: bool = False,
    leader: bool = False,
    view: View | None = None,
) -> int:
    """Run the demo and print what it shows.

    :param database: a PostgreSQL URL; ``None`` starts the embedded server
    :param replicas: how many replica processes, 1 or more
    :param seconds: how long they run, above 0
    :param shared_store: whether the demo shows the job store that all replicas share
    :param leader: whether the demo shows leader mode, which is not for the shared store
    :param view: shows the demo; by default the view that suits standard output
    :return: the exit status: 0; 1 if a window was doubled or missed, or a replica failed; 2 if the
        demo could not run; 130 if the demo was interrupted
    """
    interrupts = Interrupts()
    try:
        with interrupts.listening():
            story = SHARED_STORE if shared_store else LEADER if leader else WITHOUT_STORE
            return _Demo(story, replicas, seconds, interrupts, view).run(database)
    except InterruptedDemo:
        # Not to standard output, because in `demo | tee log` Ctrl-C has ended tee, too.
        print("\nInterrupted; the replicas, and all that was created, are gone.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader is gone, as in `demo | head`. At its exit Python would raise this error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED if interrupts.noted else NOBODY_READS
    except (TaskLockError, psycopg.Error, SQLAlchemyError) as error:
        # SQLAlchemy's own text would repeat the statement.
        print(f"The demo cannot run: {getattr(error, 'orig', None) or error}", file=sys.stderr)
        return NO_DEMO


class _Demo:
    def __init__(
        self,
        story: DemoStory,
        replicas: int,
        seconds: float,
        interrupts: Interrupts,
        view: View | None = None,
    ) -> None:
        if replicas < 1 or seconds <= 0:
            raise TaskLockOptionError("the demo needs 1 replica or more, and more than 0 seconds")
        self._plan = story.plan(replicas, seconds)
        self._story = story
        self._replicas = replicas
        self._seconds = seconds
        self._interrupts = interrupts
        self._view = view or _choose_view(story, replicas, seconds)
        self._fires = Fires()
        self._faults: list[str] = []

    def run(self, database: str | None) -> int:
        """Start the replicas, show what they do, and print the judgement. Remove all at the end."""
        with ExitStack() as stack:
            url = parse_url(database) if database else self._start_server(stack)
            ledger = Ledger(url, new_schema_name())
            self._say(f"Creating schema {ledger.schema}, which is dropped at the end")
            stack.enter_context(ledger)
            upgrade(url, schema=ledger.schema)
            ledger.create_table()
            self._say(f"Starting {self._replicas} replicas, {self._story.what_they_do}:")
            print(describe_tasks(self._story.tasks), flush=True)
            print(self._plan, flush=True)
            fleet = stack.enter_context(Fleet(ledger, self._replicas, self._story.replica))
            self._wait_until_ready(fleet)
            self._watch(fleet, self._story.conductor(ledger, fleet, self._seconds))
            self._faults += fleet.wait()
            return self._judge(ledger, len(fleet))

    def _say(self, what: str) -> None:
        self._interrupts.check()
        print(what, flush=True)

    def _start_server(self, stack: ExitStack) -> URL:
        self._say("Starting the embedded PostgreSQL")
        return parse_url(stack.enter_context(EmbeddedServer()).url)

    def _wait_until_ready(self, fleet: Fleet) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT
        ready = 0
        while ready < self._replicas:
            self._interrupts.check()
            event = fleet.next_event(_FRAME)
            if event is not None and event.kind == "ready":
                ready += 1
            elif event is not None or time.monotonic() > deadline:
                fleet.stop()
                raise TaskLockError("\n".join(["a replica did not start", *fleet.wait()]))

    def _watch(self, fleet: Fleet, conductor: Conductor) -> None:
        """Show what the replicas do, until the time is up and all replicas have ended."""
        fleet.go()
        started = time.time()
        gone = 0
        stopping = False
        with self._view as view:
            while gone < len(fleet):
                self._interrupts.check()
                event = fleet.next_event(_FRAME)
                if event is not None:
                    conductor.take_in(event)
                    self._take_in(event, view, started)
                    gone += event.kind in ("exited", "killed")
                elapsed = time.time() - started
                if not stopping:
                    conductor.act(elapsed)
                over = elapsed > self._seconds and _LULL[0] < time.time() % 1 < _LULL[1]
                if not stopping and over and not conductor.busy(elapsed):
                    fleet.stop()
                    stopping = True
                view.tick(elapsed, stopping=stopping)
        if fault := conductor.fault():
            self._faults.append(fault)

    def _take_in(self, event: ReplicaEvent, view: View, started: float) -> None:
        view.show(event, event.at - started)
        self._fires.take_in(event)
        if event.kind in ("lost", "error"):
            self._faults.append(
                f"replica {event.replica}, {event.task}: {event.kind} {event.detail}"
            )

    def _judge(self, ledger: Ledger, replicas: int) -> int:
        """Read the ledger, print the judgement, and return the exit status."""
        history = ledger.read_history()
        judgements = [
            judged(history, self._fires.run_times(task.name), task) for task in self._story.tasks
        ]
        self._faults += [
            f"{found.task}: {found.unfounded} takeovers although nobody had been killed"
            for found in judgements
            if found.unfounded
        ]
        self._view.show_judgements(judgements, replicas)
        print(explain_summary(judgements))
        if self._fires:
            print(self._story.outcome(judgements, len(self._fires)))
        sys.stdout.flush()
        for fault in self._faults:
            print(fault, file=sys.stderr, flush=True)
        print(summary(judgements))
        faulty = self._faults or any(found.doubled or found.missed for found in judgements)
        return FAULTS if faulty else OK


def _choose_view(story: DemoStory, replicas: int, seconds: float) -> View:
    """Return the live timeline if standard output can show it; otherwise the plain lines."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console

        from apscheduler_tasklock.demo.timeline import LiveView

        console = Console(highlight=False)
        if not (console.is_dumb_terminal or console.options.ascii_only):
            return LiveView(
                console, replicas, seconds, story.tasks, story.marked, has_leader=story.has_leader
            )
    return PlainView()
