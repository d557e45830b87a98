"""The tests that `tests/SHEDLOCK.md` names exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.named_tests import is_test

TESTS = Path(__file__).parent.parent
TEXT = (TESTS / "SHEDLOCK.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py::[\w:]+)`", TEXT)))


def test_each_test_that_is_named_exists() -> None:
    assert len(NAMED) > 50
    assert [named for named in NAMED if not is_test(TESTS, named)] == []


def test_each_row_names_a_test_or_says_why_there_is_none() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    bare = [row for row in rows if ".py::" not in row and "does not apply" not in row]
    assert not bare
