"""What a trigger says about time: a run time's nominal time, and the period that follows it.

Everything here asks triggers that have neither jitter nor an end date, so that the last run before
an end date has the period of every other; and copies of those that asking may change.

Each call has one budget of steps, which all parts of a trigger share: whoever can write the job
store's table can write a trigger of very many parts, or of parts that never agree.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from typing import Any

from apscheduler.triggers.combining import AndTrigger, BaseCombiningTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._values import LONGEST_VALUE, cut, logger_of
from apscheduler_tasklock.options import LONGEST_SECONDS

try:
    from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
except ImportError:  # APScheduler 3.10 has none
    CalendarIntervalTrigger = None

logger = logger_of(__name__)

# How many times the parts of an AndTrigger may disagree before it counts as having no next time.
# Daily parts that meet once in four years (29 February) disagree under 1,500 times.
AND_TRIGGER_ROUNDS = 2000

# How many steps a trigger that always answers with its first run time is followed from there: a
# daily one's of a hundred years.
LONGEST_WALK = 36500

# Triggers whose attributes are replaced and never changed, so that a shallow copy is a copy.
_STOCK = (CronTrigger, DateTrigger, IntervalTrigger, CalendarIntervalTrigger)
# Of these, the ones that nothing here changes, so that without jitter and end none is copied.
_ASKED_THEMSELVES = (CronTrigger, DateTrigger, IntervalTrigger)

_INSTANT = timedelta(microseconds=1)

# The most steps of one call, of all parts of a trigger together. Each answer of a part is one. That
# of a cron trigger is one more for so many days that it looks through, and as many times that as
# its fields list values on average.
MOST_STEPS = 20_000
_DAYS_OF_STEP = 10

# The longest time that a cron trigger looks through at once; less if its fields list many values.
# APScheduler's goes on until the year 9999, for seconds or minutes, if no day matches.
_LOOKED_THROUGH = timedelta(days=4 * 365)

# The last year in which a calendar interval is asked. APScheduler's loops for ever if its next date
# is after the year 9999.
_LAST_YEAR = 9000


def nominal_time(trigger: Any, run_time: datetime) -> datetime:
    """Return the moment that ``run_time`` stands for once the trigger's jitter is taken away.

    Replicas draw their own jitter, so a cron job meant for 03:00 has a different run time on each
    of them; 03:00 is what they have in common. A trigger that has no such common moment (an
    interval counts from its own last, jittered run) keeps its run time.

    :param trigger: an APScheduler trigger
    :param run_time: the run time that the trigger gave, with a time zone
    """
    if isinstance(trigger, IntervalTrigger):
        return run_time
    try:
        jitter = total_jitter(trigger)
        return _last_without_jitter(trigger, run_time, jitter) if jitter else run_time
    except Exception:  # a custom trigger's own code may raise anything
        logger.warning(
            "The trigger %s cannot tell what its run time %s is without jitter; replicas that drew "
            "another one may run the job too",
            trigger,
            run_time,
            exc_info=True,
        )
        return run_time


def is_shared(trigger: Any, nominal: datetime) -> bool:
    """Tell whether every replica computes this very run time.

    So it is with a cron expression, a date, a calendar interval, and an interval that counts from a
    start on a whole second, which somebody has set. By default an interval counts from when its
    replica made it. A run time that the trigger does not give is one that a user has set, as
    by ``modify_job(next_run_time=...)``.

    :param trigger: an APScheduler trigger
    :param nominal: a nominal run time of it, with a time zone
    """
    if not has_shared_times(trigger):
        return False
    if type(trigger) is CalendarIntervalTrigger:
        # Its walk from the start date would take long.
        local = nominal.astimezone(trigger.timezone)
        return local.microsecond == 0 and time_of_day(trigger) == [
            local.hour,
            local.minute,
            local.second,
        ]
    first = _first_from(_without_jitter_and_end(trigger), nominal, Steps())
    return first is not None and first.timestamp() == nominal.timestamp()


def time_of_day(calendar_interval: Any) -> list[int]:
    """Return the hour, minute and second of a calendar interval trigger, as it pickles them."""
    time: list[int] = list(calendar_interval.__getstate__()["time"])
    return time


def has_shared_times(trigger: Any) -> bool:
    """Tell whether a trigger's run times are the same on every replica; see :func:`is_shared`."""
    if type(trigger) is IntervalTrigger:
        return bool(trigger.start_date.microsecond == 0)
    if type(trigger) in _STOCK:
        return True
    if isinstance(trigger, (AndTrigger, OrTrigger)):
        return all(has_shared_times(part) for part in trigger.triggers)
    return False


