"""The settings that a replica gets when it begins."""

from __future__ import annotations

from dataclasses import dataclass

# Name of the file that has the one-off jobs.
ONE_OFFS = "one_offs.json"


@dataclass(frozen=True)
class Settings:
    """The settings of a replica.

    :ivar start_after: seconds to wait first
    :ivar loop: how it ends, if it runs on an event loop; see ``Newcomer``
    :ivar pool: how its worker processes start; see ``Newcomer``
    :ivar far: whether its clock is so far off that it has no tasks with exact run times
    :ivar locks: where locks are claimed, through a proxy
    :ivar one_offs: file with the one-off jobs
    :ivar clock_offset: what to add to the server's wall clock time for the monotonic one
    """

    start_after: float
    loop: str
    pool: str
    far: bool
    locks: str
    one_offs: str
    clock_offset: float

    @property
    def apart(self) -> bool:
        """Whether some tasks have an executor of their own: a pool of processes, or of threads.

        A plain function on an event loop would outlive the loop's end.
        """
        return bool(self.pool or self.loop)
