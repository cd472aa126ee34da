"""The state of a training run, to and from checkpoints of any number of processes.

Saver writes it. resumed(), build_model() and restore() read it, in this order.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from checkpoint import shards, store
from checkpoint.convert import init_model, tokenizer_meta, trained_on
from checkpoint.store import Checkpoint, Json, resume_command
from core import background, files, runtime
from core.distributed import DistInfo
from core.files import command, printable
from core.optimizer import numbers, tensors
from core.options import TrainConfig
from core.parallel import fill, is_sharded, whole
from core.runtime import dtype_name, pick_device, pick_dtype, random_state, set_random_state
from core.settings import Loaded, UserError
from data.loader import fits
from data.tokenizer import same
from model import GPT

# Fixed by the weights: settings cannot change these.
SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "bias", "gelu", "position", "norm", "mlp",
         "qk_norm", "tied")  # fmt: skip

# ----------------------------------------------------------------------------- save


@dataclass
class Saver:
    """Writes the checkpoints of a run, one at a time.

    saver = Saver("out/gpt", keep=2, distributed=distributed, background=True)
    saver.save(model, optimizer, scaler, settings, tokenizer, step=100, val_loss=3.2)
    saver.wait()  # before the run ends
    """

    out_dir: str
    keep: int  # the newest ones that stay, besides the best
    distributed: DistInfo
    background: bool = False  # write while the training goes on
    best_loss: float = math.inf  # lowest validation loss so far
    best_since: int = 0  # after this step: earlier losses are of other data
    val_windows: int = 0  # fingerprint() of the evaluation
    _written: Future[None] | None = field(default=None, init=False)

    def save(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        settings: Json,
        tokenizer: Json,
        *,
        step: int,
        val_loss: float | None,
        **state: object,
    ) -> None:
        """Write a checkpoint; in the background, return when the tensors are copied.

        Args:
            settings: of the run, as plain values.
            tokenizer: from the dataset's meta.json.
            val_loss: None if this step was not evaluated.
            state: more values for train_state.json.

        Raises UserError: this checkpoint or the previous one could not be written.
        """
        self.wait()
        distributed = self.distributed
        rng = distributed.gather(random_state(distributed.device))
        rest: Json = {"scaler": scaler.state_dict(), "rng": rng}
        rest["optimizer"] = optimizer.state_dict()
        contents: Json = {"optimizer": rest}
        if distributed.world_size == 1 and not is_sharded(model):
            contents["weights"] = model.state_dict()
        else:
            contents["shards"] = tensors(model, optimizer)
            del rest["optimizer"]["state"]
        if val_loss is not None:
            self.best_loss = min(self.best_loss, val_loss)
        config = asdict(model.config)
        contents["settings"] = {"train": settings, "model": config, "tokenizer": tokenizer}
        contents["state"] = {
            "step": step,
            "val_loss": val_loss,
            "best_val_loss": self.best_loss if math.isfinite(self.best_loss) else None,
            "best_since": self.best_since,
            "val_windows": self.val_windows,
            "processes": distributed.world_size,
            "job": distributed.job(),  # after a restart by torchrun this checkpoint is resumed
            "torch": torch.__version__,
            **state,
        }
        if self.background:
            contents = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), contents)
            self._written = background.begin(self._write, contents)
        else:
            self._write(contents)

    def _write(self, contents: Json) -> None:
        device = self.distributed.device
        # A separate group: training uses `control` at the same time.
        distributed = replace(self.distributed, control=self.distributed.disk)
        if distributed.main and not Path(self.out_dir).exists():
            store.log.warning("%s was deleted: it is created again", printable(self.out_dir))
        # A new thread starts on device 0.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            store.save(self.out_dir, keep=self.keep, **contents, distributed=distributed)

    def wait(self) -> None:
        """Wait for a checkpoint in the background. Raises UserError if it failed."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def last_good(self) -> str:
        """Name the newest checkpoint that this run wrote or resumed, and how to continue."""
        if self._written is not None:
            self._written.exception()  # wait() raises it
        found = store.folders(self.out_dir)  # set_aside() has moved those of another run
        good = f"{found[-1]} is the last good checkpoint" if found else "there is no checkpoint yet"
        return f"{good}; to continue: {resume_command(self.out_dir, self.distributed)}"


def gathered(model: GPT) -> GPT:
    """An unsharded model, a copy if needed. All processes must call it."""
    if model.ring is None and not is_sharded(model):
        return model
    alone = GPT(model.config, model.policy)
    store.load_weights(alone, {k: whole(t) for k, t in model.state_dict().items()}, "this run")
    return alone.to(model.transformer.wte.weight.device)


# ----------------------------------------------------------------------------- around a run


def locked(config: TrainConfig) -> AbstractContextManager[None]:
    """Keep other runs out of config.out_dir; the main process alone writes there."""
    writes = os.environ.get("RANK", "0") == "0" and not config.eval_only
    return files.locked(Path(config.out_dir)) if writes else nullcontext()


