"""Lock options: their checks and defaults, and which value wins if several places give one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, Final, Literal

from apscheduler_tasklock._values import LONGEST_NAME
from apscheduler_tasklock.errors import LONGEST_RETRY_DELAY, TaskLockOptionError

# The key of the lock options in a job's kwargs.
RESERVED_KEY = "task_lock"

# Limits every option that is a time, in seconds: to 100 years, which is longer than any schedule
# and far below the end of PostgreSQL's timestamps.
LONGEST_SECONDS = timedelta(days=36500).total_seconds()

# Limit the default lease, in seconds and as a share of the maximum lock.
DEFAULT_LEASE = 60.0
DEFAULT_LEASE_SHARE = 1 / 3
# The shortest default lease of a job that has no failover, in seconds. If the default would be
# shorter, claims have no lease, because the end of the maximum lock frees the task soon enough.
SHORTEST_DEFAULT_LEASE = 15.0

# The options for one limit, of which a place gives one at most: as a factor, or in seconds.
_EITHER = (("min_factor", "min_lock"), ("max_factor", "max_lock"))


class Default(Enum):
    """The type of ``DEFAULT``, the value of an option that was not given.

    ``None`` cannot be that value, because some options can be given as ``None``.
    """

    DEFAULT = "the default"

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = Default.DEFAULT

# A lease must not be shorter than so many seconds, because a claim is renewed three times in each
# lease, and a renewal needs time in a busy process and on the network.
SHORTEST_LEASE = 1.0
# A lease below so many seconds is logged as a WARNING, because a job may lose its lock in a short
# stall of the database or the process.
SHORT_LEASE = 5.0
# Limits a leader's lease. A longer one, which no replica writes, counts as over.
LONGEST_LEADER_LEASE = 3600.0

# The default minimum lock, as a multiple of the period: 0.9 and not 1.0, because with 1.0 the next
# run time could be a few milliseconds before the end of the last window, and would be skipped.
DEFAULT_MIN_FACTOR = 0.9
# The default minimum lock of a one-off job, in seconds. Replicas that add the same job within these
# seconds run the job once. A new job that gets the same id after these seconds is run, too.
ONE_OFF_MIN_LOCK = 60.0

# How long rows of ended one-off jobs are kept, by default and at least, in seconds. Replicas delete
# such rows once an hour.
KEEP_ONE_OFFS = 7 * 24 * 3600.0
SHORTEST_KEPT = 3600.0

# The default of the option `grace` is this share of the period.
GRACE_SHARE = 0.1
# The shortest and the longest default of the option `grace`, in seconds.
SHORTEST_GRACE = 60.0
LONGEST_GRACE = 600.0

# The smallest number above 0: the least value of an option that must be above 0.
ABOVE_0 = math.ulp(0.0)


def parse_number(
    value: Any,
    option: str,
    where: str,
    least: float = 0.0,
    most: float = math.inf,
    *,
    allowed: str = "a number, 0 or more",
) -> float:
    """Return a number within a range, given as a number or as a string.

    :param option: names the value in the message
    :param where: names the owner of the value in the message
    :param allowed: says in the message what the value may be
    :raises TaskLockOptionError: the value is no number, or outside the range
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and least <= number <= most):
        raise TaskLockOptionError(f"{where}: {option} must be {allowed}, not {value!r}")
    return number


def parse_count(
    value: Any,
    option: str,
    where: str,
    most: float = math.inf,
    *,
    allowed: str = "a whole number, 0 or more",
) -> int:
    """Return a whole number, 0 or more, given as a number or as a string."""
    number = parse_number(value, option, where, most=most, allowed=allowed)
    if number != int(number):
        raise TaskLockOptionError(f"{where}: {option} must be {allowed}, not {value!r}")
    return int(number)


