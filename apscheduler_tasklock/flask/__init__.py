"""A Flask extension: a scheduler in each process that serves the application, and the dashboard."""

from apscheduler_tasklock.flask.dashboard import mount_dashboard
from apscheduler_tasklock.flask.extension import TaskLockScheduler

__all__ = ["TaskLockScheduler", "mount_dashboard"]
