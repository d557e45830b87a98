"""The times of a trigger: nominal times, periods, and next run times.

Periods are computed without the trigger's jitter and end date, so that the last run before an end
date has the same period as other runs. Some triggers change when their next run time is computed.
These are copied first.

Each call has one budget of steps, which all parts of a trigger share. The budget limits the time of
a call, because everybody who can write the job store's table can write a trigger of very many
parts, or of parts that never agree.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import date, datetime, timedelta, timezone, tzinfo
from math import floor
from typing import Any

from apscheduler.triggers.combining import AndTrigger, BaseCombiningTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._lock.protocol_messages import MOST_COUNTED
from apscheduler_tasklock._values import LONGEST_VALUE, cut, logger_of
from apscheduler_tasklock.options import LONGEST_SECONDS

try:
    from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
except ImportError:  # APScheduler 3.10 has none
    CalendarIntervalTrigger = None

logger = logger_of(__name__)

# Limits the rounds in which the parts of an AndTrigger disagree. After these rounds the trigger
# counts as having no next time. Daily parts that agree once in four years, on 29 February, need
# fewer than 1,500 rounds.
AND_TRIGGER_ROUNDS = 2000

# Limits the run times that are passed to reach a moment, because some triggers can only be walked
# forward from their first run time. The limit is 100 years of a daily trigger.
LONGEST_WALK = 36500

# Limit the steps of one search for the last run time of a backlog: of APScheduler's own triggers,
# and of the application's. The latter can only be walked. A search that reaches the limit finds an
# earlier run time, and the next search goes on from that one. Other jobs wait for a search.
MOST_SEARCHED, MOST_WALKED = 10_000, 200

# APScheduler's own triggers except combinations. A shallow copy of such a trigger is enough,
# because its attributes are replaced and never changed in place.
_STOCK = (CronTrigger, DateTrigger, IntervalTrigger, CalendarIntervalTrigger)
# The stock triggers that are used without a copy if they have neither jitter nor an end date. No
# copy is needed, because nothing in this module changes such a trigger.
_ASKED_THEMSELVES = (CronTrigger, DateTrigger, IntervalTrigger)

_INSTANT = timedelta(microseconds=1)
# Limits by how many seconds the run times of an interval are inexact, because APScheduler reckons
# with floats.
_INEXACT = 0.001

# Limits the steps of one call, for all parts of a trigger together. Each answer of a part costs one
# step. An answer of a cron trigger also costs a step for each `_DAYS_OF_STEP` days that the trigger
# has searched, and its steps are multiplied by the mean number of expressions in its fields.
MOST_STEPS = 20_000
# Limits the steps of each call while many rows are looked at in a row; see `few_steps`.
FEW_STEPS = 500
_LIMIT: ContextVar[int] = ContextVar("_LIMIT", default=10**9)
_DAYS_OF_STEP = 10

# Limits the span of time that a cron trigger searches in one call of APScheduler's code. The span
# is divided by the mean number of expressions in the trigger's fields. Without a limit APScheduler
# would search until the year 9999 if no day matches, which takes seconds or minutes.
_SEARCHED_AT_ONCE = timedelta(days=4 * 365)

# Limits the time by which clocks are put forward at once. Days that a time zone has left out, as
# Apia did in 2011, are ignored.
_LONGEST_SKIP = timedelta(hours=2)

# Limits the years for which a calendar interval computes dates, because APScheduler loops for ever
# if the next date is after the year 9999.
_LAST_YEAR = 9000


def nominal_time(trigger: Any, run_time: datetime) -> datetime:
    """Return the nominal time of a run time: the run time without the trigger's jitter.

    Each replica draws its own jitter. So a cron job for 03:00 has another run time on each replica,
    and 03:00 is the nominal time that all replicas have in common. For an interval the run time
    itself is returned, because an interval has no common time: it counts from the last run time,
    jitter included.

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
            "another jitter may run the job too",
            trigger,
            run_time,
            exc_info=True,
        )
        return run_time