def period_after(trigger: Any, run_time: datetime, steps: Steps | None = None) -> float | None:
    """Return the seconds from ``run_time`` to the trigger's next run time.

    The difference is one of timestamps: a daily job has 23 or 25 hours across a clock change.

    :param trigger: an APScheduler trigger
    :param run_time: a nominal run time, with a time zone
    :param steps: another budget than the usual one
    :return: seconds above 0, or ``None`` if the trigger has no next run time
    :raises OutOfStepsError: its parts were asked too often
    :raises Exception: whatever a custom trigger raises when it is copied or asked
    """
    if isinstance(trigger, IntervalTrigger):
        return float(trigger.interval_length)
    if isinstance(trigger, DateTrigger):
        return None
    following = _next_after(_without_jitter_and_end(trigger), run_time, steps or Steps())
    if following is None:
        return None
    return min(following.timestamp() - run_time.timestamp(), LONGEST_SECONDS)


def ends_after(trigger: Any, nominal: datetime, period: float) -> bool:
    """Tell whether the run time that follows a nominal one is past the trigger's end.

    :param period: seconds from the nominal run time to that one
    """
    if type(trigger) not in _STOCK:
        return not has_next_run(trigger, nominal)
    end = getattr(trigger, "end_date", None)
    if end is None:
        return False
    following = _moved(nominal, timedelta(seconds=period))
    if isinstance(end, datetime):
        return following.timestamp() > end.timestamp()
    return bool(following.astimezone(trigger.timezone).date() > end)


def next_after(trigger: Any, run_time: datetime, now: float) -> float | None:
    """Return the trigger's first run time after now, or ``None`` if there is none.

    :param run_time: a run time that has passed; an interval counts from it
    :param now: seconds since 1970, as what is returned
    """
    moment = datetime.fromtimestamp(now, run_time.tzinfo)
    if isinstance(trigger, IntervalTrigger):
        passed = now - run_time.timestamp()
        following = now + trigger.interval_length - passed % trigger.interval_length
    else:
        found = _next_after(_without_jitter_and_end(trigger), moment, Steps())
        if found is None:
            return None
        following = found.timestamp()
    return None if ends_after(trigger, moment, following - now) else following


class EndlessTriggerError(Exception):
    """A trigger's next run time cannot be found within bounds, if it has one."""


class OutOfStepsError(EndlessTriggerError):
    """A trigger's parts were asked too often in one call."""


class Steps:
    """The budget of one call: the steps that are left for all parts of a trigger.

    :param left: how many there are
    """

    def __init__(self, left: int = MOST_STEPS) -> None:
        self._most = self._left = left

    def take(self, count: int = 1) -> None:
        """Take steps from the budget.

        :raises OutOfStepsError: there are not so many left
        """
        self._left -= count
        if self._left < 0:
            raise OutOfStepsError(f"its trigger takes more than {self._most} steps")


def first_run_time(trigger: Any, now: datetime) -> datetime | None:
    """Return a trigger's first run time from now on, as APScheduler asks for it, but within bounds.

    :param now: the time now
    :raises EndlessTriggerError: as :func:`following_run_time`
    :raises Exception: whatever a custom trigger raises
    """
    steps = Steps()
    first = _following(_copied(trigger), None, now, steps)
    if first is None and _goes_on(trigger, now, steps):
        raise EndlessTriggerError(
            f"the parts of its trigger ({cut(trigger, LONGEST_VALUE)}) do not agree"
        )
    return first


