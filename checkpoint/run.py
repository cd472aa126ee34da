"""A run's state, in checkpoints."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from checkpoint import store
from checkpoint.families import init_model, tokenizer_meta, trained_on
from checkpoint.store import Checkpoint
from core import process, runtime
from core.files import command, printable
from core.optimizer import tensors
from core.options import ModelOptions, TrainConfig
from core.parallel import DistInfo, is_sharded, local, local_part, whole
from core.runtime import dtype_name, pick_device, pick_dtype, random_state, set_random_state
from core.settings import Loaded, user_errors
from data.loader import fits
from data.schema import FileError, Json
from data.tokenizer import same
from model import GPT

FREE = {"block_size", "vocab_size", "dropout", "attention_backend"}
FIXED = [f.name for f in fields(ModelOptions) if f.name not in FREE]  # by the weights


def resume_command(out_dir: str, distributed: DistInfo) -> str:
    """Resume this run; before its first checkpoint the given command."""
    began = 0 if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else distributed.began
    words = sys.argv[1:]
    with suppress(FileNotFoundError, IndexError):  # just moved or deleted; none
        if store.folders(out_dir)[-1].stat().st_mtime >= began:
            words = ["--init_from=resume", f"--out_dir={out_dir}"]
    return f"{distributed.launcher} train.py {command(*words)}"


@dataclass
class Saver:
    """Writes checkpoints, one at a time; wait() before the run ends."""

    config: TrainConfig
    distributed: DistInfo
    tokenizer: Json
    val_windows: int  # fingerprint() of the evaluation
    best_loss: float = math.inf
    best_since: int = 0  # earlier losses are of other data
    _written: Future[None] | None = None

    def save(self, model: GPT, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler,
             *, step: int, val_loss: float | None, **state: object) -> None:  # fmt: skip
        """Write a checkpoint; in the background, return when the tensors are copied. Raises
        UserError: this one or the previous one failed."""
        self.wait()
        distributed = self.distributed
        if val_loss is not None:
            self.best_loss = min(self.best_loss, val_loss)
        contents: Json = {
            "optimizer": {
                "scaler": scaler.state_dict(),
                "rng": distributed.gather(random_state(distributed.device)),
                "optimizer": optimizer.state_dict(),
            },
            "settings": {
                "train": asdict(self.config),
                "model": asdict(model.config),
                "tokenizer": self.tokenizer,
            },
            "state": {
                "step": step,
                "val_loss": val_loss,
                "best_val_loss": self.best_loss if math.isfinite(self.best_loss) else None,
                "best_since": self.best_since,
                "val_windows": self.val_windows,
                "processes": distributed.world_size,
                "job": distributed.job(),
                "torch": torch.__version__,
                **state,
            },
        }
        if distributed.world_size == 1:
            contents["weights"] = model.state_dict()
        else:
            contents["shards"] = tensors(model, optimizer)
            del contents["optimizer"]["optimizer"]["state"]
        if self.config.async_checkpoint:
            contents = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), contents)
            self._written = process.in_thread(self._write, contents)
        else:
            self._write(contents)

    def _write(self, contents: Json) -> None:
        config, device = self.config, self.distributed.device
        # Training uses `control` at the same time.
        distributed = replace(self.distributed, control=self.distributed.disk)
        if distributed.main and not Path(config.out_dir).exists():
            store.log.warning("%s was deleted: it is created again", printable(config.out_dir))
        # A new thread starts on device 0.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            keep = config.keep_checkpoints
            store.save(config.out_dir, keep=keep, distributed=distributed, **contents)

    def wait(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def last_good(self) -> str:
        """The newest checkpoint, and how to continue."""
        if self._written is not None:
            self._written.exception()  # wait() raises it
        out_dir = self.config.out_dir
        found = [f"{printable(p)} is the last good checkpoint" for p in store.folders(out_dir)]
        good = found[-1] if found else "there is no checkpoint yet"
        return f"{good}; to continue: {resume_command(out_dir, self.distributed)}"

    def restore(self, model: GPT, optimizer: torch.optim.Optimizer,
                scaler: torch.amp.GradScaler) -> tuple[int, int, bool]:  # fmt: skip
        """The newest checkpoint, if the run resumes; return steps, sequences seen, and False to
        evaluate after this step."""
        config, distributed = self.config, self.distributed
        if config.init_from != "resume":
            return 0, 0, not config.eval_on_start
        saved = store.load(store.latest(config.out_dir))
        restore(saved, model, optimizer, scaler, config.seed, distributed)
        before, step, state = saved.read("train", TrainConfig), saved.step, saved.state
        tokens = state.get("sequences_seen", step * before.global_batch) * before.block_size
        seen = math.ceil(tokens / config.block_size)
        where = printable(config.out_dir)
        distributed.say(f"resuming {where} after step {step} and {seen:,} sequences")
        if (was := before.global_batch) != (now := config.global_batch):
            distributed.say(f"a step has {now:,} sequences, before {was:,}")
        best = state.get("best_val_loss")
        self.best_loss = math.inf if best is None else best
        self.best_since = state.get("best_since", 0)
        mask = before.document_mask != config.document_mask
        if mask or state.get("val_windows", self.val_windows) != self.val_windows:
            names = ("dataset", "eval_iters", "batch_size", "document_mask")
            changed = [f"--{n}" for n in names if getattr(before, n) != getattr(config, n)]
            what = ", ".join(changed) or "the data"
            distributed.say(f"the evaluation is another one ({what}): a new best loss begins")
            self.best_loss = math.inf
            self.best_since = step
        due = step % config.eval_interval == 0 or step == config.max_iters
        return step, seen, not due or state.get("val_loss") is not None


def set_aside(out_dir: str | Path) -> Path | None:
    """Archive an earlier run, if any, in out_dir/earlier-N."""
    out_dir = Path(out_dir)
    if not (found := store.folders(out_dir)):
        return None
    target = next(p for n in count(1) if not (p := out_dir / f"earlier-{n}").exists())
    with user_errors(f"cannot move the earlier run to {printable(target)}: "):
        target.mkdir()
        for path in [*found, out_dir / "metrics.jsonl", out_dir / "loss.png"]:
            with suppress(FileNotFoundError):
                path.rename(target / path.name)
    return target


def gathered(model: GPT) -> GPT:
    """Unsharded, a copy if needed. All processes call it."""
    if model.ring is None and not is_sharded(model):
        return model
    weights = {name: whole(t) for name, t in model.state_dict().items()}
    alone = store.new_model(model.config, model.policy, "this run", weights)
    return alone.to(model.transformer.wte.weight.device)


@contextmanager
def explained(config: TrainConfig, distributed: DistInfo) -> Iterator[None]:
    """Leave the processes; explain failures, name lost ranks."""
    half, twice = max(1, config.batch_size // 2), config.gradient_accumulation_steps * 2
    less_memory = f"--batch_size={half} with --gradient_accumulation_steps={twice}"
    try:
        with runtime.explained(f"{less_memory}, or --gradient_checkpointing=True"):
            yield
    except RuntimeError as e:
        distributed.name_missing(e, resume_command(config.out_dir, distributed))
        raise
    distributed.leave()  # NCCL may wait for a lost rank


def resumed(loaded: Loaded[TrainConfig]) -> Loaded[TrainConfig]:
    """The newest checkpoint's settings under the given ones. Raises UserError."""
    settings = loaded.settings
    saved = store.load(store.latest(settings.out_dir))
    folder = printable(saved.folder)
    before = saved.read("train", TrainConfig)
    changes: Json = {name: getattr(settings, name) for name in (*loaded.origins, "out_dir")}
    # After init_from other weights the sizes are theirs, not its settings'.
    model = saved.config(**{k: v for k, v in changes.items() if k == "attention_backend"})
    names = (*FIXED, "attention_window", "attention_backend")
    before = replace(before, **{name: getattr(model, name) for name in names})
    if (kept := before.optimizer) != (wanted := changes.get("optimizer", kept)):
        why = f"{folder} was trained with --optimizer={kept}, whose state {wanted} cannot use"
        raise FileError(f"{why}; for its weights: {command(f'--init_from={settings.out_dir}')}")
    if 0 < (changes.get("profile_step") or 0) <= saved.step:
        store.log.warning(f"--profile_step={changes['profile_step']}: {saved.step} steps are done")
    # Another person's checkpoint must not download code, or upload.
    run, refused = Path(settings.out_dir, "wandb_id.txt"), {"attention_hub_kernels"}
    if not run.is_file() or run.is_symlink():
        refused |= {name for name in vars(settings) if name.startswith("wandb_")}
    for name in ("attention_hub_kernels", "wandb_log"):
        if getattr(before, name) and name not in changes:
            how = "is not resumed" if name in refused else f"goes on in the run of {printable(run)}"
            store.log.warning(f"--{name}=True of {folder} {how}")
    usual = {name: getattr(settings, name) for name in refused}
    if before.lr_decay_iters is None:  # a larger max_iters must not raise the learning rate
        usual["lr_decay_iters"] = before.max_iters
    if os.environ.get("WORLD_SIZE", "1") == "1":
        usual |= {"parallel": "ddp", "context_parallel": 1}
    if (usual | changes).get("parallel") == "ddp":
        usual["shard_size"] = None
    if before.dtype == "auto":
        there = pick_device(changes.get("device", before.device))
        usual["dtype"] = dtype_name(pick_dtype("auto", there))
    with user_errors(f"resuming {folder}: "):
        merged = replace(before, **{**usual, **changes})
    origins = dict.fromkeys(vars(settings), folder) | loaded.origins
    return Loaded(merged, origins)


