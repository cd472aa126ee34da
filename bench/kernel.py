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

from attention import Resolution
from attention.machine.system import synchronize
from attention.machine.timing import Clock, Stamp, time_call
from attention.select import select
from attention.spec import Spec
from attention.truth import Inputs, truth
from bench import Json, machine, parts, rivals, tables
from bench.candidates import LONGEST, Bench, Candidate, Plan
from bench.tables import Row
from core.flops import Peak, mean_keys

Call = Callable[[list[Stamp]], tuple[Tensor, ...]]
LONGEST_CHECKED = 8192  # tokens
SURE = 0.1  # seconds above which launches do not matter
MOST_CALLS = 1000


def plans(bench: Bench, points: Sequence[Json] = ()) -> list[Plan]:
    longest = {n: LONGEST[n] for n in (bench.slow if bench.config.lengths else LONGEST)}
    skip = partial(too_long, bench.config.slowest_step)
    who, points = rivals.candidates(bench), points or grid(bench)
    return [Plan(Kernels, who, bench.config.rounds, points, spec_of, longest, skip)]


def spec_of(point: Json) -> Json:
    sizes = {"n_head": point["H"], "n_kv_head": point["Hkv"], "head_dim": point["D"]}
    return {**sizes, "window": point["window"]}


def grid(bench: Bench) -> list[Json]:
    config, model = bench.config, bench.model
    lengths = config.lengths or ([512 * 2**i for i in range(7)] if bench.cuda else (128, 512, 2048))
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


def too_long(most: float, row: Row, rows: Sequence[Row]) -> str:
    point = row["point"]
    for other in (r for r in rows if r["backend"] == row["backend"] and r["rounds"]):
        took, at = min(r["ms"] for r in other["rounds"]) / 1e3, other["point"]
        wait = took * flops_of(point, True) / flops_of(at, True)
        same = bool(at["window"]) == bool(point["window"])
        if same and took >= SURE and wait > most:
            return f"a call would take {wait:.2g} s, as at {tables.where(at)} (--slowest_step)"
    return ""


def flops_of(point: Json, causal: bool) -> float:
    """FLOPs of a forward call; a backward has twice as many."""
    B, T, H, D, window = (point[name] for name in ("B", "T", "H", "D", "window"))
    return 4 * B * H * D * T * (mean_keys(T, window) if causal else T)


def figures(row: Row, part: Json) -> Json:
    peak = Peak(part["machine"]["peak_tflops"], part["machine"]["peak_source"])
    s = row["ms"] / 1e3
    causal, full = (3 * flops_of(row["point"], c) / s / 1e12 for c in (True, False))
    found: Json = {"tflops_causal": causal, "tflops_full": full, "share": causal / peak.tflops}
    if found["share"] > 1:
        found |= {"share": None, "share_why": f"above the peak of {peak}"}
    return found


MODE = tables.Mode(
    title="Attention alone, forward and backward",
    columns="B, T, H, D, window, fwd ms, bwd ms, both ms, quartiles, rounds, TFLOP/s, full, of peak"
    ", memory, err out, err grad",
    notes="TFLOP/s: of the visible pairs; full: of all pairs; err: largest error over the largest "
    f"value, against float64; {tables.EXPLAINED}",
    board="TFLOP/s, of peak, both ms, quartiles",
    plans=plans,
    figures=figures,
    warm_up=" after a call, and another in each round",
)


# --- in the worker ---


class Kernels:
    def __init__(self, who: Candidate) -> None:
        self.who, self.device, self.clock = who, who.device, Clock(who.device)
        self.kernels: dict[Spec, Json] = {}

    def prepare(self, request: Json) -> tuple[Call, Inputs, Spec, Resolution]:
        who, B, T = self.who, request["B"], request["T"]
        spec = Spec(**spec_of(request), dtype=who.dtype)
        chosen = select(who.name, spec, self.device, who.config.policy)
        backend = chosen.backend  # perhaps a prebuilt one
        draw = torch.Generator(self.device).manual_seed(who.config.seed)
        how: Json = {"generator": draw, "device": self.device}
        heads = (spec.n_head, spec.n_kv_head, spec.n_kv_head, spec.n_head)
        made = (torch.randn(B, T, h, spec.head_dim, **how).to(who.setup.dtype) for h in heads)
        q, k, v, dout = made
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
            proof = {"kernels": list(chosen.kernels), "proof": chosen.proof}
            self.kernels[spec] = parts.kernels_of(lambda: call([]), self.device) | proof
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
        seconds = self.who.bench.config.seconds / 5
        calls = min(max(round(seconds / max(took, 1e-6)), 1), MOST_CALLS)
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
        # Of a single key the gradients of scores are 0.
        off.append(float(difference.abs().max() / (true.abs().max() or 1.0)))
        if not math.isfinite(off[-1]):
            raise FloatingPointError("its output or gradient is not finite")
    return off[0], max(off[1:])
