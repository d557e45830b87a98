"""FastAPI with several workers, each of which has a scheduler on its event loop.

pip install "..[binary,fastapi]" uvicorn
export TASKLOCK_DATABASE_URL=postgresql://app:secret@localhost/app
apscheduler-tasklock upgrade
uvicorn fastapi_app:app --workers 3
"""

import os

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from fastapi import FastAPI

from apscheduler_tasklock import TaskLockExecutor, current_lock
from apscheduler_tasklock.starlette import scheduler_lifespan


async def sync_prices() -> None:
    """Stand for the work that must not be done twice."""
    lock = current_lock()
    which = lock.run_time if lock is not None else "a run without a lock"  # where locks are off
    print(f"worker {os.getpid()} syncs prices for {which}\n", end="", flush=True)


def make_scheduler() -> AsyncIOScheduler:
    """Return a scheduler with its jobs; only the executor is another than before."""
    executor = TaskLockExecutor(os.environ["TASKLOCK_DATABASE_URL"])
    scheduler = AsyncIOScheduler(executors={"default": executor})
    scheduler.add_job(sync_prices, "interval", seconds=2, id="sync-prices")
    return scheduler


app = FastAPI(lifespan=scheduler_lifespan(make_scheduler))
