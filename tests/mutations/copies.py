"""Copies of the checkout, in which a mutation is made and tests are run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutations.mutation import CHECKOUT, Mutation

# What is not copied: environments, results, and what tools keep.
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".cache", ".*_cache", ".hypothesis", "build", "dist", "node_modules"
)
# Seconds that pytest has to stop its servers when its time is over.
STOPPING = 60
# Failures that say nothing of a mutation: what it made cannot even be run.
NONSENSE = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError")


class BrokenError(Exception):
    """The tests did not run, or not with the package of the copy."""


@dataclass
class Notes:
    """How the tests of a run went.

    :ivar failed: why, by the id of the test
    """

    failed: dict[str, str] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)


class Copy:
    """A copy of the checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._notes = folder.parent / "notes.jsonl"
        # Before the checkout, which an editable installation has on the path.
        self._env = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "GIT_CEILING_DIRECTORIES": str(folder.parent),
            "MUTATIONS_NOTES": str(self._notes),
        }

    def apply(self, mutation: Mutation) -> str | None:
        """Make the mistake; return what is wrong if that is not possible."""
        applied = self._run("git", "apply", "-p1", str(mutation.path))
        if applied.returncode:
            return f"does not apply: {applied.stderr.strip()}"
        python = [file for file in mutation.changes if file.endswith(".py")]
        compiled = self._run(sys.executable, "-m", "compileall", "-q", *python)
        if compiled.returncode:
            return f"cannot be parsed: {compiled.stdout.strip().splitlines()[-1]}"
        return None

    def test(self, arguments: Sequence[str], limit: float) -> Notes:
        """Run tests, for so many seconds at most."""
        self._notes.unlink(missing_ok=True)
        plugins = ("-p", "no:cacheprovider", "-p", "tests.mutations.noting")
        command = [sys.executable, "-m", "pytest", "-q", *plugins, *arguments]
        options: dict[str, Any] = {"cwd": self.folder, "env": self._env, "start_new_session": True}
        output = self.folder.parent / "output"
        with (
            output.open("w") as file,
            subprocess.Popen(command, stdout=file, stderr=file, **options) as process,
        ):
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                self._stop(process)
                raise BrokenError(f"it took longer than {limit:.0f} s") from None
        notes = self._read()
        # 0 and 1: all has passed, or not; 5: none was selected.
        if status not in {0, 1} or not (notes.passed or notes.failed):
            last = output.read_text().strip().splitlines()[-1:]
            raise BrokenError(f"pytest ended with {status}: {' '.join(last)}")
        return notes

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOPPING)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _read(self) -> Notes:
        notes = Notes()
        text = self._notes.read_text(encoding="utf-8") if self._notes.exists() else ""
        for note in map(json.loads, text.splitlines()):
            if note["what"] == "package" and not Path(note["name"]).is_relative_to(self.folder):
                raise BrokenError(f"another package was tested: {note['name']}")
            if note["what"] == "broken":
                raise BrokenError(f"{note['name']} cannot be collected: {note['why']}")
            if note["what"] == "failed":
                notes.failed.setdefault(note["name"], note["why"])
                if note["why"].startswith(NONSENSE) or "psycopg.errors.SyntaxError" in note["why"]:
                    raise BrokenError(f"{note['name']}: {note['why'].splitlines()[0]}")
            if note["what"] == "passed":
                notes.passed.append(note["name"])
        return notes

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.folder, env=self._env, check=False, capture_output=True, text=True
        )


@contextlib.contextmanager
def copied() -> Iterator[Copy]:
    """Give a copy of the checkout, compiled as that is."""
    with tempfile.TemporaryDirectory(prefix="tasklock-mutation-") as folder:
        copy = Path(folder).resolve() / "checkout"
        shutil.copytree(CHECKOUT, copy, ignore=LEFT_OUT, symlinks=True)
        yield Copy(copy)
