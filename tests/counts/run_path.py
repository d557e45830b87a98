"""The lines of code on a run's path: those of the modules in `run_path.txt`."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

HERE = Path(__file__).parent
CHECKOUT = HERE.parent.parent
PACKAGE = CHECKOUT / "apscheduler_tasklock"

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
_HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Count the lines of a module without blank lines, comments, docstrings and imports."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _HAS_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            left_out |= _lines_of(node.body[0])
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out |= _lines_of(node)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - left_out)


def _lines_of(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def modules() -> list[str]:
    """Return the modules of the run path, as paths in the package."""
    lines = (HERE / "run_path.txt").read_text(encoding="utf-8").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


def counted() -> dict[str, int]:
    """Return the lines of code of each module of the run path; one that is gone has none."""
    paths = {module: PACKAGE / module for module in modules()}
    return {
        module: code_lines(path.read_text(encoding="utf-8")) if path.exists() else 0
        for module, path in paths.items()
    }
