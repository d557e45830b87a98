"""FastAPI with several workers, each of which has a scheduler on its event loop.

pip install "..[binary]" fastapi uvicorn
export TASKLOCK_DATABASE_URL=postgresql://user:password@localhost:5432/app
apscheduler-tasklock upgrade
uvicorn fastapi_app:app --workers 3
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from fastapi import FastAPI

from apscheduler_tasklock import TaskLockExecutor, current_lock


async def sync_prices() -> None:
    """Stand for the work that must not be done twice."""
    lock = current_lock()
    which = lock.run_time if lock is not None else "a run without a lock"  # where locks are off
    print(f"worker {os.getpid()} syncs prices for {which}\n", end="", flush=True)


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    """Run the scheduler while the application runs; only the executor is another than before."""
    scheduler = AsyncIOScheduler(
        executors={"default": TaskLockExecutor(os.environ["TASKLOCK_DATABASE_URL"])}
    )
    scheduler.add_job(sync_prices, "interval", seconds=2, id="sync-prices")
    scheduler.start()
    yield
    scheduler.shutdown()


app = FastAPI(lifespan=lifespan)
