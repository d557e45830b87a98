"""The mutations: patches of the package, and the tests that make mistakes themselves."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CHECKOUT = HERE.parent.parent

# What `make test` runs. Only these tests may find a patch, because a test of the night refuses no
# change.
GATE = "not nightly and not simulate"

# What a patch may change.
PRODUCT = ("apscheduler_tasklock/", "alembic/")

# Tests that make their mistakes in Python, a parameter for each. Such a test passes if the mistake
# is found. They are no patches, because they search for the fault that shows the mistake.
IN_PYTHON = (
    "tests/simulation/test_side_faults.py::test_a_mistake_in_the_side_is_found",
    "tests/simulation/test_jobs_side.py::test_a_mistake_in_the_queue_is_found",
    "tests/simulation/test_leading.py::test_a_mistake_in_leader_mode_is_found",
    "tests/simulation/test_retrying.py::test_a_mistake_in_retries_is_found",
    "tests/contract/test_overlaps.py::test_a_mistake_in_the_statements_is_found",
    "tests/contract/test_stored_interleavings.py::test_a_mistake_in_the_statements_is_found",
)


@dataclass(frozen=True)
class Mutation:
    """A patch, what is wrong with it, and the tests that find it.

    :ivar name: its folder, which is the area, and its file's name without the suffix
    :ivar find: arguments of pytest; the tests of each line of them find it
    :ivar changes: the files that it changes
    """

    path: Path
    name: str
    sentence: str
    label: str | None
    find: tuple[str, ...]
    changes: tuple[str, ...]

    @property
    def area(self) -> str:
        return self.name.partition("/")[0]


def read(path: Path) -> Mutation:
    """Return the mutation of a file; complain of a header that is not as README.md says."""
    text = path.read_text(encoding="utf-8")
    header, begins, patch = text.partition("\n--- ")
    sentences, find, labels = [], [], []
    for line in header.splitlines():
        key, colon, value = line.partition(": ")
        if colon and key == "find":
            find.append(value.strip())
        elif colon and key == "label":
            labels.append(value.strip())
        elif line.strip() and not line.startswith(("diff --git ", "index ")):
            sentences.append(line.strip())
    name = path.relative_to(HERE).with_suffix("").as_posix()
    if not (begins and sentences and find and len(labels) < 2):
        raise ValueError(f"{name}: a sentence, a line `find: ` and a unified diff are needed")
    marks = ["--- " + patch.partition("\n")[0], *patch.splitlines()]
    files = [line[6:].partition("\t")[0] for line in marks if line.startswith(("--- a/", "+++ b/"))]
    if chosen := [line for line in find if "-m" in shlex.split(line)]:
        raise ValueError(f"{name}: the gate finds a mistake, so no -m is needed: {chosen[0]}")
    if strange := [file for file in files if not file.startswith(PRODUCT)]:
        raise ValueError(f"{name}: a mutation changes the package, and not {strange[0]}")
    label = labels[0] if labels else None
    return Mutation(path, name, " ".join(sentences), label, tuple(find), tuple(sorted({*files})))


def read_all() -> list[Mutation]:
    """Return all patches, in the order of their names."""
    return [read(path) for path in sorted(HERE.glob("*/*.patch"))]


def files_of(find: str) -> list[Path]:
    """Return the files and folders of tests that a line ``find: `` names."""
    words = [word for word in shlex.split(find) if word.startswith("tests/")]
    return [CHECKOUT / word.partition("::")[0] for word in words]
