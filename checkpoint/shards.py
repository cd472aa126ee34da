"""Tensors of several processes: each writes its rows, and any number reads them.

shards/__0_0.distcp ...   a file for each process: parts of tensors, by torch.save
shards/index.json         dtype and shape of each tensor; place and CRC-32 of each part

torch.distributed.checkpoint has a pickle for an index, which could run code.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from core.parallel import DistInfo, local, local_part
from core.runtime import dtype_name
from data.schema import Count, FileError, Json, read_json, record

INDEX = "index.json"
Part = record(at=list[Count], shape=list[Count], file=str, offset=Count, length=Count,
              optional={"crc32": int})  # fmt: skip  # which older versions lack
Parts = list[Part]  # type: ignore[valid-type]
Entry = record(dtype=str, shape=list[Count], parts=Parts)
Index = dict[str, Entry]  # type: ignore[valid-type]


def write(folder: Path, tensors: Mapping[str, Tensor], distributed: DistInfo) -> Json:
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


class Shards:
    """A checkpoint's tensors, read row by row. Any exception: damage."""

    def __init__(self, index: Path) -> None:
        self.folder = index.parent
        self.index = read_json(index, Index)
        self.empty: dict[str, Tensor] = {}  # shapes and dtypes
        for name, saved in self.index.items():
            saved["parts"].sort(key=lambda part: part["at"])
            shape, end = saved["shape"], 0
            for part in saved["parts"]:
                at = [end, *[0] * len(shape[1:])] if shape else []
                fits = part["at"] == at and part["shape"][1:] == shape[1:]
                end = end + _rows(part["shape"]) if fits else -1
            if end != _rows(shape):
                raise ValueError(f"the parts of {name} do not cover its {shape} exactly once")
            dtype = getattr(torch, saved["dtype"])
            self.empty[name] = torch.empty(shape, dtype=dtype, device="meta")

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors, whole or sharded by rows."""
        for name, target in tensors.items():
            shape, at, _ = local_part(target)
            rows = local(target) if shape else local(target)[None]
            for part in self.index[name]["parts"]:
                begin = sum(part["at"][:1]) - sum(at[:1])
                a, b = max(0, begin), min(len(rows), begin + _rows(part["shape"]))
                if a < b:
                    values = self._read(name, part).reshape(-1, *shape[1:])
                    rows[a:b].copy_(values[a - begin : b - begin])

    def whole(self, prefix: str = "") -> dict[str, Tensor]:
        """Full tensors on the CPU, the prefix removed."""
        found = {name: torch.empty_like(t, device="cpu") for name, t in self.empty.items()
                 if name.startswith(prefix)}  # fmt: skip
        self.fill(found)
        return {name.removeprefix(prefix): t for name, t in found.items()}

    def _read(self, name: str, part: Json) -> Tensor:
        if Path(part["file"]).name != part["file"]:
            raise ValueError(f"{part['file']!r} is not a file in this folder")
        with (self.folder / part["file"]).open("rb") as f:
            f.seek(part["offset"])
            content = f.read(part["length"])
        if part.get("crc32", crc := zlib.crc32(content)) != crc:
            raise ValueError(f"{part['file']} is damaged: {name} has another CRC-32 than {INDEX}")
        saved: Tensor = load_torch(io.BytesIO(content))
        if (saved.dtype, [*saved.shape]) != (self.empty[name].dtype, part["shape"]):
            raise ValueError(f"{name} in {part['file']} is not as {INDEX} has it")
        return saved


def load_torch(file: Path | IO[bytes]) -> Any:
    """Load from torch.save(). Raises ValueError for objects that could run code."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:  # it suggests weights_only=False
        raise ValueError("damaged, or it has Python objects, which could run code") from e


def _rows(shape: list[int]) -> int:
    return shape[0] if shape else 1
