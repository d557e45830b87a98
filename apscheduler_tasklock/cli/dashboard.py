"""The command ``dashboard``: serves the dashboard on this machine."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from apscheduler_tasklock.cli.exits import FAILED, OK, say
from apscheduler_tasklock.cli.target import database_of
from apscheduler_tasklock.draining import end_on_sigterm
from apscheduler_tasklock.errors import TaskLockOptionError

# The variable with the password, because everybody on a machine can read a command line.
PASSWORD_VARIABLE = "TASKLOCK_DASHBOARD_PASSWORD"  # noqa: S105  # the variable's name


def dashboard(options: argparse.Namespace) -> int:
    """Serve the dashboard until Ctrl-C or SIGTERM."""
    try:
        from apscheduler_tasklock.dashboard import dashboard as make
        from apscheduler_tasklock.dashboard.server import Login, is_loopback, serve
    except ImportError as error:
        raise TaskLockOptionError(
            f"the dashboard needs {error.name}, which the extra apscheduler-tasklock[dashboard] "
            "installs: pip install a2wsgi jinja2 starlette uvicorn"
        ) from error
    password = os.environ.get(PASSWORD_VARIABLE) or None
    if password is None and not is_loopback(options.host):
        raise TaskLockOptionError(
            f"on {options.host} others can open the dashboard, so it needs a password: set "
            f"{PASSWORD_VARIABLE}, and put HTTPS before it"
        )
    if password is not None and not password.isprintable():
        raise TaskLockOptionError(
            f"{PASSWORD_VARIABLE} is not UTF-8, or has a character that cannot be printed"
        )
    login = Login(password, options.operate)
    app = make(
        database_of(options),
        schema=options.schema,
        table=options.table,
        namespace=options.namespace,
        authorize=login.authorize,
    )
    # Pages say what is wrong with the database, so the log need not say it again.
    logging.getLogger("apscheduler_tasklock").addHandler(logging.NullHandler())
    may = "operators can act here" if options.operate else "read-only; --operate allows actions"
    end_on_sigterm()  # because uvicorn ends its server in good order, and raises the signal again
    try:
        serve(
            app,
            login,
            options.host,
            options.port,
            lambda url: say(f"the dashboard is at {url} ({may}); Ctrl-C ends it"),
        )
    except KeyboardInterrupt:
        return OK
    except SystemExit as error:  # uvicorn has reported why it cannot listen
        sys.stderr.flush()
        return FAILED if error.code else OK
    return OK
