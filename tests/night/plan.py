"""The jobs of the night, and the replicas that have them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

# The alias of the job store, which the names of its jobs' tasks begin with.
STORE = "shared"

# The two applications. The second one has coroutines, leader mode and a namespace of its own.
SHOP, BATCH = "shop", "batch"
NAMESPACE = {SHOP: "", BATCH: "batch/"}

# The release that the shop runs at first, and the one that is rolled out.
OLD, NEW = "2.7", "2.8"

# Seconds of the fleet's short schedule.
LEASE = 5.0
LEADER_LEASE = 5.0
POLL_INTERVAL = 1.0
GRACE = 6.0


@dataclass(frozen=True)
class NightJob:
    """A job.

    :ivar every: seconds between its run times; ``None``: it runs once, ``first`` seconds after the
        night's begin
    :ivar takes: seconds that a run takes
    :ivar trigger: ``"interval"``, ``"cron"``, ``"or"`` or ``"date"``
    :ivar lock: options of its lock
    :ivar releases: the releases of the application that have it; ``()``: all
    :ivar every_anew: seconds between its run times in the new release
    :ivar in_store: whether it is a job of the store that all replicas share
    """

    name: str
    every: int | None
    takes: float
    trigger: str = "interval"
    application: str = SHOP
    first: int = 0
    lock: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    releases: tuple[str, ...] = ()
    every_anew: int | None = None
    in_store: bool = False

    @property
    def task(self) -> str:
        """The task's name."""
        before = f"{STORE}:" if self.in_store else NAMESPACE[self.application]
        return before + self.name

    def is_in(self, release: str) -> bool:
        """Return whether a release of its application has it."""
        return not self.releases or release in self.releases

    def period(self, release: str = OLD) -> int | None:
        """Return the seconds between its run times in a release."""
        return self.every_anew if release == NEW and self.every_anew else self.every

    def made_trigger(self, begin: datetime, release: str) -> Any:
        """Return its trigger. All replicas have the same run times.

        :param begin: the night's begin, a whole minute
        """
        every = self.period(release)
        if every is None:
            return DateTrigger(begin + timedelta(seconds=self.first))
        if self.trigger == "cron":
            return CronTrigger(second=f"*/{every}", timezone="UTC")
        if self.trigger == "or":
            half = CronTrigger(second=f"{every}", timezone="UTC")
            return OrTrigger([CronTrigger(second="0", timezone="UTC"), half])
        start = begin + timedelta(seconds=self.first)
        return IntervalTrigger(seconds=every, start_date=start, timezone="UTC")

    def due_times(self, begin: float, until: float) -> list[float]:
        """Return the run times of the old release's trigger from the begin of the night on."""
        if self.every is None:
            return [begin + self.first] if begin + self.first <= until else []
        first = begin + (self.first if self.trigger == "interval" else 0)
        count = int((until - first) // self.every) + 1
        return [first + place * self.every for place in range(max(0, count))]


A_RETRY = {"retries": 1, "retry_delay": 4}
LONG_AWAY = 7 * 3600

JOBS = (
    NightJob("mail-queue", 1, 0.1),
    NightJob("sync-prices", 15, 0.5, "cron", lock=A_RETRY),
    NightJob("import-orders", 10, 2.0, "cron"),
    NightJob("search-index", 15, 4.0),
    NightJob("thumbnails", 6, 0.5),
    NightJob("reports-mail", 12, 0.3, "cron"),
    NightJob("warehouse-export", 5, 0.3, lock={"max_lock": 12}),
    NightJob("daily-report", 30, 9.0, first=23, lock={"failover": True}),
    NightJob("nightly-backup", 60, 18.0, first=47, lock={"failover": False}),
    NightJob("clean-up", 5, 0.2),
    NightJob("remind-customers", 10, 1.0),
    NightJob("archive", 20, 30.0, first=5, lock={"max_lock": 120}),
    NightJob("price-alerts", 2, 0.1, options={"misfire_grace_time": 1}),
    NightJob("audit", 30, 0.2, "or"),
    NightJob("old-catalog", 10, 0.2, releases=(OLD,)),
    NightJob("new-catalog", 10, 0.2, releases=(NEW,)),
    NightJob("stock-levels", 10, 0.2, "cron", every_anew=15),
    NightJob("invoices", 86_400, 1.0, first=LONG_AWAY),
    NightJob("year-end", 86_400, 1.0, first=LONG_AWAY),
    NightJob("welcome-mail", None, 0.5, "date", first=10),
    NightJob("birthday-mail", None, 0.5, "date", first=3600),
    NightJob("rollup", 4, 0.5, application=BATCH),
    NightJob("totals", 8, 1.0, application=BATCH),
    NightJob("big-copy", 60, 25.0, application=BATCH, first=10, lock={"max_lock": 300}),
    NightJob("statements", 20, 3.0, application=BATCH),
    NightJob("ledger-check", 10, 0.3, application=BATCH, lock={"failover": True}),
    NightJob("vacuum", 86_400, 1.0, application=BATCH, first=LONG_AWAY),
    NightJob("digest", 10, 0.5, in_store=True),
    NightJob("feed", 12, 0.5, in_store=True),
    NightJob("loyalty-points", 10, 0.5, in_store=True),
    NightJob("newsletter", None, 1.0, "date", first=25, in_store=True),
    NightJob(
        *("invoice-4711", None, 0.5, "date"),
        first=LONG_AWAY,
        options={"misfire_grace_time": 5},
        in_store=True,
    ),
    NightJob("lost-and-found", 3600, 0.5, first=30, in_store=True),
)
BY_TASK = {job.task: job for job in JOBS}
assert len(BY_TASK) == len(JOBS)

# The stored job whose function no replica has.
UNKNOWN_FUNCTION = "lost-and-found"


def jobs_of(application: str, release: str) -> list[NightJob]:
    """Return the jobs that a release of an application has."""
    return [job for job in JOBS if job.application == application and job.is_in(release)]
