"""The project's settings of the task lock, read at each use because tests change settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections

from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.options import parse_switch
from apscheduler_tasklock.schema.table import DEFAULT_TABLE, task_lock_table


@dataclass(frozen=True)
class Configuration:
    """The settings whose names begin with ``TASKLOCK_``.

    :ivar scheduler: dotted path of the scheduler, or of a function that returns it
    :ivar database: alias of the database
    :ivar schema: schema of the task lock table
    :ivar table: name of the task lock table
    :ivar namespace: prefix of every task name
    :ivar enabled: whether jobs run under locks
    """

    scheduler: str | None
    database: str
    schema: str | None
    table: str
    namespace: str
    enabled: bool


def configuration() -> Configuration:
    """Return the settings.

    :raises ImproperlyConfigured: a setting is invalid; the message names it
    """
    scheduler = _setting("SCHEDULER", None)
    if scheduler is not None and not isinstance(scheduler, str):
        raise ImproperlyConfigured(
            "TASKLOCK_SCHEDULER must be a dotted path such as 'project.scheduling.scheduler', not "
            f"{type(scheduler).__name__}"
        )
    database = _setting("DATABASE", DEFAULT_DB_ALIAS)
    check_alias(database, "TASKLOCK_DATABASE")
    schema, table = table_settings()
    namespace = _setting("NAMESPACE", "")
    if not isinstance(namespace, str):
        raise ImproperlyConfigured(f"TASKLOCK_NAMESPACE must be a text, not {namespace!r}")
    try:
        task_lock_table(table, schema)  # raises an error if a name is invalid
        enabled = parse_switch(_setting("ENABLED", True), "TASKLOCK_ENABLED", "settings")
    except TaskLockOptionError as error:
        raise ImproperlyConfigured(f"TASKLOCK_ settings: {error}") from None
    return Configuration(scheduler, database, schema, table, namespace, enabled)


def table_settings() -> tuple[Any, Any]:
    """Return the settings of the table's schema and name, unchecked, for the models."""
    return _setting("SCHEMA", None) or None, _setting("TABLE", DEFAULT_TABLE)


def check_alias(alias: Any, where: str) -> None:
    """Make sure that an alias names a database.

    :param where: the setting or option with the alias
    :raises ImproperlyConfigured: there is no such database
    """
    if alias not in connections.settings:
        known = ", ".join(map(repr, connections.settings))
        raise ImproperlyConfigured(
            f"{where} must be an alias of settings.DATABASES ({known}), not {alias!r}"
        )


def _setting(name: str, default: Any) -> Any:
    return getattr(settings, f"TASKLOCK_{name}", default)
