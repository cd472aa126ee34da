"""The tensors of a run of several processes, by torch.distributed.checkpoint (DCP).

    shards/__0_0.distcp ...   what each process wrote: tensors, or its parts of them
    shards/index.json         the dtype and the shape of each tensor, and where its parts lie

One flat dict of plain tensors and DTensors is written and read, under the names of the model:
"model.wte.weight", "optimizer.wte.weight.exp_avg", ... DCP finds out which process writes which
part (a tensor that all hold is written by one of them), and which bytes each one reads, whatever
the number of processes was and is.

DCP's own index, the file .metadata, is a pickle: loading it could run code. It is written for
PyTorch's tools and never read here; index.json says the same. What DCP pickles beside tensors
(BytesStorageMetadata) cannot be said in it, and tensors are loaded with weights_only=True.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from checkpoint.together import ranks
from core.distributed import DistInfo
from core.runtime import dtype_name
from core.settings import UserError

INDEX = "index.json"


def write(folder: Path, tensors: Mapping[str, Tensor], group: Any) -> None:
    """Write this process's part of the tensors; all processes of `group` call it together. What
    failed on this process is raised here, a failure elsewhere only there."""
    try:
        dcp.save(dict(tensors), storage_writer=_Writer(folder), process_group=group)
    except dcp.CheckpointException as e:  # on all processes
        if failure := e.failures.get(dist.get_rank(group)):
            raise failure[0] from e


def read(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill the tensors in place, a DTensor with this process's part; asks no other process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # for it is not asked
        try:
            dcp.load(dict(tensors), storage_reader=_Reader(folder), no_dist=True)
        except dcp.CheckpointException as e:
            raise e.failures[0][0] from e


def read_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, whole, on the CPU, named without it."""
    saved = _Reader(folder).tensors
    wanted = {name: md for name, md in saved.items() if name.startswith(prefix)}
    tensors = {name: torch.empty(md.size, dtype=md.properties.dtype) for name, md in wanted.items()}
    read(folder, tensors)
    return {name.removeprefix(prefix): t for name, t in tensors.items()}


def shapes(folder: Path) -> dict[str, torch.Size]:
    """The shape of each tensor."""
    return {name: md.size for name, md in _Reader(folder).tensors.items()}


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, which syncs each file, and the index."""

    def finish(self, metadata: Any, results: Any) -> None:
        """On the main process, when all have written."""
        super().finish(metadata, results)
        folder, index = Path(self.path), {}
        for name, tensor in metadata.state_dict_metadata.items():
            parts = []
            for chunk in tensor.chunks:
                if 0 in chunk.sizes:  # of a process for which no row was left
                    continue
                lies = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                if not (folder / lies.relative_path).exists():
                    raise OSError(f"{lies.relative_path} of another process is not there: out_dir "
                                  "must be a folder that all machines share")  # fmt: skip
                parts.append({
                    "at": list(chunk.offsets), "shape": list(chunk.sizes),
                    "file": lies.relative_path, "offset": lies.offset, "length": lies.length,
                })  # fmt: skip
            dtype, shape = dtype_name(tensor.properties.dtype), list(tensor.size)
            index[name] = {"dtype": dtype, "shape": shape, "parts": parts}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


class _Reader(dcp.FileSystemReader):
    """DCP's reader, with our index in place of its pickle."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError (or KeyError, TypeError, ...): the index is not one."""
        super().__init__(folder)
        tensors: dict[str, Any] = {}
        lies: dict[MetadataIndex, Any] = {}
        for name, saved in json.loads((folder / INDEX).read_text(encoding="utf-8")).items():
            dtype, shape, chunks = getattr(torch, saved["dtype"]), torch.Size(saved["shape"]), []
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name} has the dtype {saved['dtype']!r}")
            for part in saved["parts"]:
                if Path(part["file"]).name != part["file"]:
                    raise ValueError(f"{part['file']!r} is not a file in this folder")
                chunk = ChunkStorageMetadata(torch.Size(part["at"]), torch.Size(part["shape"]))
                lies[MetadataIndex(name, chunk.offsets)] = SimpleNamespace(
                    relative_path=part["file"], offset=part["offset"], length=part["length"],
                    transform_descriptors=None,
                )  # fmt: skip
                chunks.append(chunk)
            # DCP would leave a gap as it is: whatever the memory held.
            if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
                raise ValueError(f"the parts of {name} are not the whole")
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype), shape, chunks)
        self.tensors = tensors
        self.metadata = Metadata(dict(tensors), storage_data=lies, storage_meta=StorageMeta())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def check_replicas(tensors: Mapping[str, Tensor], distributed: DistInfo) -> None:
    """Compare the checksums of what several processes hold copies of.

    Raises:
        UserError: on all processes, with the ranks whose copy is not that of the others.
    """
    mine = [_checksum(t) for t in tensors.values()]
    for name, sums in zip(tensors, zip(*distributed.gather(mine), strict=True), strict=True):
        copies: dict[Any, dict[int, list[int]]] = {}  # which part -> checksum -> ranks
        for rank, (part, checksum) in enumerate(sums):
            copies.setdefault(part, {}).setdefault(checksum, []).append(rank)
        for same in copies.values():
            most, *rest = sorted(same.values(), key=len, reverse=True)
            if rest:
                others = sorted(rank for ranks in rest for rank in ranks)
                raise UserError(
                    f"the copies of the weights have become different: {name} of {ranks(others)} "
                    f"is not that of {ranks(most)}; nothing was saved, --init_from=resume goes on "
                    "from the checkpoint before, and a device that does it again is faulty"
                )


def _checksum(t: Tensor) -> tuple[Any, int]:
    """Which part of the tensor this process holds, and the sum of its bits as integers."""
    part: Any = ()
    if isinstance(t, DTensor):
        shards = zip(t.device_mesh.get_coordinate() or (), t.placements, strict=True)
        part, t = tuple(i for i, placement in shards if placement.is_shard()), t.to_local()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return part, int(t.detach().view(bits).sum())
