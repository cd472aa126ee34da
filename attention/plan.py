"""Plans: the kernel of each call, chosen before it is called.

    attend / flash_attn_func / transformers          a layer of GPT
         |  Plans.choose(spec, device, shape)             |  Plans.look_up(phase)
         +-------------------->  known[key]  <------------+      key: kind of the call, device,
                                     |  missing                  deterministic algorithms
              +----------------------+---------------------+
        eager: select() or fastest()             while torch.compile traces: resolve(),
        in a thread of its own: proves it        or the stored fastest: nothing runs

A kind (Spec.kind) has features, not values: a new scale, window or length makes no new plan. It is
proved at most twice: short, and at the length of the first call with more than proof.LONG keys.

Commands plan a placed model before compiling it (GPT.plan), on all processes together, which take
the first kernel that all accept. A late plan has no other processes, which may be elsewhere.

"fastest" times every backend at the call's shape (machine/timing.py), and takes the fastest if it
beats "auto" by 2 %. fastest.json in ~/.cache/nanoattn ($XDG_CACHE_HOME, $NANOATTN_CACHE) remembers
names by versions, machine, kind and shape. A remembered name must pass the probe."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .caps import BackendUnavailable
from .machine.apart import apart, outside_a_trace
from .machine.system import autocast_dtype, cache_folder, write_at_once
from .machine.timing import Row, measure, table
from .names import BACKENDS
from .proof import LONG
from .select import Ranks, Resolution, Shape, announce, debug, disabled, gather, resolve, select
from .spec import Machine, Policy, Spec

log = logging.getLogger("nanoattn")

PROBE_LEN = 2**14  # tokens: Llama permits more than a probe should take
MARGIN = 0.02  # a backend must be this much faster than auto's choice
TOO_SLOW = 5.0  # times the best so far: not timed further


class Phase(NamedTuple):
    """One kind of forward pass of a model."""

    device: str
    dtype: str  # of q, k and v: "bfloat16"
    training: bool = True  # with dropout
    grad: bool = True  # backward() will be called
    segments: bool = False
    cache: str = "none"
    page_size: int | None = None  # of a paged cache
    lse: bool = False  # a ring shares each sequence
    compiled: bool = False  # inside torch.compile
    deterministic: bool = False  # torch.use_deterministic_algorithms(True)

    @classmethod
    def now(cls, weight: Tensor, training: bool, segments: bool, cache: Any, ring: bool) -> Phase:
        """The phase of a call that begins now; `cache` is a step of inference/cache.py or None."""
        dtype = str(autocast_dtype(weight.device.type) or weight.dtype).removeprefix("torch.")
        kind, page_size = ("none", None) if cache is None else (cache.kind, cache.page_size)
        return cls(
            str(weight.device), dtype, training, torch.is_grad_enabled(), segments, kind, page_size,
            ring, torch.compiler.is_compiling(), torch.are_deterministic_algorithms_enabled())

    def spec(self, n_head: int, n_kv_head: int, head_dim: int, window: int | None, dropout: float,
             alibi: bool = False) -> Spec:
        """The request of a layer."""
        return Spec(
            n_head, n_kv_head, head_dim, self.dtype, window, dropout if self.training else 0.0,
            self.segments, self.grad, self.cache, self.compiled, self.page_size, lse=self.lse,
            alibi=alibi)


class Call(NamedTuple):
    """What a layer calls: attend(q, k, v, spec, ...), without a check of its arguments."""

    attend: Callable[..., Tensor]
    spec: Spec
    chosen: Resolution


Plan = tuple[Call, ...]
Key = tuple[str, str, bool]  # Spec.kind, device, deterministic algorithms


class Plans:
    """The plans of one backend name. Copies and pickles are empty: a plan holds functions.
    `specs` gives the Specs of a model's layers in a phase, `length` the tokens in a sequence, if a
    forward pass has not been seen yet."""

    def __init__(self, name: str, policy: Policy = Policy(),
                 specs: Callable[..., Sequence[Spec]] | None = None, length: int = 0) -> None:
        self.name, self.policy, self.specs, self.length = name, policy, specs, length
        # By a kind of call, and of a model's layers by Phase: plain tuples (docs/DESIGN.md).
        self.known: dict[Hashable, Plan] = {}
        self.refused: dict[Key, dict[str, Sequence[str]]] = {}  # by proofs, with the reasons

    def __reduce__(self) -> tuple[type[Plans], tuple[object, ...]]:
        return Plans, (self.name, self.policy, self.specs, self.length)

    # --- a call ---

    def choose(self, spec: Spec, device: str, shape: Shape, label: str = "") -> Resolution:
        """The kernel of a call of this shape, chosen now if its kind is new."""
        key = spec.kind, device, torch.are_deterministic_algorithms_enabled()
        return self.found(key, shape) or self.make(key, spec, device, shape, label)

    def found(self, key: Key, shape: Shape) -> Resolution | None:
        """The kernel of a kind, if it need not be proved at a greater length."""
        plan = self.known.get(key)
        return plan[0].chosen if plan and (shape[2] <= LONG or plan[0].chosen.length) else None

    def make(self, key: Key, spec: Spec, device: str, shape: Shape, label: str = "",
             ranks: Ranks | None = None) -> Resolution:
        """Choose a kernel for a kind of call of this shape, announce it (with `label` if it is for
        inference), and store it. All `ranks` do so now. Raises BackendUnavailable: refused, with no
        fallback left or allowed."""

        def choose() -> Resolution:
            chosen = self.found(key, shape)
            if ranks is None and chosen and not chosen.traced:
                return chosen  # another thread was quicker
            self.known.pop(key, None)  # if this raises, what was traced must not go on
            failed = self.refused.setdefault(key, {})
            if self.name == "fastest" and (shape[1] == shape[2] or not spec.grad):
                chosen = fastest(spec, device, shape, self.policy, ranks)
            else:
                chosen = select(
                    self.name, spec, device, self.policy, shape=shape, ranks=ranks, failed=failed)
            # Also where nothing had to be run at length: it is not looked at again.
            chosen = replace(chosen, length=shape[2] if shape[2] > LONG else 0)
            self.known[key] = (Call(chosen.backend.compute, spec, chosen),)
            announce(chosen, "" if spec.grad else label)
            return chosen

        return apart(device, choose)

    @outside_a_trace
    def choose_in_trace(self, device: str, deterministic: bool, *fields: Any) -> None:
        """Choose for Spec(*fields) while torch.compile traces."""
        spec = Spec(*fields)
        chosen = self._traced(spec, device, deterministic)
        call = device, deterministic, *fields
        self.known[call] = (Call(chosen.backend.compute, spec, chosen),)

    def _traced(self, spec: Spec, device: str, deterministic: bool) -> Resolution:
        """By what is declared or stored: nothing runs, so nothing waits for the tracer."""
        key = spec.kind, device, deterministic
        if key not in self.known:
            machine, name = Machine.here(device), self.name
            if name == "fastest":
                known = (n for k, n in stored().items() if k.startswith(memory_key(spec, machine)))
                name = next((n for n in known if n in BACKENDS), "auto")
            eager = replace(spec, compiled=False).kind, device, deterministic
            failed = {**self.refused.get(eager, {}), **self.refused.get(key, {})}
            chosen = resolve(name, spec, machine, self.policy, failed=failed)
            chosen = replace(chosen, requested=self.name, traced=True)
            debug(chosen, spec, machine, self.policy)
            self.known[key] = (Call(chosen.backend.compute, spec, chosen),)
            announce(chosen)
        return self.known[key][0].chosen

    # --- the layers of a model ---

    def look_up(self, phase: Phase, B: int = 1) -> Plan:
        """The plan of a phase, made now if nobody has."""
        if phase.compiled:
            self.plan_in_trace(*phase)
        return self.known.get(phase) or self.plan(phase, B)

    @outside_a_trace
    def plan_in_trace(self, *fields: Any) -> None:
        phase = Phase(*fields)
        if phase not in self.known:
            where = phase.device, phase.deterministic
            self.known[phase] = self._layers(phase, lambda spec: self._traced(spec, *where))

    def plan(self, phase: Phase, B: int = 1, ranks: Ranks | None = None) -> Plan:
        """Choose the kernels of a phase, and announce them; B sequences at a time."""
        # With a cache nearly all calls decode: one query, and in the end `length` keys.
        T, cached = min(self.length, PROBE_LEN), phase.cache != "none"
        label = f" with the {phase.cache} cache" if cached else " without gradients"
        shape = B, 1 if cached else T, T

        def choose(spec: Spec) -> Resolution:
            key = spec.kind, phase.device, phase.deterministic
            return self.make(key, spec, phase.device, shape, label, ranks)

        self.known.pop(phase, None)  # a compiled model that has it compiles again
        self.refused.clear()
        found = self.known[phase] = self._layers(phase, choose)
        return found

    def _layers(self, phase: Phase, choose: Callable[[Spec], Resolution]) -> Plan:
        assert self.specs is not None
        specs = self.specs(phase)
        chosen = {kind: choose(spec) for kind, spec in {s.kind: s for s in specs}.items()}
        return tuple(Call(chosen[s.kind].backend.compute, s, chosen[s.kind]) for s in specs)


# --- fastest ---


def fastest(spec: Spec, device: str | torch.device, shape: Shape, policy: Policy = Policy(),
            ranks: Ranks | None = None) -> Resolution:
    """The fastest backend here, remembered or measured, which takes seconds. Rank 0 measures for
    all processes, which call this together. The shape is (B, T, T) in training, (B, 1, T) for
    decoding with T keys in a cache. Raises BackendUnavailable: "auto" finds none."""
    name = "auto"
    if ranks is None or ranks.rank == 0:
        with suppress(BackendUnavailable):  # then select() gives the reasons, on every rank
            name = apart(device, lambda: find_fastest(spec, device, shape, policy))
    name = gather(ranks, name)[0]
    chosen = select(name, spec, device, policy, shape=shape, ranks=ranks)
    return replace(chosen, requested="fastest")


def stored() -> dict[str, str]:
    """The remembered names, by find_fastest()'s key; empty without a valid file."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        return dict(json.loads((cache_folder() / "fastest.json").read_text(encoding="utf-8")))
    return {}


