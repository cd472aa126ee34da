"""Checkpoints: save, load, resume.

A checkpoint is a folder, out_dir/step-00000250:

    model.safetensors   the weights
    optimizer.pt        optimizer, gradient scaler and random states (tensors and plain numbers)
    settings.json       the run's settings, the model's sizes, the tokenizer
    train_state.json    step, losses, data position, the attention backend and kernels that ran
    shards/             of several processes: each one's part of the weights and of the optimizer's
                        state, which the first two files then lack (checkpoint/shards.py)

It is written under a temporary name, synced to disk, then renamed: a kill at any moment leaves the
last good checkpoint. Loading never runs code from a file: the formats are safetensors, JSON, and
torch.load with weights_only=True. A missing, damaged or unsuitable file is a UserError.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar
from zipfile import is_zipfile

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention import Policy, is_file
from checkpoint.together import together
from core.distributed import DistInfo
from core.settings import UserError, first_line, from_dict
from model import GPT, GPTConfig

log = logging.getLogger("nanoattn")

_NAME = re.compile(r"step-(\d+)(\.old)?")
_TRAIN = "python train.py config/train_shakespeare_cpu.py"  # runs on any machine

# Settings in older checkpoints -> their present names ("": no longer used).
RETIRED = {
    "attention_deterministic": "deterministic",
    "keep_freed_memory": "",
    # Once settings of the model, now of the run or the process; TrainConfig still has some.
    **dict.fromkeys(("gradient_checkpointing", "residual_dtype", "attention_fallback"), ""),
    **dict.fromkeys(("attention_hub_kernels", "sdpa_flash_impl", "allow_mps_sdpa"), ""),
}

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder and its two JSON files; tensors are loaded on demand."""

    folder: Path
    settings: dict[str, Any]  # {"train": ..., "model": ..., "tokenizer": ...}
    state: dict[str, Any]  # train_state.json

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def config(self, **changes: Any) -> GPTConfig:
        """The model's config, with `changes`."""
        saved = todays_names(GPTConfig, self.settings["model"])
        name = saved.get("attention_backend")
        if isinstance(name, str) and "attention_backend" not in changes:
            changes["attention_backend"] = backend_of(name, self.folder)
        return from_dict(GPTConfig, {**saved, **changes}, str(self.folder / "settings.json"))

    def train_settings(self, cls: type[T]) -> T:
        """The run's settings, an instance of train.py's TrainConfig."""
        saved = todays_names(cls, self.settings["train"])
        return from_dict(cls, saved, str(self.folder / "settings.json"))

    @property
    def shards(self) -> Path | None:
        """The folder with the tensors of several processes; None: they are in one file."""
        folder = self.folder / "shards"
        return folder if folder.exists() else None

    def weights(self) -> dict[str, Tensor]:
        """All of them, on the CPU."""
        if self.shards:
            from checkpoint.shards import read_whole  # DCP takes most of a second to import

            return read_file(self.shards, lambda path: read_whole(path, "model."))
        return read_file(self.folder / "model.safetensors", load_file)

    def rest(self) -> dict[str, Any]:
        """optimizer.pt: {"optimizer": its state_dict(), "scaler": ..., "rng": [one dict a rank]},
        on the CPU, each tensor read when it is looked at. Of several processes it is small: the
        optimizer's "state" is in the shards, and "names" are those of its parameters."""
        return read_file(self.folder / "optimizer.pt", lambda path: load_torch(path, mmap=True))

    def model(self, policy: Policy = Policy(), **changes: Any) -> GPT:
        """The model on the CPU, with `changes` to its config."""
        model = GPT(self.config(**changes), policy)
        load_weights(model, self.weights(), str(self.folder))
        return model


def backend_of(name: str, folder: Path) -> str:
    """The attention backend that a checkpoint names, or "auto" and a warning where that is a file:
    a checkpoint may be somebody else's, and only who types the name asks for the file to be run."""
    if not is_file(name):
        return name
    log.warning(
        "%s was trained with the kernel in %s, a file that is run only if you name it: "
        "--attention_backend=%s. Without it 'auto' takes its place.", folder, name, name,
    )  # fmt: skip
    return "auto"


