"""Time of a training step by its parts (bench/roofline.py), from PyTorch's profiler.

Hooks put a record_function range around each module, and an operator belongs to the innermost
range. A backward operator is linked to its forward operator by autograd's sequence number. So the
profiled steps run without torch.compile. The update and the wait for data have ranges, too; adding
gradients over micro-batches counts as optimizer. The rest is the row "unattributed".

On CUDA the times are of kernels, and `gaps` is the rest of a step without the profiler, which slows
down the host but no kernel. On the CPU the times are of operators without their children, and
`gaps` is Python's own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import record_function

from attention.probing import KERNELS

# In the names of attention kernels: flash_fwd_kernel, fmha_cutlassF_bf16,
# cudnn_generated_fort_native_sdpa, triton_tem_fused_flex_attention,
# nanoattn::flash_forward, dkdv_kernel
ATTENTION = re.compile(r"flash|fmha|sdpa|attention|attn|flex|dq_kernel|dkdv", re.I)
RANGE = "part of a step: "
ENGINE = "autograd::engine::evaluate_function: "
BACKWARD, USER = 1, 7  # at::RecordScope


def profiler(device: torch.device) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def kernels_of(looking: torch.profiler.profile) -> dict[str, list[str]]:
    """Return the attention kernels that ran: short names, operators, device kernels."""
    ran = looking.key_averages()
    named = [e for e in ran if ATTENTION.search(e.key) and not e.key.startswith("autograd::")]
    return {
        "kernels": list(dict.fromkeys(KERNELS[e.key] for e in ran if e.key in KERNELS)),
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


def read(events: Iterable[FunctionEvent], device: str) -> Found:
    """Attribute the profiler's events. On "cuda" times are of kernels, else of operators."""
    events = list(events)
    on_host = [e for e in events if e.device_type == DeviceType.CPU and not e.is_async]
    # The operator that makes an autograd node is the last one to begin with its number.
    forward = {
        (e.thread, e.sequence_nr): e
        for e in sorted(on_host, key=lambda e: e.time_range.start)
        if e.sequence_nr >= 0 and not is_node(e)
    }
    found = Found()
    if device != "cuda":
        for e in on_host:
            if e.scope != USER or e.name == RANGE + "data":
                found.add(part_of_event(e, forward), e.name, e.self_cpu_time_total)
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
                found.add(part_of_event(e, forward), launched.name, launched.duration)
                left[launched.name] -= launched.duration
    for name, microseconds in left.items():
        if microseconds > 0.5:
            found.add("data" if "Memcpy HtoD" in name else None, name, microseconds)
    found.busy_ms = union((e.time_range.start, e.time_range.end) for e in kernels) / 1e3
    return found


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of all spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


Forward = dict[tuple[int, int], FunctionEvent]  # thread, sequence number -> operator


def part_of_event(event: FunctionEvent | None, forward: Forward) -> str | None:
    """Return the part of the innermost range around an operator or around its forward."""
    while event is not None:
        if event.name.startswith(RANGE):
            return event.name.removeprefix(RANGE)
        if is_node(event):
            if "AccumulateGrad" in event.name:
                return "optimizer"
            if made_by := forward.get((event.fwd_thread or 0, event.sequence_nr)):
                return part_of_event(made_by, forward)
            if "GraphRoot" not in event.name:
                return None
        event = event.cpu_parent
    return None


def is_node(event: FunctionEvent) -> bool:
    return event.scope == BACKWARD or event.name.startswith(ENGINE)
