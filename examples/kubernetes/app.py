"""An application with probes and a graceful stop, for a container.

A probe asks this process alone: a database that is unavailable makes no replica unhealthy, as a
restart would not bring it back. On SIGTERM nothing new is claimed, what runs has time to end, and
the rest is handed over.
"""

import json
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockExecutor

# Seconds that jobs have to end; the manifest's terminationGracePeriodSeconds is 10 longer.
DRAIN_TIMEOUT = 50

executor = TaskLockExecutor(os.environ["TASKLOCK_DATABASE_URL"], failover=True)
scheduler = BackgroundScheduler(executors={"default": executor})


def report() -> None:
    """Do what has to be done once on all replicas together."""
    print("report", flush=True)


class Probes(BaseHTTPRequestHandler):
    """Answers /live and /ready with 200 or 503, and says what is degraded."""

    timeout = 5

    def do_GET(self) -> None:
        """Answer a probe."""
        health = executor.health()
        checks = {"/live": health.live, "/ready": health.ready}
        found = checks.get(self.path)
        body = json.dumps({"ok": found, "degraded": health.degraded}).encode()
        self.send_response(404 if found is None else 200 if found else 503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: there is a probe every few seconds."""


def main() -> None:
    """Run until SIGTERM."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    scheduler.add_job(report, "interval", seconds=2, id="report")
    scheduler.start()
    address = (os.environ.get("PROBE_HOST", "0.0.0.0"), int(os.environ.get("PROBE_PORT", "8080")))  # noqa: S104  # the container's own network
    probes = ThreadingHTTPServer(address, Probes)
    threading.Thread(target=probes.serve_forever, daemon=True).start()
    stopped.wait()
    executor.drain(timeout=DRAIN_TIMEOUT)
    scheduler.shutdown(wait=False)
    probes.shutdown()


if __name__ == "__main__":
    main()
