"""What `--help` prints: every setting as it would be typed, with its value and its meaning."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import shutil
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

_NAMES = {
    int: "an integer",
    float: "a finite number",
    bool: "True or False",
    str: "a string",
    types.NoneType: "None",
}


def describe(hint: Any) -> str:
    """What a value of the type `hint` is, in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return describe(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(describe, args))
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    return f"a list (each {describe(args[0])})" if origin is tuple else _NAMES[hint]


def program() -> str:
    """What follows `python` on the command line: "train.py", or "-m attention"."""
    spec = sys.modules["__main__"].__spec__
    if spec and spec.origin == sys.argv[0]:
        return f"-m {spec.name.removesuffix('.__main__')}"
    return Path(sys.argv[0]).name


def help_text(
    cls: type,
    values: Mapping[str, Any],
    files: Sequence[str] = (),
    aliases: Mapping[str, str] | None = None,
    positional: str | None = None,
    epilog: str = "",
    width: int | None = None,
) -> str:
    """Every setting of a dataclass, with the `values` that `files` set or the defaults are."""
    width = max(60, min(width or shutil.get_terminal_size().columns, 120))
    left = 36 if width < 100 else 42  # columns of the names
    hints = typing.get_type_hints(cls, include_extras=True)
    words = positional or "config/file.py ..."
    lines = [f"usage: python {program()} [{words}] [--name=value ...]", ""]
    about = inspect.getdoc(cls) or ""
    lines += [*textwrap.wrap(about.split("\n\n")[0], width), ""]
    source = f"what {', '.join(files)} set" if files else "the defaults"
    lines += textwrap.wrap(f"The values shown are {source}; the command line wins.", width)
    for group, comments in _comments(cls, values).items():
        lines += ["", f"{group}:"]
        for name, comment in comments.items():
            notes = [] if hints[name] in _NAMES else [describe(hints[name])]
            notes += [f"also --{alias}" for alias, to in (aliases or {}).items() if to == name]
            text = f"{comment} [{'; '.join(notes)}]" if notes else comment
            flag = f"  --{name}={_typed(values[name])}"
            flag = flag if len(flag) <= width else flag[: width - 3] + "..."
            wrapped = textwrap.wrap(text, width - left) or [""]
            lines.append(flag if len(flag) > left - 2 else flag.ljust(left) + wrapped.pop(0))
            lines += [" " * left + line for line in wrapped]
    lines += ["", epilog] if epilog else []
    return "\n".join(line.rstrip() for line in lines)


def _typed(value: Any) -> str:
    """A value as one would type it in a shell."""
    if isinstance(value, tuple):
        return ",".join(map(_typed, value))
    text = str(value).removeprefix(f"{Path.cwd()}/")
    return text if re.fullmatch(r"[\w.,:/+-]+", text) else repr(text)


def _comments(cls: type, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Group -> field -> the comment behind it, from the source of the dataclass.

    A line `# --- name ---` opens a group. The fields of a base class come last.
    """
    groups: dict[str, dict[str, str]] = {}
    missing = set(names)
    for base in filter(dataclasses.is_dataclass, cls.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # of make_dataclass: there is none
            continue
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and (name := ast.unparse(node.target)) in missing:
                above = [c for n, c in comments.items() if n < node.lineno and c.startswith("---")]
                lines = range(node.lineno, (node.end_lineno or 0) + 1)
                text = " ".join(comments[n] for n in lines if n in comments)
                group = above[-1].strip("- ") if above else "settings"
                groups.setdefault(group, {})[name] = text
                missing.remove(name)
    return groups
