"""Starlette's test client, without the warning that its versions before 1.0 cause themselves."""

from __future__ import annotations

import warnings
from typing import Any

from starlette import testclient


class TestClient(testclient.TestClient):
    """Sends requests to an application in this process, as a browser would."""

    __test__ = False  # pytest takes classes of such names for tests

    def __init__(self, *arguments: Any, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            super().__init__(*arguments, **options)
