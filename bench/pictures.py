"""The pictures of a record, as PNG: speed, length, error, loss, generation."""

from __future__ import annotations

import io
from typing import Any

from bench.rows import Row

# One colour a backend in every picture, told apart by people who see few colours as well.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f",
           "#9467bd", "#bcbd22", "#17becf", "#e377c2", "#2ca02c", "#d62728"]  # fmt: skip
MARKERS = "osD^vPX*<>hdp8"
STYLE: Any = {"font.size": 10, "axes.grid": True, "grid.linewidth": 0.6, "grid.color": "#c9ced6",
              "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
              "legend.frameon": False}  # fmt: skip


def draw(content: dict[str, Any]) -> dict[str, bytes]:
    """Name -> PNG, of those that the rows can fill."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in content["rows"] if r["status"] == "ok"]
    backends = list(dict.fromkeys(r["backend"] for r in content["rows"]))
    look = {b: (COLOURS[i % 14], MARKERS[i % 14]) for i, b in enumerate(backends)}
    of = {m: [r for r in rows if r["mode"] == m] for m in ("train", "kernel", "decode", "converge")}
    lengths = {r["point"]["T"] for r in of["kernel"]}
    wanted = {
        "speed": (speed, of["train"]) if of["train"] else None,
        "length": (length, of["kernel"]) if len(lengths) > 1 else None,
        "error": (error, [r for r in of["kernel"] if "error_out" in r]),
        "loss": (loss, of["converge"]) if of["converge"] else None,
        "decode": (decode, of["decode"]) if of["decode"] else None,
    }
    made = {}
    for name, drawing in wanted.items():
        if drawing and drawing[1]:
            with plt.rc_context(STYLE):
                figure = drawing[0](plt, drawing[1], look, content)
                file = io.BytesIO()
                figure.savefig(file, dpi=110, format="png", metadata={"Software": None})
                plt.close(figure)
            made[name] = file.getvalue()
    return made


def speed(plt: Any, rows: list[Row], look: dict[str, Any], content: dict[str, Any]) -> Any:
    """Tokens/s and MFU by backend."""
    rows = sorted(rows, key=lambda r: r["tokens_per_s"])
    names, at = [r["backend"] for r in rows], range(len(rows))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 1.3 + 0.42 * len(rows)), sharey=True,
                                         layout="constrained")  # fmt: skip
    rates = [r["tokens_per_s"] for r in rows]
    reach = [
        [rate - rate * r["ms"] / r["q3_ms"] for rate, r in zip(rates, rows)],
        [rate * r["ms"] / r["q1_ms"] - rate for rate, r in zip(rates, rows)],
    ]
    whisker = {"ecolor": plt.rcParams["text.color"], "elinewidth": 1, "capsize": 3}
    colours = [look[n][0] for n in names]
    left.barh(at, rates, color=colours, height=0.65, xerr=reach, error_kw=whisker)
    for i, rate in zip(at, rates):
        left.annotate(f"{rate:,.0f}", (rate * 0.02, i), va="center", ha="left", color="white",
                      fontweight="bold", fontsize=9)  # fmt: skip
    left.set(yticks=list(at), yticklabels=names, title="tokens a second, quartiles", xlim=(0, None))
    mfu, causal = ([100 * r[k] for r in rows] for k in ("mfu", "mfu_causal"))
    right.barh([i + 0.18 for i in at], mfu, height=0.34, color=colours)
    right.barh([i - 0.18 for i in at], causal, height=0.34, color=colours, alpha=0.55)
    for i, (a, b) in enumerate(zip(mfu, causal)):
        right.annotate(f"{a:.1f}", (a, i + 0.18), xytext=(3, 0), textcoords="offset points",
                       va="center", fontsize=8)  # fmt: skip
        right.annotate(f"{b:.1f}", (b, i - 0.18), xytext=(3, 0), textcoords="offset points",
                       va="center", fontsize=8)  # fmt: skip
    of = "measured peak" if content["machine"]["peak_measured"] else "peak"
    right.set(title=f"% of {of}: mfu, mfu_causal", xlim=(0, 1.12 * max(*mfu, 1)))
    return figure


def length(plt: Any, rows: list[Row], look: dict[str, Any], content: dict[str, Any]) -> Any:
    """Time and memory of attention alone against the length, at the smallest batch."""
    smallest = min(r["point"]["B"] for r in rows)
    first = {k: rows[0]["point"][k] for k in ("H", "D", "window")}
    rows = [r for r in rows if r["point"]["B"] == smallest
            and {k: r["point"][k] for k in first} == first]  # fmt: skip
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    sides = [("ms", "milliseconds, forward and backward", 1.0),
             ("memory_bytes", "MB beyond the inputs", 1e-6)]  # fmt: skip
    for ax, (key, label, unit) in zip(axes, sides):
        for name in dict.fromkeys(r["backend"] for r in rows):
            line = sorted((r["point"]["T"], r[key] * unit) for r in rows
                          if r["backend"] == name and r.get(key))  # fmt: skip
            if line:
                colour, marker = look[name]
                ax.plot(*zip(*line), color=colour, marker=marker, markersize=5, label=name)
        lengths = sorted({r["point"]["T"] for r in rows})
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_xticks(lengths, [f"{T:,}" for T in lengths])
        ax.minorticks_off()
        ax.set(xlabel="tokens", title=label)
    axes[0].legend()
    figure.suptitle(f"batch {smallest}, {first['H']} heads of {first['D']}", fontsize=10)
    return figure


def error(plt: Any, rows: list[Row], look: dict[str, Any], content: dict[str, Any]) -> Any:
    """The largest error of output and gradients over all points, by backend."""
    names = list(dict.fromkeys(r["backend"] for r in rows))
    figure, ax = plt.subplots(figsize=(9, 1.3 + 0.42 * len(names)), layout="constrained")
    for key, dy, filled, label in (("error_out", 0.12, True, "output"),
                                   ("error_grad", -0.12, False, "worst gradient")):  # fmt: skip
        worst = [max(r[key] for r in rows if r["backend"] == n) for n in names]
        ax.scatter(worst, [i + dy for i in range(len(names))], s=46, label=label,
                   facecolors=[look[n][0] if filled else "none" for n in names],
                   edgecolors=[look[n][0] for n in names])  # fmt: skip
        for i, w in enumerate(worst):
            ax.annotate(f"{w:.1e}", (w, i + dy), xytext=(8, 0), textcoords="offset points",
                        va="center", fontsize=8)  # fmt: skip
    ax.set_xscale("log")
    ax.margins(x=0.2)
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(-0.6, len(names) - 0.4),
           title=f"error against float64, relative to the largest entry "
           f"({content['machine']['dtype']}; filled: output, open: worst gradient)")  # fmt: skip
    return figure


def loss(plt: Any, rows: list[Row], look: dict[str, Any], content: dict[str, Any]) -> Any:
    """The loss curves of the first seed, and how far each is from the baseline's."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    base = next((r["losses"] for r in rows if r.get("verdict") == "baseline"), None)
    for r in rows:
        colour, _ = look[r["backend"]]
        steps = range(1, len(r["losses"]) + 1)
        left.plot(steps, r["losses"], color=colour, linewidth=1.2, label=r["backend"])
        if base and r.get("verdict") != "baseline":
            off = [100 * abs(a / b - 1) + 1e-9 for a, b in zip(r["losses"], base)]
            right.plot(steps, off, color=colour, linewidth=1, label=r["backend"])
    right.axhline(100 * content["settings"]["tolerance"], linestyle="--", linewidth=1,
                  color=plt.rcParams["text.color"])  # fmt: skip
    right.set_yscale("log")
    left.set(xlabel="step", title="loss (nats a token)")
    right.set(xlabel="step", title="% from the baseline's loss; dashed: the tolerance")
    left.legend()
    return figure


