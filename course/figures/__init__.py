from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.settings import Size

Numbers = tuple[float, ...]
Sizes = tuple[Size, ...]
Row = Mapping[Any, object]  # title of a column -> cell


def table(rows: Sequence[Row], titles: Sequence[str] = ()) -> str:
    """In Markdown, aligned; `titles` replaces the rows' keys."""
    cells = [[*(titles or rows[0])], *([str(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [" | ".join(c.ljust(w) for c, w in zip(row, widths)) for row in cells]
    lines.insert(1, " | ".join("-" * w for w in widths))
    return "\n".join(f"| {line} |" for line in lines)


def figure(head: str, rows: Sequence[Row], below: str = "", titles: Sequence[str] = ()) -> str:
    return "\n\n".join(filter(None, [f"{head}:", table(rows, titles), below]))


def of(dtype: str, more: str = "", **sizes: int) -> str:
    """As "float32, B = 1, T = 1,024, D = 64"."""
    return ", ".join([dtype, *(f"{n} = {x:,}" for n, x in sizes.items()), *filter(None, [more])])


def drawing(*lines: str) -> str:
    return "\n".join(["```text", *(line.rstrip() for line in lines), "```"])


def listed(x: Sequence[float]) -> str:
    return ", ".join(f"{n:g}" for n in x)


def megabytes(n: int) -> str:
    return f"{n / 1e6:,.2f} MB"
