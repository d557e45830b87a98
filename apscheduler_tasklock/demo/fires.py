"""The fires: for which run times each replica asked for the lock."""

from __future__ import annotations

from apscheduler_tasklock.demo.fleet import Event


class Fires:
    """Collects the fires that the replicas tell of."""

    def __init__(self) -> None:
        self._asked: dict[str, list[float]] = {}
        self._of_replicas: set[tuple[int, str, float]] = set()

    def take_in(self, event: Event) -> None:
        """Take in what a replica told, which is a fire if its claim was granted or refused."""
        if event.kind not in ("granted", "refused"):
            return
        self._asked.setdefault(event.task, []).append(event.run_time)
        # A takeover runs the window of another fire, which has been counted: the dead holder's.
        # A fire may be refused, and asked again when the holder has died: hence the set.
        if event.reason != "takeover":
            self._of_replicas.add((event.replica, event.task, event.run_time))

    def run_times(self, task: str) -> list[float]:
        """Return the run times that any replica asked the lock for, in seconds since 1970."""
        return self._asked.get(task, [])

    def __len__(self) -> int:
        """Return how many fires there were: how often the jobs would have run without the lock."""
        return len(self._of_replicas)
