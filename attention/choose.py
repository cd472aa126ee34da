"""The rule "fastest": every backend is timed at the run's shape (machine/timing.py).

The fastest is taken if it beats the choice of "auto" by 2 %. With several processes rank 0 measures
for all. fastest.json in ~/.cache/nanoattn ($XDG_CACHE_HOME, $NANOATTN_CACHE) holds the names, by
the versions of this package and torch, the device, the Spec and the shape. A remembered name must
pass the probe.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from dataclasses import replace
from time import perf_counter

import torch

from .caps import BackendUnavailable, Resolution
from .machine.apart import apart
from .machine.flash_impl import flash_impl
from .machine.system import cache_folder, write_at_once
from .machine.timing import Row, Shape, measure, table
from .select import BACKENDS, Ranks, select
from .spec import Machine, Policy, Spec

log = logging.getLogger("nanoattn")

MARGIN = 0.02  # a backend must be this much faster than auto's choice
TOO_SLOW = 5.0  # times the best so far: not timed further


def fastest(
    spec: Spec, device: str | torch.device, shape: Shape, policy: Policy = Policy(),
    ranks: Ranks | None = None,
) -> Resolution:
    """The fastest backend here, remembered or measured, which takes seconds.

    Args:
        shape: sequences, queries and keys: (B, T, T) in training, (B, 1, T) for decoding with a
            cache.
        ranks: processes that call this together.

    Raises:
        BackendUnavailable: "auto" finds no backend that can run.
    """
    assert not spec.grad or shape[1] == shape[2], shape
    if ranks is None:
        return apart(device, lambda: find_fastest(spec, device, shape, policy))
    name = "auto"
    if ranks.rank == 0:
        with suppress(BackendUnavailable):  # then every rank refuses
            name = find_fastest(spec, device, shape, policy).backend.name
    name = ranks.gather(name)[0]
    try:
        return take(name, spec, device, shape, policy, ranks)
    except BackendUnavailable as e:
        if name == "auto" or not policy.fallback:
            raise
        if ranks.rank == 0:
            log.warning(f"fastest: {name} of rank 0 does not run on every rank ({e})")
        return take("auto", spec, device, shape, policy, ranks)


def take(
    name: str, spec: Spec, device: str | torch.device, shape: Shape, policy: Policy,
    ranks: Ranks | None = None,
) -> Resolution:
    # Only auto falls back, not a measured name.
    strict = replace(policy, fallback=name == "auto")
    chosen = select(name, spec, device, strict, shape=(shape[0], shape[2]), ranks=ranks)
    return replace(chosen, requested="fastest")


def find_fastest(
    spec: Spec, device: str | torch.device, shape: Shape, policy: Policy
) -> Resolution:
    request = spec, device, shape, policy
    machine, file = Machine.here(str(device)), cache_folder() / "fastest.json"
    version = sys.modules[__name__.partition(".")[0]].__version__
    machine_key = machine.name, machine.deterministic, torch.get_num_threads(), flash_impl()
    key = repr((version, torch.__version__, machine_key, spec, shape, policy))
    known: dict[str, str] = {}
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(file.read_text(encoding="utf-8"))
        known = found if isinstance(found, dict) else {}
    name = known.get(key)
    if isinstance(name, str) and name in BACKENDS:  # a file is never run from here
        try:
            chosen = take(name, *request)
            log.info(f"fastest: {name}, remembered; delete {file} to measure again")
            return chosen
        except BackendUnavailable as e:
            log.warning(f"fastest: {name}, from {file}, cannot run now ({e}): measuring again")
    rule, began = take("auto", *request).backend.name, perf_counter()
    names = dict.fromkeys((rule, *BACKENDS))
    rows = measure(names, [spec], machine, policy, torch.device(device), shape, TOO_SLOW)
    name, why = decide(rows, rule)
    seconds, (B, Tq, Tk) = perf_counter() - began, shape
    heading = f"fastest: batch {B}, {Tq:,} queries, {Tk:,} keys, {spec}, {device} ({seconds:.1f} s)"
    text = "\n".join([heading, table(rows, [spec]), f"chosen: {name} ({why})"])
    log.info(text.replace("\n", "\n      "))
    chosen = take(name, *request)
    if any(row.ms for row in rows):
        try:
            write_at_once(file, json.dumps({**known, key: name}, indent=1))
        except OSError as e:
            log.warning(f"fastest: cannot write {file}: {e}")
    return chosen


def decide(rows: list[Row], rule: str) -> tuple[str, str]:
    """The backend to take, and why; `rule` is auto's choice."""
    ms = {row.name: row.ms[-1] for row in rows if row.ms}
    best = min(ms, key=lambda name: ms[name], default=rule)
    if not ms:
        return rule, "nothing could be measured; auto's choice"
    if rule not in ms:
        return best, f"auto's {rule} could not be measured"
    if ms[best] > (1 - MARGIN) * ms[rule]:
        return rule, f"auto's choice, which no other beats by {MARGIN:.0%}"
    return best, f"{1 - ms[best] / ms[rule]:.1%} less time than auto's {rule}"