def following_run_time(
    trigger: Any, previous: datetime, now: datetime, steps: Steps | None = None
) -> datetime | None:
    """Return the run time that follows another one, as APScheduler asks for it, but within bounds.

    ``AndTrigger.get_next_fire_time`` does not return when its parts never agree.

    :param previous: a run time
    :param now: the time now
    :param steps: the budget, if several calls share one
    :raises OutOfStepsError: its parts were asked too often
    :raises EndlessTriggerError: the parts of a combination still have run times, and do not agree;
        or the trigger stands still
    :raises Exception: whatever a custom trigger raises
    """
    steps = steps or Steps()
    following = _following(_copied(trigger), previous, now, steps)
    if following is None:
        if _goes_on(trigger, now, steps):
            raise EndlessTriggerError(
                f"the parts of its trigger ({cut(trigger, LONGEST_VALUE)}) do not agree"
            )
    elif following.timestamp() <= previous.timestamp():
        raise EndlessTriggerError(
            f"its trigger ({cut(trigger, LONGEST_VALUE)}) stands still at {following}"
        )
    return following


def _following(
    trigger: Any, previous: datetime | None, now: datetime, steps: Steps
) -> datetime | None:
    if isinstance(trigger, OrTrigger):
        times = [_following(part, previous, now, steps) for part in trigger.triggers]
        found = min((time for time in times if time is not None), default=None, key=_timestamp)
    elif isinstance(trigger, AndTrigger):
        found = _agreed_after(trigger, previous or _moved(now, -_INSTANT), steps)
    else:
        return _asked(trigger, previous, now, steps)
    if found is None or not trigger.jitter:
        return found
    return _jittered(found, trigger.jitter)


def _goes_on(trigger: Any, now: datetime, steps: Steps) -> bool:
    """Tell whether all parts of a combination still have run times, although it has none."""
    if isinstance(trigger, AndTrigger):
        return bool(trigger.triggers) and all(
            _goes_on(part, now, steps)
            if isinstance(part, BaseCombiningTrigger)
            else _first_from(_copied(part), now, steps) is not None
            for part in trigger.triggers
        )
    return isinstance(trigger, OrTrigger) and any(
        _goes_on(part, now, steps) for part in trigger.triggers
    )


def has_next_run(trigger: Any, run_time: datetime) -> bool:
    """Tell whether a run time follows, so that the scheduler keeps the job."""
    try:
        return _following(_copied(trigger), run_time, run_time, Steps()) is not None
    except Exception:  # noqa: BLE001  # a custom trigger's own code; the scheduler tells of it
        return True


def _last_without_jitter(trigger: Any, run_time: datetime, seconds: float) -> datetime:
    """Return the trigger's last time without jitter at or before a run time, if it has one."""
    plain, steps = _without_jitter_and_end(trigger), Steps()
    jitter = timedelta(seconds=seconds)
    # APScheduler adds jitter to the local time, so that an hour that comes twice makes it longer.
    earliest = min(_moved(run_time, -jitter), run_time - jitter, key=_timestamp)
    first = _first_from(plain, earliest, steps)
    if first is None or first.timestamp() > run_time.timestamp():
        return run_time
    # Look back in growing steps: a trigger that fires every second must not be walked through an
    # hour of jitter.
    back = timedelta(seconds=1)
    while (start := _moved(run_time, -back)).timestamp() > first.timestamp():
        nearer = _first_from(plain, start, steps)
        if nearer is not None and nearer.timestamp() <= run_time.timestamp():
            return _last_until(plain, nearer, run_time, steps)
        back *= 2
    return _last_until(plain, first, run_time, steps)


def total_jitter(trigger: Any) -> float:
    """Return the most seconds by which jitter can move a run time; triggers combine theirs."""
    own = float(getattr(trigger, "jitter", None) or 0)
    # Most are stock triggers, and what they are an instance of takes long to find out.
    if type(trigger) in _STOCK or not isinstance(trigger, BaseCombiningTrigger):
        return own
    return own + max((total_jitter(part) for part in trigger.triggers), default=0.0)


