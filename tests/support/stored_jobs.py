"""Job functions for the job store, the notes of their runs, and schedulers with the store."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

from apscheduler.triggers.cron import CronTrigger

from apscheduler_tasklock import TaskLockJobStore, current_lock
from apscheduler_tasklock._database.timings import Timings
from tests.support.polling import eventually
from tests.support.schedulers import Replica

# Only a user may move a run time back, with a change that has an id of its own.
GUARD = """
    CREATE FUNCTION guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW.next_run_time < OLD.next_run_time AND
            COALESCE(NEW.changed_id, NEW.added_id) = COALESCE(OLD.changed_id, OLD.added_id)
        THEN
            RAISE EXCEPTION 'next_run_time of % falls from % to %',
                OLD.id, OLD.next_run_time, NEW.next_run_time;
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER guard BEFORE UPDATE ON task_lock_job FOR EACH ROW EXECUTE FUNCTION guard();
"""

# The notes of the runs in this process: tokens and run times by key.
ran: dict[str, list[Any]] = defaultdict(list)
_gates: dict[str, threading.Event] = {}
_lock = threading.Lock()


def note(key: str, value: Any = None, **_task_lock: Any) -> None:
    """Note a run."""
    held = current_lock()
    with _lock:
        ran[key].append((held and held.run_time, held and held.token, value))


def note_and_wait(key: str) -> None:
    """Note a run, and run until the gate is opened."""
    note(key)
    assert _gates[key].wait(60)


def note_and_fail(key: str) -> None:
    note(key)
    raise ValueError("on purpose")


async def note_on_the_loop(key: str, **_task_lock: Any) -> None:
    note(key)


class OwnTrigger(CronTrigger):  # type: ignore[misc]  # APScheduler has no types
    """A trigger that cannot be stored as JSON, because it is not one of APScheduler's."""

    __slots__ = ()


class Gate:
    """Ends the waits of the runs of ``note_and_wait``."""

    def __init__(self, key: str) -> None:
        self.event = _gates[key] = threading.Event()

    def open(self) -> None:
        self.event.set()


# Limits the seconds of users' calls in tests in which the database answers, on a busy machine.
PATIENT = Timings(call_timeout=120.0)


@contextmanager
def store_replicas(database: str, *, paused: bool = False) -> Iterator[Callable[..., StoreReplica]]:
    """Yield a function that starts replicas with the job store; shut them down at the end.

    :param paused: whether their schedulers start paused by default
    """
    with ExitStack() as closing:

        def make(*, paused: bool = paused, **options: Any) -> StoreReplica:
            replica = StoreReplica(database, **options)
            replica.scheduler.start(paused=paused)
            closing.callback(replica.shutdown)
            return replica

        yield make


def store_class(given: Timings) -> type[TaskLockJobStore]:
    """Return a class of job stores with these timings."""

    class WithTimings(TaskLockJobStore):
        timings = given

    return WithTimings


# Of jobs that ask for no grace time of their own. APScheduler's default of 1 s is less than a busy
# machine may take until the scheduler notices that a job is due.
JOB_DEFAULTS = {"misfire_grace_time": 60}


class StoreReplica(Replica):
    """A replica whose jobs are in the shared job store.

    :param job_defaults: of the scheduler; ``{}``: those of APScheduler, with which one-off jobs of
        the store are never missed
    :param timings: of the executor and the store; by default those of the library, with longer
        limits for users' calls
    """

    def __init__(
        self,
        database: Any,
        *,
        store: dict[str, Any] | None = None,
        timings: Timings | None = None,
        job_defaults: dict[str, Any] = JOB_DEFAULTS,
        **options: Any,
    ) -> None:
        super().__init__(database, timings=timings, job_defaults=job_defaults, **options)
        options = {"functions": ["tests."], **(store or {})}
        self.store = store_class(timings or PATIENT)(database, **options)
        self.scheduler.add_jobstore(self.store)

    def run_at(
        self, function: Callable[..., Any], key: str, *, after: float = 0.0, **job: Any
    ) -> Any:
        """Add a one-off job."""
        run_date = datetime.now(timezone.utc) + timedelta(seconds=after)
        given = {"id": key, "args": [key], **job}
        return self.scheduler.add_job(function, "date", run_date=run_date, **given)

    def runs(self, key: str, count: int = 1) -> list[Any]:
        """Wait until a job has run ``count`` times, and return its runs."""
        eventually(lambda: len(ran[key]) >= count)
        return ran[key]
