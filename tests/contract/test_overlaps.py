"""All pairs of the lock's statements on two connections, the second sent before the first's COMMIT.

A statement that is committed at once is seen in whole or not at all. What is sent meanwhile waits
for the row and decides anew, passes the row over, or decides on what was there before. Whatever it
does, the rows and the answers must be those of the two statements one after the other, in one of
the two orders.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import make_url

from apscheduler_tasklock._database.connection import connector
from apscheduler_tasklock._database.session import Session
from apscheduler_tasklock._database.sqlstates import RowLockedError
from apscheduler_tasklock._lock.statements import Statement
from apscheduler_tasklock.errors import TaskLockError
from tests.contract.overlapping import (
    AGAIN,
    NOW,
    SITUATIONS,
    STATEMENTS,
    TASKS,
    Side,
    last_claim,
    made_once,
    set_up,
    uuid_of,
)
from tests.support.postgres import Server
from tests.support.rows import add_task
from tests.support.waist import LOCK_TIMEOUT, ClaimAnswer, Wire, raw_cursor, with_late_takeovers

pytestmark = [
    pytest.mark.postgresql,
    pytest.mark.direct("it looks at which session of the server waits for which"),
]

# When the second statement begins, by the database's clock. The first one began at NOW.
LATER = NOW + timedelta(seconds=1)
# Seconds in which each answer comes, as of a replica with the default `claim_timeout`.
ATTEMPT = 10 / 3
# Seconds that a statement waits for a row that is locked, where the first is to end meanwhile.
PATIENT = 20.0
# How often what was passed over is sent again, once the first has ended.
MOST_SENT = 5
TABLES = ("task_lock", "task_lock_run", "task_lock_replica", "task_lock_job")
# What a release of the last claim is that was found: it must not stand any more.
CLAIMS = ("claim", "claims", "takeover", "manual run", "stored runs")
RELEASES = ("release", "release, window open", "hand-over", "releases")
# What is about replicas, and what looks at them. The others are in no way of each other.
REPLICAS = ("sign of life", "stop", "removal of replicas")
LOOKING_AT_REPLICAS = (*REPLICAS, "retirement", "request", "forgetting")
CHANGING = [name for name, statement in STATEMENTS.items() if statement.writes_in]
BATCHES = [name for name in CHANGING if STATEMENTS[name].many and name not in REPLICAS]

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_KNOWN = {str(uuid_of(who, task)) for who in ("one", "other", "before") for task in TASKS}


class Outcome(NamedTuple):
    """What became of two statements: what each was answered, and the rows after both."""

    first: dict[str, Any]
    second: dict[str, Any]
    rows: dict[str, str]

    def of(self, task: str) -> tuple[str, ...]:
        """Return what there is of one task, in words that can be compared."""
        answers = (_words(said.get(task, "not asked")) for said in (self.first, self.second))
        return (*answers, self.rows.get(task, "no row"))


def _words(answer: Any) -> str:
    """Return a text in which ids that the server has made are all alike.

    A claim that has waited for another statement tells the due time from before that one. What is
    noted because of it is checked anew, so this does not count.
    """
    if isinstance(answer, ClaimAnswer):
        answer = answer._replace(due_at=None)
    return _UUID.sub(lambda found: found[0] if found[0] in _KNOWN else "new", str(answer))


class Asking:
    """A statement that is sent until it has answered for each task.

    :ivar answers: by task
    """

    def __init__(self, name: str, side: Side, tasks: Sequence[str] | None = None) -> None:
        self._send = STATEMENTS[name].make(side)
        tasks = tasks or (("a", "z") if STATEMENTS[name].many else ("a",))
        self.answers: dict[str, Any] = dict.fromkeys(tasks, AGAIN)

    @property
    def waiting(self) -> list[str]:
        """Tasks for which it is to be sent again."""
        return [task for task, answer in self.answers.items() if answer is AGAIN]

    def send(self, cursor: Any) -> None:
        self.answers |= self._send(cursor, self.waiting)

    def send_in(self, session: Session) -> None:
        """Send it as the thread of the database does."""
        session.open()
        with suppress(RowLockedError):  # it is sent again
            session.run(self.send)


@dataclass(frozen=True)
class Pair:
    """Two statements, the second one sent before the first is committed.

    :ivar repeated: whether the second is the first once more, whose answer was lost
    """

    situation: str
    first: str
    second: str
    repeated: bool = False

    def askings(
        self, lock_timeout: float = PATIENT, tasks: Sequence[str] | None = None
    ) -> tuple[Asking, Asking]:
        one = Side("one", lock_timeout)
        other = Side("one" if self.repeated else "other", lock_timeout)
        return Asking(self.first, one, tasks), Asking(self.second, other, tasks)

    def __str__(self) -> str:
        again = " once more" if self.repeated else ""
        return f"{self.situation}: {self.first}, then {self.second}{again}"


class Stage:
    """A database whose clock stands still, two sessions in it, and one that watches them."""

    def __init__(self, url: str, closing: ExitStack) -> None:
        with psycopg.connect(url, autocommit=True) as owner:
            owner.execute("CREATE SCHEMA kept; CREATE SCHEMA travel")
            owner.execute("""
                CREATE FUNCTION travel.now() RETURNS timestamptz STABLE LANGUAGE sql
                    AS $$SELECT current_setting('travel.now')::timestamptz$$
            """)
            for setting in (
                "search_path = travel, pg_catalog, public",
                f"travel.now = '{NOW}'",
                "deadlock_timeout = '20ms'",
                # As in a large table: row by row, in the order in which they are asked for.
                "enable_seqscan = off",
                "enable_hashjoin = off",
                "enable_mergejoin = off",
            ):
                database = sql.Identifier(owner.info.dbname)
                owner.execute(sql.SQL("ALTER DATABASE {} SET " + setting).format(database))

        connect_wire = connector(make_url(url), ATTEMPT, "overlaps")

        def connect() -> psycopg.Connection[Any]:
            connection = closing.enter_context(connect_wire(0, ATTEMPT).connection)
            connection.autocommit = True
            return connection

        def connect_later(which: int, first: int, left: float) -> Wire:
            wire = connect_wire(first, left)
            closing.callback(wire.close)
            wire.script(f"SET travel.now = '{LATER}'")
            self._pids[which] = wire.connection.info.backend_pid
            return wire

        self._pids: dict[int, int] = {}
        self.sessions = [Session(partial(connect_later, which), ATTEMPT) for which in range(2)]
        for session in self.sessions:
            session.open()
        self.first, self.watching = connect(), connect()
        self._pool = closing.enter_context(ThreadPoolExecutor(2))
        self._sent: list[Future[None]] = []
        self._alone: dict[tuple[str, str, str], Outcome] = {}
        self._before: dict[str, dict[str, str]] = {}
        for situation in SITUATIONS:
            set_up(self.watching, situation)
            self._before[situation] = self.rows(self.watching)
            for table in TABLES:
                kept = f'kept."{situation} {table}"'
                self.watching.execute(f"CREATE TABLE {kept} AS TABLE {table}; DELETE FROM {table}")

    def restore(self, connection: psycopg.Connection[Any], situation: str) -> None:
        """Let the tables have the rows of a situation, once no statement is under way."""
        wait(self._sent, 60)  # one may be: of two in a deadlock, the other one goes on
        self._sent.clear()
        kept = 'DELETE FROM {0}; INSERT INTO {0} TABLE kept."{1} {0}"'
        connection.execute("; ".join(kept.format(table, situation) for table in TABLES))

    def rows(self, connection: psycopg.Connection[Any]) -> dict[str, str]:
        """Return the rows of each task, and those of no task."""
        found = connection.execute("""
            SELECT name, string_agg(told, E'\\n' ORDER BY told) FROM (
                SELECT task_name AS name, to_jsonb(row)::text AS told FROM task_lock AS row
                UNION ALL SELECT task_name, to_jsonb(row)::text FROM task_lock_run AS row
                UNION ALL SELECT 'replicas', to_jsonb(row)::text FROM task_lock_replica AS row
                UNION ALL SELECT 'jobs', to_jsonb(row)::text FROM task_lock_job AS row
            ) AS all_rows GROUP BY name
        """).fetchall()
        return {name: _words(told) for name, told in found}

    def in_turn(self, pair: Pair, order: Sequence[int]) -> Outcome:
        """Return what becomes of the two, or one of them, if nothing overlaps.

        :param order: 0 is the first, 1 the second
        """
        askings = pair.askings()
        with self.first.transaction(force_rollback=True):
            self.restore(self.first, pair.situation)
            for which in order:
                self.first.execute(f"SET LOCAL travel.now = '{(NOW, LATER)[which]}'")
                askings[which].send(raw_cursor(self.first))
            return Outcome(askings[0].answers, askings[1].answers, self.rows(self.first))

    def alone(self, pair: Pair, which: int) -> Outcome:
        """Return what becomes of one of the two without the other."""
        side = "one" if pair.repeated or which == 0 else "other"
        key = (pair.situation, (pair.first, pair.second)[which], f"{side} {which}")
        if key not in self._alone:
            self._alone[key] = self.in_turn(pair, [which])
        return self._alone[key]

    def changes(self, pair: Pair) -> bool:
        """Tell whether the first one changes anything."""
        return self.alone(pair, 0).rows != self._before[pair.situation]

    def forget(self) -> None:
        """Forget what statements do alone, since they are not what they were."""
        self._alone.clear()

    def orders(self, pair: Pair, outcome: Outcome, *, second_is_later: bool) -> list[Outcome]:
        """Return what an outcome may be: that of one order, or of both."""
        first, second = self.alone(pair, 0), self.alone(pair, 1)
        if not second_is_later and second.rows == self._before[pair.situation]:
            # It changes nothing, and is as if it had been sent before.
            return [first._replace(second=second.second)]
        likely = (0, 1) if second_is_later else (1, 0)
        orders = [self.in_turn(pair, likely)]
        if differences(pair, outcome, orders):
            orders.append(self.in_turn(pair, likely[::-1]))
        return orders

    def send(self, asking: Asking, session: int = 0) -> tuple[Future[None], bool]:
        """Send a statement in a thread; return once it has answered, or waits for a lock."""
        sent = self._pool.submit(asking.send_in, self.sessions[session])
        self._sent.append(sent)
        until = time.monotonic() + 60
        while not wait([sent], timeout=0.002).done:
            assert time.monotonic() < until, "it neither answers nor waits"
            if self.is_blocked(self._pids[session]):
                return sent, True
        return sent, False

    def is_blocked(self, pid: int) -> bool:
        found = self.watching.execute("SELECT pg_blocking_pids(%s) <> '{}'", [pid]).fetchone()
        assert found is not None
        return bool(found[0])

    def overlap(
        self, pair: Pair, *, commits: bool = True, lock_timeout: float = PATIENT
    ) -> tuple[Outcome, bool, bool]:
        """Send the second before the first ends, and again after it, if it is to be.

        :return: what became of them; whether the second waited; whether it had to be sent again
        """
        first, second = pair.askings(lock_timeout)
        self.restore(self.first, pair.situation)
        with self.first.transaction(force_rollback=not commits):
            first.send(raw_cursor(self.first))
            sent, waited = self.send(second)
            if lock_timeout < PATIENT:  # it is not to hang until the first ends
                sent.result(60)
        sent.result(60)
        passed_over = bool(second.waiting)
        for _ in range(MOST_SENT):
            if second.waiting:
                second.send_in(self.sessions[0])
        rows = self.rows(self.watching)
        return Outcome(first.answers, second.answers, rows), waited, passed_over


@pytest.fixture(scope="module")
def stage(server: Server, template: str) -> Iterator[Stage]:
    with server.database(template) as url, ExitStack() as closing:
        closing.enter_context(with_late_takeovers())
        yield Stage(url, closing)


def granted(answers: dict[str, Any], task: str) -> set[Any]:
    answer = answers.get(task)
    is_granted = isinstance(answer, ClaimAnswer) and answer.granted
    return {answer.claim_id} if is_granted else set()


def broken(pair: Pair, outcome: Outcome) -> Iterator[str]:
    """Say what of the lock's promises is broken, whatever the statements mean to do."""
    for task in TASKS:
        if len(granted(outcome.first, task) | granted(outcome.second, task)) > 1:
            yield f"task {task} was granted twice"
        for name, answers in ((pair.first, outcome.first), (pair.second, outcome.second)):
            stands = f'"claim_id": "{last_claim(task)}"' in outcome.rows.get(task, "") and (
                '"finished_at": null' in outcome.rows[task]
                and '"handed_over": false' in outcome.rows[task]
            )
            if name in RELEASES and answers.get(task) is not None and stands:
                yield f"the release of task {task} is lost"
        if outcome.second.get(task) is AGAIN:
            yield f"the second was never answered for task {task}"


