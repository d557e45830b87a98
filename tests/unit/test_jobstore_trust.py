"""Who can write the jobs' table cannot run code: allowed functions, and signed rows."""

from __future__ import annotations

import functools
import json
import os
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from apscheduler.job import Job
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockOptionError
from apscheduler_tasklock._lock.job_rows import JobRow
from apscheduler_tasklock.jobstore.definition import Definition, JobCodec, MissingFunction
from apscheduler_tasklock.jobstore.stored_values import UnreadableError, UnstorableError
from apscheduler_tasklock.jobstore.trust import AllowedFunctions, Signer, UntrustedError

KEY, OTHER_KEY = "k" * 16, "o" * 16
PLACE = "'app', 'public', 'task_lock_job', 'an id'"
MADE_FOR = UUID(int=1)
HERE = __name__
remote = os  # a module that an attacker reaches through this one
partial = functools.partial(print)


def send(*_args: Any, **_kwargs: Any) -> None: ...


also_send = send


def guard(function: Any) -> Any:
    @functools.wraps(function)
    def checks() -> None:
        raise PermissionError

    checks.original = function  # type: ignore[attr-defined]
    return checks


@guard
def guarded() -> None: ...


class Mailer:
    @staticmethod
    def send() -> None: ...

    @classmethod
    def of_class(cls) -> None: ...

    def inherited(self) -> None: ...


class Child(Mailer):
    def own(self) -> None: ...

    def echo(self, text: str) -> str:
        return text

    class Inner(Mailer): ...


def instance_of_a_local_class() -> Any:
    class Local:
        def echo(self, text: str) -> str:
            return text

    return Local()


child, local = Child(), instance_of_a_local_class()


class Encoder(json.JSONEncoder): ...


class Kept:
    """As a decorator that is a class makes one of a function."""

    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)

    def __call__(self) -> None: ...


@functools.lru_cache
def cached() -> None: ...


@Kept
def kept() -> None: ...


# A module that is allowed, and has others that are imported when they are used.
LAZY = """
import importlib, importlib.util, sys

spec = importlib.util.find_spec("{third}")
spec.loader = importlib.util.LazyLoader(spec.loader)
lazy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lazy)
here = sys.modules[__name__]

class Proxy:
    def __getattribute__(self, name):
        return getattr(importlib.import_module("{third}"), name)

class Descriptor:
    def __get__(self, instance, owner):
        return importlib.import_module("{third}")

class Lazy:
    member = Descriptor()

proxy = Proxy()

def __getattr__(name):
    return importlib.import_module("{third}")

def send():
    return "sent"
"""


def job(function: Any = f"{HERE}:send", trigger: str = "cron", **options: Any) -> Job:
    """Return a job as a scheduler makes it."""
    scheduler = BackgroundScheduler(timezone="UTC")
    defaults = {"misfire_grace_time": 1, "coalesce": True, "max_instances": 1}
    given = {**defaults, "next_run_time": None, **options}
    added: Job = scheduler.add_job(function, trigger, id="job", **given)
    return added


def codec(functions: Any = (HERE,), secret: Any = None, **options: Any) -> JobCodec:
    signer = None if secret is None else Signer(secret)
    return JobCodec(AllowedFunctions(functions), signer, **options)


def row(definition: Definition, signature: str | None, **other: Any) -> JobRow:
    """Return a job's row, as it is read."""
    given = {
        "id": "job",
        **definition.columns,
        "definition_id": MADE_FOR,
        "signature": signature,
        "version": 1,
        "next_run_time": datetime(2030, 1, 1, tzinfo=timezone.utc),
        "last_run_time": None,
        "ended": False,
        "task_name": None,
        "place": PLACE,
    }
    return JobRow(**{**given, **other})


