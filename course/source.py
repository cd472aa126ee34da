"""The source of one function, class or method, cut out of its file."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from core.settings import UserError

ROOT = Path(__file__).resolve().parent.parent


def source(text: str, name: str) -> str:
    """The lines of a function, class or method (Class.method) of a file."""
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        found = [n for n in getattr(node, "body", []) if getattr(n, "name", None) == part]
        if not found:
            raise UserError(f"{name} not found in that file")
        node = found[0]
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.end_lineno is not None
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return textwrap.dedent("".join(text.splitlines(keepends=True)[start - 1 : node.end_lineno]))
