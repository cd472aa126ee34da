"""The exercises of the course.

    python -m course.exercises                         list them
    python -m course.exercises 4                       print the task of page 4
    python -m course.exercises 4 --start > answer.py   a file to start from
    python -m course.exercises 4 answer.py             execute and check an answer
    python -m course.exercises 4 --answer              print the right answer
    python -m course.exercises 7.1                     page 7 has six
    python -m course.exercises grade FOLDER            check a class: JSON, and points on stderr

Exit code 1: a wrong answer. FOLDER has a folder of answer1.py, ..., answer7.1.py, ... a student.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from core.settings import UserError, exit_on_user_error
from course.exercises import NUMBERS, exercise

USAGE = "usage: python -m course.exercises [number [--start | --answer | FILE] | grade FOLDER]"
GRADING_S = 300  # seconds for an answer
RESULT = "COURSE_RESULT"  # environment variable: grade()'s file


def main(argv: Sequence[str]) -> int:
    number, what = [*argv, "", ""][:2]
    of_page = [n for n in NUMBERS if n.startswith(f"{number}.")]
    if (not what and of_page) or not number or number in ("-h", "--help"):
        for n in of_page or NUMBERS:
            print(f"{n:3}  {exercise(n).title}")
        return 0
    if number == "grade" and len(argv) == 2:
        print(json.dumps(grade(Path(what)), indent=1))
        return 0
    if len(argv) > 2 or number not in NUMBERS:
        raise UserError(f"{USAGE}, number: {', '.join(NUMBERS)}; got {' '.join(argv)}")
    task = exercise(number)
    command = f"python -m course.exercises {number}"
    texts = {
        "--start": task.start, "--answer": task.right,
        "": f"{task.title}\n\n{task.task}\n\nStart:   {command} --start > answer{number}.py"
            f"\nCheck:   {command} answer{number}.py\nAnswer:  {command} --answer",
    }
    if what in texts:
        print(texts[what].strip())
        return 0
    answer = Path(what)
    if not answer.is_file():
        raise UserError(f"no such file: {what!r}; {USAGE}")
    from course.exercises.check import examine

    result = os.environ.pop(RESULT, "")
    sys.path.insert(0, str(answer.resolve().parent))  # answers may import one another
    why = examine(task, answer)
    if result:
        Path(result).write_text(why or "right", encoding="utf-8")
    print(f"exercise {number}: {why or 'right'}")
    return int(why is not None)


def grade(folder: Path) -> dict[str, dict[str, object]]:
    """{student: {"points": right answers, "of": exercises, "answers": {number: result}}}."""
    if not folder.is_dir():
        raise UserError(f"no such folder: {str(folder)!r}; {USAGE}")
    students = (p.name for p in sorted(folder.glob("[!.]*")) if p.is_dir())
    found: dict[str, dict[str, str]] = {name: {} for name in students}
    # answer1.py before answer1_old.py.
    for path in sorted(folder.rglob("*.py"), key=lambda p: (p.parent, len(p.name), p.name)):
        folders = path.relative_to(folder).parts[:-1]
        if any(name.startswith(".") for name in folders):
            continue  # a checkpoint of Jupyter
        name = re.search(r"0*(\d+)(?:[._](\d))?", path.stem)
        names = (f"{name[1]}.{name[2]}", name[1]) if name else ()
        number = next((n for n in names if n in NUMBERS), None)
        if number is None:
            print(f"{path}: not answerN.py with N of {', '.join(NUMBERS)}", file=sys.stderr)
            continue
        answers = found.setdefault(folders[0] if folders else ".", {})
        if number in answers:
            print(f"{path}: a second answer to {number}, not graded", file=sys.stderr)
            continue
        answers[number] = graded(number, path)
        print(f"{path}: {answers[number]}", file=sys.stderr)
    grades: dict[str, dict[str, object]] = {}
    for student, answers in found.items():
        points = [*answers.values()].count("right")
        grades[student] = {"points": points, "of": len(NUMBERS), "answers": answers}
        print(f"{student}: {points} of {len(NUMBERS)}", file=sys.stderr)
    return grades


def graded(number: str, path: Path) -> str:
    """Return "right" or the error, from its own process: an answer may exit or crash."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        command = [sys.executable, "-m", "course.exercises", number, str(path)]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True,
                                  timeout=GRADING_S, env={**os.environ, RESULT: str(result)})
        except subprocess.TimeoutExpired:
            return f"not finished after {GRADING_S} s"
        if not result.is_file():
            return f"the process ended without a result, exit code {done.returncode}"
        return result.read_text(encoding="utf-8")


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
