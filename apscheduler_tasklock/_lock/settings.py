"""The settings of a replica's task locks, from an application's parameters."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.url import given_or_environment_database
from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock._values import cut
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.options import (
    ABOVE_0,
    SHORTEST_KEPT,
    check_name,
    parse_count,
    parse_seconds,
    parse_switch,
)
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
    where: str,
    *,
    replica_id: str | None = None,
    claim_timeout: timedelta | float | str = LockSettings.claim_timeout,
    schema: str | None = None,
    table: str = DEFAULT_TABLE,
    history: int | str = LockSettings.history,
    redact: Callable[[BaseException], str | None] | None = None,
    tracebacks: bool | str = False,
    release: str | None = None,
    keep_one_offs: timedelta | float | str = LockSettings.keep_one_offs,
) -> LockSettings:
    """Return checked settings; for the other parameters see ``TaskLockExecutor``.

    :param where: names the owner of the settings in messages
    :raises TaskLockOptionError: a parameter is invalid
    """
    is_named = bool(replica_id)
    replica_id = check_name(replica_id or make_replica_id(), "replica_id")
    if redact is not None and not callable(redact):
        raise TaskLockOptionError(f"redact must be a function of an exception, not {redact!r}")
    allowed = "above 0 and at most a day"
    tried_for = parse_seconds(
        claim_timeout, "claim_timeout", where, ABOVE_0, LONGEST_CLAIM, allowed=allowed
    )
    allowed = f"a whole number from 0 to {LONGEST_HISTORY}"
    runs = parse_count(history, "history", where, LONGEST_HISTORY, allowed=allowed)
    allowed = (
        "an hour or more, because until then a replica may still ask for the run time of such a job"
    )
    kept = parse_seconds(keep_one_offs, "keep_one_offs", where, SHORTEST_KEPT, allowed=allowed)
    return LockSettings(
        given_or_environment_database(database),
        replica_id,
        tried_for,
        schema,
        table,
        runs,
        redact or str,
        parse_switch(tracebacks, "tracebacks", where),
        _parse_release(release),
        kept,
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
