"""What the rows of a record say, in words: five answers, each computed from the tables above it.

Which backend is fastest here, and where does another one win?
How much memory does each need, and how large a batch does that allow?
How far is that from the hardware's limit?
Where does a step's time go?
Do the numbers agree?
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from bench import roofline
from bench.rows import Row
from bench.stats import differ
from bench.tables import bytes_, rate

# How far apart loss and gradient norm may be before it is said aloud, relative: half, float32.
LOSS, NORM = {True: 1e-2, False: 1e-4}, {True: 5e-2, False: 1e-3}
EPS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}
By = dict[str, list[Row]]  # the rows of each mode


def answers(content: dict[str, Any]) -> list[str]:
    """The sentences under the tables of a record."""
    rows = [r for r in content["rows"] if r["status"] == "ok"]
    by = {m: [r for r in rows if r["mode"] == m] for m in ("train", "kernel", "decode", "converge")}
    find: dict[str, Callable[[By, dict[str, Any]], list[str]]] = {
        "Fastest": fastest, "Memory": memory, "Limit": limit, "Step": step, "Agreement": agreement,
    }  # fmt: skip
    said = {title: of(by, content) for title, of in find.items()}
    return [f"{title}: {' '.join(text)}" for title, text in said.items() if text]


def level(best: Row, rows: list[Row]) -> list[str]:
    """The backends that the noise does not tell from the best."""
    ms = [r["ms"] for r in best["rounds"]]
    others = (r for r in rows if r is not best)
    return [r["backend"] for r in others if differ(ms, [x["ms"] for x in r["rounds"]]) is False]


def winner(rows: list[Row]) -> tuple[str, list[str]]:
    """The quickest, and those that are level with it."""
    best = min(rows, key=lambda r: r["ms"])
    return best["backend"], level(best, rows)


def or_others(name: str, others: list[str]) -> str:
    return name + (f" (level: {', '.join(others)})" if others else "")


def fastest(by: By, content: dict[str, Any]) -> list[str]:
    said = []
    if rows := by["train"]:
        best = max(rows, key=lambda r: r["tokens_per_s"])
        text = (
            f"Training with batch {best['batch_size']} x {content['settings']['block_size']} "
            f"tokens, {best['backend']} with {best['tokens_per_s']:,.0f} tok/s"
        )
        if manual := next((r for r in rows if r["backend"] == "manual" and r is not best), None):
            text += f", {best['tokens_per_s'] / manual['tokens_per_s']:.2f} x manual"
        beside = level(best, [r for r in rows if r["batch_size"] == best["batch_size"]])
        text += f"; the noise does not tell it from {', '.join(beside)}" if beside else ""
        said.append(text + ".")
        if all(r["spread"] is None for r in rows):
            said.append("One round tells nothing of the noise.")
    if rows := by["kernel"]:
        said.append("Attention alone, forward and backward: " + "; ".join(crossovers(rows)) + ".")
    for where, here in at_each(by["decode"], ("B", "P")):
        best = max(here, key=lambda r: r["tokens_per_s"])
        text = f"Generating at {where}: {with_cache(best)}, {rate(best['tokens_per_s'])} tok/s"
        said.append(text + against_baselines(here) + ".")
    if rows := by["converge"]:
        said.append(f"Over {content['settings']['steps']} steps: {or_others(*winner(rows))}.")
    return said


def at_each(rows: list[Row], names: tuple[str, ...]) -> list[tuple[str, list[Row]]]:
    """The rows of each point, as these coordinates tell it."""
    words = {"B": "batch", "P": "prompt", "T": "tokens", "H": "heads", "D": "head_dim"}
    found: dict[str, list[Row]] = {}
    for row in rows:
        where = ", ".join(f"{words.get(n, n)} {row['point'][n]}" for n in names)
        found.setdefault(where, []).append(row)
    return list(found.items())


def with_cache(row: Row) -> str:
    return f"{row['backend']} with cache {row['point']['cache']}"


def against_baselines(rows: list[Row]) -> str:
    """Our best beside the best of each baseline, without a processor where that was measured."""
    plain = [r for r in rows if not r["point"]["processor"]] or rows
    ours = [r for r in plain if not r["baseline"]]
    said = ""
    for name in dict.fromkeys(r["backend"] for r in plain if r["baseline"] and ours):
        best = min(ours, key=lambda r: r["ms"])
        theirs = min((r for r in plain if r["backend"] == name), key=lambda r: r["ms"])
        ratio = theirs["ms"] / best["ms"]
        said += f"; {with_cache(best)} is {ratio:.2f} x as fast as {with_cache(theirs)}"
        said += " (the noise does not tell them apart)" if level(best, [theirs]) else ""
    return said


def crossovers(rows: list[Row]) -> list[str]:
    """For each batch size (and window and heads), who wins over which lengths."""
    said = []
    several = len({(r["point"]["H"], r["point"]["D"], r["point"]["window"]) for r in rows}) > 1
    for where, here in at_each(rows, ("B", "H", "D", "window") if several else ("B",)):
        lengths = sorted({r["point"]["T"] for r in here})
        wins = [(T, *winner([r for r in here if r["point"]["T"] == T])) for T in lengths]
        parts = []
        for name, group in groupby(wins, key=lambda w: w[1]):
            span = list(group)
            first, last = span[0][0], span[-1][0]
            # who is level with it somewhere in between is named once
            beside = list(dict.fromkeys(n for _, _, others in span for n in others))
            at = f"at {first:,}" if first == last else f"from {first:,} to {last:,}"
            parts.append(f"{or_others(name, beside)} {at} tokens")
        said.append(f"{where}: {', then '.join(parts)}")
    return said


def memory(by: By, content: dict[str, Any]) -> list[str]:
    said = []
    if rows := [r for r in by["train"] if "memory_bytes" in r]:
        free, parts = content["machine"]["memory_limit"], []
        fitted = any(r.get("fits") for r in rows)
        for r in sorted(rows, key=lambda r: r["memory_bytes"]):
            text = f"{r['backend']} {bytes_(r['memory_bytes'])}"
            if r.get("fits"):
                whole = r["fits"]["limit"] == "memory"
                why = "the largest that fits" if whole else "where a step is slow already"
                text += f" at batch {r['fits']['batch_size']}, {why}"
            elif (each := r.get("bytes_per_sequence")) and free:
                most = max(0, int(r["batch_size"] + (free - r["memory_bytes"]) / each))
                text += f" ({bytes_(each)} a sequence: batch {most:,} or so)"
            parts.append(text)
        head = "" if fitted else f"At batch {rows[0]['batch_size']} "
        said.append(head + ", ".join(parts) + ".")
        if any("bytes_per_sequence" in r and not r.get("fits") for r in rows):
            said.append(f"The batch that would fill {bytes_(free)} is extrapolated from two sizes; "
                        "--batch_size=auto measures it.")  # fmt: skip
        elif not fitted:
            said.append("--batch_size=auto measures how large a batch fits.")
    return said


def limit(by: By, content: dict[str, Any]) -> list[str]:
    said, machine = [], content["machine"]
    of = f"{machine['peak_tflops']:.4g} TFLOP/s ({machine['peak_source']})"
    if rows := by["train"]:
        best = max(rows, key=lambda r: r["mfu"])
        said.append(f"The best, {best['backend']}, runs at {best['mfu']:.1%} mfu "
                    f"({best['mfu_causal']:.1%} causal) of {of}.")  # fmt: skip
        if best["mfu"] > 1:
            said.append("More than all of the peak: the peak that was taken is too low.")
    if rows := by["kernel"]:
        best = max(rows, key=lambda r: r["share"])
        said.append(f"Attention alone reaches {best['share']:.1%} of {of if not said else 'it'} at "
                    f"best ({best['backend']}, batch {best['point']['B']}, "
                    f"{best['point']['T']} tokens, visible pairs counted once).")  # fmt: skip
    if rows := by["decode"]:
        best = max(rows, key=lambda r: r["mbu"])
        said.append(f"Generating uses {best['mbu']:.1%} of the memory bandwidth of "
                    f"{machine['bandwidth'] / 1e9:.4g} GB/s at best ({best['backend']}, batch "
                    f"{best['point']['B']}, prompt {best['point']['P']}).")  # fmt: skip
    if said and machine["peak_measured"] and not by["decode"]:
        said.append("The peak is measured on this machine, not taken from a datasheet.")
    return said


def step(by: By, content: dict[str, Any]) -> list[str]:
    """The largest gap of each profile, and what is left if there were none."""
    profiles = [(r["backend"], r["profile"]) for r in by["train"] if "profile" in r]
    said = [f"{name}: {p['why']}." for name, p in profiles if "why" in p]
    known = [(name, p) for name, p in profiles if "parts" in p]
    for name, p in known:
        first, least = p["parts"][0], p["parts"][0]["roofline_ms"]
        of = f"over its roofline of {least:.3g} ms" if least else "that a perfect step has not"
        said.append(f"{name} loses most in {first['part']}: {first['over_ms']:.3g} ms {of}.")
    if known:
        p = known[0][1]
        words = roofline.told(p["ceiling"], "")
        if "reachable" in p:
            at = f", with matmuls at {p['products_tflops']:,.4g} TFLOP/s"
            words += "; " + roofline.told(p["reachable"], at)
        said.append(f"{words[0].upper()}{words[1:]}. Memory counts with "
                    f"{p['bandwidth'] / 1e9:,.4g} GB/s ({p['bandwidth_source']}).")  # fmt: skip
    return said


def agreement(by: By, content: dict[str, Any]) -> list[str]:
    said, dtype = [], content["machine"]["dtype"]
    half = dtype in ("float16", "bfloat16")
    if rows := [r for r in by["train"] if "loss_difference" in r]:
        loss = content["reference"]["loss"]
        apart = {r["backend"]: abs(r["loss_difference"]) for r in rows}
        norms = {r["backend"]: abs(r["gradient_norm_difference"]) for r in rows}
        off = [n for n in apart if apart[n] > LOSS[half] * loss or norms[n] > NORM[half]]
        head = "All agree with manual in float32 on the same batch: "
        if off:
            head = f"{', '.join(off)} DISAGREE with manual in float32: "
        worst, norm = max(apart, key=apart.__getitem__), max(norms, key=norms.__getitem__)
        said.append(f"{head}the loss of {loss:.4f} differs by at most {apart[worst]:.1e} ({worst}),"
                    f" the gradient norm by {norms[norm]:.1e} of itself ({norm}).")  # fmt: skip
    if rows := [r for r in by["kernel"] if "error_out" in r]:
        plain = {str(r["point"]): r for r in rows if r["backend"] == "manual"}
        off = [
            f"{r['backend']} ({name} {r[name]:.1e} at {r['point']['T']} tokens)"
            for r in rows
            for name, m in (("error_out", 2), ("error_grad", 3))
            if not r[name] <= m * plain.get(str(r["point"]), {}).get(name, 0.0) + 32 * EPS[dtype]
        ]
        out, grad = (max(rows, key=lambda r: r[k]) for k in ("error_out", "error_grad"))
        said.append(
            f"Against float64 {', '.join(off)} is WRONG."
            if off
            else f"Against float64 the largest error is {out['error_out']:.1e} of the output "
            f"({out['backend']}, {out['point']['T']} tokens) and {grad['error_grad']:.1e} of a "
            f"gradient ({grad['backend']}, {grad['point']['T']} tokens)."
        )
    if rows := by["converge"]:
        base = next((r["backend"] for r in rows if r.get("verdict") == "baseline"), "the baseline")
        within = f"{content['settings']['tolerance']:.2%}"
        if noise := next((r["seed_noise"] for r in rows if "seed_noise" in r), None):
            within = f"{noise:.4f}, as far as the seeds scatter,"
        bad = [r["backend"] for r in rows if r.get("verdict") == "FAIL"]
        said.append(f"FAIL: {', '.join(bad)} ended further than {within} from {base}." if bad
                    else f"Every final loss is within {within} of {base}'s.")  # fmt: skip
    return said
