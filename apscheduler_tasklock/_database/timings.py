"""Waits and pauses that no option sets."""

from __future__ import annotations

from dataclasses import dataclass

from apscheduler_tasklock._shutdown import PENDING_LIMIT


@dataclass(frozen=True)
class Timings:
    """Waits and pauses of one replica, in seconds unless stated otherwise. Can be pickled.

    :ivar linger: how long the replica's thread waits without work before it ends. The next message
        starts it again
    :ivar longest_answer: limits the wait for one answer, however long a claim is tried, so that a
        statement whose answer was lost is sent again soon
    :ivar recovery_grace: the time after a start or an outage in which a holder whose lease has
        ended does not count as dead. :class:`Outage` adds the limit of one attempt, and makes the
        time longer in a large fleet. Pending releases arrive in this time: a failed release is sent
        again after a second at most, and an attempt whose answer is lost fails at its limit
    :ivar doubt_interval: the shortest time between two recovery graces that begin because an idle
        connection was ended without a message
    :ivar unlocked_after: how long no statement has failed because of a locked table until the lock
        counts as over in the log. Statements that do not use that table are answered meanwhile
    :ivar renewals_per_lease: how often a claim is renewed during one lease, so that a renewal may
        fail and be tried again
    :ivar release_timeout: limits the wait of ``hold`` for a release that fails. After this time
        ``hold`` returns, and the release is still sent again
    :ivar release_interval: the longest pause before a failed release is sent again; a shutdown
        sends it at once
    :ivar rejected_interval: the pause before a rejected release and the rejected run history are
        tried again. Other rejected work is tried again with each look at the tasks' rows
    :ivar listen_again: the pause before a connection is opened in place of a broken one that
        listened, unless another request opens it sooner. The pause grows while the database rejects
        the connection
    :ivar closing_timeout: limits how long a shutdown sends pending releases while the database is
        unavailable, for example because its server restarts during a deployment
    :ivar report_interval: the time between two signs of life of a replica; operators see a replica
        that misses a sign of life as silent
    :ivar waiting_interval: the time between two log lines that say which jobs a stop waits for
    :ivar call_timeout: limits how long a user's call of the job store, such as ``add_job``, is
        tried
    :ivar longest_turn: limits how long a look at the tasks' rows, or for due jobs, waits for a
        job's own code, such as its trigger. After this time looks leave the job out until that
        code returns
    :ivar unasked_after: if a replica finds run times for which nobody has asked, it waits so long
        before it notes them as missed, because another replica may know more about these run times
    :ivar head_start: how long after a run time a follower does not ask for the run time, so that
        the leader of its namespace can ask first
    :ivar ended_kept: how long the row of an ended job of the job store is kept. A call that is
        repeated because its answer was lost can then see what its first attempt has done
    :ivar hold_interval: the longest pause between two claims of a ``hold`` that waits for the end
        of a run, as an executor's default ``poll_interval``
    """

    linger: float = 5.0
    longest_answer: float = 3.3
    recovery_grace: float = 2.5
    doubt_interval: float = 120.0
    unlocked_after: float = 15.0
    renewals_per_lease: int = 3
    release_timeout: float = 0.2
    release_interval: float = 1.0
    rejected_interval: float = 5.0
    listen_again: float = 2.0
    closing_timeout: float = PENDING_LIMIT
    report_interval: float = 30.0
    waiting_interval: float = 10.0
    call_timeout: float = 2.0
    longest_turn: float = 10.0
    unasked_after: float = 60.0
    head_start: float = 2.0
    ended_kept: float = 10.0
    hold_interval: float = 5.0
