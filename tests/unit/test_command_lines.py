"""Command lines that log lines and `show` print, ready to be pasted."""

from __future__ import annotations

import subprocess

import pytest

from apscheduler_tasklock._lock.commands import command_line


def words(line: str) -> list[str]:
    """Return a command line's words, as a shell reads them."""
    printed = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], check=True, capture_output=True, text=True
    )
    return printed.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    "task",
    ["sync-prices", "a task's", "$(reboot) `x` %d \\", "a\n\x1b[31m'\\n", "an ünïcödé 🙂\u202e"],
)
def test_a_name_is_one_word_whatever_is_in_it(task: str) -> None:
    line = command_line("free", "--token", "41", task=task)
    assert line.isprintable()
    assert words(line) == ["apscheduler-tasklock", "free", "--token", "41", task]


def test_a_name_that_looks_like_an_option_is_none() -> None:
    assert command_line("run", task="--all") == "apscheduler-tasklock run -- --all"


def test_a_table_of_another_name_and_schema_is_named() -> None:
    line = command_line("run", task="job", schema="ops team", table="locks")
    assert line == "apscheduler-tasklock run --schema 'ops team' --table locks job"
    assert command_line("run", task="job") == "apscheduler-tasklock run job"
