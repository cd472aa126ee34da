"""Checkpoints: folders out_dir/step-00000250.

    model.safetensors   the weights
    optimizer.pt        optimizer, gradient scaler and random states
    settings.json       settings of the run, model sizes, tokenizer
    train_state.json    step, losses, data position, attention backend and kernels
    shards/             of several processes: a file of each, index.json: where each part of a
                        tensor is, with its CRC-32
    checksums.json      CRC-32 of each file (not of older versions)

Written under another name, synced and renamed. Loading never runs code, which the pickled index of
torch.distributed.checkpoint could.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention import Policy, is_code
from core.files import command, printable
from core.parallel import DistInfo, local, local_part
from core.runtime import dtype_name
from core.settings import UserError, first_line, from_dict
from data.schema import Count, FileError, Json, read_json, record, valid
from model import GPT, GPTConfig

log = logging.getLogger("nanoattn")

CHECKSUMS = "checksums.json"
INDEX = "shards/index.json"
T = TypeVar("T")
_warn_once = cache(log.warning)
Settings = record(train=Json, model=Json, tokenizer=Json)
State = record(step=Count, optional={"val_loss": float | None, "best_val_loss": float | None,
                                     "best_since": Count, "sequences_seen": Count})  # fmt: skip
Moments = record(optional={"state": dict[int, Json]})  # not if sharded
Rest = record(optimizer=Moments, scaler=Json, rng=list[Json])  # rng: of each rank
Part = record(at=list[Count], shape=list[Count], file=str, offset=Count, length=Count,
              optional={"crc32": int})  # fmt: skip  # which older versions lack
Parts = list[Part]  # type: ignore[valid-type]
Entry = record(dtype=str, shape=list[Count], parts=Parts)
Index = dict[str, Entry]  # type: ignore[valid-type]
READERS: dict[str, Callable[[Path], Any]] = {
    "settings.json": lambda path: read_json(path, Settings),
    "train_state.json": lambda path: read_json(path, State),
    "optimizer.pt": lambda path: valid(load_torch(path), Rest, str(path)),
    "model.safetensors": load_file,
    INDEX: lambda path: read_shards(path),
}


# --- reading ---


@dataclass(frozen=True)
class Checkpoint:
    """Tensors are loaded on demand, to the CPU."""

    folder: Path
    settings: dict[str, Json]  # Settings
    state: Json  # State

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def config(self, **changes: object) -> GPTConfig:
        """Only `changes` may name code to run."""
        code = self.settings["model"].get("attention_backend")
        if isinstance(code, str) and is_code(code):
            named = "attention_backend" in changes
            runs = str(changes.setdefault("attention_backend", "auto"))
            other_mask = code.startswith("flex:") and not runs.startswith("flex:")
            if other_mask or not named:
                only_you = f"code that only you may name ({command(f'--attention_backend={code}')})"
                using = f"using {runs!r}{', which is causal' if other_mask else ''}"
                log.warning(f"{printable(self.folder)} was trained with {only_you}; {using}")
        return self.read("model", GPTConfig, changes)

    def read(self, section: str, cls: type[T], changes: Mapping[str, object] = {}) -> T:
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        saved, file = self.settings[section], printable(self.folder / "settings.json")
        if unknown := sorted(saved.keys() - known):
            _warn_once(f"unknown settings in {file}, ignored: {str(unknown)[1:-1]}")
        kept = {name: saved[name] for name in saved.keys() & known}
        window, n = kept.get("attention_window"), kept.get("n_layer")
        if isinstance(window, list) and isinstance(n, int) and len(window) > n > 0:  # as it ran
            kept["attention_window"] = [*window[: n - 1], window[-1]]
        return from_dict(cls, {**kept, **changes}, file)

    @property
    def sharded(self) -> bool:
        return (self.folder / "shards").exists()

    def weights(self) -> dict[str, Tensor]:
        if self.sharded:
            return dict(read_file(self.folder, INDEX, lambda i: read_shards(i, prefix="model.")))
        return dict(read_file(self.folder, "model.safetensors"))

    def rest(self) -> Json:  # moments, random states
        return dict(read_file(self.folder, "optimizer.pt"))

    def model(self, policy: Policy = Policy(), **changes: object) -> GPT:
        config = self.config(**changes)
        return new_model(config, policy, str(self.folder), self.weights())


def load(folder: str | Path) -> Checkpoint:
    folder = Path(folder)
    settings, state = (read_file(folder, name) for name in ("settings.json", "train_state.json"))
    return Checkpoint(folder, settings, state)


def folders(out_dir: str | Path) -> list[Path]:
    """Complete checkpoints, oldest step first."""
    found = [p for p in Path(out_dir).glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return sorted(found, key=lambda folder: int(folder.name[5:]))


def latest(out_dir: str | Path) -> Path:
    if found := folders(out_dir):
        return found[-1]
    hint = f"train one: {command('python', 'train.py', f'--out_dir={out_dir}')}"
    if os.path.exists(file := Path(out_dir) / "ckpt.pt"):
        hint = f"for nanoGPT's: {command(f'--init_from={file}')}"
    raise FileError(f"no checkpoint in {out_dir}; {hint}")


def best_folder(out_dir: str | Path) -> Path | None:
    """Lowest validation loss on the newest one's data, if any."""
    return next(reversed(_best_folders(out_dir)), None)


