"""The models of the admin. Django neither creates nor writes their tables."""

from __future__ import annotations

from typing import Any

from django.db import models
from sqlalchemy import Table

from apscheduler_tasklock.django.configuration import configuration, table_settings
from apscheduler_tasklock.schema.table import (
    JOB_SUFFIX,
    REPLICA_SUFFIX,
    RUN_SUFFIX,
    run_table,
    task_lock_table,
)


def task_table_name() -> str:
    """Return the name of the task lock table, as Django's ``db_table``."""
    return _db_table("")


def run_table_name() -> str:
    """Return the name of the run history's table, as Django's ``db_table``."""
    return _db_table(RUN_SUFFIX)


def replica_table_name() -> str:
    """Return the name of the replicas' table, as Django's ``db_table``."""
    return _db_table(REPLICA_SUFFIX)


def job_table_name() -> str:
    """Return the name of the stored jobs' table, as Django's ``db_table``."""
    return _db_table(JOB_SUFFIX)


def _db_table(suffix: str) -> str:
    schema, table = table_settings()
    name = f"{table}{suffix}"
    # The quotes let the name contain a schema, because Django leaves a quoted name as it is.
    return f'"{schema}"."{name}"' if schema else name


def _fields_of(table: Table, **titles: str) -> dict[str, Any]:
    """Return a field for each column of a table, called by its title or else by its name.

    Django needs a single column as the key, which is the first one. Several rows may have the same
    value there, so no row is looked up by it.
    """
    fields: dict[str, Any] = {}
    for name, column in table.columns.items():
        kind = type(column.type).__name__.replace("Uuid", "UUID")  # as Django calls it
        make = getattr(models, f"{kind}Field")
        fields[name] = make(titles.get(name), primary_key=not fields, null=column.nullable)
    return fields


class _TaskLockManager(models.Manager):
    """Reads from the database of the task locks, past all routers."""

    def get_queryset(self) -> Any:
        return super().get_queryset().using(configuration().database)


class _TaskManager(_TaskLockManager):
    """Reads the rows of tasks, without the row that has the pauses of all tasks."""

    def get_queryset(self) -> Any:
        rows = super().get_queryset().exclude(task_name__startswith="\x01")
        return rows.defer("window_start", "one_off", "schedule_text")  # only conditions use these


class _RunManager(_TaskLockManager):
    """Reads the run history, without entries of missed run times that were run later.

    The condition is that of ``TaskLocks.runs``.
    """

    def get_queryset(self) -> Any:
        entries = super().get_queryset()
        task, missed_at = models.OuterRef("task_name"), models.OuterRef("scheduled_at")
        is_later = models.Q(
            window_start__gt=missed_at, one_off=True, schedule_text='{"run":null,"type":"date"}'
        )
        tasks = Task.objects.filter(models.Q(window_start=missed_at) | is_later, task_name=task)
        runs = entries.filter(task_name=task, ring__in=("runs", "failures"), scheduled_at=missed_at)
        was_run = models.Exists(tasks) | models.Exists(runs)
        return entries.exclude(models.Q(ring="misses", run_times=1) & was_run)


class _DumpManager(models.Manager):
    """Has no rows, so that ``dumpdata``, which reads with a model's first manager, dumps none.

    Otherwise ``loaddata`` would restore old locks, and ``dumpdata`` would fail where locks are off
    and there are no tables.
    """

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class Task(models.Model):
    """A row of the task lock table, with the columns by which lists are ordered and searched.

    ``TaskLocks.tasks`` reads the task's status, which depends on the other columns, too.
    """

    task_name = models.TextField("task", primary_key=True)
    started_at = models.DateTimeField("started")
    due_at = models.DateTimeField("next due", null=True)
    locked_by = models.TextField("last holder")
    token = models.BigIntegerField()
    window_start = models.DateTimeField()
    one_off = models.BooleanField()
    # Not called `schedule`, because a column of the list has that name.
    schedule_text = models.TextField(null=True, db_column="schedule")

    dumped = _DumpManager()
    objects = _TaskManager()

    class Meta:
        """Django's options of the model."""

        managed = False
        db_table = task_table_name()
        default_permissions = ("view", "change")

    def __str__(self) -> str:
        return str(self.task_name)


class Run(models.Model):
    """A row of the run history: a run, missed run times, or what an operator did."""

    # Django makes the model of what stands in the class's body.
    vars().update(
        _fields_of(
            run_table(task_lock_table()),
            task_name="task",
            scheduled_at="run time",
            started_at="started",
            ended_at="ended",
            error_type="error",
            error="message",
        )
    )

    dumped = _DumpManager()
    objects = _RunManager()

    class Meta:
        """Django's options of the model."""

        managed = False
        db_table = run_table_name()
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.task_name} ({self.token or self.outcome})"


class Replica(models.Model):
    """A row of the replicas' table. ``TaskLocks.replicas`` reads the replica's status."""

    replica_id = models.TextField("replica", primary_key=True)
    host = models.TextField()
    version = models.TextField()
    started_at = models.DateTimeField("started")
    seen_at = models.DateTimeField("last seen")
    release = models.TextField(null=True)
    keep_one_offs = models.BigIntegerField(null=True)

    dumped = _DumpManager()
    objects = _TaskLockManager()

    class Meta:
        """Django's options of the model."""

        managed = False
        db_table = replica_table_name()
        default_permissions = ("view",)

    def __str__(self) -> str:
        return str(self.replica_id)


class Job(models.Model):
    """A row of the stored jobs' table. ``TaskLocks.jobs`` reads the job's status."""

    id = models.TextField("job", primary_key=True)
    func = models.TextField("function")
    executor = models.TextField()
    next_run_time = models.DateTimeField("next run time", null=True)
    last_run_time = models.DateTimeField("last run time", null=True)
    task_name = models.TextField("task", null=True)

    dumped = _DumpManager()
    objects = _TaskLockManager()

    class Meta:
        """Django's options of the model."""

        managed = False
        db_table = job_table_name()
        default_permissions = ("view", "change")
        verbose_name = "stored job"

    def __str__(self) -> str:
        return str(self.id)
