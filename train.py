"""Train a GPT: the knobs, the setup, the loop.

    python train.py config/train_shakespeare_cpu.py
    python train.py config/train_gpt2.py --attention_backend=sdpa
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

`python train.py --help` lists every knob. A run writes to out_dir: checkpoints (step-N),
metrics.jsonl and loss.png.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import attention
import checkpoint
import data
from core import flops
from core.metrics import Metrics
from core.runtime import (
    Stop,
    World,
    allow_tf32,
    describe,
    dtype_name,
    keep_freed_memory,
    peak_memory,
    pick_dtype,
    random_state,
    show_log,
    synchronize,
    why_not_compile,
    why_not_onednn,
)
from core.settings import Loaded, UserError, exit_on_user_error, read
from model import GPT, GPTConfig

# ----------------------------------------------------------------------------- the knobs


@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT on a prepared dataset (python -m data)."""

    # --- run ---
    out_dir: str = "out"  # folder for checkpoints, metrics.jsonl and loss.png
    init_from: str = "scratch"  # scratch, resume, gpt2[-xl...], a checkpoint or ckpt.pt
    eval_interval: int = 2000  # steps between evaluations; each one also saves a checkpoint
    eval_iters: int = 200  # batches in an evaluation, the same ones every time
    eval_on_start: bool = False  # evaluate before the first step too
    eval_only: bool = False  # evaluate, print, and stop
    log_interval: int = 10  # steps between log lines
    keep_checkpoints: int = 2  # the newest ones that stay, beside the best
    sample_tokens: int = 0  # tokens of text to generate and print at the end
    wandb_log: bool = False  # log to Weights & Biases too (pip install wandb)
    wandb_project: str = "nanoattn"  # its project name
    wandb_run_name: str = "gpt"  # its run name
    # --- data ---
    dataset: str = "shakespeare_char"  # a folder in data_dir, made by python -m data
    data_dir: str = "data"  # where the prepared datasets lie
    batch_size: int = 12  # sequences in a micro-batch, per process
    gradient_accumulation_steps: int = 1  # micro-batches in a step, over all processes
    # --- model ---
    block_size: int = 1024  # context length, tokens
    n_layer: int = 12  # blocks
    n_head: int = 12  # query heads
    n_kv_head: int | None = None  # key/value heads, fewer for grouped-query attention; none: n_head
    n_embd: int = 768  # channels of the residual stream
    dropout: float = 0.0  # probability; 0 is good for pretraining, 0.1 or more for finetuning
    bias: bool = False  # in Linear and LayerNorm; GPT-2 has them, without is a bit better
    gelu: Literal["exact", "tanh"] = "exact"  # GPT-2's checkpoints use tanh
    vocab_size: int | None = None  # none: the dataset's; beyond 1024 to a multiple of 64
    gradient_checkpointing: bool = False  # recompute each block in backward: less memory, slower
    residual_dtype: Literal["float32", "autocast"] = "float32"  # between blocks; autocast: --dtype
    # --- attention ---
    attention_backend: str = "auto"  # a name from python -m attention
    attention_window: int | None = None  # keys that a query sees, itself included; none: all
    attention_fallback: bool = True  # False: a backend that cannot run here is an error
    attention_deterministic: bool = False  # its backward gives the same bits each time
    attention_hub_kernels: bool = False  # flash_attn_*: download a prebuilt kernel, and run it
    sdpa_flash_impl: Literal["FA2", "FA3", "FA4"] = "FA2"  # PyTorch's own flash kernel: swap it
    allow_mps_sdpa: bool = False  # lift the guard on Apple's Metal
    # --- optimizer ---
    max_iters: int = 600000  # steps in all
    learning_rate: float = 6e-4  # the highest, after warm-up
    min_lr: float | None = None  # the lowest, at the end; none: learning_rate / 10
    decay_lr: bool = True  # cosine decay after warm-up; False: stay at learning_rate
    warmup_iters: int = 2000  # steps of linear warm-up
    lr_decay_iters: int | None = None  # the step at which min_lr is reached; none: max_iters
    weight_decay: float = 0.1  # AdamW's, on matrices only
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    grad_clip: float = 1.0  # largest global gradient norm; 0: no clipping
    # --- machine ---
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = (
        "auto"  # auto: the GPU's best half, else float32
    )
    tf32: bool = True  # float32 products on CUDA in TF32
    compile: bool | None = None  # torch.compile; none: on CUDA where Triton is there
    compile_mode: Literal[
        "default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"
    ] = "default"  # torch.compile's: CUDA graphs, kernels tuned without them, both
    onednn: bool | None = None  # CPU: float32 products by oneDNN; none: where faster
    keep_freed_memory: bool = True  # CPU: malloc returns nothing to the system meanwhile (glibc)
    seed: int = 1337  # of the weights, the batches and dropout
    peak_tflops: float | None = None  # of one device, for MFU; none: datasheet or measured

    def __post_init__(self) -> None:
        positive = ("eval_interval", "eval_iters", "log_interval", "batch_size", "max_iters",
                    "gradient_accumulation_steps", "keep_checkpoints")  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "peak_tflops"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be more than 0, got {value}")
        for name in ("warmup_iters", "weight_decay", "grad_clip", "sample_tokens", "min_lr",
                     "lr_decay_iters", "seed"):  # fmt: skip
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.vocab_size is not None and self.vocab_size > 2**16:
            raise ValueError(f"vocab_size can be at most 65536, got {self.vocab_size}")
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2**32, got {self.seed}")
        self.model(1 if self.vocab_size is None else self.vocab_size)  # checks the sizes

    def model(self, vocab_size: int) -> GPTConfig:
        """The part that is the model's."""
        mine = asdict(self)
        shared = {f.name: mine[f.name] for f in fields(GPTConfig)}
        return GPTConfig(**{**shared, "vocab_size": vocab_size})


