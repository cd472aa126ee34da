"""Rows as tables, for the terminal and for Markdown, and the sentences under them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from bench import Json, roofline
from bench.rows import Row, where
from bench.stats import ENOUGH, differ
from core import flops

Cells = tuple[list[str], list[list[str]]]  # the head, the lines


def bytes_(n: float | None) -> str:
    """Format a size, such as "1.23 GB"."""
    if n is None:
        return "-"
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def number(value: float | None) -> str:
    """Format with three digits, or all before the point: "0.691", "45.1", "5,375"."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


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


def name_of(row: Row) -> str:
    """Return mode and point, such as "decode B=1 P=64 cache=static"."""
    return f"{row['mode']} {where(row['point'])}".strip()


def cache(row: Row) -> str:
    point = row["point"]
    with_ = point.get("constraint") or ("a processor" if point.get("processor") else "")
    return point["cache"] + (f" with {with_}" if with_ else "")


Column = tuple[str, Callable[[Row], str]]
QUARTILES: list[Column] = [("quartiles", spread), ("rounds", lambda r: str(len(r["rounds"])))]
PASSES: list[Column] = [
    ("fwd ms", lambda r: number(r.get("forward_ms"))),
    ("bwd ms", lambda r: number(r.get("backward_ms"))),
]
MEMORY: Column = ("memory", lambda r: bytes_(r.get("memory_bytes")))
COLUMNS: dict[str, list[Column]] = {
    "train": [
        ("batch", lambda r: str(r["batch_size"])),
        ("tok/s", lambda r: number(r["tokens_per_s"])),
        ("ms/step", lambda r: number(r["ms"])),
        *QUARTILES,
        *PASSES,
        ("mfu", lambda r: percent(r["mfu"])),
        ("causal", lambda r: percent(r["mfu_causal"])),
        MEMORY,
        ("loss diff", lambda r: error(r.get("loss_difference"))),
        ("warm-up s", lambda r: f"{r['setup_s'] + r['warm_up_s']:.1f}"),
        ("compile s", lambda r: f"{r['compile_s']:.1f}" if "compile_s" in r else "-"),
        ("kernel", kernel_names),
    ],
    "kernel": [
        ("B", lambda r: str(r["point"]["B"])),
        ("T", lambda r: str(r["point"]["T"])),
        ("H", lambda r: str(r["point"]["H"])),
        ("D", lambda r: str(r["point"]["D"])),
        ("window", lambda r: str(r["point"]["window"] or "-")),
        *PASSES,
        ("both ms", lambda r: number(r["ms"])),
        *QUARTILES,
        ("TFLOP/s", lambda r: number(r["tflops_causal"])),
        ("full", lambda r: number(r["tflops_full"])),
        ("of peak", lambda r: percent(r["share"])),
        MEMORY,
        ("err out", lambda r: error(r.get("error_out"))),
        ("err grad", lambda r: error(r.get("error_grad"))),
    ],
    "decode": [
        ("B", lambda r: str(r["point"]["B"])),
        ("prompt", lambda r: str(r["point"]["P"])),
        ("cache", cache),
        ("tok/s", lambda r: number(r["tokens_per_s"])),
        ("ms/token", lambda r: number(r["ms"])),
        *QUARTILES,
        ("first ms", lambda r: number(r["first_ms"])),
        MEMORY,
        ("cache size", lambda r: bytes_(r["cache_bytes"])),
        ("mbu", lambda r: percent(r["mbu"])),
        ("kernel", kernel_names),
    ],
    "converge": [
        ("final loss", lambda r: f"{r['final_loss']:.4f}"),
        ("off", lambda r: f"{r['difference']:+.3%}" if "difference" in r else "-"),
        ("seed noise", lambda r: f"{r['seed_noise']:.4f}" if "seed_noise" in r else "-"),
        ("verdict", lambda r: r.get("verdict", "-")),
        ("ms/step", lambda r: number(r["ms"])),
        *QUARTILES,
        ("time saved", lambda r: percent(r.get("time_saved"))),
        MEMORY,
        ("memory saved", lambda r: percent(r.get("memory_saved"))),
        ("kernel", kernel_names),
    ],
}


