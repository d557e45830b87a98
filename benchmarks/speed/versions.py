"""An earlier version of the library, and processes that run it or the present one."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import apscheduler_tasklock

# The commit before the way of a run was made shorter, in which two threads carried one run, and
# each statement went through psycopg's cursors.
BEFORE = "07fa9e11"

# The folder that the imported library is in.
NOW = Path(apscheduler_tasklock.__file__).parent.parent

_CHECKOUT = Path(__file__).parent.parent.parent


@contextmanager
def library_before() -> Iterator[Path | None]:
    """Put the library of the commit before into a temporary folder.

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


class VersionProcess:
    """A process with a version of the library, which answers lines with lines.

    :param process: prints the folder of its library first
    :param folder: where the library is
    """

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder

    def wait_until_loaded(self) -> None:
        """Wait until it has imported the library. To be called once, before anything else."""
        used = Path(self.answer())
        assert used.samefile(self._folder), f"the library was imported from {used}"

    def tell(self, line: str) -> None:
        """Write a line to it."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def answer(self) -> str:
        """Return the next line that it prints.

        :raises RuntimeError: it has ended
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process that was measured has ended")
        return line.rstrip("\n")


@contextmanager
def running(script: ModuleType, folder: Path, *arguments: str) -> Iterator[VersionProcess]:
    """Run a module as a script with the library of a folder, and end it.

    :param script: imports nothing of the benchmarks, and ends when its input does
    """
    assert script.__file__ is not None
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, script.__file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        yield VersionProcess(process, folder)


def _archive() -> bytes | None:
    git = shutil.which("git")
    if git is None:
        return None
    paths = ["apscheduler_tasklock", "alembic"]
    command = [git, "-C", str(_CHECKOUT), "archive", "--format=zip", BEFORE, *paths]
    finished = subprocess.run(command, check=False, capture_output=True)
    return finished.stdout if finished.returncode == 0 else None
