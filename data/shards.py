"""Tokens in .bin files, read where they lie; other programs' are checked at each read.

llm.c, modded-nanogpt   a header of 256 int32 (20240520, 1, number of tokens), then uint16 ids
nanoGPT                 uint16 ids
ours                    uint16 or uint32 ids
"""

from __future__ import annotations

import glob
import os
from pathlib import Path

import numpy as np

from data.schema import FileError, Json, reading

MAGIC, VERSION = 20240520, 1
HEADER = 256  # int32
SAMPLE = 2**17  # bytes
OTHERS = {b"\x93NUMPY": "a .npy file", MAGIC.to_bytes(4, "little"): "a shard of llm.c"}


class Tokens:
    """Files (schema.Shard) as one mapped array of tokens: len() and slices."""

    vocab_size: int | None = None

    def __init__(self, files: list[Json], dtype: str, again: str) -> None:
        """again: advice if a file has changed."""
        self.files, self.again = files, again
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.ends = np.cumsum([0, *(file["tokens"] for file in files)])
        self.maps = [self._map(file) for file in files]

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        found = []
        while start < stop:
            i = self._file(start)
            first, n = start - int(self.ends[i]), min(stop, int(self.ends[i + 1])) - start
            if "mtime_ns" in self.files[i]:  # not our own
                self._check(self.files[i])
            found.append(self.maps[i][first : first + n])
            start += n
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, self.dtype), *found])

    def place(self, i: int) -> str:
        file = self._file(i)
        return f"{self.files[file]['path']}, token {i - int(self.ends[file]):,}"

    def _file(self, i: int) -> int:
        return int(np.searchsorted(self.ends, i, side="right")) - 1

    def _map(self, file: Json) -> np.ndarray:
        self._check(file)
        where = {"offset": file["skip"], "shape": file["tokens"]}
        with reading(file["path"]), open(file["path"], "rb") as f:
            return np.asarray(np.memmap(f, self.dtype, "r", **where))

    def _check(self, file: Json) -> None:
        path, size = file["path"], file["skip"] + self.dtype.itemsize * file["tokens"]
        try:
            stat = os.stat(path)
        except (OSError, ValueError) as e:  # ValueError: no name of a file
            raise FileError(f"{path}: {getattr(e, 'strerror', e)}; {self.again}") from e
        if os.path.isdir(path):
            raise FileError(f"{path} is a folder, expected a file")
        if stat.st_size != size:
            why = f"expected {size:,} bytes, got {stat.st_size:,}"
            raise FileError(f"{path}: {why}; {self.again}")
        if file.get("mtime_ns", stat.st_mtime_ns) != stat.st_mtime_ns:
            raise FileError(f"{path} has changed since the dataset was made; {self.again}")


def why_not_uint16(start: bytes) -> str | None:
    """What a file's first bytes are if not 2-byte ids: the upper halves of wider ids are 0 or
    small, which no text has at every second place."""
    for magic in filter(start.startswith, OTHERS):
        return OTHERS[magic]
    for size in (4, 8):
        ids = np.frombuffer(start[: len(start) // size * size], "<u2").reshape(-1, size // 2)
        low, high = ids[:, 0], ids[:, 1:].max(initial=0)
        largest = low.max(initial=0)
        varied = largest >= 2**15 if high else largest >= 16 or not low.all()
        if len(ids) >= 8 and high < 4 and varied and (low > high).mean() > 0.5:
            return f"ids of {size} bytes"
    return None


def describe(path: str) -> Json:
    """Another program's file as schema.Shard. Raises UserError."""
    with reading(path), open(path, "rb") as f:
        stat, sample = os.fstat(f.fileno()), f.read(SAMPLE)
    start = sample[: 4 * HEADER]
    header, skip = np.frombuffer(start[: len(start) // 4 * 4], "<i4").tolist(), 0
    want, got = "uint16 tokens", why_not_uint16(sample)
    # A damaged or other header: text has no such run of zeros.
    if header[:1] == [MAGIC] or (len(header) == HEADER and not any(header[3:])):
        if header[:2] != [MAGIC, VERSION] or len(header) < HEADER:
            want = f"a header of {HEADER} int32 that begins {MAGIC}, {VERSION}"
            got = f"{header[:2]} in {len(start):,} bytes"
            raise FileError(f"{path}: expected {want}; got {got}")
        skip, got = len(start), None
        want = f"{header[2]:,} tokens, as its header says"
    tokens, rest = divmod(stat.st_size - skip, 2)
    if rest or not tokens or (skip and tokens != header[2]):
        got = why_not_uint16(sample[skip:]) or f"{stat.st_size - skip:,} bytes of tokens"
    if got:
        raise FileError(f"{path}: expected {want}; got {got}")
    about = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    return {"path": path, **about, "skip": skip, "tokens": tokens}


def paths(source: str) -> list[str]:
    pattern = os.path.join(glob.escape(source), "*.bin") if os.path.isdir(source) else source
    return sorted(glob.glob(pattern))


def meta(source: str | None) -> Json:
    """Files and tokens of a pattern or folder ("val" in the name: validation). Raises UserError."""
    if source is None:
        raise FileError("shards needs --source=PATTERN, as --source='fineweb_*.bin'")
    found: dict[str, list[Json]] = {"train": [], "val": []}
    for path in paths(source):
        split = "val" if "val" in Path(path).name else "train"
        found[split].append(describe(os.path.abspath(path)))
    for split, what in ("train", "for training"), ("val", "for validation (with val in its name)"):
        if not found[split]:
            raise FileError(f"--source={source}: no file {what}")
    files = found["train"] + found["val"]
    begins = files[0]["skip"] > 0  # llm.c's
    if odd := [file["path"] for file in files if (file["skip"] > 0) != begins]:
        raise FileError(f"only one of {files[0]['path']} and {odd[0]} has a header")
    tokens = {split: sum(file["tokens"] for file in files) for split, files in found.items()}
    return {"dtype": "uint16", "tokens": tokens, "shards": found, "eot_begins": begins}
