"""Those who tell of the night while it goes on: the commands, and the dashboard in a process."""

from __future__ import annotations

import json
import urllib.request
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from apscheduler_tasklock.cli import main
from tests.support.dashboards import DashboardProcess

COMMANDS = (("check",), ("status",), ("replicas",), ("runs", "--limit", "100000"), ("jobs",))


class Tellers:
    """Asks the commands and the dashboard. A context manager.

    :param folder: gets the dashboard's log
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._closing = ExitStack()
        log = folder / "dashboard.log"
        self._dashboard = self._closing.enter_context(DashboardProcess(log, url))

    def __enter__(self) -> Tellers:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def tell(self) -> dict[str, Any]:
        """Return what each of them tells now."""
        told = {words[0]: self.ask(*words) for words in COMMANDS}
        address = f"{self._dashboard.url}overview.json"
        with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310  # the dashboard's
            told["overview"] = json.load(answer)
        return told

    def do(self, *words: str) -> str:
        """Return what a command that changes something prints."""
        with redirect_stdout(StringIO()) as out, redirect_stderr(out):
            main([*words, "--database", self._url])
        return out.getvalue()

    def ask(self, *words: str) -> Any:
        """Return what a command tells as JSON."""
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
            main([*words, "--json", "--database", self._url])
        return json.loads(out.getvalue())
