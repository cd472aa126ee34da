"""The source of one function, class, method or constant, cut out of its file."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from core.settings import UserError

ROOT = Path(__file__).resolve().parent.parent


def source(text: str, name: str) -> str:
    """The lines of a function, class, method or constant of a file."""
    body: list[ast.stmt] = ast.parse(text).body
    for part in name.split("."):
        node = next((n for n in body if part in names(n)), None)
        if node is None:
            raise UserError(f"{name} not found in that file")
        body = getattr(node, "body", [])
    assert node is not None and node.end_lineno is not None
    start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return textwrap.dedent("".join(text.splitlines(keepends=True)[start - 1 : node.end_lineno]))


def names(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [t.id for t in targets if isinstance(t, ast.Name)]