def check(stage: Stage, pair: Pair) -> Iterator[str]:
    """Say what goes wrong with a pair in each way in which the first may end."""
    outcome, waited, passed_over = stage.overlap(pair)
    orders = stage.orders(pair, outcome, second_is_later=waited or passed_over)
    yield from wrong(pair, outcome, orders)
    statement, is_of_rows = STATEMENTS[pair.second], pair.situation != "no row"
    if waited and statement.passes_over and is_of_rows and pair.first != "shorter history":
        yield "it waited for a row, which it is to pass over"
    if waited and not statement.patient:
        impatient, *_ = stage.overlap(pair, lock_timeout=LOCK_TIMEOUT)
        yield from wrong(pair, impatient, orders)
    if waited or passed_over:
        rolled_back, *_ = stage.overlap(pair, commits=False)
        alone = stage.alone(pair, 1)
        rolled_back = rolled_back._replace(first=alone.first)
        for found in differences(pair, rolled_back, [alone]):
            yield f"after a ROLLBACK of the first {found}"


def wrong(pair: Pair, outcome: Outcome, orders: Sequence[Outcome]) -> Iterator[str]:
    yield from broken(pair, outcome)
    for difference in differences(pair, outcome, orders):
        yield f"in neither order {difference}"


def differences(pair: Pair, outcome: Outcome, others: Sequence[Outcome]) -> list[str]:
    """Say for which tasks an outcome is as none of the others, and in what it differs from them."""
    found = []
    for task in (*TASKS, "replicas", "jobs"):
        texts = [" ".join(each.of(task)) for each in (outcome, *others)]
        words, *others_words = (text.split(", ") for text in texts)
        if words not in others_words:
            only = [[word for word in words if word not in other] for other in others_words]
            found.append(f"would task {task} have {', and not '.join(map(str, only))}")
    return found