def cells(mode: str, rows: list[Row], given: str = "") -> Cells:
    """Return the table of the measured rows; `given`: flops.given() of the peak's source."""
    columns = COLUMNS[mode]
    lines = [[r["backend"], *(of(r) for _, of in columns)] for r in rows if r["status"] == "ok"]
    return ["backend", *(_marked(title, given) for title, _ in columns)], lines


def _marked(title: str, given: str) -> str:
    """The title of a column, marked if it uses a peak that the user gave."""
    if given and title == "of peak":
        return given.strip()
    uses = title in ("mfu", "causal", "roofline ms", "times", "over ms", "limit")
    return title + given if uses else title


def profile(found: Json, given: str = "") -> Cells:
    """Return the parts of a step, the largest gap first; `given` as in cells()."""
    head = ["part", "ms", "share", "roofline ms", "times", "over ms", "limit"]
    lines = []
    for i, p in enumerate(found["parts"]):
        times = [number(p["ms"]), percent(p["share"]), number(p["roofline_ms"]), number(p["times"])]
        lines.append(
            [
                p["part"],
                *times,
                number(p["over_ms"]) + (" (largest gap)" if i == 0 else ""),
                p["limit"],
            ]
        )
    least = found["ceiling"]["ms"]
    times = found["ms"] / least
    whole = [number(found["ms"]), "100.0%", number(least), number(times if times >= 1 else None)]
    lines.append(["the step", *whole, number(found["ms"] - least), ""])
    return [_marked(title, given) for title in head], lines


VERDICTS = ("right", "wrong", "refused", "not_reached")


def proof(rows: list[Row]) -> Cells:
    """Return the table of bench/proof.py's rows."""
    head = ["backend", "right", "wrong", "refused", "not reached", "canary", "first failure"]
    lines = []
    for r in rows:
        canary = {True: "ok", False: "LEAKS", None: "-"}[r["canary"]]
        counts = [str(r[n]) for n in VERDICTS]
        lines.append([r["backend"], *counts, canary, *[*map(failure, r["failures"]), "-"][:1]])
    return head, lines


def failure(found: dict[str, str]) -> str:
    """Return a failure as text; older records name it `case` or `phase`."""
    what = found.get("what") or found.get("case") or f"canary, {found['phase']}"
    return f"{what}, {found['dtype']}: {found['why']}"


