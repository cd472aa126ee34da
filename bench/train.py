"""Training steps, timed: the mode train, and the workers of converge.

A step is train.train_step; a rival has the step of its own loop. Tokens are random, in converge the
dataset's. Our model computes the gradients of head and loss in the forward pass: compare only whole
steps with other models.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode

import data
from attention.machine.system import kineto, synchronize
from attention.machine.timing import Clock, Stamp
from bench import Json, candidates, hf, machine, parts, tables
from bench.job import Job
from bench.process import Failure
from bench.tables import MEMORY, PASSES, QUARTILES, Column, Row, error, number, percent
from core import flops
from core.optimizer import set_learning_rate
from core.runtime import keep_freed_memory

if TYPE_CHECKING:
    from bench.rounds import Run

TITLE = "Training steps"
PROFILED_STEPS = 3
MOST = 4096  # sequences that --batch_size=auto tries
# Longest sequences of a backend that is not named: the scores fill the memory (manual, math), or a
# loop over tiles launches 10,000 kernels (tiled).
LONGEST = {"manual": 2048, "sdpa_math": 2048, "tiled": 2048}
COMPILED = {**LONGEST, "sdpa_math": 512, "tiled": 256}  # in a compiled step: minutes of compiling
COLUMNS: list[Column] = [
    ("batch", lambda r: str(r["batch_size"])),
    ("tok/s", lambda r: number(r["tokens_per_s"])),
    ("ms/step", lambda r: number(r["ms"])),
    *QUARTILES,
    *PASSES,
    ("mfu", lambda r: percent(r["mfu"])),
    ("causal", lambda r: percent(r["mfu_causal"])),
    MEMORY,
    ("loss diff", lambda r: error(r.get("loss_difference"))),
    ("warm-up s", lambda r: f"{r['setup_s'] + r['warm_up_s']:.1f}"),
    ("compile s", lambda r: f"{r['compile_s']:.1f}" if "compile_s" in r else "-"),
    ("kernel", tables.kernel_names),
]


def specs(run: Run) -> list[Json]:
    """Return fields of the Specs; a backend that supports none is not started."""
    return [{**run.layer, "dropout": run.model.dropout}]


def measure(run: Run) -> None:
    """Training steps of every backend and rival."""
    config, micro = run.config, run.config.gradient_accumulation_steps
    auto = config.batch_size == "auto"
    batch = 1 if config.batch_size == "auto" else config.batch_size
    if auto:
        run.part["reference"] = {"why": "each backend has a batch of its own (--batch_size=auto)"}
    elif not run.part["reference"]:
        try:
            run.part["reference"] = run.ask_once("reference", batch * micro)
        except Failure as e:
            run.part["reference"] = {"why": str(e)}
    everyone = candidates.everyone(run)
    jobs = {name: run.job("train", name, batch, rival) for name, rival in everyone.items()}
    request = {"seconds": config.seconds, "warm_up_steps": config.warm_up_steps, "auto": auto}
    request["profile"] = PROFILED_STEPS if config.profile else 0
    run.measure(jobs, request=request, skip=lambda name, _: too_long(run, name))
    for row in run.part["rows"]:
        if "by" in (found := row.get("profile", {})) and row["status"] == "ok":
            row["profile"] = parts.beside_roofline(run, found, row["batch_size"], micro)


def too_long(run: Run, name: str) -> str:
    """Return why a backend is not measured, or ""."""
    config = run.config
    compiled = run.cuda if config.compile is None else config.compile
    longest = (COMPILED if compiled else LONGEST).get(name, config.block_size)
    if name in config.backends or config.block_size <= longest:
        return ""
    how = "as a compiled step " if compiled else ""
    return f"left out {how}beyond {longest:,} tokens: name it in --backends"


def figures(row: Row, part: Json) -> Json:
    """Compute a row's figures from its rounds; also of converge."""
    model, settings, m = hf.model_of(part), part["settings"], part["machine"]
    batch = row.get("batch_size", settings["batch_size"])
    tokens = batch * settings["gradient_accumulation_steps"] * model.block_size
    found = tables.medians(row)
    peak = flops.Peak(m["peak_tflops"], m["peak_source"], m.get("peak_measured", False))
    rate = tokens / (found["ms"] / 1e3)
    found |= {"tokens_a_step": tokens, **flops.Speed(model, model.block_size, rate, peak).row()}
    if row["compiled"] and "first_step_s" in row:
        found["compile_s"] = max(0.0, row["first_step_s"] - found["ms"] / 1e3)
    reference = part["reference"] if row["mode"] == "train" else {}
    if "loss" in reference and "loss" in row and not model.dropout:
        found["loss_difference"] = row["loss"] - reference["loss"]
        if "gradient_norm" in row:
            norm = reference["gradient_norm"]
            found["gradient_norm_difference"] = (row["gradient_norm"] - norm) / norm
    return found


