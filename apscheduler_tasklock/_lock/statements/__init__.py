"""The statements of the lock protocol, for psycopg: they decide which replica runs a window.

Each statement is a transaction of its own and one round trip. All times are the database's. Claims
and releases have two forms: one for a single request, and one for a batch. Both forms are made of
the same clauses. In the first form the request's values are parameters, in the second they are
columns of ``asked``.

A statement that ends a run also writes the run's entry into the run history (see
:class:`History`). Such statements are releases and hand-overs, claims and takeovers that follow a
dead run, and the statement that gives up a dead run. A run that goes on has no entry, because the
task's row describes it. A release that finds that its run was closed in its place corrects the
entry in a second statement.
"""

from apscheduler_tasklock._lock.statements.claims import (
    claim,
    claim_many,
    first_claim_many,
)
from apscheduler_tasklock._lock.statements.conditions import (
    ALL_TASKS,
    BRIEFLY,
    DUE_IN_ANY_PAUSE,
    DUE_IN_PAUSE,
    IS_PAUSED,
    IS_PAUSED_IN_ANY_WAY,
    IS_TASK,
    JUST_BEFORE,
    NEVER,
    ROW_COLUMNS,
    SAFELY,
    SHORTEST_WAIT,
    listed_pauses,
    pauses_of_all,
)
from apscheduler_tasklock._lock.statements.deaths import NOT_RUNNING, end_lease, give_up
from apscheduler_tasklock._lock.statements.history import ACTIONS, IS_FIRST, History, again
from apscheduler_tasklock._lock.statements.lanes import lanes, runs_kept_since
from apscheduler_tasklock._lock.statements.leaders import (
    IS_LEADER,
    LEADER,
    LEADER_NAMESPACE,
    LEADS,
    lead,
    resign,
)
from apscheduler_tasklock._lock.statements.misses import (
    MISSES,
    add_one_offs,
    note_misses,
)
from apscheduler_tasklock._lock.statements.probe import probe
from apscheduler_tasklock._lock.statements.replicas import (
    ALIVE_FOR,
    HAS_STOPPED,
    IS_ALIVE,
    IS_HEARD,
    SILENT_AFTER,
    note_reschedulings,
    register,
    report_replica,
    retire,
    stop_replica,
)
from apscheduler_tasklock._lock.statements.reruns import rerun
from apscheduler_tasklock._lock.statements.retention import prune, remove_replicas, shorten_history
from apscheduler_tasklock._lock.statements.retries import IS_RETRY_PENDING
from apscheduler_tasklock._lock.statements.runs import (
    correct_history,
    extend,
    hand_over,
    read_tasks,
    release,
    release_many,
    renew,
)
from apscheduler_tasklock._lock.statements.statement import (
    RecordingStatement,
    Statement,
    for_template,
)
from apscheduler_tasklock._lock.statements.stored_jobs import (
    CHANGE_ID,
    MAY_BE_CLAIMED,
    claim_and_move,
    move_on,
)

__all__ = [
    "ACTIONS",
    "ALIVE_FOR",
    "ALL_TASKS",
    "BRIEFLY",
    "CHANGE_ID",
    "DUE_IN_ANY_PAUSE",
    "DUE_IN_PAUSE",
    "HAS_STOPPED",
    "IS_ALIVE",
    "IS_FIRST",
    "IS_HEARD",
    "IS_LEADER",
    "IS_PAUSED",
    "IS_PAUSED_IN_ANY_WAY",
    "IS_RETRY_PENDING",
    "IS_TASK",
    "JUST_BEFORE",
    "LEADER",
    "LEADER_NAMESPACE",
    "LEADS",
    "MAY_BE_CLAIMED",
    "MISSES",
    "NEVER",
    "NOT_RUNNING",
    "ROW_COLUMNS",
    "SAFELY",
    "SHORTEST_WAIT",
    "SILENT_AFTER",
    "History",
    "RecordingStatement",
    "Statement",
    "add_one_offs",
    "again",
    "claim",
    "claim_and_move",
    "claim_many",
    "correct_history",
    "end_lease",
    "extend",
    "first_claim_many",
    "for_template",
    "give_up",
    "hand_over",
    "lanes",
    "lead",
    "listed_pauses",
    "move_on",
    "note_misses",
    "note_reschedulings",
    "pauses_of_all",
    "probe",
    "prune",
    "read_tasks",
    "register",
    "release",
    "release_many",
    "remove_replicas",
    "renew",
    "report_replica",
    "rerun",
    "resign",
    "retire",
    "runs_kept_since",
    "shorten_history",
    "stop_replica",
]
