"""The documentation has each finding with its level and exit status, and each cause of a miss."""

from __future__ import annotations

import re
from pathlib import Path

from apscheduler_tasklock import MissCause
from tests.support.waist import FINDING_KINDS, SEVERITIES


def test_each_finding_is_in_the_table(checkout: Path) -> None:
    text = (checkout / "docs/operating.md").read_text()
    rows = re.findall(r"^\| `([a-z ]+)` \| (\w+) \| (\d) \|", text, re.MULTILINE)
    kinds = FINDING_KINDS.values()
    assert [(name, level) for name, level, _ in rows] == [(it.name, it.level) for it in kinds]
    assert [exit_status for _, _, exit_status in rows] == [
        str(SEVERITIES[level]) for _, level, _ in rows
    ]


def test_each_cause_of_a_miss_is_in_the_table(checkout: Path) -> None:
    text = (checkout / "docs/how-to/stuck-task.md").read_text()
    table = text.partition("| cause | reason | what helps |\n")[2].partition("\n\n")[0]
    causes = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(causes) == sorted(cause.value for cause in MissCause)
