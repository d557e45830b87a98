"""The Django app of the task lock.

Add ``"apscheduler_tasklock.django"`` to ``INSTALLED_APPS``.
"""

from apscheduler_tasklock.django.database import database_url, task_locks
from apscheduler_tasklock.django.executor import DjangoTaskLockExecutor

__all__ = ["DjangoTaskLockExecutor", "database_url", "task_locks"]
