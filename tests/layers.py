"""A check of the sources: who uses the private attributes of others. ``make lint`` runs it.

Which module may import which is checked by import-linter, as pyproject.toml has it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]

# The one that knows APScheduler's private attributes.
ADAPTER = "_runs/adapter.py"

# Public all the same: without the underscore they could be fields.
NAMED_TUPLES = {"_field_defaults", "_fields", "_replace"}

# What others have no public name for, elsewhere.
ALLOWED = {
    "_database/thread.py": {"_register_atexit"},  # Python's
    "cli/completion.py": {"_actions"},  # argparse's
    "cli/parser.py": {"_option_string_actions"},  # likewise
    "flask/extension.py": {"_register_atexit"},  # likewise
    "flask/servers.py": {"_loaded_app"},  # Flask's
    "django/management/commands/runscheduler.py": {"_exit"},  # Python's
    "_runs/worker_process.py": {"_exit"},  # likewise
    "schema/migrations.py": {"_downgrade_revs", "_upgrade_revs"},  # Alembic's
    "jobstore/scheduler_inside.py": {  # APScheduler's, for the job store
        "_executors",
        "_getframe",  # Python's
        "_instances",
        "_jobstore_alias",
        "_jobstores",
        "_jobstores_lock",
        "_max_workers",
        "_pool",
        "_real_add_job",
        "_scheduler",
    },
}

_OF_OBJECTS = ("getattr", "setattr", "hasattr", "delattr")


def modules(folder: Path) -> dict[str, ast.Module]:
    """Return the modules in a folder by their paths in it."""
    found = sorted(folder.rglob("*.py"))
    return {path.relative_to(folder).as_posix(): ast.parse(path.read_text()) for path in found}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_itself(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def accesses(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the private attributes of others that a module uses, and where."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Attribute | ast.Call):  # because patterns are slow
            continue
        match node:
            case ast.Attribute(value=owner, attr=name) if not is_itself(owner):
                pass
            case ast.Call(
                func=ast.Name(id=function), args=[owner, ast.Constant(value=str(name)), *_]
            ) if function in _OF_OBJECTS and not is_itself(owner):
                pass
            case _:
                continue
        if is_private(name):
            yield name, node.lineno


def own(module: ast.Module) -> set[str]:
    """Return the private attributes that a module's own classes have."""
    names = set()
    for node in ast.walk(module):
        match node:
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store()) if is_itself(owner):
                names.add(name)
            case ast.ClassDef(body=body):
                for statement in body:
                    match statement:
                        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                            names.add(name)
                        case ast.AnnAssign(target=ast.Name(id=name)):
                            names.add(name)
                        case ast.Assign(targets=[ast.Name(id=name)]):
                            names.add(name)
    return names


# What executors and instrumentation override, which tests do as well; and Python's own.
OVERRIDDEN = {"_do_submit_job", "_run_job_success", "_run_job_error", "_dispatch_event"}
# The last two are asyncio's for those who write an event loop, as of a simulated world.
PYTHONS = {
    *("_exit", "_getframe", "_current_frames", "_get_running_loop", "_set_running_loop"),
    *NAMED_TUPLES,
}


def used_by_the_package(found: dict[str, ast.Module]) -> Iterator[str]:
    """Yield where private attributes of others are used that must not be.

    Classes of one module may know each other's. One module knows those of APScheduler.
    """
    apschedulers = {name for name, _ in accesses(found[ADAPTER])}
    for name in sorted({"_dispatch_event", "_jobstores", "_pool"} - apschedulers):
        yield f"{ADAPTER}: {name} of APScheduler is not found there, so nothing is checked"
    for path, module in found.items():
        its_own = own(module)
        for name, line in accesses(module) if path != ADAPTER else ():
            is_allowed = name in NAMED_TUPLES.union(ALLOWED.get(path, ()))
            if not is_allowed and (name in apschedulers or name not in its_own):
                yield f"apscheduler_tasklock/{path}:{line}: {name} is private to others"


def imported_by_the_package(found: dict[str, ast.Module]) -> Iterator[str]:
    """Yield where something private is imported from another module."""
    for path, module in found.items():
        for node in ast.walk(module):
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                if is_private(alias.name):
                    yield f"apscheduler_tasklock/{path}:{node.lineno}: {alias.name} is private"


def used_by_tests(found: dict[str, ast.Module]) -> Iterator[str]:
    """Yield where tests use private attributes, beside their support.

    This library is put into APScheduler's place in ``foreign``, whose own tests use them.
    """
    for path, module in found.items():
        if path.startswith(("support/", "foreign/")):
            continue
        names = own(module) | OVERRIDDEN | PYTHONS
        for name, line in accesses(module):
            if name not in names:
                yield f"tests/{path}:{line}: {name} is private, and this is not tests/support"


def main() -> int:
    """Print what is wrong, a line each."""
    package = modules(CHECKOUT / "apscheduler_tasklock")
    wrong = [
        *used_by_the_package(package),
        *imported_by_the_package(package),
        *used_by_tests(modules(CHECKOUT / "tests")),
    ]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
