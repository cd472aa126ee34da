"""An estimate of how long a run will take, and what would take too long to be run at all.

The seconds below are estimates, not measured: enough to tell a minute from an hour. On a GPU most
of the time is compiling, once for each backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.fitting import SEARCH_S
from bench.kernels import flops_of
from bench.process import Key, Outcome
from core import flops

if TYPE_CHECKING:
    from bench.bench import Bench

# Tokens beyond which a backend is left out, unless both it and the length are named: its scores
# fill the memory (manual, math), or its loops over tiles launch kernels by the ten thousand.
LONGEST = {"manual": 2048, "sdpa_math": 2048, "tiled": 2048}
# Left out of a compiled step, a minute each: math is manual again, tiled is unrolled.
COMPILED = {**LONGEST, "sdpa_math": 512, "tiled": 256}
SURE = 0.1  # seconds above which a call's time is its work rather than its launches

START_S = {"cuda": 7.0, "mps": 8.0, "cpu": 5.0}  # a process: imports, CUDA's context, the probe
COMPILE_S = 3.0  # of a training step, a layer
POINT_S = 1.5  # attention alone at a new shape: the probe, the error, a compiled kernel
TOKEN_S = 0.006  # a decoding step of twelve layers, launched kernel by kernel
SHARE = 0.4  # of the peak, that a step reaches


def compiled(bench: Bench) -> bool:
    wanted = bench.config.train.compile
    return wanted is True or (wanted is None and bench.device.startswith("cuda"))


def work(point: Mapping[str, Any]) -> int:
    """Work proportional to the time of a call."""
    heads = point["B"] * point["H"] * point["D"]
    return heads * point["T"] * min(point["T"], point["window"] or point["T"])


def too_long(
    bench: Bench, name: str, point: Mapping[str, Any], found: Mapping[Key, Outcome] | None = None
) -> str:
    """Why a backend is not measured at a point, "" if it is.

    Args:
        point: of the grid, with "T"; without, it is a training step or decoding.
        found: results at other points: a call there that took a tenth of a second or more tells how
            long this one would take.
    """
    config, alone = bench.config, "T" in point
    if bench.mode == "decode":
        away = name in LONGEST and bench.device.startswith("cuda") and name not in config.backends
        return "beside the point on a GPU; name it in --backends" * away
    if bench.mode == "converge" and name == "manual":
        return ""
    T, step = point["T"] if alone else config.train.block_size, not alone and compiled(bench)
    most = (COMPILED if step else LONGEST).get(name, T)
    named = name in config.backends and (bool(config.lengths) or not alone)
    if most < T and not named:
        return (
            f"left out {'as a compiled step ' * step}beyond {most:,} tokens, where it takes too "
            "long or too much memory; name it in --backends" + ", and --lengths" * alone
        )
    for (who, where), outcome in (found or {}).items():
        took, at = outcome.warm.get("call_s", 0.0), outcome.warm.get("point", {})
        if who != name or took < SURE or not alone:
            continue
        if bool(at["window"]) == bool(point["window"]):  # else another kernel
            wait = took * work(point) / work(at)
            if wait > config.slowest_step:
                return (
                    f"a call would take about {wait:.2g} s, by {took:.2g} s at {where}; none "
                    f"may take longer than --slowest_step={config.slowest_step:g}"
                )
    return ""


def seconds(bench: Bench, points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """An estimate for each backend and baseline of the mode that is not left out, with `points` of
    attention alone, or of decoding."""
    config, mode, model = bench.config, bench.mode, bench.model
    rate = SHARE * bench.peak.tflops * 1e12
    batch = (config.fixed_batch or 1) * config.train.gradient_accumulation_steps
    step = flops.flops_per_token(model, model.block_size) * batch * model.block_size / rate
    if config.fixed_batch is None:
        step = config.slowest_step
    everyone = bench.everyone() if not config.paths else {}
    found, start = {}, START_S[bench.device.partition(":")[0]]
    for name in dict.fromkeys(everyone or ["plain", *config.paths]):
        if name in bench.refused:
            continue
        total = start
        if mode in ("train", "converge"):
            if too_long(bench, name, {}):
                continue
            total += COMPILE_S * model.n_layer * compiled(bench)
        if mode == "train":
            total += (4 + config.warm_up_steps) * step + SEARCH_S * (config.fixed_batch is None)
            total += config.rounds * (max(config.seconds, step) + step)
            total += 10 * step * config.profile + start * bool(points)  # + the sweep's process
        elif mode == "converge":
            total = config.seeds * (total + config.steps * step)
        for p in points:
            if too_long(bench, name, p):
                continue
            if mode == "decode":
                total += (1 + config.rounds) * p["new_tokens"] * TOKEN_S
            elif name in bench.backends:
                call = 3 * flops_of(dict(p), causal=True) / rate
                total += POINT_S + config.rounds * (config.seconds / 5 + 2 * call)
        found[name] = total
    return found


def told(bench: Bench, points: Sequence[Mapping[str, Any]]) -> str:
    """The plan in a sentence."""
    each = seconds(bench, points)
    longest = max(each, key=lambda name: each[name], default="none")
    said = f"plan: about {sum(each.values()) / 60:.1f} min for {len(each)} (reckoned, not measured)"
    if each:
        said += f", the longest {longest} with {each[longest]:.0f} s"
    if compiled(bench) and bench.mode in ("train", "converge"):
        said += f"; compiling about {COMPILE_S * bench.model.n_layer:.0f} s each"
    left = sorted(set(bench.backends) - each.keys() - bench.refused.keys())
    said += f"; left out: {', '.join(left)}" * bool(left)
    if bench.config.minutes:
        said += f"; it ends after --minutes={bench.config.minutes:g}"
    return said
