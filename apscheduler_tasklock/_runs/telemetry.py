"""Telemetry of a run. The class here measures nothing, its subclass in ``otel`` measures runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from apscheduler_tasklock._lock.outcomes import RunOutcome
from apscheduler_tasklock._lock.protocol_messages import Refusal
from apscheduler_tasklock.lock import HeldLock

_NOTHING_TO_DO = nullcontext()


class RunTelemetry:
    """Measures one run, from its claim to its end. This base class measures nothing.

    No method raises, because telemetry must not change what happens to a run.
    """

    def claimed(self, wanted_at: float, claimed: HeldLock | Refusal | None) -> None:
        """Note the outcome of a claim.

        :param wanted_at: when the claim was first asked for, on the monotonic clock
        :param claimed: the lock, the refusal, or ``None`` if the task has no row
        """

    def claim_failed(self, wanted_at: float) -> None:
        """Note that a claim was neither granted nor refused.

        :param wanted_at: when the claim was first asked for, on the monotonic clock
        """

    def running(self, held: HeldLock, run_time: float) -> AbstractContextManager[None]:
        """Measure the job that runs during the block, and make its span the current span.

        :param run_time: in seconds since 1970
        """
        return _NOTHING_TO_DO

    def raised(self, exception: BaseException) -> None:
        """Note the exception that the job has raised."""

    def ended(self, end: RunOutcome) -> None:
        """Note how the run has ended. Called after the release, which this must not delay."""

    def lost(self) -> None:
        """Count a lock that was lost."""

    def skipped(self, reason: str) -> None:
        """Count a run time that is not run here for another reason than a refused claim.

        :param reason: ``"misfire"``, ``"error"`` or ``"shutdown"``
        """
