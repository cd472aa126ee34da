"""Training steps, timed: the jobs "train", "converge" and "reference".

A step is train.train_step; a baseline has the step of its own loop. Tokens are random, in converge
the dataset's. Our model computes the gradients of head and loss in the forward pass: compare only
whole steps with other models.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode

import data
from attention.machine.system import synchronize
from bench import Json, candidates, hf, machine
from bench.job import Job
from bench.profiling import RANGE, Scopes, kernels_of, profiler, read
from core.optimizer import set_learning_rate
from core.runtime import keep_freed_memory


def gradient_norm(params: Iterable[Tensor]) -> float:
    grads = [p.grad for p in params if p.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)).float()))


def finite(loss: Tensor) -> None:
    if not math.isfinite(float(loss)):
        raise FloatingPointError(f"the loss became {float(loss)}")


class Reference:
    """Loss, gradient norm and counted FLOPs of the first batch by manual (--hf: eager) in float32,
    one sequence at a time to save memory."""

    def __init__(self, told: Json) -> None:
        exact = {"dtype": "float32", "tf32": False, "onednn": False, "compile": False}
        job = Job(told, attention_backend="manual", gradient_checkpointing=False, **exact)
        what = hf.rows_of(["manual"])["manual"] if job.hf else ""
        who = candidates.build(what, job).for_training(job.setup.scaler())
        params = list(who.model.parameters())
        x, y = job.random_tokens(job.config.batch_size)
        specs = hf.asked(who.model, x[:1]) if job.hf else []
        who.loss(x[:1], y[:1])  # probes the backend, which must not be counted

        def addmm(out: Any, a: Any, b: Any, out_shape: Any, **kwargs: Any) -> int:
            return 2 * a[0] * a[1] * b[1]  # of shapes

        # torch does not count addmm_, with which the loss adds up the head's gradient
        counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm})
        total = 0.0
        for i in range(len(x)):
            with counter if i == 0 else nullcontext():
                loss = who.loss(x[i : i + 1], y[i : i + 1]) / len(x)
                loss.backward()
            total += float(loss.detach())
        counted = counter.get_total_flops() / job.config.block_size
        self.about = {
            "loss": total,
            "gradient_norm": gradient_norm(params),
            "flops_per_token": counted,
            # counted by the formula (6 N), but not by torch, which counts matmuls only
            "elementwise_parameters": sum(p.numel() for p in params if p.dim() == 1),
        }
        if job.hf:
            self.about["counted"] = asdict(hf.counted(job, who.model, specs, counted))


class Training:
    """Training steps of one backend or baseline."""

    def __init__(self, told: Json) -> None:
        self.converge, baseline = told["job"] == "converge", told["baseline"]
        self.base = machine.memory(torch.device(told["device"]), peak=False)
        job = self.job = Job(told)
        self.config = config = job.config
        self.device, self.setup = job.device, job.setup
        self.clock = machine.Clock(self.device)
        if self.device.type == "cpu" and not baseline:  # as train.py does
            keep_freed_memory()
        self.compiled = bool(job.setup.compile)
        scaler = self.scaler = job.setup.scaler()
        self.who = candidates.build(baseline, job).for_training(scaler)
        self.micro = config.gradient_accumulation_steps
        n = config.batch_size * self.micro
        self.done = 0  # steps
        if self.converge:
            folder = Path(config.data_dir) / config.dataset
            tokens = data.load(folder, "train", config.block_size, job.vocab_size)
            self.batches = data.Batches(tokens, config.block_size, n, config.seed, job.device)
        else:
            self.batch = job.random_tokens(n)
        self.about = {
            "title": self.who.title,
            "compiled": self.compiled,
            "dtype": job.dtype,
            "base_bytes": self.base,
        }

    def step(self, x: Tensor, y: Tensor, mark: candidates.Mark = lambda part: None) -> Tensor:
        return self.who.step(x, y, self.micro, mark)

    def timed(self, steps: int) -> Json:
        """Return the mean milliseconds of `steps` steps and of their parts, and the losses."""
        numbers = range(self.done, self.done + steps)
        batches = [self.batches.get(n) for n in numbers] if self.converge else [self.batch] * steps
        self.done += steps
        stamps: list[list[machine.Stamp]] = []  # of a step: each forward, backward, update, end
        losses = []
        start = self.clock.start()
        for n, (x, y) in zip(numbers, batches, strict=True):
            if self.converge:
                set_learning_rate(self.who.optimizer, n, self.config)
            stamps.append([])
            losses.append(self.step(x, y, lambda _: stamps[-1].append(self.clock.stamp())))
        ms = self.clock.ms
        answer: Json = {"ms": ms(start, self.clock.stop()) / steps, "steps": steps}
        N, (B, T) = candidates.parameters(self.who), x.shape
        answer["shape"] = {"B": B, "T": T, "parameters": N}  # as executed
        if self.clock.apart:
            last = 2 * self.micro
            parts = {"forward": range(0, last, 2), "backward": range(1, last, 2), "optimizer": [-2]}
            for name, places in parts.items():
                spans = (ms(s[i], s[i + 1]) for s in stamps for i in places)
                answer[f"{name}_ms"] = sum(spans) / steps
        finite(losses[-1])
        if self.converge:
            answer["losses"] = [float(loss) for loss in losses]
        return answer

    def round(self, request: Json) -> Json:
        if request.get("warm_up"):
            return self.warm_up(request)
        if "steps" in request:
            answer = self.timed(request["steps"])
        else:
            if self.device.type != "mps":  # memory was freed, a GPU's clock may be low
                self.step(*self.batch)
            answer = self.timed(max(1, round(request["seconds"] / self.step_s)))
        return {**answer, "peak_bytes": machine.memory(self.device)}

    def warm_up(self, request: Json) -> Json:
        """Compile, fill caches, time a step; return the first loss and the kernels' names."""
        answer: Json = {}
        if self.converge:  # every step counts: no step before the first
            if self.compiled:  # compile without an update
                with self.setup.autocast:
                    self.who.loss(*self.batches.get(0)).backward()
                self.who.optimizer.zero_grad(set_to_none=True)
            answer["peak_bytes"] = machine.memory(self.device)
            return answer | candidates.evidence(self.who.chosen())
        began = time.perf_counter()

        def look(part: str) -> None:
            if part == "update" and self.who.as_reference:
                norm = gradient_norm(self.who.model.parameters())
                answer["gradient_norm"] = norm / self.scaler.get_scale()

        first = self.step(*self.batch, look)
        synchronize(self.device)
        if self.who.as_reference:
            answer["loss"] = float(first)
        answer["first_step_s"] = time.perf_counter() - began
        machine.reset_peak(self.device)
        for _ in range(request.get("warm_up_steps", 1)):
            self.step(*self.batch)
        self.step_s = self.timed(1)["ms"] / 1e3
        answer["peak_bytes"] = machine.memory(self.device)
        with profiler(self.device) as looking:
            self.step(*self.batch)
            synchronize(self.device)
        answer |= kernels_of(looking)
        if request.get("profile") and not request.get("again"):
            answer["profile"] = self.profile(request["profile"])
        machine.reset_peak(self.device)
        return {**candidates.evidence(self.who.chosen()), **answer}

    def profile(self, steps: int) -> Json:
        """Return milliseconds by part of steps of one micro-batch, with batches as in train.py.

        The steps are not compiled, so that each operator belongs to a module.
        """
        config, device, who = self.config, self.device, self.who
        if device.type not in ("cuda", "cpu"):
            return {"why": f"the profiler does not support {device.type}"}
        V, n = self.job.vocab_size, config.batch_size
        draw = np.random.default_rng(config.seed)
        tokens = draw.integers(min(V, 2**16), size=(2 * n + 2) * config.block_size, dtype=np.uint16)
        batches = data.Batches(tokens, config.block_size, n, config.seed, device)
        scopes = Scopes(who.model)

        def run(watching: AbstractContextManager[object]) -> float:
            ahead: Any = batches.prefetch(0, steps + 1)
            with closing(ahead):
                x, y = next(ahead)
                who.step(x, y, 1, lambda part: None)  # meanwhile batches are drawn
                with watching:
                    start = self.clock.start()
                    for _ in range(steps):
                        with record_function(RANGE + "data"):
                            x, y = next(ahead)
                        with record_function(RANGE + "head and loss"):
                            who.step(x, y, 1, scopes.mark)
                    return self.clock.ms(start, self.clock.stop())

        looking, compiled = profiler(device), who.run
        who.run = who.model
        try:
            plain = run(nullcontext())
            with scopes.modules():
                seen = run(looking)
        except torch.OutOfMemoryError:
            return {"why": "a step without torch.compile does not fit into memory"}
        finally:
            who.run = compiled
        kernels, found = device.type == "cuda", read(looking.events(), device.type)
        if not found.busy_ms:
            return {"why": "the profiler saw no kernel: CUPTI does not work here"}
        gaps = max(0.0, (plain if kernels else seen) - found.busy_ms)
        parts = {**found.ms, "gaps": gaps}
        return {
            "steps": steps,
            "by": "modules" + (", not compiled" if self.compiled else ""),
            "of": "kernels" if kernels else "operators",
            "plain_ms": plain / steps,
            "seen_ms": seen / steps,
            "parts": {part: ms / steps for part, ms in parts.items()},
            "names": {
                part: [[name, ms / steps] for name, ms in Counter(names).most_common(8)]
                for part, names in found.names.items()
            },
        }
