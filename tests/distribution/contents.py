"""Which files belong into a wheel and an sdist, and which do not."""

from __future__ import annotations

import os
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

PACKAGE = "apscheduler_tasklock/"
MIGRATIONS = "alembic/"
# What stands at the top of an sdist. It is all that is needed to build the wheel, to run the tests
# and to build the documentation.
AT_THE_TOP = {
    ".ci",
    ".github",
    ".gitignore",
    ".pre-commit-config.yaml",
    "alembic",
    "alembic.ini",
    "apscheduler_tasklock",
    "ARCHITECTURE.md",
    "benchmarks",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs",
    "examples",
    "LICENSE",
    "Makefile",
    "observability",
    "PKG-INFO",
    "pyproject.toml",
    "README.md",
    "SECURITY.md",
    "tests",
}


def files_of(checkout: Path) -> set[str]:
    """Return the files of the source tree, without the folders that .gitignore names."""
    ignored = [line.rstrip("/") for line in (checkout / ".gitignore").read_text().split()]
    found = set()
    for folder, folders, files in os.walk(checkout):
        folders[:] = [
            name
            for name in folders
            if name != ".git" and not any(fnmatch(name, pattern) for pattern in ignored)
        ]
        found |= {(Path(folder) / name).relative_to(checkout).as_posix() for name in files}
    return found


def wrong_in_wheel(wheel: Path, tree: set[str]) -> list[str]:
    """Return what a wheel lacks, and what does not belong there."""
    with zipfile.ZipFile(wheel) as archive:
        has = {name for name in archive.namelist() if not name.endswith("/")}
    info = f"{wheel.name.split('-py3')[0]}.dist-info"
    needed = {name for name in tree if name.startswith(PACKAGE)}
    needed |= {
        f"{PACKAGE}migrations/{name.removeprefix(MIGRATIONS)}"
        for name in tree
        if name.startswith(MIGRATIONS)
    }
    needed |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    needed |= {f"{info}/licenses/LICENSE"}
    for name in ("py.typed", "migrations/env.py", "migrations/versions/0001_task_lock.py"):
        assert PACKAGE + name in needed, f"the source tree has no {name}"
    return _differences(wheel, needed, has)


def wrong_in_sdist(sdist: Path, tree: set[str]) -> list[str]:
    """Return what an sdist lacks, and what does not belong there."""
    with tarfile.open(sdist) as archive:
        has = {member.name.partition("/")[2] for member in archive if member.isfile()}
    needed = {name for name in tree if name.split("/")[0] in AT_THE_TOP} | {"PKG-INFO"}
    tops = {name.split("/")[0] for name in needed}
    assert tops == AT_THE_TOP, f"the source tree has no {AT_THE_TOP - tops}"
    return _differences(sdist, needed, has)


def _differences(file: Path, needed: set[str], has: set[str]) -> list[str]:
    lacks = [f"{file.name} lacks {name}" for name in sorted(needed - has)]
    return lacks + [f"{file.name} has {name}" for name in sorted(has - needed)]