class TestAllowedFunctions:
    @pytest.mark.parametrize("name", [HERE, f"{HERE}.", f"{HERE}.send", "tests", "tests.unit."])
    def test_one_of_an_allowed_name_is_loaded(self, name: str) -> None:
        assert AllowedFunctions([name]).load(f"{HERE}:send") is send

    def test_a_class_member_is_loaded(self) -> None:
        assert AllowedFunctions([HERE]).load(f"{HERE}:Mailer.send") is Mailer.send

    @pytest.mark.parametrize(
        "reference",
        [
            f"{HERE}:remote.system",  # passes a test of the text
            f"{HERE}:os.system",
            f"{HERE}:partial",
            f"{HERE}:send.__call__",
            f"{HERE}:send.__class__",
            f"{HERE}:Mailer.__init_subclass__",
            "os:system",
            "builtins:eval",
        ],
    )
    def test_another_one_is_not(self, reference: str) -> None:
        with pytest.raises(UntrustedError):
            AllowedFunctions([HERE]).load(reference)

    def test_a_module_that_is_not_allowed_is_not_even_imported(self) -> None:
        assert "antigravity" not in sys.modules
        with pytest.raises(UntrustedError, match="'antigravity:fly' is not allowed here"):
            AllowedFunctions([HERE]).load("antigravity:fly")
        assert "antigravity" not in sys.modules

    def test_what_a_decorator_guards_is_not_reached_around_it(self) -> None:
        assert AllowedFunctions([HERE]).load(f"{HERE}:guarded") is guarded
        for reference in (f"{HERE}:guarded.__wrapped__", f"{HERE}:guarded.original"):
            with pytest.raises(UntrustedError):
                AllowedFunctions([HERE]).load(reference)
        with pytest.raises(TaskLockOptionError, match="is not allowed"):
            codec().encode(job(f"{HERE}:guarded.__wrapped__"))

    @pytest.mark.parametrize(
        "reference",
        [
            "{}:lazy",  # a module that importlib imports when it is first used
            "{}:lazy.getcwd",
            "{}:proxy",  # an object that does so
            "{}:proxy.getcwd",
            "{}:Lazy.member",
            "{}:by_name",  # a name that its module imports when it is asked for
            "{}:here.lazy.getcwd",
            "{}:package.module.function",
        ],
    )
    def test_a_reference_imports_nothing_by_way_of_a_module_that_is_allowed(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reference: str
    ) -> None:
        name, third = f"allowed_{tmp_path.name}", f"third_{tmp_path.name}"
        names = {"name": name, "third": third}
        (tmp_path / f"{name}.py").write_text(LAZY.format(**names))
        (tmp_path / f"{third}.py").write_text(f"import sys\nsys.modules['{third}_ran'] = sys\n")
        monkeypatch.syspath_prepend(tmp_path)
        for _ in range(2):
            with pytest.raises((UntrustedError, LookupError)):
                AllowedFunctions([name]).load(reference.format(name))
        assert f"{third}_ran" not in sys.modules
        assert AllowedFunctions([name]).load(f"{name}:send")() == "sent"
        sys.modules.pop(third, None)

    @pytest.mark.parametrize("part", ["__init__", "__main__"])
    def test_a_package_is_not_run(self, part: str) -> None:
        with pytest.raises(UntrustedError, match="__this__"):
            AllowedFunctions(["json"]).load(f"json.{part}:loads")

    @pytest.mark.parametrize(
        "reference", ["", ":", HERE, f"{HERE}:", f"{HERE}:send.", f"{HERE}:send()", f"{HERE}:a b"]
    )
    def test_what_is_no_name_is_not_loaded(self, reference: str) -> None:
        with pytest.raises(UntrustedError):
            AllowedFunctions([HERE]).load(reference)

    def test_a_function_goes_by_one_name(self) -> None:
        with pytest.raises(UntrustedError, match=r"is .*:send, which is not allowed under another"):
            AllowedFunctions([HERE]).load(f"{HERE}:also_send")
        with pytest.raises(TaskLockOptionError, match="pass the function itself, or that name"):
            codec().encode(job(f"{HERE}:also_send"))

    @pytest.mark.parametrize("name", ["send", "of_class", "own", "Inner.send"])
    def test_what_a_class_has_from_another_one_is_called_by_the_class(self, name: str) -> None:
        path = name if name == "Inner.send" else f"Child.{name}"
        loaded = AllowedFunctions([HERE]).load(f"{HERE}:{path.replace('Inner', 'Child.Inner')}")
        owner = Child.Inner if name == "Inner.send" else Child
        assert loaded == getattr(owner, name.rpartition(".")[2])

    def test_what_it_has_from_one_that_is_not_allowed_is_not(self) -> None:
        with pytest.raises(UntrustedError, match=r"which is json\.encoder\.JSONEncoder"):
            AllowedFunctions([HERE]).load(f"{HERE}:Encoder.encode")

    @pytest.mark.parametrize("function", [Child().own, Child().inherited, Child.of_class])
    def test_methods_can_be_added_and_are_found_again(self, function: Any) -> None:
        pickling = codec(secret=KEY, pickles=True)
        definition = pickling.encode(job(function))
        assert callable(pickling.load_function(definition))

    def test_a_function_that_is_cached_or_kept_in_an_object_can_be_named(self) -> None:
        for name in ("cached", "kept"):
            assert AllowedFunctions([HERE]).load(f"{HERE}:{name}") is globals()[name]

    def test_one_that_is_gone_is_missing_and_not_forbidden(self) -> None:
        for name in ("gone", "Mailer.gone"):
            with pytest.raises(LookupError, match="there is no"):
                AllowedFunctions([HERE]).load(f"{HERE}:{name}")

    @pytest.mark.parametrize("name", ["tests.uni", HERE[:-1], f"{HERE}.sen"])
    def test_a_name_that_only_begins_like_it_is_another(self, name: str) -> None:
        with pytest.raises(UntrustedError):
            AllowedFunctions([name]).load(f"{HERE}:send")

    def test_a_job_of_another_function_cannot_be_added(self) -> None:
        with pytest.raises(TaskLockOptionError, match=r"job 'job': the function .* not allowed"):
            codec(["myapp."]).encode(job())

    @pytest.mark.parametrize("functions", [[""], ["."], [3], 3])
    def test_what_is_no_name_is_rejected(self, functions: Any) -> None:
        with pytest.raises(TaskLockOptionError, match="functions must be a list of names"):
            AllowedFunctions(functions)


