"""What could run or load something in a page."""

from __future__ import annotations

from html.parser import HTMLParser
from urllib.parse import urlsplit


class Markup(HTMLParser):
    """What could run or load something in a page.

    :ivar bad: what a page must not have
    :ivar links: the addresses in its attributes
    :ivar scripts: the addresses of its scripts
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.bad: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str | None] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "script":
            self.scripts.append(given.get("src"))
        if tag in ("style", "img", "iframe", "object", "base"):
            self.bad.append(tag)
        self.bad += [name for name in given if name.startswith("on") or name == "style"]
        self.links += [
            link or "" for name, link in attrs if name in ("href", "src", "action", "formaction")
        ]


def check_markup(page: str) -> None:
    """Check that a page runs nothing but the dashboard's script, and has relative links alone."""
    markup = Markup(page)
    assert markup.bad == []
    assert len(markup.scripts) == 1
    assert (markup.scripts[0] or "").startswith("static/dashboard.js")
    for link in markup.links:
        parts = urlsplit(link)
        assert (parts.scheme, parts.netloc) == ("", ""), link
        assert not link.startswith("/"), link
        path = parts.path.removeprefix("./").removeprefix("static/")
        assert "/" not in path, link
