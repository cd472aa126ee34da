"""Training that starts from weights: a resumed run, or another run's checkpoint."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from checkpoint.convert import init_model
from checkpoint.store import Checkpoint, backend_of, folders, latest, load, log, tokenizer_meta
from checkpoint.tensors import read_shards_into, read_whole_into, tensors
from checkpoint.together import together
from core.distributed import DistInfo
from core.restarts import restarted
from core.runtime import dtype_name, pick_device, pick_dtype
from core.settings import Loaded, UserError
from model import GPT

C = TypeVar("C")  # train.py's TrainConfig

# Fixed by the weights: settings cannot change these.
SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "bias", "gelu", "vocab_size")


def resumed(loaded: Loaded[C]) -> Loaded[C]:
    """The settings of the newest checkpoint in out_dir, overridden by those that were given."""
    given: Any = loaded.settings
    saved = load(latest(given.out_dir))
    before: Any = saved.train_settings(type(given))
    # Of a run that began with other weights its settings may hold the defaults: the model has them.
    model = saved.config(attention_backend="auto")
    sizes = {name: getattr(model, name) for name in (*SHAPE, "attention_window")}
    before = replace(before, **{**sizes, "vocab_size": before.vocab_size})
    changes = {name: getattr(given, name) for name in (*loaded.origins, "out_dir")}
    if "attention_backend" not in changes:
        changes["attention_backend"] = backend_of(before.attention_backend, saved.folder)
    if before.attention_hub_kernels and "attention_hub_kernels" not in changes:
        # The checkpoint may be somebody else's, as with a file.
        log.warning(
            "%s was trained with kernels of the hub allowed; that is asked for anew: "
            "--attention_hub_kernels=True", saved.folder
        )  # fmt: skip
        changes["attention_hub_kernels"] = False
    if before.lr_decay_iters is None:  # a larger max_iters must not raise the learning rate again
        changes.setdefault("lr_decay_iters", before.max_iters)
    if changes.get("parallel") == "ddp":  # which has no parts
        changes.setdefault("shard_size", None)
    if before.dtype == "auto":  # an older version's: by the rule of then
        there = pick_device(changes.get("device", before.device))
        changes.setdefault("dtype", dtype_name(pick_dtype("auto", there)))
    try:
        merged = replace(before, **changes)
    except ValueError as e:
        raise UserError(f"{e} (resuming {saved.folder})") from e
    origins = {f.name: str(saved.folder) for f in fields(given)} | loaded.origins
    return Loaded(merged, origins)


def started_again(loaded: Loaded[C], distributed: DistInfo) -> Loaded[C]:
    """The settings; if torchrun has started the run again, those to go on with."""
    given: Any = loaded.settings
    again = restarted(given.out_dir, distributed)
    if not again or not distributed.gather(bool(folders(given.out_dir)))[0]:
        return loaded
    distributed.say("torchrun has started the run again: it goes on from its last checkpoint")
    origins = {**loaded.origins, "init_from": "restart"}
    return resumed(Loaded(replace(given, init_from="resume"), origins))


def build_model(loaded: Loaded[Any], meta: dict[str, Any]) -> GPT:
    """A new model, or one with the weights that init_from names, on the CPU.

    Raises:
        UserError: the weights do not fit the given settings, or the dataset (its meta.json).
    """
    config, V = loaded.settings, meta["vocab_size"]
    if config.init_from == "scratch":
        vocab_size = config.vocab_size or (V if V <= 1024 else -(-V // 64) * 64)
        return GPT(config.model(vocab_size), config.policy)
    resuming = config.init_from == "resume"  # then restore() reads the weights, shared out or not
    source = str(latest(config.out_dir)) if resuming else config.init_from
    changes = {"dropout": config.dropout, "attention_backend": config.attention_backend}
    if "attention_window" in loaded.origins:  # otherwise the one that the weights were trained with
        changes["attention_window"] = config.attention_window
    if resuming:
        model = GPT(load(source).config(**changes), config.policy)
    else:
        model = init_model(source, config.policy, **changes)
    tokenizer = tokenizer_meta(source)
    if model.config.vocab_size < V or tokenizer not in (None, meta["tokenizer"]):
        raise UserError(
            f"{source}, with a vocabulary of {model.config.vocab_size} tokens, was not trained "
            f"with the tokenizer of the dataset {config.dataset!r}, which has {V}; prepare that "
            "with the same one"
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
    """Restore all of `saved`, whatever wrote it, into plain parameters or DTensors, each process
    its part; returns the step and the lowest loss so far.

    Raises:
        UserError: on all processes, if one cannot read it, or the model is another.
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
    else:  # another number of processes: the same data, but not the same dropout
        torch.manual_seed(seed + 7919 * saved.step + distributed.rank)
    best = saved.state.get("best_val_loss")
    return saved.step, math.inf if best is None else best
