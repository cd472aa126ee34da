"""The table of page 13: variants of attention, and what they cost."""

from __future__ import annotations

from course.format import of
from course.lab.report import record, table
from course.lab.training import LENGTH, PLAYS, TOKENS, build


def variants() -> str:
    """Page 13: the record of `python -m course.lab`, with computed costs."""
    config = build("mha", PLAYS).config
    sizes = {"B": TOKENS // LENGTH, "T": LENGTH, "H": config.n_head, "D": config.head_dim}
    return f"{of('float32', 'MHA, on the plays', **sizes)}:\n\n{table(record())}"
