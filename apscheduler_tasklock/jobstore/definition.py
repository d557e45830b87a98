"""What a row says of a job: its function, trigger, options and arguments, and how it is read."""

from __future__ import annotations

import pickle
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apscheduler.triggers.base import BaseTrigger

from apscheduler_tasklock._values import LONGEST_NAME, cut, shown
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.jobstore.triggers import (
    declared_schedule,
    decode_trigger,
    encode_trigger,
)
from apscheduler_tasklock.jobstore.trust import AllowedFunctions, Signer, UntrustedError
from apscheduler_tasklock.jobstore.values import UnreadableError, UnstorableError, decode, encode
from apscheduler_tasklock.options import LONGEST_SECONDS

# With the types that APScheduler lets them have.
_OPTIONS: Mapping[str, type | tuple[type, ...]] = {
    "name": str,
    "misfire_grace_time": (int, float, type(None)),
    "coalesce": bool,
    "max_instances": int,
}
_PICKLE = "pickle"


@dataclass(frozen=True)
class Definition:
    """A job as its row has it: JSON-like data, and texts.

    :ivar func: the function's reference, as ``"myapp.jobs:send"``
    :ivar trigger: the encoded trigger
    :ivar options: ``name``, ``misfire_grace_time``, ``coalesce`` and ``max_instances``
    :ivar arguments: the encoded ``args`` and ``kwargs``
    :ivar executor: the alias of its executor
    """

    func: str
    trigger: dict[str, Any]
    options: dict[str, Any]
    arguments: dict[str, Any]
    executor: str

    @property
    def columns(self) -> dict[str, Any]:
        """What it is, by column."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def schedule(self) -> Any:
        """What of the trigger was chosen; see :func:`declared_schedule`."""
        return declared_schedule(self.trigger)

    @property
    def is_one_off(self) -> bool:
        """Whether it has one run time only."""
        return self.trigger.get("type") == "date"


class MissingFunction:
    """Stands for the function of a job that cannot be imported here, or may not be.

    :param reference: the function's
    """

    def __init__(self, reference: str) -> None:
        self._reference = reference

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Say that it is none.

        :raises LookupError: always
        """
        raise LookupError(f"the function {shown(self._reference)} is not available in this process")


