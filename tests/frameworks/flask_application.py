"""A Flask application, whose tests copy it, serve it and stop it in the middle of a job."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from flask import Flask, current_app

from apscheduler_tasklock.flask import TaskLockScheduler

logging.basicConfig(level=logging.INFO)


def say(what: str) -> None:
    print(f"process {os.getpid()} {what}\n", end="", flush=True)


say("imports")
app = Flask(__name__)
app.config.from_prefixed_env()
scheduler = TaskLockScheduler(app)


@scheduler.task("interval", seconds=1, start_date="2026-01-01")
def tick() -> None:
    say(f"ticks in {current_app.import_name}")


@scheduler.task("date", misfire_grace_time=None)
def long() -> None:
    say("begins")
    while not Path("go").exists():
        time.sleep(0.01)
    say("ends")


@app.get("/")
def index() -> str:
    return "served"


if __name__ == "__main__":
    app.run(debug="DEBUG" in os.environ, port=int(os.environ["PORT"]))
