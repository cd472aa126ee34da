"""The mode train: training steps on random tokens, by train.train_step or a rival's own loop.
Compare whole steps: our forward pass includes gradients of head and loss."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attention.machine.system import kineto, synchronize
from attention.machine.timing import Clock, Stamp
from bench import Json, candidates, hf, machine, parts, tables
from bench.candidates import Job
from bench.job import LONGEST, Bench, Plan
from bench.settings import Train
from bench.tables import MEMORY, PASSES, QUARTILES, Column, Row, error, number, percent
from core import flops, profile
from core.runtime import keep_freed_memory

PROFILED_STEPS = 3
MOST = 4096  # sequences tried by --batch_size=auto
COMPILED = {**LONGEST, "sdpa_math": 512, "tiled": 256}  # minutes of compiling


def plans(bench: Bench[Train]) -> list[Plan]:
    config, micro = bench.config, bench.config.gradient_accumulation_steps
    batch = 1 if config.batch_size == "auto" else config.batch_size
    jobs = {name: bench.job(name, batch, rival) for name, rival in bench.candidates().items()}
    reference = bench.job(batch_size=batch * micro)
    if bench.auto:
        reference = {"why": "each backend has a batch of its own (--batch_size=auto)"}
    how = {**steps(bench), "one_process": bench.compiled, "reference": reference}
    return [Plan("bench.train:Training", jobs, config.rounds, **how)]


def steps(bench: Bench[Any]) -> Json:
    longest = COMPILED if bench.compiled else LONGEST
    specs = [{**bench.layer, "dropout": bench.model.dropout}]
    return {"specs": specs, "longest": {name: longest[name] for name in bench.slow}}


def figures(row: Row, part: Json) -> Json:
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


MODE = tables.Mode(
    title="Training steps",
    columns=[
        Column("batch", "batch_size"),
        Column("tok/s", "tokens_per_s", number),
        Column("ms/step", "ms", number),
        *QUARTILES,
        *PASSES,
        Column("mfu", "mfu", percent),
        Column("causal", "mfu_causal", percent),
        MEMORY,
        Column("loss diff", "loss_difference", error),
        Column("warm-up s", lambda r: r["setup_s"] + r["warm_up_s"], "{:.1f}".format),
        Column("compile s", "compile_s", "{:.1f}".format),
        Column("kernel", tables.kernel_names),
    ],
    notes="mfu: 6 N + 12 L H Q T FLOPs a token over the peak; causal: visible pairs only; "
    f"loss diff: from manual in float32; {tables.EXPLAINED}",
    board=("tok/s", "ms/step", "quartiles", "mfu", "causal"),
    plans=plans,
    figures=figures,
    warm_up=" after a first step and {} more",
)


# --- in the worker ---


class Training:
    def __init__(self, sent: Json) -> None:
        job = self.job = Job(sent)
        self.config, self.device, self.setup = job.config, job.device, job.setup
        self.micro, self.settings = job.config.gradient_accumulation_steps, sent["settings"]
        self.clock, self.compiled = Clock(self.device), bool(job.setup.compile)
        self.profiled = self.settings.get("profile", False)
        if self.device.type == "cpu" and not sent["rival"]:  # as train.py does
            keep_freed_memory()
        if self.profiled and self.compiled and self.device.type == "cpu":
            profile.prepare(self.device)
        self.scaler = job.setup.scaler()
        self.who = candidates.build(sent["rival"], job).for_training(self.scaler)
        self.step_ms = math.inf
        self.about = {"title": self.who.title, "compiled": self.compiled, "dtype": job.dtype}

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
        if self.clock.apart:
            last = 2 * self.micro
            spans_of = {"forward": range(0, last, 2), "backward": range(1, last, 2)}
            for name, places in {**spans_of, "optimizer": [-2]}.items():
                spans = (ms(s[i], s[i + 1]) for s in stamps for i in places)
                answer[f"{name}_ms"] = sum(spans) / steps
        finite(losses[-1])
        return answer, losses

    def round(self, request: Json) -> Json:
        self.step(*self.batch)  # memory was freed, and a GPU's clock may be low
        steps = max(1, round(1e3 * self.settings["seconds"] / self.step_ms))
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
            if part == "update" and self.who.as_reference:
                norm = self.who.gradient_norm()
                if math.isfinite(norm):  # else float16's first scale was too large
                    answer["gradient_norm"] = norm / self.scaler.get_scale()

        first = self.step(*self.batch, look)
        synchronize(self.device)
        finite(first)
        if self.who.as_reference:
            answer["loss"] = float(first)
        answer["first_step_s"] = time.perf_counter() - began
        machine.reset_peak(self.device)
        self.step_ms = self.timed([self.batch] * (1 + self.settings["warm_up_steps"]))[0]["ms"]
        answer["peak_bytes"] = machine.memory(self.device)
        with kineto(self.device.type) as watched:
            self.step(*self.batch)
            synchronize(self.device)
        answer |= parts.kernels_of(watched)
        machine.reset_peak(self.device)
        return {**self.who.evidence(), **answer}

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


def finite(loss: Tensor) -> None:
    if not math.isfinite(float(loss)):
        raise FloatingPointError(f"the loss became {float(loss)}")
