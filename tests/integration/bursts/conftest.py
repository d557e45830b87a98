"""Replicas of the tests of bursts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.commands import PATIENT
from tests.support.waist import LockClient


@pytest.fixture
def make_locks(
    make_locks: Callable[..., LockClient], database_url: str
) -> Callable[..., LockClient]:
    """Make the :class:`LockClient` of a replica.

    Where nobody is in the way of the database, it waits for its connection with patience.
    """

    def make(database: Any = database_url, **options: Any) -> LockClient:
        is_broken_by_nobody = database == database_url
        patient = {"claim_timeout": 180, "timings": PATIENT} if is_broken_by_nobody else {}
        return make_locks(database, **{**patient, **options})

    return make
