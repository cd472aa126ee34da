"""Text -> train.bin, val.bin (token ids, uint16 or uint32, little endian) and meta.json. Of shards
(shards.py), which are read where they lie, only meta.json.

Files are written in a temporary folder and moved at the end, meta.json last: an interrupted run
never looks complete. Errors are UserErrors.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from core.files import refuse_link, write_at_once
from core.settings import UserError, check_fields
from data import documents, shards, sources
from data.documents import DATASETS, HUB, Piece
from data.loader import map_ahead
from data.tokenizer import CharTokenizer, GPT2Tokenizer, Json, Tokenizer, from_meta, from_path

BINS = ("train.bin", "val.bin")

Fraction = Annotated[float, Field(gt=0, le=0.5)]


@dataclass(frozen=True)
class PrepareConfig:
    """Options of `python -m data`."""

    # --- what to read ---
    source: str | None = None  # your text: a file or folder; or tinyshakespeare; shards: a pattern
    text_key: str = "text"  # the field with the text in .jsonl and on the hub
    limit: PositiveInt | None = None  # documents to take at most (None: all)

    # --- what to make of it ---
    tokenizer: str | None = None  # a model's folder or tokenizer.json (None: GPT-2's)
    val_fraction: Fraction | None = None  # part for validation (None: 0.1, web data 0.0005)
    out_dir: str | None = None  # where to write (None: data/NAME)
    workers: PositiveInt | None = None  # processes that tokenize (None: one a core)
    force: bool = False  # prepare again, and replace what is there

    def __post_init__(self) -> None:
        check_fields(self)


def prepare(dataset: str, config: PrepareConfig) -> None:
    """Write train.bin, val.bin and meta.json, unless the same dataset is there already.

    Raises UserError: unknown dataset or option, unreadable source, or another dataset in out_dir.
    """
    if dataset not in DATASETS:
        known = ", ".join(DATASETS)
        own = "your own text: python -m data text --source=PATH"
        raise UserError(f"unknown dataset {dataset!r}; known: {known} ({own})")
    out_dir = Path(config.out_dir or Path(__file__).parent / dataset)
    made_from = _made_from(dataset, config)
    listed = shards.meta(config.source) if dataset == "shards" else {}
    lock, new = _lock(out_dir), out_dir / ".partial"
    try:
        if _is_prepared(out_dir, made_from, config.force):
            print(f"{out_dir} is already prepared (--force prepares it again)")
            return
        if dataset == "shards":
            print(f"{out_dir}: {prepare_shards(config, out_dir, made_from, listed)}")
            return
        one_text = dataset == "chars" or dataset.startswith("shakespeare")
        work = prepare_text if one_text else prepare_documents
        refuse_link(new)
        new.mkdir(exist_ok=True)
        for file in BINS:  # of an interrupted run, or links
            (new / file).unlink(missing_ok=True)
        tokenizer, found = work(dataset, config, new)
        name, V = tokenizer.name, tokenizer.vocab_size
        dtype = dtype_for(V)
        size = {s: (new / f"{s}.bin").stat().st_size for s in ("train", "val")}
        found["tokens"] = {s: n // dtype.itemsize for s, n in size.items()}
        meta = {**made_from, "dtype": dtype.name, "tokenizer": tokenizer.to_meta(), "vocab_size": V}
        write_at_once(new / "meta.json", json.dumps(meta | found, indent=1))
        (out_dir / "meta.json").unlink(missing_ok=True)
        for file in (*BINS, "meta.json"):  # so meta.json never describes other files
            with (new / file).open("rb") as f:
                os.fsync(f.fileno())
            os.replace(new / file, out_dir / file)
        new.rmdir()
    except OSError as e:  # errors while reading are UserErrors by now
        raise UserError(f"cannot write {out_dir} ({e.strerror or e}); use another --out_dir") from e
    except BrokenProcessPool as e:
        n = config.workers or os.cpu_count()
        why = "a process that tokenizes was killed, perhaps because memory ran out"
        raise UserError(f"--workers={n}: {why}; use fewer") from e
    finally:
        os.close(lock)
    read = f"{n:,} file{'s' * (n > 1)}, " if (n := found["files"]) else ""
    train, val = found["tokens"].values()
    counts = f"{read}{train:,} training and {val:,} validation tokens"
    print(f"{out_dir}: {counts}, {V:,} in vocabulary ({name})")


def _lock(folder: Path) -> int:
    """Create the folder, and lock it until the returned descriptor is closed or the process ends.

    Raises UserError: another preparation has locked it, or it cannot be written.
    """
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)  # the folder itself: no file remains
    except OSError as e:
        raise UserError(f"cannot write {folder} ({e.strerror}); use another --out_dir") from e
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(f"--out_dir={folder} is in use by another python -m data") from None
    except OSError as e:  # some network disks
        why = f"cannot be locked ({e.strerror}): start no other python -m data there"
        print(f"{folder} {why}", file=sys.stderr)
    return lock


def _made_from(dataset: str, config: PrepareConfig) -> Json:
    """The settings that change the result, not at their defaults, and the state of the source."""
    shaping = [f for f in fields(config) if f.name in set().union(*DATASETS.values())]
    options = {f.name: v for f in shaping if (v := getattr(config, f.name)) != f.default}
    if unused := options.keys() - DATASETS[dataset]:
        allowed = ", ".join(f"--{name}" for name in sorted(DATASETS[dataset]))
        raise UserError(f"{dataset} does not support --{min(unused)}; it supports {allowed}")
    state, source = None, options.get("source")
    if dataset.startswith("shakespeare") and source in (None, "tinyshakespeare"):
        state = None if source else sources.PLAYS_SHA256  # later versions may extract another text
    elif source:
        files = shards.paths(source) if dataset == "shards" else documents.source_files(source)
        options["source"] = os.path.abspath(source)
        try:
            stats = {os.path.relpath(f, source): os.stat(f) for f in files}
        except OSError as e:  # as a link to nothing
            raise UserError(f"cannot read {e.filename} ({e.strerror})") from e
        sizes = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
        state = sources.sha256(repr(sizes).encode())
    if config.tokenizer is not None:
        options["tokenizer"] = os.path.abspath(config.tokenizer)
        content = json.dumps(tokenizer_of(config).to_meta(), sort_keys=True)
        state = sources.sha256(f"{state} {content}".encode())
    return {"dataset": dataset, "options": options, "source": state}


def _is_prepared(out_dir: Path, made_from: Json, force: bool) -> bool:
    """True if out_dir holds this dataset, complete. Raises UserError: it has another one, which
    only `force` replaces, or files of another program."""
    meta, unfinished = (_saved_meta(folder) for folder in (out_dir, out_dir / ".partial"))
    there = [name for name in (*BINS, "meta.json") if os.path.exists(out_dir / name)]
    if there and not (meta or unfinished):
        names = " and ".join(there)
        raise UserError(f"{out_dir} has {names} of another program; use another --out_dir")
    if force or not meta:
        return False
    if any(meta.get(key) != made_from[key] for key in ("dataset", "options")):
        raise UserError(
            f"{out_dir} holds another dataset ({meta.get('dataset')}, options "
            f"{meta.get('options')}): use another --out_dir, or --force to replace it"
        )
    try:
        width = np.dtype(meta["dtype"]).itemsize
        sizes = {} if "shards" in meta else meta["tokens"]
        whole = all(os.path.getsize(out_dir / f"{s}.bin") == width * n for s, n in sizes.items())
    except (OSError, LookupError, TypeError, AttributeError):  # missing or damaged
        return False
    return whole and meta.get("source") == made_from["source"]


def _saved_meta(folder: Path) -> Json:
    """The meta.json of a preparation, {} if there is none."""
    with suppress(OSError, ValueError):
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if isinstance(meta, dict) and {"tokenizer", "vocab_size"} <= meta.keys():
            return meta
    return {}


def prepare_shards(config: PrepareConfig, out_dir: Path, made_from: Json, found: Json) -> str:
    """Write meta.json with the list of the files; return a line about it."""
    tokenizer: Json = {"name": GPT2Tokenizer.name}
    V = GPT2Tokenizer.vocab_size
    if config.tokenizer is not None:
        named = tokenizer_of(config)
        tokenizer, V = named.to_meta(), named.vocab_size
    meta = {**made_from, "tokenizer": tokenizer, "vocab_size": V, **found}
    write_at_once(out_dir / "meta.json", json.dumps(meta, indent=1))
    of = [f"{n:,} {s} tokens ({len(found['shards'][s])} files)" for s, n in found["tokens"].items()]
    return f"{' and '.join(of)}, read where they lie; {V:,} in vocabulary"


def prepare_text(dataset: str, config: PrepareConfig, folder: Path) -> tuple[Tokenizer, Json]:
    """One text in memory; the first 90 % of its characters are for training, as in nanoGPT."""
    files: list[Path] = []
    read = documents.documents(dataset, config.source, config.text_key, files)
    text = "\n".join(map("".join, read))
    cut = int(len(text) * (1 - (config.val_fraction or 0.1)))
    parts = text[:cut], text[cut:]
    char = dataset != "shakespeare"
    tokenizer = CharTokenizer(sorted(set(text))) if char else tokenizer_of(config)
    tokenizer.begin = ()  # before one text it would hardly ever be seen
    dtype = dtype_for(tokenizer.vocab_size)
    train, val = (np.array(tokenizer.encode(part), dtype=dtype) for part in parts)
    if min(len(train), len(val)) < 2:
        raise UserError(f"{config.source} is too short ({len(text)} characters)")
    train.tofile(folder / "train.bin")
    val.tofile(folder / "val.bin")
    size = dict(zip(("train", "val"), (len(part.encode()) for part in parts), strict=True))
    found: Json = {"files": len(files), "bytes": size}
    if char:
        found["baselines"] = baselines(train, val, tokenizer.vocab_size)
    return tokenizer, found


def tokenizer_of(config: PrepareConfig) -> Tokenizer:
    path = config.tokenizer
    if path is not None and not Path(path).exists():
        raise UserError(
            f"--tokenizer={path}: no such folder or file (names on the hub are not supported)"
        )
    tokenizer = GPT2Tokenizer() if path is None else from_path(Path(path))
    if tokenizer is None:
        raise UserError(f"--tokenizer={path}: tokenizer.json not found")
    return tokenizer


def dtype_for(vocab_size: int) -> np.dtype:
    """NumPy dtype of the token ids in a file, little endian."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def token_sizes(tokens: np.ndarray, tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the tokens; the text's own if its tokens keep all of it."""
    length, step = np.array([len(text) for text in tokenizer.token_bytes()]), 2**24
    return sum(int(length[tokens[a : a + step]].sum()) for a in range(0, len(tokens), step))


