"""Save and load checkpoints.

A checkpoint is a folder, out_dir/step-00000250:

    model.safetensors   the weights
    optimizer.pt        optimizer, gradient scaler and random states
    settings.json       settings of the run, model sizes, tokenizer
    train_state.json    step, losses, data position, attention backend and kernels
    shards/             with several processes: weights and optimizer state (checkpoint/shards.py)

The folder is written under a temporary name, synced and renamed: a kill leaves the last complete
checkpoint. Loading never runs code from a file: safetensors, JSON, torch.load(weights_only=True).
A missing or damaged file raises UserError.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention import Policy, is_file
from checkpoint.together import together
from core.distributed import DistInfo
from core.settings import UserError, first_line, from_dict
from model import GPT, GPTConfig

log = logging.getLogger("nanoattn")

_NAME = re.compile(r"step-(\d+)(\.old)?")

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
        saved = known_settings(GPTConfig, self.settings["model"])
        name = saved.get("attention_backend")
        if isinstance(name, str) and "attention_backend" not in changes:
            changes["attention_backend"] = backend_of(name, self.folder)
        return from_dict(GPTConfig, {**saved, **changes}, str(self.folder / "settings.json"))

    def train_settings(self, cls: type[T]) -> T:
        """The run's settings as an instance of train.py's TrainConfig."""
        saved = known_settings(cls, self.settings["train"])
        return from_dict(cls, saved, str(self.folder / "settings.json"))

    @property
    def shards(self) -> Path | None:
        """Folder of the shards; None if there are none."""
        folder = self.folder / "shards"
        return folder if folder.exists() else None

    def weights(self) -> dict[str, Tensor]:
        """All weights, on the CPU."""
        if self.shards:
            from checkpoint.shards import read_whole  # DCP takes most of a second to import

            return read_file(self.shards, lambda path: read_whole(path, "model."))
        return read_file(self.folder / "model.safetensors", load_file)

    def rest(self) -> dict[str, Any]:
        """optimizer.pt: {"optimizer": its state_dict(), "scaler": ..., "rng": [one dict a rank]}.

        Tensors are memory-mapped on the CPU. With shards, "optimizer" has no "state", and "names"
        lists the parameters.
        """
        return read_file(self.folder / "optimizer.pt", lambda path: load_torch(path, mmap=True))

    def model(self, policy: Policy = Policy(), **changes: Any) -> GPT:
        """The model on the CPU, with `changes` to its config."""
        model = GPT(self.config(**changes), policy)
        load_weights(model, self.weights(), str(self.folder))
        return model


def backend_of(name: str, folder: Path) -> str:
    """The saved attention backend, or "auto" if it is a file: the user must name code to run."""
    if not is_file(name):
        return name
    log.warning(
        f"{folder} was trained with the kernel in {name}; using 'auto'. To run that file: "
        f"--attention_backend={name}"
    )
    return "auto"


def known_settings(cls: type, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved settings that the dataclass `cls` has; warns about others."""
    known = {f.name for f in fields(cls)}
    if unknown := sorted(saved.keys() - known):
        log.warning(f"settings of another version in the checkpoint, ignored: {', '.join(unknown)}")
    return {name: value for name, value in saved.items() if name in known}


def folders(out_dir: str | Path) -> list[Path]:
    """The complete checkpoints of out_dir, oldest step first."""
    found = [(m, p) for p in Path(out_dir).glob("step-*") if (m := _NAME.fullmatch(p.name))]
    # "step-7.old" is a step-7 that was being replaced: valid, but step-7 itself comes first.
    return [p for m, p in sorted(found, key=lambda mp: (int(mp[0][1]), mp[0][2] is None))]


def latest(out_dir: str | Path) -> Path:
    """The newest checkpoint of out_dir. Raises UserError if there is none."""
    if found := folders(out_dir):
        return found[-1]
    raise UserError(f"no checkpoint in {out_dir}; train one: python train.py --out_dir={out_dir}")


