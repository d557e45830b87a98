"""What runs the checks, here and in a repository, calls targets that there are, and all of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

WORKFLOWS = ("test", "nightly", "release")


def targets(checkout: Path) -> set[str]:
    """Return the targets that the Makefile documents."""
    makefile = (checkout / "Makefile").read_text()
    return set(re.findall(r"^([a-z-]+):.* ## ", makefile, re.MULTILINE))


def called(text: str) -> set[str]:
    """Return the targets that a script calls."""
    found = set()
    for arguments in re.findall(r"^make ([^|#>\n]*)", text, re.MULTILINE):
        words = re.sub(r'"[^"]*"|\$\{\{.*?\}\}', "", arguments).split()
        found |= {word for word in words if "=" not in word and not word.startswith("-")}
    return found


def recipe(checkout: Path, target: str) -> str:
    """Return what a target does, with make called by its name."""
    makefile = (checkout / "Makefile").read_text()
    [lines] = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    return re.sub(r"^\t(?:for .*; do )?\$\(MAKE\)", "make", lines, flags=re.MULTILINE)


def workflow(checkout: Path, name: str) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load(
        (checkout / f".github/workflows/{name}.yml").read_text()
    )
    return loaded


def steps(checkout: Path, name: str) -> list[dict[str, Any]]:
    return [step for job in workflow(checkout, name)["jobs"].values() for step in job["steps"]]


def called_by(checkout: Path, name: str) -> set[str]:
    return called("\n".join(step.get("run", "") for step in steps(checkout, name)))


def test_each_target_has_a_line_in_help_and_in_the_table(checkout: Path) -> None:
    helped = subprocess.run(["make"], cwd=checkout, check=True, capture_output=True, text=True)
    shown = set(re.findall(r"^  ([a-z-]+) +\S", helped.stdout, re.MULTILINE))
    assert shown == targets(checkout)
    table = (checkout / "CONTRIBUTING.md").read_text()
    assert {f"make {name}" for name in shown - {"help", "clean"}} == {
        " ".join(name.split()[:2]) for name in re.findall(r"^\| `(make [^`]+)` \|", table, re.M)
    }
    phony = (checkout / "Makefile").read_text().partition(".PHONY:")[2].partition("\n\n")[0]
    assert set(phony.replace("\\", "").split()) == shown


def test_continuous_integration_calls_each_target_that_checks_something(checkout: Path) -> None:
    # What only draws, writes or cleans, and `make bench-results`, which takes hours.
    not_checks = {"help", "clean", "pictures", "reference", "released", "release-notes"}
    not_checks |= {"bench-results"}
    change = called((checkout / ".ci/run").read_text())
    assert called_by(checkout, "test") == change
    # `make nightly` and the workflow of that name are the same, but for what the latter has from
    # the workflow of each change.
    nightly = called_by(checkout, "nightly")
    here = called(recipe(checkout, "nightly"))
    assert here - {"lint", "types", "docs", "dist", "test-foreign", "counts"} == nightly
    assert change | here | {"nightly"} == targets(checkout) - not_checks
    # The dozen of `make test-processes` are nightly tests.
    assert change - here == {"test-processes"}
    assert called_by(checkout, "release") <= here | {"released", "release-notes"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_pin_their_actions_by_commit_and_may_only_read_by_default(
    checkout: Path, name: str
) -> None:
    text = (checkout / f".github/workflows/{name}.yml").read_text()
    used = re.findall(r"uses: (.*)", text)
    assert len(used) == len([step for step in steps(checkout, name) if "uses" in step]) > 0
    for action in used:  # a tag can be moved; the comment is for people and for Dependabot
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    assert workflow(checkout, name)["permissions"] == {"contents": "read"}


def test_the_tests_run_on_each_python_of_the_classifiers_and_the_next_one_may_fail(
    checkout: Path,
) -> None:
    supported = re.findall(r"Python :: (3\.\d+)", (checkout / "pyproject.toml").read_text())
    job = workflow(checkout, "test")["jobs"]["python"]
    *pythons, upcoming = job["strategy"]["matrix"]["python"]
    assert pythons == supported
    assert job["continue-on-error"] == f"${{{{ matrix.python == '{upcoming}' }}}}"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_tests_on_the_lowest_python_has_it_in_path(checkout: Path, name: str) -> None:
    pyproject = (checkout / "pyproject.toml").read_text()
    [lowest] = re.findall(r'^requires-python = ">=(3\.\d+)"', pyproject, re.MULTILINE)
    jobs = [job["steps"] for job in workflow(checkout, name)["jobs"].values()]
    testing = [steps for steps in jobs if any("test-lowest" in one.get("run", "") for one in steps)]
    assert testing
    for steps in testing:
        [setup] = [one["with"] for one in steps if "setup-python" in one.get("uses", "")]
        assert lowest in setup["python-version"].split()


def test_actions_are_the_same_in_all_workflows(checkout: Path) -> None:
    text = "".join((checkout / f".github/workflows/{name}.yml").read_text() for name in WORKFLOWS)
    used = set(re.findall(r"uses: (\S+)@(.*)", text))
    assert len(used) == len({action for action, _ in used})


def test_a_release_has_the_rights_of_each_step_alone(checkout: Path) -> None:
    jobs = workflow(checkout, "release")["jobs"]
    rights = {name: job.get("permissions") for name, job in jobs.items()}
    assert rights == {
        "test": None,
        "postgres": None,
        "dist": None,
        "pypi": {"id-token": "write"},
        "github": {"contents": "write"},
    }
    # Who may publish runs nothing of the checkout.
    for name in ("pypi", "github"):
        assert not any("checkout" in step.get("uses", "") for step in jobs[name]["steps"])


def test_a_release_is_built_where_nothing_else_has_run(checkout: Path) -> None:
    jobs = workflow(checkout, "release")["jobs"]
    runs = {
        name: called("\n".join(step.get("run", "") for step in job["steps"]))
        for name, job in jobs.items()
    }
    # What tests install and run could change a distribution that is built after them.
    assert runs["dist"] == {"release-notes", "dist"}
    assert runs["test"].isdisjoint(runs["dist"])
    uploading = [
        name
        for name, job in jobs.items()
        if any("upload-artifact" in step.get("uses", "") for step in job["steps"])
    ]
    assert uploading == ["dist"]
    assert {"test", "postgres", "dist"} <= set(jobs["pypi"]["needs"])
    assert jobs["github"]["needs"] == "pypi"


def test_hooks_before_a_commit_call_what_lint_and_types_call(checkout: Path) -> None:
    makefile = (checkout / "Makefile").read_text()
    config = yaml.safe_load((checkout / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    entries = {_command(hook["entry"]) for hook in hooks}
    recipes = re.findall(r"^(?:lint|types):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    commands = {_command(line) for line in "".join(recipes).splitlines()}
    assert entries == commands


def _command(line: str) -> str:
    """Return what a line calls: a program with its subcommand, or a module."""
    program, *words = line.replace("$(BIN)", ".venv/bin").split()
    return " ".join([program, *(word for word in words if word not in ("-m", "."))][:2])
