"""Plans: the kernel of each kind of calls (docs/DESIGN.md, docs/ATTENTION.md).

Eager, a new kind is proved; in a trace resolve() or the stored `fastest` decides."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .caps import BackendUnavailable
from .machine.system import apart, autocast_dtype, outside_a_trace
from .machine.timing import measure, table
from .names import timed
from .proof import LONG
from .select import Failed, Ranks, Resolution, Shape, announce, disabled, gather, resolve, select
from .spec import Machine, Policy, Spec

log = logging.getLogger("nanoattn")

PROBE_LEN = 2**14  # tokens in a probe
MARGIN = 0.02  # over auto's choice


class Phase(NamedTuple):
    device: str
    dtype: str
    training: bool = True  # with dropout
    grad: bool = True
    segments: bool = False
    cache: str = "none"
    page_size: int | None = None
    lse: bool = False
    compiled: bool = False
    deterministic: bool = False

    @classmethod
    def now(cls, weight: Tensor, training: bool, segments: bool, cache: Any, ring: bool) -> Phase:
        """The phase of a call; `cache`: a step of inference/cache.py or None."""
        dtype = str(autocast_dtype(weight.device.type) or weight.dtype).removeprefix("torch.")
        kind, page_size = ("none", None) if cache is None else (cache.kind, cache.page_size)
        return cls(
            str(weight.device), dtype, training, torch.is_grad_enabled(), segments, kind, page_size,
            ring, torch.compiler.is_compiling(), torch.are_deterministic_algorithms_enabled())

    def spec(self, n_head: int, n_kv_head: int, head_dim: int, window: int | None, dropout: float,
             alibi: bool = False) -> Spec:
        return Spec(
            n_head, n_kv_head, head_dim, self.dtype, window, dropout if self.training else 0.0,
            self.segments, self.grad, self.cache, self.compiled, self.page_size, lse=self.lse,
            alibi=alibi)


class Call(NamedTuple):
    attend: Callable[..., Tensor]
    spec: Spec
    chosen: Resolution


Plan = tuple[Call, ...]
Key = tuple[str, str, bool]  # Spec.kind, device, deterministic algorithms


class Plans:
    """Plans of one backend; copies and pickles are empty. `specs`: of the layers in a phase."""

    def __init__(self, name: str, policy: Policy = Policy(),
                 specs: Callable[..., Sequence[Spec]] | None = None, length: int = 0) -> None:
        self.name, self.policy, self.specs, self.length = name, policy, specs, length
        self.chosen: dict[Key, Resolution] = {}
        self.known: dict[Phase, Plan] = {}
        self.refused: dict[Key, Failed] = {}  # by proofs

    def __reduce__(self) -> tuple[type[Plans], tuple[object, ...]]:
        return Plans, (self.name, self.policy, self.specs, self.length)

    # --- a call ---

    def choose(self, spec: Spec, device: str, shape: Shape, label: str = "",
               ranks: Ranks | None = None) -> Resolution:
        """The proved kernel, chosen and announced if the kind is new. Raises BackendUnavailable."""
        key = spec.kind, device, torch.are_deterministic_algorithms_enabled()

        def proved() -> Resolution | None:
            chosen = self.chosen.get(key)
            if ranks is not None or chosen is None or chosen.traced:
                return None
            return chosen if chosen.length or shape[2] <= LONG else None

        def prove() -> Resolution:
            if chosen := proved():  # by another thread
                return chosen
            self.chosen.pop(key, None)  # no later trace takes it if this raises
            if self.name == "fastest":
                chosen = fastest(spec, device, shape, self.policy, ranks)
            else:
                failed = self.refused.setdefault(key, {})
                chosen = select(
                    self.name, spec, device, self.policy, shape=shape, ranks=ranks, failed=failed)
            self.chosen[key] = chosen
            announce(chosen, chosen.info() + label * (not spec.grad))
            return chosen

        return proved() or apart(device, prove)

    def choose_in_trace(self, spec: Spec, device: str) -> Resolution:
        """Choose without a run, which would wait for the tracer."""
        on = device, torch.are_deterministic_algorithms_enabled()
        key, eager = (spec.kind, *on), (replace(spec, compiled=False).kind, *on)
        if key not in self.chosen:
            machine, name = Machine.here(device), self.name
            if name == "fastest":
                mine, names = memory_key(spec, machine), timed(spec, machine)
                known = (n for k, n in stored().items() if k.startswith(mine) and n in names)
                name = next(known, "auto")
            failed = {**self.refused.get(eager, {}), **self.refused.get(key, {})}
            chosen = resolve(name, spec, machine, self.policy, failed)
            self.chosen[key] = replace(chosen, requested=self.name, traced=True)
            announce(self.chosen[key], self.chosen[key].info())
        return self.chosen[key]

    # --- the layers of a model ---

    def look_up(self, phase: Phase, B: int = 1) -> Plan:
        if phase.compiled:
            self.plan_in_trace(*phase)
        return self.known.get(phase) or self.plan(phase, B)

    @outside_a_trace
    def plan_in_trace(self, *fields: Any) -> None:
        phase = Phase(*fields)
        if phase not in self.known:
            self._plan(phase, lambda spec: self.choose_in_trace(spec, phase.device))

    def plan(self, phase: Phase, B: int = 1, ranks: Ranks | None = None) -> Plan:
        """Choose and announce the kernels of a phase, for B sequences at a time."""
        # With a cache nearly all calls decode.
        T, cached = min(self.length, PROBE_LEN), phase.cache != "none"
        label = f" with the {phase.cache} cache" if cached else " without gradients"
        shape = B, 1 if cached else T, T
        self.known.pop(phase, None)  # its compiled model compiles again
        self.refused.clear()
        return self._plan(phase, lambda spec: self.choose(spec, phase.device, shape, label, ranks))

    def _plan(self, phase: Phase, choose: Callable[[Spec], Resolution]) -> Plan:
        assert self.specs is not None
        specs = self.specs(phase)
        chosen = {kind: choose(spec) for kind, spec in {s.kind: s for s in specs}.items()}
        plan = ((spec, chosen[spec.kind]) for spec in specs)
        self.known[phase] = tuple(Call(found.backend.compute, spec, found) for spec, found in plan)
        return self.known[phase]


# --- fastest ---


def fastest(spec: Spec, device: str | torch.device, shape: Shape, policy: Policy = Policy(),
            ranks: Ranks | None = None) -> Resolution:
    """The fastest, remembered or measured by rank 0. Raises BackendUnavailable."""
    name = "auto"
    if ranks is None or ranks.rank == 0:
        with suppress(BackendUnavailable):  # select() gives the reasons, on every rank
            name = apart(device, partial(find_fastest, spec, device, shape, policy))
    name = gather(ranks, name)[0]
    chosen = select(name, spec, device, policy, shape=shape, ranks=ranks)
    return replace(chosen, requested="fastest")


def memory(file: str = "fastest.json") -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("NANOATTN_CACHE") or caches / "nanoattn").expanduser() / file


def stored(file: str = "fastest.json") -> dict[str, Any]:
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: no home, deep JSON
        found = json.loads(memory(file).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def store(key: str, value: object, file: str = "fastest.json") -> None:
    try:
        path = memory(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent) as folder:  # other processes may read
            new = Path(folder) / file
            new.write_text(json.dumps({**stored(file), key: value}, indent=1), encoding="utf-8")
            new.replace(path)
    except (OSError, RuntimeError) as e:
        log.warning(f"{file} cannot be written, so the next start measures again: {e}")


def memory_key(spec: Spec, machine: Machine) -> str:
    version = sys.modules[__name__.partition(".")[0]].__version__
    here = machine.name, machine.deterministic, torch.get_num_threads(), sorted(disabled())
    return repr((version, torch.__version__, here, spec.n_kv_head, spec.kind))


def find_fastest(spec: Spec, device: str | torch.device, shape: Shape, policy: Policy) -> str:
    """The fastest by MARGIN, else auto's choice."""
    machine = Machine.here(str(device))
    key = memory_key(spec, machine) + repr((shape, policy))
    name = stored().get(key)
    if name in timed(spec, machine):  # runs no file
        try:
            select(name, spec, device, replace(policy, fallback=False), shape=shape)
            log.info(f"fastest: {name}, remembered; delete {memory()} to measure again")
            return name
        except BackendUnavailable as e:
            log.warning(f"fastest: the remembered {name} cannot run now ({e}): measuring again")
    rule, began = select("auto", spec, device, policy, shape=shape).backend.name, perf_counter()
    names = dict.fromkeys((rule, *timed(spec, machine)))
    rows = measure(names, [spec], machine, policy, torch.device(device), shape)
    ms = {row.name: row.ms[-1] for row in rows if row.ms}
    name = min(ms, key=ms.__getitem__, default=rule)
    if rule in ms and 1 - ms[name] / ms[rule] < MARGIN:
        name = rule
    B, Tq, Tk = shape
    text = (f"fastest: batch {B}, {Tq:,} queries, {Tk:,} keys, {spec}, {device} "
            f"({perf_counter() - began:.1f} s)\n{table(rows, [spec])}\n"
            f"chosen: {name}; auto's choice is {rule}, which another must beat by {MARGIN:.0%}")
    log.info(text.replace("\n", "\n      "))
    if ms:
        store(key, name)
    return name
