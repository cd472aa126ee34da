"""Training steps, timed: the jobs "train", "converge" and "reference".

A step is train.py's: forward and backward for each micro-batch, clip, AdamW. In the mode train its
tokens are random, since no kernel's time depends on them, and lie on the device already; in the
mode converge they are the dataset's.

The parts of a step: this project's model takes the gradient of the head and of the loss within its
forward pass (model.py, linear_cross_entropy), so `forward` holds a third of the head's work that in
the rivals' models belongs to `backward`. Only the whole step compares between models; between two
attention backends the parts do too.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import data
import train
from attention import Resolution
from attention.probe import KERNELS
from bench import machine, rivals
from model import GPT
from runtime import (
    allow_tf32,
    dtype_name,
    pick_dtype,
    synchronize,
    why_not_compile,
    why_not_onednn,
)
from settings import Loaded, from_dict
from train import TrainConfig

# What the names of attention kernels have in common: flash_fwd_kernel, fmha_cutlassF_bf16,
# cudnn_generated_fort_native_sdpa, triton_tem_fused_flex_attention
# and this project's own: nanoattn::flash_forward, dkdv_kernel
NAMED = re.compile(r"flash|fmha|sdpa|attention|attn|flex|dq_kernel|dkdv", re.I)


def random_batch(config: TrainConfig, V: int, n: int,
                 device: torch.device) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same n sequences of random tokens for all, and their targets: (n, T) int64 each."""
    draw = torch.Generator().manual_seed(config.seed)
    tokens = torch.randint(V, (n, config.block_size + 1), generator=draw)
    x, y = tokens[:, :-1], tokens[:, 1:]
    return x.contiguous().to(device), y.contiguous().to(device)


def gradient_norm(params: Iterable[Tensor]) -> float:
    grads = [p.grad for p in params if p.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)).float()))


class Reference:
    """Loss and gradient norm by manual in float32 of the batch that all begin with, and its FLOPs
    as torch counts them. One sequence at a time, so that manual needs little memory."""

    def __init__(self, job: dict[str, Any]) -> None:
        config = replace(
            from_dict(TrainConfig, job["train"]),
            attention_backend="manual",
            attention_fallback=False,
            gradient_checkpointing=False,
        )
        device = torch.device(job["device"])
        allow_tf32(False)
        torch.manual_seed(config.seed)
        model = build(config, job["vocab_size"]).to(device)
        params = list(model.parameters())
        x, y = random_batch(config, job["vocab_size"], config.batch_size, device)
        model(x[:1], y[:1])  # the backend's probe is none of the model's work
        # torch knows no addmm_, the in-place form with which the loss sums the head's gradient
        counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_})
        total = 0.0
        for i in range(len(x)):
            with counter if i == 0 else nullcontext():
                loss = model(x[i : i + 1], y[i : i + 1])[1] / len(x)
                loss.backward()
            total += float(loss.detach())
        self.about = {
            "loss": total,
            "gradient_norm": gradient_norm(params),
            "flops_per_token": counter.get_total_flops() / config.block_size,
            # the formula has six operations for them too, torch's counter products only
            "elementwise_parameters": sum(p.numel() for p in params if p.dim() == 1),
        }


def _addmm_(out: Any, a: Any, b: Any, out_shape: Any, **kwargs: Any) -> int:
    return 2 * a[0] * a[1] * b[1]  # they are shapes


def build(config: TrainConfig, vocab_size: int) -> GPT:
    """A new model by train.py, on the CPU."""
    config = replace(config, vocab_size=vocab_size, init_from="scratch")
    return train.build_model(Loaded(config, {}), {"vocab_size": vocab_size, "tokenizer": None})


