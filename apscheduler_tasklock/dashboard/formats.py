"""Formats: times, durations and JSON as the dashboard's pages show them."""

from __future__ import annotations

from datetime import datetime, tzinfo

from apscheduler_tasklock._lock.words import seconds_in_words
from apscheduler_tasklock._words.formats import for_reader
from apscheduler_tasklock._words.runs import took_in_words
from apscheduler_tasklock.status import Run


class Formats:
    """Times in one zone, and durations in words.

    :param zone: the zone of all times; ``None``: the zone of this machine
    :param now: the database's time, from which the date of today comes; this machine's, for pages
        that read nothing
    """

    def __init__(self, zone: tzinfo | None, now: datetime) -> None:
        self.zone = zone
        self.now = now

    def moment(self, moment: datetime | None) -> str:
        """Return a time without the date if that is today's; ``""`` for ``None``."""
        if moment is None:
            return ""
        here = moment.astimezone(self.zone)
        if here.date() == self.now.astimezone(self.zone).date():
            return f"{here:%H:%M:%S}"
        return f"{here:%Y-%m-%d %H:%M:%S}"

    def brief(self, moment: datetime | None) -> str:
        """Return a time for a narrow column, without seconds if it is not today's."""
        if moment is None:
            return ""
        here, today = moment.astimezone(self.zone), self.now.astimezone(self.zone)
        if here.date() == today.date():
            return f"{here:%H:%M:%S}"
        return f"{here:%m-%d %H:%M}" if here.year == today.year else f"{here:%Y-%m-%d}"

    def words(self, words: str) -> str:
        """Return words of a finding with their times as the page writes them."""
        return for_reader(words, self)

    def seconds(self, seconds: float | None) -> str:
        """Return a duration in its two largest units; ``""`` for ``None``."""
        return "" if seconds is None else seconds_in_words(seconds)

    def field(self, moment: datetime | None) -> str:
        """Return a time as the field of a form has it; ``""`` for ``None``."""
        return "" if moment is None else f"{moment.astimezone(self.zone):%Y-%m-%dT%H:%M:%S}"

    def took(self, run: Run) -> str:
        """Return how long a run took, or a task's last run, as far as it is known."""
        return took_in_words(run, self)

    def ago(self, moment: datetime | None) -> str:
        """Return how long ago a time was, or how long it is until it comes."""
        if moment is None:
            return ""
        seconds = round((self.now - moment).total_seconds())
        if seconds > 0:
            return f"{seconds_in_words(seconds)} ago"
        return f"in {seconds_in_words(-seconds)}" if seconds else "now"

    @property
    def zone_name(self) -> str:
        """The name of the zone."""
        return f"{self.now.astimezone(self.zone):%Z}"
