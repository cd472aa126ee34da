"""Medians and noise of rounds; rows as tables, for the terminal and for Markdown.

A row is a dict as in a record: `mode`, `backend`, `point`, `status` (ok, or unavailable, failed,
skipped, stopped with `why`), every round, and the figures that its mode computes from them.

The spread is the distance between the quartiles over the median. Two rows are level if their
quartiles overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from bench import Json

Row = Json
Cells = tuple[list[str], list[list[str]]]  # the head, the lines
Column = tuple[str, Callable[[Row], str]]
NOISY = 0.05  # a figure with a wider spread is doubtful
ENOUGH = 3  # rounds, with fewer their number stands next to the fastest
TIMES = ("ms", "forward_ms", "backward_ms", "optimizer_ms", "first_ms")


# --- medians ---


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    q1, median, q3 = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return q1, median, q3


def spread_of(values: Sequence[float]) -> float | None:
    """Return the spread; None for a single round."""
    q1, median, q3 = quartiles(values)
    if len(values) == 1:
        return None
    return (q3 - q1) / median if median else math.inf


def medians(row: Row) -> Json:
    """Return the median of each time, and the quartiles and spread of `ms`."""
    rounds = row["rounds"]
    found: Json = {
        name: quartiles([r[name] for r in rounds])[1] for name in TIMES if name in rounds[0]
    }
    ms = [r["ms"] for r in rounds]
    (found["q1_ms"], _, found["q3_ms"]), spread = quartiles(ms), spread_of(ms)
    return {**found, "spread": spread, "noisy": spread is not None and spread > NOISY}


# --- cells ---


def where(point: Json, *before: str) -> str:
    """Return the point as text after other words: "sdpa B=1 P=64 cache=static"."""
    return " ".join([*before, *(f"{k}={v}" for k, v in point.items() if v is not None)])


def bytes_(n: float | None) -> str:
    """Format a size, such as "1.23 GB"."""
    if n is None:
        return "-"
    if n < 1e6:
        return f"{number(n / 1e3)} KB"
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def number(value: float | None) -> str:
    """Format with three digits, or all before the point: "0.691", "45.1", "5,375"."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def count(n: int, noun: str) -> str:
    """Return "1 round" or "3 rounds"."""
    return f"{n} {noun}" + ("s" if n != 1 else "")


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def kernel_names(row: Row) -> str:
    """Return the short names of the executed kernels, else the device's own name."""
    short, device = ", ".join(row.get("kernels", [])), row.get("device_kernels", [])
    return short or (device[0][:40] if device else "not fused")


def spread(row: Row) -> str:
    if row["spread"] is None:
        return "1 round"
    return f"{number(row['q1_ms'])} to {number(row['q3_ms'])}" + (" noisy" if row["noisy"] else "")


def cache(row: Row) -> str:
    point = row["point"]
    with_ = point.get("constraint") or ("a processor" if point.get("processor") else "")
    return point["cache"] + (f" with {with_}" if with_ else "")


QUARTILES: list[Column] = [("quartiles", spread), ("rounds", lambda r: str(len(r["rounds"])))]
PASSES: list[Column] = [
    ("fwd ms", lambda r: number(r.get("forward_ms"))),
    ("bwd ms", lambda r: number(r.get("backward_ms"))),
]
MEMORY: Column = ("memory", lambda r: bytes_(r.get("memory_bytes")))
EXPLAINED = (
    "quartiles: half of the rounds lie between; noisy: more than 5 % apart; level: they overlap "
    "the fastest row's"
)


def cells(columns: list[Column], rows: list[Row], of: str = "") -> Cells:
    """Return the table of the measured rows; `of` marks columns that use a given peak."""
    rows = [row for row in rows if row["status"] == "ok"]
    timed = groups(rows).values() if "quartiles" in dict(columns) else ()
    level = [id(row) for group in timed for row in fastest_of(group)[1]]
    lines = []
    for row in rows:
        made = {title: cell(row) for title, cell in columns}
        if id(row) in level:
            made["quartiles"] += " level"
        lines.append([row["backend"], *made.values()])
    return ["backend", *(marked(title, of) for title, _ in columns)], lines


