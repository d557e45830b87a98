"""Turns jobs into definitions for their rows (function, trigger, options, arguments), and back."""

from __future__ import annotations

import json
import pickle
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from inspect import isclass, ismethod
from typing import Any
from uuid import UUID

from apscheduler.triggers.base import BaseTrigger
from apscheduler.util import obj_to_ref

from apscheduler_tasklock._lock.job_rows import JobRow
from apscheduler_tasklock._lock.words import printable
from apscheduler_tasklock._values import LONGEST_NAME, cut, shown
from apscheduler_tasklock.errors import TaskLockError, TaskLockOptionError
from apscheduler_tasklock.jobstore.stored_triggers import (
    declared_schedule,
    decode_trigger,
    encode_trigger,
)
from apscheduler_tasklock.jobstore.stored_values import (
    UnreadableError,
    UnstorableError,
    decode,
    encode,
)
from apscheduler_tasklock.jobstore.trust import AllowedFunctions, Signer, UntrustedError, canonical
from apscheduler_tasklock.options import LONGEST_SECONDS
from apscheduler_tasklock.schema.table import LARGEST_DEFINITION

# The options of a job that are stored in its row, with the types that APScheduler allows.
_OPTIONS: Mapping[str, type | tuple[type, ...]] = {
    "name": str,
    "misfire_grace_time": (int, float, type(None)),
    "coalesce": bool,
    "max_instances": int,
}
_ATTRIBUTES = frozenset({"func", "trigger", "args", "kwargs", "executor", *_OPTIONS})
_PICKLE = "pickle"


@dataclass(frozen=True)
class Definition:
    """A job's definition as its row has it: JSON-like data and texts.

    :ivar func: the function's reference, such as ``"myapp.jobs:send"``
    :ivar trigger: the encoded trigger
    :ivar options: ``name``, ``misfire_grace_time``, ``coalesce`` and ``max_instances``
    :ivar arguments: the encoded ``args`` and ``kwargs``
    :ivar executor: the alias of the job's executor
    """

    func: str
    trigger: dict[str, Any]
    options: dict[str, Any]
    arguments: dict[str, Any]
    executor: str

    @classmethod
    def of(cls, row: JobRow) -> Definition:
        """Return the definition in a row. The row's signature is not verified."""
        return cls(row.func, row.trigger, row.options, row.arguments, row.executor)

    @property
    def columns(self) -> dict[str, Any]:
        """The parts of the definition by the names of their columns."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def is_same(self, other: Definition) -> bool:
        """Return whether two definitions are equal, also in the types of their values."""
        # canonical() fails on a definition that is nested too deeply. It cannot fail here: this
        # definition was encoded here, and the other one is equal to it, and so is nested as deeply.
        return self == other and canonical(self.columns) == canonical(other.columns)

    @property
    def schedule(self) -> Any:
        """The declared part of the trigger; see :func:`declared_schedule`."""
        return declared_schedule(self.trigger)

    @property
    def is_one_off(self) -> bool:
        """Whether the job has only one run time."""
        return self.trigger.get("type") == "date"


class MissingFunction:
    """Stands in for a job's function that this process cannot or may not import.

    :param reference: the function's reference
    """

    def __init__(self, reference: str) -> None:
        self._reference = reference

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise an error, because the function is missing.

        :raises LookupError: always
        """
        raise LookupError(f"the function {shown(self._reference)} is not available in this process")


