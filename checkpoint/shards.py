"""Tensors of several processes: each writes its rows, and any number reads them.

    shards/__0_0.distcp ...   a file for each process: parts of tensors, by torch.save
    shards/index.json         dtype and shape of each tensor; place and CRC-32 of each part

The index of torch.distributed.checkpoint is a pickle, which could run code.
"""

from __future__ import annotations

import io
import json
import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from core.distributed import DistInfo
from core.files import printable
from core.parallel import local, local_part
from core.runtime import dtype_name
from core.settings import UserError

INDEX = "index.json"
Json = dict[str, Any]


def write(folder: Path, tensors: Mapping[str, Tensor], distributed: DistInfo) -> Json:
    """Write this process's file; return its index entries."""
    if not folder.exists():
        raise UserError(f"{printable(folder)} is missing: all processes must share one out_dir")
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


def joined(entries: list[Json]) -> Json:
    index: Json = {}
    for own in entries:
        for name, entry in own.items():
            index.setdefault(name, {**entry, "parts": []})["parts"] += entry["parts"]
    return index


def empty(folder: Path, prefix: str = "", device: str = "meta") -> dict[str, Tensor]:
    """Uninitialized, with the saved shapes and dtypes."""
    return {
        name: torch.empty(saved["shape"], dtype=getattr(torch, saved["dtype"]), device=device)
        for name, saved in _read_index(folder).items()
        if name.startswith(prefix)
    }


def read_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Full tensors on the CPU, the prefix removed."""
    tensors = empty(folder, prefix, "cpu")
    read(folder, tensors)
    return {name.removeprefix(prefix): t for name, t in tensors.items()}


def read(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, whole or sharded by rows. Raises ValueError: damage."""
    entries = _read_index(folder)
    for name, target in tensors.items():
        saved = entries[name]
        shape, at, _ = local_part(target)
        first, end = _rows(at, shape)
        rows = local(target).reshape(1) if target.ndim == 0 else local(target)
        for part in saved["parts"]:
            begin, stop = _rows(part["at"], part["shape"])
            a, b = max(first, begin), min(end, stop)
            if a < b:
                values = _read_part(folder, name, part, saved["dtype"])
                values = values.reshape(-1, *shape[1:])
                rows[a - first : b - first].copy_(values[a - begin : b - begin])


def load_torch(file: Path | IO[bytes]) -> Any:
    """Load from torch.save(). Raises ValueError for objects that could run code."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:  # it suggests weights_only=False
        raise ValueError("damaged, or it has Python objects, which could run code") from e


def _rows(at: list[int], shape: list[int]) -> tuple[int, int]:
    return (at[0], at[0] + shape[0]) if shape else (0, 1)


def _read_index(folder: Path) -> Json:
    index: Json = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    for name, saved in index.items():
        shape = saved["shape"]
        if not isinstance(getattr(torch, saved["dtype"]), torch.dtype):
            raise ValueError(f"{name} has the dtype {saved['dtype']!r}")
        end, rest = 0, [0] * (len(shape) - 1)
        for part in sorted(saved["parts"], key=lambda part: part["at"]):
            if Path(part["file"]).name != part["file"]:
                raise ValueError(f"{part['file']!r} is not a file in this folder")
            if part["at"] != ([end, *rest] if shape else []) or part["shape"][1:] != shape[1:]:
                end = -1
                break
            end = _rows(part["at"], part["shape"])[1]
        if end != _rows([0], shape)[1]:
            raise ValueError(f"the parts of {name} do not cover its {shape} exactly once")
    return index


def _read_part(folder: Path, name: str, part: Json, dtype: str) -> Tensor:
    with (folder / part["file"]).open("rb") as f:
        f.seek(part["offset"])
        content = f.read(part["length"])
    if "crc32" in part and zlib.crc32(content) != part["crc32"]:  # older versions lack it
        raise ValueError(f"{part['file']} is damaged: {name} has another CRC-32 than in {INDEX}")
    saved: Tensor = load_torch(io.BytesIO(content))
    if (dtype_name(saved.dtype), [*saved.shape]) != (dtype, part["shape"]):
        raise ValueError(f"{name} in {part['file']} is not as {INDEX} has it")
    return saved
