"""A replica as an ASGI application, for servers that start and stop it by its lifespan.

As in examples/fastapi_app.py. What it runs is configured as in tests/acceptance/replica.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from starlette.applications import Starlette

from tests.acceptance.jobs import say
from tests.acceptance.replica import configured, job_of_environment


@asynccontextmanager
async def lifespan(_app: Starlette) -> AsyncIterator[None]:
    scheduler = configured(AsyncIOScheduler(), job_of_environment())
    scheduler.start()
    yield
    say("stopping")
    scheduler.shutdown()


app = Starlette(lifespan=lifespan)
