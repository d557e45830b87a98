"""Finds out whether this process serves an application, and from when on.

Flask has no event for this. ``flask run`` and its reloader are recognised by the click context and
by Werkzeug, ``app.run()`` by a wrapper around it, a worker of gunicorn by its handler of SIGTERM,
and any other server by its first request. A job must not begin before its module is imported, so a
thread waits until the server has loaded the application, and then starts the scheduler. Under
gunicorn's ``--preload`` this thread is started in the forked worker.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import click
from flask import Flask
from flask.cli import ScriptInfo
from flask.helpers import get_debug_flag
from werkzeug.serving import is_running_from_reloader


def flask_command() -> click.Context | None:
    """Return the ``flask`` command that runs in this process, or ``None``."""
    context = click.get_current_context(silent=True)
    # Other programs have click commands, too, so the context must be Flask's.
    return None if context is None or context.find_object(ScriptInfo) is None else context


def command_serves(command: click.Context) -> bool:
    """Return whether a ``flask`` command serves the application in this process.

    With the reloader, ``flask run`` has a process that only watches files, and one that serves.
    """
    if command.info_name != "run":
        return False
    reload = command.params.get("reload")
    return not (get_debug_flag() if reload is None else reload) or is_running_from_reloader()


def may_serve() -> bool:
    """Return whether this process may serve the application; ``False`` if it certainly does not."""
    command = flask_command()
    return not is_gunicorn_master() if command is None else command_serves(command)


def command_has_loaded(command: click.Context) -> Callable[[], bool]:
    """Return a function that returns whether a ``flask`` command has loaded the application."""
    script = command.find_object(ScriptInfo)
    return lambda: getattr(script, "_loaded_app", None) is not None


def run_only_watches(app: Flask, debug: bool | None, options: Mapping[str, Any]) -> bool:
    """Return whether ``app.run()`` with these arguments only watches files in this process."""
    reload = options.get("use_reloader", app.debug if debug is None else debug)
    return bool(reload) and not is_running_from_reloader()


def gunicorn_worker() -> Any:
    """Return the worker of gunicorn that runs in this process, or ``None``."""
    base = sys.modules.get("gunicorn.workers.base")
    worker = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return worker if base is not None and isinstance(worker, base.Worker) else None


def gunicorn_worker_has_loaded() -> bool:
    """Return whether this process is a worker of gunicorn that is about to serve."""
    return bool(getattr(gunicorn_worker(), "booted", False))


def is_gunicorn_master() -> bool:
    """Return whether this process is gunicorn's master, or was forked by the master just now."""
    return "gunicorn.arbiter" in sys.modules and gunicorn_worker() is None


def is_patched_too_late() -> bool:
    """Return whether gevent patches this process only after gunicorn has forked it.

    In such a process the locks that a preloaded application has made are not gevent's, so that no
    scheduler can run.
    """
    monkey = sys.modules.get("gevent.monkey")
    is_patched = monkey is not None and monkey.is_module_patched("threading")
    return "gunicorn.workers.ggevent" in sys.modules and not is_patched
