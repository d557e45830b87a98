"""Which rows may be run: whoever can write the table must not be able to run code of his own."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from apscheduler.util import ref_to_obj

from apscheduler_tasklock.errors import TaskLockError, TaskLockOptionError

# Bytes that a key has at least.
SHORTEST_KEY = 16


class UntrustedError(TaskLockError):
    """A row may not be run: its function is not allowed, or its signature is not ours."""


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

        :raises UntrustedError: it is not allowed. A module is not imported that is not allowed.
        :raises Exception: it cannot be imported; whatever the import raises
        """
        module, _, name = reference.partition(":")
        self._check(f"{module}.{name}", reference)
        function = ref_to_obj(reference)
        self.check(function, reference)
        return function

    def check(self, function: Any, reference: str) -> None:
        """Make sure that a function is allowed, by what it is and not by what it is called.

        ``"myapp.jobs:os.system"`` names a function of another module.

        :raises UntrustedError: it is not
        """
        if self._names is None:
            return
        module = getattr(function, "__module__", None)
        name = getattr(function, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str):
            raise UntrustedError(
                f"{reference!r} is a {type(function).__qualname__}, which does not say where it "
                "was defined; only functions, methods and classes are allowed"
            )
        self._check(f"{module}.{name}", reference)

    def _check(self, name: str, reference: str) -> None:
        allowed = self._names
        if allowed is None or any(name == one or name.startswith(f"{one}.") for one in allowed):
            return
        called = "" if name == reference.replace(":", ".") else f", which is {name}"
        raise UntrustedError(
            f"the function {reference!r}{called} is not allowed here: functions={allowed!r}"
        )


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
        # Of the decoded state, in one way of writing: jsonb rewrites what it is given.
        text = json.dumps(signed, sort_keys=True, separators=(",", ":"))
        return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
