"""A Flask extension: a scheduler in each process that serves the application."""

from apscheduler_tasklock.flask.extension import TaskLockScheduler

__all__ = ["TaskLockScheduler"]
