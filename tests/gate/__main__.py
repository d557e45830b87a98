"""``python -m tests.gate``: compares what real time decides in the gate with the exceptions."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.gate.exceptions import FILE, read
from tests.gate.findings import all_findings

RULES = ("sleep", "limit", "now")


def main() -> int:
    exceptions = read(FILE.read_text())
    found = all_findings(Path(__file__).parent.parent)
    where = {(one.rule, one.place): f"{one.line}: {one.text}" for one in found}
    failed = False
    for rule, test, what in exceptions.complaints(where, RULES):
        failed = True
        print(
            f"{rule} {test} {what}" + (f" (line {at})" if (at := where.get((rule, test))) else "")
        )
    if length := exceptions.wrong_length():
        failed = True
        print(length)
    if not failed:
        print(f"The gate has {len(exceptions.entries)} exceptions.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
