"""The numbers in the prose that are defaults are those that the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from docs.commands import PAGE
from docs.numbers import NUMBERS, TOLD, filled, pattern, places
from tests.support.snippets import ROOT, pages


def test_a_sentence_has_the_number_of_the_code() -> None:
    wrong = [
        (page, sentence, text[start:end], number)
        for page, told in TOLD.items()
        for text in [(ROOT / page).read_text()]
        for sentence in told
        for start, end, number in places(text, sentence)
        if text[start:end] != number
    ]
    assert wrong == [], "write it anew: make reference"


def test_a_sentence_that_is_gone_is_missed() -> None:
    with pytest.raises(LookupError, match="no sentence like this"):
        list(places("Its lease is 60 s.", "A lease of {lease} s"))


def test_numbers_and_words_are_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {
        "lease": 45,
        "lease_in_words": "45 seconds",
        "lease_at": "10:00:45",
    }.items():
        monkeypatch.setitem(NUMBERS, name, number)
    assert "a claim stands for 45 s by default" in filled("CHANGELOG.md")
    assert "blocks its task for 45 seconds at most" in filled("CHANGELOG.md").replace("\n  ", " ")
    assert "Its lease of 45 s ends at 10:00:45." in filled("docs/explanation/windows.md")


def seconds(name: str) -> str:
    """Return a pattern of a time in a sentence."""
    return rf"\b({NUMBERS[name]:g} s|{NUMBERS[name]:g} seconds)\b"


# What a sentence is about, and the default that it tells then.
DEFAULTS = [
    ("lease", rf"{seconds('lease')}|{NUMBERS['lease_in_words']}"),
    ("killed|takeover|taken over|again", seconds("failover")),
    ("min_factor|minimum lock|minimum factor", rf"\b{NUMBERS['min_factor']:g}\b"),
    ("max_factor|maximum lock|maximum factor", rf"\b{NUMBERS['max_factor']:g} (times|x)\b"),
    ("one-off", seconds("one_off")),
    ("max_takeovers|taken over", rf"\b{NUMBERS['max_takeovers']} times\b"),
    ("poll_interval|looked for|replica looks", seconds("poll_interval")),
    ("retry_delay|retry", seconds("retry_delay")),
    ("claim_timeout", seconds("claim_timeout")),
    ("answer", seconds("answer")),
    ("history", rf"\b{NUMBERS['history']} (runs|by)\b"),
    ("leader", seconds("leader_lease")),
    ("grace time|overdue", seconds("shortest_grace")),
    ("live replica|no replica", rf"\b{NUMBERS['gone_minutes']:g} minutes"),
]
# Equal numbers that limit something else.
OTHERS = [
    "a lease counts for 60 seconds after its renewal at most",
    "pglease takes a live lock, ShedLock needs `usingDbTime`, and with fast-job all runs come a "
    "minute early",
]


def test_each_sentence_that_tells_a_default_is_known() -> None:
    untold = {}
    for page, text in prose():
        text = " ".join(text.split())  # noqa: PLW2901  # and shortened below
        # The page of options has the sentences of a docstring.
        for sentence in [*TOLD.get(page, ()), *TOLD["apscheduler_tasklock/options.py"], *OTHERS]:
            text = re.sub(pattern(sentence), "", text)  # noqa: PLW2901
        for sentence in re.split(r"(?<=[.:;|]) ", text):
            if any(
                re.search(name, sentence) and re.search(told, sentence) for name, told in DEFAULTS
            ):
                untold[page] = sentence
    assert untold == {}


def prose() -> Iterator[tuple[str, str]]:
    """Yield the pages, and the docstrings of each module, with the path of each."""
    for page in [ROOT / "CHANGELOG.md", ROOT / "ARCHITECTURE.md", *pages()]:
        if page != PAGE:  # which is written from the parser
            yield str(page.relative_to(ROOT)), page.read_text()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module in (ROOT / "apscheduler_tasklock").rglob("*.py"):
        nodes = [
            node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, kinds)
        ]
        yield str(module.relative_to(ROOT)), "\n".join(ast.get_docstring(n) or "" for n in nodes)
