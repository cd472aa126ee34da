"""Train a GPT: the knobs, the set-up, the loop, the step.

    python train.py config/train_shakespeare_cpu.py
    python train.py config/train_gpt2.py --attention_backend=sdpa
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py --parallel=fsdp

`python train.py --help` lists every knob. A run writes to out_dir: checkpoints (step-N),
metrics.jsonl and loss.png. One step is train_step(), near the end.
"""

from __future__ import annotations

import math
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from core.settings import Loaded, UserError, check_fields, exit_on_user_error, read, read_early

# ----------------------------------------------------------------------------- the knobs

VocabSize = Annotated[int, Field(ge=1, le=2**16)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]


@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT on a prepared dataset (python -m data)."""

    # --- run ---
    out_dir: str = "out/gpt"  # folder for checkpoints, metrics.jsonl and loss.png
    init_from: str = "scratch"  # scratch, resume, gpt2[-xl...], a checkpoint or ckpt.pt
    eval_interval: PositiveInt = 2000  # steps between evaluations; each one also saves a checkpoint
    eval_iters: PositiveInt = 200  # batches in an evaluation, the same ones every time
    eval_on_start: bool = False  # evaluate before the first step too
    eval_only: bool = False  # evaluate, print, and stop
    log_interval: PositiveInt = 10  # steps between log lines
    keep_checkpoints: PositiveInt = 2  # the newest ones that stay, beside the best
    sample_tokens: NonNegativeInt = 0  # tokens of text to generate and print at the end
    wandb_log: bool = False  # log to Weights & Biases too (pip install wandb)
    wandb_project: str = "nanoattn"  # its project name
    wandb_run_name: str = "gpt"  # its run name
    # --- data ---
    dataset: str = "shakespeare_char"  # a folder in data_dir, made by python -m data
    data_dir: str = "data"  # where the prepared datasets lie
    batch_size: PositiveInt = 12  # sequences in a micro-batch, per process: at most
    gradient_accumulation_steps: PositiveInt = 1  # batches of that size in a step, of all together
    # --- model ---
    block_size: PositiveInt = 1024  # context length, tokens
    n_layer: PositiveInt = 12  # blocks
    n_head: PositiveInt = 12  # query heads
    n_kv_head: PositiveInt | None = None  # key/value heads, fewer for grouped queries; none: n_head
    n_embd: PositiveInt = 768  # channels of the residual stream
    dropout: float = 0.0  # probability; 0 is good for pretraining, 0.1 or more for finetuning
    bias: bool = False  # in Linear and LayerNorm; GPT-2 has them, without is a bit better
    gelu: Literal["exact", "tanh"] = "exact"  # GPT-2's checkpoints use tanh
    vocab_size: VocabSize | None = None  # none: the dataset's; beyond 1024 to a multiple of 64
    gradient_checkpointing: bool = False  # recompute each block in backward: less memory, slower
    residual_dtype: Literal["float32", "autocast"] = "float32"  # between blocks; autocast: --dtype
    # --- attention ---
    attention_backend: str = "auto"  # a name from python -m attention, or a file (docs/KERNEL.md)
    attention_window: PositiveInt | None = None  # keys that a query sees, with its own; none: all
    attention_fallback: bool = True  # False: a backend that cannot run here is an error
    attention_hub_kernels: bool = False  # flash_attn_*: download a prebuilt kernel, and run it
    sdpa_flash_impl: Literal["FA2", "FA3", "FA4"] = "FA2"  # PyTorch's own flash kernel: swap it
    allow_mps_sdpa: bool = False  # lift the guard on Apple's Metal
    # --- optimizer ---
    max_iters: PositiveInt = 600000  # steps in all
    learning_rate: PositiveFloat = 6e-4  # the highest, after warm-up
    min_lr: NonNegativeFloat | None = None  # the lowest, at the end; none: learning_rate / 10
    decay_lr: bool = True  # cosine decay after warm-up; False: stay at learning_rate
    warmup_iters: NonNegativeInt = 2000  # steps of linear warm-up
    lr_decay_iters: NonNegativeInt | None = None  # when min_lr is reached; none: max_iters
    weight_decay: NonNegativeFloat = 0.1  # AdamW's, on matrices only
    beta1: Fraction = 0.9  # AdamW
    beta2: Fraction = 0.95  # AdamW
    grad_clip: NonNegativeFloat = 1.0  # largest global gradient norm; 0: no clipping
    # --- many processes (torchrun; docs/SCALE.md) ---
    parallel: Literal["ddp", "fsdp"] = "ddp"  # each has the whole model; or a part of it
    shard_size: PositiveInt | None = None  # fsdp: processes that share one copy; none: all
    context_parallel: PositiveInt = 1  # processes that share each sequence (attention/ring.py)
    async_checkpoint: bool = False  # write checkpoints while the training goes on
    hang_timeout: PositiveFloat = 45.0  # seconds in which nothing moves until all end
    # --- machine ---
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps
    dtype: Dtype = "auto"  # of matrix products; auto: bfloat16 or float16 in hardware
    tf32: bool = True  # float32 products on CUDA in TF32
    compile: bool | None = None  # torch.compile; none: on CUDA where Triton is there
    compile_mode: CompileMode = "default"  # torch.compile's: CUDA graphs, tuned kernels, or both
    onednn: bool | None = None  # CPU: float32 products by oneDNN; none: where faster
    deterministic: bool = False  # the same bits each time, on CUDA at some cost in speed
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1337  # of the weights, the batches and dropout
    peak_tflops: PositiveFloat | None = None  # of one device, for MFU; none: datasheet or measured

    def __post_init__(self) -> None:
        check_fields(self)
        if self.sdpa_flash_impl != "FA2" and self.dropout:
            raise ValueError(f"sdpa_flash_impl={self.sdpa_flash_impl} has no dropout (--dropout=0)")
        if self.shard_size is not None and self.parallel != "fsdp":
            raise ValueError(f"shard_size={self.shard_size} needs --parallel=fsdp")
        self.model(1 if self.vocab_size is None else self.vocab_size)  # checks the sizes

    def model(self, vocab_size: int) -> GPTConfig:
        """The part that is the model's."""
        shared = {f.name: getattr(self, f.name) for f in fields(GPTConfig)}
        return GPTConfig(**{**shared, "vocab_size": vocab_size})

    @property
    def policy(self) -> Policy:
        return Policy(self.attention_fallback, self.attention_hub_kernels, self.allow_mps_sdpa)

    def setup(self, device: torch.device) -> Setup:
        """How the run uses the device."""
        names = ("dtype", "tf32", "compile", "compile_mode", "onednn", "deterministic",
                 "sdpa_flash_impl", "n_embd")  # fmt: skip
        return Setup.of(device, **{name: getattr(self, name) for name in names})


