"""Counts the connections of replicas while they work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

COUNT = "SELECT count(*) FROM pg_stat_activity WHERE starts_with(application_name, %s)"


@contextmanager
def watched(
    url: str, application: str = "tasklock ", every: float = 0.05
) -> Iterator[list[tuple[float, int]]]:
    """Count the connections of an application again and again, until the end.

    :param application: how its ``application_name`` begins
    :param every: seconds between two counts
    :return: when it was counted, in seconds since 1970, and how many connections there were
    """
    seen: list[tuple[float, int]] = []
    stop = threading.Event()

    def watch() -> None:
        with psycopg.connect(url, autocommit=True, application_name="watch") as connection:
            while not stop.wait(every):
                row = connection.execute(COUNT, [application]).fetchone()
                assert row is not None
                seen.append((time.time(), row[0]))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
