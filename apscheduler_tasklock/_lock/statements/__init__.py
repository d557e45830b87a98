"""The statements of the lock protocol, for psycopg: the decision of who runs a window.

Each is a transaction of its own and one round trip. All times are the database's. Claims,
takeovers and releases have two forms: for one request, and for many that travel together. The
decision is written once, for both: in the first form what is asked for are parameters, in the
second the columns of ``asked``.

What closes a run also writes its entry into the run history (see :class:`History`): a release, and
the claim or takeover that follows a run whose holder died. A running run has none: it is the
task's row.
"""

from apscheduler_tasklock._lock.statements.claims import (
    claim,
    claim_handed_out,
    claim_many,
    find_taken,
    first_claim_many,
    settle_last,
)
from apscheduler_tasklock._lock.statements.history import History
from apscheduler_tasklock._lock.statements.parts import (
    BRIEFLY,
    DUE_IN_PAUSE,
    HANDED_OUT_TO_NOBODY,
    IS_PAUSED,
    JUST_BEFORE,
    NEVER,
    NOT_RUNNING,
    SAFELY,
    SHORTEST_WAIT,
    many,
)
from apscheduler_tasklock._lock.statements.replicas import (
    IS_ALIVE,
    IS_HEARD,
    SILENT_AFTER,
    prune,
    register,
    remove_replicas,
    report_replica,
    retire,
    shorten_history,
    stop_replica,
)
from apscheduler_tasklock._lock.statements.runs import (
    extend,
    hand_over,
    read,
    release,
    release_many,
    renew,
)
from apscheduler_tasklock._lock.statements.statement import (
    RecordingStatement,
    Statement,
    for_template,
)
from apscheduler_tasklock._lock.statements.stored import (
    CHANGE_ID,
    MAY_BE_CLAIMED,
    claim_and_move,
    move_on,
)
from apscheduler_tasklock._lock.statements.takeovers import (
    claim_requested,
    end_lease,
    give_up,
    take_over_many,
)

__all__ = [
    "BRIEFLY",
    "CHANGE_ID",
    "DUE_IN_PAUSE",
    "HANDED_OUT_TO_NOBODY",
    "IS_ALIVE",
    "IS_HEARD",
    "IS_PAUSED",
    "JUST_BEFORE",
    "MAY_BE_CLAIMED",
    "NEVER",
    "NOT_RUNNING",
    "SAFELY",
    "SHORTEST_WAIT",
    "SILENT_AFTER",
    "History",
    "RecordingStatement",
    "Statement",
    "claim",
    "claim_and_move",
    "claim_handed_out",
    "claim_many",
    "claim_requested",
    "end_lease",
    "extend",
    "find_taken",
    "first_claim_many",
    "for_template",
    "give_up",
    "hand_over",
    "many",
    "move_on",
    "prune",
    "read",
    "register",
    "release",
    "release_many",
    "remove_replicas",
    "renew",
    "report_replica",
    "retire",
    "settle_last",
    "shorten_history",
    "stop_replica",
    "take_over_many",
]
