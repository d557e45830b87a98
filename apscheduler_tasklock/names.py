"""What a task and a replica are called."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterable
from functools import partial
from typing import Any

from apscheduler.jobstores.memory import MemoryJobStore

from apscheduler_tasklock.errors import TaskLockOptionError

# A task name is the primary key, and PostgreSQL refuses index entries of over 2,700 bytes.
LONGEST_NAME = 1000

# What APScheduler gives a job that was added without an id: a random UUID (version 4) in hex.
_RANDOM_ID = re.compile(r"[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}")


def make_replica_id() -> str:
    """Return an id for this replica: host, process, and a random part.

    Containers share host names and process ids more often than one would think.
    """
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def check_name(name: str, where: str) -> str:
    """Return the name if PostgreSQL can store it.

    :raises TaskLockOptionError: it is empty, too long, or has characters that no text may have
    """
    if not name:
        raise TaskLockOptionError(f"{where}: the name is empty")
    if "\0" in name:
        raise TaskLockOptionError(
            f"{where}: the name {name!r} has a NUL character, which PostgreSQL cannot store"
        )
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise TaskLockOptionError(
            f"{where}: the name {name!r} has a lone surrogate, which is no valid text"
        ) from None
    if size > LONGEST_NAME:
        raise TaskLockOptionError(
            f"{where}: the name has {size} bytes in UTF-8, and at most {LONGEST_NAME} are "
            "allowed; give the job a shorter id or the option 'name'"
        )
    return name


def is_anonymous(job: Any, jobstore: Any) -> bool:
    """Tell whether a job's id is random, and so another one on each replica.

    Persistent job stores keep the id; a memory job store gets a new one at every start.
    """
    return isinstance(jobstore, MemoryJobStore) and _RANDOM_ID.fullmatch(job.id) is not None


def function_reference(job: Any) -> str:
    """Return the reference of a job's function: the name of a task whose job has no id."""
    if job.func_ref:
        return str(job.func_ref)
    function = job.func
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}:{name}"


def refuse_twins(job: Any, others: Iterable[Any]) -> None:
    """Refuse a job without an id if another one has the same function.

    They would share a name, and each would run in place of the other.

    :param others: the other jobs without an id
    :raises TaskLockOptionError: there is such a job
    """
    reference = function_reference(job)
    for other in others:
        if other.id != job.id and function_reference(other) == reference:
            raise TaskLockOptionError(
                f"jobs {job.id} and {other.id} were added without an id and both call {reference}, "
                "so that no replica can tell them apart; give each an id in add_job(..., id=...)"
            )
