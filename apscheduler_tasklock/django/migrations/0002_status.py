"""Revision 0002: what operators see and steer."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations

from apscheduler_tasklock.django.operations import TakeTablesTo


class Migration(migrations.Migration):
    """The next revision."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("apscheduler_tasklock", "0001_task_lock")]
    operations: ClassVar[list[Any]] = [TakeTablesTo("0002", before="0001")]
