"""Programs and libraries that some tests need, and that a machine may not have."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


class UnavailableError(Exception):
    """A program or a library is missing on this machine."""


def skip_or_fail(unavailable: UnavailableError) -> NoReturn:
    """Skip a test that lacks a program or a library; fail it in continuous integration.

    Continuous integration has to install them, so that it does not pass without the tests.
    """
    if os.environ.get("CI") == "true":
        pytest.fail(str(unavailable), pytrace=False)
    pytest.skip(str(unavailable))


def need_qt() -> None:
    """Skip or fail a test if Qt cannot be loaded: its wheel needs GLib of the system."""
    try:
        import PySide6.QtCore  # noqa: F401  # only whether it can be loaded
    except ImportError as missing:
        skip_or_fail(UnavailableError(f"Qt cannot be loaded: {missing}"))
