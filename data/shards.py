"""Tokens in .bin files, read where they lie: our own, and those of other programs.

    llm.c, modded-nanogpt   a header of 256 int32 (20240520, 1, number of tokens), then uint16 ids
    nanoGPT                 uint16 ids alone
    ours                    uint16 or uint32 ids alone

meta.json lists the files of other programs. They are checked at each read: one that changes during
a run is an error.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from core.settings import UserError

if TYPE_CHECKING:
    from data.tokenizer import Json

MAGIC, VERSION = 20240520, 1
HEADER = 256  # int32
ID = np.dtype("<u2")
SAMPLE = 2**17  # bytes at the beginning that show the width of the ids
OTHERS = {b"\x93NUMPY": "a .npy file", MAGIC.to_bytes(4, "little"): "a shard of llm.c"}
AGAIN = "make the dataset again: python -m data shards --source=..."


class Tokens:
    """The tokens of several files as one array, mapped: len() and slices."""

    vocab_size: int | None = None  # ids are below it

    def __init__(self, files: list[Json], dtype: str = "uint16", again: str = AGAIN) -> None:
        """files: as describe() returns them; `again`: advice if one is not as described. Raises
        LookupError or TypeError for other lists."""
        self.files, self.again = files, again
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.ends = np.cumsum([0, *(file["tokens"] for file in files)])
        self.maps = [self._map(file) for file in files]

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(len(self))
        assert step == 1
        found = []
        while start < stop:
            i = self._file(start)
            first, n = start - int(self.ends[i]), min(stop, int(self.ends[i + 1])) - start
            if "mtime_ns" in self.files[i]:  # not of our own, which only we write
                self._check(self.files[i])
            found.append(self.maps[i][first : first + n])
            start += n
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, self.dtype), *found])

    def place(self, i: int) -> str:
        """The file of token i, and its number there."""
        file = self._file(i)
        return f"{self.files[file]['path']}, token {i - int(self.ends[file]):,}"

    def _file(self, i: int) -> int:
        return int(np.searchsorted(self.ends, i, side="right")) - 1

    def _map(self, file: Json) -> np.ndarray:
        where = {"offset": file["skip"], "shape": file["tokens"]}
        try:
            with Path(file["path"]).open("rb") as f:
                self._check(file)
                return np.asarray(np.memmap(f, self.dtype, "r", **where))
        except OSError as e:
            advice = f"; {self.again}" if isinstance(e, FileNotFoundError) else ""
            raise UserError(f"cannot read {file['path']} ({e.strerror}){advice}") from e

    def _check(self, file: Json) -> None:
        """Raise UserError if it is not the file that was described."""
        path, size = file["path"], file["size"]
        try:
            stat = os.stat(path)
        except OSError as e:
            raise UserError(f"cannot read {path} ({e.strerror}); {self.again}") from e
        if stat.st_size != size:
            why = f"expected {size:,} bytes, got {stat.st_size:,}"
            raise UserError(f"{path} is not complete, or has changed ({why}); {self.again}")
        if file.get("mtime_ns", stat.st_mtime_ns) != stat.st_mtime_ns:
            raise UserError(f"{path} has changed since the dataset was made; {self.again}")


def why_not_uint16(start: bytes) -> str | None:
    """The reason if the first bytes of a file are not ids of 2 bytes, else None.

    The upper halves of wider ids are 0 or small, which no text has at every second place.
    """
    for magic in filter(start.startswith, OTHERS):
        return f"expected uint16 ids alone, got {OTHERS[magic]}"
    for size in (4, 8):
        ids = np.frombuffer(start[: len(start) // size * size], ID).reshape(-1, size // 2)
        low, high = ids[:, 0], ids[:, 1:].max(initial=0)
        largest = low.max(initial=0)
        varied = largest >= 2**15 if high else largest >= 16 or not low.all()
        if len(ids) >= 8 and high < 4 and varied and (low > high).mean() > 0.5:
            return f"ids of {size} bytes, expected uint16: convert them with NumPy's astype"
    return None


def describe(path: str) -> Json:
    """Path, size, time, tokens and bytes to skip of a file. Raises UserError if it is damaged."""
    try:
        with open(path, "rb") as f:
            stat, sample = os.fstat(f.fileno()), f.read(SAMPLE)
    except OSError as e:
        raise UserError(f"cannot read {path} ({e.strerror})") from e
    start = sample[: 4 * HEADER]
    header, skip = np.frombuffer(start[: len(start) // 4 * 4], "<i4").tolist(), 0
    # A damaged header, or one of another kind: text has no such run of zeros.
    if header[:1] == [MAGIC] or (len(header) == HEADER and not any(header[3:])):
        if header[:2] != [MAGIC, VERSION] or len(header) < HEADER:
            raise UserError(
                f"{path}: expected a header of {HEADER} int32 that begins {MAGIC}, {VERSION}; got "
                f"{header[:2]} in {len(start):,} bytes"
            )
        skip = 4 * HEADER
    tokens, rest = divmod(stat.st_size - skip, ID.itemsize)
    if stat.st_size == skip and not (skip and header[2]):
        raise UserError(f"{path} has no tokens")
    if rest or (skip and tokens != header[2]):
        want = f"{header[2]:,} tokens, as its header says" if skip else "uint16 tokens"
        got = f"{stat.st_size - skip:,} bytes of tokens"
        if skip and (doubt := why_not_uint16(sample[skip:])):
            got += f", {doubt}"
        raise UserError(f"{path}: expected {want}; got {got}")
    if not skip and (doubt := why_not_uint16(sample)):
        raise UserError(f"{path}: {doubt}")
    about = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    return {"path": path, **about, "skip": skip, "tokens": tokens}


def paths(source: str) -> list[str]:
    """The files of a pattern, or of a folder."""
    pattern = os.path.join(glob.escape(source), "*.bin") if Path(source).is_dir() else source
    return sorted(glob.glob(pattern))


def meta(source: str | None) -> Json:
    """The files and tokens of a pattern, or of a folder, for meta.json.

    Raises UserError: no file of a split ("val" in the name: validation), or one is damaged.
    """
    if source is None:
        raise UserError("shards needs --source=PATTERN, as --source='fineweb_*.bin'")
    found: dict[str, list[Json]] = {"train": [], "val": []}
    for path in paths(source):
        split = "val" if "val" in Path(path).name else "train"
        found[split].append(describe(os.path.abspath(path)))
    for split, files in found.items():
        if not files:
            what = " for validation (with val in its name)" if split == "val" else " for training"
            raise UserError(f"--source={source}: no file{what if any(found.values()) else ''}")
    files = found["train"] + found["val"]
    begins = files[0]["skip"] > 0  # llm.c's documents begin with the end-of-text token
    if odd := [file["path"] for file in files if (file["skip"] > 0) != begins]:
        raise UserError(f"of {files[0]['path']} and {odd[0]} only one has a header")
    tokens = {split: sum(file["tokens"] for file in files) for split, files in found.items()}
    return {"dtype": "uint16", "tokens": tokens, "shards": found, "eot_begins": begins}
