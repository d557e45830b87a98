"""What the reference in docs lists is what there is."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import apscheduler_tasklock
from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore, TaskLocks
from apscheduler_tasklock.options import LockOptions
from apscheduler_tasklock.schema.table import job_table, replica_table, run_table, task_lock_table

LEVELS = ("info", "warning", "error", "exception", "critical", "log")


def page(checkout: Path, name: str) -> str:
    return (checkout / "docs" / f"{name}.md").read_text()


@pytest.mark.parametrize("documented", [TaskLockExecutor, TaskLockJobStore, TaskLocks])
def test_each_parameter_is_among_the_options(checkout: Path, documented: type) -> None:
    text = page(checkout, "reference/options")
    parameters = set(inspect.signature(documented).parameters) - {"executor_options"}
    assert {name for name in parameters if not re.search(rf"\b{name}\b", text)} == set()


def test_each_option_of_a_job_is_in_the_table(checkout: Path) -> None:
    text = page(checkout, "reference/options")
    assert {field.name for field in fields(LockOptions) if f"`{field.name}`" not in text} == set()


@pytest.mark.parametrize(
    "table_of", [lambda table: table, run_table, replica_table, job_table], ids=lambda f: f.__name__
)
def test_the_columns_are_those_of_the_table(checkout: Path, table_of: object) -> None:
    assert callable(table_of)
    table = table_of(task_lock_table())
    section = page(checkout, "reference/tables").split(f"## `{table.name}`")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert listed == {column.name for column in table.columns}


def test_each_public_name_is_in_the_reference(checkout: Path) -> None:
    text = page(checkout, "reference/api") + page(checkout, "reference/events")
    assert {name for name in apscheduler_tasklock.__all__ if name not in text} == set()


def log_lines(checkout: Path) -> Iterator[str]:
    """Yield what the library logs at INFO and above, as it is written in the code."""
    for module in (checkout / "apscheduler_tasklock").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            match node:
                case ast.Call(ast.Attribute(ast.Name("logger"), level), arguments) if (
                    level in LEVELS
                ):
                    line = arguments[1 if level == "log" else 0]
                    if isinstance(line, ast.Constant):
                        yield str(line.value)


def test_each_log_line_is_among_the_messages(checkout: Path) -> None:
    text = re.sub(r"\s+(> )?", " ", page(checkout, "reference/messages"))
    lines = list(log_lines(checkout))
    assert len(lines) > 50
    # Of the text between the values, the longest part.
    parts = [max(re.split(r"%[-+.\d]*[a-z]", line), key=len).strip(" .,:;()'") for line in lines]
    assert {part for part in parts if part[:60] not in text} == set()
