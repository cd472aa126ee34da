"""Exercise 7.1: copy a row, in Triton."""

from __future__ import annotations

from types import ModuleType

from course.exercises.check import draws
from course.exercises.kernels import NEEDS as NEEDS
from course.exercises.kernels import compare

MISTAKES = [
    ("X + t * D", "X", "Every program loads row 0: row t begins at X + t * D"),
    ("t * D", "0 * D", "Row t begins at X + t * D: every program copies row 0"),
    ("t * D", "t * BLOCK_D", "Rows are D numbers apart, not BLOCK_D"),
    ("Y + t * D", "Y", "Write to row t of Y: it begins at Y + t * D"),
    ("mask=d < D", "mask=d < D - 1", "The last number of each row is missing: mask=d < D"),
]


def check(answer: ModuleType) -> None:
    for T, D, BLOCK_D in ((1, 8, 8), (3, 8, 8), (3, 6, 8), (2, 40, 64)):
        (x,) = draws(D, (T, D))
        case = f"T = {T}, D = {D}"
        compare(answer, "copy", (T,), {"X": x}, {"Y": x}, D, case=case, BLOCK_D=BLOCK_D)