def restarted(loaded: Loaded[TrainConfig], distributed: DistInfo) -> Loaded[TrainConfig]:
    """Resume if this torchrun job wrote the newest checkpoint, else `loaded`."""
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
    """The model on the CPU, with init_from's weights unless "resume". Raises UserError."""
    config, V = loaded.settings, meta["vocab_size"]
    resuming = config.init_from == "resume"
    source = str(store.latest(config.out_dir)) if resuming else config.init_from
    named = printable(source)
    changes = {"dropout": config.dropout, "attention_backend": config.attention_backend}
    if "attention_window" in loaded.origins:  # else the checkpoint's
        changes["attention_window"] = config.attention_window
    if resuming:
        model = store.new_model(store.load(source).config(**changes), config.policy, named)
    else:
        model = init_model(source, config.policy, **changes)
    tokenizer, has = tokenizer_meta(source), model.config.vocab_size
    sized = f"{named} (vocabulary of {has})"
    dataset = f"--dataset={printable(config.dataset)} (vocabulary of {V})"
    with user_errors(f"{named}: "):
        other = tokenizer is not None and not same(tokenizer, meta["tokenizer"])
    if has < V or other:
        how = f"prepare it with the model's: {command(f'--tokenizer={source}')}"
        raise FileError(f"{sized} has another tokenizer than {dataset}; {how}")
    known = meta["tokenizer"]["name"] == "gpt2" or trained_on(source) == Path(config.dataset).name
    if tokenizer is None and not (known and fits(V, has)):
        store.log.warning(f"{sized} has no tokenizer: its own may differ from that of {dataset}")
    for name in (*FIXED, "vocab_size", *(["block_size"] if resuming else [])):
        have, want = getattr(model.config, name), getattr(config, name)
        if name == "n_kv_head":
            have, want = model.config.kv_heads, want or model.config.n_head
        if name in loaded.origins and want is not None and want != have:
            wanted = f"{want} ({loaded.origins[name]})"
            raise FileError(f"{named} has {name}={have}, which cannot be changed to {wanted}")
    T, have = config.block_size, model.config.block_size
    if "block_size" not in loaded.origins:
        ours = Path(source).is_file() or store.own_checkpoint(source)
        T = have if ours else min(T, have)  # transformers' may be more than fits
    with user_errors(f"{named}: "):
        model.crop_block_size(T)
    return model


