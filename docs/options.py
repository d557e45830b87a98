"""Writes the tables of the page of options from signatures and docstrings: `make reference`.

A row's default is what the docstring says after its last "By default", or else the signature's.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore
from apscheduler_tasklock.options import DEFAULTS, OF_EXECUTOR, LockOptions

PAGE = Path(__file__).parent / "reference" / "options.md"

_HEAD = "| option | default | meaning |\n| --- | --- | --- |\n"

# Where the documentation says more of an option.
_SEE = {
    "lock": "[below](#jobs-that-every-process-needs)",
    "retries": "[A job that fails now and then](../how-to/retries.md)",
    "on_database_error": "[leader mode](../how-to/leader-mode.md)",
    "claim_timeout": "[below](#how-long-a-claim-is-tried)",
    "history": "[the run history](../operating.md#the-run-history)",
    "tracebacks": "[tracebacks](../operating.md#tracebacks)",
    "leader": "[leader mode](../how-to/leader-mode.md)",
    "grace": "[states of a task](../operating.md#states-of-a-task)",
}


def page() -> str:
    """Return the page: its own text, with the tables written anew."""
    tables = iter([parameters(TaskLockExecutor), job_options(), parameters(TaskLockJobStore)])
    return re.sub(rf"{re.escape(_HEAD)}(\|.*\n)+", lambda _: table(next(tables)), PAGE.read_text())


def table(rows: Iterable[Iterable[str]]) -> str:
    """Return rows of cells as a table."""
    lines = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
    return _HEAD + lines.replace("|  |", "| |")


def parameters(documented: type) -> Iterator[Iterable[str]]:
    """Yield a row for each parameter of a class."""
    told = sentences(LockOptions) | sentences(documented)
    for name, one in inspect.signature(documented).parameters.items():
        what = "any other" if one.kind is one.VAR_KEYWORD else f"`{name}`"
        is_time = "timedelta" in str(one.annotation)
        yield what, *row(name, told[name], value(one.default, is_time=is_time))


def job_options() -> Iterator[Iterable[str]]:
    """Yield a row for the options that the executor has, too, and one for each other option."""
    yield ", ".join(f"`{name}`" for name in OF_EXECUTOR), "the executor's", "as above"
    told = sentences(LockOptions)
    for option in fields(LockOptions):
        if option.name not in OF_EXECUTOR:
            default = value(getattr(DEFAULTS, option.name))
            yield f"`{option.name}`", *row(option.name, told[option.name], default)


def sentences(documented: type) -> dict[str, str]:
    """Return what a class's docstring says of each parameter or attribute, as Markdown."""
    text = re.sub(r":class:`[~.\w]*?(\w+)`", r"`\1`", inspect.getdoc(documented) or "")
    found = re.findall(r"^:(?:param|ivar) (\w+): (.*?)(?=^:|\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: " ".join(told.replace("``", "`").split()) for name, told in found}


def row(name: str, told: str, default: str) -> tuple[str, str]:
    """Return an option's default and meaning, as cells of a table."""
    meaning, _, in_words = told.partition(" By default ")
    if name in _SEE:
        meaning = f"{meaning.rstrip('.')}. See {_SEE[name]}."
    if meaning.endswith("."):
        meaning = meaning[0].upper() + meaning[1:]
    return in_words.rstrip(".") or default, meaning


def value(default: Any, *, is_time: bool = False) -> str:
    """Return a default as a cell of a table.

    :param is_time: whether a number is seconds
    """
    if isinstance(default, timedelta):
        number, unit = (default.days, "day") if default.days else (default.seconds / 3600, "hour")
        return f"{number:g} {unit}{'s' * (number != 1)}"
    if isinstance(default, bool):
        return f"`{default}`"
    if isinstance(default, (int, float)):
        return f"{default:g} s" if is_time else str(default)
    return f'`"{default}"`' if isinstance(default, str) and default else ""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
