"""Backends that are not measured at a point, because a call would take too long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bench import Json
from bench.process import Key, Outcome

if TYPE_CHECKING:
    from bench.bench import Bench

# Longest sequences, unless both backend and length are named: the scores fill the memory (manual,
# math), or a loop over tiles launches 10,000 kernels (tiled).
LONGEST = {"manual": 2048, "sdpa_math": 2048, "tiled": 2048}
COMPILED = {**LONGEST, "sdpa_math": 512, "tiled": 256}  # in a compiled step: minutes of compiling
SURE = 0.1  # seconds above which a call is bound by its work, not by launches


def work(point: Json) -> int:
    """Return a number proportional to the time of a call."""
    heads = point["B"] * point["H"] * point["D"]
    return heads * point["T"] * min(point["T"], point["window"] or point["T"])


def too_long(
    bench: Bench, name: str, point: Json, found: Mapping[Key, Outcome] | None = None
) -> str:
    """Return why a backend is not measured at a point, or "".

    Args:
        point: of the grid, with "T"; without it, a training step or decoding.
        found: results at other points, from which the time of a call is extrapolated.
    """
    config, alone = bench.config, "T" in point
    cuda = bench.device.startswith("cuda")
    if bench.mode == "decode":
        left_out = name in LONGEST and cuda and name not in config.backends
        return "too slow on a GPU; name it in --backends" * left_out
    if bench.mode == "converge" and name == "manual":
        return ""
    compiled = config.train.compile is True or (config.train.compile is None and cuda)
    T, step = point["T"] if alone else config.train.block_size, not alone and compiled
    longest = (COMPILED if step else LONGEST).get(name, T)
    named = name in config.backends and (bool(config.lengths) or not alone)
    if longest < T and not named:
        return (
            f"left out {'as a compiled step ' * step}beyond {longest:,} tokens: too slow or too "
            "large; name it in --backends" + ", and --lengths" * alone
        )
    for (other, where), outcome in (found or {}).items():
        took, at = outcome.warm.get("call_s", 0.0), outcome.warm.get("point", {})
        if other != name or took < SURE or not alone:
            continue
        if bool(at["window"]) == bool(point["window"]):  # else another kernel
            wait = took * work(point) / work(at)
            if wait > config.slowest_step:
                return (
                    f"a call would take about {wait:.2g} s ({took:.2g} s at {where}), more than "
                    f"--slowest_step={config.slowest_step:g}"
                )
    return ""
