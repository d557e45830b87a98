"""The command ``why``: what is known of a task around a moment, such as why it did not run."""

from __future__ import annotations

import argparse

from apscheduler_tasklock._words.stories import story_lines
from apscheduler_tasklock.cli.exits import OK
from apscheduler_tasklock.cli.output import output, print_json
from apscheduler_tasklock.cli.target import name_of, task_locks
from apscheduler_tasklock.status import Verdict

_STYLES = {
    Verdict.RAN: "",
    Verdict.RUNNING: "bold blue",
    Verdict.MISSED: "bold red",
    Verdict.DUE: "yellow",
    Verdict.UNKNOWN: "magenta",
}


def why(options: argparse.Namespace) -> int:
    """Tell what is known of a task around a moment."""
    with task_locks(options) as locks:
        story = locks.why(name_of(options, options.task), options.at)
    if options.json:
        print_json(story)
        return OK
    shown = output()
    lines = story_lines(story, shown)
    shown.print(lines.headline)
    for line in lines.verdict:
        shown.print(f"  {line}", _STYLES[story.verdict])
    for name, section in lines.sections.items():
        for place, line in enumerate(section):
            shown.print(f"{'' if place else name:<11}{line}")
    return OK
