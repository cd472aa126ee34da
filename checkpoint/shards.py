"""Tensors of several processes, saved by torch.distributed.checkpoint (DCP).

    shards/__0_0.distcp ...   one file or more a process
    shards/index.json         dtype and shape of each tensor; file, offset and length of each part

DCP decides which process writes and reads which part; the number of processes may change.
DCP's own index, .metadata, is a pickle, which could run code: it is written for PyTorch's tools and
never read here. index.json has the same content.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from core.runtime import dtype_name

INDEX = "index.json"


def write(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this process's part. All processes of `group` must call it."""
    try:
        dcp.save(dict(tensors), storage_writer=_Writer(folder), process_group=group)
    except dcp.CheckpointException as e:  # on all processes
        if failure := e.failures.get(dist.get_rank(group)):
            raise failure[0] from e


def read(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill the tensors in place, without communication."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(dict(tensors), storage_reader=_Reader(folder), no_dist=True)
        except dcp.CheckpointException as e:
            raise e.failures[0][0] from e


def empty(folder: Path, prefix: str = "", device: str = "meta") -> dict[str, Tensor]:
    """Uninitialized tensors of the saved shapes and dtypes, those whose name has the prefix."""
    return {
        name: torch.empty(saved.size, dtype=saved.properties.dtype, device=device)
        for name, saved in _Reader(folder).tensors.items()
        if name.startswith(prefix)
    }


def read_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Read full tensors to the CPU; `prefix` selects them and is removed from their names."""
    tensors = empty(folder, prefix, "cpu")
    read(folder, tensors)
    return {name.removeprefix(prefix): t for name, t in tensors.items()}


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, which also writes the index."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as e:  # DCP would lose its context, the system's error
            raise (e.__context__ or e) from None

    def finish(self, metadata: md.Metadata, results: list[list[WriteResult]]) -> None:
        # Runs on the main process, when all have written.
        super().finish(metadata, results)
        folder, index = Path(self.path), {}
        # Before torch 2.13 the places are in a copy of `metadata` only.
        places = {part.index: part.storage_data for parts in results for part in parts}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, md.TensorStorageMetadata)
            parts = []
            for chunk in tensor.chunks:
                if 0 in chunk.sizes:  # fewer rows than processes
                    continue
                place = places[md.MetadataIndex(name, chunk.offsets)]
                file = place.relative_path
                if not (folder / file).exists():
                    raise OSError(
                        f"{file} of another process is missing: all machines must share out_dir"
                    )
                part = {"at": list(chunk.offsets), "shape": list(chunk.sizes)}
                part |= {"file": file, "offset": place.offset, "length": place.length}
                parts.append(part)
            dtype, shape = dtype_name(tensor.properties.dtype), list(tensor.size)
            index[name] = {"dtype": dtype, "shape": shape, "parts": parts}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


class _Reader(dcp.FileSystemReader):
    """DCP's reader, with our index in place of its pickle."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tensors: dict[str, md.TensorStorageMetadata] = {}
        self.parts: dict[md.MetadataIndex, tuple[torch.dtype, torch.Size]] = {}
        places: dict[md.MetadataIndex, _StorageInfo] = {}
        for name, saved in json.loads((folder / INDEX).read_text(encoding="utf-8")).items():
            dtype, shape, chunks = getattr(torch, saved["dtype"]), torch.Size(saved["shape"]), []
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name} has the dtype {saved['dtype']!r}")
            for part in saved["parts"]:
                if Path(part["file"]).name != part["file"]:
                    raise ValueError(f"{part['file']!r} is not a file in this folder")
                chunk = md.ChunkStorageMetadata(torch.Size(part["at"]), torch.Size(part["shape"]))
                place = _StorageInfo(part["file"], part["offset"], part["length"])
                places[at := md.MetadataIndex(name, chunk.offsets)] = place
                self.parts[at] = dtype, chunk.sizes
                chunks.append(chunk)
            if not covered(shape, chunks):  # DCP leaves a gap uninitialized
                raise ValueError(f"the parts of {name} do not cover its {[*shape]} exactly once")
            self.tensors[name] = md.TensorStorageMetadata(md.TensorProperties(dtype), shape, chunks)
        self.metadata = md.Metadata({**self.tensors}, None, places, md.StorageMeta())

    def read_metadata(self, *args: object, **kwargs: object) -> md.Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read parts as DCP does, which would cast and cut one of another dtype or shape."""
        for item in plan.items:
            at, place = item.storage_index, self.metadata.storage_data[item.storage_index]
            with (Path(self.path) / place.relative_path).open("rb") as f:
                f.seek(place.offset)
                part = torch.load(io.BytesIO(f.read(place.length)), "cpu", weights_only=True)
            if (part.dtype, part.shape) != self.parts[at]:
                raise ValueError(f"{at.fqn} in {place.relative_path} is not as {INDEX} has it")
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part[tuple(slice(a, a + n) for a, n in ranges)])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def covered(shape: torch.Size, chunks: list[md.ChunkStorageMetadata]) -> bool:
    """True if the chunks are all rows of the tensor, each once."""
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets):
        if chunk.offsets != (end, *[0] * len(shape))[: len(shape)] or chunk.sizes[1:] != shape[1:]:
            return False
        end += chunk.sizes.numel() if not shape else chunk.sizes[0]
    return end == (*shape, 1)[0]
