"""Programs that some tests need, and that a machine may not have."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


class UnavailableError(Exception):
    """A program is missing on this machine."""


def skip_or_fail(unavailable: UnavailableError) -> NoReturn:
    """Skip a test whose program is missing; fail it in continuous integration.

    Continuous integration has to install the programs, so that it does not pass without the tests.
    """
    if os.environ.get("CI") == "true":
        pytest.fail(str(unavailable), pytrace=False)
    pytest.skip(str(unavailable))
