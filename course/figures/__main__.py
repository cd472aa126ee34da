"""The course's figures, as Markdown.

python -m course.figures                          list them
python -m course.figures mask                     print one
python -m course.figures mask --Tq=2 --Tk=6       with other numbers
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import get_type_hints

from core.settings import UserError, check, exit_on_user_error, user_errors
from course.figures import pages_1_to_5, pages_6_to_11

# A function whose arguments all have defaults.
FIGURES: dict[str, Callable[..., str]] = {
    name: make
    for part in (pages_1_to_5, pages_6_to_11)
    for name, make in vars(part).items()
    if inspect.isfunction(make)
    and make.__module__ == part.__name__
    and all(p.default is not p.empty for p in inspect.signature(make).parameters.values())
}


def main(argv: Sequence[str]) -> int:
    if argv:
        print(draw(argv))
        return 0
    for name, make in FIGURES.items():
        print(f"{name:22s} {(inspect.getdoc(make) or '').splitlines()[0]}")
    return 0


def draw(words: Sequence[str]) -> str:
    name, *rest = words
    if name not in FIGURES:
        raise UserError(f"no figure {name!r}; there are {', '.join(FIGURES)}")
    known = inspect.signature(FIGURES[name]).parameters
    hints, options = get_type_hints(FIGURES[name], include_extras=True), {}
    for word in rest:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not equals or key not in known:
            takes = ", ".join(f"--{p.name}={p.default}" for p in known.values()) or "no options"
            raise UserError(f"{name} takes {takes}; got {word}")
        with suppress(Exception):  # a name of a GPU
            value = ast.literal_eval(value)
        options[key] = check(hints[key], value, f"--{key}", strict=False)
        if options[key] == ():
            raise UserError(f"--{key}: expected at least one number, got {value}")
    with user_errors():
        return FIGURES[name](**options)


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
