"""Plans: the kernel of each call, chosen before it is called.

    attend / flash_attn_func / transformers          a layer of GPT
         |  Plans.choose(spec, device, shape)             |  Plans.look_up(phase)
         +-------------------->  known[key]  <------------+      key: kind of the call, device,
                                     |  missing                  deterministic algorithms
              +----------------------+---------------------+
        eager: select() or fastest()             while torch.compile traces: resolve(),
        in a thread of its own: proves it        or the stored fastest: nothing runs

A kind (Spec.kind) has features, not values: a new scale, window or length makes no new plan, and
each call passes its own Spec. A kind is proved at most twice: short, and once at the length of the
first call with more than proof.LONG keys.

Commands make the plans of a model after placing it and before compiling it (GPT.plan), on all
processes together: all take the first kernel that every process accepts. A late plan has no other
processes, which may not be at the same place.

"fastest" times every backend at the call's shape (machine/timing.py), and takes the fastest if it
beats the choice of "auto" by 2 %. fastest.json in ~/.cache/nanoattn ($XDG_CACHE_HOME,
$NANOATTN_CACHE) holds the names, by versions, machine, kind and shape. A remembered name must pass
the probe.
"""

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
        """The phase of a call that begins now, in a model with this weight; `cache` is a step of
        one (inference/cache.py) or None."""
        dtype = str(autocast_dtype(weight.device.type) or weight.dtype).removeprefix("torch.")
        kind, page_size = ("none", None) if cache is None else (cache.kind, cache.page_size)
        return cls(
            str(weight.device), dtype, training, torch.is_grad_enabled(), segments, kind, page_size,
            ring, torch.compiler.is_compiling(), torch.are_deterministic_algorithms_enabled(),
        )

    def spec(
        self, n_head: int, n_kv_head: int, head_dim: int, window: int | None, dropout: float,
        alibi: bool = False,
    ) -> Spec:
        """The request of a layer."""
        return Spec(
            n_head, n_kv_head, head_dim, self.dtype, window, dropout if self.training else 0.0,
            self.segments, self.grad, self.cache, self.compiled, self.page_size, lse=self.lse,
            alibi=alibi,
        )


class Call(NamedTuple):
    """What a layer calls: attend(q, k, v, spec, ...), without a check of its arguments."""

    attend: Callable[..., Tensor]
    spec: Spec
    chosen: Resolution


Plan = tuple[Call, ...]
Key = tuple[str, str, bool]  # Spec.kind, device, deterministic algorithms


