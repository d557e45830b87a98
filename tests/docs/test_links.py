"""Links between the Markdown files of the checkout lead to files and headings that there are.

Sphinx checks the same of the pages in docs/ as it builds them. Here the files are looked at as they
are read in the checkout.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.support.snippets import ROOT

FOLDERS = ("docs", "examples", "benchmarks", "tests")
FILES = [*ROOT.glob("*.md"), *(file for name in FOLDERS for file in (ROOT / name).rglob("*.md"))]

_CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_HTML_LINK = re.compile(r"""<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=["']([^"']+)["']""")


@cache
def anchors(file: Path) -> set[str]:
    """Return the anchors of a file's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found = set()
    without_blocks = re.sub(r"^( *)```.*?^\1```", "", file.read_text(), flags=re.DOTALL | re.M)
    for heading in re.findall(r"^#{1,6} +(.+?)\s*$", without_blocks, re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found | set(re.findall(r"""<a (?:id|name)=["']([^"']+)["']""", file.read_text()))


def links(file: Path) -> list[str]:
    """Return where a file's links lead, without those to other sites."""
    text = _CODE.sub("code", file.read_text())
    found = _LINK.findall(text) + _HTML_LINK.findall(text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def test_links_lead_somewhere() -> None:
    broken = []
    for file in FILES:
        for link in links(file):
            path, _, anchor = link.partition("#")
            target = (file.parent / path).resolve() if path else file
            if not target.exists() or (
                anchor and target.suffix == ".md" and anchor not in anchors(target)
            ):
                broken.append((str(file.relative_to(ROOT)), link))
    assert broken == []


def test_there_are_links() -> None:
    assert sum(len(links(file)) for file in FILES) > 100
