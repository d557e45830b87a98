"""A held lock for the test of a job function, which no database has granted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from uuid import uuid4

from apscheduler_tasklock.lock import HeldLock, holding
from apscheduler_tasklock.options import parse_positive_seconds


@contextmanager
def held_lock(
    name: str = "task",
    *,
    token: int = 1,
    run_time: datetime | None = None,
    lost: bool = False,
    is_takeover: bool = False,
    max_lock: float | timedelta = 300,
) -> Iterator[HeldLock]:
    """Give a test a held lock, which is ``current_lock()`` within. Also a decorator of functions.

    It is the lock's own class, as a job sees it, without a database: ``extend`` moves its end,
    ``lose`` loses it as when another replica was granted the task, and after the block it is lost,
    as after a release. Within a coroutine, and in threads that take over its context, as those of
    ``asyncio.to_thread``, it is the current one as well.

    :param name: the task's name
    :param token: its fencing token
    :param run_time: the run time that it is for; ``None``: as of a ``hold``, which has none
    :param lost: whether it is lost from the beginning
    :param is_takeover: whether it runs the window of a holder that died
    :param max_lock: seconds or ``timedelta`` until it is lost by itself, in real time
    :raises TaskLockOptionError: ``max_lock`` is not above 0
    """
    seconds = parse_positive_seconds(max_lock, "max_lock", f"held_lock({name!r})")
    now = datetime.now(timezone.utc)
    until = now + timedelta(seconds=seconds)
    lock = HeldLock(
        name=name,
        token=token,
        claim_id=uuid4(),
        run_time=run_time,
        window_start=now if run_time is None else run_time,
        locked_until=until,
        run_until=until,
        ends_at=time.monotonic() + seconds,
        extender=_extend,
        dead_holder="a replica that died" if is_takeover else None,
    )
    if lost:
        lock.lose()
    with holding(lock):
        try:
            yield lock
        finally:
            lock.end()


def _extend(lock: HeldLock, by: float) -> bool:
    until = lock.run_until + timedelta(seconds=by)
    lock.note_renewal(until, until, time.monotonic() + lock.seconds_left + by)
    return True
