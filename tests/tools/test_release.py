"""What `make dist` and `make release-notes` find."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distribution.release import notes_of

PROJECT = 'name = "apscheduler-tasklock"\nversion = "1.2.3"\n'
CHANGELOG = """\
# Changelog

## Unreleased

## 1.2.3 - 2026-02-01

### Fixed

- This.

## 1.2.2 - 2026-01-01

- That.
"""


def test_the_notes_are_the_section_of_the_version() -> None:
    assert notes_of("v1.2.3", PROJECT, CHANGELOG) == "### Fixed\n\n- This.\n"


@pytest.mark.parametrize(
    ("tag", "changelog", "error"),
    [
        ("v1.2.4", CHANGELOG, "the tag v1.2.4 is not v1.2.3"),
        ("1.2.3", CHANGELOG, "the tag 1.2.3 is not v1.2.3"),
        ("v1.2.3", CHANGELOG.replace("## 1.2.3", "## 1.2.33"), "has no section"),
        ("v1.2.3", CHANGELOG.replace("2026-02-01", "soon"), "has no section"),
        ("v1.2.3", CHANGELOG.replace("### Fixed\n\n- This.\n", ""), "or it is empty"),
    ],
)
def test_a_tag_without_notes_is_not_released(tag: str, changelog: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        notes_of(tag, PROJECT, changelog)


def test_what_comes_next_has_notes(checkout: Path) -> None:
    """A release renames the section "Unreleased", which the command says until then."""
    project = (checkout / "pyproject.toml").read_text()
    changelog = (checkout / "CHANGELOG.md").read_text()
    version = project.partition('\nversion = "')[2].partition('"')[0]
    if f"\n## {version} - " not in changelog:
        with pytest.raises(ValueError, match='rename the section "Unreleased"'):
            notes_of(f"v{version}", project, changelog)
        changelog = changelog.replace("## Unreleased", f"## {version} - 2026-01-01")
    assert notes_of(f"v{version}", project, changelog)
