"""Batches of tokens, a pure function of (seed, step, split).

Each process takes a slice of a step's sequences. An epoch visits each window of block_size tokens
once, in random order, from a random offset.
"""

from __future__ import annotations

import math
import os
import pickle
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from core.background import map_ahead
from core.files import command
from core.settings import UserError, first_line
from data.documents import DATASETS
from data.schema import FileError, Json, Meta, read_json
from data.shards import SAMPLE, Tokens, why_not_uint16
from data.tokenizer import GPT2Tokenizer

if TYPE_CHECKING:  # `python -m data` needs no torch
    import torch
    from torch import Tensor

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
    files = {s: folder / f"{s}.bin" for s in ("train", "val")}
    tokens = {s: f.stat().st_size // 2 if f.is_file() else 0 for s, f in files.items()}
    return {"tokenizer": tokenizer, "vocab_size": V, "tokens": tokens}


def padded(V: int) -> int:
    """Round V > 1,024 up to a multiple of 64, for tensor cores."""
    return V if V <= 1024 else -(-V // 64) * 64


def fits(V: int, model_vocab: int) -> bool:
    """True if the model was made for V tokens, here or in nanoGPT."""
    return model_vocab in (V, padded(V))


def bits_per_byte(meta: Json, nats: float, split: str = "val") -> float | None:
    """Nats per token to bits per byte; None: bytes unknown."""
    tokens, size = meta["tokens"][split], meta.get("bytes", {}).get(split)
    return nats / math.log(2) * tokens / size if size else None


def load(folder: str | Path, split: str, block_size: int, vocab_size: int) -> Tokens:
    """The tokens of a split, (N,) uint16 or uint32, mapped. Raises UserError: too short for
    block_size; an id >= vocab_size (of more than 2**24 tokens in 256 places, others when read)."""
    meta, path = read_meta(folder), Path(folder) / f"{split}.bin"
    words = ["prepare.py"]
    if "dataset" in meta:
        options = meta.get("options", {}) | {"out_dir": path.parent, "force": True}
        words = ["python", "-m", "data", meta["dataset"]]
        words += [f"--{option}={value}" for option, value in options.items()]
    name, again = str(path), f"prepare it again: {command(*words)}"
    files = [{"path": str(path), "skip": 0, "tokens": meta["tokens"][split]}]
    if "shards" in meta:
        name = f"{path.with_name('meta.json')} ({split} shards)"
        files = meta["shards"][split]
    if not all(file["tokens"] for file in files):
        raise FileError(f"{name} has no tokens; {again}")
    tokens = Tokens(files, meta.get("dtype", "uint16"), again)
    N = len(tokens)
    if "dtype" not in meta and (doubt := why_not_uint16(tokens[: SAMPLE // 2].tobytes())):
        raise FileError(f"{name}: expected uint16 ids, got {doubt}; {again}")
    if block_size + 1 > N:
        raise FileError(f"{name} has {N} tokens, fewer than --block_size={block_size} and a target")
    tokens.vocab_size = min(vocab_size, meta["vocab_size"])  # the model's is rounded up
    places = np.linspace(0, max(0, N - SCAN), 256).astype(int)
    if (largest := max(int(tokens[a : a + SCAN].max()) for a in places)) >= tokens.vocab_size:
        raise FileError(f"{name} has token {largest}, but the vocabulary is {tokens.vocab_size}")
    return tokens


@dataclass(frozen=True)
class Documents:
    eot: int
    begins: bool  # it begins a document, or ends it

    @classmethod
    def of(cls, folder: Path, meta: Json) -> Documents:
        gpt2 = meta["tokenizer"]["name"] == GPT2Tokenizer.name
        eot = GPT2Tokenizer.ends[0] if gpt2 else meta["tokenizer"].get("eot")
        if eot is None:
            raise FileError(f"--document_mask=True: {folder} has no token that ends a document")
        return cls(eot, meta.get("eot_begins", False))

    def starts(self, rows: np.ndarray) -> np.ndarray:
        """Each token's document start in its row: (B, T) ids -> (B, T) int32."""
        first = rows == self.eot
        if not self.begins:
            first[:, 1:] = first[:, :-1].copy()
        places = np.arange(rows.shape[1], dtype=np.int32) * first
        places[:, 0] = 0
        return np.maximum.accumulate(places, axis=1)


@dataclass(eq=False)
class Batches:
    """The training sequences of every step."""

    tokens: Tokens
    block_size: int
    global_batch: int  # of all processes
    seed: int
    device: str | torch.device = "cpu"
    documents: Documents | None = None  # adds their starts
    seen: tuple[int, int] = (0, 0)  # steps, sequences until now

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

    def get(self, step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, ...]:
        """This process's sequences and targets, (n, T) int64; with documents their starts, int32.
        n: global_batch / world, rounded up for low ranks."""
        mine = np.array_split(self.starts(step), world)[rank]
        return _gather(self.tokens, self.block_size, mine, self.device, self.documents)

    def prefetch(
        self, start: int, stop: int, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield get(start) to get(stop - 1); on a GPU threads prepare two."""
        get, steps = lambda step: self.get(step, rank, world), range(start, stop)
        return map(get, steps) if str(self.device) == "cpu" else map_ahead(get, steps, 3)


@lru_cache(1)
def _epoch(seed: int, epoch: int, n_tokens: int, block_size: int, windows: int) -> np.ndarray:
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    offset = random.integers(0, n_tokens - 1 - windows * block_size, endpoint=True)
    return offset + block_size * random.permutation(windows)


def eval_batches(tokens: Tokens, block_size: int, batches: int, batch_size: int, rank: int = 0,
                 world: int = 1, device: str | torch.device = "cpu",
                 documents: Documents | None = None) -> Iterator[tuple[Tensor, ...]]:  # fmt: skip
    """Yield evenly spaced windows, always the same, as Batches.get() returns them.

    A process takes every world-th batch. Fillers (targets IGNORE) make shapes and counts equal.
    """
    from core.loss import IGNORE

    n = max(1, min(batches * batch_size, (len(tokens) - 1) // block_size))
    starts = np.linspace(0, len(tokens) - 1 - block_size, n).astype(np.int64)
    for first in range(0, n, world * batch_size):
        mine = starts[first + rank * batch_size :][:batch_size]
        fillers = np.repeat(starts[:1], batch_size - len(mine))
        filled = np.concatenate([mine, fillers])
        batch = _gather(tokens, block_size, filled, device, documents)
        batch[1][len(mine) :] = IGNORE
        yield batch


def fingerprint(tokens: Tokens, block_size: int, batches: int, batch_size: int) -> int:
    """CRC-32 of what eval_batches() reads: equal ones make losses comparable."""
    crc = 0
    for x, *_ in eval_batches(tokens, block_size, batches, batch_size):
        crc = zlib.crc32(x.numpy().tobytes(), crc)
    return crc


def _gather(
    tokens: Tokens, T: int, starts: np.ndarray, device: str | torch.device,
    documents: Documents | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    import torch

    cut = np.stack([tokens[start : start + T + 1] for start in starts.tolist()])
    vocab_size = getattr(tokens, "vocab_size", None)
    if vocab_size is not None and (largest := int(cut.max(initial=0))) >= vocab_size:
        row, column = np.argwhere(cut == largest)[0].tolist()
        at = tokens.place(int(starts[row]) + column)
        raise FileError(f"{at} is {largest}, but the vocabulary is {vocab_size}")
    arrays = [(cut[:, :-1], torch.int64), (cut[:, 1:], torch.int64)]
    if documents:
        arrays.append((documents.starts(cut[:, :-1]), torch.int32))
    cuda = torch.device(device).type == "cuda"
    batch = []
    # Threads start on device 0, where pinning would create a second context.
    with torch.cuda.device(device) if cuda else nullcontext():
        for array, dtype in arrays:
            t = torch.empty(array.shape, dtype=dtype, pin_memory=cuda)
            t.numpy()[...] = array  # torch would start threads
            batch.append(t.to(device, non_blocking=cuda))
    return tuple(batch)
