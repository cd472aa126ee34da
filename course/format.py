"""How the figures of the course are written: tables, drawings, numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Numbers = Sequence[float]


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table whose columns are aligned in a terminal too."""
    cells = [list(titles), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(titles))]
    lines = [" | ".join(c.ljust(w) for c, w in zip(row, widths)) for row in cells]
    lines.insert(1, " | ".join("-" * w for w in widths))
    return "\n".join(f"| {line} |" for line in lines)


def of(dtype: str, more: str = "", **sizes: int) -> str:
    """The line above a table: its dtype and sizes, as in "float32, B = 1, T = 1,024, D = 64"."""
    return ", ".join([dtype, *(f"{n} = {x:,}" for n, x in sizes.items()), *filter(None, [more])])


def drawing(*lines: str) -> str:
    """Text that keeps its columns."""
    return "\n".join(["```text", *(line.rstrip() for line in lines), "```"])


def plain(x: Numbers) -> str:
    return ", ".join(f"{n:g}" for n in x)


def megabytes(n: int) -> str:
    """Bytes in units of 10^6."""
    return f"{n / 1e6:,.2f} MB"
