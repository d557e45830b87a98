"""The command ``import-jobs``: takes over the jobs of APScheduler's ``SQLAlchemyJobStore``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections import Counter
from pathlib import Path

from apscheduler_tasklock.cli.exits import FAILED, OK, say
from apscheduler_tasklock.cli.output import output, print_json
from apscheduler_tasklock.cli.target import database_of
from apscheduler_tasklock.errors import TaskLockOptionError


def import_jobs(options: argparse.Namespace) -> int:
    """Take over the jobs of an old table."""
    # Imported here, because no other command reads APScheduler's jobs.
    from apscheduler_tasklock.jobstore.importing import import_jobs
    from apscheduler_tasklock.jobstore.store import TaskLockJobStore

    if options.functions is None and options.secret_file is None:
        raise TaskLockOptionError(
            "pass --functions or --secret-file, or both, as the application's TaskLockJobStore has "
            "functions=... and secret=..."
        )
    logging.getLogger("apscheduler_tasklock").addHandler(logging.NullHandler())
    if os.getcwd() not in sys.path:  # because the application is usually in the current folder
        sys.path.insert(0, os.getcwd())
    store = TaskLockJobStore(
        database_of(options),
        functions=options.functions,
        secret=None if options.secret_file is None else _secret_of(options.secret_file),
        schema=options.schema,
        table=options.table,
    )
    told = []
    try:
        for job in import_jobs(store, options.source, late=options.late):
            told.append(job)
            if not options.json:
                reason = f": {job.reason}" if job.reason else ""
                output().print(f"{job.id}: {job.outcome}{reason}")
    finally:
        store.shutdown()
    if options.json:
        print_json(told)
    counts = Counter(job.outcome for job in told)
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    say(summary or f"the table {options.source} has no jobs")
    return FAILED if counts["not taken over"] else OK


def _secret_of(file: str) -> bytes:
    """Return the secret in a file, without the line break at its end.

    :raises TaskLockOptionError: the file cannot be read
    """
    try:
        return Path(file).read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise TaskLockOptionError(f"--secret-file: {error}") from None