def is_shared(trigger: Any, nominal: datetime) -> bool:
    """Return whether every replica computes exactly this run time.

    All replicas compute the same run time for a cron expression, a date and a calendar interval.
    They also do so for an interval that starts on a whole second, because a user has set that
    start. Replicas may have different run times in two cases:

    - The interval has the default start, which is the moment at which each replica made the
      trigger.
    - The trigger does not give the run time. A user has set it, for example by
      ``modify_job(next_run_time=...)``.

    :param trigger: an APScheduler trigger
    :param nominal: a nominal run time of the trigger, with a time zone
    """
    if not has_shared_times(trigger):
        return False
    if type(trigger) is CalendarIntervalTrigger:
        # Only the time of day is compared, because a walk from the start date would take long.
        local = nominal.astimezone(trigger.timezone)
        return local.microsecond == 0 and time_of_day(trigger) == [
            local.hour,
            local.minute,
            local.second,
        ]
    first = _first_from(_without_jitter_and_end(trigger), nominal, StepBudget())
    return first is not None and first.timestamp() == nominal.timestamp()


def may_give(trigger: Any, run_time: datetime, previous: datetime | None) -> bool:
    """Return whether a trigger itself may have given a run time; if not, a user has set it.

    An interval counts on from the previous run time, or anew from its start, for example after
    ``resume_job``. Of a custom trigger nobody knows its run times.

    :param trigger: an APScheduler trigger
    :param run_time: a nominal run time, with a time zone
    :param previous: the job's run time before it; ``None``: not known
    :raises OutOfStepsError: the budget of steps does not suffice
    """
    if type(trigger) in (AndTrigger, OrTrigger):
        parts = (may_give(part, run_time, previous) for part in trigger.triggers)
        return all(parts) if type(trigger) is AndTrigger else any(parts)
    if type(trigger) is IntervalTrigger:
        starts = [trigger.start_date, *filter(None, [previous])]
        return any(_is_step(trigger, run_time.timestamp() - start.timestamp()) for start in starts)
    return type(trigger) not in _STOCK or is_shared(trigger, run_time)


def _is_step(trigger: IntervalTrigger, seconds: float) -> bool:
    """Return whether an interval has a run time so many seconds after its start, or another one."""
    seconds += _INEXACT
    jitter = float(trigger.jitter or 0)
    return seconds >= 0 and seconds % trigger.interval_length <= jitter + 2 * _INEXACT


def time_of_day(calendar_interval: Any) -> list[int]:
    """Return the hour, minute and second of a calendar interval trigger, from its pickled state."""
    time: list[int] = list(calendar_interval.__getstate__()["time"])
    return time


def has_shared_times(trigger: Any) -> bool:
    """Return whether a trigger has the same run times on every replica; see :func:`is_shared`."""
    if type(trigger) is IntervalTrigger:
        return bool(trigger.start_date.microsecond == 0)
    if type(trigger) in _STOCK:
        return True
    if isinstance(trigger, (AndTrigger, OrTrigger)):
        return all(has_shared_times(part) for part in trigger.triggers)
    return False


def period_after(trigger: Any, run_time: datetime, steps: StepBudget | None = None) -> float | None:
    """Return the seconds from ``run_time`` to the trigger's next run time.

    The seconds are elapsed time: the period of a daily job across a clock change has 23 or 25
    hours.

    :param trigger: an APScheduler trigger
    :param run_time: a nominal run time, with a time zone
    :param steps: the budget, if several calls share one
    :return: seconds above 0, or ``None`` if the trigger has no next run time
    :raises OutOfStepsError: the budget of steps does not suffice
    :raises Exception: whatever a custom trigger raises when it is copied or asked
    """
    if isinstance(trigger, IntervalTrigger):
        return float(trigger.interval_length)
    if isinstance(trigger, DateTrigger):
        return None
    following = _next_after(_without_jitter_and_end(trigger), run_time, steps or StepBudget())
    if following is None:
        return None
    return min(following.timestamp() - run_time.timestamp(), LONGEST_SECONDS)