def baselines(train: np.ndarray, val: np.ndarray, V: int) -> dict[str, float]:
    """Losses on val (nats per token) of a unigram and a bigram model, add-one smoothing."""
    unigram = np.bincount(train, minlength=V) + 1.0
    pairs, wanted = (t[:-1].astype(np.int64) * V + t[1:] for t in (train, val))
    seen, counts = np.unique(pairs, return_counts=True)  # a table of V * V may not fit
    place = np.searchsorted(seen, wanted).clip(max=len(seen) - 1)
    bigram = np.where(seen[place] == wanted, counts[place], 0) + 1.0
    first = np.bincount(train[:-1], minlength=V) + float(V)
    return {
        "unigram": float(-np.log(unigram / unigram.sum())[val].mean()),
        "bigram": float(-np.log(bigram / first[val[:-1]]).mean()),
    }


def prepare_documents(dataset: str, config: PrepareConfig, folder: Path) -> tuple[Tokenizer, Json]:
    """Tokenize documents in worker processes, in constant memory.

    Validation takes whole documents at even distances (every tenth if val_fraction is 0.1), and the
    last tokens of the others if these are too few or too short.
    """
    fraction = config.val_fraction or (0.0005 if dataset in HUB else 0.1)
    tokenizer, workers = tokenizer_of(config), config.workers or os.cpu_count() or 1
    if tokenizer.eot is None:
        raise UserError(
            f"--tokenizer={config.tokenizer} has no token that ends a document; name it in its "
            'tokenizer_config.json: {"eos_token": "..."}'
        )
    files: list[Path] = []
    read = documents.documents(dataset, config.source, config.text_key, files)
    found = islice(read, config.limit)
    first = [*islice(found, 2)]
    if len(first) < 2:  # before one text it would hardly ever be seen
        tokenizer.begin = ()
    dtype, batches = dtype_for(tokenizer.vocab_size), documents.pieces(chain(first, found))
    with ProcessPoolExecutor(workers, initializer=_begin, initargs=(tokenizer.to_meta(),)) as pool:
        count, shown = 0, time.monotonic()
        tokens, size = Counter[str](), Counter[str]()  # size: bytes of the text
        with (folder / "train.bin").open("wb") as train, (folder / "val.bin").open("wb") as val:
            for batch in map_ahead(pool, _encode, batches, 2 * workers):
                for i, ids, n in batch:
                    split = "val" if int((i + 1) * fraction) > int(i * fraction) else "train"
                    (val if split == "val" else train).write(ids)
                    count, size[split] = i + 1, size[split] + n
                    tokens[split] += len(ids) // dtype.itemsize
                if time.monotonic() > shown + 10:
                    shown = time.monotonic()
                    done = f"{count:,} documents, {tokens.total():,} tokens"
                    print(f"preparing {dataset}: {done}", file=sys.stderr, flush=True)
    where = config.source or dataset
    if tokens.total() == count * (len(tokenizer.begin) + 1):
        raise UserError(f"{where} contains no text; use another --source")
    missing = math.ceil(tokens.total() * fraction) - tokens["val"]
    if missing > tokens["val"]:
        moved = _move_tail(folder, missing, dtype, tokenizer, size["train"])
        size.update(train=-moved, val=moved)
    # one input and its target
    if min((folder / name).stat().st_size for name in BINS) < 2 * dtype.itemsize:
        raise UserError(f"{where} is too short ({tokens.total()} tokens)")
    return tokenizer, {"files": len(files), "documents": count, "bytes": size}