# --- in the worker ---


def gradient_norm(params: Iterable[Tensor]) -> float:
    grads = [p.grad for p in params if p.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)).float()))


def finite(loss: Tensor) -> None:
    if not math.isfinite(float(loss)):
        raise FloatingPointError(f"the loss became {float(loss)}")


class Reference:
    """Loss, gradient norm and counted FLOPs of the first batch by manual (--hf: eager) in float32,
    one sequence at a time to save memory."""

    def __init__(self, sent: Json) -> None:
        exact = {"dtype": "float32", "tf32": False, "onednn": False, "compile": False}
        job = Job(sent, attention_backend="manual", gradient_checkpointing=False, **exact)
        what = hf.rows_of(["manual"])["manual"] if job.hf else ""
        who = candidates.build(what, job).for_training(job.setup.scaler())
        params = list(who.model.parameters())
        x, y = job.random_tokens(job.config.batch_size)
        specs = hf.specs(who.model, x[:1]) if job.hf else []
        who.loss(x[:1], y[:1])  # probes the backend, which must not be counted

        def addmm(out: object, a: torch.Size, b: torch.Size, out_shape: object, **_: object) -> int:
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
    """Training steps of one backend or rival."""

    def __init__(self, sent: Json) -> None:
        self.converge, rival = sent["job"] == "converge", sent["rival"]
        job = self.job = Job(sent)
        self.config = config = job.config
        self.device, self.setup = job.device, job.setup
        self.clock = Clock(self.device)
        if self.device.type == "cpu" and not rival:  # as train.py does
            keep_freed_memory()
        self.compiled = bool(job.setup.compile)
        scaler = self.scaler = job.setup.scaler()
        self.who = candidates.build(rival, job).for_training(scaler)
        self.micro = config.gradient_accumulation_steps
        self.batch_size = config.batch_size
        n = config.batch_size * self.micro
        self.done = 0  # steps
        if self.converge:
            folder = data.find(config.dataset, config.data_dir)
            tokens = data.load(folder, "train", config.block_size, job.vocab_size)
            self.batches = data.Batches(tokens, config.block_size, n, config.seed, job.device)
        else:
            self.batch = job.random_tokens(n)
        self.about = {"title": self.who.title, "compiled": self.compiled, "dtype": job.dtype}

    def step(self, x: Tensor, y: Tensor, mark: candidates.Mark = lambda part: None) -> Tensor:
        return self.who.step(x, y, self.micro, mark)

    def timed(self, steps: int) -> Json:
        """Return the mean milliseconds of `steps` steps and of their parts, and the losses."""
        numbers = range(self.done, self.done + steps)
        batches = [self.batches.get(n) for n in numbers] if self.converge else [self.batch] * steps
        self.done += steps
        stamps: list[list[Stamp]] = []  # of a step: each forward, backward, update, end
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
            spans_of = {"forward": range(0, last, 2), "backward": range(1, last, 2)}
            for name, places in {**spans_of, "optimizer": [-2]}.items():
                spans = (ms(s[i], s[i + 1]) for s in stamps for i in places)
                answer[f"{name}_ms"] = sum(spans) / steps
        finite(losses[-1])
        if self.converge:
            answer["losses"] = [float(loss) for loss in losses]
        return answer

    def round(self, request: Json) -> Json:
        if request.get("largest"):
            return {"batch_size": self.largest()}
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
        answer: Json = {"batch_size": self.batch_size}
        if request.get("auto"):
            self.batch_size = answer["batch_size"] = request["batch_size"]
            self.batch = self.job.random_tokens(self.batch_size * self.micro)
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
                if math.isfinite(norm):  # else the first scale of float16 was too large
                    answer["gradient_norm"] = norm / self.scaler.get_scale()

        first = self.step(*self.batch, look)
        synchronize(self.device)
        finite(first)
        if self.who.as_reference:
            answer["loss"] = float(first)
        answer["first_step_s"] = time.perf_counter() - began
        machine.reset_peak(self.device)
        for _ in range(request.get("warm_up_steps", 1)):
            self.step(*self.batch)
        self.step_s = self.timed(1)["ms"] / 1e3
        answer["peak_bytes"] = machine.memory(self.device)
        with kineto(self.device.type) as watched:
            self.step(*self.batch)
            synchronize(self.device)
        answer |= parts.kernels_of(watched)
        if request.get("profile") and not request.get("again"):
            answer["profile"] = self.profile(request["profile"])
        machine.reset_peak(self.device)
        return {**candidates.evidence(self.who.chosen()), **answer}

    def largest(self) -> int:
        """Return the largest micro-batch whose step fits into memory."""

        def run(n: int) -> None:
            self.who.step(*self.job.random_tokens(n), 1, lambda part: None)
            synchronize(self.device)

        return machine.largest(run, self.device, MOST)

    def profile(self, steps: int) -> Json:
        """Return ms by part of uncompiled steps of one micro-batch, with batches as in train.py."""
        config, device, who = self.config, self.device, self.who
        if device.type not in ("cuda", "cpu"):
            return {"why": f"the profiler does not support {device.type}"}
        V, n = self.job.vocab_size, self.batch_size
        draw = np.random.default_rng(config.seed)
        tokens = draw.integers(min(V, 2**16), size=(2 * n + 2) * config.block_size, dtype=np.uint16)
        batches = data.Batches(tokens, config.block_size, n, config.seed, device)
        scopes = parts.Scopes(who.model)

        def run(watching: AbstractContextManager[object]) -> float:
            ahead: Any = batches.prefetch(0, steps + 1)
            with closing(ahead):
                x, y = next(ahead)
                who.step(x, y, 1, lambda part: None)  # meanwhile batches are drawn
                with watching:
                    start = self.clock.start()
                    for _ in range(steps):
                        with record_function(parts.RANGE + "data"):
                            x, y = next(ahead)
                        with record_function(parts.RANGE + "head and loss"):
                            who.step(x, y, 1, scopes.mark)
                    return self.clock.ms(start, self.clock.stop())

        watched, compiled = kineto(device.type), who.run
        who.run = who.model
        try:
            plain = run(nullcontext())
            with scopes.modules():
                seen = run(watched)
        except torch.OutOfMemoryError:
            return {"why": "a step without torch.compile does not fit into memory"}
        finally:
            who.run = compiled
        kernels, found = device.type == "cuda", parts.read(watched.events(), device.type)
        if not found.busy_ms:
            return {"why": "the profiler saw no kernel: CUPTI does not work here"}
        gaps = max(0.0, (plain if kernels else seen) - found.busy_ms)
        times = {**found.ms, "gaps": gaps}
        return {
            "steps": steps,
            "by": "modules" + (", not compiled" if self.compiled else ""),
            "of": "kernels" if kernels else "operators",
            "plain_ms": plain / steps,
            "seen_ms": seen / steps,
            "parts": {part: ms / steps for part, ms in times.items()},
            "names": {
                part: [[name, ms / steps] for name, ms in Counter(names).most_common(8)]
                for part, names in found.names.items()
            },
        }
