"""Tokens in .bin files, read where they lie; other programs' are checked at each read.

llm.c, modded-nanogpt   a header of 256 int32 (20240520, 1, number of tokens), then uint16 ids
nanoGPT                 uint16 ids
ours                    uint16 or uint32 ids
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from core.files import printable
from core.settings import UserError

if TYPE_CHECKING:
    from data.tokenizer import Json

MAGIC, VERSION = 20240520, 1
HEADER = 256  # int32
ID = np.dtype("<u2")
SAMPLE = 2**17  # bytes
OTHERS = {b"\x93NUMPY": "a .npy file", MAGIC.to_bytes(4, "little"): "a shard of llm.c"}
AGAIN = "make the dataset again: python -m data shards --source=..."


class Tokens:
    """Files as one mapped array of tokens: len() and slices.

    files: of describe(), else LookupError or TypeError; again: advice if one has changed.
    """

    vocab_size: int | None = None

    def __init__(self, files: list[Json], dtype: str = "uint16", again: str = AGAIN) -> None:
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
            if "mtime_ns" in self.files[i]:  # not our own
                self._check(self.files[i])
            found.append(self.maps[i][first : first + n])
            start += n
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, self.dtype), *found])

    def place(self, i: int) -> str:
        file = self._file(i)
        return f"{printable(self.files[file]['path'])}, token {i - int(self.ends[file]):,}"

    def _file(self, i: int) -> int:
        return int(np.searchsorted(self.ends, i, side="right")) - 1

    def _map(self, file: Json) -> np.ndarray:
        where = {"offset": file["skip"], "shape": file["tokens"]}
        try:
            with open(file["path"], "rb") as f:
                self._check(file)
                return np.asarray(np.memmap(f, self.dtype, "r", **where))
        except OSError as e:
            advice = f"; {self.again}" if isinstance(e, FileNotFoundError) else ""
            why = f"cannot read {printable(file['path'])} ({e.strerror})"
            raise UserError(f"{why}{advice}") from e

    def _check(self, file: Json) -> None:
        path = printable(file["path"])
        try:
            stat = os.stat(file["path"])
        except OSError as e:
            raise UserError(f"cannot read {path} ({e.strerror}); {self.again}") from e
        if stat.st_size != (size := file["size"]):
            why = f"expected {size:,} bytes, got {stat.st_size:,}"
            raise UserError(f"{path} is not complete, or has changed ({why}); {self.again}")
        if file.get("mtime_ns", stat.st_mtime_ns) != stat.st_mtime_ns:
            raise UserError(f"{path} has changed since the dataset was made; {self.again}")


def why_not_uint16(start: bytes) -> str | None:
    """The reason if a file's first bytes are not 2-byte ids: the upper halves of wider ids are 0 or
    small, which no text has at every second place."""
    for magic in filter(start.startswith, OTHERS):
        return f"expected uint16 ids alone, got {OTHERS[magic]}"
    for size in (4, 8):
        ids = np.frombuffer(start[: len(start) // size * size], ID).reshape(-1, size // 2)
        low, high = ids[:, 0], ids[:, 1:].max(initial=0)
        largest = low.max(initial=0)
        varied = largest >= 2**15 if high else largest >= 16 or not low.all()
        if len(ids) >= 8 and high < 4 and varied and (low > high).mean() > 0.5:
            return f"expected uint16 ids, got ids of {size} bytes"
    return None


def describe(path: str) -> Json:
    """Path, size, time, tokens, bytes to skip. Raises UserError."""
    name = printable(path)
    try:
        with open(path, "rb") as f:
            stat, sample = os.fstat(f.fileno()), f.read(SAMPLE)
    except OSError as e:
        raise UserError(f"cannot read {name} ({e.strerror})") from e
    start = sample[: 4 * HEADER]
    header, skip = np.frombuffer(start[: len(start) // 4 * 4], "<i4").tolist(), 0
    # A damaged or other header: text has no such run of zeros.
    if header[:1] == [MAGIC] or (len(header) == HEADER and not any(header[3:])):
        if header[:2] != [MAGIC, VERSION] or len(header) < HEADER:
            want = f"a header of {HEADER} int32 that begins {MAGIC}, {VERSION}"
            got = f"{header[:2]} in {len(start):,} bytes"
            raise UserError(f"{name}: expected {want}; got {got}")
        skip = 4 * HEADER
    tokens, rest = divmod(stat.st_size - skip, ID.itemsize)
    if stat.st_size == skip and not (skip and header[2]):
        raise UserError(f"{name} has no tokens")
    doubt = why_not_uint16(sample[skip:])
    if rest or (skip and tokens != header[2]):
        want = f"{header[2]:,} tokens, as its header says" if skip else "uint16 tokens"
        got = f"{stat.st_size - skip:,} bytes of tokens"
        if skip and doubt:
            got += f", {doubt}"
        raise UserError(f"{name}: expected {want}; got {got}")
    if not skip and doubt:
        raise UserError(f"{name}: {doubt}")
    about = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    return {"path": path, **about, "skip": skip, "tokens": tokens}


def paths(source: str) -> list[str]:
    pattern = os.path.join(glob.escape(source), "*.bin") if os.path.isdir(source) else source
    return sorted(glob.glob(pattern))


def meta(source: str | None) -> Json:
    """Files and tokens of a pattern or folder ("val" in the name: validation). Raises UserError."""
    if source is None:
        raise UserError("shards needs --source=PATTERN, as --source='fineweb_*.bin'")
    found: dict[str, list[Json]] = {"train": [], "val": []}
    for path in paths(source):
        split = "val" if "val" in Path(path).name else "train"
        found[split].append(describe(os.path.abspath(path)))
    for split, files in found.items():
        if not files:
            what = " for validation (with val in its name)" if split == "val" else " for training"
            what *= any(found.values())
            raise UserError(f"--source={printable(source)}: no file{what}")
    files = found["train"] + found["val"]
    begins = files[0]["skip"] > 0  # llm.c's
    if odd := [file["path"] for file in files if (file["skip"] > 0) != begins]:
        both = f"{printable(files[0]['path'])} and {printable(odd[0])}"
        raise UserError(f"of {both} only one has a header")
    tokens = {split: sum(file["tokens"] for file in files) for split, files in found.items()}
    return {"dtype": "uint16", "tokens": tokens, "shards": found, "eot_begins": begins}