class UnreadableTrigger(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    """Stands for the trigger of a job whose row cannot be read.

    :param error: why it cannot
    """

    __slots__ = ("_error",)

    def __init__(self, error: UnreadableError) -> None:
        self._error = error

    def get_next_fire_time(self, _previous_fire_time: Any, _now: Any) -> Any:
        """Say that nobody knows. Of a job without a next time, ``resume_job`` would remove the row.

        :raises UnreadableError: always
        """
        raise UnreadableError(
            f"its row cannot be read, so nobody knows its run times: {self._error}"
        )

    def __str__(self) -> str:
        return f"unreadable: {self._error}"


def check_names(names: Mapping[str, str]) -> None:
    """Make sure that no name is too long: each replica would remember it, and send it.

    :param names: by what they are, for messages
    :raises UnreadableError: one is
    """
    for what, name in names.items():
        if len(name) > LONGEST_NAME:
            raise UnreadableError(
                f"its {what} has more than {LONGEST_NAME:,} characters: {shown(name)}"
            )


class JobCodec:
    """Writes jobs for the table, and reads them.

    :param functions: which functions jobs may call
    :param signer: signs the rows, if they are signed
    :param pickles: whether triggers and arguments are pickled; they are signed then
    """

    def __init__(
        self, functions: AllowedFunctions, signer: Signer | None = None, *, pickles: bool = False
    ) -> None:
        if pickles and signer is None:
            raise TaskLockOptionError(
                "serializer='pickle' needs secret=...: whoever could write an unsigned row could "
                "run any code"
            )
        self._functions = functions
        self._signer = signer
        self._pickles = pickles

    def encode(self, job: Any) -> Definition:
        """Return what is stored of a job.

        :raises UnstorableError: it cannot be stored, or would come back different
        :raises TaskLockOptionError: its function is not allowed
        """
        where = f"job {job.id!r}"
        if not job.func_ref:
            raise UnstorableError(
                f"{where}: its function {job.func!r} cannot be stored, as no module has it under a "
                "name (a lambda, a partial or a nested function); pass one that a module has"
            )
        impossible = _impossible_option({name: getattr(job, name) for name in _OPTIONS})
        if impossible is not None:
            raise UnstorableError(f"{where}: its {impossible}")
        try:
            check_names(
                {"id": job.id, "function": job.func_ref, "executor": job.executor, "name": job.name}
            )
        except UnreadableError as error:
            raise UnstorableError(f"job {shown(job.id)} cannot be stored: {error}") from None
        state = job.__getstate__()  # with the instance of a method before its arguments
        if not isinstance(job.func, MissingFunction):
            try:
                self._functions.check(job.func, job.func_ref)
            except UntrustedError as error:
                raise TaskLockOptionError(f"{where}: {error}") from None
        try:
            return Definition(
                func=encode(str(job.func_ref), "func"),
                trigger=self._encode_trigger(state["trigger"]),
                options={name: encode(state[name], name) for name in _OPTIONS},
                arguments=self._encode_arguments(state["args"], state["kwargs"]),
                executor=encode(str(job.executor), "executor"),
            )
        except UnstorableError as error:
            raise UnstorableError(f"{where}: {error}") from error.__cause__

    def decode(self, definition: Definition, *, is_ours: bool = True) -> dict[str, Any]:
        """Return the attributes of a job, without its function.

        :param is_ours: whether its row was verified; no pickle is read of one that was not
        :raises UnreadableError: its row cannot be read
        """
        check_names({"function": definition.func, "executor": definition.executor})
        arguments = self._checked(definition.arguments, is_ours=is_ours)
        try:
            if _PICKLE in arguments:
                args, kwargs = _unpickled(arguments)
            else:
                args, kwargs = decode(arguments["args"]), decode(arguments["kwargs"])
            options = {name: decode(definition.options[name]) for name in _OPTIONS}
        except UnreadableError:
            raise
        except KeyError as error:
            raise UnreadableError(f"its row lacks {error}") from error
        except Exception as error:  # whatever is raised, it concerns this row alone
            raise UnreadableError(f"its arguments or options cannot be read: {error}") from error
        if not isinstance(args, (list, tuple)) or not isinstance(kwargs, dict):
            raise UnreadableError("its args must be a list, and its kwargs an object")
        impossible = _impossible_option(options)
        if impossible is not None:
            raise UnreadableError(f"its {impossible}")
        check_names({"name": options["name"]})
        return {
            "trigger": self.decode_trigger(definition, is_ours=is_ours),
            "executor": definition.executor,
            "args": tuple(args),
            "kwargs": kwargs,
            **options,
        }

    def decode_trigger(self, definition: Definition, *, is_ours: bool = True) -> Any:
        """Return the trigger of a job; see :meth:`decode`.

        :raises UnreadableError: it cannot be read
        """
        trigger = self._checked(definition.trigger, is_ours=is_ours)
        return _unpickled(trigger) if _PICKLE in trigger else decode_trigger(trigger)

    def placeholder(self, job_id: str, definition: Definition, error: UnreadableError) -> Any:
        """Return attributes with which a job is shown whose row cannot be read."""
        return {
            "trigger": UnreadableTrigger(error),
            "executor": definition.executor,
            "args": (),
            "kwargs": {},
            "name": cut(job_id, LONGEST_NAME),
            "misfire_grace_time": None,
            "coalesce": True,
            "max_instances": 1,
        }

    def load_function(self, definition: Definition) -> Any:
        """Return the function of a job.

        :raises UntrustedError: it is not allowed
        :raises Exception: it cannot be imported; whatever the import raises
        """
        try:
            return self._functions.load(definition.func)
        except SystemExit as error:  # which would end the thread, and say nothing
            raise ImportError(f"its module calls sys.exit({error.code!r})") from error

    def sign(self, job_id: str, definition: Definition) -> str | None:
        """Return the signature of a row; ``None`` if rows are not signed."""
        return None if self._signer is None else self._signer.sign(job_id, definition.columns)

    def verify(self, job_id: str, definition: Definition, signature: str | None) -> None:
        """Make sure that we have signed a row, if rows are signed.

        :raises UntrustedError: we have not
        """
        if self._signer is not None:
            try:
                self._signer.verify(job_id, definition.columns, signature)
            except RecursionError as error:  # deeper than what we could have signed
                raise UntrustedError(f"its signature cannot be checked: {error}") from error

    def _checked(self, data: Any, *, is_ours: bool) -> Mapping[str, Any]:
        if not isinstance(data, dict):
            raise UnreadableError(f"its row has {type(data).__name__} where an object belongs")
        if _PICKLE in data and not self._pickles:
            raise UnreadableError("it is pickled, and this job store reads JSON")
        if _PICKLE in data and not is_ours:  # to read it could run any code
            raise UnreadableError("it is pickled, and its signature is none of ours")
        return data

    def _encode_trigger(self, trigger: Any) -> dict[str, Any]:
        try:
            return encode_trigger(trigger)
        except UnstorableError:
            if not self._pickles:
                raise
            return _pickled(trigger, "the trigger")

    def _encode_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if self._pickles:
            return _pickled((tuple(args), dict(kwargs)), "the arguments")
        return {
            "args": [encode(value, f"args[{n}]") for n, value in enumerate(args)],
            "kwargs": encode(dict(kwargs), "kwargs"),
        }


def _impossible_option(options: Mapping[str, Any]) -> str | None:
    """Return which option of a job cannot be what it is; ``None`` if all can."""
    for name, kinds in _OPTIONS.items():
        if not isinstance(options[name], kinds):
            return f"{name} cannot be {shown(options[name])}"
    grace = options["misfire_grace_time"]
    if grace is not None and not 0 < grace <= LONGEST_SECONDS:
        return (
            f"misfire_grace_time is not above 0 and up to {LONGEST_SECONDS:.0f} s; None: no limit"
        )
    return None if options["max_instances"] > 0 else "max_instances is not above 0"


def _pickled(value: Any, what: str) -> dict[str, Any]:
    try:
        return {_PICKLE: b64encode(pickle.dumps(value)).decode()}
    except Exception as error:  # whatever an object's own code raises
        raise UnstorableError(f"{what} cannot be pickled: {error}") from error


def _unpickled(data: Mapping[str, Any]) -> Any:
    read: Callable[[bytes], Any] = pickle.loads  # of a row that we have signed
    try:
        return read(b64decode(data[_PICKLE]))
    except (Exception, SystemExit) as error:
        raise UnreadableError(f"it has a pickle that cannot be read: {shown(error)}") from error
