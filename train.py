"""Train a GPT: settings, set-up, loop, step.

    python train.py config/train_shakespeare_cpu.py
    python train.py config/train_gpt2.py --attention_backend=sdpa
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py --parallel=fsdp

A run writes checkpoints, metrics.jsonl and loss.png to out_dir. train_step() is one step.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from core.options import ALIASES, IGNORED, TrainConfig
from core.settings import Loaded, exit_on_user_error, read, read_early

if __name__ == "__main__":  # --help and mistakes are answered before torch takes its seconds
    read_early(TrainConfig, sys.argv[1:], aliases=ALIASES, ignored=IGNORED)

import torch
import torch.nn as nn
from torch import Tensor

import checkpoint
import data
from attention import Resolution
from core import flops, parallel, profile, runtime
from core.distributed import DistInfo, Stop, Stopped
from core.loss import IGNORE
from core.metrics import Meter, Metrics
from core.optimizer import about, build_optimizer, schedule_warnings, set_learning_rate, update
from core.runtime import Setup
from inference.engine import generate
from model import GPT, GPTConfig

# ----------------------------------------------------------------------------- the set-up


@dataclass
class Run:
    """A run that is ready for its next step."""

    config: TrainConfig
    distributed: DistInfo
    setup: Setup
    meta: data.tokenizer.Json  # the dataset's meta.json
    model: GPT  # the parameters, as they are saved
    module: nn.Module  # the same model to call: compiled, DDP or FSDP
    optimizer: torch.optim.AdamW
    scaler: torch.amp.GradScaler
    splits: dict[str, data.Tokens]  # "train" and "val": (N,) tokens
    borders: data.loader.Documents | None  # of the documents that the mask keeps apart
    attention: Resolution  # the kernel of the training steps
    micro_steps: int  # micro-batches per step in this process
    saver: checkpoint.Saver
    step: int = 0  # steps done
    sequences_seen: int = 0  # in these steps
    evaluated: bool = True  # False: the evaluation after this step is to come

    @property
    def global_batch(self) -> int:
        """Sequences per step, summed over processes and micro-batches."""
        return self.config.batch_size * self.config.gradient_accumulation_steps


def check_sizes(config: TrainConfig) -> None:
    """Raise ValueError if a new model's sizes are inconsistent; otherwise a checkpoint has them."""
    if config.init_from == "scratch":
        GPTConfig.of(config, config.vocab_size or 1)


def create_model(loaded: Loaded[TrainConfig], meta: data.tokenizer.Json) -> GPT:
    """Create the model on the CPU, new or with the weights of --init_from."""
    config = loaded.settings
    if config.init_from != "scratch":
        return checkpoint.build_model(loaded, meta)
    vocab_size = config.vocab_size or data.padded(meta["vocab_size"])
    return GPT(GPTConfig.of(config, vocab_size), config.policy)


