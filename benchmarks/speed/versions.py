"""The library before a change that a benchmark shows, and as it is now."""

from __future__ import annotations

import io
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apscheduler_tasklock

# The last commit in which each claim and each release was a statement of its own.
BEFORE = "acaf702c94f5f699287c32f12c64927df215cfca"

# The folder that the imported library is in.
NOW = Path(apscheduler_tasklock.__file__).parent.parent

_CHECKOUT = Path(__file__).parent.parent.parent


@contextmanager
def library_before() -> Iterator[Path | None]:
    """Put the library of the commit ``BEFORE`` into a temporary folder.

    :return: the folder; ``None`` if this is no checkout, or one without that commit in its history
    """
    archive = _archive()
    if archive is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="tasklock-before-") as folder:
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            files.extractall(folder)
        yield Path(folder)


def _archive() -> bytes | None:
    git = shutil.which("git")
    if git is None:
        return None
    paths = ["apscheduler_tasklock", "alembic"]
    command = [git, "-C", str(_CHECKOUT), "archive", "--format=zip", BEFORE, *paths]
    finished = subprocess.run(command, check=False, capture_output=True)
    return finished.stdout if finished.returncode == 0 else None
