"""Print the notes of a release: `python -m tests.distribution.release v0.1.0`.

It fails if the tag is not the version in pyproject.toml, or CHANGELOG.md has no section for it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent.parent


def version_in(pyproject: str) -> str:
    """Return the version in the text of pyproject.toml."""
    [version] = re.findall(r'^version = "(.+)"$', pyproject, re.MULTILINE)
    return str(version)


def notes_of(tag: str, pyproject: str, changelog: str) -> str:
    """Return what CHANGELOG.md says of the version that a tag names.

    :param tag: as ``v0.1.0``
    :param pyproject: the text of pyproject.toml
    :param changelog: the text of CHANGELOG.md
    :raises ValueError: the tag, the version and the sections do not go together
    """
    version = version_in(pyproject)
    if tag != f"v{version}":
        raise ValueError(f"the tag {tag} is not v{version}, the version in pyproject.toml")
    heading = rf"^## \[?{re.escape(version)}\]? - \d{{4}}-\d{{2}}-\d{{2}}\n"
    section = re.search(rf"{heading}(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE)
    if section is None or not section[1].strip():
        raise ValueError(
            f'CHANGELOG.md has no section "## {version} - YYYY-MM-DD", or it is empty; '
            'rename the section "Unreleased"'
        )
    return section[1].strip() + "\n"


def main(arguments: list[str]) -> int:
    """Print the notes of the tag; return 1 and say why if there are none."""
    [tag] = arguments
    try:
        notes = notes_of(
            tag, (CHECKOUT / "pyproject.toml").read_text(), (CHECKOUT / "CHANGELOG.md").read_text()
        )
    except ValueError as error:
        print(f"cannot release: {error}", file=sys.stderr)
        return 1
    print(notes, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