def set_up(loaded: Loaded[TrainConfig], distributed: DistInfo) -> Run:
    """Create data, model, optimizer and kernel, and print what will run."""
    config = loaded.settings
    device = distributed.device
    micro_steps = distributed.micro_steps(config.batch_size, config.gradient_accumulation_steps)
    if device.type == "cpu":
        runtime.keep_freed_memory()
    torch.manual_seed(config.seed)
    folder = data.find(config.dataset, config.data_dir)
    meta = data.read_meta(folder)
    model = create_model(loaded, meta)
    setup = config.setup(device, model.config.n_embd)
    T = model.config.block_size
    decided: Any = {"dtype": runtime.dtype_name(setup.dtype), "residual_dtype": setup.residual}
    config = replace(config, block_size=T, **decided)  # a resumed run keeps them
    if config.profile_step:
        profile.check(device)
        profile.name_cpu_kernels()  # of a compiled step
    if config.parallel == "fsdp":
        parallel.shard(model, distributed, setup, config.shard_size)
    model = setup.place(model)
    model.ring = parallel.ring(distributed, T)
    model.gradient_checkpointing = config.gradient_checkpointing
    model.residual_autocast = setup.residual == "autocast"
    model.packed = config.document_mask
    borders = data.loader.Documents.of(folder, meta) if model.packed else None
    optimizer = build_optimizer(model, config, device, distributed.world_size)
    torch.manual_seed(config.seed + distributed.rank)  # dropout differs between processes
    splits = {s: data.load(folder, s, T, model.config.vocab_size) for s in ("train", "val")}
    windows = data.loader.fingerprint(splits["val"], T, config.eval_iters, config.batch_size)
    scaler = setup.scaler()
    done = checkpoint.Progress(evaluated=not config.eval_on_start)
    if config.init_from == "resume":
        done = checkpoint.restore_run(config, model, optimizer, scaler, distributed, windows)
    phase = {"dtype": config.dtype, "compiled": bool(setup.compile), "segments": model.packed}
    kernel = model.plan(config.batch_size, distributed, **phase)[0].chosen
    model.plan(config.batch_size, distributed, **phase, training=False, grad=False)
    module: nn.Module = model  # FSDP has changed it in place, and compiles its blocks
    if config.parallel == "ddp":
        module = parallel.replicate(setup.compiled(model, micro_steps), distributed)
    N = model.get_num_params(non_embedding=False)
    distributed.say("\n".join([
        *setup.report(distributed.world_size), *about(model, optimizer),
        f"model: {N:,} parameters{flops.uncounted(model.config)}; dataset {folder}, tokenizer "
        f"{meta['tokenizer']['name']}, vocabulary {meta['vocab_size']:,}"]))  # fmt: skip
    saver = checkpoint.Saver(config.out_dir, config.keep_checkpoints, distributed,
                             config.async_checkpoint, *done.best, windows)  # fmt: skip
    return Run(
        config=config, distributed=distributed, setup=setup, meta=meta, model=model, module=module,
        optimizer=optimizer, scaler=scaler, splits=splits, borders=borders, attention=kernel,
        micro_steps=micro_steps, saver=saver, step=done.step, sequences_seen=done.sequences_seen,
        evaluated=done.evaluated)  # fmt: skip


# ----------------------------------------------------------------------------- the loop


def main(argv: list[str]) -> int:
    loaded = read(TrainConfig, argv, aliases=ALIASES, ignored=IGNORED, further=check_sizes)
    runtime.show_log()
    with checkpoint.locked(loaded.settings):
        if loaded.settings.init_from == "resume":
            loaded = checkpoint.resumed(loaded)
        config = loaded.settings
        distributed = DistInfo.join(config.device, config.context_parallel)
        with checkpoint.explained(config, distributed):
            return train(checkpoint.restarted(loaded, distributed), distributed)


