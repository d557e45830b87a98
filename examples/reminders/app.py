"""Reminders: added, listed and cancelled on any worker, and each sent once. See README.md.

pip install "../..[demo]" fastapi uvicorn
python app.py
"""

import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from datetime import datetime, timedelta, timezone
from html import escape
from typing import Annotated, Any
from urllib.parse import parse_qsl
from uuid import uuid4

import psycopg
import uvicorn
from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore, TaskLockOptionError, upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer

VARIABLE = "TASKLOCK_DATABASE_URL"
LONGEST = 366 * 86400  # seconds

CREATE = """
    CREATE TABLE IF NOT EXISTS sent (
        id text PRIMARY KEY, text text NOT NULL, worker int NOT NULL,
        sent_at timestamptz NOT NULL DEFAULT now()
    )
"""
# A run that a worker did not survive is run again, so what it does has to bear that.
SEND = "INSERT INTO sent (id, text, worker) VALUES (%s, %s, %s) ON CONFLICT (id) DO NOTHING"
SENT = "SELECT id, text, worker FROM sent ORDER BY sent_at DESC LIMIT 20"


def send(reminder_id: str, text: str) -> None:
    """Stand for the mail that must not be sent twice: write the reminder into a table."""
    with psycopg.connect(os.environ[VARIABLE]) as connection:
        connection.execute(SEND, [reminder_id, text, os.getpid()])
    print(f"worker {os.getpid()} sends {reminder_id}: {text}\n", end="", flush=True)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Run a scheduler in each worker; all of them share the jobs."""
    url = os.environ[VARIABLE]
    scheduler = BackgroundScheduler(
        jobstores={"default": TaskLockJobStore(url, functions=["app."])},
        executors={"default": TaskLockExecutor(url, failover=True)},
        timezone="UTC",
    )
    scheduler.start()
    app.state.scheduler = scheduler
    yield
    scheduler.shutdown()


app = FastAPI(lifespan=lifespan)


async def reminder_of(request: Request) -> tuple[str, float]:
    """Return the text of a form, and in how many seconds it is to be sent."""
    form = dict(parse_qsl((await request.body()).decode(errors="replace")))
    try:
        text, seconds = form["text"], float(form["seconds"])
    except (KeyError, ValueError):
        raise HTTPException(422, "it needs a text, and seconds") from None
    if not 0 <= seconds <= LONGEST:
        raise HTTPException(422, f"seconds must be from 0 to {LONGEST}")
    return text, seconds


Reminder = Annotated[tuple[str, float], Depends(reminder_of)]

# FastAPI runs plain functions in threads, so the event loop never waits for the database.


@app.post("/reminders")
def add(reminder: Reminder) -> dict[str, Any]:
    """Add a reminder, on whichever worker gets this."""
    text, seconds = reminder
    reminder_id = f"reminder-{uuid4().hex[:8]}"
    at = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    try:
        app.state.scheduler.add_job(
            send, "date", run_date=at, args=[reminder_id, text], id=reminder_id, name="reminder"
        )
    except TaskLockOptionError as error:  # a text that PostgreSQL cannot store
        raise HTTPException(422, str(error)) from None
    return {"id": reminder_id, "at": at, "added_by": os.getpid()}


@app.delete("/reminders/{reminder_id}")
def cancel(reminder_id: str) -> dict[str, Any]:
    """Cancel a reminder, on whichever worker gets this."""
    try:
        app.state.scheduler.remove_job(reminder_id)
    except JobLookupError:
        raise HTTPException(404, "there is no such reminder, or it was sent") from None
    return {"id": reminder_id, "cancelled_by": os.getpid()}


@app.get("/reminders")
def reminders() -> dict[str, Any]:
    """List the reminders of all workers."""
    waiting = [
        {"id": job.id, "text": _text_of(job), "at": job.next_run_time}
        for job in app.state.scheduler.get_jobs()
    ]
    with psycopg.connect(os.environ[VARIABLE]) as connection:
        names = ("id", "text", "sent_by")
        sent = [dict(zip(names, row, strict=True)) for row in connection.execute(SENT)]
    return {"waiting": waiting, "sent": sent, "listed_by": os.getpid()}


def _text_of(job: Any) -> Any:
    """Return what a job reminds of; why nobody knows, if its row cannot be read."""
    return job.args[1] if len(job.args) == 2 else str(job.trigger)


@app.get("/", response_class=HTMLResponse)
def page() -> str:
    """Return the page with the form and the lists."""
    found = reminders()
    waiting = [
        f"{one['text']}, " + (f"at {one['at']:%H:%M:%S} UTC" if one["at"] else "paused")
        for one in found["waiting"]
    ]
    sent = [f"{one['text']}, by worker {one['sent_by']}" for one in found["sent"]]
    return f"""<!doctype html><title>Reminders</title>
        <form method="post"><input name="text" placeholder="what" required>
        in <input name="seconds" value="10" size="4"> seconds <button>Remind me</button></form>
        <h2>Waiting</h2>{_listed(waiting)}<h2>Sent</h2>{_listed(sent)}
        <p>Worker {found["listed_by"]} made this page. <a href="/">Again</a>"""


@app.post("/")
def add_by_form(reminder: Reminder) -> RedirectResponse:
    """Add a reminder from the page."""
    add(reminder)
    return RedirectResponse("/", status_code=303)


def _listed(lines: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}' for line in lines)}</ul>"


def main() -> None:
    """Start two workers; without a database of yours, on an embedded PostgreSQL."""
    with ExitStack() as closing:
        if not os.environ.get(VARIABLE):
            server = closing.enter_context(EmbeddedServer())
            os.environ[VARIABLE] = server.url  # for the workers
            print(f"the embedded PostgreSQL is {server.url}", flush=True)
        upgrade(os.environ[VARIABLE])
        with psycopg.connect(os.environ[VARIABLE]) as connection:
            connection.execute(CREATE)
        uvicorn.run("app:app", port=int(os.environ.get("PORT", "8000")), workers=2)


if __name__ == "__main__":
    main()
