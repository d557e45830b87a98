"""The long description, as an index renders it."""

from __future__ import annotations

import re
import zipfile
from email.parser import BytesParser
from html.parser import HTMLParser
from pathlib import Path

from readme_renderer.markdown import render


def description_of(wheel: Path) -> str:
    """Return the long description in a wheel's metadata, which is Markdown."""
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = BytesParser().parsebytes(archive.read(metadata))
    assert message.get_content_type() == "text/plain"  # of METADATA itself
    assert message["Description-Content-Type"] == "text/markdown"
    payload = message.get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload.decode()


def wrong_in_description(description: str, readme: str) -> list[str]:
    """Return what leads nowhere on an index, and which code is not README's any more."""
    rendered = render(description)
    if rendered is None:
        return ["the description cannot be rendered"]
    links = Links()
    links.feed(rendered)
    relative = [link for link in links.relative if link[1:] not in links.anchors]
    wrong = [f"the description has the relative link {link}" for link in relative]
    # README's tables are of links, and a table of their words alone says nothing.
    if re.search(r"^\|", description, re.MULTILINE) or "picture" in description:
        wrong.append("the description has a table, or names a picture, that only a checkout has")
    # What makes links into text must leave code alone.
    if code(description) != code(readme):
        wrong.append("the code in the description is not that of README.md")
    return wrong


def code(text: str) -> list[str]:
    """Return the code blocks of Markdown."""
    return re.findall(r"^```\w+\n.*?^```", text, re.DOTALL | re.MULTILINE)


class Links(HTMLParser):
    """Collects the links and pictures of a page that are no complete addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.relative: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, _tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and not re.match(r"(https?:|mailto:)", value or ""):
                self.relative.append(value or "")
            if name == "id":
                self.anchors.add(value or "")
