"""Rows of a table, made from the workers' answers.

A row is a dict as in a record: `mode`, `backend`, `point`, `status` (ok, or unavailable, failed,
skipped, stopped with `why`), every round, and figures computed from them.
"""

from __future__ import annotations

import statistics

from bench import Json, roofline
from bench.decoding import mbu
from bench.hf import Counted
from bench.kernels import flops_of
from bench.process import Failure, Outcome
from bench.stats import Summary
from core import flops
from model import GPTConfig

Row = Json


def where(point: Json) -> str:
    """Return the point as text, such as "B=1 P=64 cache=static"."""
    said = point.items()
    return " ".join(k if v is True else f"{k}={v}" for k, v in said if v not in (None, False))


def begin(mode: str, backend: str, point: Json, outcome: Outcome) -> Row:
    """Return the fields that all modes have."""
    row: Row = {"mode": mode, "backend": backend, "point": point, "status": "ok"}
    failure = outcome.failure or Failure("stopped", ["no round was measured yet"])
    if not outcome.rounds or (outcome.failure and failure.kind != "stopped"):
        status = "failed" if failure.kind == "died" else failure.kind
        return row | {"status": status, "why": list(failure.why)}
    row |= {name: outcome.warm.get(name, []) for name in ("kernels", "device_kernels")}
    row |= {
        "title": outcome.about.get("title", ""),
        "proof": outcome.warm.get("proof"),
        "setup_s": outcome.setup_s,
        "warm_up_s": outcome.warm_up_s,
        "rounds": outcome.rounds,
    }
    for name in ("ms", "forward_ms", "backward_ms", "optimizer_ms", "first_ms"):
        if name in outcome.rounds[0]:
            row[name] = Summary.of([r[name] for r in outcome.rounds]).median
    ms = Summary.of([r["ms"] for r in outcome.rounds])
    row |= {"q1_ms": ms.q1, "q3_ms": ms.q3, "spread": ms.spread, "noisy": ms.noisy()}
    peaks = [r["peak_bytes"] for r in (outcome.warm, *outcome.rounds) if "peak_bytes" in r]
    return row | ({"memory_bytes": max(peaks)} if peaks else {})


def of_training(
    row: Row,
    outcome: Outcome,
    config: GPTConfig | Counted,
    sequences: int,
    peak: flops.Peak,
    reference: Json,
) -> Row:
    """Complete a row of train or converge; `reference`: loss and norm in float32, if known."""
    if row["status"] != "ok":
        return row
    T, about, warm = config.block_size, outcome.about, outcome.warm
    rate = sequences * T / (row["ms"] / 1e3)
    row |= {"tokens_a_step": sequences * T, **flops.Speed(config, T, rate, peak).row()}
    row |= {name: about[name] for name in ("base_bytes", "compiled", "dtype")}
    first = ("first_step_s", "loss", "gradient_norm", "profile")
    row |= {name: warm[name] for name in first if name in warm}
    if about["compiled"] and "first_step_s" in warm:
        row["compile_s"] = max(0.0, warm["first_step_s"] - row["ms"] / 1e3)
    if "loss" in reference and "loss" in warm and not config.dropout:
        row["loss_difference"] = warm["loss"] - reference["loss"]
        norm = reference["gradient_norm"]
        row["gradient_norm_difference"] = (warm["gradient_norm"] - norm) / norm
    return row


def of_profile(
    found: Json,
    parts: dict[str, roofline.Work],
    config: GPTConfig,
    sequences: int,
    peak: flops.Peak,
    bandwidth: tuple[float, str],  # bytes a second, and its source
    products_tflops: float | None,  # of large matmuls, if known
) -> Json:
    """Add rooflines to the result of Training.profile, the largest gap first."""
    if "why" in found:
        return found
    total = sum(found["parts"].values())
    lines = []
    for part, w in parts.items():
        ms, least = found["parts"].get(part, 0.0), w.ms(peak.tflops, bandwidth[0])
        if ms or least:
            line = {"part": part, "ms": ms, "share": ms / total, "roofline_ms": least}
            line |= {"times": ms / least if least else None, "over_ms": ms - least}
            line["limit"] = w.limit(peak.tflops, bandwidth[0])
            if ms < least:  # attributed to another part, or read from a cache
                line["times"] = None
            lines.append({**line, "names": found["names"].get(part, [])})
    lines.sort(key=lambda line: -line["over_ms"])
    made = {k: v for k, v in found.items() if k != "names"} | {"parts": lines, "ms": total}
    made |= {"bandwidth": bandwidth[0], "bandwidth_source": bandwidth[1]}
    made["products_tflops"] = products_tflops
    for name, rate in (("ceiling", peak.tflops), ("reachable", products_tflops)):
        if rate:
            made[name] = roofline.ceiling(parts, config, sequences, rate, bandwidth[0], peak.tflops)
    return made


