"""Revision 0001: creates the tables, and declares the models, which Django does not manage."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

from apscheduler_tasklock.django.models import (
    job_table_name,
    replica_table_name,
    run_table_name,
    task_table_name,
)
from apscheduler_tasklock.django.operations import MigrateTables

PERMISSIONS = ("view", "change")


class Migration(migrations.Migration):
    """The first revision."""

    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []
    operations: ClassVar[list[Any]] = [
        MigrateTables("0001", "base"),
        migrations.CreateModel(
            name="Task",
            fields=[
                ("task_name", models.TextField(primary_key=True, serialize=False)),
                ("started_at", models.DateTimeField()),
                ("due_at", models.DateTimeField(null=True)),
                ("locked_by", models.TextField()),
                ("token", models.BigIntegerField()),
                ("window_start", models.DateTimeField()),
                ("one_off", models.BooleanField()),
                ("schedule_text", models.TextField(null=True, db_column="schedule")),
            ],
            options={
                "db_table": task_table_name(),
                "managed": False,
                "default_permissions": PERMISSIONS,
            },
        ),
        migrations.CreateModel(
            name="Run",
            fields=[
                ("task_name", models.TextField(primary_key=True, serialize=False)),
                ("ring", models.TextField()),
                ("slot", models.IntegerField()),
                ("token", models.BigIntegerField(null=True)),
                ("scheduled_at", models.DateTimeField(null=True)),
                ("started_at", models.DateTimeField()),
                ("ended_at", models.DateTimeField()),
                ("replica", models.TextField()),
                ("kind", models.TextField()),
                ("outcome", models.TextField()),
                ("error_type", models.TextField(null=True)),
                ("error", models.TextField(null=True)),
                ("traceback", models.TextField(null=True)),
                ("by", models.TextField(null=True)),
                ("until", models.DateTimeField(null=True)),
                ("reason", models.TextField(null=True)),
                ("cause", models.TextField(null=True)),
                ("last_scheduled_at", models.DateTimeField(null=True)),
                ("run_times", models.IntegerField(null=True)),
                ("attempt", models.IntegerField(null=True)),
                ("retry_at", models.DateTimeField(null=True)),
                ("action_id", models.UUIDField(null=True)),
                ("release", models.TextField(null=True)),
            ],
            options={
                "db_table": run_table_name(),
                "managed": False,
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="Replica",
            fields=[
                ("replica_id", models.TextField(primary_key=True, serialize=False)),
                ("host", models.TextField()),
                ("version", models.TextField()),
                ("started_at", models.DateTimeField()),
                ("seen_at", models.DateTimeField()),
                ("release", models.TextField(null=True)),
                ("keep_one_offs", models.BigIntegerField(null=True)),
            ],
            options={
                "db_table": replica_table_name(),
                "managed": False,
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="Job",
            fields=[
                ("id", models.TextField(primary_key=True, serialize=False)),
                ("func", models.TextField()),
                ("executor", models.TextField()),
                ("next_run_time", models.DateTimeField(null=True)),
                ("last_run_time", models.DateTimeField(null=True)),
                ("task_name", models.TextField(null=True)),
            ],
            options={
                "db_table": job_table_name(),
                "managed": False,
                "default_permissions": PERMISSIONS,
                "verbose_name": "stored job",
            },
        ),
    ]
