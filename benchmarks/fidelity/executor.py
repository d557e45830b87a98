"""A replica's executor, as far as it looks at rows: the library's own parts, in travelled time.

Which tasks a replica registers and when, what is overdue, and what runs in another replica's
place: this is decided by the modules that ship. What stands in for others is their surroundings:
the client, which sends the statements that ship on the travelling connection, and the scheduler,
which has the one job of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from apscheduler.job import Job as SchedulerJob
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.base import STATE_RUNNING

from apscheduler_tasklock._database.rejections import Rejections
from apscheduler_tasklock._database.sequences import Statement, Statements, ask_here
from apscheduler_tasklock._runs import claim_request
from apscheduler_tasklock._runs.deferred_runs import DeferredRuns
from apscheduler_tasklock._runs.executor_jobs import ExecutorJobs
from apscheduler_tasklock._runs.known_tasks import KnownTasks
from apscheduler_tasklock._runs.registration import Registrar
from apscheduler_tasklock._runs.skipped_jobs import SkippedJobsLog
from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock._runs.tasks import Tasks
from apscheduler_tasklock._runs.watch import Watch
from apscheduler_tasklock.options import LockOptions
from benchmarks.fidelity.trace import Fire
from tests.support.waist import (
    ClaimRequest,
    JobKey,
    LockProtocol,
    Message,
    ReadTasks,
    TaskRow,
    Timings,
)

Submit = Callable[[Submission, Callable[[], None]], None]


def job() -> None:
    """Stand for the job, which the simulation lets run."""


class TravellingOutage:
    """Tells whether a run that looks dead is believed to be."""

    def __init__(self, stable: Callable[[], bool]) -> None:
        self._is_stable = stable

    @property
    def stable(self) -> bool:
        """Whether rows are believed."""
        return self._is_stable()


def _look_at_no_rights() -> Statements[None]:
    """Do nothing, because the tables have all rights."""
    yield from ()


class TravellingClient:
    """Sends what a look asks for, as a user of a replica and its database.

    :param cursor: returns the cursor of the statements
    :param protocol: the replica's protocol
    :param stable: tells whether the replica has been there long enough to believe the rows
    """

    def __init__(
        self, cursor: Callable[[], Any], protocol: LockProtocol, stable: Callable[[], bool]
    ) -> None:
        self._cursor = cursor
        self._protocol = protocol
        self.outage = TravellingOutage(stable)
        self.rejections = Rejections()
        self.settings = SimpleNamespace(timings=Timings())
        self.database = self
        self.rights = SimpleNamespace(look=_look_at_no_rights)

    def ask(self, statement: Statement) -> Any:
        """Ask at once."""
        return statement(self._cursor())

    def reading(self, names: Sequence[str], always: Sequence[str] = ()) -> Statement:
        """Return the statement that reads the rows which call for something."""
        return lambda cursor: self._protocol.execute(cursor, ReadTasks(names, always))[0]

    def carrying_out(self, message: Message[Any]) -> Statement:
        """Return the statement that carries out a message."""
        return partial(self._protocol.execute, message=message)


class OneJob:
    """A scheduler with one job, as an executor's adapter shows it.

    :param next_run_time: returns the job's next run time
    """

    timezone = timezone.utc
    awaits_nothing = None

    def is_shared(self, _jobstore: str) -> bool:
        """Say that the job is in a store of this replica's own."""
        return False

    def __init__(self, name: str, trigger: Any, next_run_time: Callable[[], datetime]) -> None:
        self.jobstores = {"default": MemoryJobStore()}
        self._next_run_time = next_run_time
        self._job = SchedulerJob(
            self,  # whose time zone it needs
            id=name,
            func=job,
            args=(),
            kwargs={},
            name=name,
            trigger=trigger,
            executor="default",
            misfire_grace_time=None,
            coalesce=True,
            max_instances=1,
            next_run_time=None,
        )
        self._job._jobstore_alias = "default"

    def job(self, _job_id: str, _jobstore: str) -> Any:
        """Return the job."""
        self._job._modify(next_run_time=self._next_run_time())
        return self._job

    def jobs_of(self, _jobstore: str) -> list[Any]:
        """Return the jobs of the store."""
        return [self.job("", "")]


class Jobs(ExecutorJobs):
    """The job for a look. The measured rule looks after its dead runs."""

    def submission_for(self, key: JobKey, dead: TaskRow) -> Submission | None:
        """Return ``None``."""


class ReplicaExecutor:
    """The looks of one replica at the rows.

    :param options: options of the job's lock
    :param scheduler: the scheduler with the job
    :param client: sends the statements
    :param submit: submits a standby run
    :param tell_overdue: called if the job is overdue
    :param clock: the replica's clock, in seconds since 1970
    """

    def __init__(
        self,
        options: LockOptions,
        scheduler: OneJob,
        client: Any,
        submit: Submit,
        tell_overdue: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        adapter: Any = scheduler
        self._scheduler = scheduler
        self.jobs = Jobs(
            adapter,
            Tasks(options, {}, "", "fidelity"),
            run_unlocked=False,
            logger_name=lambda: __name__,
            submit_again=submit,
            notices=SkippedJobsLog,
            clock=clock,
        )
        known = KnownTasks()
        self._client = client
        self._watch = Watch(
            client,
            known,
            self.jobs,
            DeferredRuns(),
            Registrar(client, known, self.jobs.registration, self.jobs.has_next_run),
            lambda: STATE_RUNNING,
            5.0,
            lambda *_: None,
            lambda _: tell_overdue(),
        )

    def look(self) -> None:
        """Look at the rows twice, as a replica does every few seconds.

        A look that finds the job overdue by another schedule is followed by its registration.
        """
        for _ in range(2):
            ask_here(self._watch.look(), self._client.ask)

    def submission(self, run_time: datetime) -> Submission:
        """Return the submission of a run time."""
        [found] = self._scheduler.jobs_of("default")
        task = self.jobs.resolve(found, "default")
        return self.jobs.submission(found, "default", task, [run_time])


def request_of(fire: Fire) -> ClaimRequest:
    """Return the claim's request for a submission."""
    submission = fire.submission
    assert submission is not None
    asked = claim_request.request_of(submission, submission.run_times[0], uuid4())
    assert isinstance(asked, ClaimRequest)
    return asked
