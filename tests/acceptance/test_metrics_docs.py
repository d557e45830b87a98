"""What docs/metrics.md shows is run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

# What is done after each example.
PROVE = [
    "print(type(metrics.get_meter_provider()).__module__)",
    "",
    "",
    "scheduler.start(); scheduler.shutdown()",
]
# One page, in place of all that are ever asked for. A read has three seconds, which a machine that
# stands still may take.
ONE_PAGE = """\
    import contextlib, threading, urllib.error, urllib.request
    from tests.support.polling import eventually

    def page():
        with contextlib.suppress(urllib.error.HTTPError):
            return urllib.request.urlopen(server.url).read()

    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert b"tasklock_task_overdue" in eventually(page)
    server.shutdown()
"""


def examples(checkout: Path) -> list[str]:
    text = (checkout / "docs/metrics.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(4))
def test_an_example_runs(checkout: Path, database_url: str, number: int) -> None:
    example = examples(checkout)[number].replace(
        "postgresql://app:secret@localhost/app", database_url
    )
    example = example.replace("port=9464", "port=0").replace(
        "    server.serve_forever()", f"{ONE_PAGE}locks.close()"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{example}\n{PROVE[number]}"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_the_examples_are_these(checkout: Path) -> None:
    assert len(examples(checkout)) == len(PROVE)


def test_every_instrument_and_alert_is_in_the_tables(checkout: Path) -> None:
    text = (checkout / "docs/metrics.md").read_text()
    code = [
        (checkout / "apscheduler_tasklock" / module).read_text()
        for module in ("_runs/otel.py", "metrics.py")
    ]
    names = set(re.findall(r'"(tasklock\.[a-z_.]+)"', "".join(code)))
    assert len(names) > 12
    assert {name for name in names if f"`{name}`" not in text} == set()
    rules = (checkout / "observability/prometheus-rules.yml").read_text()
    alerts = set(re.findall(r"alert: (\w+)", rules))
    assert set(re.findall(r"^\| `(TaskLock\w+)`", text, re.MULTILINE)) == alerts
