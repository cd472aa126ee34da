"""Time of a training step by classes of kernels, from PyTorch's profiler; on CPUs of operators and
Inductor's kernels. Other operators are "elementwise", unknown kernels "other"."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from attention.machine.system import kineto, synchronize
from core.files import replacing
from core.settings import UserError

log = logging.getLogger("nanoattn")

UPDATE = "optimizer step"  # the range around core.optimizer.update()
USER_SCOPE = 7  # at::RecordScope of record_function

PATTERNS = {  # the first match
    "communication": r"nccl|gloo:|c10d|FSDP::|all_?reduce|all_?gather|reduce_?scatter",
    # Clipping, update, adding gradients over micro-batches.
    "optimizer": rf"{UPDATE}|Optimizer\.|AccumulateGrad|multi_tensor_apply|_foreach_|_fused_adam",
    # And manual's batched products and softmax.
    "attention": r"flash|fmha|sdpa|attention|attn_|flex|^forward_kernel|dq_kernel|dkdv"
                 r"|cudnn::fusion|aten::(badd)?bmm|(?-i:(?<!log)_softmax(?!_online))",
    "products": r"aten::(add)?mm_?$|nanoattn::linear|mkl|gemm|gemv|nvjet|cutlass|xmma|cublas"
                r"|splitk|triton_(tem|mm)",
    "loss": r"cross_?entropy|nll_?loss|log_?softmax|softmax_online|logsumexp",
}  # fmt: skip
RULES = {name: re.compile(text, re.IGNORECASE | re.MULTILINE) for name, text in PATTERNS.items()}
FUSED = re.compile(r"(triton_(poi|red|per)|cpp)_fused_")  # named after its operators
MANUAL = re.compile(r"\A.*_fused_.*(?<!log)_softmax(?!_online)")
FUSED_RULES = RULES | {"attention": MANUAL}
del FUSED_RULES["products"]
OPERATOR = re.compile(r"^\w+::\w+$|at::native|elementwise|Memcpy DtoD|Memset")


def class_of(name: str, around: Iterable[str] = ()) -> str:
    """Class of a kernel; `around`: names of what it ran in."""
    names = "\n".join([name, *around])
    fused = FUSED.search(name)
    for kind, rule in (FUSED_RULES if fused else RULES).items():
        if rule.search(names):
            return kind
    return "elementwise" if fused or OPERATOR.search(name) else "other"


@dataclass
class StepProfile:
    of: str  # "kernels", or "operators" on the CPU
    trace: Path | None = None
    ms: float = 0.0  # of the step under the profiler
    busy_ms: float = 0.0  # of the device, or of operators
    kernels: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)

    @property
    def classes(self) -> dict[str, float]:
        """Milliseconds by class and of gaps, largest first."""
        times = {c: sum(ms for ms, _ in k.values()) for c, k in self.kernels.items()}
        times["gaps"] = max(0.0, self.ms - self.busy_ms)
        return dict(sorted(times.items(), key=lambda item: -item[1]))

    def largest(self, kind: str, n: int = 3) -> list[tuple[str, float, int]]:
        """(name, ms, calls) of a class's longest kernels."""
        found = sorted(self.kernels.get(kind, {}).items(), key=lambda item: -item[1][0])
        return [(name, ms, calls) for name, (ms, calls) in found[:n]]

    def row(self) -> dict[str, Any]:
        largest = {kind: self.largest(kind, 8) for kind in self.kernels}
        return {"of": self.of, "ms": self.ms, "busy_ms": self.busy_ms, "classes": self.classes,
                "names": largest}  # fmt: skip

    def lines(self) -> list[str]:
        lines = [f"{'class':40} {'ms':>9} {'share':>7} {'calls':>6}"]
        for kind, ms in self.classes.items():
            calls = sum(n for _, n in self.kernels.get(kind, {}).values())
            lines.append(f"{kind:40} {ms:9.3f} {ms / self.ms:7.1%} {calls or '-':>6}")
            for name, ms, calls in self.largest(kind):
                lines.append(f"  {short(name):38} {ms:9.3f} {ms / self.ms:7.1%} {calls:6}")
        return lines


def short(name: str, width: int = 38) -> str:
    name = re.sub(r"^void |\(anonymous namespace\)::|at::native::", "", name)
    return name if len(name) <= width else f"{name[: width - 13]}..{name[-11:]}"


def prepare(device: torch.device) -> None:
    """Let a profile show Inductor's CPU kernels. Raises UserError."""
    import torch._inductor.config as inductor

    if device.type not in ("cpu", "cuda"):
        raise UserError(f"profiles need cpu or cuda, got {device.type}")
    inductor.cpp.enable_kernel_profile = True


@contextmanager
def profiled(device: torch.device, steps: int = 1,
             trace: Path | None = None) -> Iterator[StepProfile]:  # fmt: skip
    """Profile a block of `steps` steps, per step."""
    found = StepProfile("kernels" if device.type == "cuda" else "operators", trace)
    synchronize(device)
    with kineto(device.type) as watched:
        began = time.perf_counter()
        yield found
        synchronize(device)
        found.ms = 1e3 * (time.perf_counter() - began) / steps
    add_events(found, list(watched.events() or ()), steps)
    try:
        if trace is not None:
            with replacing(trace) as file:
                watched.export_chrome_trace(str(file))
    except OSError as e:
        log.warning("%s could not be written (%s)", trace, e)
        found.trace = None


def add_events(found: StepProfile, events: list[FunctionEvent], steps: int) -> None:
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)  # (class, name) -> us

    def add(name: str, around: Iterable[str], microseconds: float) -> None:
        samples[class_of(name, around), name].append(microseconds)

    on_host = [e for e in events if e.device_type == DeviceType.CPU]
    if found.of == "operators":
        for e in on_host:
            if e.is_async and RULES["communication"].search(e.name):  # in a thread of Gloo
                add(e.name, (), e.time_range.elapsed_us())
            elif FUSED.search(e.name) or OPERATOR.search(e.name):
                add(e.name, parents(e), e.self_cpu_time_total)
        busy = sum(map(sum, samples.values()))
    else:
        # A range appears on the device too.
        ranges = {e.name for e in on_host if e.scope == USER_SCOPE}
        kernels = [e for e in events if e.device_type != DeviceType.CPU and e.name not in ranges]
        launched = [(k, e) for e in on_host for k in e.kernels if k.name not in ranges]
        for k, e in launched:
            add(k.name, [e.name, *parents(e)], k.duration)
        alone = Counter(e.name for e in kernels) - Counter(k.name for k, _ in launched)
        for e in kernels:  # without an operator: in a CUDA graph
            if alone[e.name] > 0:
                alone[e.name] -= 1
                add(e.name, (), e.time_range.elapsed_us())
        busy, reached = 0.0, -math.inf  # the union of all spans
        for start, end in sorted((e.time_range.start, e.time_range.end) for e in kernels):
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
    found.busy_ms = busy / 1e3 / steps
    for (kind, name), us in samples.items():
        found.kernels.setdefault(kind, {})[name] = sum(us) / 1e3 / steps, len(us) // steps


def parents(event: FunctionEvent) -> Iterator[str]:
    around = event.cpu_parent
    while around is not None:
        yield around.name
        around = around.cpu_parent
