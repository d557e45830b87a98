"""Collects the fires: the run times for which replicas asked for the lock."""

from __future__ import annotations

from apscheduler_tasklock.demo.fleet import ReplicaEvent


class Fires:
    """Collects the fires from the events of the replicas."""

    def __init__(self) -> None:
        self._asked: dict[str, list[float]] = {}
        self._of_replicas: set[tuple[int, str, float]] = set()

    def take_in(self, event: ReplicaEvent) -> None:
        """Count an event of a replica as a fire if a claim was granted or refused.

        The end of the demo may hand a claim over before its job begins. The claim's run time then
        does not count as due, unless another replica is granted this run time.
        """
        if event.reason == "handed over":
            asked = self._asked.get(event.task, [])
            self._asked[event.task] = [at for at in asked if at != event.run_time]
        if event.kind not in ("granted", "refused"):
            return
        self._asked.setdefault(event.task, []).append(event.run_time)
        # A takeover is no fire, because the fire of the dead holder has been counted. The set
        # counts a refused fire once, although the replica may ask for the lock again after a death.
        if event.reason != "takeover":
            self._of_replicas.add((event.replica, event.task, event.run_time))

    def run_times(self, task: str) -> list[float]:
        """Return the run times for which any replica asked for the lock, in seconds since 1970."""
        return self._asked.get(task, [])

    def __len__(self) -> int:
        """Return how many fires there were: how often the jobs would have run without the lock."""
        return len(self._of_replicas)