def marked(title: str, of: str) -> str:
    """Return the title of a column, marked if it uses a peak that the user gave."""
    if of and title == "of peak":
        return of.strip()
    uses = title in ("mfu", "causal", "roofline ms", "times", "over ms", "limit")
    return title + of if uses else title


def missing(rows: list[Row]) -> Cells:
    """Return what was not measured, one line per backend and reason."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            key = (row["backend"], row["status"], "; ".join(row["why"]))
            seen.setdefault(key, []).append(where(row["point"], row["mode"]))
    lines = []
    for (name, status, why), places in seen.items():
        at = f" ({'; '.join(places)})" if status != "unavailable" else ""
        lines.append([name, status + at, why])
    return ["backend", "status", "why"], lines


def markdown(content: Cells) -> str:
    """Format as Markdown with aligned columns, except the last, which may be a sentence."""
    head, lines = content
    rows = [[cell.replace("|", "/") for cell in row] for row in (head, *lines)]  # "|" ends a cell
    widths = [max(3, *map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in (*widths[:-1], 3)])
    return "\n".join(
        "| " + " | ".join([*map(str.ljust, row[:-1], widths), row[-1]]) + " |" for row in rows
    )


# --- the fastest ---


def groups(rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    """Return the rows that compete, by mode and point, and length of attention alone."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        at = {name: row["point"].get(name) for name in ("B", "P", "H", "D", "window")}
        found.setdefault((where(at, row["mode"]), row["point"].get("T", 0)), []).append(row)
    return found


def fastest_of(rows: list[Row], old: bool = False) -> tuple[Row, list[Row]]:
    """Return the fastest row and those that are level with it. With --batch_size=auto each has its
    own number of sequences."""
    best = min(rows, key=lambda row: row["ms"] / row.get("batch_size", 1))
    upper = best["q3_ms"] / best.get("batch_size", 1)

    def level(row: Row) -> bool:
        if old:
            return not differ(best, row)
        return row["q1_ms"] / row.get("batch_size", 1) <= upper

    return best, [row for row in rows if row is not best and level(row)]


def differ(a: Row, b: Row) -> bool:
    """Return True if two rows differ by more than the ratios of their rounds scatter."""
    times = [[r["ms"] / row.get("batch_size", 1) for r in row["rounds"]] for row in (a, b)]
    ratios = [x / y for x, y in zip(*times)]
    spread = spread_of(ratios)
    return spread is None or abs(math.log(quartiles(ratios)[1])) > spread


def fastest(rows: list[Row], old: bool = False) -> list[str]:
    """Return the fastest backends; of attention alone by length. old: as in records of format 2,
    by ratios of neighbouring rounds."""
    by_place: dict[str, list[tuple[str, int]]] = {place: [] for place, _ in groups(rows)}
    for (place, T), group in sorted(groups(rows).items()):
        by_place[place].append((winner(group, old), T))
    found = []
    for place, wins in by_place.items():
        firsts = [(name, next(run)[1]) for name, run in groupby(wins, key=itemgetter(0))]
        parts = [name + (f" from {T:,} tokens on" if T else "") for name, T in firsts]
        found.append(f"{place}: {', then '.join(parts)}")
    return found


def winner(rows: list[Row], old: bool) -> str:
    """Return the fastest, and those that are level with it."""
    best, level = fastest_of(rows, old)
    remarks = []
    if (n := len(best["rounds"])) < ENOUGH and (len(rows) > 1 or not old):
        if old:
            return f"{label(best)} (too few rounds)"
        remarks = [count(n, "round")]
    remarks += [f"level: {', '.join(dict.fromkeys(map(label, level)))}"] if level else []
    return label(best) + (f" ({'; '.join(remarks)})" if remarks else "")


def label(row: Row) -> str:
    return row["backend"] + (f" with cache {cache(row)}" if "cache" in row["point"] else "")
