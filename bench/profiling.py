"""Where the time of a training step goes: what the profiler saw, by the parts of roofline.py.

Nothing is attributed by a guess. An operator belongs to a part

- where the model is not compiled, by the module that it ran in: while the profiler looks, hooks
  open and close a range around each module (Scopes). A backward operator belongs where its forward
  did: autograd numbers its nodes, and the profiler notes the number of the node that a forward
  operator makes and that a backward operator runs;
- where the model is compiled, by the operator (attention) or by the sizes of a matmul, which tell
  the layers' weights from the head's, or by the name that Inductor gives a kernel:
  triton_per_fused_add_native_layer_norm_3 says what was fused. A kernel that does several things is
  named by the first of these that is in it: loss, attention, embedding's gradient, norm or GELU,
  embedding; and any other fused kernel is elementwise;
- by ranges around the update and around the wait for data, compiled or not. Adding up gradients
  over micro-batches counts as optimizer. What a step does around a model that is not compiled, a
  few scalars, belongs to the loss.

What none of this tells is the row "unattributed", and the record has its names.

On CUDA the time is that of kernels, each linked to the operator that launched it by the correlation
id that CUPTI gives both. `gaps` is the rest of a step as it takes without the profiler, which slows
the host, but no kernel. On the CPU the time is that of operators without the ones that they call;
`gaps` is the time in no operator, Python's own, and all of it under the profiler.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
from torch.autograd import DeviceType
from torch.profiler import record_function

from attention.probing import KERNELS
from model import GPTConfig

# What the names of attention kernels have in common: flash_fwd_kernel, fmha_cutlassF_bf16,
# cudnn_generated_fort_native_sdpa, triton_tem_fused_flex_attention
# and this project's own: nanoattn::flash_forward, dkdv_kernel
ATTENTION = re.compile(r"flash|fmha|sdpa|attention|attn|flex|dq_kernel|dkdv", re.I)
RANGE = "part of a step: "
ENGINE = "autograd::engine::evaluate_function: "
BACKWARD, USER = 1, 7  # at::RecordScope

# The first of these that is in the name of a fused kernel says what it is for. `cat` joins the
# gradients of q, k and v, the only thing that a GPT joins; `ne` is targets != IGNORE.
FUSED = re.compile(r"(?:triton|cpp)_(?:[a-z]{3}_)?fused_(.+)")
WORDS = [
    ("head and loss", r"log_softmax|nll_loss|cross_entropy|logsumexp|gather|scatter"),
    ("head and loss", r"(?<![a-z])ne(?![a-z])"),
    ("attention", r"softmax|(?<![a-z])cat(?![a-z])"),
    ("embedding", r"embedding_dense_backward"),
    ("norms and elementwise", r"norm|gelu|dropout"),
    ("embedding", r"embedding"),
]
LOOKED_UP = re.compile(r"aten::(scatter|gather|_log_softmax|nll_loss|embedding)")
# Compiled code's own steps around its kernels: Python's time, no operator's.
HOST = re.compile(r"TorchDynamo|Torch-Compiled|Pregraph|AOTDispatcher|CompiledFunction|## Call")


def profiler(device: torch.device, shapes: bool = False) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, record_shapes=shapes)


def kernels_of(looking: torch.profiler.profile) -> dict[str, list[str]]:
    """The attention operators and device kernels that ran, by their short and their own names."""
    ran = looking.key_averages()
    named = [e for e in ran if ATTENTION.search(e.key) and not e.key.startswith("autograd::")]
    return {
        "kernels": list(dict.fromkeys(KERNELS[e.key] for e in ran if e.key in KERNELS)),
        "events": [e.key for e in named],
        "device_kernels": [e.key for e in named if e.device_type != DeviceType.CPU],
    }


@dataclass
class Found:
    """Milliseconds of all the steps together."""

    ms: dict[str, float] = field(default_factory=dict)  # by part
    names: dict[str, Any] = field(default_factory=dict)  # a Counter of each part, by name
    busy_ms: float = 0.0  # in which the device did anything at all

    def add(self, part: str | None, name: str, microseconds: float) -> None:
        part, ms = part or "unattributed", microseconds / 1e3
        self.ms[part] = self.ms.get(part, 0.0) + ms
        self.names.setdefault(part, Counter())[name] += ms


# ----------------------------------------------------------------------------- ranges


class Scopes:
    """Ranges around the modules of a model that is not compiled, and around a step's own parts."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.open: list[Any] = []

    def enter(self, part: str) -> None:
        self.open.append(record_function(RANGE + part).__enter__())

    def leave(self, *_: Any) -> None:
        self.open.pop().__exit__(None, None, None)

    def mark(self, part: str) -> None:
        """What train.train_step tells of."""
        if part == "update":
            self.enter("optimizer")
        elif part == "end":
            self.leave()

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Inside, every call of a module is in the range of its part."""
        names = {name: part_of(name, module) for name, module in self.model.named_modules()}
        last = next((n for n in names if n.rpartition(".")[2] == "ln_f"), None)
        # What the model itself does before its last norm looks tokens up, and after it is the loss.
        names[""] = "unattributed" if last is None else "embedding"
        handles: list[Any] = []

        def enters(part: str) -> Callable[..., None]:
            return lambda *_: self.enter(part)

        for name, module in self.model.named_modules():
            if not (part := names[name]):
                continue
            handles.append(module.register_forward_pre_hook(enters(part)))
            handles.append(module.register_forward_hook(self.leave, always_call=True))
            if name == last:
                handles.append(module.register_forward_hook(enters("head and loss")))
                handles.append(self.model.register_forward_hook(self.leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def part_of(name: str, module: nn.Module) -> str | None:
    """The part that a module of a GPT does, of ours, of nanoGPT's or of transformers'; None where
    it only holds others, which say it themselves."""
    kind = type(module).__name__
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Linear) or kind == "Conv1D":
        return "head and loss" if "head" in name else "linear"
    if "Attention" in kind:
        return "attention"
    whole_model = any(isinstance(m, nn.Embedding) for m in module.modules())
    if whole_model or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return None
    return "norms and elementwise"  # norms, GELU, dropout, and what MLPs and blocks add


# ----------------------------------------------------------------------------- attribution


def read(events: Iterable[Any], config: GPTConfig, rows: int, compiled: bool,
         device: str) -> Found:  # fmt: skip
    """What the profiler's events, with shapes, say of each part.

    Args:
        rows: tokens in a micro-batch.
        compiled: attribute by operators, sizes and names, not by modules.
        device: on "cuda" the time is the kernels', elsewhere the operators'.
    """
    events = list(events)
    on_host = [e for e in events if e.device_type == DeviceType.CPU and not e.is_async]
    ranges = {e.name for e in on_host if e.scope == USER}
    # A range has a shadow on the device, from the first of its kernels to the last.
    kernels = [e for e in events if e.device_type != DeviceType.CPU and e.name not in ranges]
    owner = Owner(on_host, config, rows, compiled)
    found = Found()
    if device == "cuda":
        left: dict[str, float] = {}
        for e in kernels:
            left[e.name] = left.get(e.name, 0.0) + e.time_range.end - e.time_range.start
        for e in on_host:
            for kernel in e.kernels:
                if kernel.name not in ranges:
                    part = owner.of(e) or owner.by_name(kernel.name)
                    found.add(part, kernel.name, kernel.duration)
                    left[kernel.name] = left.get(kernel.name, 0.0) - kernel.duration
        for name, microseconds in left.items():
            if microseconds > 0.5:  # launched by no operator of this thread: the next batch, copied
                part = "data" if "Memcpy HtoD" in name else owner.by_name(name)
                found.add(part, name, microseconds)
        found.busy_ms = union((e.time_range.start, e.time_range.end) for e in kernels) / 1e3
        return found
    for e in on_host:
        if e.name == RANGE + "data":
            found.add("data", "waiting for the next batch", e.self_cpu_time_total)
        elif e.scope != USER and not HOST.search(e.name):
            found.add(owner.of(e), e.name, e.self_cpu_time_total)
    found.busy_ms = sum(found.ms.values())
    return found


def union(spans: Iterable[tuple[float, float]]) -> float:
    """The length of all spans together, what several cover counted once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class Owner:
    """Which part an event belongs to."""

    def __init__(self, events: list[Any], config: GPTConfig, rows: int, compiled: bool) -> None:
        self.compiled, self.rows = compiled, rows
        C, K = config.n_embd, config.kv_heads * config.head_dim
        self.linear = [(C, C + 2 * K), (C, C), (C, 4 * C)]
        self.head = (C, config.vocab_size)
        # The operator that makes an autograd node is the last that begins with its number.
        self.forward: dict[tuple[int, int], Any] = {}
        for e in sorted(events, key=lambda e: e.time_range.start):
            if e.sequence_nr >= 0 and not is_node(e):
                self.forward[e.thread, e.sequence_nr] = e

    def of(self, event: Any) -> str | None:
        """The part, or None."""
        part = self._by_range(event)
        if not self.compiled or part in ("optimizer", "data"):
            return part
        told = (self.by_name(e.name, e.input_shapes) for e in with_parents(event))
        return next((part for part in told if part), None)

    def _by_range(self, event: Any) -> str | None:
        for e in with_parents(event):
            if e.scope == USER and e.name.startswith(RANGE):
                return None if e.name.endswith("unattributed") else e.name.removeprefix(RANGE)
            if is_node(e):
                if "AccumulateGrad" in e.name:
                    return "optimizer"
                made_by = self.forward.get((e.fwd_thread, e.sequence_nr))
                if made_by is not None:
                    return self._by_range(made_by)
                if "GraphRoot" not in e.name:
                    return None
        return None

    def by_name(self, name: str, shapes: list[Any] | None = None) -> str | None:
        """What the name of an operator or a kernel says, and the sizes of a matmul."""
        if ATTENTION.search(name):
            return "attention"
        if name in ("aten::mm", "aten::addmm"):
            return self.by_sizes(shapes or [])
        if name in ("aten::bmm", "aten::baddbmm"):
            return "attention"  # the only batched matmuls
        if LOOKED_UP.match(name):  # what Inductor leaves to PyTorch
            return "embedding" if "embedding" in name else "head and loss"
        if fused := FUSED.search(name):
            if re.search(r"(?<![a-z])(add)?mm(?![a-z])", fused[1]):  # a matmul as a template
                return self.by_sizes(shapes or [])
            return next((p for p, w in WORDS if re.search(w, fused[1])), "norms and elementwise")
        return None

    def by_sizes(self, shapes: list[Any]) -> str | None:
        """The part of a matmul by its three sizes; None where they fit two parts."""
        pairs = [s for s in shapes if len(s) == 2]
        both = next(((a, b) for a, b in pairwise(pairs) if a[1] == b[0]), None)
        if both is None:
            return None
        sizes = sorted((both[0][0], both[0][1], both[1][1]))
        linear = any(sorted((self.rows, *w)) == sizes for w in self.linear)
        rest = Counter(sizes) - Counter(self.head)  # the head takes its rows in chunks
        head = rest.total() == 1 and next(iter(rest)) <= self.rows
        return None if linear == head else "linear" if linear else "head and loss"


def with_parents(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def is_node(event: Any) -> bool:
    return event.scope == BACKWARD or event.name.startswith(ENGINE)
