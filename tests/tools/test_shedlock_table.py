"""The tests that `tests/SHEDLOCK.md` names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
TEXT = (TESTS / "SHEDLOCK.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py::[\w:]+)`", TEXT)))


def defined_in(path: Path) -> set[str]:
    """Return the tests of a module as pytest names them."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        functions = (m for m in members if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef))
        found |= {prefix + function.name for function in functions}
    return found


@pytest.mark.parametrize("named", NAMED)
def test_each_test_that_is_named_exists(named: str) -> None:
    module, _, test = named.partition("::")
    assert test.rpartition("::")[2].startswith("test_")
    assert test in defined_in(TESTS / module)


def test_each_row_names_a_test_or_says_why_there_is_none() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    bare = [row for row in rows if ".py::" not in row and "does not apply" not in row]
    assert not bare
