"""Those who tell of the night while it goes on: the commands, and the dashboard."""

from __future__ import annotations

import json
import urllib.request
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from apscheduler_tasklock.cli import main
from tests.support.dashboards import DashboardProcess

# The commands that are asked at each moment, by the names of what they tell.
COMMANDS = {
    "check": ("check", "--json"),
    "status": ("status", "--json"),
    "replicas": ("replicas", "--json"),
    "metrics": ("metrics", "--json"),
}
PAGES = {"overview": "api/overview"}


class Tellers:
    """Asks the commands and the dashboard. A context manager.

    :param folder: gets the dashboard's log
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._closing = ExitStack()
        self._dashboard = self._closing.enter_context(
            DashboardProcess(folder / "dashboard.log", url)
        )

    def __enter__(self) -> Tellers:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def tell(self) -> dict[str, Any]:
        """Return what each of them tells now."""
        return {name: self._said(*words) for name, words in COMMANDS.items()}

    def _said(self, *words: str) -> dict[str, Any]:
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
            status = main([*words, "--database", self._url])
        return {"status": status, "said": json.loads(out.getvalue())}

    def page(self, address: str) -> str:
        """Return a page of the dashboard."""
        with urllib.request.urlopen(self._dashboard.url + address, timeout=60) as answer:  # noqa: S310
            return str(answer.read().decode())
