"""The figures as text."""

from __future__ import annotations

from benchmarks.fidelity.account import Account
from benchmarks.fidelity.rules import RULES, TaskLockWithFailover
from benchmarks.fidelity.trace import LONG_DURATION, MOST_PERIODS_LATE, TRACES

# Accounts by trace and rule.
Results = dict[str, dict[str, Account]]

COUNTS = ("runs", "doubled", "lost_with_holder", "missed", "overlapping", "skipped", "unattended")

PREFACE = """\
`make fidelity`, seed {seed}: {windows:,} windows in each trace, which is the same for every rule.
The rules' own statements run on a real PostgreSQL whose clock is set.

Where pools are starved, {starved:.0%} of the fires reach their worker up to {late:g} periods late.
Where holders are killed, that happens in the middle of {killed:.0%} of the runs. Where runs are
longer than a period, {long:.0%} of them take {shortest:g} to {longest:g} periods.

Counted are, per 1,000 windows:

- **runs** that came to their end;
- **doubled**: runs of a window that another run had served, whose holder did not die;
- **missed**: windows that nobody ran to an end, although a worker asked for them before the next
  one was due, while no run was going on;
- **overlapping**: runs that began while another one was going on;
- **skipped**: windows that were due, or asked for, only while a run was going on;
- **unattended**: windows that no worker on any replica asked for in time.

What runs, missed, skipped and unattended lack of 1,000 fell into the time between two replicas that
fire at different moments of the period, or by clocks that differ: when a job moves from one to the
other, up to 1.9 periods lie between two runs.

The plain table and ShedLock's rule have this library's factors, a lock of at least 0.9 and at most
5 periods. With a shorter maximum, a killed holder costs fewer windows, and a run that outlives it
is doubled. No run here does, hence the same figures for both. The slot lock is a row that is taken
until the next multiple of the period, whatever the job does.

The longest silence is from the end of a run to the start of the next that came to its end, in
periods. A run may die after 2.5 periods, so that with failover it can be more than 3."""


def goal_reached(results: Results) -> bool:
    """Tell whether this library with failover lost no window, and ran none twice or at a time."""
    ours = [figures[TaskLockWithFailover.name] for figures in results.values()]
    return all(figures.doubled == figures.missed == figures.overlapping == 0 for figures in ours)


def markdown(results: Results, windows: int, seed: int) -> str:
    """Return all figures as one table per trace."""
    lines = ["# Fidelity", "", _preface(windows, seed)]
    for trace, figures in results.items():
        lines += ["", f"## {trace[0].upper()}{trace[1:]}", ""]
        lines += [f"| rule | {' | '.join(COUNTS)} | longest silence |"]
        lines += ["| --- |" + " ---: |" * (len(COUNTS) + 1)]
        lines += [_row(rule.name, figures[rule.name]) for rule in RULES]
    return "\n".join(lines) + "\n"


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
    )


def _row(rule: str, account: Account) -> str:
    counts = [per_thousand(account, what) for what in COUNTS]
    cells = [f"{count:.1f}".removesuffix(".0") for count in counts]
    return f"| {rule} | {' | '.join(cells)} | {account.silence:.1f} |"


def per_thousand(account: Account, what: str) -> float:
    """Return one of an account's counts per 1,000 windows."""
    return float(getattr(account, what) * 1000 / account.windows)
