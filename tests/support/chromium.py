"""A browser such as an operator has, and axe, which finds what shuts readers out."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from tests.support.npm import fetched_once, unpack
from tests.support.postgres import CACHE
from tests.support.programs import UnavailableError

AXE = "4.14.1"
AXE_INTEGRITY = (
    "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg"
    "2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
)
AXE_RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")

# Limits the milliseconds of each wait for a page, on a busy machine.
PATIENCE = 60_000

# The browser's names at GitHub, in Debian, and in other distributions. GitHub's machines have a
# `chromium` as well, but Ubuntu does not let it start its sandbox (actions/runner-images#12096).
_PROGRAMS = ("google-chrome", "chromium", "chromium-browser")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a browser without a window.

    :raises UnavailableError: there is none
    """
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        raise UnavailableError("chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        # Chromium has no sandbox for root.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=program, args=options)
        try:
            yield browser
        finally:
            browser.close()


def axe_script() -> str:
    """Return axe-core's script.

    :raises UnavailableError: there is no npm to fetch it with
    """
    folder = CACHE / f"axe-core-{AXE}"
    if not folder.exists() and shutil.which("npm") is None:
        raise UnavailableError("npm is not installed, which fetches axe-core: apt-get install npm")
    fetched_once(folder, lambda into: unpack(f"axe-core@{AXE}", into, AXE_INTEGRITY))
    return (folder / "axe.min.js").read_text()


def violations(page: Page, axe: str) -> list[str]:
    """Return what axe finds in a page: the rule, and the elements that break it."""
    # The page's policy forbids foreign scripts in its elements, not what a debugger evaluates.
    page.evaluate(axe)
    found: dict[str, Any] = page.evaluate(
        "rules => axe.run(document, {runOnly: rules, resultTypes: ['violations']})", AXE_RULES
    )
    return [
        f"{rule['id']}: {node['html'][:200]} ({node['failureSummary']})"
        for rule in found["violations"]
        for node in rule["nodes"][:5]
    ]


def scrolls_sideways(page: Page) -> list[str]:
    """Return the elements that are wider than the window; empty if a page does not scroll so."""
    found: list[str] = page.evaluate(
        """() => {
            const room = document.documentElement.clientWidth;
            if (document.documentElement.scrollWidth <= room) return [];
            return [...document.querySelectorAll("body *")]
                .filter(each => each.getBoundingClientRect().right > room + 0.5)
                .map(each => each.outerHTML.slice(0, 120)).slice(0, 5).concat("(the page)");
        }"""
    )
    return found


class Complaints:
    """What a browser complains about while it shows pages: errors of scripts, and of requests."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def hear(self, page: Page) -> None:
        """Note what the browser complains about in a page."""
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.all.append(f"error: {error}"))
        page.on("requestfailed", self._on_failed)

    def _on_console(self, message: ConsoleMessage) -> None:
        # What breaks the Content-Security-Policy is an error as well.
        if message.type in ("error", "warning"):
            self.all.append(f"{message.type}: {message.text}")

    def _on_failed(self, request: Request) -> None:
        # A page that is left ends its requests.
        if request.failure != "net::ERR_ABORTED":
            self.all.append(f"{request.url}: {request.failure}")

    def expected(self, page: Page, text: str) -> None:
        """Take out the complaints that have a text in them, and wait until there is one."""

        def others() -> list[str]:
            return [each for each in self.all if text not in each]

        deadline = time.monotonic() + PATIENCE / 1000
        while len(others()) == len(self.all):
            assert time.monotonic() < deadline, f"nothing complains of {text!r}: {self.all}"
            page.wait_for_timeout(20)  # the driver reports what happened while it waits
        self.all = others()