def todays_names(cls: type, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Saved settings for the dataclass cls: names in RETIRED that it lacks are renamed or dropped;
    any other unknown name is left for from_dict to refuse."""
    known = {f.name for f in fields(cls)}
    names = {old: old if old in known else RETIRED.get(old, old) for old in saved}
    return {new: saved[old] for old, new in names.items() if new in known or old not in RETIRED}


def folders(out_dir: str | Path) -> list[Path]:
    """The complete checkpoints of out_dir, oldest step first."""
    found = [(m, p) for p in Path(out_dir).glob("step-*") if (m := _NAME.fullmatch(p.name))]
    # "step-7.old" is a step-7 that was being replaced: valid, but step-7 itself comes first.
    return [p for m, p in sorted(found, key=lambda mp: (int(mp[0][1]), mp[0][2] is None))]


def latest(out_dir: str | Path) -> Path:
    """The newest checkpoint of out_dir; if there is none, the error suggests nearby runs."""
    if found := folders(out_dir):
        return found[-1]
    near = ", ".join(map(str, runs_near(Path(out_dir))))
    raise UserError(
        f"no checkpoint in {out_dir}; train one with: {_TRAIN} --out_dir={out_dir}"
        + (f"; or name a run that is there: {near}" if near else "")
    )


def runs_near(out_dir: Path) -> list[Path]:
    """Up to three folders with checkpoints in or beside out_dir or in out/, most similar first."""
    places = {out_dir, out_dir.parent, Path("out")}
    beside = [p for place in places for p in islice(place.glob("*"), 1000)]
    runs = {p.resolve(): p for p in beside if folders(p)}.values()
    words = {re.sub(r"[\W_]", " ", str(run)): run for run in runs}
    wanted = re.sub(r"[\W_]", " ", str(out_dir))
    return [words[w] for w in difflib.get_close_matches(wanted, words, n=3, cutoff=0)]


def load(folder: str | Path) -> Checkpoint:
    """Read a checkpoint's JSON files."""
    folder = Path(folder)
    settings = read_file(folder / "settings.json", load_json)
    state = read_file(folder / "train_state.json", load_json)
    if not has_dicts(settings, "train", "model", "tokenizer"):
        raise UserError(f"{folder / 'settings.json'} is not a checkpoint's: {_elsewhere(folder)}")
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise UserError(f"{folder / 'train_state.json'} holds no step: {_elsewhere(folder)}")
    return Checkpoint(folder, settings, state)


def save(
    out_dir: str | Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
    shards: Mapping[str, Tensor] | None = None,
    optimizer: dict[str, Any],
    settings: dict[str, Any],
    state: dict[str, Any],
    keep: int,
    distributed: DistInfo | None = None,
) -> Path:
    """Write out_dir/step-N, then delete all but the best and the newest `keep` (at least one).

    state["step"] names the folder; the lowest state["val_loss"] is the best; else see Checkpoint.
    Several processes (`distributed`) call this together, each with its part in `shards` in place
    of `weights`; the rest is taken from the main one.

    Raises:
        UserError: it could not be written; on all processes.
    """
    distributed = distributed or DistInfo(torch.device("cpu"))
    out_dir = Path(out_dir)
    final = out_dir / f"step-{state['step']:08d}"
    old = final.with_name(final.name + ".old")
    partial = out_dir / f".{final.name}.partial"

    def begin() -> None:
        for left in out_dir.glob(".step-*.partial"):  # by a save or deletion that was killed
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)

    def write_part() -> None:
        from checkpoint.shards import write

        write(partial / "shards", shards or {}, distributed.control)

    def write_rest() -> None:
        if weights is not None:
            tensors = {k: v.detach().contiguous() for k, v in weights.items()}
            save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        torch.save(optimizer, partial / "optimizer.pt")
        for name, content in (("settings.json", settings), ("train_state.json", state)):
            (partial / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        _sync([*partial.rglob("*"), partial])
        if final.exists():
            _delete(old)
            final.rename(old)
        partial.rename(final)
        _sync([out_dir])

    def on_main(step: Callable[[], None]) -> Callable[[], None]:
        return step if distributed.main else lambda: None

    try:
        together(distributed, on_main(begin))
        if shards is not None:
            together(distributed, write_part)
        together(distributed, on_main(write_rest))
    except UserError as e:
        shutil.rmtree(partial, ignore_errors=True)
        had = [p.name for p in folders(out_dir)]
        still = f"{had[-1]} is still good" if had else "there is none before it"
        there = next(p for p in (out_dir, *out_dir.absolute().parents) if p.exists())
        free = f"{shutil.disk_usage(there).free / 1e9:.2f} GB free"
        raise UserError(f"could not write checkpoint {final} ({e}; {free}): {still}") from e
    if not distributed.main:
        return final
    try:
        best = best_folder(out_dir)
        for folder in [old, *(p for p in folders(out_dir)[: -max(1, keep)] if p != best)]:
            _delete(folder)
    except (OSError, UserError) as e:  # the new checkpoint is written: no reason to end the run
        log.warning("older checkpoints were left in %s (%s)", out_dir, e)
    return final


def _delete(folder: Path) -> None:
    """Delete a checkpoint if it exists. Renamed first, so a kill never leaves half of one."""
    if folder.exists():
        gone = folder.rename(folder.with_name(f".{folder.name}.deleted.partial"))
        shutil.rmtree(gone, ignore_errors=True)


def set_aside(out_dir: str | Path) -> Path | None:
    """Move an earlier run's checkpoints, metrics and picture to out_dir/earlier-N, the folder that
    is returned; None if there were no checkpoints."""
    out_dir = Path(out_dir)
    if not (found := folders(out_dir)):
        return None
    target = next(p for n in count(1) if not (p := out_dir / f"earlier-{n}").exists())
    try:
        target.mkdir()
        for path in [*found, out_dir / "metrics.jsonl", out_dir / "loss.png"]:
            if path.exists():
                path.rename(target / path.name)
    except OSError as e:
        raise UserError(f"the earlier run in {out_dir} cannot be moved to {target} ({e})") from e
    return target


def best_folder(out_dir: str | Path) -> Path | None:
    """The checkpoint with the lowest validation loss; None if none was evaluated."""
    losses: dict[Path, Any] = {p: load(p).state.get("val_loss") for p in folders(out_dir)}
    evaluated = [p for p, loss in losses.items() if loss is not None]
    return min(evaluated, key=lambda p: losses[p], default=None)


def load_weights(model: GPT, weights: Mapping[str, Tensor], origin: str) -> None:
    """Copy all weights into the model, whose names and shapes must be the same."""
    own = model.state_dict()
    check_shapes(shapes(own), shapes(weights), origin)
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in tensors.items()}