def train(loaded: Loaded[TrainConfig], distributed: DistInfo) -> int:
    """Train as the settings say; returns the exit code."""
    distributed.say("\n".join([*loaded.report(), *schedule_warnings(loaded.settings)]))
    run = set_up(loaded, distributed)
    config = run.config
    T = config.block_size
    device = distributed.device
    meter = Meter(distributed, run.model.config, T, run.global_batch * T, config.max_iters,
                  config.dtype, config.peak_tflops)  # fmt: skip
    meter.keys = flops.keys_of(run.attention.backend, T, run.model.config.n_head, device)
    meter.begin(run.step)
    if config.eval_only:
        evaluate(run)
        return 0
    if run.step >= config.max_iters and run.evaluated:
        distributed.say(f"nothing to do: all {config.max_iters} steps (--max_iters) are done")
        return 0
    distributed.gather(None)  # every process is ready: an earlier run may be moved aside now
    if distributed.main:
        if run.step == 0 and (moved := checkpoint.set_aside(config.out_dir)):
            distributed.say(f"an earlier run's checkpoints and metrics are now in {moved}")
        wandb = {"project": config.wandb_project, "name": config.wandb_run_name,
                 "config": asdict(config)} if config.wandb_log else None  # fmt: skip
        meter.metrics = Metrics(Path(config.out_dir), run.step, wandb, run.evaluated)
    val_loss = None if run.evaluated else evaluate(run, meter.metrics)

    stop = Stop(distributed)
    lost = ""  # the part of a step that a signal cut off
    saved_step = run.step
    found_inf = torch.zeros((), device=device)  # set to 1 by a loss or gradient that is not finite
    warm = run.step + (5 if run.setup.compile else 2)  # the first steps compile and allocate
    batches = data.Batches(run.splits["train"], T, run.global_batch, config.seed, device,
                           run.borders, (run.step, run.sequences_seen))  # fmt: skip

    def save(val_loss: float | None) -> None:
        run.saver.save(run.model, run.optimizer, run.scaler, asdict(config), run.meta["tokenizer"],
                       step=run.step, val_loss=val_loss, sequences_seen=run.sequences_seen,
                       attention_backend=run.attention.backend.name,
                       attention_kernels=list(run.attention.kernels))  # fmt: skip

    runtime.settle(device)
    stopping: bool = False
    began = runtime.now(device)  # of the steps that the next line counts
    began_step = run.step
    for batch in batches.prefetch(run.step, config.max_iters, *distributed.data):
        # --- one step ---
        lr = set_learning_rate(run.optimizer, run.step, config)
        meter.count(*batch[2:])
        x, y, *segments = parallel.shard_batch(run.model.ring, *batch)
        random = runtime.random_state(device)
        watching: Any = nullcontext()
        profiling = run.step + 1 == config.profile_step
        if profiling and distributed.main:
            watching = profile.profiled(device, trace=Path(config.out_dir) / "profile.json")
        try:
            with watching as seen:
                loss = train_step(
                    run.module, run.optimizer, run.scaler, run.setup.autocast, x, y,
                    micro_steps=run.micro_steps, clip=config.grad_clip, found_inf=found_inf,
                    mark=stop.mark, segments=segments)  # fmt: skip
        except Stopped:
            runtime.set_random_state(random, device)
            stopping = True
            lost = f", {stop.micro_batches}/{run.micro_steps} of the next is lost"
            break
        run.step += 1
        run.sequences_seen += run.global_batch
        if seen:
            distributed.say("\n".join([f"step {run.step}:", *seen.lines(), f"trace: {seen.trace}"]))
        if run.step == warm:
            if distributed.control:
                evaluate(run, batches=1)  # the first one compiles
            distributed.limit(config.hang_timeout)  # until here it was half an hour, to compile
        if run.step == warm or profiling:  # neither is a usual step
            began = runtime.now(device)
            began_step = run.step
            meter.counted.clear()

        # --- all processes agree: stop? log? (found_inf: on a GPU it would wait) ---
        due = time.perf_counter() - began > 30 or (device.type == "cpu" and bool(found_inf))
        stopping, overdue = map(bool, distributed.sum([float(stop.request.noted), float(due)]))
        done = run.step == config.max_iters
        often = run.step == 1 or run.step % config.log_interval == 0
        logging_now = stopping or overdue or done or often
        evaluating = done or run.step % config.eval_interval == 0
        if not (logging_now or evaluating):
            continue

        # --- evaluation, logging ---
        total, any_inf = distributed.sum([float(loss), float(found_inf)])
        mean_loss = total / distributed.world_size
        steps = run.step - began_step
        seconds = (time.perf_counter() - began) / steps if steps and run.step > warm else None
        val_loss = None
        if evaluating and not (any_inf or stopping):
            val_loss = evaluate(run, meter.metrics, stop)
            stopping = val_loss is None
        value = mean_loss if val_loss is None else val_loss
        if any_inf or not math.isfinite(value):
            meter.not_finite(run.step, value, lr, run.attention, run.saver.last_good())
            run.saver.wait()
            return 1
        if logging_now:
            meter.log(run.step, mean_loss, lr, seconds)
        if stopping:
            break
        if evaluating:
            save(val_loss)
            saved_step = run.step
        began = runtime.now(device)
        began_step = run.step

    if stopping and run.step > saved_step:
        save(None)
    run.saver.wait()
    stopping = bool(distributed.sum([float(stopping or stop.request.noted)])[0])
    alone = checkpoint.gathered(run.model) if config.sample_tokens and not stopping else None
    meter.close()  # from here on no process waits for the main one, which may take long
    stop.request.close()
    if stopping:
        distributed.say(f"stopped after step {run.step}{lost}; {run.saver.last_good()}")
        return 128 + (stop.request.signal or signal.SIGTERM)
    meter.end(val_loss, run.meta.get("baselines", {}))
    if alone and distributed.main:
        sample(run, alone)
    return 0


