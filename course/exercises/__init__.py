"""Tasks are on the pages, answers in answers.md; checks here."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from course import ROOT

NUMBERS = (*"123456", *(f"7.{n}" for n in range(1, 7)), *map(str, range(8, 14)))
# Hints of several exercises.
ALIGNED = "Query i sees key j where j <= i + Tk - Tq, not j <= i"
SCALE = "Divide the scores by sqrt(D)"
UNMASKED = "The causal mask is missing"


class Exercise(NamedTuple):
    number: str
    title: str
    task: str
    start: str
    right: str
    check: Callable[[ModuleType], None]  # raises for a wrong answer
    mistakes: list[tuple[str, str, str]]  # a text of `right`, the wrong one, the hint

    @property
    def names(self) -> list[str]:
        return re.findall(r"^def (\w+)", self.start, re.M)


def exercise(number: str) -> Exercise:
    from course.exercises import page_7, pages_1_to_6, pages_8_to_13

    course = ROOT / "course"
    page = next(course.glob(f"{number.partition('.')[0]}_*.md")).read_text(encoding="utf-8")
    section = page.split(f"\n## Exercise {number}: ")[1].split("\n## ")[0]
    words, start = section.split("```python\n")
    title, task = re.sub(r"^```.*\n", "", words, flags=re.M).split("\n", 1)
    answers = (course / "answers.md").read_text(encoding="utf-8")
    right = answers.split(f"\n## Answer {number}: ")[1].split("```")[1].removeprefix("python\n")
    checks = pages_1_to_6.CHECKS | page_7.CHECKS | pages_8_to_13.CHECKS
    return Exercise(number, title, task.strip(), start.split("```")[0].strip() + "\n",
                    right, *checks[number])
