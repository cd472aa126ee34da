"""Median, quartiles and noise.

The spread is the distance between the quartiles over the median. A disturbance affects all
backends of a run, so two backends differ by the ratios of neighbouring rounds: |log ratio| >
spread(ratio).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NOISY = 0.05  # a figure with a wider spread is doubtful
ENOUGH = 3  # rounds: the quartiles of two are the two


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of several rounds."""

    median: float
    q1: float
    q3: float
    spread: float | None  # (q3 - q1) / median; None for a single round

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        if len(values) == 1:
            return cls(values[0], values[0], values[0], None)
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3, (q3 - q1) / median if median else math.inf)

    def noisy(self) -> bool:
        return self.spread is not None and self.spread > NOISY


def differ(a: Sequence[float], b: Sequence[float]) -> bool | None:
    """Return True if two backends of one run differ, round by round; None: spread unknown."""
    ratio = Summary.of([x / y for x, y in zip(a, b)])
    return None if ratio.spread is None else abs(math.log(ratio.median)) > ratio.spread
