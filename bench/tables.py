"""Modes, tables and figures of rows. A row has `mode`, `backend`, `point`, `status` (ok; with `why`
unavailable, failed, skipped, stopped), `rounds`, and its mode's figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from bench import Json

Row = Json
Cells = tuple[list[str], list[list[str]]]  # head, lines
NOISY = 0.05  # distance of the quartiles over the median
ENOUGH = 3  # rounds; fewer are noisy
WIDE = 40  # characters; longer cells are not padded
TIMES = ("ms", "forward_ms", "backward_ms", "optimizer_ms", "first_ms")
RELATIVE = {"mfu", "causal", "roofline ms", "times", "limit", "of peak"}  # titles
SAME = ("B", "P", "H", "Hkv", "D", "window", "constraint")  # of rows that compete
EXPLAINED = (
    "quartiles: half of the rounds lie between; noisy: more than 5 % apart; level: they overlap "
    "the fastest row's"
)


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
    times = [name for name in TIMES if name in row["rounds"][0]]
    values = [[one[name] for name in times] for one in row["rounds"]]
    lower, middle, upper = np.quantile(values, (0.25, 0.5, 0.75), axis=0).tolist()
    found = {**dict(zip(times, middle)), "q1_ms": lower[0], "q3_ms": upper[0]}
    spread = (upper[0] - lower[0]) / middle[0] if len(values) > 1 else None
    return {**found, "spread": spread, "noisy": spread is not None and spread > NOISY}


def sizes(row: Row, settings: Json) -> Json:
    """The point's or the settings'; B with all micro-batches."""
    known = {"T": settings.get("block_size"), "B": settings.get("batch_size"), **row["point"]}
    training = row["mode"] in ("train", "converge")
    micro = settings["gradient_accumulation_steps"] if training else 1
    return {**known, "B": row.get("batch_size", known["B"]) * micro}


def named(row: Row, settings: Json) -> tuple[str, str]:
    """Its backend, and its word of --vary or ""."""
    name, _, word = row["backend"].rpartition(" with ")
    return (name, word) if word in settings.get("vary", ()) else (row["backend"], "")


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


def failure(found: dict[str, str]) -> str:
    return f"{found['what']}, {found['dtype']}: {found['why']}"


COMPUTED: dict[str, Callable[[Row], object]] = {
    "B": lambda r: r.get("batch_size", r["point"]["B"]),
    "H": lambda r: heads(r["point"]["H"], r["point"]["Hkv"]),
    "cache": cache,
    "quartiles": spread,
    "rounds": lambda r: len(r["rounds"]),
    "warm-up s": lambda r: f"{r['setup_s'] + r['warm_up_s']:.1f}",
    "kernel": kernel_names,
    "canary": lambda r: {True: "ok", False: "LEAKS", None: "-"}[r["canary"]],
    "first failure": lambda r: next(map(failure, r["failures"]), "-"),
}
FORMATS: list[tuple[Callable[[Any], str], dict[str, str]]] = [  # title: field of a row or its point
    (str, {"backend": "backend", "batch": "batch_size", "verdict": "verdict", "kernels": "name"}),
    (str, {"T": "T", "D": "D", "window": "window", "prompt": "P", "limit": "limit"}),
    (str, {"right": "right", "wrong": "wrong", "refused": "refused", "not reached": "not_reached"}),
    (number, {"tok/s": "tokens_per_s", "ms/step": "ms", "ms/token": "ms", "both ms": "ms"}),
    (number, {"first ms": "first_ms", "fwd ms": "forward_ms", "bwd ms": "backward_ms"}),
    (number, {"TFLOP/s": "tflops_causal", "full": "tflops_full"}),
    (number, {"ms": "ms", "roofline ms": "roofline_ms", "times": "times"}),
    (percent, {"of peak": "share", "mfu": "mfu", "causal": "mfu_causal", "mbu": "mbu"}),
    (percent, {"share": "share", "time saved": "time_saved", "memory saved": "memory_saved"}),
    (error, {"loss diff": "loss_difference", "err out": "error_out", "err grad": "error_grad"}),
    (bytes_, {"memory": "memory_bytes", "cache size": "cache_bytes"}),
    ("{:.4f}".format, {"final loss": "final_loss", "seed noise": "seed_noise"}),
    ("{:+.3%}".format, {"off": "difference"}),
    ("{:.1f}".format, {"compile s": "compile_s"}),
]
COLUMNS = {title: (field, show) for show, names in FORMATS for title, field in names.items()}


def cell(title: str, row: Row) -> str:
    if title in COMPUTED:
        return str(COMPUTED[title](row))
    field, show = COLUMNS[title]
    value = {**row.get("point", {}), **row}.get(field)
    return "-" if value is None else show(value)


def table(columns: str, rows: list[Row], of: str = "") -> Cells:
    """`of`: a given peak."""
    titles = columns.split(", ")
    titled = {title: (title.removesuffix("of peak") + of).strip() for title in RELATIVE if of}
    head = [titled.get(title, title) for title in titles]
    return head, [[cell(title, row) for title in titles] for row in rows]


def measured(columns: str, rows: list[Row], of: str = "") -> Cells:
    """Measured rows; "level": with the fastest."""
    head, lines = table(f"backend, {columns}", rows, of)
    level = [id(row) for *_, others in contests(rows) for row in others]
    for row, line in zip(rows, lines):
        line[head.index("quartiles")] += " level" if id(row) in level else ""
    return head, lines


def missing(rows: list[Row]) -> Cells:
    places = defaultdict(list)
    for row in (row for row in rows if row["status"] != "ok"):
        at = where(row["point"], row["mode"])
        places[row["backend"], row["status"], "; ".join(row["why"])].append(at)
    return ["backend", "status", "why"], [
        [name, status if status == "unavailable" else f"{status} ({'; '.join(its)})", why]
        for (name, status, why), its in places.items()
    ]


def markdown(cells: Cells, terminal: bool = False) -> str:
    """Aligned; the last column in a terminal only, unless it holds sentences."""
    head, lines = cells
    rows = [[cell.replace("|", "/") for cell in row] for row in (head, *lines)]
    widths = [max(3, *map(len, column)) for column in zip(*rows)]
    if not terminal or widths[-1] > WIDE:
        widths[-1] = 0
    rows.insert(1, ["-" * (width or 3) for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)


def contests(rows: list[Row]) -> Iterator[tuple[str, int, Row, list[Row]]]:
    """Place, tokens, the fastest, the others level with it, per sequence: other caches compete,
    other constraints do not."""

    def time(row: Row, name: str = "ms") -> float:
        return row[name] / row.get("batch_size", 1)

    equal = defaultdict(list)
    for row in rows:
        at = {name: row["point"].get(name) for name in SAME}
        at["Hkv"] = at["Hkv"] if at["Hkv"] != at["H"] else None
        equal[where(at, row["mode"]), row["point"].get("T", 0)].append(row)
    for (place, T), its in sorted(equal.items()):
        best = min(its, key=time)
        upper = time(best, "q3_ms")
        yield place, T, best, [r for r in its if r is not best and time(r, "q1_ms") <= upper]


def fastest(rows: list[Row]) -> list[str]:
    wins: dict[str, dict[int, str]] = defaultdict(dict)  # place: tokens: winner
    for place, T, best, level in contests(rows):
        n, (name, *others) = len(best["rounds"]), map(label, (best, *level))
        remarks = [f"{count(n, 'round')}: noisy"] if n < ENOUGH else []
        remarks += [f"level: {', '.join(dict.fromkeys(others))}"] if level else []
        wins[place][T] = name + (f" ({'; '.join(remarks)})" if remarks else "")
    found = []
    for place, by_length in wins.items():
        firsts = [next(run) for _, run in groupby(by_length.items(), key=lambda win: win[1])]
        names = (name + (f" from {T:,} tokens on" if T else "") for T, name in firsts)
        found.append(f"{place}: {', then '.join(names)}")
    return found


def label(row: Row) -> str:
    with_ = row["point"].get("cache")
    return row["backend"] + (f" with cache {with_}" if with_ else "")
