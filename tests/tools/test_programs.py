"""A test whose program is missing on this machine: skipped, but not in continuous integration."""

from __future__ import annotations

import pytest

from tests.support.pgbouncer import find_program
from tests.support.programs import UnavailableError, skip_or_fail


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)]
)
def test_a_missing_program_skips_a_test_and_fails_it_in_continuous_integration(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PGBOUNCER", "/no/such/pgbouncer")
    with pytest.raises(UnavailableError) as missing:
        find_program()
    # Both are expected here, because an unexpected skip would skip this test.
    either = (pytest.skip.Exception, pytest.fail.Exception)
    with pytest.raises(either, match="/no/such/pgbouncer is not installed") as raised:
        skip_or_fail(missing.value)
    assert raised.type is outcome