ALIASES = {"attn_implementation": "attention_backend", "attention_deterministic": "deterministic"}

if __name__ == "__main__":  # --help and mistakes are answered before torch takes its seconds
    read_early(TrainConfig, sys.argv[1:], aliases=ALIASES)

import torch
from torch import Tensor

import attention
import checkpoint
import data
from attention import Policy
from core import flops, parallel, runtime
from core.distributed import DistInfo
from core.metrics import Metrics, log_step, not_finite, say_first, say_last
from core.optimizer import build_optimizer, learning_rate, update
from core.restarts import mark_begun
from core.runtime import Setup
from core.watch import WRITING, Watch
from inference.texts import continuation
from model import GPT, GPTConfig

# ----------------------------------------------------------------------------- the set-up


@dataclass
class Run:
    """A run that is ready for its next step."""

    config: TrainConfig
    distributed: DistInfo
    setup: Setup
    meta: dict[str, Any]  # the dataset's
    model: GPT  # what is saved
    module: Any  # what is called: the model itself, compiled, shared between processes
    chosen: attention.Resolution
    optimizer: torch.optim.AdamW
    scaler: torch.amp.GradScaler
    splits: dict[str, Any]  # "train" and "val" -> (N,) uint16 tokens
    peak: flops.Peak
    micro_steps: int  # micro-batches of a process in a step
    step: int = 0  # steps done
    best_loss: float = math.inf  # the lowest validation loss so far
    weight: float = 1.0  # of this process's mean loss: N times its share of a ring's tokens
    peak_from: int = 0  # the step before which the peak is not measured again
    rates: list[float] = field(default_factory=list)  # tokens a second, of each logged interval
    metrics: Metrics | None = None
    saving: checkpoint.Saving | None = None  # the checkpoints that are written in the background

    @property
    def global_batch(self) -> int:
        """Sequences in a step, over all processes and micro-batches."""
        return self.config.batch_size * self.config.gradient_accumulation_steps


