"""Modes, tables and figures of rows. A row has `mode`, `backend`, `point`, `status` (ok; with `why`
unavailable, failed, skipped, stopped), `rounds`, and its mode's figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from bench import Json

Row = Json
Cells = tuple[list[str], list[list[str]]]  # head, lines
NOISY = 0.05  # distance of the quartiles over the median
ENOUGH = 3  # rounds; fewer are noisy
WIDE = 40  # characters; longer cells are not padded
TIMES = ("ms", "forward_ms", "backward_ms", "optimizer_ms", "first_ms")
RELATIVE = {"mfu", "causal", "roofline ms", "times", "limit"}  # of the peak
SAME = ("B", "P", "H", "Hkv", "D", "window", "constraint")  # of rows that compete


class Column(NamedTuple):
    title: str
    of: str | Callable[[Row], Any]
    show: Callable[[Any], str] = str

    def cell(self, row: Row) -> str:
        value = row.get(self.of) if isinstance(self.of, str) else self.of(row)
        return "-" if value is None else self.show(value)


@dataclass(frozen=True)
class Mode:
    """figures(row, record): of a row with its medians; compare(rows, settings): with other rows, in
    place; conclude(record): one more conclusion."""

    title: str
    columns: str  # titles of COLUMNS
    notes: str
    board: str
    plans: Callable[[Any], list[Any]]
    figures: Callable[[Row, Json], Json]
    rounds: Callable[[Json], int] = lambda settings: settings["rounds"]
    compare: Callable[[list[Row], Json], None] = lambda rows, settings: None
    conclude: Callable[[Json], str] = lambda record: ""
    warm_up: str = ""


def medians(row: Row) -> Json:
    """Median times; quartiles of `ms`, and their relative distance."""
    rounds = row["rounds"]
    found: Json = {t: float(np.median([r[t] for r in rounds])) for t in TIMES if t in rounds[0]}
    q1, ms, q3 = np.quantile([r["ms"] for r in rounds], (0.25, 0.5, 0.75)).tolist()
    spread = (q3 - q1) / ms if len(rounds) > 1 else None
    noisy = spread is not None and spread > NOISY
    return {**found, "q1_ms": q1, "q3_ms": q3, "spread": spread, "noisy": noisy}


# --- formats ---

percent = "{:.1%}".format
error = "{:.1e}".format


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def bytes_(n: float) -> str:
    if n < 1e6:
        return f"{number(n / 1e3)} KB"
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("s" if n != 1 else "")


def where(point: Json, *before: str) -> str:
    return " ".join([*before, *(f"{k}={v}" for k, v in point.items() if v is not None)])


def kernel_names(row: Row) -> str:
    device = row.get("device_kernels")
    return ", ".join(row.get("kernels", [])) or (device[0][:40] if device else "not fused")


def spread(row: Row) -> str:
    if row["spread"] is None:
        return "1 round"
    return f"{number(row['q1_ms'])} to {number(row['q3_ms'])}" + (" noisy" if row["noisy"] else "")


def cache(row: Row) -> str:
    point = row["point"]
    with_ = point.get("constraint") or ("a processor" if point.get("processor") else "")
    return point["cache"] + (f" with {with_}" if with_ else "")


def heads(H: int, Hkv: int, word: str = "") -> str:
    return f"{H}{word}" + (f" ({Hkv} for keys)" if Hkv != H else "")


FORMATS: list[tuple[Callable[[Any], str], dict[str, str]]] = [  # title: field of a row
    (str, {"backend": "backend", "batch": "batch_size", "verdict": "verdict"}),
    (number, {"tok/s": "tokens_per_s", "ms/step": "ms", "ms/token": "ms", "both ms": "ms"}),
    (number, {"first ms": "first_ms", "fwd ms": "forward_ms", "bwd ms": "backward_ms"}),
    (number, {"TFLOP/s": "tflops_causal", "full": "tflops_full"}),
    (percent, {"of peak": "share", "mfu": "mfu", "causal": "mfu_causal", "mbu": "mbu"}),
    (percent, {"time saved": "time_saved", "memory saved": "memory_saved"}),
    (error, {"loss diff": "loss_difference", "err out": "error_out", "err grad": "error_grad"}),
    (bytes_, {"memory": "memory_bytes", "cache size": "cache_bytes"}),
    ("{:.4f}".format, {"final loss": "final_loss", "seed noise": "seed_noise"}),
    ("{:+.3%}".format, {"off": "difference"}),
    ("{:.1f}".format, {"compile s": "compile_s"}),
]
COLUMNS = {
    "B": Column("B", lambda r: r.get("batch_size", r["point"]["B"])),
    "T": Column("T", lambda r: r["point"]["T"]),
    "H": Column("H", lambda r: heads(r["point"]["H"], r["point"]["Hkv"])),
    "D": Column("D", lambda r: r["point"]["D"]),
    "window": Column("window", lambda r: r["point"]["window"]),
    "prompt": Column("prompt", lambda r: r["point"]["P"]),
    "cache": Column("cache", cache),
    "quartiles": Column("quartiles", spread),
    "rounds": Column("rounds", lambda r: len(r["rounds"])),
    "warm-up s": Column("warm-up s", lambda r: r["setup_s"] + r["warm_up_s"], "{:.1f}".format),
    "kernel": Column("kernel", kernel_names),
    **{title: Column(title, of, show) for show, names in FORMATS for title, of in names.items()},
}


def named(titles: str) -> list[Column]:
    return [COLUMNS[title] for title in titles.split(", ")]


EXPLAINED = (
    "quartiles: half of the rounds lie between; noisy: more than 5 % apart; level: they overlap "
    "the fastest row's"
)


def table(columns: Sequence[Column], rows: list[Row], of: str = "") -> Cells:
    head = [c.title + of if c.title in RELATIVE else c.title for c in columns]
    head = [of.strip() if of and title == "of peak" else title for title in head]
    return head, [[column.cell(row) for column in columns] for row in rows]


def measured(titles: str, rows: list[Row], of: str = "") -> Cells:
    """Measured rows; "level": with the fastest."""
    level = [id(row) for group in groups(rows).values() for row in fastest_of(group)[1]]
    head, lines = table(named(f"backend, {titles}"), rows, of)
    for row, line in zip(rows, lines):
        line[head.index("quartiles")] += " level" if id(row) in level else ""
    return head, lines


def missing(rows: list[Row]) -> Cells:
    seen: dict[tuple[str, str, str], list[str]] = {}
    for row in (row for row in rows if row["status"] != "ok"):
        key = (row["backend"], row["status"], "; ".join(row["why"]))
        seen.setdefault(key, []).append(where(row["point"], row["mode"]))
    lines = []
    for (name, status, why), places in seen.items():
        at = f" ({'; '.join(places)})" if status != "unavailable" else ""
        lines.append([name, status + at, why])
    return ["backend", "status", "why"], lines


def markdown(cells: Cells, terminal: bool = False) -> str:
    """Aligned; the last column in a terminal only, unless it holds sentences."""
    head, lines = cells
    rows = [[cell.replace("|", "/") for cell in row] for row in (head, *lines)]
    widths = [max(3, *map(len, column)) for column in zip(*rows)]
    if not terminal or widths[-1] > WIDE:
        widths[-1] = 0
    rows.insert(1, ["-" * (width or 3) for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)


def groups(rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    """Competing rows by point and length: other caches compete, other constraints do not."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        at = {name: row["point"].get(name) for name in SAME}
        at["Hkv"] = at["Hkv"] if at["Hkv"] != at["H"] else None
        found.setdefault((where(at, row["mode"]), row["point"].get("T", 0)), []).append(row)
    return found


