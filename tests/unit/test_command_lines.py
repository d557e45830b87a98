"""Command lines that log lines and `show` print, ready to be pasted."""

from __future__ import annotations

import subprocess

import pytest

from apscheduler_tasklock._lock.command_lines import command_line
from apscheduler_tasklock.cli.parser import build_parser
from apscheduler_tasklock.schema.check import with_table_options
from apscheduler_tasklock.schema.table import task_lock_table


def words(shell: str, line: str) -> list[str]:
    """Return the words of a command line, and of what else a shell makes of it, with that."""
    program = "apscheduler-tasklock() { printf '%s\\0' apscheduler-tasklock \"$@\"; }"
    if shell == "sh":  # in which a function's name has no hyphen
        line, program = (
            line.replace("apscheduler-tasklock", "it"),
            program.replace("apscheduler-tasklock()", "it()"),
        )
    printed = subprocess.run([shell, "-c", f"{program}; {line}"], check=True, capture_output=True)
    assert not printed.stderr
    return printed.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize(
    "task",
    [
        "sync-prices",
        "a task's",
        "$(reboot) `x` %d \\",
        "a\n\x1b[31m'\\n",
        "an ünïcödé 🙂\u202e",
        "!! \t!$ %s%% '\\0101 \\c",
        "; touch /tmp/x\n",
        "two\n\n",
        "~root *",
        "\x7f7",
        "",
    ],
)
def test_a_name_is_one_word_whatever_is_in_it(shell: str, task: str) -> None:
    line = command_line("free", "--token", "41", task=task)
    assert line.isprintable()
    assert words(shell, line) == ["apscheduler-tasklock", "free", "--token", "41", task]


def test_history_is_not_looked_for_in_a_name() -> None:
    """An interactive bash replaces ``!`` also in double quotes."""
    assert "!" not in command_line("run", task="wow!\t")


def test_a_name_that_looks_like_an_option_is_none() -> None:
    assert command_line("run", task="--all") == "apscheduler-tasklock run -- --all"


def test_a_table_of_another_name_and_schema_is_named() -> None:
    line = command_line("run", task="job", schema="ops team", table="locks")
    assert line == "apscheduler-tasklock run --schema 'ops team' --table locks job"
    assert command_line("run", task="job") == "apscheduler-tasklock run job"


@pytest.mark.parametrize("name", ["-x", "--yes", "--schema", "a b", "$(reboot)", "it's"])
def test_a_name_of_a_table_or_schema_is_the_value_of_its_option(name: str) -> None:
    table = task_lock_table(name, name)
    for line in (
        command_line("resume", task="job", schema=name, table=name),
        with_table_options("apscheduler-tasklock resume", table) + " job",
    ):
        options = build_parser().parse_args(words("bash", line)[1:])
        assert (options.schema, options.table) == (name, name)
