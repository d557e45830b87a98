"""Decides which rows may run, so that nobody can run code merely by writing to the table."""

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

# The least number of bytes of a key.
SHORTEST_KEY = 16

_NOTHING = object()
# The descriptors of attributes of objects that are not written in Python.
_BUILT_IN = (GetSetDescriptorType, MemberDescriptorType)


class UntrustedError(TaskLockError):
    """A row may not run, because its function is not allowed or its signature is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message))


class AllowedFunctions:
    """Decides which functions jobs may call.

    :param prefixes: dotted names of packages, modules, classes or functions; ``None`` for all
        functions
    :raises TaskLockOptionError: a prefix is no name
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

        Only an allowed module is imported. Only functions and classes that are already in the
        module's namespace are found, so that the search does not make the module import others.

        :raises UntrustedError: the function is not allowed
        :raises Exception: the function cannot be imported; an import can raise anything
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
            f"{reference!r} is an attribute of a {type(found).__qualname__}. A job's function must "
            f"be in a module or a class, and be allowed by functions={self._names!r}"
        )

    def check(self, function: Any, reference: str) -> None:
        """Make sure that a job's function is allowed, by its own name and by its reference.

        The reference alone is not enough: ``"myapp.jobs:os.system"`` names another module's
        function.

        :raises UntrustedError: the function is not allowed
        """
        if self._names is None:
            return
        _parts(reference)
        instance = function.__self__ if ismethod(function) else None
        self._check_found(function, instance if isclass(instance) else type(instance), reference)

    def _check_found(self, function: Any, owner: Any, reference: str) -> None:
        """Make sure that a function is allowed, and that its reference is its own name.

        :param owner: the module or class in which the function was found
        """
        module, name = _text(function, "__module__"), _text(function, "__qualname__")
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
    """Return the names in a reference that follow its module.

    :raises UntrustedError: a name is no identifier, or has two underscores at both ends, because
        ``guarded.__wrapped__`` would bypass a decorator, and an import of ``package.__main__``
        would run the package
    """
    module, _, path = reference.partition(":")
    parts = path.split(".")
    names = parts if module == "__main__" else [*module.split("."), *parts]
    if not all(name.isidentifier() and not _is_dunder(name) for name in names):
        raise UntrustedError(
            f"{reference!r} is not allowed: it must consist of names, none of them like __this__"
        )
    return parts


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _member(owner: Any, name: str) -> Any:
    """Return a class's attribute without running the class's own code."""
    found = getattr_static(owner, name, _NOTHING)
    return getattr(owner, name) if type(found) in (classmethod, staticmethod) else found


def _text(function: Any, attribute: str) -> str | None:
    """Return a text attribute of a function or class without running the object's own code.

    If ``function`` is neither a function nor a class, its attribute is looked up statically,
    because an ordinary ``getattr`` can run the object's code, as in a lazily imported module.
    """
    function = getattr(function, "__func__", None) if type(function) is MethodType else function
    found = getattr_static(function, attribute, None)
    if issubclass(type(function), type) or isinstance(found, _BUILT_IN):
        found = getattr(function, attribute, None)
    return found if isinstance(found, str) else None


def _name_where_inherited(owner: Any, module: str, name: str) -> str | None:
    """Return the name that a function has in a class which inherits it, or ``None``."""
    member = name.rpartition(".")[2]
    for base in owner.__mro__ if issubclass(type(owner), type) else ():
        if f"{base.__module__}:{base.__qualname__}.{member}" == f"{module}:{name}":
            return f"{owner.__module__}:{owner.__qualname__}.{member}"
    return None


def canonical(state: Any) -> str:
    """Return decoded JSON as text in one form, because jsonb changes the order and the spaces.

    The texts of ``1``, ``1.0`` and ``True`` differ, although Python calls the values equal.

    :raises RecursionError: the data is nested too deeply
    """
    return json.dumps(state, sort_keys=True, separators=(",", ":"))


class Signer:
    """Signs the rows of jobs, so that nobody without a key can add or change a row.

    :param keys: texts or bytes; the first key signs, each key verifies
    :raises TaskLockOptionError: there is no key, or a key is too short
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
        """Return the signature of a row's data, made with the first key."""
        return self._signature(self._keys[0], signed)

    def verify(self, signed: Mapping[str, Any], signature: str | None) -> bool:
        """Verify the signature of a row's data; return whether the first key made it.

        :raises UntrustedError: no key made the signature
        """
        if signature is None:
            raise UntrustedError("it is not signed")
        for key in self._keys:
            if hmac.compare_digest(self._signature(key, signed).encode(), signature.encode()):
                return key == self._keys[0]
        raise UntrustedError(
            "its signature is wrong: somebody else wrote or changed it, it was moved here, or it "
            "was signed with a secret that this replica does not have"
        )

    def _signature(self, key: bytes, signed: Mapping[str, Any]) -> str:
        return hmac.new(key, canonical(signed).encode(), hashlib.sha256).hexdigest()
