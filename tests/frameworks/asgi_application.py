"""A Starlette application, which is served and stopped in the middle of its jobs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from apscheduler_tasklock import TaskLockExecutor
from apscheduler_tasklock.starlette import scheduler_lifespan


def say(what: str) -> None:
    print(f"process {os.getpid()} {what}\n", end="", flush=True)


say("imports")


async def tick() -> None:
    say("ticks")


def long() -> None:
    say("begins")
    while not Path("go").exists():
        time.sleep(0.01)
    say("ends")


async def listen() -> None:
    say("listens")
    try:
        await asyncio.Event().wait()
    finally:
        say("is cancelled")


def make_scheduler() -> AsyncIOScheduler:
    executor = TaskLockExecutor(os.environ["TASKLOCK_DATABASE_URL"], failover=True)
    scheduler = AsyncIOScheduler(executors={"default": executor})
    scheduler.add_job(tick, "interval", seconds=1, start_date="2026-01-01", id="tick")
    for function in (long, listen):
        scheduler.add_job(function, id=function.__name__, misfire_grace_time=None)
    return scheduler


@asynccontextmanager
async def lifespan(_app: Starlette) -> AsyncIterator[None]:
    yield
    say("closes")


async def index(request: Request) -> PlainTextResponse:
    assert request.state.scheduler is request.app.state.scheduler
    return PlainTextResponse("served")


app = Starlette(routes=[Route("/", index)], lifespan=scheduler_lifespan(make_scheduler, lifespan))
