"""Print each count beside its limit; the status is 1 if a count is beyond its limit.

python -m tests.counts [--plain]
"""

from __future__ import annotations

import argparse
import configparser
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.counts import calls, run_path, teeth
from tests.counts.run_path import HERE

# A limit of calls has 10 % of room above the count that it was made from, because counts differ a
# little from run to run. It is to be lowered if it has so much.
ROOM, TOO_MUCH_ROOM = 1.1, 1.2


@dataclass(frozen=True)
class Count:
    """A count and its limit.

    :ivar grows: whether the limit is the lowest count, else it is the highest
    :ivar told: whether the limit does not hold here
    :ivar is_exact: whether the count is the same in each run
    """

    name: str
    count: float
    limit: float
    grows: bool = False
    told: bool = False
    is_exact: bool = True

    @property
    def is_wrong(self) -> bool:
        beyond = self.count < self.limit if self.grows else self.count > self.limit
        return beyond and not self.told

    @property
    def verdict(self) -> str:
        if self.told:
            return "told, not limited"
        if self.is_wrong:
            return "BELOW ITS LIMIT" if self.grows else "ABOVE ITS LIMIT"
        if self.grows and self.count > self.limit:
            return f"raise the limit to {self.count:.0f}"
        room, most_room = (1, 1) if self.is_exact else (ROOM, TOO_MUCH_ROOM)
        if not self.grows and self.count * most_room < self.limit:
            return f"lower the limit to {self.count * room:.0f}"
        return ""


def counts(limits: Mapping[str, Mapping[str, str]]) -> Iterator[Count]:
    """Yield the counts that need no database."""
    lines = sum(run_path.counted().values())
    yield Count("run path: lines of code", lines, float(limits["run path"]["lines"]))
    for name, count in (("mutations", teeth.mutations()), ("scenarios", teeth.scenarios())):
        yield Count(name, count, float(limits["mutations and scenarios"][name]), grows=True)


def counted_calls(
    limits: Mapping[str, Mapping[str, str]], found: Mapping[str, calls.Counts]
) -> Iterator[Count]:
    wrong = other_versions(limits["versions"])
    for kind, each in found.items():
        limit = float(limits["calls"][kind])
        name = f"calls of the library, {kind} job"
        yield Count(name, each["library"], limit, told=bool(wrong), is_exact=False)


def other_versions(wanted: Mapping[str, str]) -> list[str]:
    """Return the versions here for which the limits were not made."""
    here = calls.versions()
    return [
        f"{name} {here[name]}, not {version}"
        for name, version in wanted.items()
        if not f"{here[name]}.".startswith(f"{version}.")
    ]


def tell(found: Mapping[str, calls.Counts]) -> None:
    print("\nfor each job:          frames of any file   functions of C   CPU without counting")
    for kind, each in found.items():
        cpu = f"{each['cpu_ms']:.2f} ms" if "cpu_ms" in each else ""
        print(f"  {kind:<18}{each['python']:>20,.0f}{each['c']:>17,.0f}{cpu:>23}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.counts")
    parser.add_argument(
        "--plain", action="store_true", help="tell of APScheduler without the library, and stop"
    )
    if parser.parse_args().plain:
        tell(calls.counted(plain=True))
        return 0
    limits = configparser.ConfigParser()
    limits.read(HERE / "limits.ini", encoding="utf-8")
    found = calls.counted()
    rows = [*counted_calls(limits, found), *counts(limits)]
    for row in rows:
        print(f"{row.name:<36}{row.count:>8,.0f}  limit {row.limit:>6,.0f}  {row.verdict}".rstrip())
    tell(found)
    for wrong in other_versions(limits["versions"]):
        print(f"calls are told and not limited: {wrong}")
    return int(any(row.is_wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
