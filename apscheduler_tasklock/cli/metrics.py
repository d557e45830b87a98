"""The command ``metrics``: numbers from the tasks' rows, for Prometheus."""

from __future__ import annotations

import argparse
from contextlib import suppress

from apscheduler_tasklock.cli.exits import OK, say
from apscheduler_tasklock.cli.output import print_json
from apscheduler_tasklock.cli.target import task_locks
from apscheduler_tasklock.draining import end_on_sigterm
from apscheduler_tasklock.errors import TaskLockError, TaskLockOptionError
from apscheduler_tasklock.metrics import MetricsServer, metric_values, prometheus_text


def metrics(options: argparse.Namespace) -> int:
    """Print the metrics once, or serve them until Ctrl-C or SIGTERM."""
    if options.json and options.listen is not None:
        raise TaskLockOptionError("--listen serves Prometheus' text, and goes without --json")
    with task_locks(options) as locks:
        if options.json:
            print_json(metric_values(locks))
            return OK
        if options.listen is None:
            print(prometheus_text(locks), end="")
            return OK
        host, port = options.listen
        try:
            server = MetricsServer(locks, host, port)
        except OSError as error:
            raise TaskLockError(f"cannot listen on {host}:{port}: {error}") from error
        with server:
            end_on_sigterm()
            say(f"serving {server.url}; Ctrl-C ends it")
            with suppress(KeyboardInterrupt):
                server.serve_forever()
    return OK