@contextmanager
def explained(config: TrainConfig, distributed: DistInfo) -> Iterator[None]:
    """Leave the processes at the end; explain failures, and name lost ranks."""
    less_memory = (
        f"--batch_size={max(1, config.batch_size // 2)} with --gradient_accumulation_steps="
        f"{config.gradient_accumulation_steps * 2}, or --gradient_checkpointing=True"
    )
    try:
        with runtime.explained(less_memory):
            yield
    except RuntimeError as e:
        distributed.name_missing(e, resume_command(config.out_dir, distributed))
        raise
    distributed.leave()  # not after a failure: NCCL may wait for a rank that is lost


# ----------------------------------------------------------------------------- resume


def resumed(loaded: Loaded[TrainConfig]) -> Loaded[TrainConfig]:
    """The newest checkpoint's settings, overridden by the given ones. Raises UserError."""
    settings = loaded.settings
    saved = store.load(store.latest(settings.out_dir))
    folder = printable(saved.folder)
    before = saved.read("train", type(settings))
    changes: Json = {name: getattr(settings, name) for name in (*loaded.origins, "out_dir")}
    # A run that started from other weights has their sizes, not those in its settings.
    backend = {k: v for k, v in changes.items() if k == "attention_backend"}
    model, names = saved.config(**backend), (*SHAPE, "attention_window", "attention_backend")
    before = replace(before, **{name: getattr(model, name) for name in names})
    if (kept := before.optimizer) != (wanted := changes.get("optimizer", kept)):
        raise UserError(
            f"{folder} was trained with --optimizer={kept}, whose state {wanted} cannot use; "
            f"begin another run with its weights: {command(f'--init_from={settings.out_dir}')}"
        )
    # The checkpoint may come from somebody else: it must not download code, or upload.
    refused = {"attention_hub_kernels"}
    run = Path(settings.out_dir, "wandb_id.txt")
    if not run.is_file() or run.is_symlink():
        refused |= {name for name in vars(settings) if name.startswith("wandb_")}
    for name in ("attention_hub_kernels", "wandb_log"):
        if getattr(before, name) and name not in changes:
            how = "is not resumed" if name in refused else f"goes on in the run of {printable(run)}"
            store.log.warning(f"--{name}=True of {folder} {how}")
    for name in refused:
        changes.setdefault(name, getattr(settings, name))
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
        raise UserError(f"{e} (resuming {folder})") from e
    decay_end = merged.lr_decay_iters or math.inf
    if merged.decay_lr and merged.warmup_iters <= decay_end < merged.max_iters:
        store.log.warning(
            f"--lr_decay_iters={decay_end} is before --max_iters={merged.max_iters}: the last "
            f"{merged.max_iters - decay_end} steps train at the minimum learning rate"
        )
    origins = {f.name: str(saved.folder) for f in fields(settings)} | loaded.origins
    return Loaded(merged, origins)


def restarted(loaded: Loaded[TrainConfig], distributed: DistInfo) -> Loaded[TrainConfig]:
    """The settings to resume if this torchrun job wrote the newest checkpoint, else `loaded`."""
    settings = loaded.settings
    if (job := distributed.job()) is None:
        return loaded
    found = store.folders(settings.out_dir) if distributed.main else []
    if not distributed.gather(bool(found) and store.load(found[-1]).state.get("job") == job)[0]:
        return loaded
    distributed.say("restarted by torchrun: resuming from the last checkpoint")
    origins = {**loaded.origins, "init_from": "restart"}
    return resumed(Loaded(replace(settings, init_from="resume"), origins))


