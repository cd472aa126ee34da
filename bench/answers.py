"""What the rows say, in words: the answers, each computed from the figures above it.

Which is fastest here, and where does another one win?
How much memory does each need, and how large a batch does that allow?
How far is that from the hardware's limit?
Where does a step's time go?
Do the numbers agree?
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from bench import roofline
from bench.rows import Row
from bench.stats import Summary, differ
from bench.tables import bytes_, rate

# How far apart loss and gradient norm may be before it is said aloud, relative: half, float32.
LOSS, NORM = {True: 1e-2, False: 1e-4}, {True: 5e-2, False: 1e-3}
EPS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}


def answers(content: dict[str, Any]) -> list[str]:
    """The sentences under the tables of a record."""
    rows: list[Row] = [r for r in content["rows"] if r["status"] == "ok"]
    by_mode = {m: [r for r in rows if r["mode"] == m] for m in ("train", "kernel", "decode",
                                                               "converge")}  # fmt: skip
    said = [
        ("Fastest", fastest(by_mode, content)),
        ("Memory", memory(by_mode, content["machine"])),
        ("Limit", limit(by_mode, content["machine"])),
        ("Step", step(by_mode["train"])),
        ("Agreement", agreement(by_mode, content)),
    ]
    return [f"{title}: {' '.join(text)}" for title, text in said if text]


def level(best: Row, rows: list[Row]) -> list[str]:
    """The backends that the noise does not tell from the best."""

    def ms(row: Row) -> list[float]:
        return [r["ms"] for r in row["rounds"]]

    return [r["backend"] for r in rows if r is not best and differ(ms(best), ms(r)) is False]


def winner(rows: list[Row]) -> tuple[str, list[str]]:
    """The quickest, and those that are level with it."""
    best = min(rows, key=lambda r: r["ms"])
    return best["backend"], level(best, rows)


def or_others(name: str, others: list[str]) -> str:
    return name + (f" (level: {', '.join(others)})" if others else "")


def fastest(by_mode: dict[str, list[Row]], content: dict[str, Any]) -> list[str]:
    said = []
    if rows := by_mode["train"]:
        best = max(rows, key=lambda r: r["tokens_per_s"])
        T = content["settings"]["block_size"]
        said.append(
            f"Training with batch {best['batch_size']} x {T} tokens, {best['backend']} with "
            f"{best['tokens_per_s']:,.0f} tok/s"
        )
        if manual := next((r for r in rows if r["backend"] == "manual" and r is not best), None):
            said[-1] += f", {best['tokens_per_s'] / manual['tokens_per_s']:.2f} x manual"
        beside = level(best, [r for r in rows if r["batch_size"] == best["batch_size"]])
        said[-1] += f"; the noise does not tell it from {', '.join(beside)}." if beside else "."
        if all(r["spread"] is None for r in rows):
            said.append("One round tells nothing of the noise.")
    if rows := by_mode["kernel"]:
        said.append("Attention alone, forward and backward: " + "; ".join(crossovers(rows)) + ".")
    if rows := by_mode["decode"]:
        for where, here in _at_each(rows, ("B", "P")):
            best = max(here, key=lambda r: r["tokens_per_s"])
            said.append(f"Generating at {where}: {_how(best)}, {rate(best['tokens_per_s'])} tok/s"
                        f"{against_rivals(here)}.")  # fmt: skip
        said += cost_of_a_processor([r for r in rows if not r.get("rival")])
    if rows := by_mode["converge"]:
        said.append(f"Over {content['settings']['steps']} steps: {or_others(*winner(rows))}.")
    return said


def _at_each(rows: list[Row], names: tuple[str, ...]) -> list[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        words = {"B": "batch", "P": "prompt", "T": "tokens", "H": "heads", "D": "head_dim"}
        where = ", ".join(f"{words.get(n, n)} {row['point'][n]}" for n in names)
        found.setdefault(where, []).append(row)
    return list(found.items())


def _how(row: Row) -> str:
    return f"{row['backend']} with cache {row['point']['cache']}"


def against_rivals(rows: list[Row]) -> str:
    """The best of ours beside the best of each rival, without processor where that was measured."""
    plain = [r for r in rows if not r["point"]["processor"]] or rows
    ours = [r for r in plain if not r.get("rival")]
    if not ours:
        return ""
    best = min(ours, key=lambda r: r["ms"])
    said = ""
    for name in dict.fromkeys(r["backend"] for r in plain if r.get("rival")):
        theirs = min((r for r in plain if r["backend"] == name), key=lambda r: r["ms"])
        said += f"; {_how(best)} is {theirs['ms'] / best['ms']:.2f} x as fast as {_how(theirs)}"
        said += " (the noise does not tell them apart)" if level(best, [theirs]) else ""
    return said


def cost_of_a_processor(rows: list[Row]) -> list[str]:
    """What a logits processor costs, over all pairs of rows with and without one."""
    without, with_ = ({(r["backend"], str({**r["point"], "processor": None})): r["ms"]
                       for r in rows if r["point"]["processor"] is p}
                      for p in (False, True))  # fmt: skip
    ratios = [with_[k] / without[k] for k in without if k in with_]
    if not ratios:
        return []
    more = Summary.of(ratios)
    return [f"A logits processor makes a token {more.median - 1:+.0%} slower "
            f"({more.q1 - 1:+.0%} to {more.q3 - 1:+.0%})."]  # fmt: skip


def crossovers(rows: list[Row]) -> list[str]:
    """For each batch size (and window and heads), who wins over which lengths."""
    said = []
    several = len({(r["point"]["H"], r["point"]["D"], r["point"]["window"]) for r in rows}) > 1
    names = ("B", "H", "D", "window") if several else ("B",)
    for where, here in _at_each(rows, names):
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


def memory(by_mode: dict[str, list[Row]], machine: dict[str, Any]) -> list[str]:
    said = []
    free = machine["memory_limit"]
    if rows := [r for r in by_mode["train"] if "memory_bytes" in r]:
        parts = []
        for r in sorted(rows, key=lambda r: r["memory_bytes"]):
            text = f"{r['backend']} {bytes_(r['memory_bytes'])}"
            if r.get("fits"):
                text += f" at batch {r['fits']['batch_size']}"
                memory_is = r["fits"]["limit"] == "memory"
                text += ", the largest that fits" if memory_is else ", where a step is slow already"
            elif r.get("bytes_per_sequence") and free:
                more = (free - r["memory_bytes"]) / r["bytes_per_sequence"]
                text += (f" ({bytes_(r['bytes_per_sequence'])} a sequence: batch "
                         f"{max(0, int(r['batch_size'] + more)):,} or so)")  # fmt: skip
            parts.append(text)
        said.append(f"At batch {rows[0]['batch_size']} " * (not rows[0].get("fits"))
                    + ", ".join(parts) + ".")  # fmt: skip
        if any("bytes_per_sequence" in r and not r.get("fits") for r in rows):
            said.append(f"The batch that would fill {bytes_(free)} is reckoned from two sizes; "
                        "--batch_size=auto measures it.")  # fmt: skip
        elif not any(r.get("fits") for r in rows):
            said.append("--batch_size=auto measures how large a batch fits.")
    if rows := [r for r in by_mode["kernel"] if "memory_bytes" in r]:
        longest = max(r["point"]["T"] for r in rows)
        here = sorted((r for r in rows if r["point"]["T"] == longest),
                      key=lambda r: (r["point"]["B"], r["memory_bytes"]))  # fmt: skip
        first = [r for r in here if r["point"]["B"] == here[0]["point"]["B"]]
        unique = {r["backend"]: r for r in reversed(first)}
        listed = ", ".join(f"{n} {bytes_(r['memory_bytes'])}" for n, r in reversed(unique.items()))
        said.append(
            f"Attention alone at {longest:,} tokens, batch {here[0]['point']['B']}: {listed}."
        )
    if rows := [r for r in by_mode["decode"] if "memory_bytes" in r]:
        most = max(rows, key=lambda r: r["memory_bytes"])
        said.append(f"Generating needs up to {bytes_(most['memory_bytes'])} ({most['backend']}).")
    for r in by_mode["converge"]:
        if r.get("memory_saved") is not None and r["verdict"] != "baseline":
            said.append(f"{r['backend']} saves {r['memory_saved']:.1%} of manual's memory and "
                        f"{r['time_saved']:.1%} of its time.")  # fmt: skip
    return said


def limit(by_mode: dict[str, list[Row]], machine: dict[str, Any]) -> list[str]:
    said = []
    measured = machine["peak_source"].startswith("measured")
    of = f"{machine['peak_tflops']:.4g} TFLOP/s ({machine['peak_source']})"
    if rows := by_mode["train"]:
        best = max(rows, key=lambda r: r["mfu"])
        said.append(f"The best, {best['backend']}, runs at {best['mfu']:.1%} mfu "
                    f"({best['mfu_causal']:.1%} causal) of {of}.")  # fmt: skip
        if best["mfu"] > 1:
            said.append("More than all of the peak: the peak that was taken is too low.")
    if rows := by_mode["kernel"]:
        best = max(rows, key=lambda r: r["share"])
        said.append(f"Attention alone reaches {best['share']:.1%} of {of if not said else 'it'} at "
                    f"best ({best['backend']}, batch {best['point']['B']}, "
                    f"{best['point']['T']} tokens, visible pairs counted once).")  # fmt: skip
    if rows := by_mode["decode"]:
        best = max(rows, key=lambda r: r["mbu"])
        said.append(f"Generating uses {best['mbu']:.1%} of the measured bandwidth of "
                    f"{machine['bandwidth'] / 1e9:.4g} GB/s at best ({best['backend']}, batch "
                    f"{best['point']['B']}, prompt {best['point']['P']}).")  # fmt: skip
    if said and measured and not by_mode["decode"]:
        said.append("The peak is measured on this machine, not taken from a datasheet.")
    return said


def step(rows: list[Row]) -> list[str]:
    """The largest gap of each profile, and what is left if there were none."""
    profiles = [(r["backend"], r["profile"]) for r in rows if "profile" in r]
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
            rate = f", with products at {p['products_tflops']:,.4g} TFLOP/s"
            words += "; " + roofline.told(p["reachable"], rate)
        said.append(f"{words[0].upper()}{words[1:]}. Memory counts with "
                    f"{p['bandwidth'] / 1e9:,.4g} GB/s ({p['bandwidth_source']}).")  # fmt: skip
    return said


def agreement(by_mode: dict[str, list[Row]], content: dict[str, Any]) -> list[str]:
    said = []
    half = content["machine"]["dtype"] in ("float16", "bfloat16")
    if rows := [r for r in by_mode["train"] if "loss_difference" in r]:
        loss = content["reference"]["loss"]
        off = [r["backend"] for r in rows if abs(r["loss_difference"]) > LOSS[half] * loss
               or abs(r["gradient_norm_difference"]) > NORM[half]]  # fmt: skip
        worst = max(rows, key=lambda r: abs(r["loss_difference"]))
        norm = max(rows, key=lambda r: abs(r["gradient_norm_difference"]))
        said.append(
            (f"{', '.join(off)} DISAGREE with manual in float32: " if off
             else "All agree with manual in float32 on the same batch: ")
            + f"the loss of {loss:.4f} differs by at most {abs(worst['loss_difference']):.1e} "
            f"({worst['backend']}), the gradient norm by "
            f"{abs(norm['gradient_norm_difference']):.1e} of itself ({norm['backend']})."
        )  # fmt: skip
    if rows := [r for r in by_mode["kernel"] if "error_out" in r]:
        plain = {str(r["point"]): r for r in rows if r["backend"] == "manual"}
        off = []
        for r in rows:
            beside = plain.get(str(r["point"]), {})
            for name, m in (("error_out", 2), ("error_grad", 3)):
                floor = 32 * EPS[content["machine"]["dtype"]]
                if not r[name] <= m * beside.get(name, 0.0) + floor:
                    off.append(f"{r['backend']} ({name} {r[name]:.1e} at {r['point']['T']} tokens)")
        worst_out = max(rows, key=lambda r: r["error_out"])
        worst_grad = max(rows, key=lambda r: r["error_grad"])
        said.append(
            f"Against float64 {', '.join(off)} is WRONG."
            if off
            else f"Against float64 the largest error is {worst_out['error_out']:.1e} of the "
            f"output ({worst_out['backend']}, {worst_out['point']['T']} tokens) and "
            f"{worst_grad['error_grad']:.1e} of a gradient ({worst_grad['backend']}, "
            f"{worst_grad['point']['T']} tokens)."
        )
    if rows := by_mode["converge"]:
        bad = [r["backend"] for r in rows if r.get("verdict") == "FAIL"]
        tolerance = content["settings"]["tolerance"]
        said.append(f"FAIL: {', '.join(bad)} ended further than {tolerance:.2%} from manual." if bad
                    else f"Every final loss is within {tolerance:.2%} of manual's.")  # fmt: skip
    return said
