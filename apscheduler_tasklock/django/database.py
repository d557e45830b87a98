"""The URL and the task locks of a database in ``settings.DATABASES``."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.url import libpq_parameters
from apscheduler_tasklock.django.configuration import check_alias, configuration
from apscheduler_tasklock.locks import TaskLocks


def database_url(using: str | None = None) -> URL:
    """Return the URL of a database of ``settings.DATABASES``; during tests, of the test database.

    The URL has the parameters of libpq that ``OPTIONS`` contains, and the role of ``assume_role``.
    Options that only Django knows are left out.

    :param using: alias of the database; by default that of ``TASKLOCK_DATABASE``
    :raises ImproperlyConfigured: there is no such database, or it is not PostgreSQL
    """
    if using is None:
        using = configuration().database
    else:
        check_alias(using, "using")
    connection = connections[using]
    if connection.vendor != "postgresql":
        raise ImproperlyConfigured(
            f"the task lock needs PostgreSQL, and the database {using!r} has the ENGINE "
            f"{connection.settings_dict['ENGINE']!r}; set TASKLOCK_DATABASE to the alias of a "
            "PostgreSQL database, or TASKLOCK_ENABLED = False to run jobs without locks"
        )
    # Ask the backend for the parameters, because a backend may add to the settings, for example a
    # short-lived password.
    given = connection.get_connection_params()
    parameters = {
        name: str(value)
        for name, value in given.items()
        if name in libpq_parameters() and value is not None
    }
    role = connection.settings_dict["OPTIONS"].get("assume_role")
    if role:
        parameters["options"] = f"{parameters.get('options', '')} -c role={_escaped(role)}".strip()
    return _url(parameters)


def task_locks(using: str | None = None, **options: Any) -> TaskLocks:
    """Return the task locks of the project. Close them after use.

    :param using: alias of the database; by default that of ``TASKLOCK_DATABASE``
    :param options: of :class:`~apscheduler_tasklock.TaskLocks`; ``schema`` and ``table`` are by
        default those of the settings
    :raises ImproperlyConfigured: there is no such database, or it is not PostgreSQL
    :raises TaskLockOptionError: an option is invalid
    """
    return TaskLocks(database_url(using), **{**table_options(), **options})


def table_options() -> dict[str, Any]:
    """Return the options ``schema`` and ``table`` of the settings."""
    configured = configuration()
    return {"schema": configured.schema, "table": configured.table}


def _url(parameters: dict[str, str]) -> URL:
    names = {"username": "user", "password": "password", "database": "dbname"}
    parts: dict[str, Any] = {part: parameters.pop(name, None) for part, name in names.items()}
    host, port = parameters.pop("host", ""), parameters.pop("port", "")
    if "," in host or "," in port:
        # Several hosts are passed in libpq's own form. A single port is repeated for each host.
        ports = port.split(",") if "," in port else [port] * len(host.split(","))
        parameters |= {"host": host} | ({"port": ",".join(ports)} if port else {})
    else:
        parts |= {"host": host or None, "port": int(port) if port else None}
    return URL.create("postgresql", query=parameters, **parts)


def _escaped(value: str) -> str:
    """Return a value escaped for libpq's ``options``, which spaces separate."""
    return value.replace("\\", "\\\\").replace(" ", "\\ ")
