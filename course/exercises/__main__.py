"""The exercises of the course.

    python -m course.exercises                         list them
    python -m course.exercises 4                       print the task of page 4
    python -m course.exercises 4 --start > answer.py   a file to start from
    python -m course.exercises 4 answer.py             check an answer

The exit code is 0 for a right answer, 1 for a wrong one and 2 for a wrong command. The answer is
executed as a Python file: check only code that you would run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from core.settings import Texts, UserError, exit_on_user_error, read
from course.exercises import COUNT

USAGE = "usage: python -m course.exercises [number [--start | FILE]]"


@dataclass(frozen=True)
class ExerciseConfig:
    """The exercises of the course. Without a number: list them."""

    exercise: Texts = ()  # its number, then the file of the answer to check
    start: bool = False  # print a file to start from


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit code."""
    config = read(ExerciseConfig, argv, positional="exercise").settings
    words = config.exercise
    if not words:
        for n in range(1, COUNT + 1):
            print(f"{n:2}  {exercise(str(n)).TASK.splitlines()[0]}")
        return 0
    number = words[0]
    if len(words) + config.start > 2 or number not in map(str, range(1, COUNT + 1)):
        raise UserError(f"{USAGE}, number 1 to {COUNT}; got {' '.join(argv)}")
    if config.start:
        print(exercise(number).START.strip())
        return 0
    if len(words) == 1:
        print(
            f"{exercise(number).TASK.strip()}\n"
            f"\nStart:   python -m course.exercises {number} --start > answer{number}.py"
            f"\nCheck:   python -m course.exercises {number} answer{number}.py"
            f"\nAnswer:  course/exercises/answers/ex{number}.py"
        )
        return 0
    answer = Path(words[1])
    if not answer.is_file():
        raise UserError(f"no such file: {words[1]!r}; {USAGE}")
    from course.exercises.check import examine

    why = examine(exercise(number), answer)
    print(f"exercise {number}: {'right' if why is None else why}")
    return int(why is not None)


def exercise(number: str) -> ModuleType:
    return import_module(f"course.exercises.ex{number}")


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
