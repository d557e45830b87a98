"""How long things may take: what the library promises, and what a busy machine adds."""

from __future__ import annotations

from tests.chaos.tasks import CLAIM_TIMEOUT

# Seconds within which a replica that is well does what is due, on a busy machine; the same around a
# burst; how many run times make a burst, and how many seconds around it count.
REACTION = 1.0
BURST_REACTION = 4.0
BURST, BURST_NEAR = 100, 4.0

# Seconds by which a run time may be late in the database, which learns it as "now, minus so many
# seconds": the time that the claim was under way.
UNDER_WAY = 0.05

# Seconds from the begin of a release, which is its time in the row, until it is committed.
COMMIT = 0.1

# Seconds that the library waits for an answer: a third of the claim timeout.
ATTEMPT = CLAIM_TIMEOUT / 3

# Seconds after a trouble until a replica is well: an attempt that still waits for an answer, the
# next one, and the pause between them.
RECOVERY = 2 * ATTEMPT + 1.0

# Seconds after its start for which a replica believes no run dead: an attempt, and the recovery
# grace.
GRACE = ATTEMPT + 2.5

# Seconds after its start, or after a trouble of any length, until a replica believes runs dead.
SETTLING = GRACE + 0.5

# Seconds that `scheduler.shutdown()` may take for each executor, beyond the jobs that it waits for.
SHUTDOWN = 5.0

# Seconds after a worker process was killed until its pool is known to be broken, and replaced.
POOL_BACK = 2.0

# Seconds within which a replica that is well ends the leases of a pool whose processes are dead: it
# looks twenty times a second.
FREED = 1.5

# Seconds within which a worker process knows that its parent is dead: it looks twice a second.
ORPHANED = 0.5
