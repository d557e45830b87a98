"""What the history of a run of the chaos tells, in the one form of events.

All times are seconds on the machine's monotonic clock, which the replicas, the database server and
the monkey share, and which nobody sets: ``faketime`` is told to leave it alone.

What is planned: ``planned``, a one-off job, as JSON in ``detail``.
What a replica tells: ``loaded``, it is about to start; ``ready``, it has its jobs and its worker
processes, with ``far`` for a clock that is far off; ``fire``, APScheduler handed a run time to the
executor; ``skipped``, which then could not claim it; ``misfired``; ``begin``, ``holds`` and ``end``
of a run, with what ``current_lock().lost`` was, and ``cut`` in place of the end of a coroutine that
is cancelled; ``early``, a job ran that was not due; ``worker started``, a process of a pool;
``stalled``; ``erred``, something was logged as an error. A run reads the clock right before it asks
whether its lock is lost.
A replica that runs some tasks in a pool beside the others is ``ready`` twice, as itself and as its
pool, with `` pool`` after its name. What concerns these tasks is told of the pool.
What the task lock table shows: ``claimed``, ``renewed``, ``released``, ``handed over``,
``given up``; ``lease ended``, by the replica that has it, of a dead worker process.
What the monkey does: ``killed``, with ``alone`` if the worker processes live on, ``stopped``,
``continued``, ``hung``, ``freed``, ``cut off``, ``terminated``, ``leaving``; to a worker of a
pool ``worker killed``, ``worker stopped`` and ``worker continued``; to all replicas at once
``down`` and ``up``, the server, and ``slowed`` and ``quick``, its answers.
What the fleet sees: ``died``, a replica that nobody told to; ``gone``, one that was told to
end; ``closing``, all are to end.
"""

from __future__ import annotations

# Detail of the event `ready` of a replica whose clock is far off.
FAR = "far"

# The suffix of a replica's name that stands for its pool of processes, or of threads beside a loop.
POOL = " pool"

# Detail of a kill of the replica's own process alone. Its workers live on.
ALONE = "alone"

# Detail of a replica that is told to end by a signal to its worker processes as well.
END_GROUP = "end group"
