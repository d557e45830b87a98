"""Check that no further test goes around the waist: `python -m tests.waist [--shorten]`.

Tests and benchmarks reach the library through its public names and `tests/support/waist.py`. Those
that import private modules today are in `tests/waist.txt` with the modules that they may import.
That list only gets shorter: an import that is not in it is an error, and so is an entry that is not
needed any more, which `--shorten` removes.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent
LIST = CHECKOUT / "tests/waist.txt"
WAIST = "tests/support/waist.py"
PACKAGE = "apscheduler_tasklock"

# Public as names of packages, but not for those who use the library.
INSIDE = tuple(f"{PACKAGE}.{name}" for name in ("jobstore", "testing.in_memory", "testing.rule"))

Imports = dict[str, set[str]]


def is_private(module: str) -> bool:
    """Return whether a module is below the public names."""
    parts = module.split(".")
    is_inside = any(module == name or module.startswith(f"{name}.") for name in INSIDE)
    return parts[0] == PACKAGE and (is_inside or any(part.startswith("_") for part in parts[1:]))


def imported(source: str) -> Iterator[str]:
    """Yield the private modules that a module imports, also within functions."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # What is imported from a package may be one of its modules.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            names = [name for name in names if _is_module(name)]
        yield from filter(is_private, names)


def _is_module(name: str) -> bool:
    path = CHECKOUT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def found() -> Imports:
    """Return the private modules that each file imports."""
    imports: Imports = {}
    for folder in ("tests", "benchmarks"):
        for path in sorted((CHECKOUT / folder).rglob("*.py")):
            name = path.relative_to(CHECKOUT).as_posix()
            modules = set(imported(path.read_text(encoding="utf-8")))
            # A package that is named on the way to one of its modules is not another import.
            modules = {
                each for each in modules if not any(m.startswith(f"{each}.") for m in modules)
            }
            if modules and name != WAIST:
                imports[name] = modules
    return imports


def allowed() -> Imports:
    """Return the list."""
    entries = (line.split(":") for line in LIST.read_text(encoding="utf-8").splitlines() if line)
    return {name: {f"{PACKAGE}.{each}" for each in modules.split()} for name, modules in entries}


def text_of(imports: Mapping[str, set[str]]) -> str:
    """Return the text of a list."""
    lines = (
        f"{name}: {' '.join(sorted(each.removeprefix(f'{PACKAGE}.') for each in modules))}\n"
        for name, modules in sorted(imports.items())
        if modules
    )
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.waist")
    parser.add_argument("--shorten", action="store_true", help="remove what is not needed any more")
    shorten = parser.parse_args().shorten
    imports, entries = found(), allowed()
    wrong = [
        f"{name}: imports {module}, which is below the waist; go through {WAIST}"
        for name, modules in imports.items()
        for module in sorted(modules - entries.get(name, set()))
    ]
    needed = {name: modules & imports.get(name, set()) for name, modules in entries.items()}
    if shorten:
        LIST.write_text(text_of(needed), encoding="utf-8")
    else:
        wrong += [
            f"tests/waist.txt: {name} does not import {module} any more; run with --shorten"
            for name, modules in entries.items()
            for module in sorted(modules - needed[name])
        ]
    print("\n".join(wrong) or f"{len(entries)} files may import private modules")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
