"""What the reference in docs lists is what there is."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import apscheduler_tasklock
from apscheduler_tasklock import (
    TaskLockEvent,
    TaskLocks,
    testing,
)
from apscheduler_tasklock.schema.table import (
    job_table,
    replica_table,
    run_table,
    task_lock_table,
)

LEVELS = {
    "info": "INFO",
    "warning": "WARNING",
    "error": "ERROR",
    "exception": "ERROR",
    "critical": "CRITICAL",
    "log": "",
}


# What the files for contributors name that is not here, with where it would be.
ELSEWHERE = {
    "alembic/versions/0002_what_it_does.py": "an example",
    "manage.py": "a Django project's",
}


def page(checkout: Path, name: str) -> str:
    return (checkout / "docs" / f"{name}.md").read_text()


def section(text: str, heading: str) -> str:
    """Return a section of a page, up to the next heading of its level."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text: str) -> dict[str, list[str]]:
    """Return the further cells of a page's tables by each name in their first cell."""
    found: dict[str, list[str]] = {}
    for line in re.findall(r"^\| (`.+) \|$", text, re.MULTILINE):
        first, *cells = re.split(r" *(?<!\\)\| *", line)
        found |= dict.fromkeys(re.findall(r"`(\w+)`", first), cells)
    return found


def test_each_argument_of_task_locks_is_named(checkout: Path) -> None:
    text = section(page(checkout, "reference/options"), "`TaskLocks`")
    [arguments] = re.findall(r"^`TaskLocks\((.*)\)`", text, re.MULTILINE)
    names = [name for name in arguments.split(", ") if name != "*"]
    assert names == list(inspect.signature(TaskLocks).parameters)


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


def test_each_public_name_has_an_entry_in_the_reference(checkout: Path) -> None:
    api = page(checkout, "reference/api")
    entries = set(re.findall(r"^\.\. auto\w+:: (\w+)(?:\(\))?$", api, re.MULTILINE))
    events = set(rows(page(checkout, "reference/events")))
    names = {*apscheduler_tasklock.__all__, *testing.__all__} - {"EVENT_TASK_LOCK_ALL"}
    assert names - entries == {name for name in names if name.startswith("EVENT_")}
    assert {name for name in names - entries if name not in events} == set()
    assert "\n`EVENT_TASK_LOCK_ALL` is all of them.\n" in page(checkout, "reference/events")


# Parts of `CheckIns` that have tests of their own.
NOT_FOR_USERS = {"monitor_config", "slug_of"}


@pytest.mark.parametrize("name", ["metrics", "checkins"])
def test_each_name_of_a_further_module_is_in_the_reference(checkout: Path, name: str) -> None:
    api = page(checkout, "reference/api")
    module = f"apscheduler_tasklock.{name}"
    [members] = re.findall(rf"automodule:: {module}\n   :members: (.*)$", api, re.MULTILINE)
    defined = {
        name
        for name, value in vars(import_module(module)).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module
    }
    assert set(members.split(", ")) == defined - NOT_FOR_USERS


def test_each_attribute_of_an_event_has_a_row(checkout: Path) -> None:
    table = rows(section(page(checkout, "reference/events"), "Attributes"))
    event = inspect.signature(TaskLockEvent).parameters
    assert set(table) == set(event)


def logged(checkout: Path) -> Iterator[tuple[str, str]]:
    """Yield level and text of what the library logs at INFO and above, as the code has them.

    The level is empty where the code chooses it.
    """
    for module in (checkout / "apscheduler_tasklock").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            match node:
                case ast.Call(ast.Attribute(ast.Name("logger"), method), arguments) if (
                    method in LEVELS
                ):
                    line = arguments[1 if method == "log" else 0]
                    if isinstance(line, ast.Constant):
                        yield LEVELS[method], str(line.value)


def documented_lines(checkout: Path) -> list[tuple[str, str]]:
    """Return level and text of each line that the page lists, with dots for what differs."""
    text = page(checkout, "reference/messages").partition("\n## Errors\n")[0]
    quoted = re.findall(r"^> (.+\n(?:> .+\n)*)", text, re.MULTILINE)
    lines = [line.replace("\n> ", " ").strip().partition(" ")[::2] for line in quoted]
    table = section(text, "Log lines at INFO")
    cells = re.findall(r"^\| (\S.*?) \| ", table, re.MULTILINE)[2:]
    return lines + [("INFO", cell) for cell in cells]


def form_of(text: str, placeholder: str) -> re.Pattern[str]:
    """Return a pattern in which something stands for anything."""
    return re.compile(".*".join(map(re.escape, re.split(placeholder, text))))


# Lines of which several values are words: one form of each, as the page has it.
FORMS = {
    "Task %r: %s for the run time %s: %s%s": "Task ...: not run for the run time ...: ...",
    "Task %r: runs %s again (token %s), since its holder %r (token %s) %s": "Task ...: runs the "
    "window of ... again (token ...), since its holder ... neither renewed nor released its lock",
}


def test_each_log_line_is_among_the_messages(checkout: Path) -> None:
    lines, documented = set(logged(checkout)), documented_lines(checkout)
    lines = {(level, line) for level, line in lines if line != "%s"}  # a text of another place
    assert len(lines) > 50
    assert len(documented) > 50
    value = r"%[-+.\d]*[a-z]"

    def is_documented(level: str, line: str) -> bool:
        """Look for the line; a value of it may be shown as words and dots."""
        shown, form = re.sub(value, "...", line), form_of(line, value)
        if line in FORMS:
            return any(text == FORMS[line] for _, text in documented)
        return any(
            form_of(text, r"\.\.\.").fullmatch(shown) or form.fullmatch(text)
            for told, text in documented
            if level in (told, "")
        )

    assert sorted(one for one in lines if not is_documented(*one)) == []
    assert set(FORMS) <= {line for _, line in lines}


@pytest.mark.parametrize(
    "name",
    [
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "tests/README.md",
        "tests/SHEDLOCK.md",
        "tests/chaos/README.md",
        "tests/chaos_store/README.md",
    ],
)
def test_each_module_that_contributors_read_of_is_there(checkout: Path, name: str) -> None:
    named = re.findall(r"`([\w./-]+\.py)(?:::[\w:]+)?`", (checkout / name).read_text())
    folders = ("apscheduler_tasklock", "tests", "benchmarks", "examples", "alembic", "docs")
    modules = [f"/{path}" for folder in folders for path in (checkout / folder).rglob("*.py")]
    missing = {
        module
        for module in named
        if module not in ELSEWHERE and not any(path.endswith(f"/{module}") for path in modules)
    }
    assert named
    assert not missing
