"""Which texts a database can store, by the encodings of the connection and of the database."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from apscheduler_tasklock._database.encoding import lacking, unstorable

UMLAUT, ARROW, CYRILLIC = "k\N{LATIN SMALL LETTER U WITH DIAERESIS}hl", "\N{RIGHTWARDS ARROW}", "Ж"


def connection(client: str, server: str) -> Any:
    encodings = {"client_encoding": client, "server_encoding": server}
    return SimpleNamespace(info=SimpleNamespace(parameter_status=encodings.get))


@pytest.mark.parametrize(
    ("client", "server", "text", "found"),
    [
        ("UTF8", "UTF8", ARROW, None),
        ("UTF8", "LATIN1", "plain", None),
        ("UTF8", "LATIN1", UMLAUT, None),
        ("UTF8", "LATIN1", ARROW, "LATIN1"),
        ("LATIN1", "UTF8", ARROW, "LATIN1"),
        ("UTF8", "WIN1251", CYRILLIC, None),
        ("UTF8", "WIN1251", UMLAUT, "WIN1251"),
        ("UTF8", "KOI8R", CYRILLIC, None),
        ("UTF8", "KOI8R", UMLAUT, "KOI8R"),
        ("UTF8", "ISO_8859_5", UMLAUT, "ISO_8859_5"),
        ("UTF8", "EUC_JP", "\N{HIRAGANA LETTER A}", None),
        # Left to the server: any bytes, and one that Python does not know.
        ("UTF8", "SQL_ASCII", ARROW, None),
        ("UTF8", "MULE_INTERNAL", ARROW, None),
    ],
)
def test_the_encoding_that_lacks_a_character_is_found(
    client: str, server: str, text: str, found: str | None
) -> None:
    assert lacking(connection(client, server), text) == found


def test_the_error_says_what_to_do() -> None:
    error = unstorable(connection("UTF8", "LATIN1"), ARROW)
    assert str(error) == (
        f"task {ARROW!r}: its name has characters that the encoding LATIN1 of the database lacks; "
        "choose another name (that of a job is its id, or its option 'name')"
    )
    assert unstorable(connection("UTF8", "LATIN1"), UMLAUT) is None
