"""The parameters of statements: a dataclass says once what is sent, and as which SQL type."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import pytest

from tests.support.waist import Parameters, Unsent, sent


def made(hint: Any) -> Any:
    """Return a class of parameters with one field."""
    return make_dataclass("Made", [("value", hint)], bases=(Parameters,))


@dataclass
class Inner(Parameters):
    seconds: float | None
    names: Annotated[tuple[str, ...], "text[]"]
    kept: Unsent[dict[str, str]]

    @sent
    def doubled(self) -> int | None:
        return None if self.seconds is None else int(2 * self.seconds)


@dataclass
class Outer(Parameters):
    inner: Inner
    task_name: str


@pytest.mark.parametrize(
    ("hint", "types"),
    [
        (str, {"value": "text"}),
        (UUID | None, {"value": "uuid"}),
        (datetime | None, {"value": "timestamptz"}),
        (float, {"value": "float8"}),
        (bool, {"value": "boolean"}),
        (int | None, {"value": "bigint"}),
        (Annotated[str, "jsonb"], {"value": "jsonb"}),
        (Unsent[object], {}),
    ],
)
def test_the_type_follows_from_the_annotation(hint: Any, types: dict[str, str]) -> None:
    assert made(hint).types == types


@pytest.mark.parametrize("hint", [object, dict[str, str], tuple[str, ...], str | int, None])
def test_a_field_without_a_type_is_an_error_when_its_class_is_made(hint: Any) -> None:
    with pytest.raises(TypeError, match=r"Made\.value: .* has no SQL type; annotate it with one"):
        made(hint)


def test_values_within_others_and_those_of_properties_are_sent_too() -> None:
    assert Outer.types == {
        "seconds": "float8",
        "names": "text[]",
        "doubled": "bigint",
        "task_name": "text",
    }
    asked = Outer(Inner(1, ("a", "b"), {}), "task")
    assert asked.parameters == {
        "seconds": 1,
        "names": ["a", "b"],
        "doubled": 2,
        "task_name": "task",
    }


def test_psycopg_gets_each_number_of_seconds_as_one_type_and_each_array_as_a_list() -> None:
    """It prepares a statement anew for integers of each size, and a tuple is no array for it."""
    some, none = Inner(1, ("a",), {}).parameters, Inner(None, (), {}).parameters
    assert [type(some["seconds"]), type(some["names"])] == [float, list]
    assert none["seconds"] is None
