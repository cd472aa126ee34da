"""The exercises of the course.

    python -m course.exercises                         list them
    python -m course.exercises 4                       print the task of page 4
    python -m course.exercises 4 --start > answer.py   a file to start from
    python -m course.exercises 4 answer.py             check an answer

The exit code is 0 for a right answer, 1 for a wrong one. The answer is executed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from core.settings import UserError, exit_on_user_error
from course.exercises import COUNT

USAGE = "usage: python -m course.exercises [number [--start | FILE]]"


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        for n in range(1, COUNT + 1):
            print(f"{n:2}  {exercise(str(n)).TASK.splitlines()[0]}")
        return 0
    number, *rest = argv
    if len(rest) > 1 or number not in map(str, range(1, COUNT + 1)):
        raise UserError(f"{USAGE}, number 1 to {COUNT}; got {' '.join(argv)}")
    if rest == ["--start"]:
        print(exercise(number).START.strip())
        return 0
    if not rest:
        print(
            f"{exercise(number).TASK.strip()}\n"
            f"\nStart:   python -m course.exercises {number} --start > answer{number}.py"
            f"\nCheck:   python -m course.exercises {number} answer{number}.py"
            f"\nAnswer:  course/exercises/answers/ex{number}.py"
        )
        return 0
    answer = Path(rest[0])
    if not answer.is_file():
        raise UserError(f"no such file: {rest[0]!r}; {USAGE}")
    from course.exercises.check import examine

    why = examine(exercise(number), answer)
    print(f"exercise {number}: {'right' if why is None else why}")
    return int(why is not None)


def exercise(number: str) -> ModuleType:
    return import_module(f"course.exercises.ex{number}")


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
