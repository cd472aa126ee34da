"""The mode kernel: attention alone, timed and compared with float64.

FLOPs of a call at (B, T, H, D):

    forward   4 * B * H * D * pairs     QK^T and PV
    backward  8 * B * H * D * pairs     dV, dP, dQ and dK, without recomputing the scores

pairs: visible ("causal"), or T * T ("full"). Error: max|x - x64| / max|x64| of the output and of
the worst gradient, for the first sequence and key head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import attention
from attention import Resolution
from attention.machine.system import kineto, synchronize
from attention.machine.timing import Clock, Stamp, time_call
from attention.select import select
from attention.spec import Spec
from attention.truth import Inputs, truth
from bench import Json, machine, parts, tables
from bench.candidates import Job
from bench.job import LONGEST, Bench, Plan
from bench.settings import Kernel
from bench.tables import MEMORY, PASSES, QUARTILES, Column, Row, error, number, percent
from core.flops import Peak, mean_keys

Call = Callable[[list[Stamp]], tuple[Tensor, ...]]
LONGEST_CHECKED = 8192  # tokens
SURE = 0.1  # seconds above which launches do not matter
MOST_CALLS = 1000


def plans(bench: Bench[Kernel], points: Sequence[Json] = ()) -> list[Plan]:
    points = points or grid(bench)
    names = {"H": "n_head", "Hkv": "n_kv_head", "D": "head_dim", "window": "window"}
    specs = [{field: p[name] for name, field in names.items()} for p in points]
    jobs = {name: bench.job(name) for name in bench.candidates()}
    longest = {n: LONGEST[n] for n in (bench.slow if bench.config.lengths else LONGEST)}
    how: Json = {"longest": longest, "skip": partial(too_long, bench)}
    return [Plan("bench.kernel:Kernels", jobs, bench.config.rounds, specs, points, **how)]


def grid(bench: Bench[Kernel]) -> list[Json]:
    config, model = bench.config, bench.model
    usual = tuple(512 * 2**i for i in range(7)) if bench.cuda else (128, 512, 2048)
    lengths = config.lengths or usual
    sizes = config.batch_sizes or (1, 8 if bench.cuda else 4)
    windows = config.windows or tuple(dict.fromkeys(model.windows))
    heads = {"H": model.n_head, "Hkv": model.kv_heads, "D": model.head_dim}
    # Without large batches of long sequences, the slowest.
    most = math.inf if config.lengths and config.batch_sizes else sorted(lengths)[len(lengths) // 2]
    return [
        {"B": B, "T": T, **heads, "window": window}
        for B, T, window in itertools.product(sizes, lengths, windows)
        if min(sizes) == B or most >= T
    ]


def too_long(bench: Bench[Kernel], row: Row, rows: Sequence[Row]) -> str:
    """Reason not to measure a row, or ""."""
    point = row["point"]
    for other in (r for r in rows if r["backend"] == row["backend"] and r["rounds"]):
        took, at = min(r["ms"] for r in other["rounds"]) / 1e3, other["point"]
        wait = took * flops_of(point, True) / flops_of(at, True)
        same = bool(at["window"]) == bool(point["window"])
        if same and took >= SURE and wait > bench.config.slowest_step:
            return f"a call would take {wait:.2g} s, as at {tables.where(at)} (--slowest_step)"
    return ""


def flops_of(point: Json, causal: bool) -> float:
    """FLOPs of a forward call; a backward has twice as many."""
    B, T, H, D, window = (point[name] for name in ("B", "T", "H", "D", "window"))
    return 4 * B * H * D * T * (mean_keys(T, window) if causal else T)


def figures(row: Row, part: Json) -> Json:
    found, m = tables.medians(row), part["machine"]
    for name, causal in (("tflops_causal", True), ("tflops_full", False)):
        found[name] = 3 * flops_of(row["point"], causal) / (found["ms"] / 1e3) / 1e12
    found["share"] = found["tflops_causal"] / m["peak_tflops"]
    if found["share"] > 1:
        peak = Peak(m["peak_tflops"], m["peak_source"])
        found |= {"share": None, "share_why": f"above the peak of {peak}"}
    return found


def heads(row: Row) -> str:
    H, Hkv = row["point"]["H"], row["point"]["Hkv"]
    return f"{H}" if Hkv == H else f"{H} ({Hkv} for keys)"


MODE = tables.Mode(
    title="Attention alone, forward and backward",
    columns=[
        Column("B", lambda r: r["point"]["B"]),
        Column("T", lambda r: r["point"]["T"]),
        Column("H", heads),
        Column("D", lambda r: r["point"]["D"]),
        Column("window", lambda r: r["point"]["window"]),
        *PASSES,
        Column("both ms", "ms", number),
        *QUARTILES,
        Column("TFLOP/s", "tflops_causal", number),
        Column("full", "tflops_full", number),
        Column("of peak", "share", percent),
        MEMORY,
        Column("err out", "error_out", error),
        Column("err grad", "error_grad", error),
    ],
    notes="TFLOP/s: of the visible pairs; full: of all pairs; err: largest error over the largest "
    f"value, against float64; {tables.EXPLAINED}",
    board=("TFLOP/s", "of peak", "both ms", "quartiles"),
    plans=plans,
    figures=figures,
    warm_up=" after a call, and another in each round",
)


# --- in the worker ---


class Kernels:
    def __init__(self, sent: Json) -> None:
        self.job, self.name = Job(sent), sent["name"]
        self.device, self.clock = self.job.device, Clock(self.job.device)
        self.about = {"title": attention.get(self.name).title, "dtype": self.job.dtype}
        self.seconds = sent["settings"]["seconds"] / 5
        self.kernels: dict[Spec, Json] = {}

    def prepare(self, request: Json) -> tuple[Call, Inputs, Spec, Resolution]:
        H, Hkv, D, window = (request[name] for name in ("H", "Hkv", "D", "window"))
        spec = Spec(H, Hkv, D, self.job.dtype, window=window)
        chosen = select(self.name, spec, self.device, self.job.config.policy)
        backend = chosen.backend  # perhaps a prebuilt one
        draw = torch.Generator(self.device).manual_seed(self.job.config.seed)
        q, k, v, dout = (
            torch.randn(request["B"], request["T"], h, spec.head_dim, generator=draw,
                        device=self.device).to(self.job.setup.dtype)
            for h in (spec.n_head, spec.n_kv_head, spec.n_kv_head, spec.n_head)
        )  # fmt: skip
        for t in (q, k, v):
            t.requires_grad_()

        def call(stamps: list[Stamp]) -> tuple[Tensor, ...]:
            stamps.append(self.clock.stamp())
            out = backend.attend(q, k, v, spec)
            stamps.append(self.clock.stamp())
            grads = torch.autograd.grad(out, (q, k, v), dout)
            stamps.append(self.clock.stamp())
            return out.detach(), *grads

        return call, Inputs(q, k, v, dout), spec, chosen

    def warm_up(self, request: Json) -> Json:
        call, inputs, spec, chosen = self.prepare(request)
        if spec not in self.kernels:
            with kineto(self.device.type) as watched:
                call([])
                synchronize(self.device)
            proof = {"kernels": list(chosen.kernels), "proof": chosen.proof}
            self.kernels[spec] = parts.kernels_of(watched) | proof
        answer = dict(self.kernels[spec])
        got = call([])
        if request["T"] <= LONGEST_CHECKED:
            answer["error_out"], answer["error_grad"] = errors(got, inputs, spec)
        del got
        known = machine.reset_peak(self.device)
        before = machine.memory(self.device, peak=False)
        call([])
        synchronize(self.device)
        if known:
            answer["memory_bytes"] = max(0, machine.memory(self.device) - before)
        return answer

    def round(self, request: Json) -> Json:
        call, inputs, *_ = self.prepare(request)
        call([])
        took = time_call(lambda: call([]), self.device)
        calls = min(max(round(self.seconds / max(took, 1e-6)), 1), MOST_CALLS)
        stamps: list[Stamp] = []
        clock, start = self.clock, self.clock.start()
        for _ in range(calls):
            call(stamps)
        ms = clock.ms(start, clock.stop()) / calls
        shape = dict(zip(("B", "T", "H", "D"), inputs.q.shape))
        answer: Json = {"ms": ms, "calls": calls, "shape": shape | {"Hkv": inputs.k.shape[2]}}
        if clock.apart:
            pairs = zip(stamps[0::3], stamps[1::3], strict=True)
            answer["forward_ms"] = sum(clock.ms(a, b) for a, b in pairs) / calls
            answer["backward_ms"] = ms - answer["forward_ms"]
        return answer


def errors(got: Sequence[Tensor], inputs: Inputs, spec: Spec) -> tuple[float, float]:
    group = spec.n_head // spec.n_kv_head
    heads = (group, 1, 1, group)  # of the first key/value head: q, k, v, dout
    first = Inputs(*(t.detach()[:1, :, :h] for t, h in zip(inputs[:4], heads, strict=True)))
    exact = truth(first, replace(spec, n_head=group, n_kv_head=1)).tensors.values()
    off = []
    for mine, true in zip(got, exact, strict=True):
        difference = mine[:1, :, : true.shape[2]].to(true.device).double() - true
        off.append(float(difference.abs().max() / true.abs().max()))
        if not math.isfinite(off[-1]):
            raise FloatingPointError("its output or gradient is not finite")
    return off[0], max(off[1:])