def build_model(loaded: Loaded[TrainConfig], meta: Json) -> GPT:
    """Build the model on the CPU, with the weights of init_from unless it is "resume".

    Raises UserError: the weights do not fit the given settings or the dataset (its meta.json).
    """
    config, V = loaded.settings, meta["vocab_size"]
    resuming = config.init_from == "resume"
    source = str(store.latest(config.out_dir)) if resuming else config.init_from
    named = printable(source)
    changes = {"dropout": config.dropout, "attention_backend": config.attention_backend}
    if "attention_window" in loaded.origins:  # else the checkpoint's
        changes["attention_window"] = config.attention_window
    if resuming:
        model = GPT(store.load(source).config(**changes), config.policy)
    else:
        model = init_model(source, config.policy, **changes)
    tokenizer, dataset = tokenizer_meta(source), Path(config.dataset).name
    if model.config.vocab_size < V or not (tokenizer is None or same(tokenizer, meta["tokenizer"])):
        raise UserError(
            f"{named} (vocabulary of {model.config.vocab_size}) was trained with another "
            f"tokenizer than --dataset={config.dataset} (vocabulary of {V}); prepare it again, for "
            f"a model's own tokenizer with {command(f'--tokenizer={source}')}"
        )
    known = meta["tokenizer"]["name"] == "gpt2" or trained_on(source) == dataset
    if tokenizer is None and not (known and fits(V, model.config.vocab_size)):
        store.log.warning(
            f"{named} (vocabulary of {model.config.vocab_size}) has no tokenizer: its own may "
            f"differ from that of --dataset={config.dataset} (vocabulary of {V})"
        )
    for name in (*SHAPE, "vocab_size", *(["block_size"] if resuming else [])):
        have, want = getattr(model.config, name), getattr(config, name)
        if name == "n_kv_head":
            have, want = model.config.kv_heads, want or model.config.n_head
        if name in loaded.origins and want is not None and want != have:
            raise UserError(
                f"{named} has {name}={have}, which cannot be changed to {want} "
                f"({loaded.origins[name]})"
            )
    T, have = config.block_size, model.config.block_size
    if "block_size" not in loaded.origins:
        ours = Path(source).is_file() or store.own_checkpoint(source)
        T = have if ours else min(T, have)  # transformers' is what a model can, not what fits here
    try:
        model.crop_block_size(T)
    except ValueError as e:
        raise UserError(f"{e} ({named})") from e
    return model


@dataclass(frozen=True)
class Progress:
    """Progress of a run before its next step."""

    step: int = 0  # steps done
    sequences_seen: int = 0  # in these steps
    best: tuple[float, int] = math.inf, 0  # best_loss and best_since of Saver
    evaluated: bool = True  # False: the evaluation after this step is to come


def restore_run(
    config: TrainConfig,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    distributed: DistInfo,
    val_windows: int,
) -> Progress:
    """Restore the newest checkpoint of config.out_dir and print where the run goes on. If its
    evaluation had another fingerprint() than val_windows, a new best loss begins."""
    saved = store.load(store.latest(config.out_dir))
    step, best = restore(saved, model, optimizer, scaler, config.seed, distributed)
    before, state = saved.settings["train"], saved.state
    was = before["batch_size"] * before["gradient_accumulation_steps"]
    now = config.batch_size * config.gradient_accumulation_steps
    tokens = state.get("sequences_seen", step * was) * before["block_size"]
    seen = math.ceil(tokens / config.block_size)
    distributed.say(f"resuming {config.out_dir} after step {step} and {seen:,} sequences")
    if was != now:
        distributed.say(
            f"a step has {now:,} sequences, before {was:,}: the data go on after the last sequence "
            "seen, the learning rate stays a function of the step"
        )
    since = state.get("best_since", 0)
    mask = before.get("document_mask", False) != config.document_mask
    if mask or state.get("val_windows", val_windows) != val_windows:
        names = ("dataset", "eval_iters", "batch_size", "document_mask")
        changed = [f"--{name}" for name in names if before.get(name) != getattr(config, name)]
        what = ", ".join(changed) or "the data"
        distributed.say(f"the evaluation is another one ({what}): a new best loss begins")
        best, since = math.inf, step
    due = step % config.eval_interval == 0 or step == config.max_iters
    evaluated = not due or state.get("val_loss") is not None
    return Progress(step, seen, (best, since), evaluated)


def restore(
    saved: Checkpoint,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    seed: int,
    distributed: DistInfo,
) -> tuple[int, float]:
    """Restore a checkpoint of any number of processes into plain parameters or DTensors.

    Returns (step, lowest validation loss so far). Raises UserError on all processes, if one cannot
    read it or the model has other sizes.
    """

    def read() -> Json:
        rest, targets = saved.rest(), tensors(model, optimizer)
        if saved.index is not None:
            store.read_file(saved.index, lambda index: _read_shards(index.parent, targets))
            return rest
        values = {f"model.{name}": value for name, value in saved.weights().items()}
        state = rest["optimizer"].get("state") or {}
        if saved.step == 0 and not state:  # as it is before the first step
            targets = {name: t for name, t in targets.items() if name.startswith("model.")}
        for name, number in numbers(model, optimizer).items():
            moments = state.get(number, {})
            values |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
        store.check_shapes(targets, values, str(saved.folder))
        for name, target in targets.items():
            fill(target, values[name])
        return rest

    rest = store.together(distributed, read)
    if scaler.is_enabled() and rest["scaler"]:
        scaler.load_state_dict(rest["scaler"])
    if len(rest["rng"]) == distributed.world_size:
        set_random_state(rest["rng"][distributed.rank], distributed.device)
    else:  # another number of processes: same data, different dropout
        torch.manual_seed(seed + 7919 * saved.step + distributed.rank)
    best = saved.state.get("best_val_loss")
    return saved.step, math.inf if best is None else best


def _read_shards(folder: Path, targets: dict[str, Tensor]) -> None:
    store.check_shapes(targets, shards.empty(folder), str(folder))
    shards.read(folder, targets)
