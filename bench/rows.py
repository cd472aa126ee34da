"""What the workers answered -> the rows of a table.

A row is a plain dict, as it stands in a record: what was measured (`mode`, `backend`, `point`),
whether it was (`status`: ok, unavailable or failed, and `why`), every round, and what follows.
"""

from __future__ import annotations

from typing import Any

from bench import roofline
from bench.decoding import mbu
from bench.kernels import flops_of
from bench.process import Outcome
from bench.stats import Summary
from core import flops
from model import GPTConfig

Row = dict[str, Any]
TELLING = 16e6  # bytes: less than this between two batch sizes drowns in what a heap keeps


def begin(mode: str, backend: str, point: dict[str, Any], outcome: Outcome, noise: float) -> Row:
    """What every row has."""
    row: Row = {"mode": mode, "backend": backend, "point": point, "status": "ok"}
    failure = outcome.failure
    if failure or not outcome.rounds:
        why = list(failure.why) if failure else ["no round was measured"]
        refused = failure is not None and failure.kind == "unavailable"
        return row | {"status": "unavailable" if refused else "failed", "why": why}
    row |= {
        "title": outcome.about.get("title", ""),
        "kernels": outcome.warm.get("kernels", outcome.about.get("kernels", [])),
        "events": outcome.warm.get("events", []),
        "device_kernels": outcome.warm.get("device_kernels", []),
        "setup_s": outcome.setup_s,
        "warm_up_s": outcome.warm_up_s,
        "rounds": outcome.rounds,
    }
    for name in ("ms", "forward_ms", "backward_ms", "optimizer_ms", "first_ms"):
        if name in outcome.rounds[0]:
            row[name] = Summary.of([r[name] for r in outcome.rounds]).median
    ms = Summary.of([r["ms"] for r in outcome.rounds])
    row |= {"q1_ms": ms.q1, "q3_ms": ms.q3, "spread": ms.spread, "noisy": ms.noisy(noise)}
    peaks = [r["peak_bytes"] for r in (outcome.warm, *outcome.rounds) if "peak_bytes" in r]
    if peaks:
        row["memory_bytes"] = max(peaks)
    return row


def summary(row: Row) -> Summary:
    """Milliseconds of a row that was measured."""
    return Summary(row["ms"], row["q1_ms"], row["q3_ms"], len(row["rounds"]))


def of_training(row: Row, outcome: Outcome, config: GPTConfig, sequences: int,
                peak: flops.Peak, reference: dict[str, Any]) -> Row:  # fmt: skip
    """A row of the modes train and converge.

    Args:
        sequences: in a step.
        reference: loss and gradient_norm by manual in float32; empty where they are not known.
    """
    if row["status"] != "ok":
        return row
    T, about, warm = config.block_size, outcome.about, outcome.warm
    rate = sequences * T / (row["ms"] / 1e3)
    full, causal = flops.mfu(config, T, rate, peak)
    row |= {"tokens_a_step": sequences * T, "tokens_per_s": rate, "mfu": full, "mfu_causal": causal}
    row |= {name: about[name] for name in ("base_bytes", "compiled", "dtype")}
    for name in ("first_step_s", "loss", "gradient_norm", "profile"):
        if name in warm:
            row[name] = warm[name]
    if about["compiled"] and "first_step_s" in warm:
        row["compile_s"] = max(0.0, warm["first_step_s"] - row["ms"] / 1e3)
    more = warm["peak_bytes"] - warm["half_bytes"] if "half_bytes" in warm else 0
    if more > TELLING:
        row["bytes_per_sequence"] = more / (sequences - warm["half"])
    if reference and "loss" in warm and not config.dropout:
        row["loss_difference"] = warm["loss"] - reference["loss"]
        norm = reference["gradient_norm"]
        row["gradient_norm_difference"] = (warm["gradient_norm"] - norm) / norm
    return row