class Plans:
    """The plans of one backend name. Copies and pickles of it are empty: a plan holds functions,
    and is made again where it is needed.

    Args:
        specs: Specs of a model's layers in a phase.
        length: tokens in a sequence, if a forward pass has not been seen yet.
    """

    def __init__(
        self, name: str, policy: Policy = Policy(),
        specs: Callable[..., Sequence[Spec]] | None = None, length: int = 0,
    ) -> None:
        if not isinstance(policy, Policy):
            raise ValueError(f"policy must be a Policy, got {policy!r}")
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
        found = self.known.get(key)
        if found is not None:
            chosen = found[0].chosen
            if shape[2] <= LONG or chosen.length or chosen.traced:
                return chosen
        return self.make(key, spec, device, shape, label)

    def make(
        self, key: Key, spec: Spec, device: str, shape: Shape, label: str = "",
        ranks: Ranks | None = None,
    ) -> Resolution:
        """Choose a kernel for a kind of call, announce it, and store it.

        Args:
            shape: of a call: it is proved, and "fastest" measures, at this shape.
            label: announced after the backend's name if the Spec is for inference.
            ranks: the processes that make the same plan now.

        Raises:
            BackendUnavailable: refused, with no fallback left or allowed.
        """

        def choose() -> Resolution:
            before, long = self.known.pop(key, None), shape[2] > LONG
            if ranks is None and before is not None:
                chosen = before[0].chosen
                if not chosen.traced and (chosen.length or not long):
                    self.known[key] = before  # another thread was quicker
                    return chosen
            # What was traced is gone if this raises: it must not go on.
            failed = self.refused.setdefault(key, {})
            if self.name == "fastest" and (shape[1] == shape[2] or not spec.grad):
                chosen = fastest(spec, device, shape, self.policy, ranks)
            else:
                chosen = select(
                    self.name, spec, device, self.policy, shape=shape, ranks=ranks, failed=failed
                )
            # Also where nothing had to be run at length: it is not looked at again.
            chosen = replace(chosen, length=shape[2] if long else 0)
            self.known[key] = (Call(chosen.backend.compute, spec, chosen),)
            announce(chosen, "" if spec.grad else label)
            return chosen

        return apart(device, choose)

    @outside_a_trace
    def choose_in_trace(self, device: str, deterministic: bool, *fields: Any) -> None:
        """Choose for Spec(*fields) while torch.compile traces: from what is declared, or the stored
        result of "fastest". Nothing runs, so nothing waits for the tracer."""
        spec = Spec(*fields)
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
        chosen = self.known[key][0].chosen
        call = device, deterministic, *fields
        self.known[call] = (Call(chosen.backend.compute, spec, chosen),)

    # --- the layers of a model ---

    def look_up(self, phase: Phase, B: int = 1) -> Plan:
        """The plan of a phase, made now if nobody has."""
        if phase.compiled:
            self.plan_in_trace(*phase)
        found = self.known.get(phase)
        return self.plan(phase, B) if found is None else found

    @outside_a_trace
    def plan_in_trace(self, *fields: Any) -> None:
        phase = Phase(*fields)
        if phase not in self.known:
            self.known[phase] = self._layers(phase, self._trace)

    def _trace(self, spec: Spec, phase: Phase) -> Resolution:
        names = [name for name in Spec.__dataclass_fields__ if name != "kind"]
        fields = [getattr(spec, name) for name in names]
        self.choose_in_trace(phase.device, phase.deterministic, *fields)
        return self.known[spec.kind, phase.device, phase.deterministic][0].chosen

    def plan(self, phase: Phase, B: int = 1, ranks: Ranks | None = None) -> Plan:
        """Choose the kernels of a phase, and announce them; B sequences at a time."""
        # With a cache nearly all calls decode: one query, and in the end `length` keys.
        T, cached = min(self.length, PROBE_LEN), phase.cache != "none"
        label = f" with the {phase.cache} cache" if cached else " without gradients"
        shape = B, 1 if cached else T, T

        def choose(spec: Spec, phase: Phase) -> Resolution:
            key = spec.kind, phase.device, phase.deterministic
            return self.make(key, spec, phase.device, shape, label, ranks)

        self.known.pop(phase, None)  # a compiled model that has it compiles again
        self.refused.clear()
        found = self.known[phase] = self._layers(phase, choose)
        return found

    def _layers(self, phase: Phase, choose: Callable[[Spec, Phase], Resolution]) -> Plan:
        assert self.specs is not None
        specs = self.specs(phase)
        chosen = {kind: choose(spec, phase) for kind, spec in {s.kind: s for s in specs}.items()}
        found = [(chosen[spec.kind], spec) for spec in specs]
        return tuple(Call(of_kind.backend.compute, spec, of_kind) for of_kind, spec in found)


# --- fastest ---


def fastest(
    spec: Spec, device: str | torch.device, shape: Shape, policy: Policy = Policy(),
    ranks: Ranks | None = None,
) -> Resolution:
    """The fastest backend here, remembered or measured, which takes seconds. With several
    processes, which call this together, rank 0 measures for all.

    Args:
        shape: sequences, queries and keys: (B, T, T) in training, (B, 1, T) for decoding with a
            cache.

    Raises:
        BackendUnavailable: "auto" finds no backend that can run.
    """
    assert not spec.grad or shape[1] == shape[2], shape
    name = "auto"
    if ranks is None or ranks.rank == 0:
        with suppress(BackendUnavailable):  # then select() gives the reasons, on every rank
            name = apart(device, lambda: find_fastest(spec, device, shape, policy))
    name = gather(ranks, name)[0]
    chosen = select(name, spec, device, policy, shape=shape, ranks=ranks)
    return replace(chosen, requested="fastest")


def stored() -> dict[str, str]:
    """The remembered names, by find_fastest()'s key; empty without a valid file."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((cache_folder() / "fastest.json").read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def memory_key(spec: Spec, machine: Machine) -> str:
    version = sys.modules[__name__.partition(".")[0]].__version__
    here = machine.name, machine.deterministic, torch.get_num_threads(), sorted(disabled())
    return repr((version, torch.__version__, here, spec.n_kv_head, spec.kind))


def find_fastest(
    spec: Spec, device: str | torch.device, shape: Shape, policy: Policy
) -> str:
    """The name of the fastest backend here, remembered or measured."""
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
    seconds, (B, Tq, Tk) = perf_counter() - began, shape
    heading = f"fastest: batch {B}, {Tq:,} queries, {Tk:,} keys, {spec}, {device} ({seconds:.1f} s)"
    text = "\n".join([heading, table(rows, [spec]), f"chosen: {name} ({why})"])
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
    best = min(ms, key=lambda name: ms[name], default=rule)
    if not ms:
        return rule, "nothing could be measured; auto's choice"
    if rule not in ms:
        return best, f"auto's {rule} could not be measured"
    if ms[best] > (1 - MARGIN) * ms[rule]:
        return rule, f"auto's choice, which no other beats by {MARGIN:.0%}"
    return best, f"{1 - ms[best] / ms[rule]:.1%} less time than auto's {rule}"
