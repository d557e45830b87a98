"""Which Python `make test-lowest` uses: the lowest that pyproject.toml allows, wherever it is."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RUNS = "#!/bin/sh\nexit 0\n"
FAILS = "#!/bin/sh\nexit 127\n"

Finished = subprocess.CompletedProcess[str]


def put(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


@pytest.fixture
def lowest(checkout: Path) -> str:
    """The lowest version that is allowed, such as ``3.10``."""
    found = re.search(
        r'^requires-python = ">=([\d.]+)"$', (checkout / "pyproject.toml").read_text(), re.M
    )
    assert found is not None
    return found[1]


@pytest.fixture
def later(lowest: str) -> str:
    return f"3.{int(lowest.partition('.')[2]) + 1}"


@pytest.fixture
def find(checkout: Path, tmp_path: Path, lowest: str) -> Callable[..., Finished]:
    """Look for it on a machine that has only the shim of it, which does not run, and no pyenv."""
    put(tmp_path / "bin" / f"python{lowest}", FAILS)
    put(tmp_path / "bin" / "pyenv", FAILS)

    def find(**more: str) -> Finished:
        return subprocess.run(
            [str(checkout / "tests/support/lowest-python")],
            env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path), **more},
            capture_output=True,
            text=True,
            check=False,
        )

    return find


def test_that_of_the_path_is_used_if_it_runs(
    find: Callable[..., Finished], tmp_path: Path, lowest: str
) -> None:
    put(tmp_path / "bin" / f"python{lowest}", RUNS)
    found = find(CI="true")
    assert (found.returncode, found.stdout, found.stderr) == (0, f"python{lowest}\n", "")


@pytest.mark.parametrize("root", ["elsewhere", ".pyenv"])
def test_that_of_pyenv_is_found_where_its_shim_does_not_run(
    find: Callable[..., Finished], tmp_path: Path, lowest: str, root: str
) -> None:
    if root != ".pyenv":
        put(tmp_path / "bin" / "pyenv", f"#!/bin/sh\necho {tmp_path / root}\n")
    python = put(tmp_path / root / "versions" / f"{lowest}.13" / "bin" / f"python{lowest}", RUNS)
    found = find(CI="true")
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{python}\n", "")


def test_continuous_integration_fails_without_it(
    find: Callable[..., Finished], tmp_path: Path, lowest: str, later: str
) -> None:
    put(tmp_path / "bin" / f"python{later}", RUNS)
    found = find(CI="true")
    assert (found.returncode, found.stdout) == (1, "")
    assert f"there is no Python {lowest}, the lowest that pyproject.toml allows" in found.stderr
    assert f"make test-lowest LOWEST_PYTHON=/path/to/python{lowest}" in found.stderr


def test_elsewhere_the_next_one_stands_in_with_a_warning(
    find: Callable[..., Finished], tmp_path: Path, lowest: str, later: str
) -> None:
    put(tmp_path / "bin" / f"python{later}", RUNS)
    found = find()
    assert (found.returncode, found.stdout) == (0, f"python{later}\n")
    assert found.stderr.startswith(f"WARNING: make test-lowest: there is no Python {lowest}")
    assert f"Python {later} stands in for it" in found.stderr


def test_continuous_integration_asks_for_it(checkout: Path) -> None:
    """The hosted one sets CI itself."""
    run = (checkout / ".ci/run").read_text()
    assert re.search(r"^export CI=true$.*^make test-lowest$", run, re.M | re.S)


def test_the_target_ends_where_there_is_none_and_tells_which_one_it_uses(
    checkout: Path, tmp_path: Path, lowest: str
) -> None:
    # A stand-in for Python, which cannot make an environment, so nothing is installed.
    python = put(tmp_path / "python", f'#!/bin/sh\n[ "$1" = -V ] && echo Python {lowest}.99\n')
    command = ["make", "--no-print-directory", "--file", str(checkout / "Makefile"), "test-lowest"]
    ran = subprocess.run(
        [*command, f"LOWEST_PYTHON={python}"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    assert ran.stdout.startswith(
        f"Python {lowest}.99 ({python}), with the versions of tests/lowest"
    )
