"""Numbers that a machine's load does not change, each with its limit: `python -m tests.counts`."""