def parse_seconds(
    value: Any,
    option: str,
    where: str,
    least: float = 0.0,
    most: float = LONGEST_SECONDS,
    *,
    allowed: str = "from 0 to 100 years",
) -> float:
    """Return a time in seconds, which is a ``timedelta``, or seconds as a number or as a string."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    allowed = f"seconds or a timedelta, {allowed}"
    return parse_number(seconds, option, where, least, most, allowed=allowed)


def parse_positive_seconds(value: Any, option: str, where: str) -> float:
    """Return a time in seconds, above 0."""
    allowed = "above 0 and at most 100 years"
    return parse_seconds(value, option, where, ABOVE_0, allowed=allowed)


def parse_switch(value: Any, option: str, where: str, hint: str = "") -> bool:
    """Return a ``bool``, given as a ``bool`` or as the text ``"true"`` or ``"false"``."""
    switches = {"true": True, "false": False}
    switched = switches.get(str(value).lower())
    if switched is None:
        raise TaskLockOptionError(f"{where}: {option} must be True or False, not {value!r}{hint}")
    return switched


def parse_choice(value: Any, option: str, where: str, choices: Sequence[str]) -> str:
    """Return a word that is one of the choices."""
    if value not in choices:
        known = " or ".join(map(repr, choices))
        raise TaskLockOptionError(f"{where}: {option} must be {known}, not {value!r}")
    return str(value)


def _parse_text(value: Any, option: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise TaskLockOptionError(
            f"{where}: {option} must be a text that is not empty, not {value!r}"
        )
    return value


def _parse_lease(value: Any, option: str, where: str) -> float:
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        return math.inf
    allowed = "1 s or more, so that renewals have time to arrive, or None for the maximum lock"
    return parse_seconds(value, option, where, SHORTEST_LEASE, allowed=allowed)


def _option(
    parse: Callable[..., Any], default: Any = None, *, of_executor: bool = False, **checks: Any
) -> Any:
    """Return the row of an option in ``LockOptions``, which is the table of all lock options.

    :param parse: called with a given value, the option's name and the name of its owner; returns
        the value as it is stored, or raises
    :param default: the value if no place gives one; ``None``: it depends on the job
    :param of_executor: whether the executor takes the option for all of its jobs, too
    :param checks: further arguments for ``parse``, such as the range
    """
    parse_value = partial(parse, **checks)
    row = {"parse": parse_value, "default": default, "of_executor": of_executor}
    return field(default=None, metadata=row)


@dataclass(frozen=True)
class LockOptions:
    """The lock options that one place gives, such as a job's kwargs, its function or the executor.

    If an option is ``None``, this place does not give it, and the next weaker place decides. Times
    are seconds here, and are given as a ``timedelta`` or seconds.

    :ivar name: the task's name. Two jobs with the same name are one task. By default the job's id.
    :ivar min_factor: minimum lock, as a multiple of the period; 0 or more. By default 0.9; of
        one-off jobs 60 s instead.
    :ivar max_factor: maximum lock, as a multiple of the period; above 0
    :ivar min_lock: minimum lock, in place of ``min_factor``; 0 or more
    :ivar max_lock: maximum lock, in place of ``max_factor``; above 0
    :ivar period: period of a run time that no other follows, as of a date trigger. The maximum lock
        of one-off jobs comes from it.
    :ivar lease: how long after its last renewal a holder counts as dead, 1 s or more; below 5 s is
        a WARNING. A living holder renews its claim after each third of the lease. ``None``, which
        is stored as infinity: no lease, and a holder counts as dead when its maximum lock ends. By
        default 60 s, or a third of the maximum lock if that is shorter; none where that is below
        15 s, or with ``failover`` below 1 s.
    :ivar failover: whether another replica runs the window of a dead holder again. Without
        failover, no replica runs that window again. With failover, the window may be run twice. The
        run is given up after ``max_takeovers`` takeovers, or when its maximum lock ends.
    :ivar max_takeovers: how many dead runs of a task in a row are taken over, 0 or more; the next
        dead run is given up
    :ivar cancel_on_lost: whether a coroutine job is cancelled when its lock is lost
    :ivar on_failure: what becomes of the window if the job raises: ``"keep"`` it, or ``"release"``
        it, so that it is open again at once, or with ``retries`` after the last attempt
    :ivar grace: how long after a run time was due it counts as overdue. By default a tenth of the
        period, at least 60 s and at most 10 min, never below the job's own
        ``misfire_grace_time``; in each case plus the trigger's jitter.
    :ivar max_runtime: after this a run is reported as too long. Nothing ends it. By default the
        maximum lock.
    :ivar retries: how many times a job that raises an exception is run again, on any replica; 0 to
        20. A retry begins before the job's next run time is due, or never. **One run time may then
        be begun more than once**, also without ``failover``: once per attempt.
    :ivar retry_delay: the delay from the end of a failed run until its first retry, a day at most.
        Up to a tenth is added at random.
    :ivar retry_backoff: by how much the delay of each further retry is multiplied; 1 to 100
    """

    name: str | None = _option(_parse_text)
    min_factor: float | None = _option(parse_number, of_executor=True)
    max_factor: float | None = _option(
        parse_number, 5.0, of_executor=True, least=ABOVE_0, allowed="a number above 0"
    )
    min_lock: float | None = _option(parse_seconds)
    max_lock: float | None = _option(parse_positive_seconds)
    period: float | None = _option(parse_positive_seconds, 3600.0, of_executor=True)
    lease: float | None = _option(_parse_lease, of_executor=True)
    failover: bool | None = _option(
        parse_switch,
        False,
        of_executor=True,
        hint="; after how many seconds a holder counts as dead is the option 'lease'",
    )
    max_takeovers: int | None = _option(parse_count, 3, of_executor=True)
    cancel_on_lost: bool | None = _option(parse_switch, False)
    on_failure: Literal["keep", "release"] | None = _option(
        parse_choice, "keep", choices=("keep", "release")
    )
    grace: float | None = _option(parse_seconds)
    max_runtime: float | None = _option(parse_positive_seconds)
    # Limited, so that a mistyped number does not keep a job busy for days.
    retries: int | None = _option(
        parse_count, 0, of_executor=True, most=20, allowed="a whole number from 0 to 20"
    )
    retry_delay: float | None = _option(
        parse_seconds, 30.0, of_executor=True, most=LONGEST_RETRY_DELAY, allowed="from 0 to a day"
    )
    retry_backoff: float | None = _option(
        parse_number, 2.0, of_executor=True, least=1, most=100, allowed="a number from 1 to 100"
    )

    @classmethod
    def parse(cls, options: Mapping[str, Any], where: str) -> LockOptions:
        """Check options, and return them.

        :param options: option names and values; a number may be a string, a time a ``timedelta``
        :param where: names the owner of the options in messages, as in ``job "clean-up"``
        :raises TaskLockOptionError: an option is unknown or impossible
        """
        rows = {row.name: row.metadata for row in fields(cls)}
        for option in options:
            if option not in rows:
                raise TaskLockOptionError(
                    f"{where}: unknown task lock option {option!r}; allowed are {', '.join(rows)}"
                )
        given = {
            key: value
            for key, value in options.items()
            if value is not DEFAULT and (value is not None or key == "lease")
        }
        parsed = cls(**{key: rows[key]["parse"](value, key, where) for key, value in given.items()})
        parsed._check_pairs(where)
        return parsed

    def over(self, weaker: LockOptions, where: str) -> LockOptions:
        """Return these options; where one is not given, the weaker place's option is used.

        A minimum or maximum lock that is given here replaces that of the weaker place, even if one
        is given as a factor and the other one in seconds.

        :raises TaskLockOptionError: the merged options are impossible together
        """
        given = set(self.given)
        replaced = given.union(*(pair for pair in _EITHER if not given.isdisjoint(pair)))
        merged = replace(weaker, **{name: getattr(self, name) for name in replaced})
        merged._check_pairs(where)
        return merged

    def _check_pairs(self, where: str) -> None:
        for smaller, larger in (("min_factor", "max_factor"), ("min_lock", "max_lock")):
            low, high = getattr(self, smaller), getattr(self, larger)
            if low is not None and high is not None and low > high:
                raise TaskLockOptionError(
                    f"{where}: {smaller} ({low:g}) must not be above {larger} ({high:g})"
                )
        for factor, time in _EITHER:
            if getattr(self, factor) is not None and getattr(self, time) is not None:
                raise TaskLockOptionError(f"{where}: give {factor} or {time}, not both")

    @property
    def given(self) -> list[str]:
        """The names of the options that are given."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]

    def check_default_minimum(self, where: str) -> None:
        """Check the default minimum factor against the maximum factor, if the default is used.

        :raises TaskLockOptionError: the default minimum factor is above the maximum factor
        """
        if self.min_factor is None and self.min_lock is None:
            replace(self, min_factor=DEFAULT_MIN_FACTOR)._check_pairs(where)

    def lock_times(self, period: float, *, one_off: bool = False) -> tuple[float, float]:
        """Return the minimum and maximum lock for a run time, in seconds.

        If a lock time comes from a factor, the maximum lock may be below the minimum lock. Such
        lock times are allowed, because the maximum lock limits a claim, and the minimum lock is the
        length of a window.

        :param period: seconds from the run time to the next one
        :param one_off: whether the job has one run time only
        """
        if self.min_lock is not None:
            least = self.min_lock
        elif self.min_factor is not None:
            least = self.min_factor * period
        else:
            least = ONE_OFF_MIN_LOCK if one_off else DEFAULT_MIN_FACTOR * period
        most = self.max_lock if self.max_lock is not None else (self.max_factor or 0) * period
        return min(least, LONGEST_SECONDS), min(most, LONGEST_SECONDS)

    def lease_within(self, max_lock: float) -> float | None:
        """Return the lease of a claim in seconds, or ``None`` if the claim has no lease.

        :param max_lock: the maximum lock in seconds
        """
        lease = self.lease
        if lease is None:
            lease = min(DEFAULT_LEASE, max_lock * DEFAULT_LEASE_SHARE)
            if lease < (SHORTEST_LEASE if self.failover else SHORTEST_DEFAULT_LEASE):
                return None
        return lease if lease < max_lock else None

    def delay_after(self, attempt: int) -> float | None:
        """Return the seconds until a failed run is run again; ``None``: no retry is left.

        :param attempt: which attempt at its run time has failed; 1 or more
        """
        if attempt > (self.retries or 0):
            return None
        assert self.retry_delay is not None
        assert self.retry_backoff is not None
        return min(self.retry_delay * self.retry_backoff ** (attempt - 1), LONGEST_RETRY_DELAY)


