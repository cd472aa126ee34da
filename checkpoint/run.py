"""The state of a training run, to and from checkpoints of any number of processes.

Saver writes it. resumed(), build_model() and restore() read it, in this order.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from checkpoint import shards, store
from checkpoint.convert import init_model, tokenizer_meta, trained_on
from checkpoint.store import Checkpoint, Json, resume_command
from core import runtime
from core.distributed import DistInfo
from core.files import open_output
from core.optimizer import numbers, tensors
from core.options import TrainConfig
from core.parallel import fill, is_sharded, whole
from core.runtime import dtype_name, pick_device, pick_dtype, random_state, set_random_state
from core.settings import Loaded, UserError
from data.loader import find, fits
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
    _thread: threading.Thread | None = field(default=None, init=False)
    _failure: BaseException | None = field(default=None, init=False)

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
            # A daemon: a failing run ends at once.
            self._thread = threading.Thread(target=self._write, args=[contents], daemon=True)
            self._thread.start()
        else:
            self._write(contents)
            self.wait()

    def _write(self, contents: Json) -> None:
        try:
            device = self.distributed.device
            # A separate group: training uses `control` at the same time.
            distributed = replace(self.distributed, control=self.distributed.disk)
            # A new thread starts on device 0.
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                store.save(self.out_dir, keep=self.keep, **contents, distributed=distributed)
        except BaseException as e:
            self._failure = e

    def wait(self) -> None:
        """Wait for a checkpoint in the background. Raises UserError if it failed."""
        if self._thread is not None:
            self._thread.join()
        failure, self._thread, self._failure = self._failure, None, None
        if failure is not None:
            raise failure

    def last_good(self) -> str:
        """Name the newest checkpoint that this run wrote or resumed, and how to continue."""
        if self._thread is not None:
            self._thread.join()  # if it has failed, wait() raises
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


@contextmanager
def locked(config: TrainConfig) -> Iterator[None]:
    """Keep other runs out of config.out_dir, by a lock that ends with this process.

    Raises UserError: another run has it, or it cannot be written.
    """
    import fcntl

    if os.environ.get("RANK", "0") != "0" or config.eval_only:  # these write nothing
        yield
        return
    folder = Path(config.out_dir)
    path, made = folder / ".lock", not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_output(path, "a+")
    except OSError as e:
        why = "it is a link to nothing" if made and folder.is_symlink() else e.strerror
        raise UserError(f"--out_dir={folder} cannot be written ({why})") from e
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"--out_dir={folder} is in use by another run ({file.read()}); name another folder"
            ) from None
        except OSError as e:  # NFS without locks
            store.log.warning(f"{path} cannot be locked ({e.strerror}): start no other run there")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        try:
            yield
        finally:
            if made and [*folder.iterdir()] == [path]:  # nothing was begun
                shutil.rmtree(folder)


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
    before = saved.read("train", type(settings))
    changes = {name: getattr(settings, name) for name in (*loaded.origins, "out_dir")}
    # A run that started from other weights has their sizes, not those in its settings.
    backend = {k: v for k, v in changes.items() if k == "attention_backend"}
    model, names = saved.config(**backend), (*SHAPE, "attention_window", "attention_backend")
    before = replace(before, **{name: getattr(model, name) for name in names})
    if before.attention_hub_kernels and "attention_hub_kernels" not in changes:
        # The checkpoint may come from somebody else: ask again before downloading code.
        store.log.warning(f"--attention_hub_kernels=True of {saved.folder} is not resumed")
        changes["attention_hub_kernels"] = False
    joins = (run := Path(settings.out_dir, "wandb_id.txt")).is_file() and not run.is_symlink()
    if before.wandb_log and "wandb_log" not in changes:
        how = "goes on in the run of" if joins else "is not resumed, without a run in"
        store.log.warning(f"--wandb_log=True of {saved.folder} {how} {run}")
    if not joins:  # nor may it upload
        changes |= {name: x for name, x in vars(settings).items() if name.startswith("wandb_")}
    if (kept := before.optimizer) != (wanted := changes.get("optimizer", kept)):
        raise UserError(
            f"{saved.folder} was trained with --optimizer={kept}, whose state {wanted} cannot use; "
            f"begin another run with its weights: --init_from={settings.out_dir}"
        )
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
    name = "dataset" if os.sep in merged.dataset else "data_dir"
    path, data = Path(getattr(merged, name)), find(merged.dataset, merged.data_dir)
    if name not in changes and not (path.is_absolute() or path.exists() or data.exists()):
        raise UserError(
            f"{saved.folder} has --{name}={path}, relative to where its run began, which is not "
            f"{Path.cwd()}: name the folder with --{name}"
        )
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
            f"{source} (vocabulary of {model.config.vocab_size}) was trained with another "
            f"tokenizer than --dataset={config.dataset} (vocabulary of {V}); prepare it again, for "
            f"a model's own tokenizer with --tokenizer={source}"
        )
    known = meta["tokenizer"]["name"] == "gpt2" or trained_on(source) == dataset
    if tokenizer is None and not (known and fits(V, model.config.vocab_size)):
        store.log.warning(
            f"{source} (vocabulary of {model.config.vocab_size}) has no tokenizer: its own may "
            f"differ from that of --dataset={config.dataset} (vocabulary of {V})"
        )
    for name in (*SHAPE, "vocab_size", *(["block_size"] if resuming else [])):
        have, want = getattr(model.config, name), getattr(config, name)
        if name == "n_kv_head":
            have, want = model.config.kv_heads, want or model.config.n_head
        if name in loaded.origins and want is not None and want != have:
            raise UserError(
                f"{source} has {name}={have}, which cannot be changed to {want} "
                f"({loaded.origins[name]})"
            )
    T, have = config.block_size, model.config.block_size
    if "block_size" not in loaded.origins:
        ours = Path(source).is_file() or store.own_checkpoint(source)
        T = have if ours else min(T, have)  # transformers' is what a model can, not what fits here
    try:
        model.crop_block_size(T)
    except ValueError as e:
        raise UserError(f"{e} ({source})") from e
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
    before = saved.settings["train"]
    was = before["batch_size"] * before["gradient_accumulation_steps"]
    now = config.batch_size * config.gradient_accumulation_steps
    tokens = saved.state.get("sequences_seen", step * was) * before["block_size"]
    seen = -(-tokens // config.block_size)
    distributed.say(f"resuming {config.out_dir} after step {step} and {seen:,} sequences")
    if was != now:
        distributed.say(
            f"a step has {now:,} sequences, before {was:,}: the data go on after the last sequence "
            "seen, the learning rate stays a function of the step"
        )
    since = saved.state.get("best_since", 0)
    mask = before.get("document_mask", False) != config.document_mask
    if mask or saved.state.get("val_windows", val_windows) != val_windows:
        names = ("dataset", "eval_iters", "batch_size", "document_mask")
        changed = [f"--{name}" for name in names if before.get(name) != getattr(config, name)]
        what = ", ".join(changed) or "the data"
        distributed.say(f"the evaluation is another one ({what}): a new best loss begins")
        best, since = math.inf, step
    due = step % config.eval_interval == 0 or step == config.max_iters
    evaluated = not due or saved.state.get("val_loss") is not None
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
    rest: Json = {}

    def read() -> None:
        rest.update(saved.rest())
        targets = tensors(model, optimizer)
        if (folder := saved.folder / "shards").exists():
            store.read_file(folder, lambda folder: _read_shards(folder, targets))
            return
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

    store.together(distributed, read)
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