def memory_key(spec: Spec, machine: Machine) -> str:
    version = sys.modules[__name__.partition(".")[0]].__version__
    here = machine.name, machine.deterministic, torch.get_num_threads(), sorted(disabled())
    return repr((version, torch.__version__, here, spec.n_kv_head, spec.kind))


def find_fastest(spec: Spec, device: str | torch.device, shape: Shape, policy: Policy) -> str:
    machine, file = Machine.here(str(device)), cache_folder() / "fastest.json"
    key = memory_key(spec, machine) + repr((shape, policy))
    name = stored().get(key)
    if isinstance(name, str) and name in BACKENDS:  # a file is never run from here
        try:
            select(name, spec, device, replace(policy, fallback=False), shape=shape)
            log.info(f"fastest: {name}, remembered; delete {file} to measure again")
            return name
        except BackendUnavailable as e:
            log.warning(f"fastest: {name}, from {file}, cannot run now ({e}): measuring again")
    rule, began = select("auto", spec, device, policy, shape=shape).backend.name, perf_counter()
    names = dict.fromkeys((rule, *BACKENDS))
    rows = measure(names, [spec], machine, policy, torch.device(device), shape, TOO_SLOW)
    name, why = decide(rows, rule)
    B, Tq, Tk = shape
    text = (f"fastest: batch {B}, {Tq:,} queries, {Tk:,} keys, {spec}, {device} "
            f"({perf_counter() - began:.1f} s)\n{table(rows, [spec])}\nchosen: {name} ({why})")
    log.info(text.replace("\n", "\n      "))
    if any(row.ms for row in rows):
        try:
            write_at_once(file, json.dumps({**stored(), key: name}, indent=1))
        except OSError as e:
            log.warning(f"fastest: cannot write {file}: {e}")
    return name


def decide(rows: list[Row], rule: str) -> tuple[str, str]:
    """The backend to take, and why; `rule` is auto's choice."""
    ms = {row.name: row.ms[-1] for row in rows if row.ms}
    if not ms:
        return rule, "nothing could be measured; auto's choice"
    best = min(ms, key=lambda name: ms[name])
    if rule not in ms:
        return best, f"auto's {rule} could not be measured"
    less = 1 - ms[best] / ms[rule]
    if less < MARGIN:
        return rule, f"auto's choice, which no other beats by {MARGIN:.0%}"
    return best, f"{less:.1%} less time than auto's {rule}"
