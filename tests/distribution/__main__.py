"""Build the wheel and the sdist into dist/, check both, and try the wheel in an empty environment.

The wheel is built twice, from the source tree and from the sdist. The two have to be the same, byte
for byte, so what is tried of one holds for the other.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.distribution.contents import files_of, wrong_in_sdist, wrong_in_wheel
from tests.distribution.description import description_of, wrong_in_description

CHECKOUT = Path(__file__).parent.parent.parent
DIST = CHECKOUT / "dist"
SMOKE_TEST = Path(__file__).parent / "smoke.py"


def main() -> int:
    """Return 0 if all is well; else say what is wrong."""
    shutil.rmtree(DIST, ignore_errors=True)
    say("building the sdist, and the wheel from it")
    build("--outdir", str(DIST))
    [sdist], [wheel] = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    with tempfile.TemporaryDirectory(prefix="tasklock-dist-") as folder:
        say("building the wheel from the source tree")
        build("--wheel", "--outdir", folder)
        [other] = Path(folder).glob("*.whl")
        wrong = [] if other.read_bytes() == wheel.read_bytes() else [f"not reproduced: {wheel}"]
    say("checking the metadata and the contents")
    run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)])
    tree = files_of(CHECKOUT)
    wrong += wrong_in_sdist(sdist, tree) + wrong_in_wheel(wheel, tree)
    wrong += wrong_in_description(description_of(wheel), (CHECKOUT / "README.md").read_text())
    for what in wrong:
        print(f"make dist: {what}", file=sys.stderr)
    if not wrong:
        try_in_empty_environment(wheel)
        say(f"{wheel.name} and {sdist.name} are in dist/")
    return 1 if wrong else 0


def say(what: str) -> None:
    """Tell which step begins."""
    print(f"make dist: {what}", flush=True)


def run(command: list[str], **options: Any) -> None:
    """Run a command; end here if it fails, after what it has said of that."""
    if status := subprocess.run(command, check=False, **options).returncode:
        raise SystemExit(f"make dist: this has failed with {status}: {shlex.join(command)}")


def build(*arguments: str) -> None:
    """Build from the source tree, each time in an environment of its own."""
    run([sys.executable, "-m", "build", *arguments, str(CHECKOUT)], stdout=subprocess.DEVNULL)


def try_in_empty_environment(wheel: Path) -> None:
    """Install the wheel outside of the source tree, and use it on a real PostgreSQL."""
    with tempfile.TemporaryDirectory(prefix="tasklock-dist-") as folder, EmbeddedServer() as server:
        say(f"installing {wheel.name}[binary] into an empty environment")
        environment = Path(folder) / "venv"
        venv.create(environment, with_pip=True)
        python = str(environment / "bin" / "python")
        pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([python, *pip, f"{wheel}[binary]"], cwd=folder)
        say("using it on an embedded PostgreSQL")
        names = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        env = {name: value for name, value in os.environ.items() if name not in names}
        run(
            [python, "-I", "-W", "error", str(SMOKE_TEST)],
            cwd=folder,
            env={**env, "TASKLOCK_DATABASE_URL": server.url},
            timeout=300,
        )


if __name__ == "__main__":
    raise SystemExit(main())