class TestSignature:
    def test_of_any_of_the_keys_verifies_and_the_first_one_signs(self) -> None:
        definition = codec().encode(job())
        signed = row(definition, codec(secret=KEY).sign("job", definition, MADE_FOR, PLACE))
        both = codec(secret=[OTHER_KEY, KEY.encode()])
        assert both.verified(signed) == definition
        assert not both.is_up_to_date(signed)
        with pytest.raises(UntrustedError, match="its signature is wrong"):
            codec(secret=OTHER_KEY).verified(signed)
        rotated = row(definition, both.sign("job", definition, MADE_FOR, PLACE))
        assert codec(secret=OTHER_KEY).verified(rotated) == definition
        assert both.is_up_to_date(rotated)

    @pytest.mark.parametrize(
        "change",
        [
            {"func": "os:system"},
            {"arguments": {"args": ["rm"], "kwargs": {}}},
            {"executor": "other"},
            {"trigger": {"type": "date"}},
            {"options": {}},
            {"id": "another"},
            {"definition_id": UUID(int=2)},
            {"definition_id": None},
            {"place": PLACE.replace("public", "elsewhere")},
        ],
    )
    def test_does_not_hold_for_what_was_changed_or_moved(self, change: Any) -> None:
        signing = codec(secret=KEY)
        definition = signing.encode(job())
        signed = row(definition, signing.sign("job", definition, MADE_FOR, PLACE))
        assert signing.verified(signed) == definition
        with pytest.raises(UntrustedError, match="somebody else wrote or changed it"):
            signing.verified(replace(signed, **change))

    @pytest.mark.parametrize("signature", [None, "", "né"])
    def test_is_demanded(self, signature: str | None) -> None:
        signing = codec(secret=KEY)
        with pytest.raises(UntrustedError):
            signing.verified(row(signing.encode(job()), signature))

    @pytest.mark.parametrize("secret", ["short", [], [KEY, "short"], 3, [3]])
    def test_needs_keys_that_are_long_enough(self, secret: Any) -> None:
        with pytest.raises(TaskLockOptionError):
            Signer(secret)


class TestDefinition:
    def test_comes_back(self) -> None:
        added = job(args=[1, "x"], kwargs={"at": None}, hour=3, name="mail")
        definition = codec().encode(added)
        assert Definition(**definition.columns) == definition
        read = codec().decode(definition)
        assert (read["args"], read["kwargs"], read["name"]) == ((1, "x"), {"at": None}, "mail")
        assert str(read["trigger"]) == str(added.trigger)
        assert (read["misfire_grace_time"], read["coalesce"], read["executor"]) == (
            1,
            True,
            "default",
        )

    @pytest.mark.parametrize("pickles", [False, True])
    @pytest.mark.parametrize("instance", ["child", "local"])
    def test_a_method_that_its_instance_names_is_called_with_the_given_arguments(
        self, instance: str, pickles: bool
    ) -> None:
        signing = codec(None, secret=KEY, pickles=pickles)
        added = job(f"{HERE}:{instance}.echo", args=["one"])
        definition = signing.encode(added)
        assert signing.load_function(definition)(*signing.decode(definition)["args"]) == "one"
        added.args = ("other",)
        changed = signing.change(definition, added, ["args"])
        assert signing.load_function(changed)(*signing.decode(changed)["args"]) == "other"

    def test_names_the_job_and_the_argument_that_cannot_be_stored(self) -> None:
        with pytest.raises(UnstorableError, match=r"job 'job': args\[1\] cannot be stored: a tup"):
            codec().encode(job(args=[1, (2,)]))
        with pytest.raises(UnstorableError, match=r"job 'job': kwargs\['a'\] cannot be stored"):
            codec().encode(job(kwargs={"a": {1, 2}}))

    def test_a_function_without_a_name_is_rejected(self) -> None:
        with pytest.raises(UnstorableError, match="no module has it under a name"):
            codec().encode(job(lambda: None))

    def test_a_missing_function_says_so_when_it_is_called(self) -> None:
        with pytest.raises(LookupError, match="'gone:away' is not available"):
            MissingFunction("gone:away")(1)

    @pytest.mark.parametrize(
        "change", [{"options": {}}, {"arguments": {}}, {"arguments": []}, {"trigger": None}]
    )
    def test_one_that_somebody_else_has_written_is_unreadable(self, change: Any) -> None:
        with pytest.raises(UnreadableError):
            codec().decode(replace(codec().encode(job()), **change))


class TestPickle:
    def test_stores_what_json_cannot(self) -> None:
        pickling = codec(secret=KEY, pickles=True)
        definition = pickling.encode(job(args=[(1, 2), {3: b"x"}]))
        assert pickling.decode(definition)["args"] == ((1, 2), {3: b"x"})

    def test_needs_a_secret(self) -> None:
        with pytest.raises(TaskLockOptionError, match="needs secret"):
            codec(pickles=True)

    def test_is_never_read_where_it_was_not_asked_for(self) -> None:
        definition = codec(secret=KEY, pickles=True).encode(job())
        with pytest.raises(UnreadableError, match="it is pickled"):
            codec(secret=KEY).decode(definition)
