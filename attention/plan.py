"""Plans: the kernel of each layer, chosen before it is called.

A plan belongs to one phase: training, evaluation or decoding, on one device, in one dtype. Commands
make their plans after placing the model and before compiling it (GPT.plan). A forward pass looks
its plan up:

    calls = plans.look_up(phase)      (attend, spec, chosen) of each layer

A plan that is missing then is made late, once, in a thread of its own (machine/apart.py): what
surrounds the call neither disturbs it nor notices it. torch.compile and torch.export, which cannot
trace a choice, call plan_in_trace() while they trace.

With several processes all take the first kernel that every process accepts, if the plan is made
with `ranks`. A late plan has none: other processes may not be at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .caps import Resolution
from .choose import fastest
from .machine.apart import apart, outside_a_trace
from .machine.system import autocast_dtype
from .machine.timing import Shape
from .select import Ranks, announce, select
from .spec import Policy, Spec

PROBE_LEN = 2**14  # tokens: Llama permits more than a probe should take


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

    @classmethod
    def now(cls, weight: Tensor, training: bool, segments: bool, cache: Any, ring: bool) -> Phase:
        """The phase of a call that begins now, in a model with this weight; `cache` is a step of
        one (inference/cache.py) or None."""
        dtype = str(autocast_dtype(weight.device.type) or weight.dtype).removeprefix("torch.")
        kind, page_size = ("none", None) if cache is None else (cache.kind, cache.page_size)
        grad, compiled = torch.is_grad_enabled(), torch.compiler.is_compiling()
        return cls(
            str(weight.device), dtype, training, grad, segments, kind, page_size, ring, compiled
        )

    def spec(
        self, n_head: int, n_kv_head: int, head_dim: int, window: int | None, dropout: float
    ) -> Spec:
        """The request of a layer."""
        dropout = dropout if self.training else 0.0
        return Spec(
            n_head, n_kv_head, head_dim, self.dtype, window, dropout, self.segments, self.grad,
            self.cache, self.compiled, self.page_size, lse=self.lse,
        )


class Call(NamedTuple):
    """What a layer calls: attend(q, k, v, spec, ...)."""

    attend: Callable[..., Tensor]
    spec: Spec
    chosen: Resolution


Plan = tuple[Call, ...]


class Plans:
    """The plans of one backend name, by phase. Copies and pickles of it are empty: a plan holds
    functions, and is made again where it is needed.

    Args:
        specs: Specs of the layers in a phase.
        length: tokens in a sequence, if a forward pass has not been seen yet.
    """

    def __init__(
        self, name: str, policy: Policy = Policy(),
        specs: Callable[..., Sequence[Spec]] | None = None, length: int = 0,
    ) -> None:
        if not isinstance(policy, Policy):
            raise ValueError(f"policy must be a Policy, got {policy!r}")
        self.name, self.policy, self.specs, self.length = name, policy, specs, length
        self.known: dict[Hashable, Plan] = {}

    def __reduce__(self) -> tuple[type[Plans], tuple[object, ...]]:
        return Plans, (self.name, self.policy, self.specs, self.length)

    def look_up(self, phase: Phase, B: int = 1) -> Plan:
        """The plan of a phase, made now if nobody has."""
        if phase.compiled:
            self.plan_in_trace(*phase)
        found = self.known.get(phase)
        return self.plan(phase, B) if found is None else found

    @outside_a_trace
    def plan_in_trace(self, *phase: Any) -> None:
        self.plan(Phase(*phase))

    def plan(self, phase: Phase, B: int = 1, ranks: Ranks | None = None) -> Plan:
        """Choose the kernels of a phase, and announce them; B sequences at a time."""
        assert self.specs is not None
        # With a cache nearly all calls decode: one query, and in the end `length` keys.
        T, cached = min(self.length, PROBE_LEN), phase.cache != "none"
        label = f" with the {phase.cache} cache" if cached else " without gradients"
        shape = B, 1 if cached else T, T
        return self.make(phase, self.specs(phase), phase.device, shape, label, ranks)

    def make(
        self, key: Hashable, specs: Sequence[Spec], device: str | torch.device, shape: Shape,
        label: str = "", ranks: Ranks | None = None,
    ) -> Plan:
        """Choose a kernel for each Spec, announce it, and store the plan under `key`.

        Args:
            shape: sequences, queries and keys of a call: "fastest" measures at it.
            label: announced after the backend's name if the Spec is for inference.
            ranks: the processes that make the same plan now.

        Raises:
            BackendUnavailable: refused, with no fallback left or allowed.
        """

        if ranks is None and key in self.known:
            return self.known[key]

        def choose(spec: Spec) -> Call:
            B, Tq, Tk = shape
            if self.name == "fastest" and (Tq == Tk or not spec.grad):
                chosen = fastest(spec, device, shape, self.policy, ranks)
            else:
                chosen = select(self.name, spec, device, self.policy, shape=(B, Tk), ranks=ranks)
            announce(chosen, "" if spec.grad else label)
            return Call(chosen.backend.attend, spec, chosen)

        def plan() -> Plan:
            found = self.known.get(key)
            if found is None or ranks:  # else another thread was quicker
                calls = {spec: choose(spec) for spec in dict.fromkeys(specs)}
                found = self.known[key] = tuple(calls[spec] for spec in specs)
            return found

        return apart(device, plan)
