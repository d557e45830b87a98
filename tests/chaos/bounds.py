"""How long things may take: what the library promises, and what a busy machine adds."""

from __future__ import annotations

from tests.chaos.tasks import CLAIM_TIMEOUT, POLL_INTERVAL

# Seconds within which a replica that is well does what is due, on a busy machine; and on one where
# so many run times were due at the same time, so many seconds before or after.
REACTION = 1.0
BURST_REACTION = 4.0
BURST, BURST_NEAR = 100, 4.0

# The database learns a run time as "now, minus so many seconds", and so places it later by as long
# as the claim was under way, in seconds.
UNDER_WAY = 0.05

# Seconds from the time of a release, which is when it began, until it is committed.
COMMIT = 0.1

# Seconds that a statement waits for an answer that does not come: the library's share of the claim
# timeout.
ATTEMPT = CLAIM_TIMEOUT / 3

# Seconds after a trouble until a replica is well: an attempt that still waits for an answer, the
# next one, and the pause between them.
RECOVERY = 2 * ATTEMPT + 1.0

# Seconds after the first answer of a replica's start for which it believes nobody dead: an attempt,
# and the recovery grace.
GRACE = ATTEMPT + 2.5

# Seconds after its start, or after a trouble, however short, until a replica believes that a holder
# is dead.
SETTLING = GRACE + 0.5

# Seconds after an outage for which a replica at least believes nobody dead; and how long the outage
# was of which it surely noticed, since it polls.
SHORTEST_GRACE = SETTLING - 1.5
NOTICED_OUTAGE = POLL_INTERVAL + 1.0

# Seconds that `scheduler.shutdown()` may take for each executor, beyond the jobs that it waits for.
SHUTDOWN = 5.0

# Seconds after a worker process was killed until its pool is known to be broken, and replaced.
POOL_BACK = 2.0

# Seconds within which a replica that is well ends the lease of a worker process that was killed: it
# looks twice a second.
FREED = 1.5
