"""Test suites of other projects, run with this library's executor in place of theirs."""