def _best_folders(out_dir: str | Path) -> list[Path | None]:
    """The best on each data that was evaluated."""
    found: dict[int, tuple[float, Path | None]] = {}
    for folder in folders(out_dir):
        state: Json = _verified(folder, "train_state.json")
        since, loss = state.get("best_since", 0), state.get("val_loss")
        best = found.setdefault(since, (math.inf, None))
        if loss is not None and loss < best[0]:
            found[since] = loss, folder
    return [folder for _, folder in found.values()]


def own_checkpoint(init_from: str) -> Path | None:
    """A run's newest checkpoint, or the folder if it is one."""
    if found := folders(init_from):
        return found[-1]
    files = (os.path.join(init_from, name) for name in ("settings.json", "train_state.json"))
    return Path(init_from) if any(map(os.path.exists, files)) else None


def new_model(config: GPTConfig, policy: Policy, origin: str,
              weights: Mapping[str, Tensor] | None = None) -> GPT:  # fmt: skip
    """With these weights, or random ones. Raises UserError."""
    try:
        model = GPT(config, policy)
    except RuntimeError as e:  # no memory for its sizes
        raise FileError(f"{origin}: {first_line(e)}") from e
    if weights is not None:
        check_shapes(model.state_dict(), weights, origin)
        model.load_state_dict(weights)
    return model


