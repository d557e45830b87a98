"""Each promise of `SECURITY.md` names tests, and those exist."""

from __future__ import annotations

import re

from tests.support.named_tests import is_test
from tests.support.snippets import ROOT

TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py::[\w:]+)`", TEXT)))


def test_each_test_that_is_named_exists() -> None:
    assert [named for named in NAMED if not is_test(ROOT, named)] == []


def test_each_promise_names_a_test() -> None:
    tables = re.findall(r"^\| promise \| test \|\n\| --- \| --- \|\n((?:\|.*\n)+)", TEXT, re.M)
    assert len(tables) == len(re.findall(r"^\| promise", TEXT, re.M))
    promises = [line for table in tables for line in table.splitlines()]
    assert len(promises) > 15
    for promise in promises:
        assert re.search(r"\| (`tests/[\w/]+\.py::[\w:]+`(, )?)+ \|$", promise), promise
