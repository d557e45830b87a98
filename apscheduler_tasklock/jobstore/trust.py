"""Which rows may be run: whoever can write the table must not be able to run code of his own."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from inspect import getattr_static, isclass, ismethod
from types import GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import Any

from apscheduler.util import ref_to_obj

from apscheduler_tasklock._values import LONGEST_VALUE, cut, shown
from apscheduler_tasklock.errors import TaskLockError, TaskLockOptionError

# Bytes that a key has at least.
SHORTEST_KEY = 16

_NOTHING = object()
# What reads an attribute of an object that is not written in Python.
_BUILT_IN = (GetSetDescriptorType, MemberDescriptorType)


class UntrustedError(TaskLockError):
    """A row may not be run: its function is not allowed, or its signature is not ours."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message))


class AllowedFunctions:
    """Which functions jobs may call.

    :param prefixes: packages, modules, classes or functions, by their dotted names; ``None`` for
        all functions
    :raises TaskLockOptionError: one of them is no name
    """

    def __init__(self, prefixes: Sequence[str] | str | None) -> None:
        names = [prefixes] if isinstance(prefixes, str) else prefixes
        if names is not None and not (
            isinstance(names, Collection)
            and all(isinstance(name, str) and name.strip(".") for name in names)
        ):
            raise TaskLockOptionError(
                f"functions must be a list of names such as 'myapp.', not {prefixes!r}"
            )
        self._names = None if names is None else [name.rstrip(".") for name in names]

    def load(self, reference: str) -> Any:
        """Return the function that a reference names.

        No module is imported that is not allowed, also not by way of one that is: only functions
        and classes are looked for that are in the module itself.

        :raises UntrustedError: it is not allowed
        :raises Exception: it cannot be imported; whatever the import raises
        """
        if self._names is None:
            return ref_to_obj(reference)
        parts = _parts(reference)
        module = reference.partition(":")[0]
        self._check_allowed(".".join([module, *parts]), reference)
        owner: Any = import_module(module)
        found = vars(owner).get(parts[0], _NOTHING)
        for part in parts[1:]:
            if not issubclass(type(found), type):
                break
            owner, found = found, _member(found, part)
        else:
            if found is not _NOTHING:
                self._check_found(found, owner, reference)
                return found
        if found is _NOTHING:
            raise LookupError(f"there is no {reference!r}")
        raise UntrustedError(
            f"{reference!r} is in a {type(found).__qualname__}; only functions of modules and of "
            f"classes are allowed here: functions={self._names!r}"
        )

    def check(self, function: Any, reference: str) -> None:
        """Make sure that a job's function is allowed, by what it is and not by what it is called.

        ``"myapp.jobs:os.system"`` names a function of another module.

        :raises UntrustedError: it is not
        """
        if self._names is None:
            return
        _parts(reference)
        instance = function.__self__ if ismethod(function) else None
        self._check_found(function, instance if isclass(instance) else type(instance), reference)

    def _check_found(self, function: Any, owner: Any, reference: str) -> None:
        """Make sure that what was found is the function that a reference names, and is allowed.

        :param owner: in which module or class it was found
        """
        module, name = _told(function, "__module__"), _told(function, "__qualname__")
        if module is None or name is None:
            raise UntrustedError(
                f"{shown(reference)} is a {type(function).__qualname__}, which does not say where "
                "it was defined; only functions, methods and classes are allowed"
            )
        self._check_allowed(f"{module}.{name}", reference)
        if reference not in (f"{module}:{name}", _name_where_inherited(owner, module, name)):
            raise UntrustedError(
                f"the function {reference!r} is {module}:{name}, which is not allowed under "
                "another name; pass the function itself, or that name"
            )

    def _check_allowed(self, name: str, reference: str) -> None:
        allowed = self._names or ()
        if any(name == one or name.startswith(f"{one}.") for one in allowed):
            return
        called = (
            "" if name == reference.replace(":", ".") else f", which is {cut(name, LONGEST_VALUE)}"
        )
        raise UntrustedError(
            f"the function {shown(reference)}{called} is not allowed here: functions={allowed!r}"
        )


