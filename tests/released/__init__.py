"""What each release gave its users, which later minor versions keep.

Each folder is a version. Its `schema.sql` creates the tables and notes the revision; its
`public.txt` lists the names of the package and of the API's page, their parameters, and the
commands with their options. `make released` writes the folder of the version in pyproject.toml, as
a step of a release. docs/how-to/upgrading.md has the policy.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import apscheduler_tasklock
from apscheduler_tasklock.options import DEFAULTS
from apscheduler_tasklock.schema.drift import BASE
from apscheduler_tasklock.schema.migrations import revision_sql
from docs.commands import commands, option_strings

FOLDER = Path(__file__).parent
RELEASES = sorted(path.parent.name for path in FOLDER.glob("*/schema.sql"))
_CATCH_ALL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
API = FOLDER.parent.parent / "docs" / "reference" / "api.md"


class Entry(NamedTuple):
    """A name that the API's page shows.

    :ivar name: with its module
    :ivar value: what has that name
    :ivar is_called: whether users call it, and not only get one
    :ivar members: the members that the page shows; ``None`` for all
    :ivar hidden: those that it leaves out of all
    """

    name: str
    value: Any
    is_called: bool
    members: list[str] | None
    hidden: list[str]


def schema_sql() -> str:
    """Return the statements that create this version's tables and note its revision."""
    return revision_sql(BASE, "head") + "\n"


def public_names() -> list[str]:
    """Return this version's public names, parameters, commands and options, one a line."""
    found = {f"apscheduler_tasklock.{name}" for name in apscheduler_tasklock.__all__}
    found |= {line for entry in entries(API.read_text()) for line in lines_of(entry)}
    found |= {
        f"job option {name} is {value!r} by default" for name, value in vars(DEFAULTS).items()
    }
    for group in ("apscheduler.executors", "apscheduler.jobstores"):
        ours = {each.name for each in entry_points(group=group) if "tasklock" in each.value}
        found |= {f"{group} {name}" for name in ours}
    for name, parser in commands().items():
        found |= {f"$ {name}", *(f"$ {name} {option}" for option in option_strings(parser))}
    return sorted(found)


def entries(page: str) -> Iterator[Entry]:
    """Return what Sphinx takes from the API's page."""
    module = ""
    directive = re.compile(r"^\.\. (\w+):: ([\w.]+)(\(\))?\n((?: +:.*\n)*)", re.MULTILINE)
    for kind, name, not_called, options in directive.findall(page):
        members = re.search(r" :members:(.*)", options)
        shown = re.findall(r"\w+", members[1]) if members else []
        hidden = re.search(r" :exclude-members: (.*)", options)
        if kind in ("module", "automodule"):
            module = name
            for each in shown:
                value = getattr(import_module(name), each)
                yield Entry(f"{name}.{each}", value, True, None, [])
            continue
        where, _, last = (name if "." in name else f"{module}.{name}").rpartition(".")
        everything = members is not None and not shown
        yield Entry(
            f"{where}.{last}",
            getattr(import_module(where), last),
            not not_called,
            None if everything else shown,
            hidden[1].split(", ") if hidden else [],
        )


def lines_of(entry: Entry) -> Iterator[str]:
    """Return the lines of a name, its parameters, and the members of a class."""
    name, value, is_called, members, hidden = entry
    yield name
    if is_called and callable(value):
        yield from (f"{name}{parameter}" for parameter in _parameters(value))
    if not inspect.isclass(value):
        return
    if issubclass(value, Exception):
        yield from (f"{name} is {base.__name__}" for base in value.__mro__[1:-2])
    if members is None:
        members = [*getattr(value, "__members__", _documented(value))]
        members = [each for each in members if each not in hidden]
    yield from (f"{name}.{each}" for each in re.findall(r":ivar (\w+):", value.__doc__ or ""))
    for each in members:
        yield f"{name}.{each}"
        if issubclass(value, Enum):
            yield f"{name}.{each} is {value[each].value!r}"
        member = inspect.getattr_static(value, each)
        if inspect.isfunction(member):
            yield from (f"{name}.{each}{parameter}" for parameter in _parameters(member))


def _documented(value: type) -> list[str]:
    return [
        name
        for name, member in vars(value).items()
        if not name.startswith("_") and inspect.getdoc(member)
    ]


def _parameters(value: Any) -> Iterator[str]:
    """Return a line of each parameter, and one more if it may be left out or be given by place."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # no signature is known, as of an exception's class
        return
    for each in parameters:
        if each.name == "self" or each.name.startswith("_") or each.kind in _CATCH_ALL:
            continue
        yield f"({each.name})"
        if each.default is not each.empty:
            yield f"({each.name}) may be left out"
        if isinstance(each.default, (bool, int, float, str)):
            yield f"({each.name}) is {each.default!r} by default"
        if each.kind is not each.KEYWORD_ONLY:
            yield f"({each.name}) may be given by place"
