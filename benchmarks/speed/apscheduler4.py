"""The same jobs on APScheduler 4's alpha with its data store in PostgreSQL.

Run by the Python of an environment that has it, since it has the import name of APScheduler 3:
``python apscheduler4.py URL DUE..`` prints as JSON by how much it was
set up too late, and when each job was due and began.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import datetime, timezone
from typing import Any

BEGAN: list[tuple[float, float]] = []


def note(due: float) -> None:
    """Be the job."""
    BEGAN.append((due, time.time()))


async def main(url: str, dues: list[float]) -> None:
    """Run one job for each moment."""
    # They are not those of the environment that this is checked in.
    import apscheduler
    from sqlalchemy.ext import asyncio as sqlalchemy

    four: Any = apscheduler
    stores = __import__("apscheduler.datastores.sqlalchemy", fromlist=["SQLAlchemyDataStore"])
    brokers = __import__("apscheduler.eventbrokers.asyncpg", fromlist=["AsyncpgEventBroker"])
    triggers = __import__("apscheduler.triggers.date", fromlist=["DateTrigger"])
    engine = sqlalchemy.create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))
    store = stores.SQLAlchemyDataStore(engine)
    broker = brokers.AsyncpgEventBroker.from_async_sqla_engine(engine)
    async with four.AsyncScheduler(store, broker) as scheduler:
        for number, due in enumerate(dues):
            at = datetime.fromtimestamp(due, timezone.utc)
            await scheduler.add_schedule(
                note, triggers.DateTrigger(at), args=[due], id=f"{dues[0]} {number}"
            )
        late = max(0.0, time.time() - dues[0])
        await scheduler.start_in_background()
        deadline = time.monotonic() + 40
        while len(BEGAN) < len(dues) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        print(json.dumps([late, BEGAN]), flush=True)
        await scheduler.stop()
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], [float(due) for due in sys.argv[2:]]))
