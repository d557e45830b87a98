"""The database of ``settings.DATABASES``, as the task lock connects to it."""

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

    It has all of libpq's parameters in ``OPTIONS``, and assumes the role of ``assume_role``.
    Options for Django's connections alone are left out.

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
    # What a backend adds to the settings, as a password of an hour, is in here as well.
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
    :raises TaskLockOptionError: an option is impossible
    """
    return TaskLocks(database_url(using), **{**table_options(), **options})


def table_options() -> dict[str, Any]:
    """Return the options of the settings that say where the table is."""
    configured = configuration()
    return {"schema": configured.schema, "table": configured.table}


def _url(parameters: dict[str, str]) -> URL:
    names = {"username": "user", "password": "password", "database": "dbname"}
    parts: dict[str, Any] = {part: parameters.pop(name, None) for part, name in names.items()}
    host, port = parameters.pop("host", ""), parameters.pop("port", "")
    if "," in host or "," in port:
        # Several servers, in libpq's own form. One port stands for all of them.
        ports = port.split(",") if "," in port else [port] * len(host.split(","))
        parameters |= {"host": host} | ({"port": ",".join(ports)} if port else {})
    else:
        parts |= {"host": host or None, "port": int(port) if port else None}
    return URL.create("postgresql", query=parameters, **parts)


def _escaped(value: str) -> str:
    """Return a value for libpq's ``options``, where spaces part them."""
    return value.replace("\\", "\\\\").replace(" ", "\\ ")
