"""The examples of the page about testing are run as they stand there, by pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def blocks(checkout: Path) -> list[str]:
    page = (checkout / "docs/how-to/testing.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.own_server
def test_the_examples_about_testing_pass(checkout: Path, tmp_path: Path) -> None:
    expected = 0
    for number, block in enumerate(blocks(checkout)):
        named = re.match(r"# (\S+\.py)\n", block)
        path = tmp_path / (named[1] if named else f"test_{number}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(block)
        expected += len(re.findall(r"^def test_", block, re.MULTILINE))
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nfilterwarnings = error\n")
    assert expected >= 8

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    finished = subprocess.run(
        [*command, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert f"{expected} passed" in finished.stdout
