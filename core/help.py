"""What `--help` prints: every setting as it would be typed, with its value and its meaning."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

_NAMES = {int: "an integer", float: "a finite number", bool: "True or False", str: "a string",
          NoneType: "None"}  # fmt: skip


def describe(hint: Any) -> str:
    """What a value of the type `hint` is, in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return describe(args[0])
    if origin in (typing.Union, UnionType):
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
    aliases: Mapping[str, str] = {},
    positional: str | None = None,
) -> str:
    """Every setting of a dataclass, with the `values` that `files` set, else its default."""
    width = max(60, min(shutil.get_terminal_size().columns, 120))
    left = 36 if width < 100 else 42  # columns of the names
    hints = typing.get_type_hints(cls, include_extras=True)
    words = positional or "config/file.py ..."
    about = (inspect.getdoc(cls) or "").split("\n\n")[0]
    source = f"what {', '.join(files)} set" if files else "the defaults"
    lines = [f"usage: python {program()} [{words}] [--name=value ...]", ""]
    lines += [*textwrap.wrap(about, width), ""]
    lines += textwrap.wrap(f"The values shown are {source}; the command line wins.", width)
    last = ""
    for group, field, comment in _comments(cls):
        lines += ["", f"{group}:"] if group != last else []
        last = group
        notes = [] if hints[field.name] in _NAMES else [describe(hints[field.name])]
        notes += [f"also --{alias}" for alias, name in aliases.items() if name == field.name]
        text = f"{comment} [{'; '.join(notes)}]" if notes else comment
        flag = f"  --{field.name}={_typed(values.get(field.name, field.default))}"
        flag = flag if len(flag) <= width else flag[: width - 3] + "..."
        if len(flag) > left - 2:
            lines.append(flag)
            flag = ""
        indent = " " * left
        lines += textwrap.wrap(
            text, width, initial_indent=flag.ljust(left), subsequent_indent=indent
        ) or [flag]
    return "\n".join(lines)


def _typed(value: Any) -> str:
    """A value as one would type it in a shell."""
    if isinstance(value, tuple):
        return ",".join(map(_typed, value))
    text = str(value).removeprefix(f"{Path.cwd()}/")
    return text if re.fullmatch(r"[\w.,:/+-]+", text) else repr(text)


def _comments(cls: type) -> Iterator[tuple[str, dataclasses.Field[Any], str]]:
    """Group, field, and the comment behind it, from the source; `# --- name ---` opens a group.

    The fields of a base class come last.
    """
    left = {field.name: field for field in dataclasses.fields(cls)}
    for base in filter(dataclasses.is_dataclass, cls.__mro__):
        try:
            source = inspect.getsource(base)
        except OSError:  # of make_dataclass: there is none
            continue
        group = "settings"
        for line in source.splitlines():
            code, _, comment = line.partition("  # ")
            if opens := re.match(r" *# --- (.*) ---", line):
                group = opens[1]
            elif (named := re.match(r" *(\w+): ", code)) and named[1] in left:
                yield group, left.pop(named[1]), comment
