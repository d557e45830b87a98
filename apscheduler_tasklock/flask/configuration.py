"""Reads the extension's options from ``app.config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flask import Flask
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.url import (
    DATABASE_VARIABLE,
    UNUSED,
    as_url,
    given_or_environment_database,
    parse_url,
)
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.options import parse_switch

PREFIX = "TASKLOCK_"
FALLBACK = "SQLALCHEMY_DATABASE_URI"


@dataclass(frozen=True)
class Configuration:
    """The configuration of one application.

    :ivar database: as for ``TaskLockExecutor``; ``None`` only if locks are off
    :ivar enabled: whether jobs run under locks
    :ivar executor_options: further options of ``TaskLockExecutor``
    :ivar scheduler_options: options of APScheduler's scheduler
    :ivar autostart: whether the scheduler starts by itself when the application is served
    """

    database: str | URL | Engine | None
    enabled: bool
    executor_options: Mapping[str, Any]
    scheduler_options: Mapping[str, Any]
    autostart: bool

    @classmethod
    def of(cls, app: Flask) -> Configuration:
        """Return the configuration that an application has in ``app.config``.

        :raises TaskLockOptionError: there is no database, or an option is invalid
        """
        options = app.config.get_namespace(PREFIX)
        database = options.pop("database_url", None) or app.config.get(FALLBACK)
        enabled = parse_switch(options.get("enabled", True), f"{PREFIX}ENABLED", "app.config")
        if enabled:
            how = (
                f"Set app.config[{DATABASE_VARIABLE!r}] or app.config[{FALLBACK!r}] to "
                "postgresql://user@host/name before init_app"
            )
            database = given_or_environment_database(database, how)
        autostart = parse_switch(options.pop("autostart", True), f"{PREFIX}AUTOSTART", "app.config")
        scheduler = options.pop("scheduler", None) or {}
        if not isinstance(scheduler, Mapping) or "default" in scheduler.get("executors", {}):
            raise TaskLockOptionError(
                f"app.config: {PREFIX}SCHEDULER must be a dict of APScheduler's options, such as "
                "timezone or job_defaults. The executor 'default' is the one with the task locks, "
                f"whose options are {PREFIX}FAILOVER and so on"
            )
        return cls(database or None, enabled, options, scheduler, autostart)

    @property
    def executor_database(self) -> str | URL | Engine:
        """The executor's database; if locks are off, a placeholder that is not used."""
        return self.database if self.enabled and self.database else UNUSED

    @property
    def database_text(self) -> str | None:
        """The database as a URL, with its password; ``None`` if there is none."""
        if self.database is None:
            return None
        if isinstance(self.database, str):
            return self.database
        return parse_url(as_url(self.database)).render_as_string(hide_password=False)
