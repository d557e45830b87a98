"""What a search of the tests' source finds that real time decides.

- ``sleep``: a sleep of more than 50 ms
- ``limit``: a lease, a grace time, a timeout or a maximum lock that real time can reach
- ``now``: a row that is a few seconds from the database's ``now()``, so that a second clock that
  judges it may be past them

Sleeps and limits of a minute or more count as never reached, because no test waits for them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LONGEST_SLEEP = 0.05
REACHABLE = 60.0

# Folders whose tests live in real time. The others have a clock of their own, or none.
REAL_TIME = ("integration", "executors", "frameworks", "acceptance", "support")
ALL = (*REAL_TIME, "unit", "contract", "migration", "docs", "tools")
# The first is run by no test of the gate, and the second has examples for this search.
NO_TESTS = ("support/slow_machine.py", "tools/test_gate.py")

LIMITS = {
    *("lease", "leader_lease", "max_lock", "claim_timeout", "misfire_grace_time", "timeout"),
    *("release_timeout", "closing_timeout", "call_timeout"),
    *("longest_turn", "pool_timeout"),
}
_MARKS = {"nightly", "simulate"}
_IN_TEXT = re.compile(rf"\b(?:{'|'.join(sorted(LIMITS))})=([\d.]+)\b")
_SERVERS_SLEEP = re.compile(r"pg_sleep\(([\d.]+)\)")
_FROM_NOW = re.compile(
    r"now\(\)\s*[-+]\s*interval\s*'([\d.]+)\s*(ms|milliseconds?|s|secs?|seconds?)\b"
)


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that real time decides.

    :ivar place: the test, such as ``unit/test_a.py::TestB::test_c``; or the helper, in a file of
        helpers
    """

    place: str
    rule: str
    line: int
    text: str


def _is_reached(number: float) -> bool:
    return 0 < number < REACHABLE


class _Module:
    """The source of one file."""

    def __init__(self, tree: ast.Module) -> None:
        self.numbers = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value.value, (int, float))
        }

    def number(self, node: ast.AST | None) -> float | None:
        """Return the number that an expression is, if that is plain to see."""
        if isinstance(node, ast.Name):
            return self.numbers.get(node.id)
        if isinstance(node, ast.Constant) and not isinstance(node.value, bool):
            if isinstance(node.value, (int, float)):
                return float(node.value)
            if isinstance(node.value, str) and re.fullmatch(r"\d+(\.\d+)?", node.value):
                return float(node.value)
        return None

    def found_in(self, part: ast.AST, *, real_time: bool) -> Iterator[tuple[int, str, str]]:
        """Yield the line, the rule and the text of each finding in a part of the source."""
        for node in _without_nightly_cases(part):
            line = getattr(node, "lineno", 0)
            for rule, text in self._found_at(node):
                if real_time or rule == "sleep":
                    yield line, rule, text

    def _found_at(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Call):
            yield from self._sleeps(node)
        for name, value in _named_values(node):
            number = self.number(value)
            if name.lower() in LIMITS and number is not None and _is_reached(number):
                yield "limit", f"{name}={number:g}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _found_in_text(node.value)

    def _sleeps(self, call: ast.Call) -> Iterator[tuple[str, str]]:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name == "sleep" and call.args:
            number = self.number(call.args[0])
            if number is None or LONGEST_SLEEP < number < REACHABLE:
                yield "sleep", ast.unparse(call)


def _found_in_text(text: str) -> Iterator[tuple[str, str]]:
    for found in _IN_TEXT.finditer(text):
        if _is_reached(float(found[1].rstrip("."))):
            yield "limit", found[0]
    for found in _SERVERS_SLEEP.finditer(text):
        if LONGEST_SLEEP < float(found[1]) < REACHABLE:
            yield "sleep", found[0]
    for found in _FROM_NOW.finditer(text):
        seconds = float(found[1]) / (1000 if found[2].startswith("m") else 1)
        if _is_reached(seconds):
            yield "now", found[0]


def _named_values(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield the names and values of arguments, defaults and entries of dictionaries."""
    if isinstance(node, ast.keyword) and node.arg:
        yield node.arg, node.value
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value.removeprefix("task_lock_"), value
    elif isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        defaults = node.defaults
        named = positional[len(positional) - len(defaults) :]
        yield from zip([one.arg for one in named], defaults, strict=True)
        yield from zip([one.arg for one in node.kwonlyargs], node.kw_defaults, strict=True)


def _without_nightly_cases(part: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a part, but for the cases of a table that only the nightly run has."""
    pending = [part]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call) and any(
            one.arg == "marks" and _is_marked(one.value) for one in node.keywords
        ):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        yield node
        pending += ast.iter_child_nodes(node)


