"""Time of a training step by its parts, from PyTorch's profiler, next to their rooflines.

Hooks put a record_function range around each module; an operator belongs to the innermost range. A
backward operator is linked to its forward one by autograd's sequence number, so the profiled steps
run without torch.compile. Adding gradients over micro-batches counts as optimizer. The rest is the
row "unattributed".

On CUDA the times are of kernels, and `gaps` is the rest of a step without the profiler, which slows
down only the host. On the CPU they are of operators without children; `gaps` is Python's own.

The roofline is the larger of the time of the FLOPs at peak rate and of the bytes at full bandwidth
(Williams, Waterman and Patterson 2009, CACM 52(4)), for perfectly fused kernels. Only a step that
fits into the caches is faster.

N tokens in a step, L layers, C channels, E = H * D = C, K = Hkv * D, V tokens in the vocabulary, P
weights; a: bytes of an activation (2 in half precision, 4 in float32); weights, their gradients and
AdamW's moments are float32. W = C (C + 2 K) + C^2 + 8 C^2: the weights of a layer's matmuls, whose
inputs and outputs together are S = (2 C + 2 K) + 2 C + 5 C + 5 C wide. m: micro-batches in a step.

    part                   FLOPs           bytes
    linear                 6 N L W         L (3 a N S + m W (2 a + 4))
    head and loss          6 N V C         3 a N C + m V C (2 a + 4)
    attention              14 N L C keys   a N L (6 C + 6 K)
    norms and elementwise  -               8 a N C (2 L + 1)
    embedding              -               N C (4 + 2 a) + 8 C min(N, V)
    optimizer              -               28 P, to clip 4 P more, to accumulate 12 P (m - 1) more
    data, gaps             -               -

- linear, head: one matmul forward and two backward. Logits stay on the chip; GELU, biases fused.
- attention: QK^T and PV forward; dV, dP, dQ, dK and QK^T again backward, of 2 C FLOPs per visible
  pair. `keys` is the mean number of keys per query. Exponentials are not counted.
- norms and elementwise: 2 L + 1 norms with the addition before each.
- optimizer: AdamW reads weight, gradient and two moments, and writes all but the gradient.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import record_function

from attention.proof import KERNELS
from bench import Json, hf, tables
from core import flops
from model import GPTConfig

if TYPE_CHECKING:
    from bench.rounds import Run

# --- rooflines ---

ROOFED = ("linear", "head and loss", "attention", "norms and elementwise", "embedding", "optimizer")
PARTS = (*ROOFED, "data", "gaps", "unattributed")


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes of a part in a step."""

    flops: float
    bytes: float

    def ms(self, tflops: float, bandwidth: float) -> float:
        """Return the roofline in ms; bandwidth in bytes per second."""
        return 1e3 * max(self.flops / (tflops * 1e12), self.bytes / bandwidth)

    def limit(self, tflops: float, bandwidth: float) -> str:
        """Return "FLOPs", "bytes", or "-" without work."""
        if not self.flops and not self.bytes:
            return "-"
        return "FLOPs" if self.flops / (tflops * 1e12) > self.bytes / bandwidth else "bytes"


def work(
    config: GPTConfig, sequences: float, micro: int, dtype: str, clip: bool
) -> dict[str, Work]:
    """Return the work by part; `sequences` of a step is fractional with context parallelism."""
    T, L, C, V = config.block_size, config.n_layer, config.n_embd, config.vocab_size
    K, N = config.kv_heads * config.head_dim, sequences * config.block_size
    a = 4 if dtype == "float32" else 2
    made = flops.matrices(config)
    W, S = sum(m * n for m, n, _ in made), sum(m + n for m, n, _ in made)
    P = flops.n_params(config)
    P += T * C if config.position == "learned" else 0
    P += 0 if config.tied else V * C
    keys = sum(flops.mean_keys(T, w) for w in config.windows) / config.n_layer
    found = {
        "linear": Work(6 * N * L * W, L * (3 * a * N * S + micro * W * (2 * a + 4))),
        "head and loss": Work(6 * N * V * C, 3 * a * N * C + micro * V * C * (2 * a + 4)),
        "attention": Work(14 * N * L * C * keys, a * N * L * (6 * C + 6 * K)),
        "norms and elementwise": Work(0, 8 * a * N * C * (2 * L + 1)),
        "embedding": Work(0, N * C * (4 + 2 * a) + 8 * C * min(N, V)),
        "optimizer": Work(0, (28 + 4 * clip + 12 * (micro - 1)) * P),
    }
    return {part: found.get(part, Work(0, 0)) for part in PARTS}


