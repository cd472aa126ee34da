"""Checkpoints: save, load, resume; import from and export to other formats.

A checkpoint is a folder, out_dir/step-00000250:

    model.safetensors   the weights
    optimizer.pt        optimizer, gradient scaler and random states (tensors and plain numbers)
    settings.json       the run's settings, the model's sizes, the tokenizer
    train_state.json    step, losses, data position, the attention backend and kernels that ran

It is written beside its place, synced to disk, then renamed, so a kill at any moment leaves the
last good one. Loading runs no code from a file: safetensors, JSON, and torch.load with
weights_only=True.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.settings import UserError, from_dict
from model import GPT, GPTConfig

log = logging.getLogger("nanoattn")

_NAME = re.compile(r"step-(\d+)(\.old)?")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder and its two JSON files; the tensors are read when asked for."""

    folder: Path
    settings: dict[str, Any]  # {"train": ..., "model": ..., "tokenizer": ...}
    state: dict[str, Any]  # train_state.json

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def config(self, **changes: Any) -> GPTConfig:
        """The model's sizes, with some of the fields changed."""
        return from_dict(
            GPTConfig, {**self.settings["model"], **changes}, str(self.folder / "settings.json")
        )

    def weights(self) -> dict[str, Tensor]:
        return _read(self.folder / "model.safetensors", load_file)

    def optimizer(self) -> dict[str, Any]:
        """{"optimizer": ..., "scaler": ..., "rng": [one dict a rank]}"""
        return _read(self.folder / "optimizer.pt", _torch_load)

    def model(self, **changes: Any) -> GPT:
        """The model on the CPU, with some fields of its GPTConfig changed."""
        model = GPT(self.config(**changes))
        load_weights(model, self.weights(), str(self.folder))
        return model


def folders(out_dir: str | Path) -> list[Path]:
    """The complete checkpoints of out_dir, oldest step first."""
    found = [(m, p) for p in Path(out_dir).glob("step-*") if (m := _NAME.fullmatch(p.name))]
    # "step-7.old" is a step-7 that was being replaced: good, but second to step-7 itself.
    return [p for m, p in sorted(found, key=lambda mp: (int(mp[0][1]), mp[0][2] is None))]


def latest(out_dir: str | Path) -> Path:
    """The newest checkpoint of out_dir.

    Raises:
        UserError: there is none.
    """
    if not (found := folders(out_dir)):
        raise UserError(
            f"no checkpoint in {out_dir}; train one with: python train.py --out_dir={out_dir}"
        )
    return found[-1]


def load(folder: str | Path) -> Checkpoint:
    """Read a checkpoint's JSON files.

    Raises:
        UserError: a file is missing or damaged.
    """
    folder = Path(folder)
    settings = _read(folder / "settings.json", _json_load)
    state = _read(folder / "train_state.json", _json_load)
    if not isinstance(settings, dict) or not {"train", "model", "tokenizer"} <= settings.keys():
        raise UserError(f"{folder / 'settings.json'} is not a checkpoint's: {_elsewhere(folder)}")
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise UserError(f"{folder / 'train_state.json'} holds no step: {_elsewhere(folder)}")
    return Checkpoint(folder, settings, state)


