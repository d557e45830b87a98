"""The webhook of the page on monitoring sends what it says, for a run that fails."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from apscheduler_tasklock import EVENT_TASK_LOCK_RELEASED
from tests.support.polling import eventually
from tests.support.schedulers import Replica
from tests.support.snippets import snippets


def fail() -> None:
    raise ValueError("no such file")


def test_it_sends_one_message_of_a_run_that_fails_and_none_of_one_that_ends_well(
    make_replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    [block] = [each for each in snippets("python") if "def tell_failure" in each.text]
    replica = make_replica(replica_id="web-1")
    with HTTPServer(("127.0.0.1", 0), Chat) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        monkeypatch.setenv("WEBHOOK_URL", f"http://127.0.0.1:{server.server_port}")
        names = {"EVENT_TASK_LOCK_RELEASED": EVENT_TASK_LOCK_RELEASED}
        exec(block.text, {**names, "scheduler": replica.scheduler})  # noqa: S102  # the page's own
        replica.run_once(print, job_id="well")
        replica.one(EVENT_TASK_LOCK_RELEASED, "well")
        replica.run_once(fail)
        [message] = eventually(lambda: sent)
        server.shutdown()
        serving.join()
    text = message.pop("text")
    assert re.fullmatch(r"job on web-1: error after \d+ s ValueError: no such file", text)
    assert message == {}


def test_a_listener_that_fails_is_told_in_the_log_and_costs_no_other_listener_and_no_run(
    make_replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_event: Any) -> None:
        raise ZeroDivisionError

    replica = make_replica()
    replica.record_nothing()
    told: list[Any] = []
    for listener in (fails, told.append):
        replica.scheduler.add_listener(listener, EVENT_TASK_LOCK_RELEASED)
    for job_id in ("one", "two"):
        replica.run_once(print, job_id=job_id)
    eventually(lambda: len(told) == 2)
    assert {event.outcome for event in told} == {"ok"}
    assert "ZeroDivisionError" in caplog.text
