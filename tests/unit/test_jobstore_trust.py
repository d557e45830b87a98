"""Who can write the jobs' table cannot run code: allowed functions, and signed rows."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

import pytest
from apscheduler.job import Job
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockOptionError
from apscheduler_tasklock._lock.jobs import JobRow
from apscheduler_tasklock.jobstore.definition import Definition, JobCodec, MissingFunction
from apscheduler_tasklock.jobstore.trust import AllowedFunctions, Signer, UntrustedError
from apscheduler_tasklock.jobstore.values import UnreadableError, UnstorableError

KEY, OTHER_KEY = "k" * 16, "o" * 16
PLACE = ["app", "public", "task_lock_job", "an id"]
MADE_FOR = UUID(int=1)
HERE = __name__
remote = os  # a module that an attacker reaches through this one
partial = functools.partial(print)


def send(*_args: Any, **_kwargs: Any) -> None: ...


class Mailer:
    @staticmethod
    def send() -> None: ...


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
        with pytest.raises(UntrustedError, match="none of ours"):
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
            {"place": ["other", *PLACE[1:]]},
            {"place": ["app", "elsewhere", *PLACE[2:]]},
            {"place": ["app", "public", "other_job", "an id"]},
            {"place": [*PLACE[:3], "another id"]},
            {"place": [*PLACE[:3], None]},
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