def ends_after(trigger: Any, nominal: datetime, period: float) -> bool:
    """Return whether the run time that follows a nominal one comes after the trigger's end.

    :param period: seconds from the nominal run time to the following one
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

    :param run_time: a run time that has passed; an interval counts from this run time
    :param now: seconds since 1970
    :return: seconds since 1970
    """
    moment = datetime.fromtimestamp(now, run_time.tzinfo)
    if isinstance(trigger, IntervalTrigger):
        passed = now - run_time.timestamp()
        following = now + trigger.interval_length - passed % trigger.interval_length
    else:
        found = _next_after(_without_jitter_and_end(trigger), moment, StepBudget())
        if found is None:
            return None
        following = found.timestamp()
    return None if ends_after(trigger, moment, following - now) else following


def run_times_between(
    trigger: Any, since: datetime, until: datetime, most: int
) -> Sequence[datetime]:
    """Return the trigger's first nominal run times from ``since`` on and before ``until``.

    :param most: limits how many are returned. If the search takes too long, fewer are returned.
    :raises Exception: whatever a custom trigger raises
    """
    steps, plain = StepBudget(), _without_jitter(trigger)
    with suppress(OutOfStepsError):
        first = _first_from(_copied(plain), since, steps)
        if first is not None and first.timestamp() < until.timestamp():
            return [first, *_walked(plain, first, until, most - 1, steps)]
    return []


def run_times_after(trigger: Any, first: datetime, until: datetime, most: int) -> list[datetime]:
    """Return the trigger's nominal run times that follow another one, before ``until``.

    :param first: a nominal run time
    :param most: limits how many are returned. If the search takes too long, fewer are returned.
    :raises Exception: whatever a custom trigger raises
    """
    return _walked(_without_jitter(trigger), first, until, most, StepBudget())


def _walked(
    trigger: Any, first: datetime, until: datetime, most: int, steps: StepBudget
) -> list[datetime]:
    found = [first]
    with suppress(OutOfStepsError):
        while len(found) <= most:
            following = _next_after(trigger, found[-1], steps)
            if following is None or following.timestamp() >= until.timestamp():
                break
            found.append(following)
    return found[1:]


def nominal_time_due(trigger: Any, due_at: datetime, slack: timedelta) -> datetime | None:
    """Return the nominal run time of the run that is due at a time; ``None`` if there is none.

    The due time may be later than the nominal run time by the trigger's jitter. If clocks skip an
    hour, a run time in that hour is moved to a later one, which the trigger does not give if it is
    asked for its first run time from shortly before that time.

    :param slack: by how much the due time may be inexact
    """
    latest = _moved(due_at, slack)
    jitter = timedelta(seconds=total_jitter(trigger)) + 2 * slack
    seconds = (jitter + _LONGEST_SKIP).total_seconds()
    found = _last_without_jitter(trigger, latest, seconds)
    is_there = _moved(latest, -jitter).timestamp() <= found.timestamp() < latest.timestamp()
    return found if is_there else None


