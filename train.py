"""Train a GPT: the knobs, the setup, the loop.

    python train.py config/train_shakespeare_cpu.py
    python train.py config/train_gpt2.py --attention_backend=sdpa
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

`python train.py --help` lists every knob. A run writes to out_dir: checkpoints (step-N), metrics.jsonl
and loss.png.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import cpu_matmul
import data
import flops
from attention.spec import cpu_name
from metrics import Metrics
from model import GPT, GPTConfig
from settings import Loaded, UserError, exit_on_user_error, read

# ----------------------------------------------------------------------------- the knobs


@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT on a prepared dataset (python -m data)."""

    # --- run ---
    out_dir: str = "out"  # folder for checkpoints, metrics.jsonl and loss.png
    init_from: str = "scratch"  # scratch, resume, gpt2[-medium|-large|-xl], a checkpoint folder or ckpt.pt
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
    bias: bool = False  # biases in Linear and LayerNorm; GPT-2 has them, without is a bit better
    gelu: Literal["exact", "tanh"] = "exact"  # GPT-2's checkpoints use tanh
    vocab_size: int | None = None  # none: the dataset's, rounded up to a multiple of 64 if over 1024
    gradient_checkpointing: bool = False  # recompute each block in backward: less memory, slower
    # --- attention ---
    attention_backend: str = "auto"  # a name from python -m attention
    attention_window: int | None = None  # keys that a query sees, itself included; none: all
    attention_fallback: bool = True  # False: a backend that cannot run here is an error
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
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: the GPU's best half, else float32
    tf32: bool = True  # float32 products on CUDA in TF32
    compile: bool | None = None  # torch.compile; none: on CUDA where Triton is there
    onednn: bool | None = None  # float32 products on the CPU by oneDNN; none: where faster and as exact
    seed: int = 1337  # of the weights, the batches and dropout
    peak_tflops: float | None = None  # peak rate of one device for MFU; none: datasheet or measured

    def __post_init__(self) -> None:
        positive = ("eval_interval", "eval_iters", "log_interval", "batch_size", "max_iters",
                    "gradient_accumulation_steps", "keep_checkpoints")  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "peak_tflops"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be more than 0, got {value}")
        for name in ("warmup_iters", "weight_decay", "grad_clip", "sample_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.vocab_size is not None and self.vocab_size > 2**16:
            raise ValueError(f"vocab_size can be at most 65536, got {self.vocab_size}")
        self.model(self.vocab_size or 1)  # checks the sizes

    def model(self, vocab_size: int) -> GPTConfig:
        """The part that is the model's."""
        mine = asdict(self)
        shared = {f.name: mine[f.name] for f in fields(GPTConfig)}
        return GPTConfig(**{**shared, "vocab_size": vocab_size})


# what a checkpoint's model was made with, and cannot change when it is resumed
SHAPE = ("block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "bias", "gelu", "vocab_size")


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


@dataclass(frozen=True)
class World:
    """This process among all: plain `python` is a world of one, `torchrun` makes it larger."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    control: Any = None  # a gloo group: agreeing on the CPU never waits for the GPU

    @classmethod
    def join(cls, wanted: str) -> World:
        device = pick_device(wanted)
        if "RANK" not in os.environ:
            return cls(device=device)
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            if device.index >= torch.cuda.device_count():
                raise UserError(
                    f"{os.environ['LOCAL_WORLD_SIZE']} processes need as many GPUs, here are "
                    f"{torch.cuda.device_count()}; lower --nproc_per_node"
                )
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        control = dist.new_group(backend="gloo")
        return cls(dist.get_rank(), dist.get_world_size(), device, control)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """The element-wise sum over all processes."""
        if self.size == 1:
            return values
        t = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(t, group=self.control)
        return t.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in order of rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values


def pick_device(wanted: str) -> torch.device:
    """"auto" or a device's name -> a device that is there.

    Raises:
        UserError: it is not there.
    """  # fmt: skip
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if wanted == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    here = ["cpu"] + ["mps"] * mps + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if wanted not in here and not (wanted == "cuda" and cuda):
        raise UserError(f"there is no device {wanted!r} here; there is {', '.join(here)}")
    return torch.device(wanted)


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The dtype of the matrix products; "auto" is bfloat16 on a GPU that has it in hardware."""
    if wanted != "auto":
        return getattr(torch, wanted)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def why_not_compile(wanted: bool | None, device: torch.device) -> str | None:
    """Why the model will not be compiled; None: it will be."""
    if wanted is False:
        return "--compile=False"
    if device.type == "cuda" and find_spec("triton") is None:
        return "package 'triton' is not installed (pip install triton)"
    if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        return "there is no C++ compiler on this machine"
    if wanted is None and device.type != "cuda":
        return f"it pays on long runs only; --compile=True turns it on for the {device.type}"
    return None


def why_not_onednn(wanted: bool | None, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why oneDNN will not take the float32 products; None: it will. See cpu_matmul.py."""
    if wanted is False:
        return "--onednn=False"
    if device.type != "cpu" or dtype != torch.float32:
        return f"it is for float32 on the CPU, this is {dtype_name(dtype)} on {device.type}"
    return None if wanted else cpu_matmul.why_not()


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
    before = saved.settings["train"]
    for name in SHAPE:
        if name in loaded.origins and getattr(loaded.settings, name) != before[name]:
            raise UserError(
                f"the model in {saved.folder} has {name}={before[name]}, it cannot be resumed with "
                f"{getattr(loaded.settings, name)} ({loaded.origins[name]})"
            )
    given = {name: getattr(loaded.settings, name) for name in loaded.origins}
    try:
        merged = TrainConfig(**{**before, **given})
    except (TypeError, ValueError) as e:
        raise UserError(f"the settings in {saved.folder} do not fit this version: {e}") from e
    origins = {name: str(saved.folder) for name in before} | loaded.origins
    return Loaded(merged, origins)


def build_model(config: TrainConfig, vocab_size: int) -> GPT:
    """A new model, or one with the weights that init_from names, on the CPU.

    Args:
        vocab_size: the dataset's.
    """
    if config.init_from == "scratch":
        rounded = vocab_size if vocab_size <= 1024 else -(-vocab_size // 64) * 64
        return GPT(config.model(config.vocab_size or rounded))
    runtime = ("dropout", "gradient_checkpointing", "attention_backend", "attention_window",
               "attention_fallback", "allow_mps_sdpa")  # fmt: skip
    changes = {name: getattr(config, name) for name in runtime}
    if config.init_from == "resume":
        saved = checkpoint.load(checkpoint.latest(config.out_dir))
        return saved.model(**changes)
    model = checkpoint.init_model(config.init_from, **changes)
    if model.config.block_size < config.block_size:
        raise UserError(
            f"--block_size={config.block_size} is longer than the {model.config.block_size} tokens of "
            f"{config.init_from}"
        )
    model.crop_block_size(config.block_size)
    if model.config.vocab_size < vocab_size:
        raise UserError(
            f"{config.init_from} has a vocabulary of {model.config.vocab_size} tokens, the dataset "
            f"{config.dataset!r} one of {vocab_size}; prepare it with the same tokenizer"
        )
    return model


def build_optimizer(model: GPT, config: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW that decays the matrices, but no biases and norm gains; one fused kernel on CPU and CUDA."""
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


def peak_memory(device: torch.device) -> int:
    """The most memory in use so far, bytes: the GPU's, or this process's on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class Stop:
    """Notes SIGTERM and Ctrl-C, so that the loop can end between steps; a second one ends at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        for s in (signal.SIGTERM, signal.SIGINT):
            signal.signal(s, self._note)

    def _note(self, signum: int, frame: Any) -> None:
        self.signal = signum
        for s in (signal.SIGTERM, signal.SIGINT):
            signal.signal(s, signal.SIG_DFL)
        os.write(2, b"\nstopping after this step; once more stops at once\n")


# ----------------------------------------------------------------------------- the loop


def main(argv: list[str]) -> int:
    loaded = settle(argv)
    config = loaded.settings
    world = World.join(config.device)
    try:
        return train(loaded, config, world)
    except torch.OutOfMemoryError as e:
        raise UserError(
            f"out of memory ({str(e).splitlines()[0]}); try --batch_size={max(1, config.batch_size // 2)} "
            f"with --gradient_accumulation_steps={config.gradient_accumulation_steps * 2}, or "
            "--gradient_checkpointing=True"
        ) from e
    finally:
        if world.size > 1:
            dist.destroy_process_group()


def train(loaded: Loaded[TrainConfig], config: TrainConfig, world: World) -> int:
    device = world.device
    show_log()
    say: Callable[..., None] = print if world.main else lambda *a, **k: None
    if config.gradient_accumulation_steps % world.size:
        raise UserError(
            f"gradient_accumulation_steps ({config.gradient_accumulation_steps}) is shared among all "
            f"processes, so it must be a multiple of their number ({world.size})"
        )
    for line in loaded.report():
        say(line)
    out_dir = Path(config.out_dir)

    folder = Path(config.data_dir) / config.dataset
    meta = data.read_meta(folder)
    T = config.block_size

    # Model.
    torch.manual_seed(config.seed)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
        torch.backends.cudnn.allow_tf32 = config.tf32
    dtype = pick_dtype(config.dtype, device)
    model = build_model(config, meta["vocab_size"]).to(device)
    optimizer = build_optimizer(model, config, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    autocast = (
        contextlib.nullcontext()
        if dtype == torch.float32
        else torch.autocast(device_type=device.type, dtype=dtype)
    )
    step, best_loss = 0, math.inf
    if config.init_from == "resume":
        step, best_loss = resume(config, optimizer, scaler, world)
        say(f"resuming {config.out_dir} after step {step}")
        if step >= config.max_iters and not config.eval_only:
            say(f"nothing to do: all {config.max_iters} steps are done; a larger --max_iters goes on")
            return 0
    else:
        torch.manual_seed(config.seed + world.rank)  # dropout differs between processes

    # Data: the same sequences in every step for any number of processes, see data/loader.py.
    splits = {
        s: data.load(folder, s, block_size=T, vocab_size=model.config.vocab_size)
        for s in ("train", "val")
    }
    micro_steps = config.gradient_accumulation_steps // world.size  # of this process, in a step
    global_batch = config.batch_size * config.gradient_accumulation_steps
    batches = data.Batches(splits["train"], T, global_batch, seed=config.seed, device=device)

    why_not = why_not_compile(config.compile, device)
    model.compiled = why_not is None
    with autocast:
        chosen, _ = model.attention()
        with torch.no_grad():
            model.eval().attention()
        model.train()
    say(
        f"device: {device} ({describe(device)}), {dtype_name(dtype)}, "
        f"{world.size} process{'es' * (world.size > 1)}"
    )
    say(f"model: {model.num_params():,} parameters, {model.num_params(False):,} without positions")
    if device.type == "cpu" and dtype == torch.float32:
        no = why_not_onednn(config.onednn, device, dtype)
        model.use_onednn(no is None)
        how = "on (error %.1e, without %.1e)" % cpu_matmul.errors() if no is None else f"off ({no})"
        say(f"oneDNN for float32 products: {how}")
    say(f"compile: {'on' if why_not is None else f'off ({why_not})'}")
    run: Any = model
    if why_not is None:
        run = torch.compile(run)
    if world.size > 1:
        ids = [device.index] if device.type == "cuda" else None
        run = DistributedDataParallel(run, device_ids=ids, gradient_as_bucket_view=True)

    peak = flops.peak(device, dtype_name(dtype), config.peak_tflops)
    say(f"peak: {peak}")
    tokens_per_step = global_batch * T
    say(f"{tokens_per_step:,} tokens a step, {config.max_iters:,} steps")

    def evaluate() -> dict[str, float]:
        """The mean loss of each split over the same windows every time."""
        model.eval()
        losses = {}
        with torch.no_grad(), autocast:
            for split, tokens in splits.items():
                total, n = 0.0, 0
                for x, y in data.eval_batches(
                    tokens, T, config.eval_iters, config.batch_size, world.rank, world.size, device
                ):
                    total += float(run(x, y)[1]) * len(x)
                    n += len(x)
                total, n = world.sum([total, n])
                losses[split] = total / n
        model.train()
        return losses

    if config.eval_only:
        losses = evaluate()
        say(f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        return 0

    metrics = Metrics(out_dir, step, asdict(config), config) if world.main else None

    def save(val_loss: float | None) -> None:
        rng = world.gather(random_state(device))
        if not world.main:
            return
        checkpoint.save(
            out_dir,
            weights=model.state_dict(),
            optimizer={"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(), "rng": rng},
            settings={
                "train": asdict(config),
                "model": checkpoint.model_settings(model),
                "tokenizer": meta["tokenizer"],
            },
            state={
                "step": step,
                "val_loss": val_loss,
                "best_val_loss": best_loss if math.isfinite(best_loss) else None,
                "sequences_seen": step * global_batch,
                "processes": world.size,
                "attention_backend": chosen.backend.name,
                "attention_kernels": list(chosen.kernels),
                "torch": torch.__version__,
            },
            keep=config.keep_checkpoints,
        )

    stop = Stop()
    params = [p for g in optimizer.param_groups for p in g["params"]]
    fused = optimizer.defaults["fused"]
    bad = torch.zeros((), device=device)  # becomes 1 at a loss or gradient that is not finite
    evaluated_at, val_loss = -1, None
    warm = step + (5 if why_not is None else 2)  # until then steps compile, or touch fresh memory
    start, timed_steps = time.perf_counter(), 0  # of the current log interval
    total_seconds, total_steps = 0.0, 0  # of all timed steps

    if config.eval_on_start and step == 0:
        losses = evaluate()
        say(f"step 0: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if metrics:
            metrics.log(iter=0, train_loss=losses["train"], val_loss=losses["val"])

    stream = batches.prefetch(step, config.max_iters, rank=world.rank, world=world.size)
    synchronize(device)
    start = time.perf_counter()
    for x, y in stream:
        # One step: forward and backward for each micro-batch, clip, update.
        lr = learning_rate(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum = torch.zeros((), device=device)
        for i, (mx, my) in enumerate(zip(x.chunk(micro_steps), y.chunk(micro_steps), strict=True)):
            # Gradients are averaged over processes once, in the last micro-step's backward.
            last = i == micro_steps - 1
            with run.no_sync() if world.size > 1 and not last else contextlib.nullcontext():
                with autocast:
                    _, loss = run(mx, my)
                scaler.scale(loss / micro_steps).backward()
            loss_sum += loss.detach() / micro_steps
        if scaler.is_enabled():
            scaler.unscale_(optimizer)
            if config.grad_clip:
                torch.nn.utils.clip_grad_norm_(params, config.grad_clip)
            bad = torch.maximum(bad, (~loss_sum.isfinite()).float())
            scaler.step(optimizer)  # leaves the weights alone where a gradient is not finite
            scaler.update()
        else:
            update(optimizer, params, loss_sum, config.grad_clip, bad, fused)
        optimizer.zero_grad(set_to_none=True)
        step += 1
        timed_steps += 1

        stopping = stop_agreed(stop, world)
        done = step == config.max_iters or stopping
        logging_now = step % config.log_interval == 0 or done or step == 1
        logging_now |= device.type == "cpu" and bool(bad)  # elsewhere a look would wait for the device
        evaluating = step % config.eval_interval == 0 or step == config.max_iters
        if not (logging_now or evaluating):
            continue

        # From here on the device is synchronized.
        mean_loss = world.sum([float(loss_sum)])[0] / world.size
        synchronize(device)
        seconds = time.perf_counter() - start
        if world.sum([float(bad)])[0]:
            say(
                f"error: the loss or its gradient is not finite at step {step} or shortly before "
                f"(loss {mean_loss}, lr {lr:.2e}, attention backend {chosen.backend.name}). The weights "
                "and checkpoints are untouched by it. Next: --attention_backend=manual to see whether "
                "the kernel is to blame, --init_from=resume with a lower --learning_rate to go on.",
                file=sys.stderr,
            )
            return 1
        if logging_now:
            if step > warm:
                per_step = seconds / timed_steps
                total_seconds += seconds
                total_steps += timed_steps
            report(say, metrics, step, mean_loss, lr, model.config, T, tokens_per_step,
                   per_step if step > warm else None, peak, world, device)  # fmt: skip
        if evaluating:
            losses = evaluate()
            val_loss, evaluated_at = losses["val"], step
            best_loss = min(best_loss, val_loss)
            say(f"step {step}: train loss {losses['train']:.4f}, val loss {val_loss:.4f}")
            if metrics:
                metrics.log(iter=step, train_loss=losses["train"], val_loss=val_loss)
        if evaluating or done:
            save(val_loss if evaluated_at == step else None)
        if stopping:
            break
        synchronize(device)
        start, timed_steps = time.perf_counter(), 0

    if metrics:
        metrics.close()
    if stop.signal is not None or (step < config.max_iters):
        say(f"stopped after step {step}; to go on: python train.py --init_from=resume --out_dir={out_dir}")
        return 128 + (stop.signal or signal.SIGTERM)
    if total_steps:
        rate = tokens_per_step * total_steps / total_seconds
        full, causal = flops.mfu(model.config, T, rate, peak, world.size)
        say(f"{rate:,.0f} tok/s, mfu {full:.1%} (causal {causal:.1%}) of {peak}")
    if "baselines" in meta and val_loss is not None:
        known = ", ".join(f"{name} model {loss:.2f}" for name, loss in meta["baselines"].items())
        say(f"val loss {val_loss:.4f} nats a token; for comparison: {known}")
    if config.sample_tokens and world.main:
        say(f"--- {config.sample_tokens} tokens of what it has learned ---")
        say(sample(model, meta, config))
    return 0


def update(optimizer: torch.optim.AdamW, params: list[Tensor], loss: Tensor, clip: float,
           bad: Tensor, fused: bool) -> None:  # fmt: skip
    """Clip the gradients to the global norm `clip`, and step; not if anything is not finite.

    The fused AdamW takes a factor for the gradients and a flag not to step (they are there for
    torch.amp.GradScaler): clipping then costs no pass over the gradients of its own, and the flag
    is read on the device, so nothing waits for it.

    Args:
        loss: float32 ().
        bad: float32 (), set to 1 where the loss or a gradient is not finite, and then for good.
    """
    norms = torch._foreach_norm([p.grad for p in params if p.grad is not None])
    norm = torch.linalg.vector_norm(torch.stack(norms))
    bad.copy_(torch.maximum(bad, (~(loss.isfinite() & norm.isfinite())).float()))
    divide_by = (norm / clip).clamp(min=1.0) if clip else None
    if fused:
        extras: Any = optimizer
        extras.grad_scale, extras.found_inf = divide_by, bad
        optimizer.step()
    elif not bad:
        if divide_by is not None:
            torch._foreach_div_([p.grad for p in params if p.grad is not None], divide_by)
        optimizer.step()


def report(say: Callable[..., None], metrics: Metrics | None, step: int, loss: float, lr: float,
           model: GPTConfig, T: int, tokens: int, seconds: float | None, peak: flops.Peak,
           world: World, device: torch.device) -> None:  # fmt: skip
    """Print and record one step; seconds a step are None while the run warms up."""
    memory = peak_memory(device)
    line = f"iter {step}: loss {loss:.4f}, lr {lr:.1e}, "
    row: dict[str, Any] = {"iter": step, "loss": loss, "lr": lr, "mem_bytes": memory}
    if seconds is None:
        line += "warming up, "
    else:
        rate = tokens / seconds
        full, causal = flops.mfu(model, T, rate, peak, world.size)
        line += f"{seconds * 1e3:,.1f} ms, {rate:,.0f} tok/s, mfu {full:.1%} (causal {causal:.1%})"
        line += " of measured peak, " if peak.source.startswith("measured") else ", "
        row |= {"ms": seconds * 1e3, "tokens_per_s": rate, "mfu": full, "mfu_causal": causal}
    say(line + f"mem {memory / 1e9:.1f} GB", flush=True)
    if metrics:
        metrics.log(**row)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The random state of this process."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def resume(config: TrainConfig, optimizer: torch.optim.AdamW, scaler: torch.amp.GradScaler,
           world: World) -> tuple[int, float]:  # fmt: skip
    """Put back the optimizer, the scaler and the random state.

    Returns:
        the steps done and the lowest validation loss so far.
    """
    saved = checkpoint.load(checkpoint.latest(config.out_dir))
    tensors = saved.optimizer()
    optimizer.load_state_dict(tensors["optimizer"])
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


def stop_agreed(stop: Stop, world: World) -> bool:
    """Whether any process was told to stop; all learn of it after the same step."""
    return bool(world.sum([float(stop.signal is not None)])[0])


def dtype_name(dtype: torch.dtype) -> str:
    """"bfloat16" for torch.bfloat16."""  # fmt: skip
    return str(dtype).removeprefix("torch.")


def show_log() -> None:
    """Show what the project logs (on stderr), and other libraries' warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("nanoattn").setLevel(logging.INFO)


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name() or device.type}, {torch.get_num_threads()} threads"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def sample(model: GPT, meta: dict[str, Any], config: TrainConfig) -> str:
    """A little text from the trained model, to see what the loss means."""
    tokenizer = data.from_meta(meta["tokenizer"])
    device = model.transformer.wte.weight.device
    generator = torch.Generator(device).manual_seed(config.seed)
    idx = torch.tensor([tokenizer.encode("\n")], device=device)
    model.eval()
    out = model.generate(idx, config.sample_tokens, temperature=0.8, top_k=200, generator=generator,
                         vocab_size=tokenizer.vocab_size)  # fmt: skip
    return tokenizer.decode(out[0].tolist()).strip()


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
