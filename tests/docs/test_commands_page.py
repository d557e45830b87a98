"""The page of the command line's options is what the parser says."""

from __future__ import annotations

import re

from docs.commands import PAGE, commands, page
from tests.support.snippets import ROOT


def test_the_page_is_written_from_the_parser_that_there_is() -> None:
    assert PAGE.read_text() == page(), "write it anew with: make reference"


def test_each_command_is_told_of_in_the_guide() -> None:
    guide = (ROOT / "docs/command-line.md").read_text()
    told = set(re.findall(r"apscheduler-tasklock ([\w-]+)|`([\w-]+)[ `]", guide))
    assert {name for name in commands() if not any(name in one for one in told)} == set()