@torch.no_grad()
def evaluate(run: Run, metrics: Metrics | None = None, stop: Stop | None = None,
             batches: int | None = None) -> float | None:  # fmt: skip
    """Print and log the splits' losses; returns val's, None: stopped. batches: only try so many."""
    config = run.config
    distributed = run.distributed
    sizes = config.block_size, batches or config.eval_iters, config.batch_size, *distributed.data
    losses: dict[str, float] = {}
    run.model.eval()
    try:
        for split, tokens in run.splits.items():
            each = data.eval_batches(tokens, *sizes, run.setup.device, run.borders)
            sums = parallel.summed_loss(run.module, run.model.ring, each, run.setup.autocast, stop)
            summed, n_targets = distributed.sum([*sums])
            losses[split] = summed / n_targets if n_targets else math.nan
    except Stopped:
        distributed.say(f"the evaluation after step {run.step} was not finished")
        return None
    finally:
        parallel.reshard(run.model)
        run.model.train()
    if batches:
        return None
    train_loss, val_loss = losses["train"], losses["val"]
    bits = data.bits_per_byte(run.meta, val_loss)
    also = f" ({bits:.4f} bits per byte)" if bits else ""
    distributed.say(f"step {run.step}: train loss {train_loss:.4f}, val loss {val_loss:.4f}{also}")
    if metrics and math.isfinite(train_loss + val_loss):
        metrics.log(iter=run.step, train_loss=train_loss, val_loss=val_loss, val_bits_per_byte=bits)
    return val_loss


def sample(run: Run, alone: GPT) -> None:
    """Print text from the model, unsharded."""
    torch.use_deterministic_algorithms(False)  # on CUDA sampling has no deterministic form
    torch.manual_seed(run.config.seed)
    n, start = run.config.sample_tokens, [run.splits["train"][:1].tolist()]
    tokenizer = data.from_meta(run.meta["tokenizer"])
    alone.eval().plan(grad=False, dtype=run.config.dtype)
    how = {"vocab_size": tokenizer.vocab_size, "unused": tokenizer.unused}
    with run.setup.autocast:
        (ids,) = generate(alone, start, n, kv_cache="none", temperature=0.8, top_k=200, **how)
    print(f"--- a sample of {n} tokens ---\n{tokenizer.decode(ids.tolist()).strip()}", flush=True)


# ----------------------------------------------------------------------------- the step


def train_step(
    module: nn.Module, optimizer: torch.optim.AdamW, scaler: torch.amp.GradScaler,
    autocast: torch.autocast, x: Tensor, y: Tensor, micro_steps: int, clip: float,
    found_inf: Tensor, mark: Callable[[str], None] = lambda part: None,
    segments: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """One step of training: forward and backward of each micro-batch, clip, update.

    Args:
        module: the model: plain, compiled, DDP or FSDP.
        x, y: (micro_steps * B, T) int64, token ids and their successors (IGNORE: no target).
        clip, found_inf: as in core.optimizer.update().
        mark: called with "forward", "backward", "update" and "end" (benchmarks).
        segments: one (micro_steps * B, T) int32, or none: a token sees all before it.

    Returns:
        loss in nats per token, float32 (): its average over processes is the mean over all targets
        of the step. On a GPU nothing here waits for the device.
    """
    loss = torch.zeros((), device=x.device)
    parts = [t.tensor_split(micro_steps) for t in (x, y, *segments)]
    targets = torch.stack([(part != IGNORE).sum() for part in parts[1]])
    weights = parallel.loss_weights(module, targets)
    for i, weight in enumerate(weights):
        micro_batch = [part[i] for part in parts]
        # Processes average their gradients once, in the backward pass of the last micro-step.
        with parallel.no_sync(module) if i < micro_steps - 1 else nullcontext():
            mark("forward")
            with autocast:
                # Without targets the mean is NaN.
                part = torch.where(weight == 0, 0.0, module(*micro_batch)[1] * weight)
                # A loss that is not finite makes the gradients NaN: every process sees it.
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
    from torch.distributed.elastic.multiprocessing.errors import record  # for torchrun's report

    exit_on_user_error(lambda: record(main)(sys.argv[1:]), lasting=True)
