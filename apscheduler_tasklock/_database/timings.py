"""How long things may take that no option sets."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    """Waits and pauses of one replica, in seconds where nothing else is said. Can be pickled.

    :ivar longest_answer: for which an answer is waited for at most, however long a claim is tried:
        what got lost on its way is to be sent again soon
    :ivar recovery_grace: for which the database has to be there, after an outage or a start, until
        a holder that it did not hear of counts as dead, and one attempt more: enough for pending
        releases, which are sent every second, even if one that got lost on its way is still being
        waited for. In a large fleet it is longer; see :class:`Outage`
    :ivar doubt_interval: from a doubt for the silent end of an idle connection to the next such
        doubt, at least
    :ivar renewals_per_lease: how often a claim is renewed during one lease, so that a renewal may
        fail and be tried again
    :ivar release_timeout: for which the job's own worker waits for a release that fails. Then the
        worker goes on, and the release is sent again
    :ivar release_interval: after which a release that could not be sent is sent again; sooner if
        somebody waits for it
    :ivar rejected_interval: after which what the database rejects is tried again, as until somebody
        gives a right back: a release, and the run history. All else is tried again with each look.
    :ivar listen_again: after which the connection that listens for notifications is opened again if
        it broke and nothing else has opened it; one that is rejected, ever later
    :ivar closing_timeout: for which pending releases are sent at a shutdown while the database is
        unavailable, as when a server restarts under a deployment. All attempts are over by then.
    :ivar report_interval: from one sign of life of a replica to the next; one that misses one is
        silent to operators
    :ivar waiting_interval: from one log line that says which jobs a stop waits for to the next
    :ivar give_back_after: for which a hand-out of the job store waits for a worker. Then it is
        given back, and left to others for as long.
    :ivar call_timeout: for which a user's call of the job store, as ``add_job``, is tried
    :ivar longest_turn: for which a look waits for the application's own code. Then the job is left
        out of looks until that comes back
    :ivar ended_kept: for which a job of the job store that has ended is kept: a user's call whose
        answer was lost may be repeated, and is to find what it has done
    """

    longest_answer: float = 3.3
    recovery_grace: float = 2.5
    doubt_interval: float = 120.0
    renewals_per_lease: int = 3
    release_timeout: float = 0.2
    release_interval: float = 1.0
    rejected_interval: float = 5.0
    listen_again: float = 2.0
    closing_timeout: float = 3.0
    report_interval: float = 30.0
    waiting_interval: float = 10.0
    give_back_after: float = 5.0
    call_timeout: float = 2.0
    longest_turn: float = 10.0
    ended_kept: float = 10.0


def jittered(seconds: float) -> float:
    """Return a pause near this one: replicas must not all come back at the same moment."""
    return seconds * random.uniform(0.8, 1.2)  # noqa: S311  # no secret
