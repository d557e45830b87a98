"""The app's configuration for Django."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks
from django.db.models.signals import post_migrate


class TaskLockConfig(AppConfig):
    """The app ``apscheduler_tasklock``: tables, system checks, the admin and ``runscheduler``."""

    name = "apscheduler_tasklock.django"
    label = "apscheduler_tasklock"
    verbose_name = "Task locks"

    def ready(self) -> None:
        """Register the system checks, and have ``manage.py migrate`` make dropped tables anew.

        No scheduler is imported or started here.
        """
        from apscheduler_tasklock.django.checks import check_settings, check_tables
        from apscheduler_tasklock.django.operations import make_anew

        checks.register(check_settings)
        checks.register(check_tables, checks.Tags.database)
        post_migrate.connect(make_anew, sender=self)