# what weights were made with, and settings cannot change
SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "bias", "gelu", "vocab_size")


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, cosine decay to min_lr, then flat. step counts from 0."""
    low = config.learning_rate / 10 if config.min_lr is None else config.min_lr
    last = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if not config.decay_lr:
        return config.learning_rate
    if step >= last:
        return low
    done = (step - config.warmup_iters) / (last - config.warmup_iters)
    return low + 0.5 * (1 + math.cos(math.pi * done)) * (config.learning_rate - low)


# ----------------------------------------------------------------------------- the setup


def settle(argv: list[str]) -> Loaded[TrainConfig]:
    """The settings of this run. A resumed run starts from its checkpoint's settings; what is given
    on the command line or in a file is changed on top of them.

    Raises:
        UserError: a mistake in them, or no checkpoint to resume from.
    """
    loaded = read(TrainConfig, argv, aliases={"attn_implementation": "attention_backend"})
    if loaded.settings.init_from != "resume":
        return loaded
    saved = checkpoint.load(checkpoint.latest(loaded.settings.out_dir))
    before = saved.train_settings(TrainConfig)
    given = {name: getattr(loaded.settings, name) for name in loaded.origins}
    try:
        merged = replace(before, **{**given, "out_dir": loaded.settings.out_dir})
    except ValueError as e:
        raise UserError(f"{e} (resuming {saved.folder})") from e
    origins = {f.name: str(saved.folder) for f in fields(TrainConfig)} | loaded.origins
    return Loaded(merged, origins)


def build_model(loaded: Loaded[TrainConfig], meta: dict[str, Any]) -> GPT:
    """A new model, or one with the weights that init_from names, on the CPU.

    Args:
        meta: the dataset's meta.json.

    Raises:
        UserError: the weights cannot be had, or do not fit the settings or the dataset.
    """
    config, V = loaded.settings, meta["vocab_size"]
    if config.init_from == "scratch":
        return GPT(config.model(config.vocab_size or (V if V <= 1024 else -(-V // 64) * 64)))
    source = config.init_from
    if source == "resume":
        source = str(checkpoint.latest(config.out_dir))
    runtime = ["dropout", "gradient_checkpointing", "residual_dtype", "attention_backend",
               "attention_fallback", "attention_deterministic", "attention_hub_kernels",
               "sdpa_flash_impl", "allow_mps_sdpa"]  # fmt: skip
    if "attention_window" in loaded.origins:  # else the one that the weights were trained with
        runtime.append("attention_window")
    model = checkpoint.init_model(source, **{name: getattr(config, name) for name in runtime})
    tokenizer = checkpoint.tokenizer_meta(source)
    if model.config.vocab_size < V or tokenizer not in (None, meta["tokenizer"]):
        raise UserError(
            f"{source}, with a vocabulary of {model.config.vocab_size} tokens, was not trained "
            f"with the tokenizer of the dataset {config.dataset!r}, which has {V}; prepare that "
            "with the same one"
        )
    fixed = (*SHAPE, "block_size") if config.init_from == "resume" else SHAPE
    for name in fixed:
        have, want = getattr(model.config, name), getattr(config, name)
        if name == "n_kv_head":
            have, want = model.config.kv_heads, want or model.config.n_head
        if name in loaded.origins and want is not None and want != have:
            raise UserError(
                f"{source} has {name}={have}, which cannot be changed to {want} "
                f"({loaded.origins[name]})"
            )
    if model.config.block_size < config.block_size:
        raise UserError(
            f"--block_size={config.block_size} is longer than the {model.config.block_size} "
            f"tokens of {source}"
        )
    model.crop_block_size(config.block_size)
    return model


def build_optimizer(model: GPT, config: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW, fused on CPU and CUDA, that decays the matrices, but no biases and norm gains."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=device.type in ("cuda", "cpu"),
    )


# ----------------------------------------------------------------------------- the loop


def main(argv: list[str]) -> int:
    loaded = settle(argv)
    config = loaded.settings
    world = World.join(config.device)
    try:
        return train(loaded, world)
    except attention.BackendUnavailable as e:
        raise UserError(str(e)) from e
    except torch.OutOfMemoryError as e:
        raise UserError(
            f"out of memory ({str(e).splitlines()[0]}); try --batch_size="
            f"{max(1, config.batch_size // 2)} with --gradient_accumulation_steps="
            f"{config.gradient_accumulation_steps * 2}, or --gradient_checkpointing=True"
        ) from e
    finally:
        world.leave()


def check_compile_mode(mode: str, device: torch.device, micro_steps: int) -> None:
    """Raises: UserError for CUDA graphs under gradient accumulation.

    The gradients of a micro-batch lie in the graph's own memory, where the next replay writes
    before they are added up (PyTorch issue 169545; torch._inductor.cudagraph_trees raises then).
    """
    graphs = device.type == "cuda" and mode in ("reduce-overhead", "max-autotune")
    if graphs and micro_steps > 1:
        raise UserError(
            f"--compile_mode={mode} takes CUDA graphs, which overwrite the gradients that "
            f"{micro_steps} micro-batches add up; take max-autotune-no-cudagraphs, or "
            "--gradient_accumulation_steps=1"
        )


def train(loaded: Loaded[TrainConfig], world: World) -> int:
    """Train as the settings say; the exit code."""
    config, device = loaded.settings, world.device
    say: Callable[..., None] = print if world.main else lambda *a, **k: None
    show_log()
    for line in loaded.report():
        say(line)
    if config.gradient_accumulation_steps % world.size:
        raise UserError(
            f"gradient_accumulation_steps ({config.gradient_accumulation_steps}) is shared among "
            f"all processes, so it must be a multiple of their number ({world.size})"
        )

    # The model, its optimizer, and where they stand.
    if config.keep_freed_memory and device.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(config.seed)
    allow_tf32(config.tf32)
    dtype = pick_dtype(config.dtype, device)
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
    folder = Path(config.data_dir) / config.dataset
    meta = data.read_meta(folder)
    model = build_model(loaded, meta).to(device)
    optimizer = build_optimizer(model, config, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    step, best_loss, val_loss = 0, math.inf, None
    if config.init_from == "resume":
        step, best_loss = resume(config, optimizer, scaler, world)
        say(f"resuming {config.out_dir} after step {step}")
        if step >= config.max_iters and not config.eval_only:
            say(f"nothing to do: all {config.max_iters} steps are done; --max_iters sets more")
            return 0
    else:
        torch.manual_seed(config.seed + world.rank)  # dropout differs between processes

    # The data: in every step the same sequences for any number of processes.
    T = config.block_size
    splits = {s: data.load(folder, s, T, model.config.vocab_size) for s in ("train", "val")}
    micro_steps = config.gradient_accumulation_steps // world.size  # of this process, in a step
    global_batch = config.batch_size * config.gradient_accumulation_steps
    batches = data.Batches(splits["train"], T, global_batch, config.seed, device)

    # What will run, and how fast it could be.
    no_compile = why_not_compile(config.compile, device)
    model.compiled = no_compile is None
    if model.compiled:
        check_compile_mode(config.compile_mode, device, micro_steps)
    with autocast:
        shape = (config.batch_size, T)
        chosen, _ = model.attention(shape=shape)
        with torch.no_grad():
            model.eval().attention(shape=shape)
        model.train()
    no_onednn = why_not_onednn(config.onednn, device, dtype, model.compiled)
    model.use_onednn(no_onednn is None)
    peak = flops.peak(device, dtype_name(dtype), config.peak_tflops)
    processes = "1 process" if world.size == 1 else f"{world.size} processes"
    say(f"device: {device} ({describe(device)}), {dtype_name(dtype)}, {processes}")
    say(f"model: {model.num_params():,} parameters, {model.num_params(False):,} without positions")
    if device.type == "cpu":
        say(f"oneDNN for float32 products: {'on' if no_onednn is None else f'off ({no_onednn})'}")
    how = f"on (mode {config.compile_mode})"
    say(f"compile: {how if no_compile is None else f'off ({no_compile})'}")
    say(f"peak: {peak}")
    say(f"{global_batch * T:,} tokens a step, {config.max_iters:,} steps")
    run: Any = torch.compile(model, mode=config.compile_mode) if model.compiled else model
    if world.size > 1:
        ids = [device.index] if device.type == "cuda" else None
        run = DistributedDataParallel(run, device_ids=ids, gradient_as_bucket_view=True)

    metrics = None
    if world.main and not config.eval_only:
        if step == 0 and (moved := checkpoint.set_aside(config.out_dir)):
            say(f"an earlier run's checkpoints and metrics are now in {moved}")
        metrics = Metrics(Path(config.out_dir), step, asdict(config), config)

    def evaluate() -> float:
        """Measure the loss of both splits on windows that are always the same; val's."""
        losses = {}
        model.eval()
        with torch.no_grad(), autocast:
            for split, tokens in splits.items():
                total, n = torch.zeros((), device=device), 0
                for x, y in data.eval_batches(
                    tokens, T, config.eval_iters, config.batch_size, world.rank, world.size, device
                ):
                    total += run(x, y)[1] * len(x)
                    n += len(x)
                loss, sequences = world.sum([float(total), n])
                losses[split] = loss / sequences
        model.train()
        say(f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if metrics and math.isfinite(losses["train"] + losses["val"]):
            metrics.log(iter=step, train_loss=losses["train"], val_loss=losses["val"])
        return losses["val"]

    def save(val_loss: float | None) -> None:
        rng = world.gather(random_state(device))  # of every process
        if world.main:
            state = {
                "step": step,
                "val_loss": val_loss,
                "best_val_loss": best_loss if math.isfinite(best_loss) else None,
                "sequences_seen": step * global_batch,  # the data position, derived from step
                "processes": world.size,
                "attention_backend": chosen.backend.name,
                "attention_kernels": list(chosen.kernels),
                "torch": torch.__version__,
            }
            settings = {"train": asdict(config), "model": asdict(model.config)}
            checkpoint.save(
                config.out_dir,
                weights=model.state_dict(),
                optimizer={
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(),
                    "rng": rng,
                },
                settings={**settings, "tokenizer": meta["tokenizer"]},
                state=state,
                keep=config.keep_checkpoints,
            )

    if config.eval_only or (config.eval_on_start and step == 0):
        evaluate()
        if config.eval_only:
            return 0

    stop = Stop()
    bad = torch.zeros((), device=device)  # becomes 1 at a loss or gradient that is not finite
    warm = step + (5 if model.compiled else 2)  # until then steps compile, or touch fresh memory
    timed_seconds, timed_steps = 0.0, 0  # of all log intervals after that
    synchronize(device)
    interval_start, interval_step = time.perf_counter(), step
    for x, y in batches.prefetch(step, config.max_iters, world.rank, world.size):
        lr = learning_rate(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = train_step(
            run, optimizer, scaler, autocast, x, y, micro_steps, config.grad_clip, bad
        )
        step += 1

        if step == warm:
            synchronize(device)
            interval_start, interval_step = time.perf_counter(), step

        stopping = world.any(stop.signal is not None)
        last = stopping or step == config.max_iters
        logging_now = last or step == 1 or step % config.log_interval == 0
        if device.type == "cpu":  # elsewhere a look at `bad` would wait for the device
            logging_now = logging_now or bool(bad)
        evaluating = step == config.max_iters or step % config.eval_interval == 0
        if not (logging_now or evaluating):
            continue

        # From here on the device is synchronized.
        mean_loss, any_bad = world.sum([float(loss) / world.size, float(bad)])
        seconds = time.perf_counter() - interval_start
        val_loss = None
        if not any_bad and evaluating:
            val_loss = evaluate()
        if any_bad or not math.isfinite(mean_loss if val_loss is None else val_loss):
            say(not_finite(step, mean_loss, val_loss, lr, chosen), file=sys.stderr)
            return 1
        if logging_now:
            per_step = seconds / max(1, step - interval_step)
            if step > warm:
                timed_seconds += seconds
                timed_steps += step - interval_step
            speed = Speed(model.config, T, global_batch * T / per_step, peak, world.size)
            row = {"iter": step, "loss": mean_loss, "lr": lr, "mem_bytes": peak_memory(device)}
            if step > warm:
                row |= {"ms": per_step * 1e3, **speed.row()}
            say(log_line(row, speed if step > warm else None), flush=True)
            if metrics:
                metrics.log(**row)
        if val_loss is not None:
            best_loss = min(best_loss, val_loss)
        if evaluating or last:
            save(val_loss)
        if stopping:
            break
        synchronize(device)
        interval_start, interval_step = time.perf_counter(), step

    if metrics:
        metrics.close()
    if step < config.max_iters:
        many = f"torchrun --standalone --nproc_per_node={world.size}"
        say(
            f"stopped after step {step}; to go on: {'python' if world.size == 1 else many} "
            f"train.py --init_from=resume --out_dir={shlex.quote(config.out_dir)}"
        )
        return 128 + (stop.signal or signal.SIGTERM)
    if timed_steps:
        rate = global_batch * T * timed_steps / timed_seconds
        say(f"{Speed(model.config, T, rate, peak, world.size)}; peak: {peak}")
    if "baselines" in meta:
        known = ", ".join(f"{name} model {loss:.2f}" for name, loss in meta["baselines"].items())
        say(f"val loss {val_loss:.4f} nats a token; for comparison: {known}")
    if config.sample_tokens and world.main:
        say(f"--- {config.sample_tokens} tokens of what it has learned ---")
        say(sample(model, meta, config))
    return 0


def train_step(
    run: Any,
    optimizer: torch.optim.AdamW,
    scaler: torch.amp.GradScaler,
    autocast: torch.autocast,
    x: Tensor,
    y: Tensor,
    micro_steps: int,
    clip: float,
    bad: Tensor,
    mark: Callable[[str], None] = lambda part: None,
) -> Tensor:
    """One step of training: forward and backward of each micro-batch, clip, update.

    Args:
        run: the model, plain, compiled or shared between processes.
        x, y: (micro_steps * B, T) int64, token ids and the token after each.
        clip, bad: see update().
        mark: told what begins, "forward", "backward" and "update", and of the "end": for whoever
            measures.

    Returns:
        the mean loss in nats a token, float32 (), perhaps not computed yet: on a GPU nothing here
        waits for the device.
    """
    loss = torch.zeros((), device=x.device)
    for i, (mx, my) in enumerate(zip(x.chunk(micro_steps), y.chunk(micro_steps), strict=True)):
        # Gradients are averaged over processes once, in the last micro-step's backward.
        inner = isinstance(run, DistributedDataParallel) and i < micro_steps - 1
        with run.no_sync() if inner else contextlib.nullcontext():
            mark("forward")
            with autocast:
                part = run(mx, my)[1] / micro_steps
                # A loss that is not finite gets a gradient that is not: all will see it.
                part = part * torch.where(part.isfinite(), 1.0, torch.nan)
            mark("backward")
            scaler.scale(part).backward()
        loss += part.detach()
    mark("update")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if scaler.is_enabled():
        update_scaled(optimizer, params, loss, clip, bad, scaler)
    else:
        update(optimizer, params, loss, clip, bad)
    optimizer.zero_grad(set_to_none=True)
    mark("end")
    return loss


def update(optimizer: torch.optim.AdamW, params: list[Tensor], loss: Tensor, clip: float,
           bad: Tensor) -> None:  # fmt: skip
    """Clip the gradients to the global norm `clip`, and step; not if anything is not finite.

    The fused AdamW takes a factor for the gradients and a flag not to step (they are there for
    torch.amp.GradScaler): clipping then costs no pass over the gradients of its own, and the flag
    is read on the device, so nothing waits for it.

    Args:
        loss: float32 ().
        clip: 0 is no clipping.
        bad: float32 (), set to 1 where the loss or a gradient is not finite, and then for good.
    """
    grads = [p.grad for p in params if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    bad.copy_(torch.maximum(bad, (~(loss.isfinite() & norm.isfinite())).float()))
    divisor = (norm / clip).clamp(min=1.0) if clip else None
    if optimizer.defaults["fused"]:
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = divisor, bad
        optimizer.step()
    elif not bad:
        if divisor is not None:
            torch._foreach_div_(grads, divisor)
        optimizer.step()


def update_scaled(optimizer: torch.optim.AdamW, params: list[Tensor], loss: Tensor, clip: float,
                  bad: Tensor, scaler: torch.amp.GradScaler) -> None:  # fmt: skip
    """update() for float16, where a gradient that is not finite only means a smaller loss scale."""
    scaler.unscale_(optimizer)
    if clip:
        torch.nn.utils.clip_grad_norm_(params, clip)
    bad.copy_(torch.maximum(bad, (~loss.isfinite()).float()))
    scaler.step(optimizer)  # leaves the weights alone where a gradient is not finite
    scaler.update()


@dataclass(frozen=True)
class Speed:
    """Tokens a second, and what share of the peak that is; see core/flops.py."""

    model: GPTConfig
    T: int
    tokens_per_s: float
    peak: flops.Peak
    devices: int

    def row(self) -> dict[str, float]:
        full, causal = flops.mfu(self.model, self.T, self.tokens_per_s, self.peak, self.devices)
        return {"tokens_per_s": self.tokens_per_s, "mfu": full, "mfu_causal": causal}

    def __str__(self) -> str:
        row = self.row()
        of = " of measured peak" if self.peak.source.startswith("measured") else ""
        share = f"mfu {row['mfu']:.1%} (causal {row['mfu_causal']:.1%}){of}"
        return f"{self.tokens_per_s:,.0f} tok/s, {share}"


def not_finite(step: int, loss: float, val_loss: float | None, lr: float,
               chosen: attention.Resolution) -> str:  # fmt: skip
    """What a run says that stops at a loss that is not finite."""
    value = f"loss {loss}" if val_loss is None else f"loss {loss}, val loss {val_loss}"
    return (
        f"error: a loss or gradient became not finite at step {step} or shortly before ({value}, "
        f"lr {lr:.2e}, attention backend {chosen.backend.name}). It reached no checkpoint. Next: "
        "--attention_backend=manual, to see whether the kernel is to blame; --init_from=resume "
        "with a lower --learning_rate, to go on."
    )


def log_line(row: dict[str, Any], speed: Speed | None) -> str:
    """The line of one logged step; speed is None while the run warms up."""
    rate = "warming up" if speed is None else f"{row['ms']:,.1f} ms, {speed}"
    memory = f"mem {row['mem_bytes'] / 1e9:.1f} GB"
    return f"iter {row['iter']}: loss {row['loss']:.4f}, lr {row['lr']:.1e}, {rate}, {memory}"


def resume(config: TrainConfig, optimizer: torch.optim.AdamW, scaler: torch.amp.GradScaler,
           world: World) -> tuple[int, float]:  # fmt: skip
    """Put back the optimizer, the scaler and the random state.

    Returns:
        the steps done and the lowest validation loss so far.
    """
    saved = checkpoint.load(checkpoint.latest(config.out_dir))
    tensors = saved.optimizer()
    groups = [{**g, "params": None} for g in optimizer.param_groups]  # the settings of this run
    optimizer.load_state_dict(tensors["optimizer"])
    for group, now in zip(optimizer.param_groups, groups, strict=True):
        group.update({k: v for k, v in now.items() if k in ("weight_decay", "betas")})
    if scaler.is_enabled() and tensors["scaler"]:
        scaler.load_state_dict(tensors["scaler"])
    if len(tensors["rng"]) == world.size:
        mine = tensors["rng"][world.rank]
        torch.set_rng_state(mine["cpu"])
        if "cuda" in mine and world.device.type == "cuda":
            torch.cuda.set_rng_state(mine["cuda"], world.device)
    else:  # another number of processes: the same data, but dropout cannot go on exactly
        torch.manual_seed(config.seed + 7919 * saved.step + world.rank)
    best = saved.state.get("best_val_loss")
    return saved.step, math.inf if best is None else best


def sample(model: GPT, meta: dict[str, Any], config: TrainConfig) -> str:
    """A little text from the trained model, to see what the loss means."""
    tokenizer = data.from_meta(meta["tokenizer"])
    try:
        ids = tokenizer.encode("\n")
    except UserError:  # a vocabulary of characters without line breaks
        ids = [0]
    device = model.transformer.wte.weight.device
    generator = torch.Generator(device).manual_seed(config.seed)
    idx = torch.tensor([ids], device=device)
    model.eval()
    out = model.generate(idx, config.sample_tokens, temperature=0.8, top_k=200, generator=generator,
                         vocab_size=tokenizer.vocab_size)  # fmt: skip
    return tokenizer.decode(out[0].tolist()).strip()


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