def follows(second: str, first: str) -> bool:
    """Tell whether a statement can be in the way of another one."""
    if second in REPLICAS or first in REPLICAS:
        return first in LOOKING_AT_REPLICAS and second in LOOKING_AT_REPLICAS
    return second != "release in doubt" or first in CLAIMS


def wrong_pairs(stage: Stage, pairs: Sequence[Pair]) -> list[str]:
    found = []
    for pair in pairs:
        try:
            found += [f"{pair}: {what}" for what in check(stage, pair)]
        except Exception as error:  # noqa: BLE001  # each is a finding
            found.append(f"{pair}: {error!r}")
    return found


@pytest.mark.parametrize("second", ["claim", "claims", "releases", "hand-over"])
@pytest.mark.parametrize("first", ["claim", "claims", "takeover"])
def test_claims_and_releases_that_overlap_are_as_one_after_the_other(
    stage: Stage, first: str, second: str
) -> None:
    pairs = [Pair(situation, first, second) for situation in STATEMENTS[first].writes_in]
    assert stage.changes(pairs[0])
    assert not wrong_pairs(stage, pairs)


@pytest.mark.nightly
@pytest.mark.parametrize("first", CHANGING)
def test_two_statements_that_overlap_are_as_one_after_the_other(stage: Stage, first: str) -> None:
    found = []
    for situation in STATEMENTS[first].writes_in:
        pairs = [Pair(situation, first, each) for each in STATEMENTS if follows(each, first)]
        assert stage.changes(pairs[0]), f"{first} changes nothing in the situation {situation!r}"
        found += wrong_pairs(stage, [*pairs, Pair(situation, first, first, repeated=True)])
    assert not found, f"{len(found)} findings\n" + "\n".join(found)