def of_profile(found: dict[str, Any], parts: dict[str, roofline.Work], config: GPTConfig,
               sequences: int, peak: flops.Peak, bandwidth: tuple[float, str],
               products_tflops: float | None) -> dict[str, Any]:  # fmt: skip
    """What a worker's profile says, part by part beside the roofline; the largest gap first.

    Args:
        found: Training.profile's answer.
        bandwidth: bytes a second, and where that is from.
        products_tflops: the rate that large products really reach, where that is known.
    """
    if "why" in found:
        return found
    total = sum(found["parts"].values())
    lines = []
    for part, w in parts.items():
        ms, least = found["parts"].get(part, 0.0), w.ms(peak.tflops, bandwidth[0])
        if ms or least:
            lines.append({
                "part": part,
                "ms": ms,
                "share": ms / total,
                "roofline_ms": least,
                "times": ms / least if least else None,
                "over_ms": ms - least,
                "limit": w.limit(peak.tflops, bandwidth[0]),
                "names": found["names"].get(part, []),
            })  # fmt: skip
    lines.sort(key=lambda line: -line["over_ms"])
    at = [("ceiling", peak.tflops), ("reachable", products_tflops)]
    return {k: v for k, v in found.items() if k != "names"} | {
        "parts": lines,
        "ms": total,
        "bandwidth": bandwidth[0],
        "bandwidth_source": bandwidth[1],
        "products_tflops": products_tflops,
        **{name: roofline.ceiling(parts, config, sequences, rate, bandwidth[0], peak.tflops)
           for name, rate in at if rate},
    }  # fmt: skip


def of_kernel(row: Row, outcome: Outcome, peak: flops.Peak) -> Row:
    """A row of the mode kernel; rates are of forward and backward together."""
    if row["status"] != "ok":
        return row
    seconds = row["ms"] / 1e3
    for name, causal in (("tflops_causal", True), ("tflops_full", False)):
        row[name] = 3 * flops_of(row["point"], causal) / seconds / 1e12
    row["share"] = row["tflops_causal"] / peak.tflops
    warm = outcome.warm
    return row | {k: warm[k] for k in ("error_out", "error_grad", "memory_bytes") if k in warm}


def of_decoding(row: Row, outcome: Outcome, bandwidth: float) -> Row:
    """A row of the mode decode."""
    if row["status"] != "ok":
        return row
    B, P, new = (row["point"][name] for name in ("B", "P", "new_tokens"))
    row["tokens_per_s"] = B / (row["ms"] / 1e3)
    row["cache_bytes"] = max(r["cache_bytes"] for r in outcome.rounds)
    row["mbu"] = mbu(outcome.about, B, P, new, row["ms"], bandwidth)
    return row


def of_convergence(rows: list[Row], tolerance: float) -> bool:
    """Judge the final losses against manual's, in place; whether all passed.

    The final loss is the mean over the last tenth of the steps: the same sequences for all.
    """
    for row in rows:
        if row["status"] == "ok":
            row["losses"] = [loss for r in row["rounds"] for loss in r["losses"]]
            row["rounds"] = [{k: v for k, v in r.items() if k != "losses"} for r in row["rounds"]]
            last = row["losses"][-max(1, len(row["losses"]) // 10) :]
            row["final_loss"] = sum(last) / len(last)
    base = next((r for r in rows if r["backend"] == "manual" and r["status"] == "ok"), None)
    passed = base is not None
    for row in rows:
        if row["status"] == "failed":
            row["verdict"] = "FAIL"
        elif row["status"] == "ok" and base is not None:
            row["difference"] = row["final_loss"] / base["final_loss"] - 1
            good = abs(row["difference"]) <= tolerance
            row["verdict"] = "baseline" if row is base else "ok" if good else "FAIL"
            row["time_saved"] = 1 - row["ms"] / base["ms"]
            if "memory_bytes" in row and "memory_bytes" in base:
                row["memory_saved"] = 1 - row["memory_bytes"] / base["memory_bytes"]
        passed = passed and row.get("verdict") != "FAIL"
    return passed