def _without_jitter_and_end(trigger: Any) -> Any:
    """Return the trigger, or a copy of it, so that it is exact and never ends."""
    is_stock = type(trigger) in _STOCK
    if not is_stock and isinstance(trigger, (AndTrigger, OrTrigger)):
        return _combined(trigger, _without_jitter_and_end)
    has = [name for name in ("jitter", "end_date") if getattr(trigger, name, None) is not None]
    if not has and type(trigger) in _ASKED_THEMSELVES:
        return trigger
    plain = _copied(trigger)
    for attribute in has:
        setattr(plain, attribute, None)
    return plain


def is_stock(trigger: Any) -> bool:
    """Tell whether a trigger is APScheduler's own, and no code of an application's."""
    if type(trigger) in (AndTrigger, OrTrigger):
        return all(is_stock(part) for part in trigger.triggers)
    return type(trigger) in _STOCK


def _combined(trigger: Any, copy_part: Callable[[Any], Any]) -> Any:
    # Not copied: their copying needs parts that can be pickled, and a custom one need not.
    combine = AndTrigger if isinstance(trigger, AndTrigger) else OrTrigger
    return combine([copy_part(part) for part in trigger.triggers])


def _copied(trigger: Any) -> Any:
    if isinstance(trigger, (AndTrigger, OrTrigger)):
        combined = _combined(trigger, _copied)
        combined.jitter = trigger.jitter
        return combined
    # A stock trigger never changes its parts, and a deep copy takes longer than all else here.
    return copy.copy(trigger) if type(trigger) in _STOCK else copy.deepcopy(trigger)


def _next_after(trigger: Any, moment: datetime, steps: Steps) -> datetime | None:
    """Return the trigger's first run time after ``moment``, as if it had just fired then."""
    if isinstance(trigger, AndTrigger):
        return _agreed_after(trigger, moment, steps)
    if isinstance(trigger, OrTrigger):
        times = [_next_after(part, moment, steps) for part in trigger.triggers]
        return min((time for time in times if time is not None), default=None, key=_timestamp)
    return _later(trigger, previous=moment, moment=moment, steps=steps)


def _agreed_after(trigger: AndTrigger, moment: datetime, steps: Steps) -> datetime | None:
    """Return the first time after ``moment`` on which all parts of an AndTrigger agree.

    ``AndTrigger.get_next_fire_time`` does not stop looking when they never do, and a look here
    must not hang a worker.
    """
    earliest = _moved(moment, _INSTANT)
    for _ in range(AND_TRIGGER_ROUNDS):
        times = []
        for part in trigger.triggers:
            first = _first_from(part, earliest, steps)
            if first is None:
                return None
            times.append(first)
        if not times:
            return None
        latest = max(times, key=_timestamp)
        if latest.timestamp() == min(times, key=_timestamp).timestamp():
            return latest
        if latest.timestamp() - moment.timestamp() > LONGEST_SECONDS:
            return None
        earliest = latest
    return None


def _first_from(trigger: Any, moment: datetime, steps: Steps) -> datetime | None:
    """Return the trigger's first run time at or after ``moment``, whatever it ran before."""
    is_stock = type(trigger) in _STOCK
    if not is_stock and isinstance(trigger, AndTrigger):
        return _agreed_after(trigger, _moved(moment, -_INSTANT), steps)
    if not is_stock and isinstance(trigger, OrTrigger):
        times = [_first_from(part, moment, steps) for part in trigger.triggers]
        return min((time for time in times if time is not None), default=None, key=_timestamp)
    if type(trigger) is CalendarIntervalTrigger:
        _skip_days(trigger, moment)
    first = _asked(trigger, None, moment, steps)
    # A calendar interval answers with its start date, however long ago: walk on from there.
    for _ in range(LONGEST_WALK):
        if first is None or first.timestamp() >= moment.timestamp():
            return first
        if type(trigger) is CalendarIntervalTrigger:
            # The copy need not be walked here again: nobody asks it for earlier times later on.
            trigger.start_date = first.date()
        first = _later(trigger, previous=first, moment=first, steps=steps)
    return None


