"""Datasets on disk, and batches of their tokens, a pure function of (seed, step, split).

An epoch visits each window of block_size tokens once, in random order, from a random offset. Files
have ids in uint16 (ours also uint32); those of llm.c and modded-nanogpt after 256 int32: 20240520,
1, the number of tokens. Files of `shards` are checked at each read.
"""

from __future__ import annotations

import glob
import math
import os
import pickle
import stat
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from core.files import command
from core.process import map_ahead
from core.settings import UserError, first_line
from data.schema import FileError, Json, Meta, read_json, reading
from data.sources import DATASETS
from data.tokenizer import GPT2Tokenizer

if TYPE_CHECKING:  # `python -m data` needs no torch
    import torch

    Batch = tuple[torch.Tensor, ...]

MAGIC, VERSION = 20240520, 1
HEADER = 1024  # bytes, int32
SAMPLE = 2**17  # bytes
OTHERS = {b"\x93NUMPY": "a .npy file", MAGIC.to_bytes(4, "little"): "a shard of llm.c"}
SCAN = 2**16  # tokens


def find(dataset: str, data_dir: str = "data") -> Path:
    """A path, or a name in data_dir or the current folder."""
    named, path = Path(data_dir).expanduser() / dataset, Path(dataset).expanduser()
    is_path = os.sep in dataset or dataset in (os.curdir, os.pardir)
    return path if is_path or (os.path.exists(path) and not os.path.isdir(named)) else named


def read_meta(folder: str | Path) -> Json:
    """The meta.json of a dataset, or of nanoGPT's files. Raises UserError."""
    path = Path(folder) / "meta.json"
    ours = path, path.with_name(".partial")  # of an interrupted preparation
    if os.path.exists(path.with_name("train.bin")) and not any(map(os.path.exists, ours)):
        return _nanogpt_meta(path.parent)
    try:
        meta = read_json(path, Meta)
        if (n := len(meta["tokenizer"].get("vocabulary", ()))) not in (0, meta["vocab_size"]):
            raise FileError(f"{path}: vocab_size is {meta['vocab_size']}, for {n} characters")
        return meta
    except UserError as e:
        where = path.parent.absolute()
        words = [where.name] if where.name in DATASETS else ["text", "--source=PATH"]
        if os.path.isfile(folder):
            words, where = ["text", f"--source={where}"], where.with_suffix("")
        prepare = command("python", "-m", "data", *words, f"--out_dir={where}")
        raise FileError(f"no dataset: {e}; prepare it: {prepare}") from e


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"it names {module}.{name}, which could run code")


