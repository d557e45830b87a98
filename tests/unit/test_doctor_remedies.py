"""What the doctor says about where a setting comes from, and about sessions that block others."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from apscheduler_tasklock.schema.inspection import Blocker, Setting
from tests.support.waist import end_of, reset_of, set_by

RELOAD = "SELECT pg_reload_conf()"
READ_ONLY = "default_transaction_read_only"


@pytest.mark.parametrize(
    ("source", "file", "says", "remedy"),
    [
        (
            "configuration file",
            "/data/postgresql.auto.conf",
            "set by ALTER SYSTEM",
            f"let a superuser run: ALTER SYSTEM RESET {READ_ONLY}, then {RELOAD}",
        ),
        (
            "configuration file",
            "/etc/postgresql.conf",
            "set in /etc/postgresql.conf, line 7",
            f"take {READ_ONLY} out of /etc/postgresql.conf, line 7, and let a superuser run: "
            f"{RELOAD}",
        ),
        (
            "configuration file",
            None,
            "set by ALTER SYSTEM or in postgresql.conf, of which role app may not see which",
            f"let a superuser run: ALTER SYSTEM RESET {READ_ONLY}, then {RELOAD}; if that changes "
            f"nothing, take {READ_ONLY} out of postgresql.conf, and let a superuser run {RELOAD} "
            "again",
        ),
        (
            "database",
            None,
            "set for the database",
            f"let the database's owner run: BEGIN READ WRITE; ALTER DATABASE shop RESET "
            f"{READ_ONLY}; COMMIT",
        ),
        (
            "user",
            None,
            "set for role app",
            f"let that role run: BEGIN READ WRITE; ALTER ROLE app RESET {READ_ONLY}; COMMIT",
        ),
        (
            "global",
            None,
            "set for all roles",
            f"let a superuser run: BEGIN READ WRITE; ALTER ROLE ALL RESET {READ_ONLY}; COMMIT",
        ),
        (
            "client",
            None,
            "set by the connection's options",
            f"take {READ_ONLY} out of the URL's options, PGOPTIONS, or the pooler's configuration",
        ),
        (
            "test",
            None,
            "its source is 'test'",
            f"see the row of {READ_ONLY} in pg_settings",
        ),
    ],
)
def test_a_setting_is_taken_back_where_it_was_set(
    source: str, file: str | None, says: str, remedy: str
) -> None:
    setting = Setting(READ_ONLY, "on", source, file, None if file is None else 7)
    assert (set_by(setting, "app"), reset_of(setting, "app", "shop")) == (says, remedy)


def test_what_no_session_is_too_read_only_for_is_one_statement() -> None:
    setting = Setting("synchronous_commit", "off", "user")
    assert reset_of(setting, "app", "shop") == (
        "let that role run: ALTER ROLE app RESET synchronous_commit"
    )


SEEN = {"state": "active", "waits_type": None, "waits_for": None}


@pytest.mark.parametrize(
    ("session", "is_to_be_ended"),
    [
        ({"application": "psql", **SEEN}, True),
        ({"application": None, **SEEN}, True),
        ({"application": "psql", **SEEN, "waits_type": "Lock", "waits_for": "tuple"}, True),
        ({"application": "psql", **SEEN, "waits_type": "IPC", "waits_for": "SyncRep"}, False),
        ({"application": "psql", "state": None}, False),
        ({"application": "tasklock web-1", **SEEN}, False),
        ({"application": "tasklock web-1", **SEEN, "waits_for": "SyncRep"}, False),
        ({"application": "tasklock web-1", "state": None}, False),
    ],
)
def test_no_session_is_ended_that_may_wait_for_a_standby_and_none_of_the_task_lock(
    session: dict[str, Any], is_to_be_ended: bool
) -> None:
    given = {"waits_type": None, "waits_for": None, **session}
    since = datetime(2026, 1, 31, tzinfo=timezone.utc)
    blocker = Blocker(
        pid=7, gid=None, modes="ExclusiveLock", role="ann", since=since, holds=True, **given
    )
    ends = "SELECT pg_terminate_backend(7)" in end_of(blocker, "app")
    assert ends is is_to_be_ended