def _skip_days(trigger: Any, moment: datetime) -> None:
    """Let a calendar interval of days begin shortly before a moment: each date is a step.

    Where a clock change skipped a date of it, as in Apia in 2011, its own walk went on from the
    date after. That is not known here.
    """
    days = trigger.days + 7 * trigger.weeks
    if days and not trigger.months and not trigger.years:
        passed = (moment.astimezone(trigger.timezone).date() - trigger.start_date).days
        trigger.start_date += timedelta(days=max(0, passed // days - 1) * days)


def _last_until(trigger: Any, first: datetime, end: datetime, steps: Steps) -> datetime:
    """Return the trigger's last run time until ``end``, walking on from ``first``."""
    last, following = first, _next_after(trigger, first, steps)
    while following is not None and following.timestamp() <= end.timestamp():
        last, following = following, _next_after(trigger, following, steps)
    return last


def _later(trigger: Any, *, previous: datetime, moment: datetime, steps: Steps) -> datetime | None:
    """Return what a trigger gives after ``previous``, unless that is no later."""
    for now in (moment, _moved(moment, _INSTANT)):
        following = _asked(trigger, previous, now, steps)
        if following is None or following.timestamp() > previous.timestamp():
            return following
    # A custom trigger that stands still has no next run time that could measure a period.
    return None


def _asked(trigger: Any, previous: datetime | None, now: datetime, steps: Steps) -> datetime | None:
    """Return what a trigger that is no combination answers."""
    if type(trigger) is CronTrigger:
        return _asked_in_parts(trigger, previous, now, steps)
    steps.take()
    if (
        type(trigger) is CalendarIntervalTrigger
        and previous is not None
        and not _has_date_after(trigger, previous)
    ):
        return None
    answer: datetime | None = trigger.get_next_fire_time(previous, now)
    return answer


def _asked_in_parts(
    trigger: CronTrigger, previous: datetime | None, now: datetime, steps: Steps
) -> datetime | None:
    """Return what a cron trigger answers, looking through some years at a time.

    One that has no run time within a hundred years has none.
    """
    # Each field has one at least.
    weight = sum(len(field.expressions) for field in trigger.fields) // len(trigger.fields)
    steps.take(weight)
    end, jitter = trigger.end_date, trigger.jitter
    begins = [now.astimezone(timezone.utc)]
    if previous is not None:
        begins.append(previous.astimezone(timezone.utc))
        begin = min(begins)
    else:
        if trigger.start_date is not None:
            begins.append(trigger.start_date.astimezone(timezone.utc))
        begin = max(begins)
    asked, until = copy.copy(trigger), begin
    asked.jitter = None
    while until.timestamp() - begin.timestamp() < LONGEST_SECONDS:
        looked_from = until
        try:
            until += _LOOKED_THROUGH / weight
        except OverflowError:  # Python's times end
            return None
        is_last = end is not None and end.timestamp() <= until.timestamp()
        asked.end_date = end if is_last else until
        found: datetime | None = asked.get_next_fire_time(previous, now)
        seconds = (until if found is None else found).timestamp() - looked_from.timestamp()
        steps.take(weight * int(seconds / 86_400 / _DAYS_OF_STEP))
        if found is not None and jitter:
            found = _jittered(found, jitter)
            return found if end is None else min(found, end, key=_timestamp)
        if found is not None or is_last:
            return found
        previous, now = None, until
    return None


def _has_date_after(trigger: Any, previous: datetime) -> bool:
    """Tell whether a calendar interval has a date after a run time, in a year that it can reach."""
    months = trigger.years * 12 + trigger.months
    at = previous.year * 12 + previous.month - 1
    while 12 <= (at := at + months) < _LAST_YEAR * 12:
        try:
            date(at // 12, at % 12 + 1, previous.day)
        except ValueError:  # no such day in this month
            continue
        return True
    return False


def _moved(moment: datetime, by: timedelta) -> datetime:
    """Return ``moment + by`` in elapsed time: local times skip or repeat an hour twice a year."""
    return (moment.astimezone(timezone.utc) + by).astimezone(moment.tzinfo)


def _jittered(moment: datetime, jitter: float) -> datetime:
    """Return a time up to so many seconds later, by chance."""
    return _moved(moment, timedelta(seconds=random.uniform(0, jitter)))  # noqa: S311  # no secret


def _timestamp(moment: datetime) -> float:
    return moment.timestamp()
