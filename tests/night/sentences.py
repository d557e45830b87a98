"""The kinds of sentences that are told, and which check compares each of them with the truth.

A kind is a text in the source with places for what varies. ``sentences.txt`` has the kinds that a
check compares, and those that none can compare, with the reason. The others are listed at the end
of each night.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "apscheduler_tasklock"
TABLE = Path(__file__).parent / "sentences.txt"

SOURCES = (
    *("_lock/outcomes.py", "_words/findings.py", "_words/runs.py", "_words/stories.py"),
    "_words/tasks.py",
    *("_words/headlines.py", "_words/replicas.py", "_words/actions.py"),
    *("_words/due_times.py", "_words/lanes.py"),
    *("cli/check.py", "cli/status.py", "cli/runs.py", "cli/replicas.py", "cli/why.py"),
    *("dashboard/screens.py", "dashboard/drawings.py"),
)

PAGES = "dashboard/templates"

# Stands for what varies.
_HOLE = "{}"


@dataclass(frozen=True)
class Kind:
    """A kind of sentence.

    :ivar source: the module that has it
    :ivar template: its text; ``{}`` stands for what varies
    """

    source: str
    template: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """Finds its sentences in what was told."""
        # A pattern that begins with anything takes minutes for the texts of a night.
        template = re.sub(r"^[\s{}]+|[\s{}]+$", "", self.template)
        parts = [re.escape(part) for part in re.split(r"\s*\{\}\s*", template)]
        return re.compile(r".{0,300}?".join(parts))


def kinds() -> list[Kind]:
    """Return the kinds of sentences that the package has."""
    found = [
        Kind(source, template)
        for source in SOURCES
        if (PACKAGE / source).exists()
        for template in dict.fromkeys(_templates(ast.parse((PACKAGE / source).read_text())))
    ]
    for path in sorted((PACKAGE / PAGES).glob("*.html")):
        found += [Kind(f"{PAGES}/{path.name}", text) for text in _of_page(path.read_text())]
    return found


def _of_page(text: str) -> Iterator[str]:
    """Yield what a page's template says of what it shows: hints, and that there is nothing."""
    for first, second in re.findall(r"""empty\((?:"([^"]+)"|'([^']+)')""", text):
        yield first or second
    for hint in re.findall(r'<p class="(?:hint|well)">(.*?)</p>', text):
        said = re.sub(r"\{\{.*?\}\}", _HOLE, re.sub(r"<[^>]*>|\{%.*?%\}", "", hint))
        if _is_sentence(said):
            yield said.strip()


def _templates(module: ast.Module) -> Iterator[str]:
    inside: set[ast.AST] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(node.value)  # a docstring
        if isinstance(node, (ast.JoinedStr, ast.Raise)):
            inside |= set(ast.walk(node)) - {node}
    for node in ast.walk(module):
        if node in inside:
            continue
        text = _text_of(node)
        if text is not None and _is_sentence(text):
            yield text


def _text_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else _HOLE for part in node.values
        )
    return None


def _is_sentence(text: str) -> bool:
    """Return whether a text has two words at least that a reader reads."""
    words = re.findall(r"[a-z]{2,}", text)
    return len(words) >= 2 and " " in text.strip() and not re.search(r"[<>&=]|https?:", text)


@dataclass(frozen=True)
class Compared:
    """Which kinds of sentences were compared.

    :ivar checked: the check of each kind, by its template
    :ivar reasons: why a kind is not compared, by its template
    """

    checked: dict[str, str]
    reasons: dict[str, str]


def table() -> Compared:
    """Return the table of kinds."""
    checked: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for line in TABLE.read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        what, _, template = line.partition(" | ")
        into, name = (reasons, what[1:].strip()) if what.startswith("-") else (checked, what)
        into[template] = name
    return Compared(checked, reasons)


def report(texts: Iterable[str]) -> Iterator[str]:
    """Yield which kinds of sentences were compared with the truth, and which were not, as lines.

    :param texts: all that was told
    """
    told, known = "\n".join(texts), table()
    compared, unseen, without = 0, [], []
    stale = {*known.checked, *known.reasons} - {kind.template for kind in kinds()}
    for kind in kinds():
        is_told = kind.pattern.search(told) is not None
        if kind.template not in known.checked:
            reason = known.reasons.get(kind.template, "no check")
            without.append(f"{kind.source}: {kind.template!r}: {reason}{', told' * is_told}")
        elif is_told:
            compared += 1
        else:
            unseen.append(f"{kind.source}: {kind.template!r} ({known.checked[kind.template]})")
    yield f"{compared} kinds of sentences were told and compared with the truth"
    yield f"{len(unseen)} kinds have a check, and this night did not tell them:"
    yield from (f"  {each}" for each in unseen)
    yield f"{len(without)} kinds are not compared:"
    yield from (f"  {each}" for each in without)
    yield f"{len(stale)} lines of {TABLE.name} are of kinds that there are no more:"
    yield from (f"  {each}" for each in sorted(stale))