# Each batch with itself and with the others that find the same rows. The rows are asked for in the
# opposite order, and somebody else has the one in the middle: each of the two could have one that
# the other waits for.
CROSSING = [
    Pair(situation, first, second)
    for first in BATCHES
    for second in BATCHES
    for situation in STATEMENTS[first].writes_in
    if situation in STATEMENTS[second].writes_in and first <= second
]
# The batches that each replica sends all the time.
OFTEN = {"claims", "releases"}


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, marks=() if {pair.first, pair.second} <= OFTEN else pytest.mark.nightly)
        for pair in CROSSING
    ],
    ids=str,
)
def test_batches_in_opposite_orders_never_wait_for_each_other(stage: Stage, pair: Pair) -> None:
    assert not list(check_crossing(stage, pair))


def check_crossing(stage: Stage, pair: Pair) -> Iterator[str]:
    first, second = pair.askings(tasks=TASKS)
    stage.restore(stage.first, pair.situation)
    try:
        with stage.first.transaction(force_rollback=True):
            if pair.situation == "no row":
                add_task(stage.first, TASKS[1])
            else:
                stage.first.execute("SELECT FROM task_lock WHERE task_name = %s FOR UPDATE", ["m"])
            sent = [stage.send(each, which)[0] for which, each in enumerate((first, second))]
        for each in sent:
            each.result(60)
    except TaskLockError as error:  # a deadlock, in the end
        yield repr(error)
    for asking in (first, second):
        asking.send_in(stage.sessions[0])
    for task in TASKS:
        if len(granted(first.answers, task) | granted(second.answers, task)) > 1:
            yield f"task {task} was granted twice"
        if AGAIN in (first.answers[task], second.answers[task]):
            yield f"task {task} was passed over for ever"


