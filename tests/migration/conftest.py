"""What the migrations are tested with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg
import pytest

from apscheduler_tasklock.cli import main

Run = Callable[..., str]

CLI = "apscheduler_tasklock.cli"

_TABLES = """
    SELECT n.nspname, c.relname, c.reloptions::text, a.attname,
           format_type(a.atttypid, a.atttypmod), a.attnotnull,
           pg_get_expr(d.adbin, d.adrelid),
           ARRAY(SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = c.oid
                 ORDER BY 1)::text
    FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
    WHERE c.relkind = 'r' AND n.nspname !~ '^(pg_|information_schema)'
    ORDER BY n.nspname, c.relname, a.attnum
"""


def described(database_url: str) -> list[tuple[Any, ...]]:
    """Return everything about the tables of a database that a migration can decide."""
    with psycopg.connect(database_url) as connection:
        return connection.execute(_TABLES).fetchall()


def tables(database_url: str) -> set[str]:
    return {f"{schema}.{name}" for schema, name, *_ in described(database_url)}


def run_here(arguments: Sequence[str], env: Mapping[str, str]) -> str:
    """Run the library's command line in this process; return its output, or fail with it."""
    with (
        patch.dict(os.environ, env),
        redirect_stdout(StringIO()) as printed,
        redirect_stderr(StringIO()) as said,
    ):
        if "TASKLOCK_DATABASE_URL" not in env:
            os.environ.pop("TASKLOCK_DATABASE_URL", None)
        status = main(arguments)
    assert status == 0, said.getvalue() + printed.getvalue()
    return printed.getvalue()


@pytest.fixture
def run(checkout: Path) -> Run:
    """Run a command of this Python in the checkout; return its output, or fail with it.

    The library's own command line is run in this process.
    """

    def run(*arguments: str, cwd: Path = checkout, python: str = sys.executable, **env: str) -> str:
        if arguments[0] == CLI:
            return run_here(arguments[1:], env)
        inherited = {k: v for k, v in os.environ.items() if k != "TASKLOCK_DATABASE_URL"}
        finished = subprocess.run(
            [python, "-m", *arguments],
            cwd=cwd,
            env={**inherited, **env},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr + finished.stdout
        return finished.stdout

    return run