def restore(saved: Checkpoint, model: GPT, optimizer: torch.optim.Optimizer,
            scaler: torch.amp.GradScaler, seed: int,
            distributed: DistInfo) -> None:  # fmt: skip
    """Tensors, whole or sharded, and random states. Raises UserError on all processes."""
    with store.together(distributed):
        rest, targets = saved.rest(), tensors(model, optimizer)
        if saved.sharded:
            store.read_file(saved.folder, store.INDEX, lambda i: store.read_shards(i, targets))
        else:
            values = {f"model.{name}": value for name, value in saved.weights().items()}
            state = rest["optimizer"].get("state", {})
            if saved.step == 0 and not state:
                targets = {name: t for name, t in targets.items() if name.startswith("model.")}
            params = (p for group in optimizer.param_groups for p in group["params"])
            moments = {id(p): state.get(number, {}) for number, p in enumerate(params)}
            for name, p in model.state_dict(keep_vars=True).items():
                values |= {f"optimizer.{name}.{key}": t for key, t in moments[id(p)].items()}
            store.check_shapes(targets, values, str(saved.folder))
            for name, target in targets.items():
                shape, at, _ = local_part(target)
                own = tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))
                local(target).copy_(values[name][own])
    if scaler.is_enabled() and rest["scaler"]:
        scaler.load_state_dict(rest["scaler"])
    if len(rest["rng"]) == distributed.world_size:
        set_random_state(rest["rng"][distributed.rank], distributed.device)
    else:  # other dropout than before
        torch.manual_seed(seed + 7919 * saved.step + distributed.rank)