def set_up(loaded: Loaded[TrainConfig], distributed: DistInfo) -> Run:
    """Everything before the first step: data, model, optimizer, kernel; and say what will run."""
    config, device, say = loaded.settings, distributed.device, distributed.say
    micro_steps = distributed.micro_steps(config.batch_size, config.gradient_accumulation_steps)
    if device.type == "cpu":
        runtime.keep_freed_memory()
    torch.manual_seed(config.seed)
    setup = config.setup(device)
    config = replace(config, dtype=runtime.dtype_name(setup.dtype))  # type: ignore[arg-type]
    folder, T = Path(config.data_dir) / config.dataset, config.block_size
    meta = data.read_meta(folder)
    model = checkpoint.build_model(loaded, meta)
    if config.parallel == "fsdp":
        parallel.shard(model, distributed, setup, config.shard_size)
    model = setup.place(model)
    ring = model.ring = parallel.ring(distributed, T)
    model.gradient_checkpointing = config.gradient_checkpointing
    model.residual_autocast = config.residual_dtype == "autocast"
    optimizer, scaler = build_optimizer(model, config, device), setup.scaler()
    step, best_loss = 0, math.inf
    if config.init_from == "resume":
        saved = checkpoint.load(checkpoint.latest(config.out_dir))
        training = model, optimizer, scaler
        step, best_loss = checkpoint.restore(saved, *training, config.seed, distributed)
        say(f"resuming {config.out_dir} after step {step}")
    else:
        torch.manual_seed(config.seed + distributed.rank)  # dropout differs between processes
    splits = {s: data.load(folder, s, T, model.config.vocab_size) for s in ("train", "val")}

    with setup.autocast:  # the kernel of each phase is chosen here, before torch.compile
        chosen, _ = model.attention(shape=(config.batch_size, T))
        with torch.no_grad():
            model.eval().attention(shape=(config.batch_size, T))
        model.train()
    peak = flops.peak(device, runtime.dtype_name(setup.dtype), config.peak_tflops)
    module: Any = model  # which FSDP has changed in place
    if config.parallel == "ddp":
        module = parallel.replicate(setup.compiled(model, micro_steps), distributed)
    run = Run(config, distributed, setup, meta, model, module, chosen, optimizer, scaler, splits,
              peak, micro_steps, step, best_loss, ring.weight(T) if ring else 1.0)  # fmt: skip

    say("\n".join([*setup.report(distributed.world_size), parallel.held(model)]))
    say_first(run)
    return run


# ----------------------------------------------------------------------------- the loop


def main(argv: list[str]) -> int:
    loaded = read(TrainConfig, argv, aliases=ALIASES)
    runtime.show_log()
    if loaded.settings.init_from == "resume":
        loaded = checkpoint.resumed(loaded)
    config = loaded.settings
    distributed = DistInfo.join(config.device, config.context_parallel)
    try:
        with Watch(distributed, config.hang_timeout) as watch:
            return train(checkpoint.started_again(loaded, distributed), distributed, watch)
    except attention.BackendUnavailable as e:
        raise UserError(str(e)) from e
    except torch.OutOfMemoryError as e:
        raise UserError(
            f"out of memory ({str(e).splitlines()[0]}); try --batch_size="
            f"{max(1, config.batch_size // 2)} with --gradient_accumulation_steps="
            f"{config.gradient_accumulation_steps * 2}, or --gradient_checkpointing=True"
        ) from e
    finally:
        distributed.leave()


