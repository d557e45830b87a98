"""The figures as text."""

from __future__ import annotations

from benchmarks.fidelity.account import Account
from benchmarks.fidelity.rules import (
    RULES,
    SHORT_GAP_RULES,
    TRACE_RULES,
    Rule,
    TaskLockRule,
    TaskLockWithFailover,
    TaskLockWithLeader,
)
from benchmarks.fidelity.schedules import (
    LONGEST_GAP,
    MOVES,
    TAKEN_BACK,
    WANDERS,
    ScheduleAccount,
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
ScheduleResults = dict[str, dict[str, ScheduleAccount]]

# Headings of the counts, by their names in an account.
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
other, up to 1.9 periods lie between two runs. What this library does about it is left out here: see
the last two sections.

The plain table and ShedLock's rule have this library's factors, a lock of at least 0.9 and at most
5 periods. With a shorter maximum, a killed holder costs fewer windows, and a run that outlives it
is doubled. No run here does, hence the same figures for both. The slot lock is a row that is taken
until the next multiple of the period, whatever the job does.

The longest silence is from the end of a run to the start of the next that came to its end, in
periods. A run may die after 2.5 periods, so that with failover it can be more than 3.

The latest start is that of a window's first run, in seconds after its run time by a clock that is
right. Where the clocks of replicas are ahead, all runs may start before. The last row is in leader
mode: one replica asks first, and the others ask 2 seconds and a look later for what was not run.
So a run starts later while nobody leads, while the leader's pool is starved, and where the run time
of another replica comes before the leader's."""


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


MOVES_PREFACE = """\
Here replicas have triggers of APScheduler, and this library's own modules decide what is
registered, what is overdue and what runs in another replica's place. Deployments choose among
some schedules. Half of them replace one replica after the other quickly; in the others, old and
new ones live side by side for a while. {taken_back:.0%} are taken back half-way. Half of the
replacements end a moment after a run time of the old schedule, which its old version may run then.

Counted are, as they are:

- **windows**: run times that were due while all replicas had one schedule; of an interval job, its
  periods then;
- **runs** that were begun, also those by versions side by side;
- **doubled**: runs less than 0.8 periods after the one before; of two schedules, the first such in
  a deployment is none, unless it is less than a tenth of a period after the one before;
- **missed**: windows that nobody ran, unless the last run, by the schedule before, was less than a
  tenth of a period ago; of an interval job, what more than {longest:g} periods and a poll without a
  run had lost;
- **alarms**: how often the job was told to be overdue. It never was: each is false.

The longest gap is from the start of a run to that of the next, in periods of the longer one."""


WANDERS_PREFACE = """\
An interval job of every 5 minutes without a start date, which each replica counts from its own
start, while replicas come and go. More than {longest:g} periods and a poll between the starts of
two runs count as missed windows."""


def goal_reached(results: Results, short_gaps: Results, schedules: ScheduleResults) -> bool:
    """Tell whether this library did what it promises.

    It ran no window twice, none at the same time as another, and missed none. By default, only
    those are lost whose own holder was cut short; with failover, none. It told no false alarm.
    """
    for counts in schedules.values():
        for kind in (TaskLockRule, TaskLockWithFailover):
            count = counts[kind.name]
            if count.doubled or count.missed or count.alarms:
                return False
    rules = [TaskLockRule, TaskLockWithFailover]
    return all(
        _kept_promises(accounts[rule.name], rule)
        for measured, kinds in ((results, [*rules, TaskLockWithLeader]), (short_gaps, rules))
        for accounts in measured.values()
        for rule in kinds
    )


def _kept_promises(figures: Account, rule: type[TaskLockRule]) -> bool:
    if figures.doubled or figures.missed or figures.overlapping:
        return False
    return rule is TaskLockRule or not figures.lost_with_holder


def markdown(
    results: Results, short_gaps: Results, schedules: ScheduleResults, windows: int, seed: int
) -> str:
    """Return all figures as one table per trace."""
    lines = ["# Fidelity", "", _preface(windows, seed)]
    for trace, accounts in results.items():
        lines += ["", f"## {trace[0].upper()}{trace[1:]}", ""]
        lines += _table(accounts, TRACE_RULES, TRACE_COUNTS, times=True)
    preface = SHORT_GAPS_PREFACE.format(stays=STAYS, gone=GONE, steady=STEADY)
    lines += ["", "## Run times with short gaps", "", preface]
    for schedule in SCHEDULES:
        lines += ["", f"### {schedule.name}", ""]
        lines += _table(short_gaps[schedule.name], SHORT_GAP_RULES, SHORT_GAP_COUNTS)
    preface = MOVES_PREFACE.format(taken_back=TAKEN_BACK, longest=LONGEST_GAP)
    lines += ["", "## Schedules moved by deployments", "", preface]
    for move in MOVES:
        lines += _schedule_section(move.name, schedules)
    preface = WANDERS_PREFACE.format(longest=LONGEST_GAP)
    lines += ["", "## Interval jobs that move between replicas", "", preface]
    for wander in WANDERS:
        lines += _schedule_section(wander.name, schedules)
    return "\n".join(lines) + "\n"


def _schedule_section(name: str, schedules: ScheduleResults) -> list[str]:
    lines = [
        "",
        f"### {name[0].upper()}{name[1:]}",
        "",
        "| rule | windows | runs | doubled | missed | alarms | longest gap |",
        "| --- |" + " ---: |" * 6,
    ]
    for rule in RULES:
        count = schedules[name][rule.name]
        alarms = count.alarms if issubclass(rule, TaskLockRule) else "-"
        lines.append(
            f"| {rule.name} | {count.windows} | {count.runs} | {count.doubled} | {count.missed} "
            f"| {alarms} | {count.longest:.2f} |"
        )
    return lines


def _table(
    accounts: dict[str, Account],
    rules: tuple[type[Rule], ...],
    counts: tuple[str, ...],
    *,
    times: bool = False,
) -> list[str]:
    heads = [COUNTS[what] for what in counts] + ["longest silence", "latest start"] * times
    lines = [f"| rule | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    for rule in rules:
        account = accounts[rule.name]
        cells = [f"{per_thousand(account, what):.1f}".removesuffix(".0") for what in counts]
        cells += [f"{account.silence:.1f}", f"{account.latest:.1f}"] * times
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