def count_until(
    trigger: Any, first: datetime, until: datetime
) -> tuple[int, datetime, datetime | None]:
    """Return how many run times a trigger has from one on and before a moment, without jitter.

    :param first: a run time before ``until``
    :return: how many they are, the last one, and the one that follows it, which may be after the
        trigger's end. A number above ``MOST_COUNTED`` means that they are more than that, because
        only those of an interval are counted further. The last one is then the one that
        :func:`last_run_time_until` finds, which for a trigger of the application's may be an
        earlier one.
    :raises OutOfStepsError: the budget of steps does not suffice
    :raises Exception: whatever a custom trigger raises
    """
    if type(trigger) is IntervalTrigger:
        # In UTC, because local times skip or repeat an hour when clocks change.
        start = first.astimezone(timezone.utc)
        passed = (until.astimezone(timezone.utc) - start - _INSTANT) // trigger.interval
        last, following = (start + each * trigger.interval for each in (passed, passed + 1))
        return passed + 1, last.astimezone(first.tzinfo), following.astimezone(first.tzinfo)
    steps, plain = StepBudget(5 * MOST_COUNTED), _without_jitter_and_end(trigger)
    count, last, next_one = 1, first, _next_after(plain, first, steps)
    while (
        count <= MOST_COUNTED and next_one is not None and next_one.timestamp() < until.timestamp()
    ):
        count, last = count + 1, next_one
        if count > MOST_COUNTED:  # one search, because a trigger of the application's may be slow
            last = last_run_time_until(plain, last, _moved(until, -_INSTANT))
        next_one = _next_after(plain, last, steps)
    return count, last, next_one


def last_run_time_until(trigger: Any, first: datetime, until: datetime) -> datetime:
    """Return a trigger's last run time from one on and up to a moment, without jitter.

    The run times between are not walked if the trigger can be asked about any moment. These are
    APScheduler's own. But a calendar interval counts from its last run time, which a user may have
    set, and has few run times. In an ``OrTrigger``, an interval counts from its start here, and not
    from the run time before.

    :param first: a run time; it is returned if none follows it up to that moment
    :return: the run time, or an earlier one if the search takes more than its steps
    :raises EndlessTriggerError: as :func:`following_run_time`, but not for the steps
    :raises Exception: whatever a custom trigger raises
    """
    if until.timestamp() <= first.timestamp():
        return first
    if type(trigger) is IntervalTrigger:
        return _last_of_interval(trigger, first, until)
    if is_stock(trigger) and type(trigger) is not CalendarIntervalTrigger:
        return _last_until(_without_jitter(trigger), first, until, is_asked=True)
    return _last_until(trigger, first, until, is_asked=False)


def _last_until(trigger: Any, first: datetime, until: datetime, *, is_asked: bool) -> datetime:
    """Return a trigger's last run time up to a moment, in steps forward from the first one.

    :param is_asked: whether to find later ones by asking the trigger about moments before the end,
        first in spans that double, and then in the middle of the span that is left
    """
    last, steps = first, StepBudget(MOST_SEARCHED if is_stock(trigger) else MOST_WALKED)
    walked = _copied(trigger)  # once, because a deep copy takes longer than a step
    end = begin = until.timestamp()  # no run time is between these two
    with suppress(OutOfStepsError):
        while (
            following := _following_checked(walked, last, until, steps)
        ) is not None and following.timestamp() <= end:
            last = following
            if not is_asked:
                continue
            at = last.timestamp()
            moment = max(2 * begin - end - 1, (at + begin) / 2)
            after = timedelta(seconds=moment - at)
            later = _first_from(_copied(trigger), _moved(last, after), steps)
            if later is not None and later.timestamp() <= end:
                last = later
            else:
                begin = moment
    return last


def _last_of_interval(trigger: Any, first: datetime, until: datetime) -> datetime:
    """Return the last run time of an interval up to a moment, by one division."""
    if trigger.end_date is not None:
        until = min(until, trigger.end_date, key=_timestamp)
    passed = floor((until.timestamp() - first.timestamp()) / trigger.interval_length)
    return _moved(first, max(0, passed) * trigger.interval)


class EndlessTriggerError(Exception):
    """The search for a trigger's next run time reached a limit, or did not go forward."""


class OutOfStepsError(EndlessTriggerError):
    """The search for a trigger's run time took more steps than its budget has."""


