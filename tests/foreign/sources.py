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


def pinned() -> dict[str, str]:
    """Return the SHA-256 of each source distribution, by its project and version."""
    lines = re.findall(r"^(\S+==\S+) --hash=sha256:([0-9a-f]{64})$", PINS.read_text(), re.M)
    return dict(lines)


def unpacked(sdist: str, cache: Path) -> Path:
    """Return the folder of a project's source distribution, as it was released.

    :param sdist: its project and version, as ``"apscheduler==3.11.3"``
    :param cache: folder that keeps what was fetched
    """
    digest = pinned()[sdist]
    archive = _archive(sdist, cache) or _fetch(sdist, digest, cache)
    if hashlib.sha256(archive.read_bytes()).hexdigest() != digest:
        raise SystemExit(f"make test-foreign: {archive} is not what {PINS} has the hash of")
    folder = cache / archive.name.removesuffix(".tar.gz")
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as file:
        # Python 3.10.11 and 3.11.3 have none.
        file.extraction_filter = getattr(tarfile, "data_filter", lambda member, _path: member)
        file.extractall(cache)  # noqa: S202  # its hash is known
    return folder


def _archive(sdist: str, cache: Path) -> Path | None:
    """Return the file of a source distribution that was fetched: some have their project's case."""
    name = f"{sdist.replace('-', '_').replace('==', '-')}.tar.gz".lower()
    return next((file for file in cache.glob("*.tar.gz") if file.name.lower() == name), None)


def _fetch(sdist: str, digest: str, cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    # One at a time, because pip takes one version of a project only.
    requirement = cache / "requirement.txt"
    requirement.write_text(f"{sdist} --hash=sha256:{digest}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # Not of all projects, because what builds this one need not be built itself.
    command += ["--no-deps", "--no-binary", sdist.partition("==")[0], "--require-hashes"]
    subprocess.run([*command, "--requirement", str(requirement), "--dest", str(cache)], check=True)
    archive = _archive(sdist, cache)
    if archive is None:
        raise SystemExit(f"make test-foreign: pip has fetched {sdist} under another name")
    return archive
