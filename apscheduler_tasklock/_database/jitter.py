"""The pauses after which something is tried again, with jitter."""

from __future__ import annotations

import random

# Pauses between attempts while the database is unavailable, in seconds. The last one repeats.
BACKOFF = (0.05, 0.1, 0.25, 0.5, 1.0)
# Pauses between attempts while a row is locked, in seconds. The last one repeats. They are short,
# because another replica's claim usually has the row locked, and commits soon.
LOCKED_BACKOFF = (0.01, 0.02, 0.04, 0.08, 0.16, 0.25)
# Limits the last pause of a failed release: the release is sent once more, this many seconds before
# the release expires.
LAST_TRY = 0.1


def jittered(seconds: float) -> float:
    """Return a pause near this one, so that replicas do not all try again at the same moment."""
    return seconds * random.uniform(0.8, 1.2)  # noqa: S311  # no secret
