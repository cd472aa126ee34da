"""Training that starts from weights: a resumed run, or another run's checkpoint."""

from __future__ import annotations

import math
import threading
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from checkpoint.convert import init_model
from checkpoint.store import (
    Checkpoint,
    backend_of,
    check_shapes,
    latest,
    load,
    load_weights,
    log,
    read_file,
    save,
    shapes,
    tokenizer_meta,
)
from checkpoint.together import together
from core.distributed import DistInfo
from core.parallel import is_sharded, whole
from core.runtime import dtype_name, pick_device, pick_dtype, random_state
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
    if before.dtype == "auto":  # an older version's: by the rule of then
        there = pick_device(changes.get("device", before.device))
        changes.setdefault("dtype", dtype_name(pick_dtype("auto", there)))
    try:
        merged = replace(before, **changes)
    except ValueError as e:
        raise UserError(f"{e} (resuming {saved.folder})") from e
    origins = {f.name: str(saved.folder) for f in fields(given)} | loaded.origins
    return Loaded(merged, origins)


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


def gathered(model: GPT) -> GPT:
    """The model with all of its weights, for one process alone; a new one where its weights or its
    sequences are shared with others. All processes must ask."""
    if model.ring is None and not is_sharded(model):
        return model
    alone = GPT(model.config, model.policy)
    load_weights(alone, {k: whole(t) for k, t in model.state_dict().items()}, "this run")
    return alone.to(model.transformer.wte.weight.device)


def save_run(run: Any, val_loss: float | None) -> None:
    """Write a checkpoint after a step of train.py's Run (val_loss None: it was not evaluated).

    With run.config.async_checkpoint only the copying is waited for; see Saving.
    """
    finish(run)
    distributed = run.distributed
    rng = distributed.gather(random_state(distributed.device))  # of every process
    if val_loss is not None:
        run.best_loss = min(run.best_loss, val_loss)
    optimizer, rest = run.optimizer.state_dict(), {"scaler": run.scaler.state_dict(), "rng": rng}
    contents: dict[str, Any] = {}
    if distributed.world_size == 1 and not is_shared(run.model):
        contents["weights"] = run.model.state_dict()
        contents["optimizer"] = {"optimizer": optimizer, **rest}
    else:
        from checkpoint.shards import check_replicas

        check_replicas(run.model.state_dict(), distributed)
        numbered = numbers(run.model, run.optimizer)
        contents["shards"] = tensors(run.model, run.optimizer)
        groups = {"param_groups": optimizer["param_groups"]}
        names = sorted(numbered, key=numbered.__getitem__)
        contents["optimizer"] = {"optimizer": groups, "names": names, **rest}
    contents["settings"] = {
        "train": asdict(run.config),
        "model": asdict(run.model.config),
        "tokenizer": run.meta["tokenizer"],
    }
    contents["state"] = {
        "step": run.step,
        "val_loss": val_loss,
        "best_val_loss": run.best_loss if math.isfinite(run.best_loss) else None,
        "sequences_seen": run.step * run.global_batch,  # the data position, derived from step
        "processes": distributed.world_size,
        "attention_backend": run.chosen.backend.name,
        "attention_kernels": list(run.chosen.kernels),
        "torch": torch.__version__,
    }
    how = {"out_dir": run.config.out_dir, "keep": run.config.keep_checkpoints}
    if not getattr(run.config, "async_checkpoint", False):
        save(**how, **contents, distributed=distributed)
        return
    run.saving = getattr(run, "saving", None) or Saving(distributed)
    run.saving.begin(**how, **copied(contents))


def finish(run: Any) -> None:
    """Wait for the checkpoint that is being written in the background, if there is one; a run calls
    this before it ends.

    Raises:
        UserError: it could not be written.
    """
    if saving := getattr(run, "saving", None):
        saving.wait()


class Saving:
    """save() in the background, while the run goes on; one at a time."""

    def __init__(self, distributed: DistInfo) -> None:
        group = distributed.control  # in which the run's steps agree meanwhile
        group = None if group is None else dist.new_group(backend="gloo")
        self.distributed = replace(distributed, control=group)
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def begin(self, **contents: Any) -> None:
        def work() -> None:
            try:
                save(**contents, distributed=self.distributed)
            except BaseException as e:
                self.failure = e

        # A daemon: a run that fails ends at once, and leaves the checkpoint before.
        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
        self.thread, failure, self.failure = None, self.failure, None
        if failure is not None:
            raise failure


def copied(value: Any) -> Any:
    """Dicts and lists as they are now: a copy, with their tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return [copied(v) for v in value] if isinstance(value, list | tuple) else value


def is_shared(model: torch.nn.Module) -> bool:
    """Whether each process holds only a part of the parameters: they are DTensors."""
    return any(hasattr(p, "placements") for p in model.parameters())


def numbers(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The number that optimizer.state_dict() gives each parameter."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    number = {id(p): i for i, p in enumerate(params)}
    return {name: number[id(p)] for name, p in model.state_dict(keep_vars=True).items()}


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that a run learns: {"model.<name>": weight, "optimizer.<name>.exp_avg": ..., ...}; the
    tensors themselves. AdamW's state is made, as its first step would, where there is none yet."""
    flat: dict[str, Tensor] = {}
    for name, p in model.state_dict(keep_vars=True).items():
        flat[f"model.{name}"] = weight = p.detach()
        if not (state := optimizer.state[p]):
            device = p.device if optimizer.defaults["fused"] else "cpu"
            state["step"] = torch.zeros((), device=device)
            state |= {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
        flat |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    return flat


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
        rest.update(saved.rest(mmap=True))
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


def read_shards_into(targets: dict[str, Tensor], folder: Path) -> None:
    from checkpoint import shards

    check_shapes(shapes(targets), read_file(folder, shards.shapes), str(folder))
    read_file(folder, lambda path: shards.read(path, targets))


def read_whole_into(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, state: dict[int, Any]
) -> None:
    """The weights of a one-file checkpoint and `state`, the state of its optimizer by number."""
    path, targets = folder / "model.safetensors", tensors(model, optimizer)

    def read(path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            sources = {f"model.{name}": file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            saved = {name: tuple(s.get_shape()) for name, s in sources.items()}
            own = {n: s for n, s in shapes(targets).items() if n.startswith("model.")}
            check_shapes(own, saved, str(path))
            for name, number in numbers(model, optimizer).items():
                of_it = state.get(number, {})  # empty before the first step
                sources |= {f"optimizer.{name}.{key}": value for key, value in of_it.items()}
            for name in sources.keys() & targets.keys():
                fill(targets[name], sources[name])

    read_file(path, read)


def fill(target: Any, source: Any) -> None:
    """Copy `source`, a tensor or the slices of a file, into `target`; into a DTensor only what this
    process holds of it, and no more is read."""
    part: tuple[slice, ...] = (slice(None),) * target.dim()
    if hasattr(target, "placements"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as find

        shape, at = find(target.shape, target.device_mesh, target.placements)
        part = tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))
        target = target.to_local()
    if target.numel():
        target.copy_(source[part])
