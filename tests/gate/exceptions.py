"""The list of tests that the gate has although real time decides them. It only gets shorter.

``exceptions.txt`` has a line ``at most N``, and reasons in brackets, each with the tests below it
to which it applies: the rule, a space, and the test.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "exceptions.txt"


@dataclass(frozen=True)
class Exceptions:
    """The list.

    :ivar most: how many entries it may have
    :ivar entries: the rule and the test of each
    """

    most: int
    entries: list[tuple[str, str]]

    def complaints(
        self, found: Iterable[tuple[str, str]], rules: tuple[str, ...]
    ) -> Iterator[tuple[str, str, str]]:
        """Yield the rule, the test and what is wrong: it is not on the list, or no longer needed.

        :param found: the rule and the test of each finding
        :param rules: those that were looked for
        """
        found = set(found)
        for rule, test in sorted(found - set(self.entries)):
            yield rule, test, "is not on the list of exceptions"
        for rule, test in self.entries:
            if rule in rules and (rule, test) not in found:
                yield rule, test, "is no longer needed on the list of exceptions: take it off"

    def wrong_length(self) -> str | None:
        """Return what is wrong with the number of entries, which the file itself states."""
        if len(self.entries) > self.most:
            return f"{len(self.entries)} exceptions, but the list may have {self.most} at most"
        if len(self.entries) < self.most:
            return f"the list has become shorter: write `at most {len(self.entries)}` into it"
        return None


def read(text: str) -> Exceptions:
    """Read the list.

    :raises ValueError: a line is none of the list's, has no reason, or occurs twice
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    limit = re.fullmatch(r"at most (\d+)", lines[0]) if lines else None
    if limit is None:
        raise ValueError("the list does not begin with `at most N`")
    entries: list[tuple[str, str]] = []
    reason = ""
    for line in lines[1:]:
        if line.startswith("["):
            reason = line.strip("[]")
            continue
        rule, _, test = line.partition(" ")
        if not reason or "::" not in test or (rule, test) in entries:
            raise ValueError(f"no entry of a reason of its own: {line}")
        entries.append((rule, test))
    return Exceptions(int(limit[1]), entries)