class StepBudget:
    """The budget of one call: the steps that are left for all parts of a trigger.

    :param left: how many steps the budget has
    """

    def __init__(self, left: int = MOST_STEPS) -> None:
        self._most = self._left = min(left, _LIMIT.get())

    def take(self, count: int = 1) -> None:
        """Take steps from the budget.

        :raises OutOfStepsError: fewer steps are left
        """
        self._left -= count
        if self._left < 0:
            raise OutOfStepsError(f"its trigger takes more than {self._most} steps")


@contextmanager
def few_steps() -> Iterator[None]:
    """Give each call in the context a small budget, so that a thousand calls take seconds."""
    before = _LIMIT.set(FEW_STEPS)
    try:
        yield
    finally:
        _LIMIT.reset(before)


def first_run_time(trigger: Any, now: datetime) -> datetime | None:
    """Return a trigger's first run time from now on, as APScheduler does, but with limits.

    :param now: the time now
    :raises EndlessTriggerError: as :func:`following_run_time`
    :raises Exception: whatever a custom trigger raises
    """
    steps = StepBudget()
    first = _following(_copied(trigger), None, now, steps)
    if first is None and _goes_on(trigger, now, steps):
        raise EndlessTriggerError(
            f"the parts of its trigger ({cut(trigger, LONGEST_VALUE)}) do not agree"
        )
    return first


def following_run_time(
    trigger: Any, previous: datetime, now: datetime, steps: StepBudget | None = None
) -> datetime | None:
    """Return the run time that follows another run time, as APScheduler does, but with limits.

    The limits are needed because APScheduler's own ``AndTrigger.get_next_fire_time`` never returns
    if the trigger's parts never agree.

    :param previous: a run time
    :param now: the time now
    :param steps: the budget, if several calls share one
    :raises OutOfStepsError: the budget of steps does not suffice
    :raises EndlessTriggerError: the parts of a combination still have run times, and do not agree;
        or the trigger gives a run time that is not after ``previous``
    :raises Exception: whatever a custom trigger raises
    """
    return _following_checked(_copied(trigger), previous, now, steps or StepBudget())


def _following_checked(
    trigger: Any, previous: datetime, now: datetime, steps: StepBudget
) -> datetime | None:
    following = _following(trigger, previous, now, steps)
    if following is None:
        if _goes_on(trigger, now, steps):
            raise EndlessTriggerError(
                f"the parts of its trigger ({cut(trigger, LONGEST_VALUE)}) do not agree"
            )
    elif following.timestamp() <= previous.timestamp():
        raise EndlessTriggerError(
            f"its trigger ({cut(trigger, LONGEST_VALUE)}) gives {following} after {previous}"
        )
    return following


