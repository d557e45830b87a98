"""Sphinx's configuration: `make docs` builds the pages of this folder into build/docs."""

from __future__ import annotations

import logging
import os
import re
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parent.parent
DOCS = CHECKOUT / "docs"
# Pages that show a Markdown file of the checkout below their own text.
SHOWN = {
    "index": CHECKOUT / "README.md",
    "changelog": CHECKOUT / "CHANGELOG.md",
    "contributing": CHECKOUT / "CONTRIBUTING.md",
    "explanation/architecture": CHECKOUT / "ARCHITECTURE.md",
    "how-to/reminders": CHECKOUT / "examples/reminders/README.md",
}

project = "apscheduler-tasklock"
author = "The apscheduler-tasklock maintainers"
release = version = version_of(project)
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"apscheduler-tasklock {release}"
html_copy_source = False
html_show_sourcelink = False

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False

# Other projects' names: their inventories would have to be fetched to link to them.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(apscheduler|collections|concurrent|contextlib|datetime|flask|logging|sqlalchemy|starlette|uuid)\..*",
    ),
    (
        r"py:.*",
        r"(BaseExecutor|BaseJobStore|Connection|Engine|Flask|JobEvent|MeterProvider|Starlette|URL|UUID"
        r"|tzinfo)",
    ),
    (r"py:exc", r"ImproperlyConfigured"),
    # What signatures name, and nobody has to know.
    (
        r"py:.*",
        r"apscheduler_tasklock\.((decorator|flask\.extension)\.Function|locks\.Hold|options\.Default)",
    ),
    (r"py:class", r"(Function|Seconds|Default)"),
]

# One of the themes' packages lets the root logger print.
logging.getLogger("alembic").setLevel(logging.WARNING)

_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#]+)(#[^)]*)?\)")


def setup(app: Any) -> None:
    """Let Sphinx call what completes a page's source."""
    app.connect("source-read", complete)


def complete(app: Any, docname: str, source: list[str]) -> None:
    """Add the file that a page shows, and let its links lead somewhere.

    Sphinx would look for a page behind a link to Markdown outside this folder.
    """
    page = DOCS / f"{docname}.md"
    text = with_links(source[0], written_in=page, page=page)
    if docname in SHOWN:
        shown = SHOWN[docname]
        app.env.note_dependency(str(shown))
        body = shown.read_text().split("\n", 1)[1]  # without its title
        text += with_links(body, written_in=shown, page=page)
    source[0] = text


def with_links(text: str, *, written_in: Path, page: Path) -> str:
    """Return Markdown whose links are as seen from a page, to pages or to files.

    :param written_in: the file that the text is from
    :param page: the page that it is shown on
    """

    def link(found: re.Match[str]) -> str:
        target = (written_in.parent / found[1]).resolve()
        shown_on = next(
            (DOCS / f"{name}.md" for name, file in SHOWN.items() if file == target), None
        )
        if shown_on is not None and shown_on != page:
            target = shown_on
        is_page = target.suffix == ".md" and target.is_relative_to(DOCS)
        kind = "" if is_page or target.suffix != ".md" else "path:"
        return f"]({kind}{os.path.relpath(target, page.parent)}{found[2] or ''})"

    return _LINK.sub(link, text)
