"""Resume a run, or start one from given weights."""

from __future__ import annotations

import math
import os
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from checkpoint.convert import init_model
from checkpoint.store import Checkpoint, backend_of, folders, latest, load, log, tokenizer_meta
from checkpoint.tensors import read_shards_into, read_whole_into, tensors
from checkpoint.together import together
from core.distributed import DistInfo
from core.runtime import dtype_name, pick_device, pick_dtype
from core.settings import Loaded, UserError
from model import GPT

C = TypeVar("C")  # train.py's TrainConfig

# Fixed by the weights: settings cannot change these.
SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "bias", "gelu", "vocab_size")


def resumed(loaded: Loaded[C]) -> Loaded[C]:
    """The newest checkpoint's settings, overridden by the given ones. Raises UserError."""
    given: Any = loaded.settings
    saved = load(latest(given.out_dir))
    before: Any = saved.train_settings(type(given))
    # A run that started from other weights has their sizes, not those in its settings.
    model = saved.config(attention_backend="auto")
    sizes = {name: getattr(model, name) for name in (*SHAPE, "attention_window")}
    before = replace(before, **{**sizes, "vocab_size": before.vocab_size})
    changes = {name: getattr(given, name) for name in (*loaded.origins, "out_dir")}
    if "attention_backend" not in changes:
        changes["attention_backend"] = backend_of(before.attention_backend, saved.folder)
    if before.attention_hub_kernels and "attention_hub_kernels" not in changes:
        # The checkpoint may come from somebody else: ask again before downloading code.
        log.warning(f"--attention_hub_kernels=True of {saved.folder} is not resumed")
        changes["attention_hub_kernels"] = False
    if before.lr_decay_iters is None:  # a larger max_iters must not raise the learning rate
        changes.setdefault("lr_decay_iters", before.max_iters)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        changes = {"parallel": "ddp", "context_parallel": 1} | changes
    if changes.get("parallel") == "ddp":
        changes.setdefault("shard_size", None)
    if before.dtype == "auto":  # written by an older version
        there = pick_device(changes.get("device", before.device))
        changes.setdefault("dtype", dtype_name(pick_dtype("auto", there)))
    try:
        merged = replace(before, **changes)
    except ValueError as e:
        raise UserError(f"{e} (resuming {saved.folder})") from e
    decay_end = merged.lr_decay_iters
    if merged.decay_lr and decay_end is not None and merged.max_iters > decay_end:
        log.warning(
            f"--lr_decay_iters={decay_end} is before --max_iters={merged.max_iters}: the last "
            f"{merged.max_iters - decay_end} steps train at the minimum learning rate"
        )
    origins = {f.name: str(saved.folder) for f in fields(given)} | loaded.origins
    return Loaded(merged, origins)


def restarted(loaded: Loaded[C], distributed: DistInfo) -> Loaded[C]:
    """The settings to resume if this torchrun job wrote the newest checkpoint, else `loaded`."""
    given: Any = loaded.settings
    if (job := distributed.job) is None:
        return loaded
    found = folders(given.out_dir) if distributed.main else []
    if not distributed.gather(bool(found) and load(found[-1]).state.get("job") == job)[0]:
        return loaded
    distributed.say("restarted by torchrun: resuming from the last checkpoint")
    origins = {**loaded.origins, "init_from": "restart"}
    return resumed(Loaded(replace(given, init_from="resume"), origins))


def build_model(loaded: Loaded[Any], meta: dict[str, Any]) -> GPT:
    """Build the model on the CPU, with the weights of init_from unless it is "resume".

    Raises:
        UserError: the weights do not fit the given settings or the dataset (its meta.json).
    """
    config, V = loaded.settings, meta["vocab_size"]
    resuming = config.init_from == "resume"
    source = str(latest(config.out_dir)) if resuming else config.init_from
    changes = {"dropout": config.dropout, "attention_backend": config.attention_backend}
    if "attention_window" in loaded.origins:  # else the checkpoint's
        changes["attention_window"] = config.attention_window
    if resuming:
        model = GPT(load(source).config(**changes), config.policy)
    else:
        model = init_model(source, config.policy, **changes)
    tokenizer = tokenizer_meta(source)
    if model.config.vocab_size < V or tokenizer not in (None, meta["tokenizer"]):
        raise UserError(
            f"{source} (vocabulary of {model.config.vocab_size}) was trained with another "
            f"tokenizer than --dataset={config.dataset} (vocabulary of {V}); prepare it again"
        )
    for name in (*SHAPE, "block_size") if resuming else SHAPE:
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


def restore(
    saved: Checkpoint,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    seed: int,
    distributed: DistInfo,
) -> tuple[int, float]:
    """Restore a checkpoint of any number of processes into plain parameters or DTensors.

    Returns:
        (step, lowest validation loss so far).

    Raises:
        UserError: on all processes, if one cannot read it or the model has other sizes.
    """
    rest: dict[str, Any] = {}

    def read() -> None:
        rest.update(saved.rest())
        if saved.shards:
            read_shards_into(tensors(model, optimizer), saved.shards)
        else:
            read_whole_into(model, optimizer, saved.folder, rest["optimizer"]["state"])

    together(distributed, read)
    if scaler.is_enabled() and rest["scaler"]:
        scaler.load_state_dict(rest["scaler"])
    if len(rest["rng"]) == distributed.world_size:
        mine = rest["rng"][distributed.rank]
        torch.set_rng_state(mine["cpu"])
        if "cuda" in mine and distributed.device.type == "cuda":
            torch.cuda.set_rng_state(mine["cuda"], distributed.device)
    else:  # another number of processes: same data, different dropout
        torch.manual_seed(seed + 7919 * saved.step + distributed.rank)
    best = saved.state.get("best_val_loss")
    return saved.step, math.inf if best is None else best
