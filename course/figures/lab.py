"""The table of page 13: variants of attention, and what they cost."""

from __future__ import annotations

from course.lab.report import record, table


def variants() -> str:
    """Page 13: the record of `python -m course.lab`, with computed costs."""
    return table(record())
