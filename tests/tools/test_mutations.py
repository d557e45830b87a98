"""Each mutation can be made, and names tests that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mutations.mutation import GATE, HERE, IN_PYTHON, files_of, read
from tests.support.named_tests import names_of_tests

PATCHES = sorted(HERE.glob("*/*.patch"))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_each_patch_applies(checkout: Path) -> None:
    wrong = {}
    for path in PATCHES:
        command = ["git", "apply", "--check", "-p1", str(path)]
        checked = subprocess.run(command, cwd=checkout, check=False, capture_output=True, text=True)
        if checked.returncode:
            wrong[path.stem] = checked.stderr
    assert not wrong


def test_each_mutation_names_tests_that_exist() -> None:
    found = {(path, find) for path in PATCHES for find in read(path).find}
    assert {path for path, _ in found} == set(PATCHES)
    wrong = [(str(path), find) for path, find in found if not _names_what_exists(find)]
    assert wrong == []


def _names_what_exists(find: str) -> bool:
    files = files_of(find)
    words = shlex.split(find)
    chosen = words[words.index("-k") + 1] if "-k" in words else ""
    sources = "".join(file.read_text() for file in files if file.is_file())
    # Names of tests, or of their cases.
    wanted = {*re.findall(r"\w+", chosen)} - {"and", "or", "not"}
    return bool(files) and all(file.exists() for file in files) and all(map(sources.count, wanted))


@pytest.mark.parametrize("named", IN_PYTHON)
def test_each_test_that_makes_mistakes_exists(named: str) -> None:
    module, _, test = named.partition("::")
    assert test in names_of_tests(HERE.parent.parent / module)


def test_mistakes_are_searched_for_by_what_make_test_runs(checkout: Path) -> None:
    makefile = (checkout / "Makefile").read_text()
    assert f'$(AT_ONCE) -m "{GATE}"' in makefile.partition("\ntest: ")[2].partition("\n\n")[0]


PATCH = "--- a/apscheduler_tasklock/lock.py\n+++ b/apscheduler_tasklock/lock.py\n"
NO_MUTATIONS = {
    "no sentence": f"find: tests/contract\n\n{PATCH}",
    "no tests": f"A sentence.\n\n{PATCH}",
    "tests of the night": f"A sentence.\n\nfind: tests/contract -m nightly\n\n{PATCH}",
    "no patch": "A sentence.\n\nfind: tests/contract\n",
    "a patch of tests": "A sentence.\n\nfind: tests/contract\n\n--- a/tests/x.py\n",
}


@pytest.mark.parametrize("what", NO_MUTATIONS)
def test_a_file_that_is_no_mutation_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.mutations.mutation.HERE", tmp_path)
    path = tmp_path / "area" / "name.patch"
    path.parent.mkdir()
    path.write_text(NO_MUTATIONS[what])
    with pytest.raises(ValueError, match="area/name: "):
        read(path)
