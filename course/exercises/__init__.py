"""An exercise for each page of the course; `python -m course.exercises` runs them.

exN.py has TASK (first line: title), START (a file to begin with), NAMES (functions to write) and
check(answer). answers/exN.py is a right answer.
"""

COUNT = 10
