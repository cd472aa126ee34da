"""Time of a training step by its parts (bench/roofline.py), from PyTorch's profiler.

Not compiled: hooks put a record_function range around each module (Scopes), and an operator belongs
to the innermost range. A backward operator is linked to its forward operator by autograd's sequence
number. Compiled: by name and, for a matmul, by sizes; the names of Inductor's kernels list what was
fused (triton_per_fused_add_native_layer_norm_3), and the first match in NAMES counts. The update
and the wait for data have ranges in both cases. Adding gradients over micro-batches counts as
optimizer. The rest is the row "unattributed", with its names in the record.

On CUDA the times are of kernels, linked to their operators by CUPTI's correlation ids, and
`gaps` is the rest of a step without the profiler, which slows down the host but no kernel. On the
CPU the times are of operators without their children, and `gaps` is Python's own.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import record_function

from attention.probing import KERNELS
from model import GPTConfig

# In the names of attention kernels: flash_fwd_kernel, fmha_cutlassF_bf16,
# cudnn_generated_fort_native_sdpa, triton_tem_fused_flex_attention,
# nanoattn::flash_forward, dkdv_kernel
ATTENTION = re.compile(r"flash|fmha|sdpa|attention|attn|flex|dq_kernel|dkdv", re.I)
RANGE = "part of a step: "
ENGINE = "autograd::engine::evaluate_function: "
BACKWARD, USER = 1, 7  # at::RecordScope

MATMUL = re.compile(r"^aten::(add)?mm$|(triton|cpp)_.*fused_.*(?<![a-z])(add)?mm(?![a-z])")
FUSED = "(triton|cpp)_.*fused_.*"
NAMES = [  # parts of a compiled model
    ("attention", ATTENTION),
    ("attention", re.compile(r"^aten::(baddb|b)mm$")),  # the only batched matmuls
    ("head and loss", re.compile(r"aten::(scatter|gather|_log_softmax|nll_loss)")),
    ("embedding", re.compile(r"aten::embedding")),
    ("head and loss", re.compile(FUSED + "(log_softmax|nll_loss|cross_entropy|logsumexp)")),
    ("head and loss", re.compile(FUSED + "(gather|scatter|(?<![a-z])ne(?![a-z]))")),  # != IGNORE
    ("attention", re.compile(FUSED + "(softmax|(?<![a-z])cat(?![a-z]))")),  # gradients of q, k, v
    ("embedding", re.compile(FUSED + "embedding_dense_backward")),
    ("norms and elementwise", re.compile(FUSED + "(norm|gelu|dropout)")),
    ("embedding", re.compile(FUSED + "embedding")),
    ("norms and elementwise", re.compile(FUSED)),
]
# Python of compiled code, not an operator's time.
HOST = re.compile(r"TorchDynamo|Torch-Compiled|Pregraph|AOTDispatcher|CompiledFunction|## Call")


def profiler(device: torch.device, shapes: bool = False) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, record_shapes=shapes)


def kernels_of(looking: torch.profiler.profile) -> dict[str, list[str]]:
    """Return the attention kernels that ran: short names, operators, device kernels."""
    ran = looking.key_averages()
    named = [e for e in ran if ATTENTION.search(e.key) and not e.key.startswith("autograd::")]
    return {
        "kernels": list(dict.fromkeys(KERNELS[e.key] for e in ran if e.key in KERNELS)),
        "events": [e.key for e in named],
        "device_kernels": [e.key for e in named if e.device_type != DeviceType.CPU],
    }


@dataclass
class Found:
    """Milliseconds of all steps together."""

    names: dict[str, dict[str, float]] = field(default_factory=dict)  # part -> kernel -> ms
    busy_ms: float = 0.0  # in which the device did anything

    def add(self, part: str | None, name: str, microseconds: float) -> None:
        times = self.names.setdefault(part or "unattributed", {})
        times[name] = times.get(name, 0.0) + microseconds / 1e3

    @property
    def ms(self) -> dict[str, float]:
        return {part: sum(names.values()) for part, names in self.names.items()}


class Scopes:
    """record_function ranges around a model's modules and the parts of a step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.open: list[record_function] = []

    def enter(self, part: str) -> None:
        self.open.append(record_function(RANGE + part).__enter__())

    def leave(self, *_: object) -> None:
        self.open.pop().__exit__(None, None, None)

    def mark(self, part: str) -> None:
        """The callback of train.train_step."""
        if part == "update":
            self.enter("optimizer")
        elif part == "end":
            self.leave()

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Within this context every call of a module is in the range of its part."""

        def enters(part: str) -> Callable[..., None]:
            return lambda *_: self.enter(part)

        handles = []
        for name, module in self.model.named_modules():
            # The model itself does embeddings before its last norm, and the loss after it.
            if part := part_of(name, module) if name else "embedding":
                handles.append(module.register_forward_pre_hook(enters(part)))
                handles.append(module.register_forward_hook(self.leave, always_call=True))
            if name.rpartition(".")[2] == "ln_f":
                handles.append(module.register_forward_hook(enters("head and loss")))
                handles.append(self.model.register_forward_hook(self.leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def part_of(name: str, module: nn.Module) -> str | None:
    """Return the part of a module of a GPT (ours, nanoGPT's, transformers'); None: a container."""
    kind = type(module).__name__
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Linear) or kind == "Conv1D":
        return "head and loss" if "head" in name else "linear"
    if "Attention" in kind:
        return "attention"
    contains_embedding = any(isinstance(m, nn.Embedding) for m in module.modules())
    if contains_embedding or isinstance(module, nn.ModuleList):
        return None
    return "norms and elementwise"  # norms, GELU, dropout, and what MLPs and blocks add


def read(
    events: Iterable[FunctionEvent], config: GPTConfig, rows: int, compiled: bool, device: str
) -> Found:
    """Attribute the profiler's events, recorded with shapes.

    Args:
        rows: tokens in a micro-batch.
        compiled: attribute by names and sizes, not by modules.
        device: "cuda": time of kernels; else time of operators.
    """
    events = list(events)
    on_host = [e for e in events if e.device_type == DeviceType.CPU and not e.is_async]
    owner, found = Owner(on_host, config, rows, compiled), Found()
    if device != "cuda":
        for e in on_host:
            if e.name == RANGE + "data" or not (e.scope == USER or HOST.search(e.name)):
                found.add(owner.of(e), e.name, e.self_cpu_time_total)
        found.busy_ms = sum(found.ms.values())
        return found
    # A range also appears on the device, from its first kernel to its last.
    ranges = {e.name for e in on_host if e.scope == USER}
    kernels = [e for e in events if e.device_type != DeviceType.CPU and e.name not in ranges]
    left: dict[str, float] = defaultdict(float)  # microseconds without an operator of this thread
    for kernel in kernels:
        left[kernel.name] += kernel.time_range.end - kernel.time_range.start
    for e in on_host:
        for launched in e.kernels:
            if launched.name not in ranges:
                part = owner.of(e) or owner.by_name(launched.name)
                found.add(part, launched.name, launched.duration)
                left[launched.name] -= launched.duration
    for name, microseconds in left.items():
        if microseconds > 0.5:
            part = "data" if "Memcpy HtoD" in name else owner.by_name(name)
            found.add(part, name, microseconds)
    found.busy_ms = union((e.time_range.start, e.time_range.end) for e in kernels) / 1e3
    return found


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of all spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class Owner:
    """The parts that events belong to."""

    def __init__(
        self, events: list[FunctionEvent], config: GPTConfig, rows: int, compiled: bool
    ) -> None:
        self.compiled, self.rows = compiled, rows
        C, K = config.n_embd, config.kv_heads * config.head_dim
        self.linear = [(C, C + 2 * K), (C, C), (C, 4 * C)]
        self.head = (C, config.vocab_size)
        # The operator that makes an autograd node is the last one to begin with its number.
        self.forward: dict[tuple[int | None, int], FunctionEvent] = {}
        for e in sorted(events, key=lambda e: e.time_range.start):
            if e.sequence_nr >= 0 and not is_node(e):
                self.forward[e.thread, e.sequence_nr] = e

    def of(self, event: FunctionEvent) -> str | None:
        part = self._by_range(event)
        if not self.compiled or part in ("optimizer", "data"):
            return part
        parts = (self.by_name(e.name, e.input_shapes) for e in with_parents(event))
        return next(filter(None, parts), None)

    def _by_range(self, event: FunctionEvent) -> str | None:
        for e in with_parents(event):
            if e.name.startswith(RANGE):
                return e.name.removeprefix(RANGE)
            if is_node(e):
                if "AccumulateGrad" in e.name:
                    return "optimizer"
                made_by = self.forward.get((e.fwd_thread, e.sequence_nr))
                if made_by is not None:
                    return self._by_range(made_by)
                if "GraphRoot" not in e.name:
                    return None
        return None

    def by_name(self, name: str, shapes: Sequence[Any] = ()) -> str | None:
        if MATMUL.search(name) and not ATTENTION.search(name):
            return self.by_sizes(shapes)
        return next((part for part, names in NAMES if names.search(name)), None)

    def by_sizes(self, shapes: Sequence[Any]) -> str | None:
        """Return the part of a matmul by its three sizes; None if both parts match."""
        pairs = pairwise(s for s in shapes if len(s) == 2)
        sizes = next((sorted((*a, b[1])) for a, b in pairs if a[1] == b[0]), None)
        if sizes is None:
            return None
        linear = any(sorted((self.rows, *w)) == sizes for w in self.linear)
        rest = Counter(sizes) - Counter(self.head)  # the head takes its rows in chunks
        head = rest.total() == 1 and next(iter(rest)) <= self.rows
        return None if linear == head else "linear" if linear else "head and loss"


def with_parents(event: FunctionEvent | None) -> Iterator[FunctionEvent]:
    while event is not None:
        yield event
        event = event.cpu_parent


def is_node(event: FunctionEvent) -> bool:
    return event.scope == BACKWARD or event.name.startswith(ENGINE)
