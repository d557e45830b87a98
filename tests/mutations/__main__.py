"""Make each mistake in a copy of the checkout, and run the tests that have to find it.

    python -m tests.mutations [NAME or AREA ...] [--share 0.1] [--seed N] [--jobs N]

A table says by which test each is found. In the end these tests run together without any mistake,
because a test that fails then, too, has found nothing. The status is 1 if a mutation is not found,
or does not apply.
"""

from __future__ import annotations

import argparse
import random
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.mutations.copies import BrokenError, Notes, copied
from tests.mutations.mutation import CHECKOUT, GATE, IN_PYTHON, Mutation, read_all

# Seconds that the tests of one selection have.
LIMIT = 600
# What the mutations are called that are made in Python.
PYTHON = "in Python"


@dataclass(frozen=True)
class Result:
    """What became of a mutation.

    :ivar by: the test that has found it; otherwise why it was not found
    """

    name: str
    sentence: str
    found: bool
    by: str


def tried(mutation: Mutation, limit: float) -> list[Result]:
    """Return how each selection of tests went that has to find a mutation."""
    with copied() as copy:
        wrong = copy.apply(mutation)
        if wrong is not None:
            return [Result(mutation.name, mutation.sentence, False, wrong)]
        return [
            Result(mutation.name, mutation.sentence, *_searched(copy.test, find, limit))
            for find in mutation.find
        ]


def _searched(
    test: Callable[[Sequence[str], float], Notes], find: str, limit: float
) -> tuple[bool, str]:
    try:
        failed = [*test(["-x", "-m", GATE, *shlex.split(find)], limit).failed]
    except BrokenError as broken:
        return False, str(broken)
    return (True, failed[0]) if failed else (False, f"NOT FOUND by {find}")


def failing_without_mistakes(tests: list[str], jobs: int, limit: float) -> set[str]:
    """Return which of the tests that have found mutations fail without a mistake, too."""
    parts = [part for n in range(jobs) if (part := tests[n::jobs])]
    with ThreadPoolExecutor(jobs) as threads:
        return set().union(*threads.map(_failing, parts, [limit] * len(parts)))


def _failing(tests: list[str], limit: float) -> set[str]:
    with copied() as unmutated:
        try:
            notes = unmutated.test(tests, limit * len(tests))
        except BrokenError:
            if len(tests) == 1:
                return set(tests)
            return set().union(*(_failing([test], limit) for test in tests))
    return set(tests) - (set(notes.passed) - notes.failed.keys())  # a test may fail in its teardown


def tried_in_python(tests: list[str], limit: float) -> list[Result]:
    """Return how the mutations went that are made in Python; their tests pass if they are found."""
    with copied() as copy:
        try:
            notes = copy.test(tests, limit * len(tests))
        except BrokenError as broken:
            return [Result(test, _sentence_of(test), False, str(broken)) for test in tests]
    return [
        Result(PYTHON, _sentence_of(test), test in notes.passed, notes.failed.get(test, test))
        for test in tests
    ]


def _sentence_of(test: str) -> str:
    return test.partition("[")[2].rpartition("]")[0]


def collected() -> list[str]:
    """Return the ids of the tests that make mistakes in Python."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *IN_PYTHON], cwd=CHECKOUT, check=False, capture_output=True, text=True
    )
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not tests:
        raise SystemExit(f"the tests that make mistakes cannot be collected:\n{done.stdout}")
    return tests


def results(
    mutations: list[Mutation], in_python: list[str], jobs: int, limit: float
) -> Iterator[Result]:
    """Yield what became of each mutation, as soon as it is known."""
    modules = sorted({test.partition("::")[0] for test in in_python})
    of_modules = [[test for test in in_python if test.startswith(each)] for each in modules]
    with ThreadPoolExecutor(jobs) as threads:
        asked = [threads.submit(tried, each, limit) for each in mutations]
        asked += [threads.submit(tried_in_python, each, limit) for each in of_modules]
        for each in asked:
            yield from each.result()


def main() -> int:
    """Return 0 if each mutation that was chosen is found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help="names or areas; `python` for those in Python")
    parser.add_argument("--share", type=float, default=1.0, help="the share that is drawn of them")
    parser.add_argument("--seed", type=int, help="of the share; printed by every run")
    parser.add_argument("--jobs", type=int, default=1, help="how many are tried at a time")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for each selection")
    parser.add_argument("--list", action="store_true", help="show the mutations, and run nothing")
    parser.add_argument("--count", action="store_true", help="print how many there are")
    options = parser.parse_args()

    names = options.names
    mutations = [each for each in read_all() if not names or {each.name, each.area} & {*names}]
    known = {"python"} | {name for each in mutations for name in (each.name, each.area)}
    if unknown := {*names} - known:
        parser.error(f"there is no mutation or area of the name {min(unknown)}")
    in_python = collected() if not names or "python" in names else []
    if options.count:
        print(len(mutations) + len(in_python))
        return 0
    if options.share < 1:
        seed = random.randrange(2**32) if options.seed is None else options.seed  # noqa: S311  # no secret
        rng = random.Random(seed)  # noqa: S311  # repeatable, not secret
        print(f"a share of {options.share} of the mutations: --seed {seed}", flush=True)
        mutations = _share(mutations, options.share, rng)
        in_python = _share(in_python, options.share, rng)
    if options.list:
        for each in mutations:
            print(f"{each.name} ({each.label or 'new'}): {each.sentence}")
        print(*in_python, sep="\n")
        return 0
    known = _printed(results(mutations, in_python, options.jobs, options.limit))
    tests = sorted({each.by for each in known if each.found and each.name != PYTHON})
    failing = failing_without_mistakes(tests, options.jobs, options.limit)
    for test in sorted(failing):
        print(f"\nfails without a mistake, too: {test}")
    wrong = [each.name for each in known if not each.found or each.by in failing]
    print(f"\nnot found: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


def _share(of: list[Any], share: float, rng: random.Random) -> list[Any]:
    return [each for each in of if rng.random() < share]


def _printed(results: Iterator[Result]) -> list[Result]:
    """Print each result as soon as it is known; return them all."""
    print("| mutation | what is wrong | found by |\n| --- | --- | --- |")
    known = []
    for result in results:
        known.append(result)
        by = result.by if result.found else f"**{' '.join(result.by.split())}**"
        print(f"| {result.name} | {result.sentence} | {by} |", flush=True)
    return known


if __name__ == "__main__":
    sys.exit(main())
