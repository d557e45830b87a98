"""The tables as the admin reads them. Django neither creates them nor writes to them."""

from __future__ import annotations

from typing import Any

from django.db import models

from apscheduler_tasklock.django.configuration import configuration, table_settings
from apscheduler_tasklock.schema.table import RUN_SUFFIX


def task_table_name() -> str:
    """Return the name of the task lock table, as Django's ``db_table``."""
    return _db_table("")


def run_table_name() -> str:
    """Return the name of the run history's table, as Django's ``db_table``."""
    return _db_table(RUN_SUFFIX)


def _db_table(suffix: str) -> str:
    schema, table = table_settings()
    name = f"{table}{suffix}"
    # Django leaves a name in quotes as it is, and so a schema before it.
    return f'"{schema}"."{name}"' if schema else name


class _TaskLockManager(models.Manager):
    """Reads from the database of the task locks, whatever a router says."""

    def get_queryset(self) -> Any:
        return super().get_queryset().using(configuration().database)


class _DumpManager(models.Manager):
    """Has no rows: ``dumpdata`` reads with the first manager of each model.

    A lock that ``loaddata`` restores would be an old one. And where locks are off, there may be no
    tables.
    """

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class Task(models.Model):
    """A row of the task lock table: what lists are ordered and searched by.

    What the task is doing, ``TaskLocks.tasks`` makes of all columns.
    """

    task_name = models.TextField("task", primary_key=True)
    started_at = models.DateTimeField("started")
    due_at = models.DateTimeField("next due", null=True)
    locked_by = models.TextField("last holder")
    token = models.BigIntegerField()

    dumped = _DumpManager()
    objects = _TaskLockManager()

    class Meta:
        """How Django sees the table."""

        managed = False
        db_table = task_table_name()
        default_permissions = ("view", "change")

    def __str__(self) -> str:
        return str(self.task_name)


class Run(models.Model):
    """A row of the run history."""

    # Django wants one column. Several rows have the same name, so none is looked up by it.
    task_name = models.TextField("task", primary_key=True)
    slot = models.IntegerField()
    token = models.BigIntegerField()
    scheduled_at = models.DateTimeField("run time", null=True)
    started_at = models.DateTimeField("started")
    ended_at = models.DateTimeField("ended")
    replica = models.TextField()
    kind = models.TextField()
    outcome = models.TextField()
    error_type = models.TextField("error", null=True)
    error = models.TextField("message", null=True)

    dumped = _DumpManager()
    objects = _TaskLockManager()

    class Meta:
        """How Django sees the table."""

        managed = False
        db_table = run_table_name()
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.task_name} ({self.token})"
