"""A held lock for the test of a job function, without a database."""

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
    attempt: int = 1,
    max_lock: float | timedelta = 300,
) -> Iterator[HeldLock]:
    """Hold a lock without a database: a context manager, or a decorator of functions.

    Inside, ``current_lock()`` returns the lock, also in coroutines, and in threads that copy the
    context, as ``asyncio.to_thread`` does. The lock has the class of a job's lock. ``extend`` moves
    the lock's end. ``lose`` makes the lock lost, as if another replica had been granted the task.
    After the block the lock is lost, as after a release.

    :param name: the task's name
    :param token: the lock's fencing token
    :param run_time: the lock's run time; ``None`` for a lock without one, such as a ``hold``'s
    :param lost: whether the lock is lost from the beginning
    :param is_takeover: whether the lock is that of a takeover
    :param attempt: which attempt at its run time the run is; 2 or more for a retry
    :param max_lock: seconds or ``timedelta``, in real time, after which the lock is lost
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
        attempt=attempt,
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