def fastest_of(rows: list[Row]) -> tuple[Row, list[Row]]:
    """The fastest row, and those with overlapping quartiles, per sequence."""

    def time(row: Row, name: str = "ms") -> float:
        return row[name] / row.get("batch_size", 1)

    best = min(rows, key=time)
    upper = time(best, "q3_ms")
    return best, [row for row in rows if row is not best and time(row, "q1_ms") <= upper]


def fastest(rows: list[Row]) -> list[str]:
    wins = [(place, winner(group), T) for (place, T), group in sorted(groups(rows).items())]
    found = []
    for place, its in groupby(wins, key=itemgetter(0)):
        firsts = [next(run) for _, run in groupby(its, key=itemgetter(1))]
        parts = [name + (f" from {T:,} tokens on" if T else "") for _, name, T in firsts]
        found.append(f"{place}: {', then '.join(parts)}")
    return found


def winner(rows: list[Row]) -> str:
    best, level = fastest_of(rows)
    n = len(best["rounds"])
    remarks = [f"{count(n, 'round')}: noisy"] if n < ENOUGH else []
    remarks += [f"level: {', '.join(dict.fromkeys(map(label, level)))}"] if level else []
    return label(best) + (f" ({'; '.join(remarks)})" if remarks else "")


def label(row: Row) -> str:
    with_ = row["point"].get("cache")
    return row["backend"] + (f" with cache {with_}" if with_ else "")
