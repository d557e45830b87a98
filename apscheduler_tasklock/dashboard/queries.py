"""Queries: the parameters of a page's address, which anybody may have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime, timezone, tzinfo
from urllib.parse import parse_qs

from apscheduler_tasklock._lock.patterns import is_pattern
from apscheduler_tasklock.errors import TaskLockOptionError

# Limits the characters of a parameter. A task's name may have 4,000.
_LONGEST = 4_000

# Limits the parameters of an address or a form. A form may name 1,000 tasks.
_MOST_PARAMETERS = 1_100

# Limits the years of times and dates, so that times around them can be computed and shown in each
# time zone.
_YEARS = range(1970, 2_500)


def check_text(name: str, text: str) -> None:
    """Check a parameter's text.

    :raises TaskLockOptionError: the text is too long, or has a character that no text in PostgreSQL
        has
    """
    if len(text) > _LONGEST or "\0" in text:
        raise TaskLockOptionError(f"{name} is invalid: it is too long or has a NUL in it")


def pattern_of(text: str) -> str:
    """Return the pattern of the names that a text is a part of, unless the text is a pattern."""
    return text if is_pattern(text) else f"*{text}*"


def patterns_of(namespace: str, text: str | None = None) -> tuple[str, ...]:
    """Return the patterns of the tasks of a namespace whose names have a text in them."""
    if text:
        return (f"{namespace}{pattern_of(text)}",)
    return (f"{namespace}*",) if namespace else ()


def parse(text: bytes) -> dict[str, list[str]]:
    """Return the parameters of an address or a form, each with its values.

    :raises TaskLockOptionError: they are not UTF-8, or too many
    """
    try:
        return parse_qs(
            text.decode(),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MOST_PARAMETERS,
        )
    except UnicodeDecodeError:
        raise TaskLockOptionError("the parameters are invalid: they are not UTF-8") from None
    except ValueError:
        raise TaskLockOptionError("the parameters are invalid: they are too many") from None


class Query:
    """The parameters of an address or a form.

    :param given: the parameters' texts by name
    :param repeated: the texts of parameters that are given several times
    """

    def __init__(
        self, given: Mapping[str, str], repeated: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.given = given
        self._repeated = repeated or {}

    @classmethod
    def of(cls, parsed: Mapping[str, Sequence[str]]) -> Query:
        """Return the last value of each parameter, besides those that :meth:`several` returns."""
        return cls({name: values[-1] for name, values in parsed.items()}, parsed)

    def text(self, name: str) -> str | None:
        """Return a text; ``None`` if it is not given or empty.

        :raises TaskLockOptionError: the text is too long, or has a character that no text in
            PostgreSQL has
        """
        found = self.given.get(name) or None
        if found is not None:
            check_text(name, found)
        return found

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        """Return one of some texts; ``None`` if another text or none is given."""
        found = self.given.get(name)
        return found if found in choices else None

    def several(self, name: str, choices: Sequence[str]) -> tuple[str, ...]:
        """Return those of some texts that are given: each by itself, or with commas between them.

        Other texts are left out.
        """
        texts = self._repeated.get(name) or [self.given.get(name, "")]
        found = {each for text in texts for each in text.split(",")}
        return tuple(choice for choice in choices if choice in found)

    def number(self, name: str, default: int, least: int, most: int) -> int:
        """Return a whole number, or the nearest limit; the default if there is none.

        :raises TaskLockOptionError: it is no whole number
        """
        text = self.text(name)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit():
            raise TaskLockOptionError(f"{name} must be a whole number, not {text[:100]!r}")
        return min(most, max(least, int(text[:19])))

    def moment(self, name: str, zone: tzinfo | None) -> datetime | None:
        """Return a time, given as seconds since 1970 or as ISO 8601; ``None`` if there is none.

        :param zone: the zone of a time that is given without one; ``None``: this machine's
        :raises TaskLockOptionError: it is no such time
        """
        text = self.text(name)
        if text is None:
            return None
        try:
            if text.replace(".", "", 1).isdigit():
                found = datetime.fromtimestamp(float(text), timezone.utc)
            else:
                found = datetime.fromisoformat(text.replace("Z", "+00:00").replace(" ", "T", 1))
            _check_year(found)
            if found.tzinfo is None:
                found = found.astimezone() if zone is None else found.replace(tzinfo=zone)
            return found.astimezone(timezone.utc)
        except (ValueError, OverflowError, OSError):
            raise TaskLockOptionError(
                f"{name} must be a time such as 2026-01-31T03:00, not {text[:100]!r}"
            ) from None

    def date(self, name: str) -> date | None:
        """Return a date; ``None`` if there is none.

        :raises TaskLockOptionError: it is no date
        """
        text = self.text(name)
        if text is None:
            return None
        try:
            found = date.fromisoformat(text)
            _check_year(found)
        except ValueError:
            raise TaskLockOptionError(
                f"{name} must be a date such as 2026-01-31, not {text[:100]!r}"
            ) from None
        return found


def _check_year(found: date) -> None:
    """Check that a time is of a year that can be worked with.

    :raises ValueError: it is not
    """
    if found.year not in _YEARS:
        raise ValueError("no such year")