def _parts(reference: str) -> list[str]:
    """Return the names in a reference behind its module.

    :raises UntrustedError: one is none of an ordinary function: ``guarded.__wrapped__`` would be
        what a decorator guards. To import ``package.__main__`` would run it.
    """
    module, _, path = reference.partition(":")
    parts = path.split(".")
    names = parts if module == "__main__" else [*module.split("."), *parts]
    if not all(name.isidentifier() and not _is_dunder(name) for name in names):
        raise UntrustedError(
            f"{reference!r} is not allowed: it has to be names, none of them as __this__"
        )
    return parts


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _member(owner: Any, name: str) -> Any:
    """Return what a class has under a name, without running code of its own."""
    found = getattr_static(owner, name, _NOTHING)
    return getattr(owner, name) if type(found) in (classmethod, staticmethod) else found


def _told(function: Any, attribute: str) -> str | None:
    """Return the text that a function or class has as an attribute, without running its code.

    What is no function may stand for anything, such as a module that is imported when it is used.
    """
    function = getattr(function, "__func__", None) if type(function) is MethodType else function
    found = getattr_static(function, attribute, None)
    if issubclass(type(function), type) or isinstance(found, _BUILT_IN):
        found = getattr(function, attribute, None)
    return found if isinstance(found, str) else None


def _name_where_inherited(owner: Any, module: str, name: str) -> str | None:
    """Return what a class calls a function that it has from another class."""
    member = name.rpartition(".")[2]
    for base in owner.__mro__ if issubclass(type(owner), type) else ():
        if f"{base.__module__}:{base.__qualname__}.{member}" == f"{module}:{name}":
            return f"{owner.__module__}:{owner.__qualname__}.{member}"
    return None


def canonical(state: Any) -> str:
    """Return decoded JSON in one way of writing: jsonb rewrites what it is given.

    It tells ``1``, ``1.0`` and ``True`` apart, which Python calls equal.

    :raises RecursionError: it is nested too deeply
    """
    return json.dumps(state, sort_keys=True, separators=(",", ":"))


class Signer:
    """Signs what is stored of a job, so that nobody else can make up or change one.

    :param keys: any of them verifies, the first one signs; texts or bytes
    :raises TaskLockOptionError: there is no key, or one of them is too short
    """

    def __init__(self, keys: Sequence[str | bytes] | str | bytes) -> None:
        given: Sequence[Any] = []
        if isinstance(keys, (str, bytes)):
            given = [keys]
        elif isinstance(keys, Collection):
            given = list(keys)
        if not given or not all(isinstance(key, (str, bytes)) for key in given):
            raise TaskLockOptionError("secret must be a text, bytes, or a list of these")
        self._keys = [key.encode() if isinstance(key, str) else key for key in given]
        if any(len(key) < SHORTEST_KEY for key in self._keys):
            raise TaskLockOptionError(f"secret must have at least {SHORTEST_KEY} bytes")

    def sign(self, signed: Mapping[str, Any]) -> str:
        """Return the signature of what is stored of a job, and of where that is."""
        return self._signature(self._keys[0], signed)

    def verify(self, signed: Mapping[str, Any], signature: str | None) -> bool:
        """Make sure that one of our keys has signed this; tell whether it was the first one.

        :raises UntrustedError: none has
        """
        if signature is None:
            raise UntrustedError("it is not signed")
        for key in self._keys:
            if hmac.compare_digest(self._signature(key, signed).encode(), signature.encode()):
                return key == self._keys[0]
        raise UntrustedError(
            "its signature is none of ours: somebody else wrote or changed it, it was moved here, "
            "or it was signed with a secret that is not given here"
        )

    def _signature(self, key: bytes, signed: Mapping[str, Any]) -> str:
        return hmac.new(key, canonical(signed).encode(), hashlib.sha256).hexdigest()