class UnreadableTrigger(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types
    """Stands in for the trigger of a job whose row cannot be read.

    :param error: why the row cannot be read
    """

    __slots__ = ("_error",)

    def __init__(self, error: TaskLockError) -> None:
        self._error = error

    def get_next_fire_time(self, _previous_fire_time: Any, _now: Any) -> Any:
        """Raise an error, because ``resume_job`` removes a job whose trigger returns ``None``.

        :raises UnreadableError: always
        """
        raise UnreadableError(
            f"its run times are unknown, because its row cannot be read: {self._error}"
        )

    def __str__(self) -> str:
        return f"unreadable: {self._error}"


def check_names(names: Mapping[str, str]) -> None:
    """Make sure that no name is too long, because each replica remembers and sends names.

    :param names: names of parts of a job; each key is the part, such as ``"function"``
    :raises UnreadableError: a name is too long
    """
    for what, name in names.items():
        if len(name) > LONGEST_NAME:
            raise UnreadableError(
                f"its {what} has more than {LONGEST_NAME:,} characters: {shown(name)}"
            )


class JobCodec:
    """Makes definitions of jobs, and reads the definitions in rows.

    :param functions: which functions jobs may call
    :param signer: signs and verifies rows; without it rows are not signed
    :param pickles: whether triggers and arguments are pickled, which needs a signer
    """

    def __init__(
        self, functions: AllowedFunctions, signer: Signer | None = None, *, pickles: bool = False
    ) -> None:
        if pickles and signer is None:
            raise TaskLockOptionError(
                "serializer='pickle' needs secret=..., because anybody who can write an unsigned "
                "row could run any code"
            )
        self._functions = functions
        self._signer = signer
        self._pickles = pickles

    def encode(self, job: Any) -> Definition:
        """Return the definition of a job.

        :raises UnstorableError: the job cannot be stored, or would come back different
        :raises TaskLockOptionError: its function is not allowed
        """
        definition = Definition(**self._encoded(job, _ATTRIBUTES))
        _check_size(definition, job.id)
        return definition

    def change(self, definition: Definition, job: Any, names: Collection[str]) -> Definition:
        """Return a definition in which the attributes that a user has changed are replaced.

        The other attributes stay as they are stored.

        :param names: the names of the changed attributes
        :raises UnstorableError: as :meth:`encode`
        :raises TaskLockOptionError: as :meth:`encode`
        :raises UnreadableError: the arguments change, and the stored arguments cannot be read
        """
        encoded = self._encoded(job, names, definition)
        options = {**definition.options, **encoded.pop("options", {})}
        changed = replace(definition, **encoded, options=options)
        _check_size(changed, job.id)
        return changed

    def _encoded(
        self, job: Any, names: Collection[str], before: Definition | None = None
    ) -> dict[str, Any]:
        """Return the columns for some attributes of a job."""
        where, encoded = f"job {shown(job.id)}", dict[str, Any]()
        _check_storable(job, names, where)
        try:
            if "func" in names:
                encoded["func"] = self._encode_function(job)
            if "trigger" in names:
                encoded["trigger"] = self._encode_trigger(job.trigger)
            if "executor" in names:
                encoded["executor"] = encode(str(job.executor), "executor")
            options = {name: encode(getattr(job, name), name) for name in _OPTIONS if name in names}
            if options:
                encoded["options"] = options
            changed = self._arguments(job, names)
            if changed:
                stored = {} if before is None else self._decode_arguments(before)
                encoded["arguments"] = self._encode_arguments(**{**stored, **changed})
        except UnstorableError as error:
            raise UnstorableError(f"{where}: {error}") from error.__cause__
        except UntrustedError as error:
            raise TaskLockOptionError(f"{where}: {error}") from None
        return encoded

    def _arguments(self, job: Any, names: Collection[str]) -> dict[str, Any]:
        """Return a job's ``args`` and ``kwargs``, each only if it is among the given attributes.

        The instance of a method can be the first of the ``args``.
        """
        arguments = {name: getattr(job, name) for name in ("args", "kwargs") if name in names}
        if _is_called_with_instance(job) and ("func" in names or "args" in names):
            arguments["args"] = (job.func.__self__, *job.args)
        return arguments

    def _encode_function(self, job: Any) -> str:
        if not job.func_ref:
            raise UnstorableError(
                f"its function {job.func!r} cannot be stored, because no module has it under a "
                "name (a lambda, a partial or a nested function); pass a function of a module"
            )
        self._functions.check(job.func, job.func_ref)
        return str(encode(str(job.func_ref), "func"))

    def decode(self, definition: Definition) -> dict[str, Any]:
        """Return a job's attributes without its function. The definition must be verified.

        :raises UnreadableError: the definition cannot be read
        """
        check_names({"function": definition.func, "executor": definition.executor})
        arguments = self._decode_arguments(definition)
        try:
            options = {name: decode(definition.options[name]) for name in _OPTIONS}
        except UnreadableError:
            raise
        except KeyError as error:
            raise UnreadableError(f"its row lacks {error}") from error
        except Exception as error:  # any error makes only this row unreadable
            raise UnreadableError(f"its options cannot be read: {shown(error)}") from error
        invalid = _invalid_option(options)
        if invalid is not None:
            raise UnreadableError(f"its {invalid}")
        check_names({"name": options["name"]})
        # APScheduler logs the name as it is, so a line break in a row's name would forge lines.
        options["name"] = printable(options["name"])
        return {
            "trigger": self.decode_trigger(definition),
            "executor": definition.executor,
            **arguments,
            **options,
        }

    def _decode_arguments(self, definition: Definition) -> dict[str, Any]:
        arguments = self._checked(definition.arguments)
        try:
            if _PICKLE in arguments:
                args, kwargs = _unpickled(arguments)
            else:
                args, kwargs = decode(arguments["args"]), decode(arguments["kwargs"])
        except UnreadableError:
            raise
        except KeyError as error:
            raise UnreadableError(f"its row lacks {error}") from error
        except Exception as error:  # any error makes only this row unreadable
            raise UnreadableError(f"its arguments cannot be read: {shown(error)}") from error
        if not isinstance(args, (list, tuple)) or not isinstance(kwargs, dict):
            raise UnreadableError("its args must be a list, and its kwargs an object")
        return {"args": tuple(args), "kwargs": kwargs}

    def decode_trigger(self, definition: Definition) -> Any:
        """Return the trigger of a job; see :meth:`decode`.

        :raises UnreadableError: the trigger cannot be read
        """
        trigger = self._checked(definition.trigger)
        return _unpickled(trigger) if _PICKLE in trigger else decode_trigger(trigger)

    def placeholder(self, job_id: str, definition: Definition, error: TaskLockError) -> Any:
        """Return the attributes that users see of a job whose row is unreadable or not verified."""
        return {
            "trigger": UnreadableTrigger(error),
            "executor": definition.executor,
            "args": (),
            "kwargs": {},
            "name": printable(cut(job_id, LONGEST_NAME)),
            "misfire_grace_time": None,
            "coalesce": True,
            "max_instances": 1,
        }

    def load_function(self, definition: Definition) -> Any:
        """Return the function of a job.

        :raises UntrustedError: the function is not allowed
        :raises Exception: the function cannot be imported; an import can raise anything
        """
        try:
            return self._functions.load(definition.func)
        except SystemExit as error:  # because it would end the thread silently
            raise ImportError(f"its module calls sys.exit({error.code!r})") from error

    @property
    def signs(self) -> bool:
        """Whether rows are signed."""
        return self._signer is not None

    def sign(
        self, job_id: str, definition: Definition, definition_id: UUID, place: str
    ) -> str | None:
        """Return the signature of a row; ``None`` if rows are not signed.

        :param definition_id: the uuid of this change
        :param place: database, schema and table of the row, as PostgreSQL reports them
        """
        if self._signer is None:
            return None
        return self._signer.sign(_signed(job_id, definition, definition_id, place))

    def verified(self, row: JobRow) -> Definition:
        """Return the definition in a row. If rows are signed, verify its signature.

        :raises UntrustedError: the signature is missing or wrong
        """
        definition = Definition.of(row)
        self._is_signed_first(row, definition)
        return definition

    def is_up_to_date(self, row: JobRow) -> bool:
        """Return whether a row is signed with the first key, which signs new rows.

        :raises UntrustedError: the signature is missing or wrong
        """
        return self._is_signed_first(row, Definition.of(row))

    def _is_signed_first(self, row: JobRow, definition: Definition) -> bool:
        if self._signer is None:
            return True
        try:
            signed = _signed(row.id, definition, row.definition_id, row.place)
            return self._signer.verify(signed, row.signature)
        except RecursionError as error:  # no row that was signed here is nested so deeply
            raise UntrustedError(f"its signature cannot be checked: {error}") from error

    def _checked(self, data: Any) -> Mapping[str, Any]:
        if not isinstance(data, dict):
            raise UnreadableError(
                f"a column of its row must have a JSON object, and has a {type(data).__name__}"
            )
        if _PICKLE in data and not self._pickles:
            raise UnreadableError("it is pickled, and this job store reads JSON")
        return data

    def _encode_trigger(self, trigger: Any) -> dict[str, Any]:
        try:
            return encode_trigger(trigger)
        except UnstorableError:
            if not self._pickles:
                raise
            return _pickled(trigger, "the trigger")

    def _encode_arguments(self, args: Collection[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if self._pickles:
            return _pickled((tuple(args), dict(kwargs)), "the arguments")
        return {
            "args": [encode(value, f"args[{n}]") for n, value in enumerate(args)],
            "kwargs": encode(dict(kwargs), "kwargs"),
        }


def _check_storable(job: Any, names: Collection[str], where: str) -> None:
    """Make sure that some attributes of a job can be stored.

    :raises UnstorableError: an attribute cannot be stored
    """
    named = {name: getattr(job, name) for name in ("executor", "name") if name in names}
    if "func" in names:
        named["function"] = job.func_ref or ""
    try:
        check_names({"id": job.id, **named})
    except UnreadableError as error:
        raise UnstorableError(f"{where} cannot be stored: {error}") from None
    invalid = _invalid_option({n: getattr(job, n) for n in _OPTIONS if n in names})
    if invalid is not None:
        raise UnstorableError(f"{where}: its {invalid}")


def _check_size(definition: Definition, job_id: str) -> None:
    """Make sure that a definition is not larger than the table allows.

    :raises UnstorableError: the definition is too large
    """
    parts = definition.trigger, definition.options, definition.arguments
    size = sum(len(json.dumps(part, ensure_ascii=False).encode()) for part in parts)
    if size > LARGEST_DEFINITION:
        raise UnstorableError(
            f"job {shown(job_id)} cannot be stored: its trigger, options and arguments have "
            f"{size:,} bytes as JSON, and at most {LARGEST_DEFINITION:,} are allowed; pass the job "
            "a key, such as a row's id, and let it read the rest"
        )


def _invalid_option(options: Mapping[str, Any]) -> str | None:
    """Return which option of a job is invalid, and why; ``None`` if all options are valid."""
    for name, value in options.items():
        if not isinstance(value, _OPTIONS[name]):
            return f"{name} cannot be {shown(value)}"
    grace = options.get("misfire_grace_time")
    if grace is not None and not 0 < grace <= LONGEST_SECONDS:
        return (
            f"misfire_grace_time must be above 0 and at most {LONGEST_SECONDS:.0f} s, or None for "
            "no limit"
        )
    return None if options.get("max_instances", 1) > 0 else "max_instances must be above 0"


def _signed(
    job_id: str, definition: Definition, definition_id: UUID | None, place: str
) -> dict[str, Any]:
    """Return what a row's signature covers: the row's definition, its ids, and its place."""
    return {
        "place": place,
        "id": job_id,
        "definition": str(definition_id),
        "state": definition.columns,
    }


def _pickled(value: Any, what: str) -> dict[str, Any]:
    try:
        return {_PICKLE: b64encode(pickle.dumps(value)).decode()}
    except Exception as error:  # an object's own code can raise anything
        raise UnstorableError(f"{what} cannot be pickled: {error}") from error


def _unpickled(data: Mapping[str, Any]) -> Any:
    read: Callable[[bytes], Any] = pickle.loads  # only verified rows are unpickled
    try:
        return read(b64decode(data[_PICKLE]))
    except (Exception, SystemExit) as error:
        raise UnreadableError(f"it has a pickle that cannot be read: {shown(error)}") from error


def _is_called_with_instance(job: Any) -> bool:
    """Return whether a job's function is a method whose instance is stored as its first argument.

    The answer is ``False`` if the reference names the instance: ``"myapp.jobs:mailer.send"``.
    """
    if not ismethod(job.func) or isclass(job.func.__self__):
        return False
    try:
        return bool(job.func_ref == obj_to_ref(job.func))
    except (AttributeError, TypeError, ValueError):  # the method has no name in its class
        return False
