"""Pictures of a record, as PNG: speed, length, loss."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from bench import Json
from bench.rows import Row

# Distinct for the colour-blind too.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f",
           "#9467bd", "#bcbd22", "#17becf", "#e377c2", "#2ca02c", "#d62728"]  # fmt: skip
MARKERS = "osD^vPX*<>hdp8"
STYLE: Any = {"font.size": 10, "axes.grid": True, "grid.linewidth": 0.6, "grid.color": "#c9ced6",
              "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
              "legend.frameon": False}  # fmt: skip
Look = dict[str, tuple[str, str]]  # backend -> colour, marker


def draw(content: Json) -> dict[str, bytes]:
    """Return {name: PNG} for the available data."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in content["rows"] if r["status"] == "ok"]
    backends = dict.fromkeys(r["backend"] for r in content["rows"])
    look = {b: (COLOURS[i % 14], MARKERS[i % 14]) for i, b in enumerate(backends)}
    of = {m: [r for r in rows if r["mode"] == m] for m in ("train", "kernel", "converge")}
    lengths = {r["point"]["T"] for r in of["kernel"]}
    wanted: dict[str, tuple[Callable[..., Any], list[Row]]] = {
        "speed": (speed, of["train"]),
        "length": (length, of["kernel"] if len(lengths) > 1 else []),
        "loss": (loss, of["converge"]),
    }
    made = {}
    for name, (picture, its) in wanted.items():
        if its:
            with plt.rc_context(STYLE):
                figure, file = picture(plt, its, look, content), io.BytesIO()
                figure.savefig(file, dpi=110, format="png", metadata={"Software": None})
                plt.close(figure)
            made[name] = file.getvalue()
    return made


def speed(plt: Any, rows: list[Row], look: Look, content: Json) -> Any:
    """Plot tokens/s and MFU by backend."""
    rows = sorted(rows, key=lambda r: r["tokens_per_s"])
    names, at = [r["backend"] for r in rows], range(len(rows))
    size = (9, 1.3 + 0.42 * len(rows))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    rates, colours = [r["tokens_per_s"] for r in rows], [look[n][0] for n in names]
    low = [rate - rate * r["ms"] / r["q3_ms"] for rate, r in zip(rates, rows)]
    high = [rate * r["ms"] / r["q1_ms"] - rate for rate, r in zip(rates, rows)]
    whisker = {"elinewidth": 1, "capsize": 3}
    bars = left.barh(at, rates, color=colours, height=0.65, xerr=[low, high], error_kw=whisker)
    inside = {"label_type": "center", "color": "white", "fontweight": "bold", "fontsize": 9}
    left.bar_label(bars, [f"{rate:,.0f}" for rate in rates], **inside)
    left.set(yticks=list(at), yticklabels=names, title="tokens a second, quartiles", xlim=(0, None))
    for key, dy, alpha in (("mfu", 0.18, 1.0), ("mfu_causal", -0.18, 0.55)):
        shares = [100 * (r[key] or 0) for r in rows]
        bars = right.barh([i + dy for i in at], shares, height=0.34, color=colours, alpha=alpha)
        right.bar_label(bars, [f"{s:.1f}" if s else "-" for s in shares], padding=4, fontsize=8)
    of = "measured peak" if content["machine"]["peak_measured"] else "peak"
    right.set(title=f"% of {of}: mfu, mfu_causal")
    right.margins(x=0.12)
    return figure


def length(plt: Any, rows: list[Row], look: Look, content: Json) -> Any:
    """Plot time and memory of attention alone over the length, at the smallest batch."""
    same = {k: rows[0]["point"][k] for k in ("H", "D", "window")}
    same["B"] = min(r["point"]["B"] for r in rows)
    rows = [r for r in rows if r["point"].items() >= same.items()]
    lengths = sorted({r["point"]["T"] for r in rows})
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    time = ("ms", 1.0, "milliseconds, forward and backward")
    memory = ("memory_bytes", 1e-6, "MB beyond the inputs")
    for ax, (key, unit, title) in zip(axes, (time, memory)):
        for name in dict.fromkeys(r["backend"] for r in rows):
            its = [r for r in rows if r["backend"] == name and r.get(key)]
            colour, marker = look[name]
            points = sorted((r["point"]["T"], r[key] * unit) for r in its) or [(None, None)]
            ax.plot(*zip(*points), color=colour, marker=marker, markersize=5, label=name)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_xticks(lengths, [f"{T:,}" for T in lengths])
        ax.minorticks_off()
        ax.set(xlabel="tokens", title=title)
    axes[0].legend()
    figure.suptitle(f"batch {same['B']}, {same['H']} heads of {same['D']}", fontsize=10)
    return figure


def loss(plt: Any, rows: list[Row], look: Look, content: Json) -> Any:
    """Plot the loss of the first seed, and its distance from the baseline's."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    base = next((r["losses"] for r in rows if r.get("verdict") == "baseline"), None)
    for r in rows:
        how = {"color": look[r["backend"]][0], "linewidth": 1.2, "label": r["backend"]}
        steps = range(1, len(r["losses"]) + 1)
        left.plot(steps, r["losses"], **how)
        if base and r.get("verdict") != "baseline":
            off = [100 * abs(a / b - 1) + 1e-9 for a, b in zip(r["losses"], base)]
            right.plot(steps, off, **how)
    tolerance = 100 * content["settings"]["tolerance"]
    right.axhline(tolerance, linestyle="--", linewidth=1, color="black")
    right.set_yscale("log")
    left.set(xlabel="step", title="loss (nats a token)")
    right.set(xlabel="step", title="% from the baseline's loss; dashed: the tolerance")
    left.legend()
    return figure
