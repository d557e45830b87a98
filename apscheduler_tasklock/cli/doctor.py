"""The command ``doctor``: what is wrong with the set-up, and what to do about it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from apscheduler_tasklock.cli.exits import FAILED, OK
from apscheduler_tasklock.cli.output import Cell, Table, output, print_json
from apscheduler_tasklock.cli.target import task_locks
from apscheduler_tasklock.status import Finding

_STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}


def doctor(options: argparse.Namespace) -> int:
    """Check the set-up, and print the findings; return 0 if nothing is wrong."""
    with task_locks(options) as locks:
        findings = locks.doctor(namespace=options.namespace)
    is_wrong = any(finding.level == "wrong" for finding in findings)
    if options.json:
        print_json({"ok": not is_wrong, "findings": findings})
        return FAILED if is_wrong else OK
    shown = output()
    shown.print_table(finding_table(findings))
    for finding in findings:
        if finding.remedy:
            shown.print(f"{finding.what}: {finding.remedy}", _STYLES[finding.level])
    return FAILED if is_wrong else OK


def finding_table(findings: Sequence[Finding]) -> Table:
    """Return a table of findings."""
    rows: list[list[Cell | str]] = [
        [Cell(f.level, _STYLES[f.level]), f.what, f.says] for f in findings
    ]
    return Table(("", "what", "how it is"), rows)
