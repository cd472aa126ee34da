"""Train a GPT: the set-up of a run, its loop, one step.

    python train.py config/train_shakespeare_cpu.py
    python train.py config/train_gpt2.py --attention_backend=sdpa
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py --parallel=fsdp

docs/TRAIN.md says what a run writes. Read train_step() first, then loop(), then model.py.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from core.options import IGNORED, TrainConfig
from core.settings import Loaded, exit_on_user_error, read, read_early, user_errors

if __name__ == "__main__":  # --help and mistakes come before torch, which is slow
    read_early(TrainConfig, sys.argv[1:], ignored=IGNORED)

import torch
import torch.nn as nn
from torch import Tensor

import checkpoint
import data
from core import flops, parallel, profile, runtime
from core.files import locked, printable
from core.loss import IGNORE
from core.metrics import Meter, Metrics
from core.optimizer import about, build_optimizer, schedule_warnings, set_learning_rate, update
from core.parallel import SLOW_S, DistInfo, Stop, Stopped
from core.runtime import Setup
from inference.engine import generate
from model import GPT, GPTConfig


class Run:
    """The state of a run that is ready for its next step."""

    def __init__(self, loaded: Loaded[TrainConfig], distributed: DistInfo) -> None:
        """Create data, model, optimizer and kernel, and print what will run."""
        config, device = loaded.settings, distributed.device
        self.distributed = distributed
        accumulation = config.gradient_accumulation_steps
        # Micro-batches a step, in this process.
        self.micro_steps = distributed.micro_steps(config.batch_size, accumulation)
        if device.type == "cpu":
            runtime.keep_freed_memory()
        torch.manual_seed(config.seed)  # equal weights in all processes
        folder = data.find(config.dataset, config.data_dir)
        self.meta = meta = data.read_meta(folder)
        if config.init_from == "scratch":
            vocab_size = config.vocab_size or data.padded(meta["vocab_size"])
            with user_errors():  # sizes that contradict one another
                model = GPT(GPTConfig.of(config, vocab_size), config.policy)
        else:
            model = checkpoint.build_model(loaded, meta)
        self.setup = setup = Setup(device, config, model.config.n_embd)
        T = model.config.block_size
        decided: Any = {"dtype": runtime.dtype_name(setup.dtype), "residual_dtype": setup.residual}
        config = replace(config, block_size=T, **decided)  # what "auto" was: a resumed run keeps it
        self.config = config
        if config.profile_step:
            profile.prepare(device)
        if config.parallel == "fsdp":
            parallel.shard(model, distributed, setup, config.shard_size)
        self.model = model = setup.place(model)  # holds the parameters
        model.ring = parallel.ring(distributed, T)
        model.gradient_checkpointing = config.gradient_checkpointing
        model.residual_autocast = setup.residual == "autocast"
        model.packed = config.document_mask  # positions count from a document's beginning
        self.optimizer = optimizer = build_optimizer(model, config, device, distributed.world_size)
        torch.manual_seed(config.seed + distributed.rank)  # dropout differs between processes
        V = model.config.vocab_size
        self.splits = {s: data.load(folder, s, T, V, model.packed) for s in ("train", "val")}
        # Identifies the evaluation: best losses of others do not compare.
        val = self.splits["val"]
        evaluation = data.loader.fingerprint(val, T, config.eval_iters, config.batch_size)
        self.scaler = scaler = setup.scaler()
        self.saver = checkpoint.Saver(config, distributed, meta["tokenizer"], evaluation)
        restored = self.saver.restore(model, optimizer, scaler)
        # step: steps done; evaluated: False if this step's evaluation is to come.
        self.step, self.sequences_seen, self.evaluated = restored
        self.saved_step = self.step  # of the newest checkpoint
        self.val_loss: float | None = None
        phase = {"dtype": config.dtype, "compiled": setup.compile, "segments": model.packed}
        self.attention = model.plan(config.batch_size, distributed, **phase)[0].chosen  # layer 0's
        model.plan(config.batch_size, distributed, **phase, training=False, grad=False)
        self.module: nn.Module = model  # to call: FSDP compiles its blocks, DDP wraps it
        if config.parallel == "ddp":
            compiled = setup.compiled(model, self.micro_steps)
            self.module = parallel.replicate(compiled, distributed)
        n, counted = model.get_num_params(False), flops.n_params(model.config)
        tokenizer = f"tokenizer {meta['tokenizer']['name']}, vocabulary {meta['vocab_size']:,}"
        about_model = f"model: {n:,} parameters (for MFU {counted:,}); dataset {printable(folder)}"
        lines = [*setup.report(distributed.world_size), *about(optimizer)]
        distributed.say("\n".join([*lines, f"{about_model}, {tokenizer}"]))


# ----------------------------------------------------------------------------- the loop


def main(argv: list[str]) -> int:
    loaded = read(TrainConfig, argv, ignored=IGNORED)
    runtime.show_log()
    writes = os.environ.get("RANK", "0") == "0" and not loaded.settings.eval_only
    with locked(Path(loaded.settings.out_dir)) if writes else nullcontext():
        if loaded.settings.init_from == "resume":
            loaded = checkpoint.resumed(loaded)
        config = loaded.settings
        distributed = DistInfo.join(config.device, config.context_parallel)
        with checkpoint.explained(config, distributed):
            return train(checkpoint.restarted(loaded, distributed), distributed)


def train(loaded: Loaded[TrainConfig], distributed: DistInfo) -> int:
    """Train, and return the exit code."""
    distributed.say("\n".join([*loaded.report(), *schedule_warnings(loaded.settings)]))
    run = Run(loaded, distributed)
    config = run.config
    meter = Meter(distributed, run.model.config, config, run.attention.backend, run.step)
    if config.eval_only:
        evaluate(run)
        return 0
    if run.step >= config.max_iters and run.evaluated:
        distributed.say(f"nothing to do: {run.step} steps are done, --max_iters={config.max_iters}")
        return 0
    distributed.gather(None)  # every process is ready: now an earlier run may be moved aside
    if distributed.main:
        if run.step == 0 and (moved := checkpoint.set_aside(config.out_dir)):
            print(f"the earlier run in out_dir is now in {printable(moved)}", flush=True)
        wandb = {"project": config.wandb_project, "name": config.wandb_run_name,
                 "config": asdict(config)} if config.wandb_log else None  # fmt: skip
        meter.metrics = Metrics(Path(config.out_dir), run.step, wandb, run.evaluated)
    if not run.evaluated:
        evaluate(run, meter.metrics)

    stop = Stop(distributed)
    try:
        finite = loop(run, meter, stop)
    except Stopped:
        finite = True
        if run.step > run.saved_step:
            save(run, val_loss=None)
    run.saver.wait()
    if not finite:
        return 1
    stopped = stop.agreed()
    alone = checkpoint.gathered(run.model) if config.sample_tokens and not stopped else None
    if meter.metrics:
        meter.metrics.close()  # from here on no process waits for the main one
    stop.close()
    if stopped:
        distributed.say(f"stopped after step {run.step}; {run.saver.last_good()}")
        return 128 + (stop.signal or signal.SIGTERM)
    meter.end(run.val_loss, run.meta.get("baselines", {}))
    if alone and distributed.main:
        sample(run, alone)
    return 0


def loop(run: Run, meter: Meter, stop: Stop) -> bool:
    """Run the remaining steps; False: a loss is not finite. Raises Stopped."""
    config = run.config
    distributed = run.distributed
    device = distributed.device
    warm = run.step + (5 if run.setup.compile else 2)  # the first steps compile and allocate
    found_inf = torch.zeros((), device=device)  # 1: a loss or gradient is not finite
    batches = data.Batches(run.splits["train"], config.block_size, config.global_batch, config.seed,
                           device, (run.step, run.sequences_seen))  # fmt: skip
    runtime.settle(device)
    meter.restart(run.step, timed=False)
    # x, y and with a mask segments, (micro_steps * B, T): where each token's document begins.
    for batch in batches.prefetch(run.step, config.max_iters, *distributed.data):
        # --- one step ---
        lr = set_learning_rate(run.optimizer, run.step, config)
        meter.count(*batch[2:])  # visible keys, for mfu_causal
        x, y, *segments = parallel.shard_batch(run.model.ring, *batch)
        profiling = run.step + 1 == config.profile_step
        watching: Any = nullcontext()
        if profiling and distributed.main:
            watching = profile.profiled(device, trace=Path(config.out_dir) / "profile.json")
        with watching as seen:  # stop.mark raises Stopped, where all processes agree
            loss = train_step(
                run.module, run.optimizer, run.scaler, run.setup.autocast, x, y,
                micro_steps=run.micro_steps, clip=config.grad_clip, found_inf=found_inf,
                mark=stop.mark, segments=segments)  # fmt: skip
        run.step += 1
        run.sequences_seen += config.global_batch
        if seen:
            distributed.say("\n".join([f"step {run.step}:", *seen.lines(), f"trace: {seen.trace}"]))
        limit = config.hang_timeout if run.step >= warm else SLOW_S  # of waiting for other ranks
        if run.step == warm or profiling:  # neither is a usual step
            distributed.limit(limit)
            meter.restart(run.step, timed=run.step >= warm)

        # --- all processes agree: stop? log? (found_inf: on a GPU it would wait) ---
        due = meter.overdue() or (device.type == "cpu" and bool(found_inf))
        stopping, overdue = map(bool, distributed.sum([float(stop.noted), float(due)]))
        logging = run.step == 1 or run.step % config.log_interval == 0
        evaluating = run.step == config.max_iters or run.step % config.eval_interval == 0
        if not (stopping or overdue or logging or evaluating):
            continue

        # --- logging, evaluation ---
        total, any_inf = distributed.sum([float(loss), float(found_inf)])
        value = total / distributed.world_size
        if finite := not any_inf and math.isfinite(value):
            meter.log(run.step, value, lr)
            if stopping:
                raise Stopped
            if evaluating:
                distributed.limit(SLOW_S if run.val_loss is None else limit)  # the first compiles
                value = evaluate(run, meter.metrics, stop)
                distributed.limit(limit)
                finite = math.isfinite(value)
        if not finite:
            meter.not_finite(run.step, value, lr, run.attention, run.saver.last_good())
            return False
        if evaluating:
            save(run, val_loss=value)
        meter.restart(run.step, timed=run.step >= warm)
    return True


def save(run: Run, val_loss: float | None) -> None:
    """Write a checkpoint; val_loss: of this step, if evaluated."""
    run.saver.save(
        run.model, run.optimizer, run.scaler, step=run.step, val_loss=val_loss,
        sequences_seen=run.sequences_seen, attention_backend=run.attention.backend.name,
        attention_kernels=list(run.attention.kernels))  # fmt: skip
    run.saved_step = run.step


@torch.no_grad()
def evaluate(run: Run, metrics: Metrics | None = None, stop: Stop | None = None) -> float:
    """Print and log the splits' losses; returns val's. Raises Stopped."""
    config = run.config
    distributed = run.distributed
    losses: dict[str, float] = {}
    run.model.eval()
    try:
        for split, tokens in run.splits.items():
            batches = data.eval_batches(
                tokens, config.block_size, config.eval_iters, config.batch_size,
                *distributed.data, run.setup.device)  # fmt: skip
            total = torch.zeros((), device=distributed.device)
            targets = torch.zeros((), dtype=torch.int64, device=distributed.device)
            for batch in batches:
                if stop and stop.agreed():
                    raise Stopped
                x, y, *segments = parallel.shard_batch(run.model.ring, *batch)
                n = (y != IGNORE).sum()
                with run.setup.autocast:
                    mean = run.module(x, y, *segments)[1]
                total += torch.where(n == 0, 0.0, mean * n)
                targets += n
            summed, n_targets = distributed.sum([float(total), float(targets)])
            losses[split] = summed / n_targets if n_targets else math.nan
    finally:
        getattr(run.model, "reshard", lambda: None)()  # FSDP: free what this pass gathered
        run.model.train()
    run.val_loss = val_loss = losses["val"]
    bits = data.bits_per_byte(run.meta, val_loss)
    both = f"train loss {losses['train']:.4f}, val loss {val_loss:.4f}"
    also = f" ({bits:.4f} bits per byte)" if bits else ""
    distributed.say(f"step {run.step}: {both}{also}")
    if metrics and math.isfinite(sum(losses.values())):
        known = {"train_loss": losses["train"], "val_loss": val_loss, "val_bits_per_byte": bits}
        metrics.log(iter=run.step, **known)
    return val_loss


def sample(run: Run, alone: GPT) -> None:
    """Print text from an unsharded model."""
    torch.use_deterministic_algorithms(False)  # on CUDA sampling has no deterministic form
    torch.manual_seed(run.config.seed)
    n = run.config.sample_tokens
    start = run.splits["train"][:1].tolist()
    alone.tokenizer = data.from_meta(run.meta["tokenizer"])
    alone.eval().plan(grad=False, dtype=run.config.dtype)
    with run.setup.autocast:
        (ids,) = generate(alone, [start], n, kv_cache="none", temperature=0.8, top_k=200)
    text = alone.tokenizer.decode(ids.tolist()).strip()
    print(f"--- a sample of {n} tokens ---\n{text}", flush=True)


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
        clip, found_inf: of core.optimizer.update(): largest norm, and 1 after a step it left out.
        mark: called with "forward", "backward", "update" and "end".
        segments: one (micro_steps * B, T) int32, equal where tokens see one another, or none.

    Returns the loss, float32 (), in nats per token; averaged over processes it is the mean over the
    step's targets. Nothing waits for a GPU.
    """
    loss = torch.zeros((), device=x.device)
    xs = x.tensor_split(micro_steps)
    ys = y.tensor_split(micro_steps)
    more = [s.tensor_split(micro_steps) for s in segments]
    targets = torch.stack([(y != IGNORE).sum() for y in ys])
    for i, weight in enumerate(parallel.loss_weights(module, targets)):
        # Processes average their gradients once, in the last backward pass.
        parallel.average_gradients(module, i == micro_steps - 1)
        mark("forward")
        with autocast:
            _, mean = module(xs[i], ys[i], *[s[i] for s in more])
            part = torch.where(weight == 0, 0.0, mean * weight)  # without targets the mean is NaN
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
