"""The choice of a kernel, remembered by each model and, for "fastest", on disk.

"fastest" times every backend at the run's shape (machine/timing.py) and takes the fastest if it
beats the choice of "auto" by 2 %. With torch.distributed rank 0 measures for all. fastest.json in
~/.cache/nanoattn ($XDG_CACHE_HOME, $NANOATTN_CACHE) holds the names, by the versions of this
package and torch, the device, the Spec and the shape. A remembered name must pass the probe.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from .caps import BackendUnavailable, Resolution
from .machine.flash_impl import flash_impl
from .machine.system import cache_folder, write_at_once
from .machine.timing import Row, Shape, measure, table
from .select import BACKENDS, announce, select
from .spec import Machine, Policy, Spec

log = logging.getLogger("nanoattn")

MARGIN = 0.02  # a backend must be this much faster than auto's choice
TOO_SLOW = 5.0  # times the best so far: not timed further


class Choices:
    """The resolutions of one backend name, by the caller's key."""

    def __init__(self, name: str, policy: Policy) -> None:
        self.name, self.policy = name, policy
        self.known: dict[Hashable, tuple[Resolution, Spec]] = {}

    def choose(
        self, key: Hashable, spec: Spec, device: str | torch.device, shape: Shape, phase: str = ""
    ) -> Resolution:
        """Choose the kernel for `spec`, announce it, and remember it under `key`.

        Args:
            shape: sequences, queries and keys of a call: "fastest" measures at it.
            phase: announced after the backend's name if the Spec is for inference.

        Raises:
            BackendUnavailable: refused, with no fallback left or allowed.
        """
        B, Tq, Tk = shape
        if self.name == "fastest" and (Tq == Tk or not spec.grad):
            chosen = fastest(spec, device, shape, self.policy)
        else:
            chosen = select(self.name, spec, device, self.policy, shape=(B, Tk))
        announce(chosen, "" if spec.grad else phase)
        self.known[key] = chosen, spec
        return chosen


def fastest(
    spec: Spec, device: str | torch.device, shape: Shape, policy: Policy = Policy()
) -> Resolution:
    """The fastest backend here, remembered or measured, which takes seconds.

    Call it under the same autocast as the run.

    Args:
        shape: sequences, queries and keys: (B, T, T) in training, (B, 1, T) for decoding with a
            cache.

    Raises:
        BackendUnavailable: "auto" finds no backend that can run.
    """
    assert not spec.grad or shape[1] == shape[2], shape
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return find_fastest(spec, device, shape, policy)
    # A key-value store, not a broadcast: rank 0 may call this alone, to write a sample.
    store = dist.distributed_c10d._get_default_store()
    question = f"nanoattn/fastest/{spec!r}/{shape}"
    if dist.get_rank():
        return take(store.get(question).decode(), spec, device, shape, policy)
    name = "auto"  # what the other ranks use if this fails, rather than wait
    try:
        chosen = find_fastest(spec, device, shape, policy)
        name = chosen.backend.name
    finally:
        store.set(question, name)
    return chosen


def take(
    name: str, spec: Spec, device: str | torch.device, shape: Shape, policy: Policy
) -> Resolution:
    # Only auto falls back, not a measured name.
    strict = replace(policy, fallback=name == "auto")
    chosen = select(name, spec, device, strict, shape=(shape[0], shape[2]))
    return replace(chosen, requested="fastest")


def find_fastest(
    spec: Spec, device: str | torch.device, shape: Shape, policy: Policy
) -> Resolution:
    request = spec, device, shape, policy
    machine, file = Machine.here(str(device)), cache_folder() / "fastest.json"
    version = sys.modules[__name__.partition(".")[0]].__version__
    here = machine.name, machine.deterministic, torch.get_num_threads(), flash_impl()
    key = repr((version, torch.__version__, here, spec, shape, policy))
    known = remembered(file)
    if (name := known.get(key, "")) in BACKENDS:  # a file is never run from here
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


def remembered(file: Path) -> dict[str, str]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
