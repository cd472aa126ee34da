"""An exercise for each page of the course; `python -m course.exercises` runs them.

The page has the task and the file to start from, in its section "Exercise N". exN.py has MISTAKES
and check(answer), answers/exN.py a right answer. Page 7 has six, ex7_1.py to ex7_6.py.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

NUMBERS = (*"123456", *(f"7.{n}" for n in range(1, 7)), *map(str, range(8, 14)))
ALSO = {"7": "7.5"}  # the exercise of page 7 before it had six
FOLDER = Path(__file__).resolve().parent


class Exercise(NamedTuple):
    """An exercise, from its page and its module."""

    number: str
    title: str
    task: str
    start: str  # a file to begin with
    answer: Path  # a right one
    checker: ModuleType  # with MISTAKES, check() and sometimes NEEDS: packages

    @property
    def names(self) -> list[str]:
        """The functions that an answer defines."""
        return re.findall(r"^def (\w+)", self.start, re.M)

    @property
    def right(self) -> str:
        return self.answer.read_text(encoding="utf-8")


def exercise(number: str) -> Exercise:
    """Read the exercise of this number from its page."""
    number = ALSO.get(number, number)
    page = next(FOLDER.parent.glob(f"{number.partition('.')[0]}_*.md")).read_text(encoding="utf-8")
    section = page.split(f"\n## Exercise {number}: ")[1].split("\n## ")[0]
    words, start = section.split("```python\n")
    title, task = re.sub(r"^```.*\n", "", words, flags=re.M).split("\n", 1)
    module = f"ex{number}".replace(".", "_")
    return Exercise(number, title, task.strip(), start.split("```")[0].strip() + "\n",
                    FOLDER / "answers" / f"{module}.py",
                    import_module(f"course.exercises.{module}"))
