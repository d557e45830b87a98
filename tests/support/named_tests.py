"""The names of the tests in a module, for pages that name tests."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def names_of_tests(module: Path) -> frozenset[str]:
    """Return the tests of a module as pytest names them, without its path."""
    found = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        functions = (m for m in members if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef))
        found |= {prefix + each.name for each in functions if each.name.startswith("test_")}
    return frozenset(found)


def is_test(root: Path, named: str) -> bool:
    """Return whether there is a test, named by its module's path and its name."""
    module, _, test = named.partition("::")
    return (root / module).is_file() and test in names_of_tests(root / module)
