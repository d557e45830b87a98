"""Parameters of statements: the fields of a dataclass, with SQL types from their annotations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)
from uuid import UUID

__all__ = ["Parameters", "Unsent", "many", "rows_of", "sent"]

Value = TypeVar("Value")

# A field that is no parameter.
Unsent: TypeAlias = Annotated[Value, None]

_TYPES = {
    str: "text",
    UUID: "uuid",
    datetime: "timestamptz",
    float: "float8",
    bool: "boolean",
    int: "bigint",
}
# Characters are not escaped, because a database in another encoding than UTF-8 may reject the
# escapes.
_JSON = json.JSONEncoder(default=str, ensure_ascii=False)


if TYPE_CHECKING:
    from builtins import property as sent
else:

    class sent(property):  # noqa: N801  # it is used as `property` is
        """A property that is a parameter, too."""


class Parameters:
    """The parameters of a statement, or of one request of a batch: a dataclass derives from this.

    Each field is a parameter, unless it is annotated as ``Unsent``, and so is each property that
    is ``sent``. A field that holds other parameters adds these. The SQL type follows from the
    annotation; that of ``Annotated[..., "int"]`` is ``int``.

    :cvar types: the SQL type of each parameter, by name
    :raises TypeError: an annotation has no SQL type; raised when the class is made
    """

    types: ClassVar[Mapping[str, str]] = {}
    _paths: ClassVar[Mapping[str, str]] = {}  # the attribute of each parameter, by name
    _values_of: ClassVar[Any]
    # How values are converted: psycopg prepares a statement anew for integers of each size, and an
    # array is a list.
    _conversions: ClassVar[Sequence[tuple[str, Callable[[Any], object]]]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hints = get_type_hints(cls, include_extras=True)
        for name, member in vars(cls).items():
            if isinstance(member, sent):
                hints[name] = get_type_hints(member.fget, include_extras=True)["return"]
        types, paths = dict(cls.types), dict(cls._paths)
        for name, hint in hints.items():
            kind = None if get_origin(hint) is ClassVar else _sql_type(cls, name, hint)
            if isinstance(kind, str):
                types[name], paths[name] = kind, name
            elif kind is not None:
                types |= kind.types
                paths |= {each: f"{name}.{path}" for each, path in kind._paths.items()}
        cls.types, cls._paths = types, paths
        # At least two attributes, because of one alone `attrgetter` returns no tuple.
        cls._values_of = attrgetter(*paths.values(), "types", "types")
        cls._conversions = [
            (name, float if kind == "float8" else list)
            for name, kind in types.items()
            if kind == "float8" or kind.endswith("[]")
        ]

    @property
    def parameters(self) -> dict[str, Any]:
        """The values, by name."""
        values = dict(zip(self.types, self._values_of(self), strict=False))
        for name, convert in self._conversions:
            if values[name] is not None:
                values[name] = convert(values[name])
        return values


def _sql_type(owner: type, name: str, hint: Any) -> str | type[Parameters] | None:
    """Return the SQL type of a field, or the parameters that it holds; ``None``: it is not sent."""
    if get_origin(hint) is Annotated:
        kind: str | None = get_args(hint)[1]
        return kind
    options = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    for option in options:
        if isinstance(option, type) and issubclass(option, Parameters):
            return option
    known = {_TYPES.get(option) for option in options if option is not NoneType}
    if len(known) == 1 and None not in known:
        return known.pop()
    raise TypeError(f"{owner.__name__}.{name}: {hint} has no SQL type; annotate it with one")


def rows_of(requests: Iterable[Parameters]) -> list[dict[str, Any]]:
    """Return the values of a batch's requests, by name. JSON needs no other types."""
    return [dict(zip(each.types, each._values_of(each), strict=False)) for each in requests]


def many(requests: Iterable[Mapping[str, object]]) -> dict[str, str]:
    """Return the parameter of a batch from the values of the single requests.

    The parameter is one JSON document with an object for each request, because psycopg takes far
    longer to send an array for each column.
    """
    return {"many": _JSON.encode(list(requests))}