def train(loaded: Loaded[TrainConfig], distributed: DistInfo, watch: Watch) -> int:
    """Train as the settings say; the exit code."""
    distributed.say("\n".join(loaded.report()))
    run = set_up(loaded, distributed)
    config, T, device, say = run.config, run.config.block_size, distributed.device, distributed.say
    if config.eval_only:
        evaluate(run)
        return 0
    if run.step >= config.max_iters:
        say(f"nothing to do: all {config.max_iters} steps are done; --max_iters sets more")
        return 0
    distributed.gather(None)  # all are ready: only now may an earlier run be moved aside
    if distributed.main:
        if run.step == 0 and (moved := checkpoint.set_aside(config.out_dir)):
            say(f"an earlier run's checkpoints and metrics are now in {moved}")
        run.metrics = Metrics(Path(config.out_dir), run.step, config)
    mark_begun(config.out_dir, distributed)
    if config.eval_on_start and run.step == 0:
        evaluate(run)

    stop = runtime.StopSignal()
    found_inf = torch.zeros((), device=device)  # becomes 1 at a loss or gradient that is not finite
    warm_step = run.step + (5 if run.setup.compile else 2)  # the first steps compile and allocate
    val_loss: float | None = None
    batches = data.Batches(run.splits["train"], T, run.global_batch, config.seed, device)
    began, began_step = runtime.now(device), run.step
    for x, y in batches.prefetch(run.step, config.max_iters, *distributed.data):
        mark = partial(watch.mark, run.step + 1)
        lr = learning_rate(run.step, config)
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        weight = run.weight * len(x) * distributed.data_size / run.global_batch
        x, y = parallel.mine(run.model, x, y)
        loss = train_step(run.module, run.optimizer, run.scaler, run.setup.autocast, x, y,
                          run.micro_steps, config.grad_clip, found_inf, mark, weight)  # fmt: skip
        mark("agree")
        run.step += 1
        if run.step == warm_step and run.step % config.log_interval:  # a due line does it too
            began, began_step = runtime.now(device), run.step
        # All processes must come to the same answer: whether to stop, whether a line is overdue.
        # On a GPU no look at found_inf: it would wait for the device.
        due = time.perf_counter() - began > 30 or (device.type == "cpu" and bool(found_inf))
        stopping, overdue = distributed.sum([float(stop.signal is not None), float(due)])
        watch.mark(run.step + 1, "data")
        last = bool(stopping) or run.step == config.max_iters
        logging_now = last or overdue or run.step == 1 or run.step % config.log_interval == 0
        evaluating = run.step == config.max_iters or run.step % config.eval_interval == 0
        if not (logging_now or evaluating):
            continue

        mark("evaluate" if evaluating else "log")  # from here on the device is synchronized
        mean_loss, any_inf = distributed.sum([float(loss), float(found_inf)])
        mean_loss /= distributed.world_size
        per_step = (time.perf_counter() - began) / max(1, run.step - began_step)
        val_loss = evaluate(run) if evaluating and not any_inf else None
        if any_inf or not math.isfinite(mean_loss if val_loss is None else val_loss):
            say(not_finite(run, mean_loss, val_loss, lr), file=sys.stderr)
            mark("finish")
            checkpoint.finish(run)
            return 1
        if logging_now:
            log_step(run, mean_loss, lr, per_step, warm=run.step > warm_step)
        if evaluating or last:
            mark(WRITING)
            checkpoint.finish(run)  # the one before, in a phase that may take long
            mark("checkpoint")
            checkpoint.save_run(run, val_loss)
        if stopping:
            break
        began, began_step = runtime.now(device), run.step

    watch.mark(run.step, "finish")  # which may take long, and once
    checkpoint.finish(run)
    if run.metrics:
        run.metrics.close()
    if run.step < config.max_iters:
        again = f"train.py --init_from=resume --out_dir={shlex.quote(config.out_dir)}"
        say(f"stopped after step {run.step}; to go on: {distributed.launcher} {again}")
        return 128 + (stop.signal or signal.SIGTERM)
    say_last(run, val_loss)
    alone = checkpoint.gathered(run.model) if config.sample_tokens else None
    if alone is not None and distributed.main:
        torch.use_deterministic_algorithms(False)  # on CUDA sampling has no deterministic form
        tokenizer, n = data.from_meta(run.meta["tokenizer"]), config.sample_tokens
        how: Any = {"seed": config.seed, "temperature": 0.8, "top_k": 200}
        text = continuation(alone.eval(), tokenizer, "\n", n, **how)
        say(f"--- {n} tokens of what it has learned ---\n{text.strip()}")
    return 0