def decode(plt: Any, rows: list[Row], look: dict[str, Any], content: dict[str, Any]) -> Any:
    """Tokens a second by cache and backend, at the largest batch and the longest prompt."""
    B = max(r["point"]["B"] for r in rows)
    P = max(r["point"]["P"] for r in rows)
    rows = [r for r in rows if (r["point"]["B"], r["point"]["P"]) == (B, P)]
    plain = min(r["point"]["processor"] for r in rows)
    rows = [r for r in rows if r["point"]["processor"] == plain]
    rows = sorted(rows, key=lambda r: (r["point"]["cache"], r["tokens_per_s"]))
    figure, ax = plt.subplots(figsize=(9, 1.3 + 0.36 * len(rows)), layout="constrained")
    rates = [r["tokens_per_s"] for r in rows]
    ax.barh(range(len(rows)), rates, color=[look[r["backend"]][0] for r in rows], height=0.65)
    for i, rate in enumerate(rates):
        ax.annotate(f"{rate:,.0f}", (rate, i), xytext=(3, 0), textcoords="offset points",
                    va="center", fontsize=8)  # fmt: skip
    labels = [f"{r['backend']}, cache: {r['point']['cache']}" for r in rows]
    title = f"tokens a second of {B} sequences together, prompt {P}"
    ax.set(yticks=range(len(rows)), yticklabels=labels, title=title, xlim=(0, None))
    return figure
