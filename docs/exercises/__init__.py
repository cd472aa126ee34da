"""One exercise for each page of the course: docs/exercises/__main__.py tells how they are used.

A file exN.py has

    TASK    what to write; its first line is the title
    START   a file to start from: it runs, and is refused
    NAMES   the functions that an answer must define
    check   check(answer), with the answer's module; raises docs.exercises.check.Wrong
    prepare maybe: is called before an answer is loaded, and raises Wrong where something is missing

and answers/exN.py is an answer that passes.
"""

COUNT = 10
