"""The executor of a Django project: it uses the project's database, and closes old connections."""

from __future__ import annotations

import functools
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from apscheduler.executors.base import BaseExecutor
from apscheduler.util import iscoroutinefunction_partial
from asgiref.sync import sync_to_async
from django.db import close_old_connections
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.url import UNUSED
from apscheduler_tasklock._lock.user import ReplicaUser
from apscheduler_tasklock.django.configuration import configuration
from apscheduler_tasklock.django.database import database_url, table_options
from apscheduler_tasklock.executor import TaskLockExecutor
from apscheduler_tasklock.options import parse_switch


class DjangoTaskLockExecutor(TaskLockExecutor):
    """A :class:`~apscheduler_tasklock.TaskLockExecutor` for a Django project.

    Its database is one of ``settings.DATABASES``; during tests, the test database. Before and after
    each job Django's old and broken connections are closed, except in worker processes.

    :param executor: executor to wrap; by default the scheduler's own default executor
    :param using: alias of the database; by default that of ``TASKLOCK_DATABASE``
    :param options: of :class:`~apscheduler_tasklock.TaskLockExecutor`; ``enabled``, ``namespace``,
        ``schema`` and ``table`` are by default those of the settings
    :raises ImproperlyConfigured: there is no such database, or it is not PostgreSQL
    :raises TaskLockOptionError: an option is unknown or invalid
    """

    def __init__(
        self,
        executor: str | Mapping[str, Any] | BaseExecutor | None = None,
        *,
        using: str | None = None,
        **options: Any,
    ) -> None:
        configured = configuration()
        own = {"enabled": configured.enabled, "namespace": configured.namespace}
        options = {**own, **table_options(), **options}
        enabled = parse_switch(options["enabled"], "enabled", type(self).__name__)
        self._find_url: Callable[[], URL] = lambda: database_url(using) if enabled else UNUSED
        super().__init__(self._find_url(), executor, **options)

    def start(self, scheduler: Any, alias: str) -> None:
        """Start the wrapped executor. Called by the scheduler.

        :raises TaskLockSchemaError: the task lock table is missing, old or not permitted
        :raises TaskLockOptionError: an option of a job that was added already is invalid, or
            another scheduler runs with this executor
        """
        # The URL is read again, because tests import the project's modules before the test database
        # exists.
        url, settings = self._find_url(), self.user.settings
        if url != settings.database:
            self._begin(ReplicaUser(replace(settings, database=url)))
        super().start(scheduler, alias)

    def wrap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a job's function that closes Django's old connections before and after it."""
        if iscoroutinefunction_partial(function):
            return functools.partial(_await_with_fresh_connections, function)
        return functools.partial(_call_with_fresh_connections, function)


def _call_with_fresh_connections(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    close_old_connections()
    try:
        return function(*args, **kwargs)
    finally:
        close_old_connections()


async def _await_with_fresh_connections(
    function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    # sync_to_async closes the connections of the thread in which Django's asynchronous methods run.
    close = sync_to_async(close_old_connections)
    await close()
    try:
        result = await function(*args, **kwargs)
    except (CancelledError, GeneratorExit):
        raise  # no wait, because the event loop may be ending; the next job closes the connections
    except BaseException:
        await close()
        raise
    await close()
    return result
