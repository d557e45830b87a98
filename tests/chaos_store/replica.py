"""One replica, whose database is ``DATABASE_URL``.

The lines of its standard input are what users do, and at which step it is to be killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore, current_lock
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.jobs import JobRows
from apscheduler_tasklock.jobstore.due import DueJobs
from tests.chaos_store.ledger import Ledger

# Jobs that every replica declares: those that nobody pauses or removes, and those that are paused.
STEADY = [f"steady-{number}" for number in range(4)]
PAUSED = [f"paused-{number}" for number in range(3)]
# Seconds between their run times, and for which they run.
PERIOD, TAKES = 2, 0.3
# Times the period for which a dead run stands against others. By default that is soon over here,
# and then it is not run again.
MAX_FACTOR = 300
# Seconds.
LEASE, CLAIM_TIMEOUT = 3, 2

# At which steps of a run time's life a replica can be killed: what is called there, and whether
# before or after it.
STEPS: dict[str, tuple[Any, str, bool]] = {
    "handed out": (JobRows, "fetch", True),
    "taken": (DueJobs, "take", True),
    "renewed": (JobRows, "renew", True),
    "given back": (JobRows, "give_back", True),
    "claiming": (LockClient, "claim", False),
    "claimed": (LockClient, "claim", True),
    "releasing": (LockClient, "release", False),
    "released": (LockClient, "release", True),
}

# What is written down, and by whom. Jobs are functions of a module, and find it there.
_step = ""
_ledger: Ledger
_name = ""


def command(name: str, ledger: str) -> list[str]:
    """Return the command that runs a replica; the module has its own name, as the rows have it."""
    code = f"from {__name__} import main; main({name!r}, {ledger!r})"
    return [sys.executable, "-c", code]


def work(key: str, seconds: float) -> None:
    """Be a job: write down that it begins, take so long, write down that it ends."""
    held = current_lock()
    assert held is not None
    assert held.run_time is not None
    told = {
        "replica": _name,
        "key": key,
        "token": held.token,
        "run_time": held.run_time.timestamp(),
        "is_takeover": held.is_takeover,
    }
    _ledger.write("begin", **told)
    if _step == "running":
        _die()
    time.sleep(seconds)
    _ledger.write("end", **told)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(step: str, owner: Any, method: str, *, after: bool) -> None:
    """Let the replica die at a step, once it is told so."""
    original: Callable[..., Any] = getattr(owner, method)

    def watched(*arguments: Any, **named: Any) -> Any:
        if _step == step and not after:
            _die()
        result = original(*arguments, **named)
        # What has found nothing is no step of a run time.
        found = getattr(result, "jobs", result)
        if _step == step and after and (found or method in ("give_back", "release")):
            _die()
        return result

    setattr(owner, method, watched)


def main(name: str, ledger: str) -> None:
    """Run the scheduler until SIGTERM, which ends it in order, or until standard input ends."""
    global _ledger, _name  # jobs have nothing else
    _name, _ledger = name, Ledger(Path(ledger))
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout
    )
    for step, (owner, method, after) in STEPS.items():
        _watch(step, owner, method, after=after)
    url = os.environ["DATABASE_URL"]
    scheduler = BackgroundScheduler(
        jobstores={"default": TaskLockJobStore(url, functions=["tests."], replica_id=name)},
        executors={
            "default": TaskLockExecutor(
                url,
                replica_id=name,
                failover=True,
                lease=LEASE,
                poll_interval=0.5,
                max_takeovers=1000,
                max_factor=MAX_FACTOR,
                claim_timeout=CLAIM_TIMEOUT,
                max_workers=4,
            )
        },
        job_defaults={"misfire_grace_time": None, "coalesce": False},
    )
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    for key in [*STEADY, *PAUSED]:
        _add(scheduler, key, replace_existing=True)
    while True:
        try:
            scheduler.start()
            break
        except Exception as error:  # noqa: BLE001  # the database is away: as a container restarts
            print(f"not started: {error!r}", flush=True)
            os.execv(sys.executable, command(name, ledger))  # noqa: S606  # no shell
    threading.Thread(target=_listen, args=(scheduler, over), daemon=True).start()
    print("started", flush=True)
    over.wait()
    scheduler.shutdown(wait=True)


def _listen(scheduler: Any, over: threading.Event) -> None:
    for line in sys.stdin:
        threading.Thread(target=_do, args=(scheduler, json.loads(line)), daemon=True).start()
    over.set()


def _do(scheduler: Any, asked: dict[str, Any]) -> None:
    """Do what a user wants, and write down how that went."""
    global _step  # noqa: PLW0603  # see there
    kind, key = asked["kind"], asked["key"]
    if kind == "die":
        _step = key
        return
    begun, error = time.monotonic(), ""
    if kind == "resume":  # from now on it may run again, whether or not this has an answer
        _ledger.write(kind, begun, replica=_name, key=key)
    try:
        _change(scheduler, **asked)
        if not scheduler.running:  # it keeps a job for its next start then, of which there is none
            error = "the scheduler had been shut down"
    except Exception as failure:  # noqa: BLE001  # as an application would
        error = repr(failure)
    if kind != "resume":
        _ledger.write(kind, begun, replica=_name, key=key, until=time.monotonic(), error=error)


def _change(scheduler: Any, kind: str, key: str, after: float = 0.0, takes: float = 0.0) -> None:
    if kind == "add":
        at = datetime.now(timezone.utc) + timedelta(seconds=after)
        scheduler.add_job(work, "date", run_date=at, id=key, args=[key, takes])
    elif kind == "add recurring":
        _add(scheduler, key)
    elif kind == "rename":
        scheduler.modify_job(key, name=f"{_name} {time.monotonic()}")
    else:
        getattr(scheduler, f"{kind}_job")(key)


def _add(scheduler: Any, key: str, **options: Any) -> None:
    scheduler.add_job(
        work,
        "interval",
        seconds=PERIOD,
        args=[key, TAKES],
        id=key,
        start_date=datetime(2020, 1, 1, tzinfo=timezone.utc),
        **options,
    )