def _is_marked(node: ast.AST) -> bool:
    """Return whether an expression is, or has in it, a marker of tests that the gate leaves out."""
    return any(
        isinstance(one, ast.Attribute)
        and one.attr in _MARKS
        and isinstance(one.value, ast.Attribute)
        and one.value.attr == "mark"
        for one in ast.walk(node)
    )


_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass
class _Part:
    """A function, a class or a constant of a file; or a test.

    :ivar is_gate: whether it is a test of the gate
    """

    name: str
    nodes: list[ast.AST]
    is_test: bool = False
    is_gate: bool = False

    @cached_property
    def names(self) -> set[str]:
        """The names that occur in it, those of fixtures among them."""
        found: set[str] = set()
        for node in self.nodes:
            for one in ast.walk(node):
                if isinstance(one, ast.Name):
                    found.add(one.id)
                elif isinstance(one, ast.arg):
                    found.add(one.arg)
                elif isinstance(one, ast.Attribute):
                    found.add(one.attr)  # a helper of the class
                elif isinstance(one, ast.Constant) and isinstance(one.value, str):
                    found.add(one.value)  # in `usefixtures`
        return found


def _parts(tree: ast.Module) -> list[_Part]:
    """Return the parts of a file."""
    marked = any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for node in tree.body
        if isinstance(node, ast.Assign) and _is_marked(node.value)
    )
    parts = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            parts += _parts_of(node, marked or any(map(_is_marked, node.decorator_list)))
        elif isinstance(node, _Definition):
            parts.append(_part(node.name, node, [node], marked))
        elif isinstance(node, ast.Assign):
            parts += [_Part(ast.unparse(target), [node.value]) for target in node.targets]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            parts.append(_Part(ast.unparse(node.target), [node.value]))
    return parts


def _part(name: str, node: ast.AST, nodes: list[ast.AST], marked: bool) -> _Part:
    decorators = getattr(node, "decorator_list", [])
    is_test = getattr(node, "name", "").startswith("test_") and not any(
        "pytest.fixture" in ast.unparse(one) for one in decorators
    )
    # A table of which some cases are nightly has a mark in it that is not the test's own.
    marked = marked or any(_is_marker(one) for one in decorators)
    return _Part(name, nodes, is_test, is_test and not marked)


def _is_marker(decorator: ast.expr) -> bool:
    plain = decorator.func if isinstance(decorator, ast.Call) else decorator
    return _is_marked(plain)


def _parts_of(node: ast.ClassDef, marked: bool) -> list[_Part]:
    """Return the tests of a class, which have its constants in them, and its helpers."""
    functions = [one for one in node.body if isinstance(one, _Definition)]
    shared = [*node.decorator_list, *(one for one in node.body if one not in functions)]
    return [
        _part(f"{node.name}::{one.name}", one, [one, *shared], marked)
        if one.name.startswith("test_")
        else _part(f"{node.name}::{one.name}", one, [one], marked)
        for one in functions
    ]


def findings(source: str, path: str) -> Iterator[Finding]:
    """Yield what one file has. A helper's counts for each test of the file that reaches it.

    :param path: from the tests' folder
    """
    tree = ast.parse(source)
    module, parts = _Module(tree), _parts(tree)
    real_time = path.startswith(REAL_TIME)
    by_name = {part.name: part for part in parts}
    found = {
        part.name: [
            one for node in part.nodes for one in module.found_in(node, real_time=real_time)
        ]
        for part in parts
    }
    is_of_tests = any(part.is_test for part in parts)
    for part in parts:
        if not is_of_tests or part.is_gate:
            for name in _reached(part, by_name) if is_of_tests else {part.name}:
                for line, rule, text in found[name]:
                    yield Finding(f"{path}::{part.name}", rule, line, text)


def _reached(part: _Part, by_name: dict[str, _Part]) -> set[str]:
    """Return the names of a test and of the parts of its file that it uses, one through another."""
    reached = {part.name}
    pending = [part]
    while pending:
        one = pending.pop()
        of_class = one.name.rpartition("::")[0]
        names = {f"{of_class}::{name}" for name in one.names} | one.names
        used = {name for name in names if name in by_name} - reached
        reached |= used
        pending += [by_name[name] for name in used]
    return reached


def all_findings(tests: Path) -> list[Finding]:
    """Return what all files have."""
    found: list[Finding] = []
    for folder in ALL:
        for file in sorted((tests / folder).rglob("*.py")):
            path = str(file.relative_to(tests))
            if path not in NO_TESTS:
                found += findings(file.read_text(), path)
    return found