def check_shapes(own: Mapping[str, Tensor], saved: Mapping[str, Any], origin: str) -> None:
    def shape(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return tuple(value.shape) if floats else getattr(value, "dtype", value)

    for name in sorted(own.keys() | saved.keys()):
        have, want = (shape(d.get(name, "missing")) for d in (saved, own))
        if have != want:
            raise FileError(f"{origin} does not fit the model: {name} is {have}, expected {want}")


def read_file(folder: Path, name: str, reader: Callable[[Path], Any] | None = None) -> Any:
    """reader(folder / name), by default of READERS. Raises UserError: it fails, or the file was
    changed."""
    try:
        return _verified(folder, name, reader)
    except Exception as e:  # each library has its own
        why = f"{folder / name} cannot be read ({type(e).__name__}: {first_line(e)})"
        if isinstance(e, UserError):
            why = str(e)
        elif isinstance(e, FileNotFoundError):
            why = f"{e.filename or folder / name} does not exist"
        raise FileError(why + _advice(folder)) from e


def _verified(folder: Path, name: str, reader: Callable[[Path], Any] | None = None) -> Any:
    """The file's content. ValueError: another CRC-32; a warning for JSON, which people edit."""
    path, sums = folder / name, folder / CHECKSUMS
    content = (reader or READERS[name])(path)
    if sums.exists() and read_json(sums, dict[str, int]).get(name) != _crc32(path):
        if path.suffix != ".json":
            raise ValueError(f"another CRC-32 than in {CHECKSUMS}; if on purpose, delete that")
        log.warning(f"{printable(path)} was changed: another CRC-32 than in {CHECKSUMS}")
    return content


def _crc32(path: Path) -> int:
    return zlib.crc32(np.memmap(path, np.uint8, "r").data)


def _advice(damaged: Path) -> str:
    """How to resume from the newest complete checkpoint before."""
    out_dir, earlier = damaged.parent, folders(damaged.parent)
    if damaged in earlier:
        for good in reversed(earlier[: earlier.index(damaged)]):
            unused = "model.safetensors" if (good / "shards").exists() else INDEX
            with suppress(Exception):
                for name in READERS.keys() - {unused}:
                    _verified(good, name)
                move = command("mv", damaged, out_dir / f"damaged-{damaged.name}")
                resume = ("python", "train.py", "--init_from=resume", f"--out_dir={out_dir}")
                first = f"; to resume from the newest complete one, {printable(good)}"
                return f"{first}: {move} && {command(*resume)}"
    return ""


def load_torch(file: Path | IO[bytes]) -> Any:
    """Load from torch.save(). Raises ValueError for objects that could run code."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, LookupError) as e:  # it suggests weights_only=False; a text
        raise ValueError("damaged, or it has Python objects, which could run code") from e


def read_shards(index: Path, targets: Mapping[str, Tensor] | None = None, prefix: str = ""
                ) -> dict[str, Tensor]:  # fmt: skip
    """Fill targets, whole or sharded by rows; None: all whose names begin with the prefix, which is
    removed, on the CPU. Any exception: damage."""
    saved: dict[str, Json] = read_json(index, Index)
    empty: dict[str, Tensor] = {}
    for name, entry in saved.items():
        shape, parts = entry["shape"], sorted(entry["parts"], key=lambda part: part["at"])
        ends = [0, *accumulate(_rows(part["shape"]) for part in parts)]
        want = [([end, *[0] * len(shape)][: len(shape)], shape[1:]) for end in ends[:-1]]
        if [(p["at"], p["shape"][1:]) for p in parts] != want or ends[-1] != _rows(shape):
            raise ValueError(f"the parts of {name} do not cover its {shape} exactly once")
        empty[name] = torch.empty(shape, dtype=getattr(torch, entry["dtype"]), device="meta")
    if targets is None:
        targets = {name: torch.empty_like(t, device="cpu") for name, t in empty.items()
                   if name.startswith(prefix)}  # fmt: skip
    else:
        check_shapes(targets, empty, str(index))
    for name, target in targets.items():
        shape, at, _ = local_part(target)
        rows = local(target) if shape else local(target)[None]
        for part in saved[name]["parts"]:
            begin = sum(part["at"][:1]) - sum(at[:1])
            a, b = max(0, begin), min(len(rows), begin + _rows(part["shape"]))
            if a < b:
                values = _read_part(index, name, part, empty[name].dtype)
                rows[a:b].copy_(values.reshape(-1, *shape[1:])[a - begin : b - begin])
    return {name.removeprefix(prefix): t for name, t in targets.items()}


def _read_part(index: Path, name: str, part: Json, dtype: torch.dtype) -> Tensor:
    file = part["file"]
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not a file in this folder")
    with (index.parent / file).open("rb") as f:
        f.seek(part["offset"])
        content = f.read(part["length"])
    if part.get("crc32", crc := zlib.crc32(content)) != crc:
        raise ValueError(f"{file} is damaged: {name} has another CRC-32 than {index.name}")
    saved: Tensor = load_torch(io.BytesIO(content))
    if (saved.dtype, [*saved.shape]) != (dtype, part["shape"]):
        raise ValueError(f"{name} in {file} is not as {index.name} has it")
    return saved


def _rows(shape: list[int]) -> int:
    return shape[0] if shape else 1


# --- writing ---


def save_json(content: Json, path: Path) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode  # save_file() would leave 0600
    tensors = {name: t.detach().contiguous() for name, t in weights.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def save_shard(tensors: Mapping[str, Tensor], folder: Path, distributed: DistInfo) -> Json:
    """Write this process's file; return its entries of the index."""
    if not folder.exists():
        raise FileError(f"{folder} is missing: all processes must share one out_dir")
    entries: Json = {}
    file = f"__{distributed.rank}_0.distcp"
    with (folder / file).open("wb") as f:
        for i, (name, tensor) in enumerate(tensors.items()):
            shape, at, is_first = local_part(tensor)
            if not hasattr(tensor, "placements"):  # each has all of it
                is_first = i % distributed.world_size == distributed.rank
            if not is_first or 0 in shape:
                continue
            content = io.BytesIO()
            torch.save(local(tensor).detach().to("cpu", copy=True), content)
            part = {"at": at, "shape": shape, "file": file, "offset": f.tell()}
            part |= {"length": f.write(content.getbuffer())}
            part |= {"crc32": zlib.crc32(content.getbuffer())}
            about = {"dtype": dtype_name(tensor.dtype), "shape": [*tensor.shape]}
            entries[name] = {**about, "parts": [part]}
    return entries


def save(out_dir: str | Path, *, weights: Mapping[str, Tensor] | None = None,
         shards: Mapping[str, Tensor] | None = None, optimizer: Json, settings: Json, state: Json,
         keep: int, distributed: DistInfo | None = None) -> Path:  # fmt: skip
    """Write out_dir/step-N; keep the best (lowest state["val_loss"]) and the newest `keep`.

    All processes call it, each with its `shards` instead of `weights`. Raises UserError on all.
    """
    distributed = distributed or DistInfo(torch.device("cpu"))
    out_dir = Path(out_dir)
    final = out_dir / f"step-{state['step']:08d}"
    partial = out_dir / f".{final.name}.partial"
    try:
        with together(distributed):
            if distributed.main:
                for left in out_dir.glob(".step-*.partial"):
                    _remove(left)
                (partial if shards is None else partial / "shards").mkdir(parents=True)
        with together(distributed):
            own = {} if shards is None else save_shard(shards, partial / "shards", distributed)
        index: Json = {}
        for name, entry in (item for each in distributed.gather(own) for item in each.items()):
            index.setdefault(name, {**entry, "parts": []})["parts"] += entry["parts"]
        with together(distributed):
            if distributed.main:
                if shards is not None:
                    save_json(index, partial / INDEX)
                if weights is not None:
                    save_weights(weights, partial / "model.safetensors")
                with (partial / "optimizer.pt").open("wb") as f:  # a path would hide the error
                    torch.save(optimizer, f)
                save_json(settings, partial / "settings.json")
                save_json(state, partial / "train_state.json")
                files = [*partial.glob("*.*"), *partial.glob(INDEX)]
                sums = {file.relative_to(partial).as_posix(): _crc32(file) for file in files}
                save_json(sums, partial / CHECKSUMS)
                _sync([*partial.rglob("*"), partial])
                partial.rename(final)
                _sync([out_dir])
    except UserError as e:
        shutil.rmtree(partial, ignore_errors=True)
        had = [f"{p.name} is still good" for p in folders(out_dir)]
        still = had[-1] if had else "no earlier one exists"
        raise FileError(f"could not write {final} ({e}): {still}") from e
    if distributed.main:
        try:
            best = _best_folders(out_dir)
            for folder in folders(out_dir)[: -max(1, keep)]:
                if folder not in best:  # renamed first: never half of one
                    _remove(folder.rename(folder.with_name(f".{folder.name}.deleted.partial")))
        except (OSError, UserError) as e:  # the run goes on
            log.warning(f"{printable(out_dir)}: older checkpoints were not deleted ({e})")
    return final


def _remove(folder: Path) -> None:
    if folder.is_symlink():  # what it points to is not ours
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


@contextmanager
def together(distributed: DistInfo) -> Iterator[None]:
    """Raise UserError on all processes if a file failed on one."""
    failure, message = None, ""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, UserError) as e:
        failure, message = e, disk_error(e)
    messages = distributed.gather(message)
    if len({*messages}) > 1:
        message = "; ".join(f"process {rank}: {m}" for rank, m in enumerate(messages) if m)
    if message:
        raise FileError(message) from failure


def disk_error(error: BaseException) -> str:
    """The system's message, which torch and safetensors hide."""
    if isinstance(error, UserError):
        return str(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return first_line(error)
