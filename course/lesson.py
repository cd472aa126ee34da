"""Functions of the cells in notebooks/attention.ipynb."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable

from course import ROOT
from course.exercises import exercise
from course.exercises.check import examine, made_of
from course.figures.__main__ import draw


def figure(words: str) -> None:
    """words: as 'mask --Tq=3 --Tk=5'."""
    text = draw(shlex.split(words))
    display({"text/plain": text, "text/markdown": text})


def picture(name: str) -> None:
    display(bundle(name))


def bundle(name: str) -> dict[str, str]:
    """A picture by MIME type."""
    file = f"course/pictures/{name}.svg"
    return {"image/svg+xml": (ROOT / file).read_text(encoding="utf-8"), "text/plain": file}


def check(number: int | float, *functions: Callable[..., object]) -> None:
    """Print "right", or the first error and a hint."""
    why = examine(exercise(str(number)), made_of(*functions))
    end = f"{why}\nTo see a right answer: answer({number})" if why else "right"
    print(f"exercise {number}: {end}")


def answer(number: int | float) -> None:
    print(exercise(str(number)).right.strip())


def display(data: dict[str, str]) -> None:
    """Show the best form in a notebook, else the plain text."""
    if "ipykernel" in sys.modules:
        from IPython.display import display as show

        show(data, raw=True)
    else:
        print(data["text/plain"])
