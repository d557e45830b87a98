"""The records of design decisions, and ARCHITECTURE.md, are as CONTRIBUTING.md says."""

from __future__ import annotations

import re

import pytest

from tests.support.snippets import ROOT

DECISIONS = ROOT / "docs" / "decisions"
RECORDS = sorted(DECISIONS.glob("[0-9]*.md"))
SECTIONS = ["Context", "Decision", "Costs", "Tried or considered"]
MOST_LINES = 40
# Folders whose modules ARCHITECTURE.md lists one by one; "" is the package itself.
LISTED = ("", "_runs", "_lock", "_lock/statements", "_database", "jobstore")
# Modules of the package that are told of beside the table, or that nobody looks for.
NOT_LISTED = {"__init__.py", "__main__.py", "starlette.py"}


def parts() -> dict[str, tuple[str, list[str]]]:
    """Return the parts of ARCHITECTURE.md's table, with their folders and modules."""
    found = {}
    for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines():
        row = re.fullmatch(r"\| \*\*(.+?)\*\* \|(.*?)\|(.*?)\|.*\|", line)
        if row:
            name, folder, modules = row.groups()
            found[name] = folder.strip(" `"), re.findall(r"`([\w.]+)`", modules)
    return found


def test_a_record_is_short_has_its_sections_and_names_no_module() -> None:
    for record in RECORDS:
        text = record.read_text()
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS, record
        assert len(text.splitlines()) <= MOST_LINES, record
        assert re.findall(r"\w+\.py\b", text) == [], record


def test_the_index_lists_each_record_under_its_title() -> None:
    titles = [record.read_text().partition("\n")[0].removeprefix("# ") for record in RECORDS]
    expected = list(zip(titles, (record.name for record in RECORDS), strict=True))
    assert [title.partition(".")[0] for title in titles] == [
        str(number) for number in range(1, len(RECORDS) + 1)
    ]
    index = (DECISIONS / "index.md").read_text()
    assert re.findall(r"^\| \[(.+?)\]\((\d.+?)\) \|", index, re.MULTILINE) == expected
    assert re.findall(r"^(\d{4}-.+)$", index, re.MULTILINE) == [each.stem for each in RECORDS]


@pytest.mark.parametrize("folder", LISTED)
def test_each_module_is_in_one_part_of_the_architecture(folder: str) -> None:
    there = {path.name for path in (ROOT / "apscheduler_tasklock" / folder).glob("*.py")}
    listed = [name for its, modules in parts().values() if its == folder for name in modules]
    assert sorted(listed) == sorted(there - NOT_LISTED)


def test_what_follows_from_a_failure_is_in_parts_that_there_are() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## Failures\n")[2]
    rows = re.findall(r"^\| .* \| (.+?) \|$", text, re.MULTILINE)[2:]  # without the head
    assert len(rows) > 15
    named = [re.findall(r"\*\*(.+?)\*\*", row) for row in rows]
    assert all(named)
    assert {name for row in named for name in row} <= set(parts())