_worker: list[Tokenizer] = []  # of this process: too large to be sent with each batch


def _begin(meta: Json) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach all: the main process ends them
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker[:] = [from_meta(meta)]


def _end_with_parent() -> None:
    """Also after kill -9 of the main process, whose tasks this process would wait for."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _encode(batch: list[Piece]) -> list[tuple[int, bytes, int]]:
    """Tokenize pieces: the number of each one's document, its ids, and the bytes of its text."""
    (tokenizer,) = _worker
    dtype, done = dtype_for(tokenizer.vocab_size), []
    for i, text, *part in batch:
        ends = tokenizer.begin if text == "" else [tokenizer.eot]
        ids = tokenizer.encode_part(text, *part) if text else ends
        size = len((text or "")[slice(*part)].encode())
        done.append((i, np.array(ids, dtype=dtype).tobytes(), size))
    return done


def _move_tail(folder: Path, n: int, dtype: np.dtype, tokenizer: Tokenizer, size: int) -> int:
    """Move the last n tokens from train.bin, with a text of `size` bytes, to val.bin.

    Returns the bytes of their text. Bytes in no token, as WordPiece's spaces, are spread evenly.
    """
    tokens = np.memmap(folder / "train.bin", dtype=dtype, mode="r")
    keep = len(tokens) - n
    moved = token_sizes(tokens[keep:], tokenizer)
    moved += (size - token_sizes(tokens, tokenizer)) * n // len(tokens)
    with (folder / "val.bin").open("ab") as f:
        tokens[keep:].tofile(f)
    os.truncate(folder / "train.bin", dtype.itemsize * keep)
    return moved