def evaluate(run: Run) -> float:
    """Print and log the mean loss on fixed batches of each split; returns the validation loss."""
    config, distributed, device, losses = run.config, run.distributed, run.setup.device, {}
    T, iters, B = config.block_size, config.eval_iters, config.batch_size
    run.model.eval()
    with torch.no_grad(), run.setup.autocast:
        for split, tokens in run.splits.items():
            total, n = torch.zeros((), device=device), 0
            for x, y, counted in data.eval_batches(tokens, T, iters, B, *distributed.data, device):
                total += run.module(*parallel.mine(run.model, x, y))[1] * counted * run.weight
                n += counted
            loss, sequences = distributed.sum([float(total), n])
            losses[split] = loss / sequences
    parallel.reshard(run.model)
    run.model.train()
    train_loss, val_loss = losses["train"], losses["val"]
    distributed.say(f"step {run.step}: train loss {train_loss:.4f}, val loss {val_loss:.4f}")
    if run.metrics and math.isfinite(train_loss + val_loss):
        run.metrics.log(iter=run.step, train_loss=train_loss, val_loss=val_loss)
    return val_loss


# ----------------------------------------------------------------------------- the step


def train_step(
    module: Any,
    optimizer: torch.optim.AdamW,
    scaler: torch.amp.GradScaler,
    autocast: torch.autocast,
    x: Tensor,
    y: Tensor,
    micro_steps: int,
    clip: float,
    found_inf: Tensor,
    mark: Callable[[str], None] = lambda part: None,
    weight: float = 1.0,
) -> Tensor:
    """One step of training: forward and backward of each micro-batch, clip, update.

    Args:
        module: the model, plain, compiled or shared between processes.
        x, y: (micro_steps * B, T) int64, token ids and the token after each.
        clip, found_inf: see update().
        mark: told what begins, "forward", "backward" and "update", and of the "end": for whoever
            measures.
        weight: of this process's mean loss in the average over all processes.

    Returns:
        the mean loss in nats a token, float32 (), perhaps not computed yet: on a GPU nothing here
        waits for the device.
    """
    loss = torch.zeros((), device=x.device)
    micro_batches = zip(x.tensor_split(micro_steps), y.tensor_split(micro_steps), strict=True)
    for i, (mx, my) in enumerate(micro_batches):
        # Gradients are averaged over processes once, in the last micro-step's backward.
        with parallel.no_sync(module) if i < micro_steps - 1 else nullcontext():
            mark("forward")
            with autocast:
                part = module(mx, my)[1] * (weight * len(mx) / len(x))
                # A loss that is not finite gets a gradient that is not: all will see it.
                part = part * torch.where(part.isfinite(), 1.0, torch.nan)
            mark("backward")
            scaler.scale(part).backward()
        loss += part.detach()
    mark("update")
    update(optimizer, scaler, loss, clip, found_inf)
    optimizer.zero_grad(set_to_none=True)
    mark("end")
    return loss


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