def save(
    out_dir: str | Path,
    *,
    weights: Mapping[str, Tensor],
    optimizer: dict[str, Any],
    settings: dict[str, Any],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write out_dir/step-N, then delete all but the best and the newest `keep`.

    Args:
        weights: the model's state_dict.
        optimizer: {"optimizer": ..., "scaler": ..., "rng": ...}, tensors and plain values only.
        settings: {"train": ..., "model": ..., "tokenizer": ...}.
        state: train_state.json; "step" names the folder, the lowest "val_loss" is the best.

    Raises:
        UserError: it could not be written; what was there before is still there.
    """
    out_dir = Path(out_dir)
    final = out_dir / f"step-{state['step']:08d}"
    old = final.with_name(final.name + ".old")
    partial = out_dir / f".{final.name}.partial"
    try:
        for left in out_dir.glob(".step-*.partial"):  # by a save, or a deletion, that was killed
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        tensors = {k: v.detach().contiguous() for k, v in weights.items()}
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        torch.save(optimizer, partial / "optimizer.pt")
        for name, content in (("settings.json", settings), ("train_state.json", state)):
            (partial / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        _sync([*partial.iterdir(), partial])
        if final.exists():
            _delete(old)
            final.rename(old)
        partial.rename(final)
        _sync([out_dir])
    except (OSError, RuntimeError, SafetensorError) as e:  # torch and safetensors wrap disk errors
        shutil.rmtree(partial, ignore_errors=True)
        had = [p.name for p in folders(out_dir)]
        still = f"{had[-1]} is still good" if had else "there is none before it"
        free = _free_bytes(out_dir)
        raise UserError(
            f"could not write checkpoint {final} ({_first_line(e)}; {free / 1e9:.2f} GB free): "
            f"{still}"
        ) from e
    try:
        for folder in [old, *_superfluous(out_dir, keep)]:
            _delete(folder)
    except (OSError, UserError) as e:  # the new one is safe: no reason to end a run
        log.warning("older checkpoints were left in %s (%s)", out_dir, e)
    return final


def _delete(folder: Path) -> None:
    """Delete a checkpoint, if it is there: a kill leaves all of it, or none under its name."""
    if folder.exists():
        gone = folder.rename(folder.with_name(f".{folder.name}.deleted.partial"))
        shutil.rmtree(gone, ignore_errors=True)


def _superfluous(out_dir: Path, keep: int) -> list[Path]:
    """All but the newest `keep` (at least one) and the one with the lowest validation loss."""
    found = folders(out_dir)
    older = found[: -max(1, keep)]
    best = best_folder(out_dir)
    return [p for p in older if p != best]


def set_aside(out_dir: str | Path) -> Path | None:
    """Move an earlier run's checkpoints, metrics and picture to out_dir/earlier-N, so that a new
    run in the same folder is not mixed with it.

    Returns:
        where they are now; None: there were no checkpoints.
    """
    out_dir = Path(out_dir)
    if not (found := folders(out_dir)):
        return None
    n = 1
    while (target := out_dir / f"earlier-{n}").exists():
        n += 1
    try:
        target.mkdir()
        for path in [*found, out_dir / "metrics.jsonl", out_dir / "loss.png"]:
            if path.exists():
                path.rename(target / path.name)
    except OSError as e:
        raise UserError(f"the earlier run in {out_dir} cannot be moved to {target} ({e})") from e
    return target


def best_folder(out_dir: str | Path) -> Path | None:
    """The checkpoint of the lowest validation loss, None where none was evaluated."""
    losses = []
    for folder in folders(out_dir):
        loss = load(folder).state.get("val_loss")
        if loss is not None:
            losses.append((loss, folder))
    return min(losses)[1] if losses else None


def load_weights(model: GPT, weights: Mapping[str, Tensor], origin: str) -> None:
    """Copy weights into the model, every one of them.

    Raises:
        UserError: names or shapes differ.
    """
    own = model.state_dict()
    missing = sorted(own.keys() - weights.keys())
    unknown = sorted(weights.keys() - own.keys())
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which the model lacks"
        raise UserError(f"the weights in {origin} are of another model: it {what}")
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            raise UserError(
                f"the weights in {origin} are of another size: {name} is "
                f"{tuple(weights[name].shape)}, the model's is {tuple(tensor.shape)}"
            )
        tensor.copy_(weights[name])


def tokenizer_meta(init_from: str) -> dict[str, Any] | None:
    """The tokenizer that a checkpoint of ours was trained with; None for foreign weights."""
    path = Path(init_from)
    if folders(path):
        path = latest(path)
    return load(path).settings["tokenizer"] if _is_own(path) else None


def model_settings(model: GPT) -> dict[str, Any]:
    return asdict(model.config)


def _is_own(folder: Path) -> bool:
    """Whether this is a checkpoint of ours, be it a damaged one."""
    return any((folder / name).exists() for name in ("settings.json", "train_state.json"))


def _read(path: Path, reader: Any) -> Any:
    try:
        return reader(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; {_elsewhere(path.parent)}") from None
    except Exception as e:  # each reader has its own errors for a damaged file
        raise UserError(
            f"{path} cannot be read ({type(e).__name__}: {_first_line(e)}); "
            f"{_elsewhere(path.parent)}"
        ) from e


def _elsewhere(folder: Path) -> str:
    """What else could be loaded."""
    others = [p.name for p in folders(folder.parent) if p != folder]
    if not others:
        return "name another checkpoint, or train one with python train.py"
    return f"another one there is --init_from={folder.parent / others[-1]}"


def _torch_load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        # torch's own words advise weights_only=False, which would run whatever the file says.
        raise ValueError(
            "it is damaged, or holds Python objects beside tensors and plain values, and loading "
            "such objects could run code"
        ) from e


def _json_load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _sync(paths: Iterable[Path]) -> None:
    """Have the disk confirm files, and folders where the system can."""
    for path in paths:
        if path.is_dir() and os.name == "nt":
            continue
        # Windows syncs only what is open for writing, POSIX opens a folder only for reading.
        fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _free_bytes(folder: Path) -> int:
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free


def _first_line(e: Exception) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0][:200]
