"""Which process serves an application, and from when on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import click
from flask import Flask, cli
from flask.cli import ScriptInfo
from flask.helpers import get_debug_flag, get_load_dotenv
from werkzeug.serving import is_running_from_reloader


def flask_command() -> click.Context | None:
    """Return the ``flask`` command that runs in this process, if any does."""
    context = click.get_current_context(silent=True)
    # Other servers have click commands, too.
    return None if context is None or context.find_object(ScriptInfo) is None else context


def command_serves(command: click.Context) -> bool:
    """Tell whether a ``flask`` command serves the application in this process.

    With the reloader, ``flask run`` has a process that only watches files, and one that serves.
    """
    if command.info_name != "run":
        return False
    reload = command.params.get("reload")
    return not (get_debug_flag() if reload is None else reload) or is_running_from_reloader()


def command_has_loaded(command: click.Context) -> Callable[[], bool]:
    """Return what tells whether a ``flask`` command has loaded the application."""
    script = command.find_object(ScriptInfo)
    return lambda: getattr(script, "_loaded_app", None) is not None


def run_only_watches(app: Flask, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Tell whether ``app.run()`` with these arguments only watches files in this process."""
    _host, _port, debug, load_dotenv = (*arguments, None, None, None, None)[:4]
    debug = options.get("debug", debug)
    if get_load_dotenv(options.get("load_dotenv", True if load_dotenv is None else load_dotenv)):
        cli.load_dotenv()  # as `app.run()` does in a moment
        if debug is None and "FLASK_DEBUG" in os.environ:
            debug = get_debug_flag()
    reload = options.get("use_reloader", app.debug if debug is None else debug)
    return bool(reload) and not is_running_from_reloader()


def run_is_ignored() -> bool:
    """Tell whether ``app.run()`` does nothing here, because a ``flask`` command runs."""
    return os.environ.get("FLASK_RUN_FROM_CLI") == "true"


def end_on_sigterm() -> None:
    """Let SIGTERM end the interpreter in the usual way, where it would kill the process.

    Flask's server without the reloader sets no handler.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def gunicorn_worker() -> Any:
    """Return gunicorn's worker whose process this is, or ``None``."""
    base = sys.modules.get("gunicorn.workers.base")
    worker = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return worker if base is not None and isinstance(worker, base.Worker) else None


def gunicorn_worker_has_loaded() -> bool:
    """Tell whether this process is a worker of gunicorn that is about to serve."""
    return bool(getattr(gunicorn_worker(), "booted", False))


def is_gunicorn_master() -> bool:
    """Tell whether this process watches over workers of gunicorn, or has just been forked by it."""
    return "gunicorn.arbiter" in sys.modules and gunicorn_worker() is None


def is_patched_too_late() -> bool:
    """Tell whether gevent or eventlet will patch this process, which gunicorn has just forked.

    What the application has made by then, as locks, is none of theirs.
    """
    monkey = sys.modules.get("gevent.monkey")
    if "gunicorn.workers.ggevent" in sys.modules:
        return monkey is None or not monkey.is_module_patched("threading")
    return "gunicorn.workers.geventlet" in sys.modules
