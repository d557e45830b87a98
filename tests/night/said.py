"""What is told at a moment of the night, by the commands and the pages over its rows."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from datetime import timezone
from functools import cache, cached_property, partial
from html import unescape
from io import StringIO
from typing import Any, cast

from apscheduler_tasklock import TaskLocks
from apscheduler_tasklock.cli.exits import status_of
from apscheduler_tasklock.cli.parser import build_parser
from apscheduler_tasklock.dashboard.screens import Screen
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from tests.night.recording import Moment
from tests.support.pages import Known, Reader, words


@cache
def _parser() -> Any:
    """Return the parser of the command line, which takes longer to make than most commands."""
    return build_parser()


class _At:
    """The task locks at a moment, whose rows stand still, with its time for the pages.

    So each read is sent once. What is told reads the same task some dozen times, and a read costs
    more than all that is made of it.
    """

    def __init__(self, locks: TaskLocks, moment: Moment) -> None:
        self._locks = locks
        self.now = moment.now
        self._read: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._locks, name)
        if not callable(value):
            return value

        def read(*arguments: Any, **named: Any) -> Any:
            what = repr((name, arguments, named))
            if what not in self._read:
                self._read[what] = _answered(partial(value, *arguments, **named))
            return self._read[what]

        return read


def _answered(read: Callable[[], Any]) -> Any:
    """Return what is read, also on a machine that is too slow for the first tries."""
    give_up_at = time.monotonic() + 120
    while True:
        try:
            return read()
        except TaskLockDatabaseError:
            if time.monotonic() > give_up_at:
                raise


class Said:
    """What is told at a moment. Its rows are in the database, whose clock stands still.

    :ivar at: the time in seconds
    :ivar until: when all of it was told
    :ivar texts: all texts that were told, by who told them
    """

    def __init__(self, locks: TaskLocks, moment: Moment) -> None:
        self.moment = moment
        self.at = self.until = moment.at
        self._locks = locks
        self._known = cast(Known, _At(locks, moment))
        self._reader = Reader(self._known, zone=timezone.utc)
        self.texts: dict[str, str] = {}

    def again(self) -> Said:
        """Return what is told of the same moment, whose rows have changed."""
        return Said(self._locks, self.moment)

    def command(self, *given: str) -> tuple[int, str]:
        """Return the exit status and the output of a command."""
        options = _parser().parse_args(given)
        options.locks = self._known
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            try:
                status = options.run(options)
            except TaskLockError as error:
                status = status_of(error)
        if "--json" not in given:
            self.texts[" ".join(given)] = out.getvalue() + err.getvalue()
        return status, out.getvalue()

    def _json(self, *given: str) -> Any:
        return json.loads(self.command(*given, "--json")[1])

    @cached_property
    def check(self) -> Any:
        return self._json("check")

    @cached_property
    def check_line(self) -> str:
        return self.command("check")[1]

    @cached_property
    def tasks(self) -> dict[str, Any]:
        """The tasks of ``status``, by their names."""
        return {task["name"]: task for task in self._json("status")}

    @cached_property
    def replicas(self) -> dict[str, Any]:
        return {each["replica_id"]: each for each in self._json("replicas")}

    @cached_property
    def history(self) -> list[Any]:
        """All entries of the history, the newest first."""
        return cast("list[Any]", self._json("runs", "--limit", "100000"))

    @cached_property
    def entries(self) -> list[Any]:
        """The entries of runs."""
        return [
            each
            for each in self.history
            if each["kind"] != "operator" and each["outcome"] != "missed"
        ]

    @cached_property
    def misses(self) -> list[Any]:
        return [each for each in self.history if each["outcome"] == "missed"]

    @cached_property
    def jobs(self) -> dict[str, Any]:
        return {each["id"]: each for each in self._json("jobs")}

    @cached_property
    def metrics(self) -> Any:
        return self._json("metrics")

    @cache  # noqa: B019  # it lives as long as the moment is looked at
    def why(self, task: str) -> Any:
        return self._json("why", task)

    @cache  # noqa: B019  # a moment lives as long as what is told of it
    def show(self, task: str) -> dict[str, str]:
        """Return the facts that ``show`` prints, by their names."""
        lines = self.command("show", task)[1].partition("\n\n")[0].splitlines()
        return {line[:13].strip(): line[13:] for line in lines if line[:13].strip()}

    @cache  # noqa: B019  # a moment lives as long as what is told of it
    def why_text(self, task: str) -> str:
        return self.command("why", task)[1]

    @cache  # noqa: B019  # a moment lives as long as what is told of it
    def screen(self, path: str) -> Screen:
        return self._reader.screen(path)[1]

    @cache  # noqa: B019  # a moment lives as long as what is told of it
    def twin(self, path: str) -> Any:
        return self._reader.twin(path)

    @cache  # noqa: B019  # a moment lives as long as what is told of it
    def html(self, path: str) -> str:
        html = self._reader.html(path)
        titles = " ".join(map(unescape, re.findall(r"<title>(.*?)</title>", html, re.DOTALL)))
        self.texts[f"page {path}"] = f"{words(html)} {titles}"
        return html


class SaidLive(Said):
    """What the commands told while the night went on, when a moment was taken.

    They have read one after the other, after the moment's rows were noted. A check that rests on
    one read holds for them, too.
    """

    def __init__(self, moment: Moment) -> None:
        self.moment = moment
        self.at, self.until = moment.told["since"], moment.told["until"]
        self.texts = {}

    def _json(self, *given: str) -> Any:
        return self.moment.told[given[0]]
