"""The scheduler that ``TASKLOCK_SCHEDULER`` names."""

from __future__ import annotations

from typing import Any

from apscheduler.schedulers.base import BaseScheduler
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from apscheduler_tasklock.django.configuration import configuration

SETTING = "TASKLOCK_SCHEDULER"


def import_scheduler() -> Any:
    """Return the object of the setting: a scheduler, or a function that makes one.

    :raises ImproperlyConfigured: the setting is missing, names something else, or names a scheduler
        that runs already
    :raises ImportError: the object cannot be imported
    """
    path = configuration().scheduler
    if path is None:
        raise ImproperlyConfigured(
            f"there is no setting {SETTING}; set it to the dotted path of the scheduler, as in "
            f"{SETTING} = 'project.scheduling.scheduler'"
        )
    found = import_string(path)
    if isinstance(found, BaseScheduler):
        check_not_running(found, path)
    elif not callable(found):
        raise ImproperlyConfigured(
            f"{SETTING}: {path} must be a scheduler of APScheduler, or a function that returns "
            f"one, not {type(found).__name__}"
        )
    return found


def make_scheduler() -> Any:
    """Return the scheduler, made by the function if the setting names one.

    :raises ImproperlyConfigured: as :func:`import_scheduler`
    :raises ImportError: as :func:`import_scheduler`
    """
    path, found = configuration().scheduler, import_scheduler()
    scheduler = found if isinstance(found, BaseScheduler) else found()
    if not isinstance(scheduler, BaseScheduler):
        raise ImproperlyConfigured(
            f"{SETTING}: {path}() must return a scheduler of APScheduler, not "
            f"{type(scheduler).__name__}"
        )
    check_not_running(scheduler, path)
    return scheduler


def check_not_running(scheduler: Any, path: str | None) -> None:
    """Make sure that a scheduler was not started.

    :raises ImproperlyConfigured: the scheduler runs
    """
    if scheduler.running:
        raise ImproperlyConfigured(
            f"{SETTING}: {path} runs already, so that every command of manage.py that imports it "
            "runs jobs; take the call of start() out of the project's module"
        )
