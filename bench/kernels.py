"""Attention alone, timed and compared with float64: the job "kernel".

FLOPs of a call at (B, T, H, D):

    forward   4 * B * H * D * pairs     QK^T and PV
    backward  8 * B * H * D * pairs     dV, dP, dQ and dK, without recomputing the scores

with pairs = the visible pairs of query and key ("causal"), or T * T ("full"). Caches are warm: a
round repeats the call on the same tensors. The error is max|x - x64| / max|x64| of the output and
of the worst gradient, with x64 from manual in float64 on the same rounded inputs, for the first
sequence and the first key/value head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import attention
from attention import manual
from attention.machine.system import synchronize
from attention.select import select
from attention.spec import Spec
from bench import Json, machine
from bench.job import Job
from bench.profiling import kernels_of, profiler
from core.flops import mean_keys

Call = Callable[[list[machine.Stamp]], tuple[Tensor, ...]]
LONGEST_CHECKED = 8192  # float64 scores of one head of one sequence: 0.5 GB, several times


def flops_of(point: Json, causal: bool) -> float:
    """Return the FLOPs of a forward call; a backward has twice as many."""
    B, T, H, D, window = (point[name] for name in ("B", "T", "H", "D", "window"))
    return 4 * B * H * D * T * (mean_keys(T, window) if causal else T)


class Kernels:
    """Calls of one backend at the points of the grid."""

    def __init__(self, told: Json) -> None:
        self.job, self.name = Job(told), told["name"]
        self.config, self.device = self.job.config, self.job.device
        self.clock = machine.Clock(self.device)
        self.backend = attention.get(self.name)
        self.about = {"title": self.backend.title}
        self.kernels: dict[Spec, Json] = {}  # what ran, and how exact it was

    def tensors(self, point: Json) -> list[Tensor]:
        """Return q, k, v and the output's gradient, (B, T, H or Hkv, D), equal for all backends."""
        B, T, H, Hkv, D = (point[name] for name in ("B", "T", "H", "Hkv", "D"))
        draw = torch.Generator(self.device).manual_seed(self.config.seed)
        made = [
            torch.randn(B, T, h, D, generator=draw, device=self.device).to(self.job.setup.dtype)
            for h in (H, Hkv, Hkv, H)
        ]
        for t in made[:3]:
            t.requires_grad_()
        return made

    def round(self, request: Json) -> Json:
        heads = (request["H"], request["Hkv"], request["D"])
        spec = Spec(*heads, self.job.dtype, window=request["window"])
        q, k, v, dout = self.tensors(request)
        clock = self.clock

        def call(stamps: list[machine.Stamp]) -> tuple[Tensor, ...]:
            stamps.append(clock.stamp())
            out = self.backend.attend(q, k, v, spec)
            stamps.append(clock.stamp())
            grads = torch.autograd.grad(out, (q, k, v), dout)
            stamps.append(clock.stamp())
            return out.detach(), *grads

        if request.get("warm_up"):
            return self.warm_up(request, spec, (q, k, v, dout), call)
        calls = self.fill(call, request["seconds"])
        stamps: list[machine.Stamp] = []
        start = clock.start()
        for _ in range(calls):
            call(stamps)
        ms = clock.ms(start, clock.stop()) / calls
        shape = dict(zip(("B", "T", "H", "D"), q.shape)) | {"Hkv": k.shape[2]}  # as executed
        answer: Json = {"ms": ms, "calls": calls, "shape": shape}
        if clock.apart:
            pairs = zip(stamps[0::3], stamps[1::3], strict=True)
            answer["forward_ms"] = sum(clock.ms(a, b) for a, b in pairs) / calls
            answer["backward_ms"] = ms - answer["forward_ms"]
        return answer

    def fill(self, call: Call, seconds: float) -> int:
        """Return the number of calls that fill the time, 1000 at most.

        On CUDA the first call allocates memory: slow, so time others, for a tenth of the time.
        """

        def ms(n: int) -> float:
            start = self.clock.start()
            for _ in range(n):
                call([])
            return max(self.clock.ms(start, self.clock.stop()), 1e-3)

        n, took = 1, ms(1)
        if took < 1e3 * seconds:
            took = ms(1)
            while took < 100 * seconds and n < 1000:
                n *= 2
                took = ms(n)
        return min(max(round(1e3 * seconds * n / took), 1), 1000)

    def warm_up(self, point: Json, spec: Spec, inputs: tuple[Tensor, ...], call: Call) -> Json:
        if spec not in self.kernels:
            chosen = select(self.name, spec, self.device, self.config.policy)
            self.backend = chosen.backend  # a prebuilt one, if that is allowed
            with profiler(self.device) as looking:
                call([])
                synchronize(self.device)
            proof = {"kernels": list(chosen.kernels), "proof": chosen.proof}
            self.kernels[spec] = kernels_of(looking) | proof
        got = call([])
        answer: Json = dict(self.kernels[spec])
        if point["T"] <= LONGEST_CHECKED:
            answer["error_out"], answer["error_grad"] = errors(got, inputs, spec)
        del got
        known = machine.reset_peak(self.device)
        before = machine.memory(self.device, peak=False)
        start = self.clock.start()
        call([])
        answer["call_s"] = self.clock.ms(start, self.clock.stop()) / 1e3  # for the plan
        answer["point"] = {name: point[name] for name in ("B", "T", "H", "D", "window")}
        if known:
            answer["memory_bytes"] = max(0, machine.memory(self.device) - before)
        return answer


def errors(got: tuple[Tensor, ...], inputs: tuple[Tensor, ...], spec: Spec) -> tuple[float, float]:
    """Return the errors of the output and of the worst gradient."""
    group = spec.n_head // spec.n_kv_head
    heads = (group, 1, 1, group)  # of the first key/value head: q, k, v, dout
    on = torch.device("cpu") if inputs[0].device.type == "mps" else inputs[0].device
    q, k, v, dout = (
        t.detach()[:1, :, :h].to(on).double().requires_grad_()
        for t, h in zip(inputs, heads, strict=True)
    )
    exact = replace(spec, n_head=group, n_kv_head=1, dtype="float64")
    out = manual.attend(q, k, v, exact)
    truth = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))
    off = []
    for mine, true, h in zip(got, truth, (group, group, 1, 1), strict=True):
        difference = mine[:1, :, :h].to(on).double() - true
        off.append(float(difference.abs().max() / true.abs().max()))
    return off[0], max(off[1:])
