"""What is measured and traced of a run time: here nothing, in ``otel`` by OpenTelemetry."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from apscheduler_tasklock._lock.messages import Refusal, RunEnd
from apscheduler_tasklock.lock import HeldLock

_NOTHING_TO_DO = nullcontext()


class RunTelemetry:
    """What is measured of one run time. This one measures nothing.

    No method raises: what is measured must not change what happens.
    """

    def claimed(self, wanted_at: float, claimed: HeldLock | Refusal | None) -> None:
        """Note what a claim was answered.

        :param wanted_at: when the claim was wanted, on the monotonic clock
        :param claimed: as ``LockClient.claim`` returned it
        """

    def claim_failed(self, wanted_at: float) -> None:
        """Note that a claim was not decided; for ``wanted_at`` see :meth:`claimed`."""

    def running(self, held: HeldLock, run_time: float) -> AbstractContextManager[None]:
        """Measure the job that runs within, and make its span the current one.

        :param run_time: in seconds since 1970
        """
        return _NOTHING_TO_DO

    def raised(self, exception: BaseException) -> None:
        """Note the exception that the job has raised."""

    def ended(self, end: RunEnd) -> None:
        """Note that the run has ended and how. Called after its release, which it cannot delay."""

    def lost(self) -> None:
        """Count a lock that was lost."""

    def skipped(self, reason: str) -> None:
        """Count a run time that is not run here although nobody has refused it.

        :param reason: ``"misfire"``, ``"error"`` or ``"shutdown"``
        """
