"""What probes and monitors ask the dashboard: the verdict of ``check``, and the metrics."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from apscheduler_tasklock._words.findings import CRITICAL, SEVERITIES, severity_of, unread
from apscheduler_tasklock.dashboard.reads import SharedReads, in_words_of_a_page
from apscheduler_tasklock.errors import TaskLockError
from apscheduler_tasklock.locks import TaskLocks, read_findings
from apscheduler_tasklock.metrics import prometheus_text
from apscheduler_tasklock.status import Finding


def verdict_of(reads: SharedReads, namespace: str) -> tuple[HTTPStatus, dict[str, Any]]:
    """Return the verdict of ``check``: a status, which is 503 from critical on, and its values.

    What cannot be read now is unknown, whatever was read before.
    """
    age = 0.0
    try:
        reading = reads.read(("verdict",), lambda locks: _findings(locks, namespace))
        said, age = reading.error, reading.age
    except TaskLockError as error:
        said = in_words_of_a_page(error)
    findings = [unread(said)] if said else list(reading.value or ())
    severity = severity_of(findings)
    is_up = severity < SEVERITIES[CRITICAL]
    status = HTTPStatus.OK if is_up else HTTPStatus.SERVICE_UNAVAILABLE
    return status, {"exit_status": severity, "findings": findings, "age": round(age, 3)}


def _findings(locks: TaskLocks, namespace: str) -> list[Finding]:
    """Return the findings that the command ``check`` would tell."""
    patterns = (f"{namespace}*",) if namespace else ()
    _, findings = read_findings(locks, *patterns, namespace=namespace, in_words=in_words_of_a_page)
    return findings


def metrics_of(reads: SharedReads, namespace: str) -> tuple[HTTPStatus, str]:
    """Return the metrics as Prometheus' text, or why they cannot be read."""
    try:
        reading = reads.read(("metrics",), lambda locks: prometheus_text(locks, namespace))
        said = reading.error
    except TaskLockError as error:
        said = in_words_of_a_page(error)
    if said:  # because old values would look like new ones
        return HTTPStatus.SERVICE_UNAVAILABLE, f"{' '.join(said.split())}\n"
    return HTTPStatus.OK, reading.value or ""
