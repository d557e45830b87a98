"""The table of differences in the documentation, and the pins of `make test-foreign`."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.foreign import sources
from tests.foreign.suites import ADAPTATIONS, NEWEST, SUITES

PAGE = "docs/explanation/differences.md"


def link(checkout: Path, page: str | None) -> str:
    """Return a page as a link from the page of differences, or a dash."""
    if page is None:
        return "-"
    path, _, heading = page.partition("#")
    text = (checkout / "docs" / path).read_text()
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    assert title is not None
    if f"docs/{path}" == PAGE:
        return f"[this page](#{heading})"
    folder, _, name = path.partition("/")
    relative = name if folder == "explanation" else f"../{path}"
    return f"[{title[1]}]({relative}{'#' if heading else ''}{heading})"


def code(test: str) -> str:
    """Return the name of tests without their parameters."""
    return f"`{test.removesuffix('[*').removesuffix('::*').replace('::*::', '::')}`"


def rows_of(text: str, heading: str) -> list[str]:
    """Return the rows of the table under a heading, without its first two lines."""
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][2:]


def once(rows: Iterable[str]) -> list[str]:
    """Return rows in their order: what differs in several runs of a suite is told once."""
    return list(dict.fromkeys(rows))


def test_the_page_has_each_test_that_fails_with_its_reason(checkout: Path) -> None:
    expected = once(
        f"| {suite.project} | {', '.join(map(code, difference.tests))} | {difference.why} |"
        f" {link(checkout, difference.page)} |"
        for suite in SUITES
        for difference in suite.differences
    )
    assert rows_of((checkout / PAGE).read_text(), "Tests that fail") == expected


def test_the_page_has_each_test_that_is_left_out_with_its_reason(checkout: Path) -> None:
    expected = [
        f"| {suite.project} | {code(left_out.test)} | {left_out.why} |"
        f" {link(checkout, left_out.page)} |"
        for suite in SUITES
        for left_out in suite.left_out
    ]
    assert rows_of((checkout / PAGE).read_text(), "Tests that are left out") == expected


def test_the_page_has_what_is_adapted_with_its_reason(checkout: Path) -> None:
    expected = [f"| {a.what} | {a.why} | {link(checkout, a.page)} |" for a in ADAPTATIONS]
    assert rows_of((checkout / PAGE).read_text(), "What the run adapts") == expected
    plugin = (checkout / "tests/foreign/plugin/tasklock_in_place.py").read_text()
    assert set(re.findall(r'ADAPTED "(\w+)"', plugin)) == {a.name for a in ADAPTATIONS}


def test_the_suites_are_those_of_the_versions_that_are_installed_for_them(checkout: Path) -> None:
    pinned = sources.pinned()
    assert set(pinned) == {suite.sdist for suite in SUITES}
    requirements = (checkout / "tests/foreign/requirements.txt").read_text().splitlines()
    assert NEWEST in requirements
    text = (checkout / PAGE).read_text()
    assert all(sdist.replace("==", " ") in text for sdist in pinned)


def test_a_source_distribution_with_another_hash_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "Some_Suite-1.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("Some_Suite-1/tests/test_it.py")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"pass"))
    digest = hashlib.sha256((tmp_path / "Some_Suite-1.tar.gz").read_bytes()).hexdigest()
    monkeypatch.setattr(sources, "PINS", tmp_path / "sdists.txt")

    sources.PINS.write_text(f"some-suite==1 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(SystemExit, match=r"Some_Suite-1.tar.gz is not what .* has the hash of"):
        sources.unpacked("some-suite==1", tmp_path)
    assert not (tmp_path / "Some_Suite-1").exists()

    sources.PINS.write_text(f"some-suite==1 --hash=sha256:{digest}\n")
    assert (sources.unpacked("some-suite==1", tmp_path) / "tests/test_it.py").read_text() == "pass"
