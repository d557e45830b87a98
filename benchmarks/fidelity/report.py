"""The figures as text."""

from __future__ import annotations

from benchmarks.fidelity.account import Account
from benchmarks.fidelity.rules import (
    RULES,
    SHORT_GAP_RULES,
    Rule,
    TaskLockRule,
    TaskLockWithFailover,
)
from benchmarks.fidelity.short_gaps import GONE, SCHEDULES, STAYS, STEADY
from benchmarks.fidelity.trace import (
    BETWEEN_ROLLOUTS,
    LONG_DURATION,
    MOST_PERIODS_LATE,
    ROLLOUT_KILLS,
    SHORT_STAY,
    TRACES,
)

# Accounts by trace and rule.
Results = dict[str, dict[str, Account]]

# What is counted, by its name in an account.
COUNTS = {
    "runs": "runs",
    "doubled": "doubled",
    "missed": "missed",
    "overtaken": "overtaken",
    "lost_with_holder": "lost with their holder",
    "overlapping": "overlapping",
    "skipped": "skipped",
    "unattended": "unattended",
}
TRACE_COUNTS = (
    "runs",
    "doubled",
    "missed",
    "lost_with_holder",
    "overlapping",
    "skipped",
    "overtaken",
    "unattended",
)
SHORT_GAP_COUNTS = ("runs", "doubled", "missed", "overlapping", "skipped", "overtaken")

PREFACE = """\
`make fidelity`, seed {seed}: {windows:,} windows in each trace, which is the same for every rule.
The rules' own statements run on a real PostgreSQL whose clock is set.

Where pools are starved, {starved:.0%} of the fires reach their worker up to {late:g} periods late.
Where holders are killed, that happens in the middle of {killed:.0%} of the runs. Where runs are
longer than a period, {long:.0%} of them take {shortest:g} to {longest:g} periods. A rolling
deployment comes every {rollouts[0]:g} to {rollouts[1]:g} periods and replaces one replica after the
other: {stopped:.0%} of the old ones are stopped, and their runs end; the others are killed. With
graceful stops, the jobs are coroutines: a replica is stopped every {stay[0]:g} to {stay[1]:g}
periods, and what it runs is cut short.

Counted are, per 1,000 windows:

- **runs** that came to their end;
- **doubled**: runs of a window that another run had served, whose holder did not die;
- **missed**: windows that nobody ran, although a worker asked for them before the next one was
  due or ran, while no run was going on;
- **lost with their holder**: windows whose run was cut short, since its replica was killed or
  stopped, and that nobody ran again;
- **overlapping**: runs that began while another one was going on;
- **skipped**: windows that were due, or asked for, only while a run was going on;
- **overtaken**: windows that no worker asked for until a later one ran, as on a replica whose clock
  is ahead;
- **unattended**: windows that no worker on any replica asked for in time.

What all of these but the doubled lack of 1,000 fell into the time between two replicas that
fire at different moments of the period, or by clocks that differ: when a job moves from one to the
other, up to 1.9 periods lie between two runs.

The plain table and ShedLock's rule have this library's factors, a lock of at least 0.9 and at most
5 periods. With a shorter maximum, a killed holder costs fewer windows, and a run that outlives it
is doubled. No run here does, hence the same figures for both. The slot lock is a row that is taken
until the next multiple of the period, whatever the job does.

The longest silence is from the end of a run to the start of the next that came to its end, in
periods. A run may die after 2.5 periods, so that with failover it can be more than 3."""


SHORT_GAPS_PREFACE = """\
Three replicas share the run times of a cron trigger; the first one's clock is ahead by so much, and
the last one's behind. Two of them stay for {stays[0]} to {stays[1]} run times and are gone for
{gone[0]} to {gone[1]}. Each run time is a window. The database's clock, where it steps, does so
every {steady} run times, back and forward in turn. The third row is this library as it does with
schedules whose run times differ between replicas: it knows a run time only by how long ago it was.

Counted are the same things as above, per 1,000 run times. When a replica joins whose clock is
ahead, it runs what is due by its clock. It never asks for what was due shortly before, and the
others ask for that too late: as many run times are overtaken as the difference between the clocks
covers."""


def goal_reached(results: Results, short_gaps: Results) -> bool:
    """Tell whether this library did what it promises.

    It ran no window twice, none at the same time as another, and missed none. By default, only
    those are lost whose own holder was cut short; with failover, none.
    """
    for accounts in [*results.values(), *short_gaps.values()]:
        for rule in (TaskLockRule, TaskLockWithFailover):
            figures = accounts[rule.name]
            if figures.doubled or figures.missed or figures.overlapping:
                return False
        if accounts[TaskLockWithFailover.name].lost_with_holder:
            return False
    return True


def markdown(results: Results, short_gaps: Results, windows: int, seed: int) -> str:
    """Return all figures as one table per trace."""
    lines = ["# Fidelity", "", _preface(windows, seed)]
    for trace, accounts in results.items():
        lines += ["", f"## {trace[0].upper()}{trace[1:]}", ""]
        lines += _table(accounts, RULES, TRACE_COUNTS, silence=True)
    preface = SHORT_GAPS_PREFACE.format(stays=STAYS, gone=GONE, steady=STEADY)
    lines += ["", "## Run times with short gaps", "", preface]
    for schedule in SCHEDULES:
        lines += ["", f"### {schedule.name}", ""]
        lines += _table(short_gaps[schedule.name], SHORT_GAP_RULES, SHORT_GAP_COUNTS)
    return "\n".join(lines) + "\n"


def _table(
    accounts: dict[str, Account],
    rules: tuple[type[Rule], ...],
    counts: tuple[str, ...],
    *,
    silence: bool = False,
) -> list[str]:
    heads = [COUNTS[what] for what in counts] + ["longest silence"] * silence
    lines = [f"| rule | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    for rule in rules:
        account = accounts[rule.name]
        cells = [f"{per_thousand(account, what):.1f}".removesuffix(".0") for what in counts]
        cells += [f"{account.silence:.1f}"] * silence
        lines.append(f"| {rule.name} | {' | '.join(cells)} |")
    return lines


def _preface(windows: int, seed: int) -> str:
    everything = TRACES[-1]
    shortest, longest = LONG_DURATION
    return PREFACE.format(
        windows=windows,
        seed=seed,
        starved=everything.starved,
        late=MOST_PERIODS_LATE,
        killed=everything.killed,
        long=everything.long,
        shortest=shortest,
        longest=longest,
        rollouts=BETWEEN_ROLLOUTS,
        stopped=1 - ROLLOUT_KILLS,
        stay=SHORT_STAY,
    )


def per_thousand(account: Account, what: str) -> float:
    """Return one of an account's counts per 1,000 windows."""
    return float(getattr(account, what) * 1000 / account.windows)
