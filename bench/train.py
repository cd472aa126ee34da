"""The mode train: training steps on random tokens, by train.train_step or a rival's own loop."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attention.machine.system import synchronize
from attention.machine.timing import Clock, Stamp
from bench import Json, candidates, machine, parts, tables
from bench.candidates import Job
from bench.job import LONGEST, Bench, Plan
from bench.tables import Row
from core import flops, profile
from core.runtime import keep_freed_memory

PROFILED_STEPS = 3
MOST = 4096  # sequences tried by --batch_size=auto
COMPILED = {**LONGEST, "sdpa_math": 512, "tiled": 256}  # minutes of compiling


def plans(bench: Bench) -> list[Plan]:
    config, micro = bench.config, bench.config.gradient_accumulation_steps
    batch = 1 if bench.auto else config.batch_size
    jobs = {name: bench.job(name, who, batch) for name, who in bench.candidates().items()}
    why = "each backend has a batch of its own (--batch_size=auto)"
    how = {**steps(bench), "reference": why if bench.auto else bench.job(batch_size=batch * micro)}
    return [Plan(Training, jobs, config.rounds, one_process=bench.compiled, **how)]


def steps(bench: Bench) -> Json:
    longest = COMPILED if bench.compiled else LONGEST
    spec = {**bench.layer, "dropout": bench.model.dropout}
    return {"spec": lambda point: spec, "longest": {name: longest[name] for name in bench.slow}}


def figures(row: Row, part: Json) -> Json:
    model, settings, m = parts.model_of(part), part["settings"], part["machine"]
    batch = row.get("batch_size", settings["batch_size"])
    tokens = batch * settings["gradient_accumulation_steps"] * model.block_size
    peak = flops.Peak(m["peak_tflops"], m["peak_source"])
    speed = flops.Speed(model, model.block_size, tokens / (row["ms"] / 1e3), peak)
    found = {"tokens_a_step": tokens, **speed.row()}
    if row["compiled"] and "first_step_s" in row:
        found["compile_s"] = max(0.0, row["first_step_s"] - row["ms"] / 1e3)
    reference = part["reference"] if row["mode"] == "train" and not model.dropout else {}
    if "loss" in reference and "loss" in row:
        found["loss_difference"] = row["loss"] - reference["loss"]
        if "gradient_norm" in row:
            norm = reference["gradient_norm"]
            found["gradient_norm_difference"] = (row["gradient_norm"] - norm) / norm
    return found


MODE = tables.Mode(
    title="Training steps",
    columns="batch, tok/s, ms/step, quartiles, rounds, fwd ms, bwd ms, mfu, causal, memory, "
    "loss diff, warm-up s, compile s, kernel",
    notes="mfu: 6 N + 12 L H Q T FLOPs a token over the peak; causal: visible pairs only; "
    f"loss diff: from manual in float32; {tables.EXPLAINED}",
    board="tok/s, ms/step, quartiles, mfu, causal",
    plans=plans,
    figures=figures,
    warm_up=" after a first step and {} more",
)


# --- in the worker ---


class Training:
    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.config
        self.device, self.settings = job.device, job.settings
        self.micro, self.compiled = job.config.gradient_accumulation_steps, bool(job.setup.compile)
        self.clock, self.profiled = Clock(self.device), getattr(job.settings, "profile", False)
        if self.device.type == "cpu" and job.kind is candidates.Ours:  # as train.py does
            keep_freed_memory()
        if self.profiled and self.compiled and self.device.type == "cpu":
            profile.prepare(self.device)
        self.who = job.kind(job)
        self.who.for_training()
        self.as_reference = job.kind is candidates.Ours or bool(job.hf)  # its weights
        self.step_ms = math.inf
        self.about = {"compiled": self.compiled, "dtype": job.dtype}

    def step(self, x: Tensor, y: Tensor, mark: candidates.Mark = lambda part: None) -> Tensor:
        return self.who.step(x, y, self.micro, mark)

    def timed(self, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Json, list[Tensor]]:
        """Mean milliseconds of steps and parts, and losses."""
        stamps: list[list[Stamp]] = []  # of a step: forward, backward, ..., update, end
        losses, steps, ms = [], len(batches), self.clock.ms
        start = self.clock.start()
        for x, y in batches:
            stamps.append([])
            losses.append(self.step(x, y, lambda _: stamps[-1].append(self.clock.stamp())))
        answer: Json = {"ms": ms(start, self.clock.stop()) / steps, "steps": steps}
        B, T = batches[-1][0].shape
        answer["shape"] = {"B": B, "T": T, "parameters": self.who.parameters}
        n = 2 * self.micro
        places_of = {"forward": range(0, n, 2), "backward": range(1, n, 2), "optimizer": [-2]}
        for name, places in places_of.items() if self.clock.apart else ():
            spans = (ms(s[i], s[i + 1]) for s in stamps for i in places)
            answer[f"{name}_ms"] = sum(spans) / steps
        finite(losses[-1])
        return answer, losses

    def round(self, request: Json) -> Json:
        self.step(*self.batch)  # memory was freed, and a GPU's clock may be low
        steps = max(1, round(1e3 * self.settings.seconds / self.step_ms))
        answer, _ = self.timed([self.batch] * steps)
        self.step_ms = min(self.step_ms, answer["ms"])  # others warmed up at the same time
        answer["peak_bytes"] = machine.memory(self.device)
        if self.profiled and request["first"]:
            answer["about"] = {"profile": self.profile(answer["ms"])}
        return answer

    def warm_up(self, request: Json) -> Json:
        n = request["batch_size"] or self.config.batch_size
        self.batch = self.job.random_tokens(n * self.micro)
        answer: Json = {"batch_size": n}
        began = time.perf_counter()

        def look(part: str) -> None:
            if part == "update" and self.as_reference:
                norm = self.who.gradient_norm()
                if math.isfinite(norm):  # else float16's first scale was too large
                    answer["gradient_norm"] = norm / self.who.scaler.get_scale()

        loss = finite(self.step(*self.batch, look))
        answer |= {"loss": loss} if self.as_reference else {}
        answer["first_step_s"] = time.perf_counter() - began
        machine.reset_peak(self.device)
        warm_up_steps = 1 + self.settings.warm_up_steps
        self.step_ms = self.timed([self.batch] * warm_up_steps)[0]["ms"]
        answer["peak_bytes"] = machine.memory(self.device)
        ran = parts.kernels_of(lambda: self.step(*self.batch), self.device)
        machine.reset_peak(self.device)
        return {**self.who.evidence(), **answer, **ran}

    def largest(self, request: Json) -> Json:
        def fits(n: int) -> None:
            self.who.step(*self.job.random_tokens(n), 1, lambda part: None)
            synchronize(self.device)

        return {"batch_size": machine.largest(fits, self.device, MOST)}

    def profile(self, plain_ms: float) -> Json:
        if self.device.type not in ("cuda", "cpu"):
            return {"why": f"the profiler does not support {self.device.type}"}
        with profile.profiled(self.device, PROFILED_STEPS) as found:
            for _ in range(PROFILED_STEPS):
                self.step(*self.batch)
        machine.reset_peak(self.device)
        if not found.busy_ms:
            return {"why": "the profiler saw no kernel: CUPTI does not work here"}
        row: dict[str, Any] = found.row()
        if self.device.type == "cuda":
            row["classes"]["gaps"] = max(0.0, plain_ms - found.busy_ms)
        return {**row, "steps": PROFILED_STEPS, "plain_ms": plain_ms}


def finite(loss: Tensor) -> float:
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss became {float(loss)}")
    return float(loss)
