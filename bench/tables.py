"""The rows as tables, with the same cells in the terminal and in Markdown; and conclusions."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench import roofline
from bench.rows import Row
from bench.stats import differ

Cells = tuple[list[str], list[list[str]]]  # the head, the lines


def bytes_(n: float | None) -> str:
    """A size in words: "1.23 GB"."""
    if n is None:
        return "-"
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def rate(value: float) -> str:
    """Tokens a second: "4.5", "1,234"."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def kernel_names(row: Row) -> str:
    """The kernels that ran: their short names, else the device's own, else "not fused"."""
    short, device = ", ".join(row.get("kernels", [])), row.get("device_kernels", [])
    return short or (device[0][:40] if device else "not fused")


def spread(row: Row) -> str:
    """The quartiles, with a warning if noisy."""
    if row["spread"] is None:
        return "1 round"
    return f"{_ms(row['q1_ms'])} to {_ms(row['q3_ms'])}" + (" noisy" if row["noisy"] else "")


def point(row: Row) -> str:
    """The point of the grid: "B=1 P=64 cache=static processor"."""
    at = row["point"].items()
    return " ".join(k if v is True else f"{k}={v}" for k, v in at if v not in (None, False))


def _at(title: str, name: str) -> tuple[str, Any]:
    """A column that is a coordinate of the point."""
    return title, lambda r: str(r["point"][name] or "-")


QUARTILES: list[tuple[str, Any]] = [
    ("quartiles", spread),
    ("rounds", lambda r: str(len(r["rounds"]))),
]
PASSES: list[tuple[str, Any]] = [
    ("fwd ms", lambda r: _ms(r.get("forward_ms"))),
    ("bwd ms", lambda r: _ms(r.get("backward_ms"))),
]
MEMORY: tuple[str, Any] = ("memory", lambda r: bytes_(r.get("memory_bytes")))
COLUMNS: dict[str, list[tuple[str, Any]]] = {
    "train": [
        ("batch", lambda r: str(r["batch_size"])),
        ("tok/s", lambda r: f"{r['tokens_per_s']:,.0f}"),
        ("ms/step", lambda r: _ms(r["ms"])),
        *QUARTILES,
        *PASSES,
        ("mfu", lambda r: _percent(r["mfu"])),
        ("causal", lambda r: _percent(r["mfu_causal"])),
        MEMORY,
        ("loss diff", lambda r: _error(r.get("loss_difference"))),
        ("warm-up s", lambda r: f"{r['setup_s'] + r['warm_up_s']:.1f}"),
        ("compile s", lambda r: f"{r['compile_s']:.1f}" if "compile_s" in r else "-"),
        ("kernel", kernel_names),
    ],
    "kernel": [
        *(_at(name, name) for name in ("B", "T", "H", "D", "window")),
        *PASSES,
        ("both ms", lambda r: _ms(r["ms"])),
        *QUARTILES,
        ("TFLOP/s", lambda r: f"{r['tflops_causal']:.3g}"),
        ("full", lambda r: f"{r['tflops_full']:.3g}"),
        ("of peak", lambda r: _percent(r["share"])),
        MEMORY,
        ("err out", lambda r: _error(r.get("error_out"))),
        ("err grad", lambda r: _error(r.get("error_grad"))),
    ],
    "decode": [
        *(_at(title, name) for title, name in (("B", "B"), ("prompt", "P"), ("cache", "cache"))),
        ("processor", lambda r: "with" if r["point"]["processor"] else "without"),
        ("tok/s", lambda r: rate(r["tokens_per_s"])),
        ("ms/token", lambda r: _ms(r["ms"])),
        *QUARTILES,
        ("first ms", lambda r: _ms(r["first_ms"])),
        MEMORY,
        ("cache size", lambda r: bytes_(r["cache_bytes"])),
        ("mbu", lambda r: _percent(r["mbu"])),
        ("kernel", kernel_names),
    ],
    "converge": [
        ("final loss", lambda r: f"{r['final_loss']:.4f}"),
        ("off", lambda r: f"{r['difference']:+.3%}" if "difference" in r else "-"),
        ("seed noise", lambda r: f"{r['seed_noise']:.4f}" if "seed_noise" in r else "-"),
        ("verdict", lambda r: r.get("verdict", "-")),
        ("ms/step", lambda r: _ms(r["ms"])),
        *QUARTILES,
        ("time saved", lambda r: _percent(r.get("time_saved"))),
        MEMORY,
        ("memory saved", lambda r: _percent(r.get("memory_saved"))),
        ("kernel", kernel_names),
    ],
}


