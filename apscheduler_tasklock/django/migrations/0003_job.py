"""Revision 0003: the jobs of the job store."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations

from apscheduler_tasklock.django.operations import TakeTablesTo


class Migration(migrations.Migration):
    """The next revision."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("apscheduler_tasklock", "0002_status")]
    operations: ClassVar[list[Any]] = [TakeTablesTo("0003", before="0002")]