# Mistakes in the statements: what stands there, what is put in its place, and where it is found.
LOCKED_IN_ORDER = "ORDER BY lock.task_name FOR NO KEY UPDATE OF lock"
# Without an order, the planner chooses one, which may be the same for both.
AS_ASKED_FOR = "ORDER BY strpos(%(many)s::json::text, asked.claim_id::text)"
MISTAKES = {
    "claims wait for rows": ("SKIP LOCKED", "", check, Pair("over", "claim", "claims")),
    "releases wait for rows": ("SKIP LOCKED", "", check, Pair("running", "pause", "releases")),
    "renewals wait for rows": ("SKIP LOCKED", "", check, Pair("running", "pause", "renewal")),
    "the wait for a row has no limit": (
        "set_config('lock_timeout'",
        "set_config('travel.nothing'",
        check,
        Pair("over", "claim", "claim"),
    ),
    "first claims are inserted as they were asked for": (
        "ORDER BY asked.task_name",
        AS_ASKED_FOR,
        check_crossing,
        Pair("no row", "claims", "claims"),
    ),
    "claims lock rows as they were asked for, and wait": (
        f"{LOCKED_IN_ORDER} SKIP LOCKED",
        f"{AS_ASKED_FOR} FOR NO KEY UPDATE OF lock",
        check_crossing,
        Pair("over", "claims", "claims"),
    ),
    "a first claim takes over the row of another one": (
        "ON CONFLICT DO NOTHING",
        "ON CONFLICT (task_name) DO UPDATE SET claim_id = excluded.claim_id",
        check,
        Pair("no row", "claim", "claim"),
    ),
    "a run that was handed over meanwhile has died": (
        "AND (NOT lock.handed_over) = died",
        "",
        check,
        Pair("dead", "hand-over", "giving up"),
    ),
    "stored runs wait for jobs": (
        "FOR NO KEY UPDATE OF job SKIP LOCKED",
        "FOR NO KEY UPDATE OF job",
        check,
        Pair("over", "stored runs", "stored runs"),
    ),
    "stored runs wait for rows": (
        "FOR NO KEY UPDATE OF lock SKIP LOCKED",
        "FOR NO KEY UPDATE OF lock",
        check,
        Pair("over", "pause", "stored runs"),
    ),
}


TELLING = dict.fromkeys(pair for _, _, find, pair in MISTAKES.values() if find is check)


@pytest.mark.parametrize("pair", TELLING, ids=str)
def test_a_pair_in_which_mistakes_are_found_is_as_one_after_the_other(
    stage: Stage, pair: Pair
) -> None:
    assert not list(check(stage, pair))


@contextmanager
def mistaken(stage: Stage, there: str, instead: str) -> Iterator[None]:
    """Let all statements be with a mistake."""
    as_it_is = Statement.__init__
    found = 0

    def init(statement: Statement, template: str, *more: Any) -> None:
        nonlocal found
        found += template.count(there)
        as_it_is(statement, template.replace(there, instead), *more)

    with patch.object(Statement, "__init__", init):
        made_once.cache_clear()
        stage.forget()
        try:
            yield
        finally:
            made_once.cache_clear()
            stage.forget()
    assert found, "it is in no statement"


@pytest.mark.nightly  # a test of the tests
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_statements_is_found(stage: Stage, mistake: str) -> None:
    there, instead, find, pair = MISTAKES[mistake]
    with mistaken(stage, there, instead):
        try:
            found = next(find(stage, pair), "")
        except TaskLockError as error:
            found = repr(error)
    print(found)
    assert found