def cells(mode: str, rows: list[Row]) -> Cells:
    """The rows that were measured."""
    columns = COLUMNS[mode]
    lines = [[r["backend"], *(of(r) for _, of in columns)] for r in rows if r["status"] == "ok"]
    return ["backend", *(title for title, _ in columns)], lines


def profile(found: dict[str, Any]) -> Cells:
    """A step by its parts, the largest gap first."""
    head = ["part", "ms", "share", "roofline ms", "times", "over ms", "limit", "mostly"]
    lines = []
    for i, p in enumerate(found["parts"]):
        mostly = ", ".join(f"{name[:40]} {_ms(ms)}" for name, ms in p["names"][:2])
        times = [_ms(p["ms"]), _percent(p["share"]), _ms(p["roofline_ms"]), _times(p["times"])]
        over = _ms(p["over_ms"]) + " (largest gap)" * (i == 0)
        lines.append([p["part"], *times, over, p["limit"], mostly])
    least = found["ceiling"]["ms"]
    times = found["ms"] / least
    whole = [_ms(found["ms"]), "100.0%", _ms(least), _times(times if times >= 1 else None)]
    lines.append(["the step", *whole, _ms(found["ms"] - least), "", ""])
    return head, lines


def rooflines(lines: list[dict[str, Any]]) -> Cells:
    """The roofline of each part, by bench/roofline.py."""
    head = ["part", "TFLOP", "GB", "roofline ms", "share", "limit"]
    made = []
    for p in lines:
        work = [p["part"], f"{p['tflop']:.4g}", f"{p['gb']:.4g}"]
        made.append([*work, _ms(p["roofline_ms"]), _percent(p["share"]), p["limit"]])
    return head, made


def missing(rows: list[Row]) -> Cells:
    """What was not measured, and why; a backend with the same reason everywhere is one line."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            key = (row["backend"], row["status"], "; ".join(row["why"]))
            seen.setdefault(key, []).append(f"{row['mode']} {point(row)}".strip())
    lines = []
    for (name, status, why), where in seen.items():
        at = "" if status == "unavailable" else f" ({'; '.join(where)})"
        lines.append([name, status + at, why])
    return ["backend", "status", "why"], lines


def console(width: int = 200) -> Console:
    """A console on stdout, of this width if it is no terminal."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=width)


TEXTS = {"backend", "kernel", "why", "status", "quartiles", "verdict", "cache", "processor", "part",
         "limit", "mostly", "where"}  # columns that read from the left  # fmt: skip
FOLDS = {"why", "kernel", "mostly", "where"}  # columns that may take several lines


def rich_table(title: str, content: Cells) -> Table:
    head, lines = content
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in head:
        justify: Any = "left" if name in TEXTS else "right"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name not in FOLDS)
    for line in lines:
        bad = "noisy" in " ".join(line) or "FAIL" in line
        table.add_row(*(Text(cell) for cell in line), style="yellow" if bad else None)
    return table


def markdown(content: Cells) -> str:
    head, lines = content
    rows = [head, ["---"] * len(head), *lines]  # a pipe in a cell would start another one
    return "\n".join("| " + " | ".join(c.replace("|", "/") for c in r) + " |" for r in rows)


# ----------------------------------------------------------------------------- the answers

EPS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}


def answers(content: dict[str, Any]) -> list[str]:
    """The sentences under the tables: which is fastest where, and whether the results agree."""
    rows = [r for r in content["rows"] if r["status"] == "ok"]
    said = [f"Fastest: {text}" for text in fastest(rows)]
    for of, title in (("mfu", "mfu"), ("share", "share of the peak"), ("mbu", "mbu")):
        for why, names in _by_reason(rows, f"{of}_why").items():
            said.append(f"Peak: {title} not known of {', '.join(names)}: {why}.")
    for r in rows:
        if p := r.get("profile"):
            told = p["why"] if "why" in p else roofline.told(p["ceiling"], "")
            if "reachable" in p:
                of = f", with matmuls at {p['products_tflops']:,.4g} TFLOP/s"
                told += "; " + roofline.told(p["reachable"], of)
            for why, names in _by_reason(p.get("parts", []), "times_why").items():
                told += f"; {', '.join(names)}: beyond the roofline: {why}"
            said.append(f"Profile: {r['backend']}: {told}.")
    if any("loss_difference" in r or "error_out" in r for r in rows):
        off = "; ".join(disagreeing(rows, content)) or "all agree with manual, as far as compared"
        said.append(f"Agreement: {off}.")
    if content["mode"] == "converge" and rows:
        said.append(f"Agreement: {verdict(rows, content)}")
    return said