def load(folder: str | Path) -> Checkpoint:
    """Read a checkpoint's JSON files."""
    folder = Path(folder)
    settings = read_file(folder / "settings.json", load_json)
    state = read_file(folder / "train_state.json", load_json)
    if not has_dicts(settings, "train", "model", "tokenizer"):
        raise UserError(f"{folder / 'settings.json'} is not a checkpoint's")
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise UserError(f"{folder / 'train_state.json'} has no step")
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

    state["step"] names the folder; the lowest state["val_loss"] is the best. With several processes
    all must call it, each with its own `shards` instead of `weights`.

    Raises:
        UserError: on all processes, if it could not be written.
    """
    distributed = distributed or DistInfo(torch.device("cpu"))
    out_dir = Path(out_dir)
    final = out_dir / f"step-{state['step']:08d}"
    old = final.with_name(final.name + ".old")
    partial = out_dir / f".{final.name}.partial"

    def begin() -> None:
        if distributed.main:
            for left in out_dir.glob(".step-*.partial"):  # of a killed process
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)

    def write_part() -> None:
        from checkpoint.shards import write

        write(partial / "shards", shards or {}, distributed.control)

    def write_rest() -> None:
        if not distributed.main:
            return
        with plain_disk_errors(partial):
            if weights is not None:
                save_weights(weights, partial / "model.safetensors")
            torch.save(optimizer, partial / "optimizer.pt")
        for name, content in (("settings.json", settings), ("train_state.json", state)):
            (partial / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        _sync([*partial.rglob("*"), partial])
        if final.exists():
            _delete(old)
            final.rename(old)
        partial.rename(final)
        _sync([out_dir])

    try:
        together(distributed, begin)
        if shards is not None:
            together(distributed, write_part)
        together(distributed, write_rest)
    except UserError as e:
        shutil.rmtree(partial, ignore_errors=True)
        had = [p.name for p in folders(out_dir)]
        still = f"{had[-1]} is still good" if had else "no earlier one exists"
        raise UserError(f"could not write checkpoint {final} ({e}): {still}") from e
    if not distributed.main:
        return final
    try:
        best = best_folder(out_dir)
        for folder in [old, *(p for p in folders(out_dir)[: -max(1, keep)] if p != best)]:
            _delete(folder)
    except (OSError, UserError) as e:  # the new checkpoint is complete: the run goes on
        log.warning(f"older checkpoints in {out_dir} were not deleted ({e})")
    return final


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file."""
    path.touch()
    mode = path.stat().st_mode  # from the umask; save_file() would leave mode 0600
    tensors = {name: t.detach().contiguous() for name, t in weights.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


@contextmanager
def plain_disk_errors(folder: Path) -> Iterator[None]:
    """Raise OSError where torch.save() or safetensors fail because the disk of `folder` is full."""
    try:
        yield
    except (RuntimeError, SafetensorError) as e:
        # torch.save() does not report the system's error.
        if "No space left" in str(e) or shutil.disk_usage(folder).free < 2**24:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from e
        raise


def _delete(folder: Path) -> None:
    """Delete a checkpoint if it exists, renamed first: a kill never leaves half of one."""
    if folder.exists():
        gone = folder.rename(folder.with_name(f".{folder.name}.deleted.partial"))
        shutil.rmtree(gone, ignore_errors=True)


def set_aside(out_dir: str | Path) -> Path | None:
    """Archive an earlier run in out_dir/earlier-N; None if out_dir has no checkpoints."""
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
        raise UserError(f"cannot move the earlier run in {out_dir} to {target} ({e})") from e
    return target


def best_folder(out_dir: str | Path) -> Path | None:
    """The checkpoint with the lowest validation loss; None if none was evaluated."""
    losses: dict[Path, Any] = {p: load(p).state.get("val_loss") for p in folders(out_dir)}
    evaluated = [p for p, loss in losses.items() if loss is not None]
    return min(evaluated, key=lambda p: losses[p], default=None)


def load_weights(model: GPT, weights: Mapping[str, Tensor], origin: str) -> None:
    """Copy weights into the model. Raises UserError if names or shapes differ."""
    own = model.state_dict()
    check_shapes(shapes(own), shapes(weights), origin)
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in tensors.items()}


def check_shapes(
    own: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]], origin: str
) -> None:
    """Raise UserError if a name or a shape differs."""
    for name in sorted(own.keys() | saved.keys()):
        have, want = saved.get(name, "missing"), own.get(name, "missing")
        if have != want:
            raise UserError(
                f"the weights in {origin} do not fit the model: {name} is {have}, expected {want}"
            )


def tokenizer_meta(init_from: str) -> dict[str, Any] | None:
    """The tokenizer of a checkpoint; None for another format."""
    own = own_checkpoint(init_from)
    return load(own).settings["tokenizer"] if own else None


def own_checkpoint(init_from: str) -> Path | None:
    """The newest checkpoint of a run, or this folder if it is one; None for another format."""
    path = Path(init_from)
    if found := folders(path):
        return found[-1]
    return path if any((path / f).exists() for f in ("settings.json", "train_state.json")) else None


def read_file(path: Path, reader: Callable[[Path], T]) -> T:
    """Return reader(path). Raises UserError, in one line, if it fails."""
    try:
        return reader(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except UserError:
        raise
    except Exception as e:  # each library has its own for damaged files
        raise UserError(f"{path} cannot be read ({type(e).__name__}: {first_line(e)})") from e


def has_dicts(content: Any, *keys: str) -> bool:
    return isinstance(content, dict) and all(isinstance(content.get(k), dict) for k in keys)


def load_torch(path: Path, mmap: bool = False) -> Any:
    mmap = mmap and is_zipfile(path)  # PyTorch's old format cannot be mapped
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as e:
        # torch's own message suggests weights_only=False, which would run code from the file.
        raise ValueError(
            "damaged, or it has Python objects, and loading those could run code"
        ) from e


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and os.name == "nt":
            continue
        # Windows syncs only files open for writing; POSIX opens folders only for reading.
        fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
