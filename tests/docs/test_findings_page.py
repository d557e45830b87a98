"""The table of findings in the documentation has each finding with its level and exit status."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.waist import KINDS, SEVERITIES


def test_each_finding_is_in_the_table(checkout: Path) -> None:
    text = (checkout / "docs/operating.md").read_text()
    rows = re.findall(r"^\| `([a-z ]+)` \| (\w+) \| (\d) \|", text, re.MULTILINE)
    assert {kind for kind, _, _ in rows} == set(KINDS)
    assert [exit_status for _, _, exit_status in rows] == [
        str(SEVERITIES[level]) for _, level, _ in rows
    ]
