"""The exercises of docs/course, and what checks them.

    python -m docs.exercises                         the list
    python -m docs.exercises 4                       the task of page 4
    python -m docs.exercises 4 --start               a file to start from
    python -m docs.exercises 4 --start > answer.py   the same, kept
    python -m docs.exercises 4 answer.py             is it right? If not: what is wrong

The exit code is 0 for a right answer, 1 for a wrong one and 2 for a mistake in the command. An
answer is a Python file; it is run as it is, so check only what you would run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from core.settings import Texts, UserError, exit_on_user_error, read
from docs.exercises import COUNT

USAGE = "usage: python -m docs.exercises [number [--start | FILE]]"


@dataclass(frozen=True)
class ExerciseConfig:
    """The exercises of docs/course, and what checks them. Without a number: the list."""

    exercise: Texts = ()  # its number, and the file of an answer to check
    start: bool = False  # print a file to start from


def main(argv: Sequence[str]) -> int:
    """Do what the command line says. Returns the exit code."""
    config = read(ExerciseConfig, argv, positional="exercise").settings
    words = config.exercise
    if not words:
        for number in range(1, COUNT + 1):
            print(f"{number:2}  {exercise(number).TASK.strip().splitlines()[0]}")
        print("\npython -m docs.exercises 1 prints the task of page 1")
        return 0
    if len(words) + config.start > 2 or words[0] not in map(str, range(1, COUNT + 1)):
        raise UserError(f"{USAGE}, with a number from 1 to {COUNT}; got {' '.join(argv)}")
    number = int(words[0])
    if config.start:
        print(exercise(number).START.strip())
        return 0
    if len(words) == 1:
        print(exercise(number).TASK.strip())
        print(
            f"\nStart:  python -m docs.exercises {number} --start > answer{number}.py"
            f"\nCheck:  python -m docs.exercises {number} answer{number}.py"
            f"\nOne answer, to compare with afterwards: docs/exercises/answers/ex{number}.py"
        )
        return 0
    answer = Path(words[1])
    if not answer.is_file():
        raise UserError(f"there is no file {words[1]!r}; {USAGE}")
    from docs.exercises.check import examine  # imports torch, which takes a second or two

    complaint = examine(exercise(number), answer)
    print(f"exercise {number}: {'right' if complaint is None else complaint}")
    return int(complaint is not None)


def exercise(number: int) -> Any:
    """The module of an exercise."""
    return import_module(f"docs.exercises.ex{number}")


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
