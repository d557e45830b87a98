"""Command lines for operators, ready to be pasted into a shell."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from apscheduler_tasklock.schema.shell import table_options, word
from apscheduler_tasklock.schema.table import DEFAULT_TABLE

PROGRAM = "apscheduler-tasklock"


def library_version() -> str:
    """Return this library's version; ``(not installed)`` in a folder without its metadata."""
    try:
        return version(PROGRAM)
    except PackageNotFoundError:
        return "(not installed)"


def command_line(
    command: str, *options: str, task: str, schema: str | None = None, table: str = DEFAULT_TABLE
) -> str:
    """Return the command line of a command for a task, in one printable line.

    :param options: the command's options, such as ``"--force"``
    :param task: the task's full name
    :param schema: the schema of the task lock table; ``None``: the connection's search path has it
    """
    words = [PROGRAM, command, *table_options(schema, table), *options]
    if task.startswith("-"):
        words.append("--")
    if not task.endswith("\n"):
        return " ".join([*words, word(task)])
    # `word` loses line breaks at the end of a text. So a dot is added after the name's line breaks,
    # and the shell removes the dot again.
    return " ".join([f"name={word(task + '.')};", *words, '"${name%.}"'])