def of_kernel(row: Row, outcome: Outcome, peak: flops.Peak) -> Row:
    """Complete a row of kernel; rates are of forward and backward together."""
    if row["status"] != "ok":
        return row
    seconds = row["ms"] / 1e3
    for name, causal in (("tflops_causal", True), ("tflops_full", False)):
        row[name] = 3 * flops_of(row["point"], causal) / seconds / 1e12
    row["share"] = row["tflops_causal"] / peak.tflops
    if row["share"] > 1:
        row |= {"share": None, "share_why": f"above the peak of {peak}"}
    warm = outcome.warm
    return row | {k: warm[k] for k in ("error_out", "error_grad", "memory_bytes") if k in warm}


def of_decoding(row: Row, outcome: Outcome, bandwidth: float) -> Row:
    """Complete a row of decode."""
    if row["status"] != "ok":
        return row
    B, P, new = (row["point"][name] for name in ("B", "P", "new_tokens"))
    row["tokens_per_s"] = B / (row["ms"] / 1e3)
    row["cache_bytes"] = max(r["cache_bytes"] for r in outcome.rounds)
    row["mbu"] = mbu(outcome.about, B, P, new, row["ms"], bandwidth)
    if row["mbu"] > 1:
        why = f"above the memory's {bandwidth / 1e9:,.4g} GB/s: from a cache, or measured too low"
        row |= {"mbu": None, "mbu_why": why}
    return row


def final_loss(losses: list[float]) -> float:
    """Return the mean over the last tenth of the steps."""
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def allowed(base: Row, tolerance: float) -> float:
    """Return the allowed relative difference of final losses: `tolerance`, or with several seeds
    the standard deviation of the baseline's final losses."""
    finals = base["final_losses"]
    return statistics.stdev(finals) / base["final_loss"] if len(finals) > 1 else tolerance


def of_convergence(rows: list[Row], baseline: str, tolerance: float, seeds: int = 1) -> bool:
    """Compare final losses with the baseline's, in place; True if all are close, lower ones too."""
    for row in rows:
        if row["status"] == "ok":
            losses = [loss for r in row["rounds"] for loss in r["losses"]]
            row["rounds"] = [{k: v for k, v in r.items() if k != "losses"} for r in row["rounds"]]
            steps = len(losses) // seeds
            runs = [losses[i * steps : (i + 1) * steps] for i in range(seeds)]
            row["final_losses"] = [final_loss(run) for run in runs]
            row |= {"losses": runs[0], "final_loss": statistics.fmean(row["final_losses"])}
    base = next((r for r in rows if r["backend"] == baseline and r["status"] == "ok"), None)
    for row in rows:
        if row["status"] == "failed":
            row["verdict"] = "FAIL"
        elif row["status"] == "ok" and base is not None:
            row["difference"] = row["final_loss"] / base["final_loss"] - 1
            if seeds > 1:
                row["seed_noise"] = statistics.stdev(base["final_losses"])
            good = abs(row["difference"]) <= allowed(base, tolerance)
            row["verdict"] = "baseline" if row is base else "ok" if good else "FAIL"
            row["time_saved"] = 1 - row["ms"] / base["ms"]
            if "memory_bytes" in row and "memory_bytes" in base:
                row["memory_saved"] = 1 - row["memory_bytes"] / base["memory_bytes"]
    return base is not None and not any(r.get("verdict") == "FAIL" for r in rows)