def _following(
    trigger: Any, previous: datetime | None, now: datetime, steps: StepBudget
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


def _goes_on(trigger: Any, now: datetime, steps: StepBudget) -> bool:
    """Return whether a combination without a next run time has parts that still have run times.

    If so, these parts do not agree. ``False`` for a trigger that is no combination.
    """
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
    """Return whether a run time follows another run time, so that the scheduler keeps the job."""
    try:
        return _following(_copied(trigger), run_time, run_time, StepBudget()) is not None
    except Exception:  # noqa: BLE001  # a custom trigger's own code; the scheduler logs the error
        return True


def _last_without_jitter(trigger: Any, run_time: datetime, seconds: float) -> datetime:
    """Return the trigger's last time without jitter at or before a run time.

    :param seconds: the maximum jitter; if no time lies within it, the run time itself is returned
    """
    plain = _without_jitter_and_end(trigger)
    jitter = timedelta(seconds=seconds)
    # The jitter is subtracted once in elapsed time and once in local time, and the earlier result
    # counts. APScheduler adds jitter in local time, so that more time elapses than the jitter if a
    # clock change repeats an hour.
    earliest = min(_moved(run_time, -jitter), run_time - jitter, key=_timestamp)
    first = _first_from(_copied(plain), earliest, StepBudget())
    if first is None or first.timestamp() > run_time.timestamp():
        return run_time
    return _last_until(plain, first, run_time, is_asked=True)


def total_jitter(trigger: Any) -> float:
    """Return the seconds by which jitter moves a run time at most, with the jitter of the parts."""
    own = float(getattr(trigger, "jitter", None) or 0)
    # The type is looked up first, because `isinstance` takes long, and most types are in `_STOCK`.
    if type(trigger) in _STOCK or not isinstance(trigger, BaseCombiningTrigger):
        return own
    return own + max((total_jitter(part) for part in trigger.triggers), default=0.0)


def zone_of(trigger: Any) -> str | None:
    """Return the name of a trigger's time zone; ``None`` if it has none, or several."""
    if isinstance(trigger, (AndTrigger, OrTrigger)):
        zones = {zone_of(part) for part in trigger.triggers}
        return zones.pop() if len(zones) == 1 else None
    zone = getattr(trigger, "timezone", None)
    return None if zone is None else cut(zone, LONGEST_VALUE)


def tzinfo_of(trigger: Any) -> tzinfo | None:
    """Return the time zone of a trigger's run times; ``None`` if it has none, or several."""
    if isinstance(trigger, (AndTrigger, OrTrigger)):
        zones = {str(zone): zone for zone in map(tzinfo_of, trigger.triggers)}
        return zones.popitem()[1] if len(zones) == 1 else None
    is_date = isinstance(trigger, DateTrigger)
    zone = trigger.run_date.tzinfo if is_date else getattr(trigger, "timezone", None)
    return zone if isinstance(zone, tzinfo) else None


def _without_jitter_and_end(trigger: Any) -> Any:
    """Return the trigger without jitter and end date: a copy where one is needed, else itself."""
    return _without(trigger, "jitter", "end_date")


def _without_jitter(trigger: Any) -> Any:
    """Return the trigger without jitter: a copy where one is needed, else itself."""
    return _without(trigger, "jitter")


def _without(trigger: Any, *attributes: str) -> Any:
    is_stock = type(trigger) in _STOCK
    if not is_stock and isinstance(trigger, (AndTrigger, OrTrigger)):
        return _combined(trigger, lambda part: _without(part, *attributes))
    has = [name for name in attributes if getattr(trigger, name, None) is not None]
    if not has and type(trigger) in _ASKED_THEMSELVES:
        return trigger
    plain = _copied(trigger)
    for attribute in has:
        setattr(plain, attribute, None)
    return plain


def is_single(trigger: Any) -> bool:
    """Return whether a trigger is APScheduler's own, and not a combination of several."""
    return type(trigger) in _STOCK


def is_stock(trigger: Any) -> bool:
    """Return whether a trigger is APScheduler's own, without code of the application."""
    if type(trigger) in (AndTrigger, OrTrigger):
        return all(is_stock(part) for part in trigger.triggers)
    return type(trigger) in _STOCK


def _combined(trigger: Any, copy_part: Callable[[Any], Any]) -> Any:
    # The combination is made anew and not copied, because a copy needs parts that can be pickled,
    # and a custom trigger may not be such a part.
    combine = AndTrigger if isinstance(trigger, AndTrigger) else OrTrigger
    return combine([copy_part(part) for part in trigger.triggers])


def _copied(trigger: Any) -> Any:
    if isinstance(trigger, (AndTrigger, OrTrigger)):
        combined = _combined(trigger, _copied)
        combined.jitter = trigger.jitter
        return combined
    # A shallow copy of a stock trigger is enough, and a deep copy would take long.
    return copy.copy(trigger) if type(trigger) in _STOCK else copy.deepcopy(trigger)


def _next_after(trigger: Any, moment: datetime, steps: StepBudget) -> datetime | None:
    """Return the trigger's first run time after ``moment``, as if ``moment`` were a run time."""
    if isinstance(trigger, AndTrigger):
        return _agreed_after(trigger, moment, steps)
    if isinstance(trigger, OrTrigger):
        times = [_next_after(part, moment, steps) for part in trigger.triggers]
        return min((time for time in times if time is not None), default=None, key=_timestamp)
    return _later(trigger, previous=moment, moment=moment, steps=steps)


def _agreed_after(trigger: AndTrigger, moment: datetime, steps: StepBudget) -> datetime | None:
    """Return the first time after ``moment`` on which all parts of an AndTrigger agree.

    The search has limits, because the parts may never agree.
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


def _first_from(trigger: Any, moment: datetime, steps: StepBudget) -> datetime | None:
    """Return the first run time at or after ``moment``, as of a job that has not run before."""
    is_stock = type(trigger) in _STOCK
    if not is_stock and isinstance(trigger, AndTrigger):
        return _agreed_after(trigger, _moved(moment, -_INSTANT), steps)
    if not is_stock and isinstance(trigger, OrTrigger):
        times = [_first_from(part, moment, steps) for part in trigger.triggers]
        return min((time for time in times if time is not None), default=None, key=_timestamp)
    if type(trigger) is CalendarIntervalTrigger:
        _skip_days(trigger, moment)
    first = _asked(trigger, None, moment, steps)
    # Walk forward from the answer, because it may be before `moment`: a calendar interval answers
    # with its start date.
    for _ in range(LONGEST_WALK):
        if first is None or first.timestamp() >= moment.timestamp():
            return first
        if type(trigger) is CalendarIntervalTrigger:
            # The trigger is a copy, so its start date may move to this time, which makes the next
            # walk short. The copy is never asked for an earlier time.
            trigger.start_date = first.date()
        first = _later(trigger, previous=first, moment=first, steps=steps)
    return None


def _skip_days(trigger: Any, moment: datetime) -> None:
    """Save steps: let a calendar interval that counts days start shortly before a moment.

    This ignores dates that a clock change has skipped, as in Apia in 2011. The trigger's own walk
    would go on from the date after a skipped date.
    """
    days = trigger.days + 7 * trigger.weeks
    if days and not trigger.months and not trigger.years:
        passed = (moment.astimezone(trigger.timezone).date() - trigger.start_date).days
        trigger.start_date += timedelta(days=max(0, passed // days - 1) * days)


def _later(
    trigger: Any, *, previous: datetime, moment: datetime, steps: StepBudget
) -> datetime | None:
    """Return a trigger's next run time after ``previous``; ``None`` if it gives no later time."""
    for now in (moment, _moved(moment, _INSTANT)):
        following = _asked(trigger, previous, now, steps)
        if following is None or following.timestamp() > previous.timestamp():
            return following
    # A custom trigger that gives the same time again counts as having no next run time.
    return None


def _asked(
    trigger: Any, previous: datetime | None, now: datetime, steps: StepBudget
) -> datetime | None:
    """Call ``get_next_fire_time`` of a trigger that is no combination, with limits."""
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
    trigger: CronTrigger, previous: datetime | None, now: datetime, steps: StepBudget
) -> datetime | None:
    """Call ``get_next_fire_time`` of a cron trigger, so that it searches some years at a time.

    If the trigger has no run time within a hundred years, the answer is ``None``.
    """
    # The mean number of expressions in a field; 1 or more, because each field has one.
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
            until += _SEARCHED_AT_ONCE / weight
        except OverflowError:  # after the year 9999, the last one of Python's times
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
    """Return whether a calendar interval has a date after a run time, up to ``_LAST_YEAR``."""
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
    """Return ``moment + by`` in elapsed time, because local time may skip or repeat an hour."""
    return (moment.astimezone(timezone.utc) + by).astimezone(moment.tzinfo)


def _jittered(moment: datetime, jitter: float) -> datetime:
    """Return a random time from ``moment`` to ``jitter`` seconds later."""
    return _moved(moment, timedelta(seconds=random.uniform(0, jitter)))  # noqa: S311  # no secret


def _timestamp(moment: datetime) -> float:
    return moment.timestamp()
