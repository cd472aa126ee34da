"""An exercise for each page of the course; `python -m course.exercises` runs them.

exN.py has TASK (first line: title), START (a file to begin with) and check(answer).
"""

COUNT = 11
