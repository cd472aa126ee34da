"""An exercise for each page of the course; `python -m course.exercises` runs them.

exN.py has TASK (first line: title), START (a file to begin with) and check(answer). Page 7 has six,
ex7_1.py to ex7_6.py.
"""

NUMBERS = (*"123456", *(f"7.{n}" for n in range(1, 7)), *map(str, range(8, 14)))
ALSO = {"7": "7.5"}  # the exercise of page 7 before it had six