class Ours:
    """This project's model and optimizer, with the attention backend that was named."""

    def __init__(self, config: TrainConfig, vocab_size: int, device: torch.device,
                 autocast: Any, scaler: Any) -> None:  # fmt: skip
        self.config, self.autocast, self.scaler = config, autocast, scaler
        self.model = build(config, vocab_size).to(device)
        self.optimizer = train.build_optimizer(self.model, config, device)
        self.params = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.model.compiled = why_not_compile(config.compile, device) is None
        with autocast:
            self.chosen: Resolution | None = self.model.attention(
                shape=(config.batch_size, config.block_size)
            )[0]
        dtype = pick_dtype(config.dtype, device)
        self.model.use_onednn(why_not_onednn(config.onednn, device, dtype) is None)
        self.compiled = self.model.compiled
        mode = config.compile_mode
        self.run: Any = torch.compile(self.model, mode=mode) if self.compiled else self.model
        self.bad = torch.zeros((), device=device)
        self.title = self.chosen.backend.title if self.chosen else ""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.run(x, y)[1]

    def update(self, loss: Tensor) -> None:
        clip = self.config.grad_clip
        if self.scaler.is_enabled():
            train.update_scaled(self.optimizer, self.params, loss, clip, self.bad, self.scaler)
        else:
            train.update(self.optimizer, self.params, loss, clip, self.bad)
        self.optimizer.zero_grad(set_to_none=True)


