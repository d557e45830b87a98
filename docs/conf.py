"""Sphinx's configuration: `make docs` builds the pages of this folder into build/docs."""

from __future__ import annotations

import re
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parent.parent
# The page that shows this file of the checkout below its own text.
ARCHITECTURE = "explanation/architecture"

project = "apscheduler-tasklock"
author = "The apscheduler-tasklock maintainers"
release = version = version_of(project)
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"apscheduler-tasklock {release}"
# Without these there is nothing to be fetched from elsewhere, and no copy of the sources.
html_copy_source = False
html_show_sourcelink = False

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False

# Other projects' names: their inventories would have to be fetched to link to them.
nitpick_ignore_regex = [
    (r"py:.*", r"(apscheduler|collections|concurrent|datetime|logging|sqlalchemy|uuid)\..*"),
    (r"py:.*", r"(BaseExecutor|BaseJobStore|Connection|Engine|JobEvent|MeterProvider|URL|UUID)"),
    # What signatures name, and nobody has to know.
    (r"py:.*", r"apscheduler_tasklock\.(decorator\.Function|locks\.Hold|options\.Default)"),
]

_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#]+)(#[^)]*)?\)")


def setup(app: Any) -> None:
    """Let Sphinx call what mends the links."""
    app.connect("source-read", mend_links)


def mend_links(app: Any, docname: str, source: list[str]) -> None:
    """Let links to Markdown outside this folder lead to the files, as links to other files do.

    Sphinx would look for a page. And a page may show a file of the checkout, whose links are seen
    from there.
    """
    folder = CHECKOUT / "docs" / Path(docname).parent
    text = source[0]
    if docname == ARCHITECTURE:
        shown = CHECKOUT / "ARCHITECTURE.md"
        app.env.note_dependency(str(shown))
        up = "../" * (len(Path(docname).parts))
        body = shown.read_text().split("\n", 1)[1]  # without its title
        text += _LINK.sub(lambda link: f"](path:{up}{link[1]})", body)

    def mended(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        is_outside = not target.is_relative_to(CHECKOUT / "docs")
        return f"](path:{link[1]})" if is_outside and target.suffix == ".md" else link[0]

    source[0] = _LINK.sub(mended, text)