def _by_reason(lines: list[dict[str, Any]], why: str) -> dict[str, list[str]]:
    """Reason -> the backends, or the parts of a step, that give it; each once."""
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        if why in line:
            found.setdefault(line[why], {})[line.get("backend") or line["part"]] = None
    return {reason: list(names) for reason, names in found.items()}


def fastest(rows: list[Row]) -> list[str]:
    """Who wins; for attention alone, from which length on."""
    groups: dict[str, dict[int, list[Row]]] = {}
    for r in rows:
        at = {k: r["point"].get(k) for k in ("B", "P", "H", "D", "window")}
        where = f"{r['mode']} {point({'point': at})}".strip()
        groups.setdefault(where, {}).setdefault(r["point"].get("T", 0), []).append(r)
    said = []
    for where, by_length in groups.items():
        wins = [(winner(by_length[T]), T) for T in sorted(by_length)]
        firsts = [(name, next(run)[1]) for name, run in groupby(wins, key=lambda win: win[0])]
        parts = [name + f" from {T:,} tokens on" * bool(T) for name, T in firsts]
        said.append(f"{where}: {', then '.join(parts)}")
    return said


def winner(rows: list[Row]) -> str:
    """The fastest per token, and those within the noise of it."""

    def ms(row: Row) -> list[float]:
        return [r["ms"] / row.get("tokens_a_step", 1) for r in row["rounds"]]

    def name(row: Row) -> str:
        cache = row["point"].get("cache")
        return row["backend"] + f" with cache {cache}" * bool(cache)

    best = min(rows, key=lambda r: r["ms"] / r.get("tokens_a_step", 1))
    level = (name(r) for r in rows if r is not best and differ(ms(best), ms(r)) is False)
    others = ", ".join(dict.fromkeys(level))
    return name(best) + (f" (level: {others})" if others else "")


def disagreeing(rows: list[Row], content: dict[str, Any]) -> list[str]:
    """Whose results differ by more than rounding explains."""
    dtype, found = content["machine"]["dtype"], []
    loss, norm = (1e-2, 5e-2) if dtype in ("float16", "bfloat16") else (1e-4, 1e-3)  # relative
    manual = {str(r["point"]): r for r in rows if r["backend"] == "manual" and "error_out" in r}
    for r in rows:
        if "loss_difference" in r:
            off, grad = r["loss_difference"], r["gradient_norm_difference"]
            if not (abs(off) <= loss * content["reference"]["loss"] and abs(grad) <= norm):
                found.append(
                    f"{r['backend']} DISAGREES with manual in float32: the loss by "
                    f"{off:.1e}, the gradient norm by {grad:.1e} of itself"
                )
        for error, times in (("error_out", 2), ("error_grad", 3)):
            plain = manual.get(str(r["point"]), {}).get(error, 0.0)
            if error in r and not r[error] <= times * plain + 32 * EPS[dtype]:
                at = f"{error} {r[error]:.1e} at {r['point']['T']} tokens"
                found.append(f"{r['backend']} is WRONG against float64 ({at})")
    return found


def verdict(rows: list[Row], content: dict[str, Any]) -> str:
    """What `converge` found."""
    base = next((r["backend"] for r in rows if r.get("verdict") == "baseline"), "the baseline")
    within = f"{content['settings']['tolerance']:.2%}"
    if noise := next((r["seed_noise"] for r in rows if "seed_noise" in r), None):
        within = f"{noise:.4f}, as far as the seeds scatter,"
    if bad := [r["backend"] for r in rows if r.get("verdict") == "FAIL"]:
        return f"FAIL: {', '.join(bad)} ended further than {within} from {base}."
    return f"Every final loss is within {within} of {base}'s."
