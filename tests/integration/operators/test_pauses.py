"""A process that is paused while the database answers, as a container or a laptop can be."""

from __future__ import annotations

import signal
import subprocess
import sys

import psycopg
import pytest

from tests.support.polling import eventually

# Asks for something that takes as long as the test wants. An answer may take a third of the claim's
# timeout; a wait that is limited has a limit of its own.
ASKS = """
import logging, sys, time
from tests.support.waist import LockClient
from apscheduler_tasklock._lock.replica import LockSettings

logging.basicConfig(level=logging.INFO, stream=sys.stdout)
locks = LockClient(LockSettings(sys.argv[1], "paused", claim_timeout=9))


def wait(cursor):
    cursor.execute("SELECT pg_advisory_xact_lock(1)")


locks.ask(wait) if sys.argv[2] == "ask" else locks.ask(wait, time.monotonic() + 3, tried_for=2.4)
print("answered")
"""
WAITS = (
    "SELECT state_change FROM pg_stat_activity"
    " WHERE query LIKE '%pg_advisory_xact_lock(1)%' AND pid <> pg_backend_pid()"
)
LIMIT = 3


@pytest.mark.nightly
@pytest.mark.parametrize("call", ["ask", "a limit"])
def test_an_answer_that_came_during_a_pause_is_no_outage(
    call: str, database_url: str, connection: psycopg.Connection
) -> None:
    connection.execute("SELECT pg_advisory_lock(1)")
    with subprocess.Popen(
        [sys.executable, "-c", ASKS, database_url, call], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            eventually(lambda: connection.execute(f"{WAITS} AND wait_event_type = 'Lock'").rowcount)
            process.send_signal(signal.SIGSTOP)
            connection.execute("SELECT pg_advisory_unlock(1)")
            answered = f"{WAITS} AND state = 'idle' AND state_change < now() - interval '{LIMIT} s'"
            eventually(lambda: connection.execute(answered).rowcount)
            process.send_signal(signal.SIGCONT)
            said = process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert said.splitlines()[-1] == "answered"
    assert "unavailable" not in said
