"""The page of the command line's options is what the parser says."""

from __future__ import annotations

import re
from enum import Enum

import pytest

from apscheduler_tasklock import JobState, TaskState
from apscheduler_tasklock.cli import check, exits
from docs.commands import PAGE, commands, option_strings, page
from tests.support.snippets import ROOT


def test_the_page_is_written_from_the_parser_that_there_is() -> None:
    assert PAGE.read_text() == page(), "write it anew with: make reference"


def test_each_command_is_told_of_in_the_guide() -> None:
    guide = (ROOT / "docs/command-line.md").read_text()
    told = set(
        re.findall(r"apscheduler-tasklock ((?:jobs )?[\w-]+)|`((?:jobs )?[\w-]+)[ `]", guide)
    )
    assert {name for name in commands() if not any(name in one for one in told)} == set()


def numbers(section: str) -> set[int]:
    """Return the exit statuses in the first table of a section of the guide."""
    table = section.partition("| exit status | meaning |\n")[2].partition("\n\n")[0]
    return {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}


def test_the_guide_has_each_exit_status() -> None:
    guide = (ROOT / "docs/command-line.md").read_text()
    steering, _, monitor = guide.partition("\n## For a monitor\n")
    ours = {value for name, value in vars(exits).items() if name.isupper() and name[0] != "_"}
    assert numbers(steering) == {value for value in ours if isinstance(value, int)}
    assert numbers(monitor) == {0, 1, 2, check.UNKNOWN}


def test_the_options_of_all_commands_are_those_of_each_that_reads_or_steers() -> None:
    guide = (ROOT / "docs/command-line.md").read_text()
    table = guide.partition("\n## Options of all commands\n")[2].partition("\nData goes to")[0]
    listed = set(re.findall(r"`(--\w+)", re.sub(r"\|[^|]*\|$", "", table, flags=re.MULTILINE)))
    others = {"upgrade", "downgrade", "import-jobs", "metrics", "demo"}
    common = set.intersection(
        *(
            {option for option in option_strings(parser) if option.startswith("--")}
            for name, parser in commands().items()
            if name not in others
        )
    )
    assert listed == common


@pytest.mark.parametrize(("page", "states"), [("operating", TaskState), ("command-line", JobState)])
def test_the_table_of_states_has_each(page: str, states: type[Enum]) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    table = text.partition("\n| state | meaning |\n")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[1:]
    listed = {name for cell in cells for name in cell.replace("`", "").split(", ")}
    assert listed == {state.value for state in states}