class Training:
    """Steps of one contender: an attention backend of ours, or a rival's model."""

    def __init__(self, job: dict[str, Any]) -> None:
        config = from_dict(TrainConfig, job["train"])
        self.config, self.job = config, job
        device = self.device = torch.device(job["device"])
        self.clock = machine.Clock(device)
        allow_tf32(config.tf32)
        dtype = pick_dtype(config.dtype, device)
        self.autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
        scaler = self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.base = machine.memory(device, peak=False)
        torch.manual_seed(config.seed)
        parts = (config, job["vocab_size"], device, self.autocast, scaler)
        if job["rival"]:
            self.ours = None
            self.who: Any = rivals.build(job["rival"], *parts)
        else:
            self.ours = self.who = Ours(*parts)
        self.micro = config.gradient_accumulation_steps
        n = config.batch_size * self.micro
        self.done = 0  # steps
        if job["job"] == "converge":
            folder = Path(config.data_dir) / config.dataset
            tokens = data.load(folder, "train", config.block_size, job["vocab_size"])
            self.batches = data.Batches(tokens, config.block_size, n, config.seed, device)
        else:
            self.batch = random_batch(config, job["vocab_size"], n, device)
        self.about = {
            "title": self.who.title,
            "compiled": self.who.compiled,
            "dtype": dtype_name(dtype),
            "base_bytes": self.base,
        }

    def step(self, x: Tensor, y: Tensor, stamps: list[Any],
             look: Callable[[], None] = lambda: None) -> Tensor:  # fmt: skip
        """One step of training, as train.py's; the loss, float32 ().

        Args:
            stamps: gets the times between the parts.
            look: called when the gradients are there, before the update.
        """
        loss = torch.zeros((), device=self.device)
        for mx, my in zip(x.chunk(self.micro), y.chunk(self.micro), strict=True):
            stamps.append(self.clock.stamp())
            with self.autocast:
                part = self.who.loss(mx, my) / self.micro
            stamps.append(self.clock.stamp())
            self.scaler.scale(part).backward()
            loss += part.detach()
        look()
        stamps.append(self.clock.stamp())
        self.who.update(loss)
        stamps.append(self.clock.stamp())
        return loss

    def timed(self, steps: int) -> dict[str, Any]:
        """Mean milliseconds of `steps` steps, whole and in parts, and the losses."""
        converge = self.job["job"] == "converge"
        numbers = range(self.done, self.done + steps)
        batches = [self.batches.get(n) for n in numbers] if converge else [self.batch] * steps
        self.done += steps
        stamps: list[list[Any]] = []
        losses = []
        start = self.clock.start()
        for n, (x, y) in zip(numbers, batches, strict=True):
            if converge:
                for group in self.who.optimizer.param_groups:
                    group["lr"] = train.learning_rate(n, self.config)
            stamps.append([])
            losses.append(self.step(x, y, stamps[-1]))
        end = self.clock.stop()
        answer: dict[str, Any] = {"ms": self.clock.ms(start, end) / steps, "steps": steps}
        if self.clock.apart:
            ms = self.clock.ms
            micro = range(0, 2 * self.micro, 2)
            forward = sum(ms(s[i], s[i + 1]) for s in stamps for i in micro)
            backward = sum(ms(s[i + 1], s[i + 2]) for s in stamps for i in micro)
            answer["forward_ms"], answer["backward_ms"] = forward / steps, backward / steps
            answer["optimizer_ms"] = sum(ms(s[-2], s[-1]) for s in stamps) / steps
        if not math.isfinite(float(losses[-1])):
            raise FloatingPointError(f"the loss became {float(losses[-1])}")
        if converge:
            answer["losses"] = [float(loss) for loss in losses]
        return answer

    def round(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("warm_up"):
            return self.warm_up(request)
        if "fits" in request:
            return self.fits(request["fits"])
        if "steps" in request:
            answer = self.timed(request["steps"])
        else:
            if self.device.type == "cuda":  # its memory was given back, its clock may have fallen
                self.step(*self.batch, [])
            answer = self.timed(max(1, round(request["seconds"] / self.step_s)))
        return {**answer, "peak_bytes": machine.memory(self.device)}

    def warm_up(self, request: dict[str, Any]) -> dict[str, Any]:
        """Compile, fill the caches, learn how long a step takes; and look at what may be looked at
        once: the first loss, the memory at half the batch, the kernels' names."""
        answer: dict[str, Any] = {}
        converge = self.job["job"] == "converge"
        began = time.perf_counter()
        if not converge:  # there every step counts, and none comes before the first
            x, y = self.batch
            b = self.config.batch_size
            first = self.step(x, y, [], lambda: answer.update(self.gradients()))
            if self.ours:
                answer["loss"] = float(first)
            synchronize(self.device)
            answer["first_step_s"] = time.perf_counter() - began
            # Two sizes tell what a sequence costs. Not where compiled: another size compiles anew.
            if (
                b > 1
                and self.micro == 1
                and not self.who.compiled
                and machine.reset_peak(self.device)
            ):
                self.step(x[: b // 2], y[: b // 2], [])
                synchronize(self.device)
                answer["half_bytes"], answer["half"] = machine.memory(self.device), b // 2
            machine.reset_peak(self.device)
            for _ in range(request.get("warm_up_steps", 1)):
                self.step(x, y, [])
            self.step_s = self.timed(1)["ms"] / 1e3
            answer["peak_bytes"] = machine.memory(self.device)
            answer |= self.kernels()
            machine.reset_peak(self.device)
        elif self.who.compiled:  # compiling belongs to no step: a pass that leaves no trace
            with self.autocast:
                self.who.loss(*self.batches.get(0)).backward()
            self.who.optimizer.zero_grad(set_to_none=True)
        if self.ours and self.ours.chosen:
            answer.setdefault("kernels", list(self.ours.chosen.kernels))
        answer.setdefault("peak_bytes", machine.memory(self.device))
        return answer

    def gradients(self) -> dict[str, float]:
        if self.ours is None:
            return {}
        return {"gradient_norm": gradient_norm(self.ours.params) / self.scaler.get_scale()}

    def kernels(self) -> dict[str, list[str]]:
        """The attention operators and device kernels that ran in a step, by the profiler."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            self.step(*self.batch, [])
            synchronize(self.device)
        ran = profiler.key_averages()
        named = [e for e in ran if NAMED.search(e.key) and not e.key.startswith("autograd::")]
        on_device = [e.key for e in named if e.device_type != torch.autograd.DeviceType.CPU]
        return {
            "kernels": list(dict.fromkeys(KERNELS[e.key] for e in ran if e.key in KERNELS)),
            "events": [e.key for e in named],
            "device_kernels": on_device,
        }

    def fits(self, batch: int) -> dict[str, Any]:
        """Whether two steps of `batch` sequences go through; the second has all of the memory."""
        x, y = random_batch(self.config, self.job["vocab_size"], batch, self.device)
        small = slice(None) if self.who.compiled else slice(0, 1)  # it only makes AdamW's state
        self.step(x[small], y[small], [])
        machine.reset_peak(self.device)
        start = self.clock.start()
        loss = self.step(x, y, [])
        seconds = self.clock.ms(start, self.clock.stop()) / 1e3
        if not math.isfinite(float(loss)):
            raise FloatingPointError(f"the loss became {float(loss)}")
        return {"seconds": seconds, "peak_bytes": machine.memory(self.device)}