def check_shapes(own: Mapping[str, Any], saved: Mapping[str, Any], origin: str) -> None:
    """Raise a UserError where a model's tensors and the saved ones differ by a name or a shape."""
    if missing := own.keys() - saved.keys():
        raise UserError(f"the weights in {origin} are of another model: it lacks {min(missing)}")
    if unknown := saved.keys() - own.keys():
        raise UserError(
            f"the weights in {origin} are of another model: it has {min(unknown)}, which the "
            "model lacks"
        )
    for name, shape in own.items():
        if saved[name] != shape:
            raise UserError(
                f"the weights in {origin} are of another size: {name} is "
                f"{saved[name]}, the model's is {shape}"
            )


def tokenizer_meta(init_from: str) -> dict[str, Any] | None:
    """The tokenizer of our own checkpoint; None for weights in another format."""
    own = own_checkpoint(init_from)
    return load(own).settings["tokenizer"] if own else None


def own_checkpoint(init_from: str) -> Path | None:
    """Our own checkpoint: the newest of a run's folder, or this folder, damaged or not."""
    path = Path(init_from)
    if folders(path):
        return latest(path)
    return path if any((path / f).exists() for f in ("settings.json", "train_state.json")) else None


def read_file(path: Path, reader: Any) -> Any:
    """reader(path); its failure is a UserError of one sentence."""
    try:
        return reader(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; {_elsewhere(path.parent)}") from None
    except UserError:
        raise
    except Exception as e:  # each reader has its own errors for a damaged file
        raise UserError(
            f"{path} cannot be read ({type(e).__name__}: {first_line(e)}); "
            f"{_elsewhere(path.parent)}"
        ) from e


def _elsewhere(folder: Path) -> str:
    """A hint at what else could be loaded."""
    others = [p for p in folders(folder.parent) if p != folder]
    if not others:
        return f"name another checkpoint, or train one with {_TRAIN}"
    return f"another one there is --init_from={others[-1]}"


def has_dicts(content: Any, *keys: str) -> bool:
    """Whether a file's content is a dict with a dict under each of these keys."""
    return isinstance(content, dict) and all(isinstance(content.get(k), dict) for k in keys)


def load_torch(path: Path, mmap: bool = False) -> Any:
    """Tensors and plain values; with mmap a tensor is read when it is looked at, where the file is
    torch's zip of today and nobody writes to it."""
    mmap = mmap and is_zipfile(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as e:
        # torch's own message suggests weights_only=False, which would run code from the file.
        raise ValueError(
            "it is damaged, or holds Python objects beside tensors and plain values, and loading "
            "such objects could run code"
        ) from e


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _sync(paths: Iterable[Path]) -> None:
    """Flush files to disk, and folders where the system can."""
    for path in paths:
        if path.is_dir() and os.name == "nt":
            continue
        # Windows syncs only files open for writing; POSIX opens folders only for reading.
        fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
