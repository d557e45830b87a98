"""The code that README and the documentation show."""

from __future__ import annotations

import builtins
import re
import symtable
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

# Pages whose files and commands run as a whole, with the tests that run them.
RUN_AS_A_WHOLE = {
    "docs/tutorial.md": "tests/docs/test_tutorial.py",
    "docs/how-to/django.md": "tests/frameworks/test_django_page.py",
    "docs/how-to/fastapi.md": "tests/frameworks/test_starlette_page.py",
    "docs/how-to/flask.md": "tests/frameworks/test_flask_page.py",
    "docs/how-to/testing.md": "tests/docs/test_testing_page.py",
}

_BLOCK = re.compile(r"^( *)```([\w{}-]*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Snippet:
    """A block of code in a page.

    :ivar page: the page's path in the checkout
    :ivar line: the first line of the block
    :ivar language: the word after the backticks
    :ivar text: the code without the block's indentation
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return README and the pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(language: str = "") -> list[Snippet]:
    """Return the blocks of a language, or of all."""
    found = [snippet for file in pages() for snippet in snippets_of(file)]
    return [snippet for snippet in found if language in ("", snippet.language)]


def parts(language: str) -> list[Snippet]:
    """Return the blocks of a language in pages that do not run as a whole."""
    return [snippet for snippet in snippets(language) if snippet.page not in RUN_AS_A_WHOLE]


def snippets_of(file: Path) -> Iterator[Snippet]:
    """Yield the blocks of one page."""
    text = file.read_text()
    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start()) + 1
        page = file.relative_to(ROOT).as_posix()
        yield Snippet(page, line, block[2], textwrap.dedent(block[3]))


def spans() -> Iterator[tuple[str, str]]:
    """Yield each page and each piece of code within its sentences."""
    for file in pages():
        text = _BLOCK.sub("", file.read_text())
        for span in _SPAN.finditer(text):
            yield file.relative_to(ROOT).as_posix(), span[1]


def missing_names(code: str) -> set[str]:
    """Return the names that Python code uses and does not define."""
    names: set[str] = set()
    top = symtable.symtable(code, "snippet", "exec")
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            used_here = symbol.is_referenced() and symbol.is_global()
            if used_here or (table is top and symbol.is_referenced()):
                names.add(symbol.get_name())
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned()}
    defined |= {symbol.get_name() for symbol in top.get_symbols() if symbol.is_imported()}
    defined |= {symbol.get_name() for symbol in top.get_symbols() if symbol.is_namespace()}
    return names - defined - set(dir(builtins)) - {"__file__", "__name__"}


def as_module(snippet: Snippet) -> str:
    """Return a block as a module. A block with ``await`` at its top level becomes a coroutine."""
    try:
        compile(snippet.text, str(snippet), "exec")
    except SyntaxError:
        return f"async def snippet():\n{textwrap.indent(snippet.text, '    ')}"
    return snippet.text
