"""The pinned source distributions: fetched once, checked before each run, unpacked anew."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PINS = Path(__file__).parent / "sdists.txt"


def pinned() -> dict[str, tuple[str, str]]:
    """Return each project's version and the SHA-256 of its source distribution."""
    lines = re.findall(r"^(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})$", PINS.read_text(), re.M)
    return {project: (version, digest) for project, version, digest in lines}


def unpacked(project: str, cache: Path) -> Path:
    """Return the folder of a project's source distribution, as it was released.

    :param cache: folder that keeps what was fetched
    """
    version, digest = pinned()[project]
    name = f"{project.replace('-', '_')}-{version}"
    archive = cache / f"{name}.tar.gz"
    if not archive.exists():
        _fetch(cache)
    if hashlib.sha256(archive.read_bytes()).hexdigest() != digest:
        raise SystemExit(f"make test-foreign: {archive} is not what {PINS} has the hash of")
    folder = cache / name
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(cache)  # noqa: S202  # its hash is known
    return folder


def _fetch(cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", ",".join(pinned()), "--require-hashes"]
    subprocess.run([*command, "--requirement", str(PINS), "--dest", str(cache)], check=True)
