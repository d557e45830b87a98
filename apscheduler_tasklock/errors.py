"""The exceptions: one base class, and what a caller may want to tell apart."""

from __future__ import annotations


class TaskLockError(Exception):
    """The base class of every error that this library raises."""


class TaskLockOptionError(TaskLockError, ValueError):
    """An option is unknown or impossible. The message names the option and what is allowed."""


class TaskLockSchemaError(TaskLockError):
    """The task lock table is missing, old or not permitted. The message names the remedy."""


class TaskLockDatabaseError(TaskLockError):
    """The database could not be reached, or did not answer in time."""