def _nanogpt_meta(folder: Path) -> Json:
    tokenizer: Json = {"name": GPT2Tokenizer.name}
    V, path = GPT2Tokenizer.vocab_size, folder / "meta.pkl"
    if path.exists():
        try:
            with path.open("rb") as f:
                saved = _PlainUnpickler(f).load()
            V, itos = saved["vocab_size"], saved["itos"]
            vocabulary = [itos[i] for i in range(len(itos))]
            "".join(vocabulary).encode()
            if {c: i for i, c in enumerate(vocabulary)} != saved["stoi"]:
                raise ValueError("stoi and itos differ")
            if not 1 <= len(vocabulary) <= V <= 2**16:
                raise ValueError(f"vocab_size is {V}, for {len(vocabulary)} characters in uint16")
        except Exception as e:
            raise FileError(f"{path} is not nanoGPT's: {type(e).__name__}: {first_line(e)}") from e
        tokenizer = {"name": "char", "vocabulary": vocabulary, "eot": None}
    files = {split: folder / f"{split}.bin" for split in ("train", "val")}
    tokens = {split: os.path.getsize(f) // 2 if f.is_file() else 0 for split, f in files.items()}
    return {"tokenizer": tokenizer, "vocab_size": V, "tokens": tokens}


def padded(V: int) -> int:
    """Round V > 1,024 up to a multiple of 64, for tensor cores."""
    return V if V <= 1024 else -(-V // 64) * 64


def fits(V: int, model_vocab: int) -> bool:
    """True if the model was made for V tokens, here or in nanoGPT."""
    return model_vocab in (V, padded(V))


def bits_per_byte(meta: Json, nats: float) -> float | None:
    """Nats per token of validation to bits per byte; None: bytes unknown."""
    size = meta.get("bytes", {}).get("val")
    return nats / math.log(2) * meta["tokens"]["val"] / size if size else None


class Tokens:
    """The ids of a split, uint16 or uint32, mapped: len() and slices. Raises UserError: too short
    for block_size; an id >= vocab_size (of more than 2**24 tokens in 256 places, others when read);
    `documents` (batches get their starts), but no token ends one."""

    def __init__(self, folder: str | Path, split: str, block_size: int, vocab_size: int,
                 documents: bool = False) -> None:  # fmt: skip
        meta, path = read_meta(folder), Path(folder) / f"{split}.bin"
        words = ["prepare.py"]
        if "dataset" in meta:
            options = meta.get("options", {}) | {"out_dir": path.parent, "force": True}
            flags = (f"--{option}={value}" for option, value in options.items())
            words = ["python", "-m", "data", meta["dataset"], *flags]
        self.again = f"prepare it again: {command(*words)}"
        own = {"path": str(path), "skip": 0, "tokens": meta["tokens"][split]}
        self.files = meta["shards"][split] if "shards" in meta else [own]
        self.begins = np.cumsum([0, *(file["tokens"] for file in self.files)])
        self.dtype = np.dtype(meta.get("dtype", "uint16")).newbyteorder("<")
        self.vocab_size = min(vocab_size, meta["vocab_size"])  # the model's is rounded up
        eot = meta["tokenizer"].get("eot")
        if meta["tokenizer"]["name"] == GPT2Tokenizer.name:
            (eot,) = GPT2Tokenizer.ends
        if documents and eot is None:
            raise FileError(f"--document_mask=True: {folder} has no token that ends a document")
        self.borders = (eot, meta.get("eot_begins", False)) if documents else None
        self.maps = []
        for file in self.files:
            self._check(file)
            with reading(file["path"]):
                where = {"offset": file["skip"], "shape": file["tokens"]}
                self.maps.append(np.asarray(np.memmap(file["path"], self.dtype, "r", **where)))
        if "dtype" not in meta and (got := why_not_uint16(self.maps[0][: SAMPLE // 2].tobytes())):
            raise FileError(f"{path}: expected uint16 ids, got {got}; {self.again}")
        if block_size + 1 > (N := len(self)):
            few = f"fewer than --block_size={block_size} and a target"
            raise FileError(f"{folder} has {N} {split} tokens, {few}")
        for place in np.linspace(0, max(0, N - SCAN), 256).astype(int):
            _ = self[place : place + SCAN]

    def __len__(self) -> int:
        return int(self.begins[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        found = [np.empty(0, self.dtype)]
        while start < stop:
            i = int(np.searchsorted(self.begins, start, side="right")) - 1
            if "mtime_ns" in self.files[i]:  # not our own
                self._check(self.files[i])
            begin, end = self.begins[i : i + 2].tolist()
            ids = self.maps[i][start - begin : stop - begin]
            if (most := ids.max()) >= self.vocab_size:
                at = f"{self.files[i]['path']}, token {start - begin + int(ids.argmax()):,}"
                raise FileError(f"{at} is {most}, but the vocabulary is {self.vocab_size}")
            found.append(ids)
            start = end
        return found[-1] if len(found) <= 2 else np.concatenate(found)

    def _check(self, file: Json) -> None:
        path, size = file["path"], file["skip"] + self.dtype.itemsize * file["tokens"]
        try:
            found = os.stat(path)
        except (OSError, ValueError) as e:  # ValueError: no name of a file
            raise FileError(f"{path}: {getattr(e, 'strerror', e)}; {self.again}") from e
        if stat.S_ISDIR(found.st_mode):
            raise FileError(f"{path} is a folder, expected a file")
        if not file["tokens"]:
            raise FileError(f"{path} has no tokens; {self.again}")
        if found.st_size != size:
            why = f"expected {size:,} bytes, got {found.st_size:,}"
            raise FileError(f"{path}: {why}; {self.again}")
        if file.get("mtime_ns", found.st_mtime_ns) != found.st_mtime_ns:
            raise FileError(f"{path} has changed since the dataset was made; {self.again}")


load = Tokens  # data.load(...)


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


def _shard(path: str) -> Json:
    """Another program's file as schema.Shard. Raises UserError."""
    with reading(path), open(path, "rb") as f:
        found, sample = os.fstat(f.fileno()), f.read(SAMPLE)
    start, skip, want = sample[:HEADER], 0, "uint16 tokens"
    header = np.frombuffer(start[: len(start) // 4 * 4], "<i4").tolist()
    # A damaged or other header: text has no such run of zeros.
    if header[:1] == [MAGIC] or (len(start) == HEADER and not any(header[3:])):
        if header[:2] != [MAGIC, VERSION] or len(start) < HEADER:
            want = f"a header of {HEADER // 4} int32 that begins {MAGIC}, {VERSION}"
            got = f"{header[:2]} in {len(start):,} bytes"
            raise FileError(f"{path}: expected {want}; got {got}")
        skip, want = HEADER, f"{header[2]:,} tokens, as its header says"
    tokens, rest = divmod(found.st_size - skip, 2)
    doubt = why_not_uint16(sample[skip:])
    if rest or not tokens or (tokens != header[2] if skip else doubt):
        got = doubt or f"{found.st_size - skip:,} bytes of tokens"
        raise FileError(f"{path}: expected {want}; got {got}")
    return {"path": path, "mtime_ns": found.st_mtime_ns, "skip": skip, "tokens": tokens}


def shard_paths(source: str) -> list[str]:
    pattern = os.path.join(glob.escape(source), "*.bin") if os.path.isdir(source) else source
    return sorted(glob.glob(pattern))


def shards_meta(source: str | None) -> Json:
    """Files and tokens of a pattern or folder ("val" in the name: validation). Raises UserError."""
    if source is None:
        raise FileError("shards needs --source=PATTERN, as --source='fineweb_*.bin'")
    found: dict[str, list[Json]] = {"train": [], "val": []}
    for path in shard_paths(source):
        found["val" if "val" in Path(path).name else "train"].append(_shard(os.path.abspath(path)))
    for split, what in ("train", "for training"), ("val", "for validation (with val in its name)"):
        if not found[split]:
            raise FileError(f"--source={source}: no file {what}")
    files = found["train"] + found["val"]
    begins = files[0]["skip"] > 0  # llm.c's
    if odd := [file["path"] for file in files if (file["skip"] > 0) != begins]:
        raise FileError(f"only one of {files[0]['path']} and {odd[0]} has a header")
    tokens = {split: sum(file["tokens"] for file in files) for split, files in found.items()}
    return {"dtype": "uint16", "tokens": tokens, "shards": found, "eot_begins": begins}


@dataclass(eq=False)
class Batches:
    """The training sequences of every step."""

    tokens: Tokens
    block_size: int
    global_batch: int  # of all processes
    seed: int
    device: str | torch.device = "cpu"
    seen: tuple[int, int] = (0, 0)  # steps and sequences before it

    @property
    def windows(self) -> int:
        # One fewer than fits leaves room for the offset. A last target begins the next window.
        return max(1, (len(self.tokens) - 1) // self.block_size - 1)

    def starts(self, step: int) -> np.ndarray:
        """First tokens (global_batch,) int64 of a step's sequences."""
        steps, sequences = self.seen
        first, n = sequences + (step - steps) * self.global_batch, self.windows
        k = np.arange(first, first + self.global_batch)
        sizes = len(self.tokens), self.block_size, n
        epochs = np.unique(k // n).tolist()
        return np.concatenate([_epoch(self.seed, e, *sizes)[k[k // n == e] % n] for e in epochs])

    def get(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """This process's sequences and targets, (n, T) int64; with documents their starts, int32.
        n: global_batch / world, rounded up for low ranks."""
        mine = np.array_split(self.starts(step), world)[rank]
        return _gather(self.tokens, self.block_size, mine, self.device)

    def prefetch(self, start: int, stop: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield get(start) to get(stop - 1); on a GPU threads prepare two."""
        get, steps = lambda step: self.get(step, rank, world), range(start, stop)
        return map(get, steps) if str(self.device) == "cpu" else map_ahead(get, steps, 3)


@lru_cache(1)
def _epoch(seed: int, epoch: int, n_tokens: int, block_size: int, windows: int) -> np.ndarray:
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    offset = random.integers(0, n_tokens - 1 - windows * block_size, endpoint=True)
    return offset + block_size * random.permutation(windows)


def eval_batches(tokens: Tokens, block_size: int, batches: int, batch_size: int,
                 rank: int = 0, world: int = 1, device: str | torch.device = "cpu"
                 ) -> Iterator[Batch]:  # fmt: skip
    """Yield evenly spaced windows, always the same, as Batches.get() returns them.

    A process takes every world-th batch. Fillers (targets IGNORE) make shapes and counts equal.
    """
    from core.loss import IGNORE

    n = max(1, min(batches * batch_size, (len(tokens) - 1) // block_size))
    starts = np.linspace(0, len(tokens) - 1 - block_size, n).astype(np.int64)
    for first in range(0, n, world * batch_size):
        mine = starts[first + rank * batch_size :][:batch_size]
        fillers = np.repeat(starts[:1], batch_size - len(mine))
        batch = _gather(tokens, block_size, np.concatenate([mine, fillers]), device)
        batch[1][len(mine) :] = IGNORE
        yield batch


def fingerprint(tokens: Tokens, block_size: int, batches: int, batch_size: int) -> int:
    """CRC-32 of what eval_batches() reads: equal ones make losses comparable."""
    crc = 0
    for x, *_ in eval_batches(tokens, block_size, batches, batch_size):
        crc = zlib.crc32(x.numpy().tobytes(), crc)
    return crc


def _gather(tokens: Tokens, T: int, starts: np.ndarray, device: str | torch.device) -> Batch:
    import torch

    cut = np.stack([tokens[start : start + T + 1] for start in starts.tolist()])
    arrays = [(cut[:, :-1], torch.int64), (cut[:, 1:], torch.int64)]
    if isinstance(tokens, Tokens) and tokens.borders:
        arrays.append((document_starts(cut[:, :-1], *tokens.borders), torch.int32))
    cuda = torch.device(device).type == "cuda"
    batch = []
    # Threads start on device 0, where pinning would create a second context.
    with torch.cuda.device(device) if cuda else nullcontext():
        for array, dtype in arrays:
            t = torch.empty(array.shape, dtype=dtype, pin_memory=cuda)
            t.numpy()[...] = array  # torch would start threads
            batch.append(t.to(device, non_blocking=cuda))
    return tuple(batch)


def document_starts(rows: np.ndarray, eot: int, begins: bool) -> np.ndarray:
    """Each token's document start in its row: (B, T) ids -> (B, T) int32. begins: eot begins a
    document, not ends it."""
    first = rows == eot
    if not begins:
        first[:, 1:] = first[:, :-1].copy()
    return np.maximum.accumulate(np.arange(rows.shape[1], dtype=np.int32) * first, axis=1)