def at_roofline(parts: dict[str, Work], config: GPTConfig, sequences: int, tflops: float,
                bandwidth: float, peak: float) -> Json:  # fmt: skip
    """Return ms, tokens_per_s, mfu and mfu_causal of a step at its roofline.

    `mfu` counts masked keys, so it can exceed 1; then it is None. `tflops` is the rate of matmuls,
    `bandwidth` in bytes per second, `peak` the TFLOP/s that the MFU refers to.
    """
    ms, T = sum(w.ms(tflops, bandwidth) for w in parts.values()), config.block_size
    of = flops.Peak(peak, "the roofline's")
    return {"ms": ms, **flops.Speed(config, T, sequences * T / (ms / 1e3), of).row()}


def beside_roofline(run: Run, found: Json, batch: int, micro: int) -> Json:
    """Add rooflines to a worker's profile of one micro-batch and the update."""
    names = found.get("names", {})
    lines = [{"part": p, "ms": ms, "names": names.get(p, [])} for p, ms in found["parts"].items()]
    made = {k: v for k, v in found.items() if k != "names"} | {"parts": lines}
    return made | computed(made, {"batch_size": batch}, run.content())


def computed(profile: Json, row: Json, part: Json) -> Json:
    """Return what the rates give of a profile, the largest gap first."""
    s, m, config = part["settings"], part["machine"], hf.model_of(part)
    works = work(config, row["batch_size"], 1, m["dtype"], bool(s["grad_clip"]))
    known = None if s["bandwidth_gbs"] else flops.datasheet_bandwidth(m["name"])
    bandwidth, source = known or (m["bandwidth"], m["bandwidth_source"])
    products, peak = s["products_tflops"] or m["products_tflops"], m["peak_tflops"]
    measured = {line["part"]: line for line in profile["parts"]}
    total = sum(line["ms"] for line in measured.values())
    lines = []
    for part_, w in works.items():
        ms, least = measured.get(part_, {"ms": 0.0})["ms"], w.ms(peak, bandwidth)
        if ms or least:
            line = {"part": part_, "ms": ms, "share": ms / total, "roofline_ms": least}
            # Less than its roofline: attributed to another part, or read from a cache.
            line |= {"times": ms / least if least and ms >= least else None, "over_ms": ms - least}
            line["limit"] = w.limit(peak, bandwidth)
            lines.append({**line, "names": measured.get(part_, {}).get("names", [])})
    lines.sort(key=lambda line: -line["over_ms"])
    made: Json = {"parts": lines, "ms": total, "bandwidth": bandwidth, "bandwidth_source": source}
    made |= {"products_tflops": products, "micro_batches": s["gradient_accumulation_steps"]}
    for name, rate in (("ceiling", peak), ("reachable", products)):
        if rate:
            made[name] = at_roofline(works, config, row["batch_size"], rate, bandwidth, peak)
    return made


def title(backend: str, found: Json) -> str:
    of = found.get("micro_batches", 1)
    whole = f"One of {of} micro-batches, and the update," if of > 1 else "A step"
    return (
        f"{whole} of {backend} by parts, from {found['by']} ({found['seen_ms']:,.4g} ms under the "
        f"profiler, {found['plain_ms']:,.4g} without)"
    )


def table(found: Json, of: str = "") -> tables.Cells:
    """Return the parts of a step and their sum; `of` as in tables.cells()."""
    head = ["part", "ms", "share", "roofline ms", "times", "over ms", "limit"]
    number, lines = tables.number, []
    for i, p in enumerate(found["parts"]):
        cells = [p["part"], number(p["ms"]), tables.percent(p["share"]), number(p["roofline_ms"])]
        over = number(p["over_ms"]) + (" (largest gap)" if i == 0 else "")
        lines.append([*cells, number(p["times"]), over, p["limit"]])
    sums = [("the step", "ceiling")]
    if "reachable" in found:
        sums.append((f"with matmuls at {found['products_tflops']:,.4g} TFLOP/s", "reachable"))
    for name, rate in sums:
        least, ms = found[rate]["ms"], found["ms"]
        times = number(ms / least if ms >= least else None)
        at_best = f"at best {flops.in_words(found[rate])}"
        numbers = [number(ms), "100.0%", number(least), times, number(ms - least)]
        lines.append([name, *numbers, at_best])
    return [tables.marked(name, of) for name in head], lines


# --- the profile ---

# In the names of attention kernels: flash_fwd_kernel, fmha_cutlassF_bf16,
# cudnn_generated_fort_native_sdpa, triton_tem_fused_flex_attention,
# nanoattn::flash_forward, dkdv_kernel
ATTENTION = re.compile(r"flash|fmha|sdpa|attention|attn|flex|dq_kernel|dkdv", re.I)
RANGE = "part of a step: "
ENGINE = "autograd::engine::evaluate_function: "
BACKWARD, USER = 1, 7  # at::RecordScope


def kernels_of(watched: torch.profiler.profile) -> dict[str, list[str]]:
    """Return the attention kernels that ran: short names, operators, device kernels."""
    ran = watched.key_averages()
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
