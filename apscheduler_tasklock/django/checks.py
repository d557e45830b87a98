"""The system checks of the task lock, for ``manage.py check``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's names
from django.core.exceptions import ImproperlyConfigured
from django.db import router

from apscheduler_tasklock.django.configuration import configuration
from apscheduler_tasklock.django.database import database_url, task_locks
from apscheduler_tasklock.django.scheduler import SETTING, import_scheduler
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.schema.check import UPGRADE_COMMAND


def check_settings(**_options: Any) -> list[CheckMessage]:
    """Check the settings, the database's engine, and that the scheduler can be imported."""
    try:
        configured = configuration()
    except ImproperlyConfigured as error:
        return [Error(str(error), id="apscheduler_tasklock.E001")]
    found: list[CheckMessage] = []
    if configured.enabled:
        try:
            database_url()
        except ImproperlyConfigured as error:
            found.append(Error(str(error), id="apscheduler_tasklock.E002"))
    if configured.scheduler is not None and not found:
        found += _check_scheduler()
    return found


def _check_scheduler() -> list[CheckMessage]:
    try:
        import_scheduler()
    except ImproperlyConfigured as error:
        return [Error(str(error), id="apscheduler_tasklock.E003")]
    except Exception as error:  # noqa: BLE001  # the project's module can raise anything
        reason = f"{type(error).__name__}: {error}"
        path = configuration().scheduler
        return [
            Error(
                f"{SETTING}: {path} cannot be imported ({reason})",
                id="apscheduler_tasklock.E003",
            )
        ]
    return []


def _is_migrating() -> bool:
    """Return whether this is `manage.py migrate`, which runs the checks before its work."""
    return sys.argv[1:2] == ["migrate"]


def check_tables(databases: Sequence[str] | None = None, **_options: Any) -> list[CheckMessage]:
    """Check that the tables exist, are new enough, and are permitted.

    A problem is a warning. If another program calls ``migrate``, an error would stop ``migrate``
    before it creates the tables.

    :param databases: the aliases that ``--database`` names
    """
    try:
        configured = configuration()
        using = configured.database
        if not configured.enabled or using not in (databases or ()) or _is_migrating():
            return []
        locks = task_locks(claim_timeout=5)
    except ImproperlyConfigured:
        return []  # because `check_settings` reports the error
    hint = None
    try:
        locks.check()
    except TaskLockError as error:
        # The hint is left out if only a right is missing.
        if UPGRADE_COMMAND in str(error) and router.allow_migrate(using, "apscheduler_tasklock"):
            other = "" if using == "default" else f" --database {using}"
            hint = f"`manage.py migrate{other}` creates the tables, and brings them up to date"
        return [Warning(str(error), hint=hint, id="apscheduler_tasklock.W001")]
    finally:
        locks.close()
    return []
