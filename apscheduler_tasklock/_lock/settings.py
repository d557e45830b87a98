"""The settings of a replica's task locks, from an application's parameters."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable

from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.url import given_database
from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock._values import cut
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.options import KEEP_ONE_OFFS, check_name, parse_count, parse_switch
from apscheduler_tasklock.schema.table import DEFAULT_TABLE

# Limits ``claim_timeout``, in seconds, because a larger number was hardly meant in seconds.
LONGEST_CLAIM = 24 * 3600.0

# Limits how many runs of a task the history keeps, so that reading them all stays quick.
LONGEST_HISTORY = 10_000

# The environment's variable with the release of the application.
RELEASE_VARIABLE = "TASKLOCK_RELEASE"
# Limits the characters of a release, which stands in each entry of the run history.
LONGEST_RELEASE = 100


def lock_settings(
    database: str | URL | Engine | None,
    *,
    replica_id: str | None = None,
    claim_timeout: float = 10.0,
    schema: str | None = None,
    table: str = DEFAULT_TABLE,
    history: int | str = 100,
    redact: Callable[[BaseException], str | None] | None = None,
    tracebacks: bool | str = False,
    release: str | None = None,
    keep_one_offs: float = KEEP_ONE_OFFS,
) -> LockSettings:
    """Return checked settings; for the parameters see ``TaskLocks``.

    :raises TaskLockOptionError: a parameter is invalid
    """
    is_named = bool(replica_id)
    replica_id = check_name(replica_id or make_replica_id(), "replica_id")
    if not 0 < claim_timeout <= LONGEST_CLAIM:
        raise TaskLockOptionError(
            f"claim_timeout must be above 0 and at most a day, not {claim_timeout!r} seconds"
        )
    if redact is not None and not callable(redact):
        raise TaskLockOptionError(f"redact must be a function of an exception, not {redact!r}")
    kept = parse_count(history, "history", "the run history")
    if kept > LONGEST_HISTORY:
        raise TaskLockOptionError(f"history must be at most {LONGEST_HISTORY}, not {history!r}")
    return LockSettings(
        given_database(database),
        replica_id,
        claim_timeout,
        schema,
        table,
        kept,
        redact or str,
        parse_switch(tracebacks, "tracebacks", "the run history"),
        _parse_release(release),
        keep_one_offs,
        is_named=is_named,
    )


def _parse_release(given: str | None) -> str | None:
    """Return the release that is given, or that of the environment; ``None``: there is none.

    :raises TaskLockOptionError: the release has other characters than printable ASCII, which each
        database can store, or is too long
    """
    what = "release" if given else RELEASE_VARIABLE
    release = given or os.environ.get(RELEASE_VARIABLE)
    if not release:
        return None
    is_text = isinstance(release, str) and release.isascii() and release.isprintable()
    if not is_text or len(release) > LONGEST_RELEASE:
        raise TaskLockOptionError(
            f"{what} must be at most {LONGEST_RELEASE} printable ASCII characters, such as a "
            f"version or the hash of a commit, not {cut(repr(release), 200)}"
        )
    return release


def make_replica_id() -> str:
    """Return an id for this replica: host, process, and a random part.

    The random part is needed, because containers may share host names and process ids.
    """
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