def missing(rows: list[Row]) -> Cells:
    """Return what was not measured, one line per backend and reason."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            key = (row["backend"], row["status"], "; ".join(row["why"]))
            seen.setdefault(key, []).append(name_of(row))
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


# ----------------------------------------------------------------------------- the answers

EPS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}


def answers(content: Json) -> list[str]:
    """Return the sentences under the tables: fastest backends, MFU, doubts, agreement."""
    rows = [r for r in content["rows"] if r["status"] == "ok"]
    said = [f"Fastest: {text}" for text in fastest(rows)]
    if known := [r for r in rows if r.get("mfu") is not None and r["mode"] == "train"]:
        best = max(known, key=lambda r: r["mfu"])
        rate = f"{number(best['tokens_per_s'])} tok/s"
        mfu = flops.in_words(best, peak_of(content).of)
        said.append(f"MFU: the best is {best['backend']}'s: {mfu}, {rate}.")
    for of, title in (("mfu", "mfu"), ("share", "share of the peak"), ("mbu", "mbu")):
        for why, names in _by_reason(rows, f"{of}_why").items():
            said.append(f"Peak: {title} not known of {names}: {why}.")
    if doubt := content["machine"].get("peak_doubt"):
        said.append(f"Peak: {doubt}.")
    given = flops.given(content["machine"]["peak_source"])
    profiles = [(r["backend"], _profiled(r["profile"], given)) for r in rows if "profile" in r]
    said += [f"Profile: {name}: {text}." for name, text in profiles]
    if any("loss_difference" in r or "error_out" in r for r in rows):
        fine = f"all agree with {exact(content)}, as far as compared"
        off = "; ".join(disagreeing(rows, content)) or fine
        said.append(f"Agreement: {off}.")
    if content["mode"] == "converge" and rows:
        said.append(f"Agreement: {verdict(rows, content)}")
    return said


def peak_of(content: Json) -> flops.Peak:
    m = content["machine"]
    return flops.Peak(m["peak_tflops"], m["peak_source"], m["peak_measured"])


def _profiled(p: Json, given: str) -> str:
    if "why" in p:
        return p["why"]
    worst, told = p["parts"][0], roofline.told(p["ceiling"], given)
    if "reachable" in p:
        of = f", with matmuls at {p['products_tflops']:,.4g} TFLOP/s{given and ', mfu'}{given}"
        told += "; " + roofline.told(p["reachable"], of)
    return f"{told}; the largest gap: {worst['part']}, {worst['share']:.0%} of a step"


def _by_reason(lines: list[Json], why: str) -> dict[str, str]:
    """Return {reason: names of the backends or parts}."""
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        if why in line:
            found.setdefault(line[why], {})[line.get("backend") or line["part"]] = None
    return {reason: ", ".join(names) for reason, names in found.items()}


def fastest(rows: list[Row]) -> list[str]:
    """Return the fastest backends; of attention alone by length."""
    groups: dict[str, dict[int, list[Row]]] = {}
    for r in rows:
        at = {k: r["point"].get(k) for k in ("B", "P", "H", "D", "window")}
        of = name_of({"mode": r["mode"], "point": at})
        groups.setdefault(of, {}).setdefault(r["point"].get("T", 0), []).append(r)
    said = []
    for of, by_length in groups.items():
        wins = [(winner(by_length[T]), T) for T in sorted(by_length)]
        firsts = [(name, next(run)[1]) for name, run in groupby(wins, key=lambda win: win[0])]
        parts = [name + (f" from {T:,} tokens on" if T else "") for name, T in firsts]
        said.append(f"{of}: {', then '.join(parts)}")
    return said


def winner(rows: list[Row]) -> str:
    """Return the fastest per token, and those within its noise."""

    def ms(row: Row) -> list[float]:
        return [r["ms"] / row.get("tokens_a_step", 1) for r in row["rounds"]]

    def name(row: Row) -> str:
        return row["backend"] + (f" with cache {cache(row)}" if "cache" in row["point"] else "")

    best = min(rows, key=lambda r: r["ms"] / r.get("tokens_a_step", 1))
    if len(rows) > 1 and len(best["rounds"]) < ENOUGH:
        return f"{name(best)} (too few rounds)"
    level = (name(r) for r in rows if r is not best and differ(ms(best), ms(r)) is False)
    others = ", ".join(dict.fromkeys(level))
    return name(best) + (f" (level: {others})" if others else "")


def exact(content: Json) -> str:
    """Return the backend whose float32 results are the reference."""
    return "eager" if "hf" in content else "manual"


def disagreeing(rows: list[Row], content: Json) -> list[str]:
    """Return a sentence per backend whose results differ by more than rounding."""
    dtype, found = content["machine"]["dtype"], []
    loss, norm = (1e-2, 5e-2) if dtype in ("float16", "bfloat16") else (1e-4, 1e-3)  # relative
    manual = {str(r["point"]): r for r in rows if r["backend"] == "manual" and "error_out" in r}
    for r in rows:
        if "loss_difference" in r:
            off, grad = r["loss_difference"], r["gradient_norm_difference"]
            if not (abs(off) <= loss * content["reference"]["loss"] and abs(grad) <= norm):
                found.append(
                    f"{r['backend']} DISAGREES with {exact(content)} in float32: the loss by "
                    f"{off:.1e}, the gradient norm by {grad:.1e} of itself"
                )
        for name, times in (("error_out", 2), ("error_grad", 3)):
            plain = manual.get(str(r["point"]), {}).get(name, 0.0)
            if name in r and not r[name] <= times * plain + 32 * EPS[dtype]:
                at = f"{name} {r[name]:.1e} at {r['point']['T']} tokens"
                found.append(f"{r['backend']} is WRONG against float64 ({at})")
    return found


def verdict(rows: list[Row], content: Json) -> str:
    base = next((r["backend"] for r in rows if r.get("verdict") == "baseline"), "the baseline")
    within = f"{content['settings']['tolerance']:.2%}"
    if noise := next((r["seed_noise"] for r in rows if "seed_noise" in r), None):
        within = f"{noise:.4f}, as far as the seeds scatter,"
    if bad := [r["backend"] for r in rows if r.get("verdict") == "FAIL"]:
        return f"FAIL: {', '.join(bad)} ended further than {within} from {base}."
    return f"Every final loss is within {within} of {base}'s."