# The default of each option that is the same for all jobs.
DEFAULTS = LockOptions(**{row.name: row.metadata["default"] for row in fields(LockOptions)})
# The options that the executor takes for all of its jobs.
OF_EXECUTOR = [row.name for row in fields(LockOptions) if row.metadata["of_executor"]]


def parse_token(value: Any, where: str) -> int:
    """Return a fencing token, given as a number or as a string of digits."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, str):
        is_whole = re.fullmatch(r"-?[0-9]{1,19}", value.strip()) is not None
    token = int(value) if is_whole else None
    if token is None or not -(2**63) <= token < 2**63:  # the range of PostgreSQL's bigint
        raise TaskLockOptionError(
            f"{where}: token must be a whole number, that of the task's last run, not "
            f"{value!r:.100}"
        )
    return token


def parse_job_options(options: Any, where: str) -> LockOptions | Literal[False]:
    """Return the checked options of one job, or ``False`` for a job without a lock."""
    if options is False:
        return False
    if isinstance(options, LockOptions):
        options._check_pairs(where)
        return options
    if not isinstance(options, Mapping):
        raise TaskLockOptionError(
            f"{where}: task_lock must be a dict of options, or False to run on every replica, "
            f"not {options!r}; for a lock without options of its own, give {{}}"
        )
    return LockOptions.parse(options, where)


def resolve(*places: Any, where: str) -> LockOptions | Literal[False]:
    """Return the options of a job, merged from all places that give options.

    :param places: what each place gives: options, ``False`` or ``None``; the strongest place first
    :param where: names the owner of the options in messages
    :return: the options, or ``False`` if the first of ``places`` that is not ``None`` is ``False``
    :raises TaskLockOptionError: an option is unknown or impossible
    """
    given = [parse_job_options(place, where) for place in places if place is not None]
    if given and given[0] is False:
        return False
    resolved, *weaker = [options for options in given if options is not False] or [LockOptions()]
    for options in weaker:
        resolved = resolved.over(options, where)
    return resolved


def check_stored_options(options: LockOptions, where: str) -> None:
    """Check that a job of a ``TaskLockJobStore`` can have these options.

    :raises TaskLockOptionError: an option makes no sense there
    """
    if options.on_failure == "release":
        raise TaskLockOptionError(
            f"{where}: on_failure='release' makes no sense in a TaskLockJobStore, where a run "
            "time is claimed once; let the job itself try again"
        )


def check_name(name: str, where: str) -> str:
    """Check that PostgreSQL can store a task's name, and return the name.

    :raises TaskLockOptionError: the name is empty, too long, or has a character that PostgreSQL
        cannot store
    """
    if not isinstance(name, str):
        raise TaskLockOptionError(f"{where}: the name must be a text, not {name!r}")
    if not name:
        raise TaskLockOptionError(f"{where}: the name is empty")
    if name.startswith("\x01"):
        raise TaskLockOptionError(
            f"{where}: the name {name!r} begins with U+0001, as only the task lock's own rows do"
        )
    if "\0" in name:
        raise TaskLockOptionError(
            f"{where}: the name {name!r} has a NUL character, which PostgreSQL cannot store"
        )
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise TaskLockOptionError(
            f"{where}: the name {name!r} has a lone surrogate, which is no valid text"
        ) from None
    if size > LONGEST_NAME:
        raise TaskLockOptionError(
            f"{where}: the name has {size} bytes in UTF-8, and at most {LONGEST_NAME} are "
            "allowed; give the job a shorter id or the option 'name'"
        )
    return name
