"""One replica, whose database is ``DATABASE_URL``.

The lines of its standard input are what users do, and at which step it is to be killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from apscheduler.events import EVENT_JOB_MISSED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore, current_lock
from apscheduler_tasklock._lock.job_rows import JobRows
from tests.chaos_store.ledger import Ledger
from tests.support.waist import Releases, Reruns, StoredClaims, met

# Jobs that every replica declares: those that nobody pauses or removes, and those that are paused.
STEADY = [f"steady-{number}" for number in range(4)]
PAUSED = [f"paused-{number}" for number in range(3)]
# Seconds between their run times, and for which they run.
PERIOD, TAKES = 2, 0.3
# Jobs whose interval each version of the application changes: one with a given start, so that its
# run times are multiples of the period, and one that counts from its last run.
FIXED, FLOATING = "changing-fixed", "changing-floating"
# Seconds between their run times, in the one version and in the other.
VERSIONS = (2, 3)
# The steady jobs with a grace time, and its seconds, which are fewer than clocks are off, and more
# than any run is late here.
IN_GRACE, GRACE = STEADY[:2], 60
# The maximum lock as a multiple of the period, so that dead runs can be taken over for long. The
# default would soon be over here.
MAX_FACTOR = 300
# Seconds of the lease, and for which a claim is tried.
LEASE, CLAIM_TIMEOUT = 3, 2

# At which steps of a run time's life a replica can be killed: what is called there, and whether
# before or after it.
STEPS: dict[str, tuple[Any, str, bool]] = {
    "read": (JobRows, "read_due", True),
    "moved on": (JobRows, "move_on", True),
    "claiming": (StoredClaims, "", False),
    "claimed": (StoredClaims, "", True),
    "taking over": (Reruns, "", True),
    "releasing": (Releases, "", False),
    "released": (Releases, "", True),
}

# The step, the ledger and the replica's name are globals, because jobs are functions of a module.
_step = ""
_ledger: Ledger
_name = ""


@dataclass(frozen=True)
class Settings:
    """The settings of a replica.

    :ivar name: its name
    :ivar ledger: path of the ledger
    :ivar period: its version: the interval of the jobs that change
    :ivar on_loop: whether its scheduler is an ``AsyncIOScheduler``
    :ivar coroutines: whether its jobs are coroutines
    """

    name: str
    ledger: str
    period: int = VERSIONS[0]
    on_loop: bool = False
    coroutines: bool = False


def command(settings: Settings) -> list[str]:
    """Return the command that runs a replica; the module has its own name, as the rows have it."""
    code = f"from {__name__} import main; main()"
    kind = ["--coroutines"] if settings.coroutines else []
    return [sys.executable, "-c", code, json.dumps(asdict(settings)), *kind]


def _begin(key: str) -> dict[str, Any]:
    """Write down that a run begins; return what is to be written when it ends."""
    held = current_lock()
    assert held is not None
    assert held.run_time is not None
    told = {
        "replica": _name,
        "task": key,
        "token": held.token,
        "due": held.run_time.timestamp(),
        "takeover": held.is_takeover,
    }
    _ledger.write("begin", **told)
    if _step == "running":
        _die()
    return told


# One function under one name, as in a fleet that is moved from threads to an event loop.
if "--coroutines" in sys.argv:

    async def work(key: str, seconds: float) -> None:
        """Be a job, on the event loop."""
        told = _begin(key)
        await asyncio.sleep(seconds)
        _ledger.write("end", **told)

else:

    def work(key: str, seconds: float) -> None:
        """Be a job: write down that it begins, take so long, write down that it ends."""
        told = _begin(key)
        # Not time.sleep(): libfaketime takes its absolute time for one of the wall clock.
        threading.Event().wait(seconds)
        _ledger.write("end", **told)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(step: str, owner: Any, method: str, *, after: bool) -> None:
    """Let the replica die at a step, once it is told so.

    :param method: of ``owner``; empty if that is the class of messages
    """

    def watched(carry_out: Callable[[], Any]) -> Any:
        if _step == step and not after:
            _die()
        result = carry_out()
        # A call that finds nothing is no step of a run time.
        if _step == step and after and getattr(result, "jobs", result):
            _die()
        return result

    if not method:
        setattr(*met(owner, lambda _message, carry_out: watched(carry_out)))
        return
    original: Callable[..., Any] = getattr(owner, method)
    setattr(owner, method, lambda *given, **named: watched(partial(original, *given, **named)))


def main() -> None:
    """Run the scheduler until SIGTERM, which ends it in order, or until standard input ends."""
    global _ledger, _name  # jobs have nothing else
    settings = Settings(**json.loads(sys.argv[1]))
    _name, _ledger = settings.name, Ledger(Path(settings.ledger))
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout
    )
    for step, (owner, method, after) in STEPS.items():
        _watch(step, owner, method, after=after)
    if settings.on_loop:
        asyncio.run(_serve(settings))
        return
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    scheduler = _make(BackgroundScheduler, settings, {"max_workers": 4})
    _start(scheduler, settings)
    threading.Thread(target=_listen, args=(scheduler, over.set), daemon=True).start()
    over.wait()
    scheduler.shutdown(wait=True)


async def _serve(settings: Settings) -> None:
    """Do as a server whose lifespan starts the scheduler and shuts it down."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    scheduler = _make(AsyncIOScheduler, settings, {})
    _start(scheduler, settings)

    def end() -> None:
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=_listen, args=(scheduler, end), daemon=True).start()
    await over.wait()
    scheduler.shutdown()
    # It is shut down by a callback of the loop. Servers wait for the task of the lifespan.
    await asyncio.sleep(0)


