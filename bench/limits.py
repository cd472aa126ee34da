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


def too_long(bench: Bench, name: str, point: Json, found: Mapping[Key, Outcome]) -> str:
    """Return why a backend is not measured at a point, or "".

    Args:
        point: of the grid, with "T"; without it, a training step or decoding.
        found: results at other points, from which the time of a call is extrapolated.
    """
    config, alone = bench.config, "T" in point
    cuda, named = bench.device.startswith("cuda"), name in config.backends
    if bench.mode == "decode":
        return (
            "too slow on a GPU; name it in --backends"
            if name in LONGEST and cuda and not named
            else ""
        )
    if bench.mode == "converge" and name == "manual":
        return ""
    compiled = not alone and (cuda if config.train.compile is None else config.train.compile)
    T = point["T"] if alone else config.train.block_size
    longest = (COMPILED if compiled else LONGEST).get(name, T)
    if longest < T and not (named and (config.lengths or not alone)):
        how = ("as a compiled step " if compiled else "") + f"beyond {longest:,} tokens"
        return f"left out {how}: name it in --backends" + (", and --lengths" if alone else "")
    for (other, where), outcome in found.items():
        took, at = outcome.warm.get("call_s", 0.0), outcome.warm.get("point", {})
        if other != name or took < SURE or not alone or bool(at["window"]) != bool(point["window"]):
            continue
        wait = took * work(point) / work(at)
        if wait > config.slowest_step:
            return f"a call would take about {wait:.2g} s, as at {where} (--slowest_step)"
    return ""
