"""The mode train: training steps on random tokens, by train.train_step or a rival's own loop."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from torch import Tensor

from attention.machine.system import synchronize
from attention.machine.timing import Clock, Stamp
from bench import Json, machine, parts, rivals, tables
from bench.candidates import LONGEST, Bench, Candidate, Mark, Ours, Plan
from bench.settings import varied
from bench.tables import Row
from core import flops, profile
from core.runtime import keep_freed_memory

PROFILED_STEPS = 3
MOST = 4096  # sequences tried by --batch_size=auto
COMPILED = {**LONGEST, "sdpa_math": 512, "tiled": 256}  # minutes of compiling


def plans(bench: Bench) -> list[Plan]:
    config, batch, how = bench.config, 1 if bench.auto else bench.config.batch_size, steps(bench)
    whole = Ours(bench, batch_size=batch * config.gradient_accumulation_steps)
    who = rivals.candidates(bench, batch_size=batch)
    ours = [(name, one) for name, one in who.items() if isinstance(one, Ours)]
    who |= {f"{n} with {word}": one.but(**varied(word)) for word in config.vary for n, one in ours}
    return [Plan(Training, who, config.rounds, reference=None if bench.auto else whole, **how)]


def steps(bench: Bench) -> Json:
    compiled = bench.cuda if bench.config.compile is None else bench.config.compile
    longest = {name: (COMPILED if compiled else LONGEST)[name] for name in bench.slow}
    spec = {**bench.layer, "dropout": bench.model.dropout}
    found: Json = {"points": [{}], "spec": lambda _: spec, "longest": longest, "most": MOST}
    return found | {"one_process": compiled}


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
    f"loss diff: from manual (--hf: eager) in float32; {tables.EXPLAINED}",
    board="tok/s, ms/step, quartiles, mfu, causal",
    plans=plans,
    figures=figures,
    warm_up=" after a first step and {} more",
)


# --- in the worker ---


class Training:
    def __init__(self, who: Candidate) -> None:
        self.who, self.device, self.settings = who, who.device, who.bench.config
        self.micro, self.clock = who.config.gradient_accumulation_steps, Clock(who.device)
        self.compiled = bool(who.setup.compile)
        self.profiled = getattr(self.settings, "profile", False)
        cpu, ours = self.device.type == "cpu", isinstance(who, Ours)
        self.keeps = cpu and ours
        if cpu and self.profiled and self.compiled:
            profile.prepare(self.device)
        who.for_training()
        self.as_reference = ours or bool(who.bench.hf)  # its weights
        self.step_ms = math.inf

    def step(self, x: Tensor, y: Tensor, mark: Mark = lambda part: None) -> Tensor:
        return self.who.step(x, y, self.micro, mark)

    def timed(self, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Json, list[Tensor]]:
        """Mean milliseconds of steps and parts, peak memory, and losses."""
        if self.keeps:  # as train.py does
            keep_freed_memory()
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
        return answer | {"peak_bytes": machine.memory(self.device)}, losses

    def round(self, request: Json) -> Json:
        self.step(*self.batch)  # memory was freed, and a GPU's clock may be low
        steps = max(1, round(1e3 * self.settings.seconds / self.step_ms))
        answer, _ = self.timed([self.batch] * steps)
        self.step_ms = min(self.step_ms, answer["ms"])  # others warmed up at the same time
        if self.profiled and request["first"]:
            answer["about"] = {"profile": self.profile(answer["ms"])}
        return answer

    def warm_up(self, request: Json) -> Json:
        n = request.get("B", self.who.config.batch_size)
        self.batch = self.who.random_tokens(n * self.micro)
        answer: Json = {"compiled": self.compiled, "batch_size": n}
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
        found, _ = self.timed([self.batch] * (1 + self.settings.warm_up_steps))
        self.step_ms = found["ms"]
        ran = parts.kernels_of(lambda: self.step(*self.batch), self.device)
        machine.reset_peak(self.device)
        chosen = self.who.evidence(self.who.chosen())
        return {**chosen, **answer, **ran, "peak_bytes": found["peak_bytes"]}

    def fits(self, request: Json) -> Json:
        self.who.step(*self.who.random_tokens(request["B"]), 1, lambda part: None)
        synchronize(self.device)
        return {}

    def profile(self, plain_ms: float) -> Json:
        if self.device.type not in ("cuda", "cpu"):
            return {"why": f"the profiler does not support {self.device.type}"}
        with profile.profiled(self.device, PROFILED_STEPS) as found:
            for _ in range(PROFILED_STEPS):
                self.step(*self.batch)
        machine.reset_peak(self.device)
        if not found.busy_ms:
            return {"why": "the profiler saw no kernel: CUPTI does not work here"}
        row: Json = found.row()
        if self.device.type == "cuda":
            row["classes"]["gaps"] = max(0.0, plain_ms - found.busy_ms)
        return {**row, "steps": PROFILED_STEPS, "plain_ms": plain_ms}


def finite(loss: Tensor) -> float:
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss became {float(loss)}")
    return float(loss)