def _make(kind: Any, settings: Settings, options: dict[str, Any]) -> Any:
    url = os.environ["DATABASE_URL"]
    executor = TaskLockExecutor(
        url,
        replica_id=_name,
        failover=True,
        lease=LEASE,
        poll_interval=0.5,
        max_takeovers=1000,
        max_factor=MAX_FACTOR,
        claim_timeout=CLAIM_TIMEOUT,
        **options,
    )
    scheduler = kind(
        jobstores={"default": TaskLockJobStore(url, functions=["tests."], replica_id=_name)},
        executors={"default": executor},
        job_defaults={"misfire_grace_time": None, "coalesce": False},
    )
    scheduler.add_listener(_note_missed, EVENT_JOB_MISSED)
    for key in [*STEADY, *PAUSED]:
        grace = GRACE if key in IN_GRACE else None
        _add(scheduler, key, misfire_grace_time=grace, replace_existing=True)
    _add(scheduler, FIXED, seconds=settings.period, replace_existing=True)
    _add(scheduler, FLOATING, seconds=settings.period, start_date=None, replace_existing=True)
    return scheduler


def _note_missed(event: Any) -> None:
    run_time = event.scheduled_run_time.timestamp()
    _ledger.write("missed", replica=_name, task=event.job_id, due=run_time)


def _start(scheduler: Any, settings: Settings) -> None:
    """Start the scheduler, which declares the jobs."""
    try:
        scheduler.start()
    except Exception as error:  # noqa: BLE001  # the database is away: as a container restarts
        print(f"not started: {error!r}", flush=True)
        os.execv(sys.executable, command(settings))  # noqa: S606  # no shell
    print("started", flush=True)


def _listen(scheduler: Any, end: Callable[[], None]) -> None:
    for line in sys.stdin:
        threading.Thread(target=_do, args=(scheduler, json.loads(line)), daemon=True).start()
    end()


def _do(scheduler: Any, asked: dict[str, Any]) -> None:
    """Do what a user wants, and write down how that went."""
    global _step  # noqa: PLW0603  # see there
    kind, key = asked["kind"], asked["key"]
    if kind == "die":
        _step = key
        return
    begun, error = time.monotonic(), ""
    if kind == "resume":  # written before, because the job may run from now on
        _ledger.write(kind, begun, replica=_name, task=key)
    try:
        _change(scheduler, **asked)
        if not scheduler.running:  # it keeps a job for its next start then, of which there is none
            error = "the scheduler had been shut down"
    except Exception as failure:  # noqa: BLE001  # as an application would
        error = repr(failure)
    if kind != "resume":
        _ledger.write(kind, begun, replica=_name, task=key, until=time.monotonic(), error=error)


def _change(scheduler: Any, kind: str, key: str, at: float = 0.0, takes: float = 0.0) -> None:
    if kind == "add":
        run_date = datetime.fromtimestamp(at, timezone.utc)
        scheduler.add_job(work, "date", run_date=run_date, id=key, args=[key, takes])
    elif kind == "add recurring":
        _add(scheduler, key)
    elif kind == "rename":
        scheduler.modify_job(key, name=f"{_name} {time.monotonic()}")
    else:
        getattr(scheduler, f"{kind}_job")(key)


def _add(scheduler: Any, key: str, **options: Any) -> None:
    interval = {
        "seconds": PERIOD,
        "start_date": datetime(2020, 1, 1, tzinfo=timezone.utc),
        **options,
    }
    scheduler.add_job(work, "interval", args=[key, TAKES], id=key, **interval)
