"""Write train.bin and val.bin (token ids, little endian), and meta.json; of shards meta.json alone.

They are moved from a temporary folder at the end, meta.json last.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, fields
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt

from core.files import locked, printable, refuse_link, write_at_once
from core.process import map_ahead
from core.settings import UserError, check_fields
from data import sources
from data.loader import load, shard_paths, shards_meta
from data.schema import FileError, Json, read_json, reading, record
from data.sources import DATASETS, HUB
from data.tokenizer import CharTokenizer, FileTokenizer, GPT2Tokenizer, Tokenizer

Fraction = Annotated[float, Field(gt=0, le=0.5)]


@dataclass(frozen=True)
class PrepareConfig:
    """Prepare a dataset: python -m data NAME, with NAME one of shakespeare_char, shakespeare,
    chars, text, openwebtext, fineweb and shards."""

    dataset: str | None = None  # its name
    source: str | None = None  # your text: a file or folder; or tinyshakespeare; shards: a pattern
    text_key: str = "text"  # the field with the text in .jsonl and on the hub
    limit: PositiveInt | None = None  # documents to take at most (None: all)
    tokenizer: str | None = None  # a model's folder or tokenizer.json (None: GPT-2's)
    val_fraction: Fraction | None = None  # part for validation (None: 0.1, web data 0.0005)
    out_dir: str | None = None  # where to write (None: data/NAME)
    workers: PositiveInt | None = None  # threads that tokenize (None: one a core)
    force: bool = False  # prepare again, and replace what is there

    def __post_init__(self) -> None:
        check_fields(self)


def prepare(config: PrepareConfig) -> None:
    """Nothing is written if the dataset is there. Raises UserError."""
    dataset = config.dataset or ""
    if dataset not in DATASETS:
        known = f"{', '.join(DATASETS)}; your text: python -m data text --source=PATH"
        got = f"dataset {dataset!r}: expected one of" if dataset else "name a dataset:"
        raise FileError(f"{got} {known}")
    out_dir = Path(config.out_dir or Path(__file__).parent / dataset)
    named = printable(out_dir)
    made_from, tokenizer = _made_from(config, dataset)
    if _is_prepared(out_dir, made_from, config.force):
        print(f"{named} is already prepared (--force prepares it again)")
        return
    with locked(out_dir):
        new = out_dir / ".partial"
        try:
            refuse_link(new)
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            if dataset == "shards":
                found = shards_meta(config.source)
            elif dataset == "chars" or dataset.startswith("shakespeare"):
                tokenizer, found = _write_text(config, tokenizer, new)
            else:
                found = _write_documents(config, tokenizer, new)
            train, val = found["tokens"].values()
            counts = f"{train:,} training and {val:,} validation tokens"
            if min(train, val) < 2:
                raise FileError(f"{config.source or dataset} is too short ({counts})")
            V = tokenizer.vocab_size
            meta = made_from | {"tokenizer": tokenizer.to_meta(), "vocab_size": V}
            # Until the end it describes no tokens.
            write_at_once(out_dir / "meta.json", json.dumps(meta))
            write_at_once(new / "meta.json", json.dumps(meta | found, indent=1))
            for file in sorted(new.iterdir(), key=lambda file: file.name == "meta.json"):
                with file.open("rb") as f:
                    os.fsync(f.fileno())
                os.replace(file, out_dir / file.name)
        except OSError as e:
            raise FileError(f"cannot write {named} ({e.strerror or e}); name another one") from e
        finally:
            shutil.rmtree(new, ignore_errors=True)
    n = found.get("files") or sum(map(len, found.get("shards", {}).values()))
    read = f"{n:,} file{'s' * (n > 1)}, " if n else ""
    print(f"{named}: {read}{counts}, {V:,} in vocabulary ({tokenizer.name})")


def _made_from(config: PrepareConfig, dataset: str) -> tuple[Json, Tokenizer]:
    """What determines the result, and the tokenizer if not of characters."""
    shaping = [f for f in fields(config) if f.name in set().union(*DATASETS.values())]
    options = {f.name: v for f in shaping if (v := getattr(config, f.name)) != f.default}
    if unused := options.keys() - DATASETS[dataset]:
        allowed = ", ".join(f"--{name}" for name in sorted(DATASETS[dataset]))
        raise FileError(f"{dataset} does not support --{min(unused)}; it supports {allowed}")
    state, source = None, options.get("source")
    if dataset.startswith("shakespeare") and source in (None, "tinyshakespeare"):
        state = None if source else sources.SHA256["plays"]  # the text depends on the version
    elif source:
        files = shard_paths(source) if dataset == "shards" else sources.source_files(source)
        options["source"] = os.path.abspath(source)
        with reading(source):  # a dangling link
            stats = [(os.path.relpath(f, source), os.stat(f)) for f in files]
        sizes = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        state = sources.sha256(repr(sizes).encode())
    tokenizer: Tokenizer = GPT2Tokenizer()
    if (named := config.tokenizer) is not None:
        if (found := FileTokenizer.read(Path(named))) is None:
            raise FileError(f"--tokenizer={named}: expected tokenizer.json or its folder")
        tokenizer = found
        options["tokenizer"] = os.path.abspath(named)
        content = json.dumps(tokenizer.to_meta(), sort_keys=True)
        state = sources.sha256(f"{state} {content}".encode())
    return {"dataset": dataset, "options": options, "source": state}, tokenizer


def _is_prepared(out_dir: Path, made_from: Json, force: bool) -> bool:
    """True if out_dir holds this dataset. Raises UserError: something else."""
    try:
        meta = read_json(out_dir / "meta.json", record(tokenizer=Any, vocab_size=Any))
    except FileError:
        names = [n for n in ("train.bin", "val.bin", "meta.json") if os.path.exists(out_dir / n)]
        if not names:
            return False
        what = f"{' and '.join(names)} of another program"
        raise FileError(f"{out_dir} has {what}; use another --out_dir") from None
    if force:
        return False
    if any(meta.get(key) != made_from[key] for key in ("dataset", "options")):
        other = f"{meta.get('dataset')}, options {meta.get('options')}"
        raise FileError(f"{out_dir} has another dataset ({other:.99}): name another, or --force")
    try:
        for split in ("train", "val"):
            load(out_dir, split, 1, meta["vocab_size"])
    except UserError:
        return False
    return bool(meta.get("source") == made_from["source"])


def _dtype_for(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def _write_text(config: PrepareConfig, tokenizer: Tokenizer, folder: Path
                ) -> tuple[Tokenizer, Json]:  # fmt: skip
    """The first 90 % of the characters are for training, as in nanoGPT."""
    files: list[Path] = []
    text = "\n".join(map("".join, sources.documents(config, files)))
    cut = int(len(text) * (1 - (config.val_fraction or 0.1)))
    if char := config.dataset != "shakespeare":
        tokenizer = CharTokenizer(sorted(set(text)))
    tokenizer.begin = ()  # hardly ever seen in training
    dtype = _dtype_for(tokenizer.vocab_size)
    found: Json = {"dtype": dtype.name, "files": len(files), "bytes": {}, "tokens": {}}
    ids = {}
    for split, part in ("train", text[:cut]), ("val", text[cut:]):
        ids[split] = np.array(tokenizer.encode(part), dtype)
        ids[split].tofile(folder / f"{split}.bin")
        found["bytes"][split] = len(part.encode())
        found["tokens"][split] = len(ids[split])
    if char and min(found["tokens"].values()) > 1:
        found["baselines"] = baselines(**ids, V=tokenizer.vocab_size)
    return tokenizer, found


def baselines(train: np.ndarray, val: np.ndarray, V: int) -> dict[str, float]:
    """Val losses (nats per token) of unigrams and bigrams, add-one smoothing."""
    unigram = np.bincount(train, minlength=V) + 1.0
    pairs, wanted = (t[:-1].astype(np.int64) * V + t[1:] for t in (train, val))
    seen, counts = np.unique(pairs, return_counts=True)  # V * V may not fit
    place = np.searchsorted(seen, wanted).clip(max=len(seen) - 1)
    bigram = np.where(seen[place] == wanted, counts[place], 0) + 1.0
    first = np.bincount(train[:-1], minlength=V) + float(V)
    return {
        "unigram": float(-np.log(unigram / unigram.sum())[val].mean()),
        "bigram": float(-np.log(bigram / first[val[:-1]]).mean()),
    }


def _write_documents(config: PrepareConfig, tokenizer: Tokenizer, folder: Path) -> Json:
    """Tokenize in threads, in constant memory. Validation takes documents at even distances, and
    the last tokens of the others if too few."""
    fraction = config.val_fraction or (0.0005 if config.dataset in HUB else 0.1)
    if (eot := tokenizer.eot) is None:
        how = 'name it in its tokenizer_config.json: {"eos_token": "..."}'
        raise FileError(f"--tokenizer={config.tokenizer}: no token ends a document; {how}")
    tokenizer.encode("")  # perhaps a download
    files: list[Path] = []
    texts = islice(sources.documents(config, files), config.limit)
    first = [*islice(texts, 2)]
    if len(first) < 2:
        tokenizer.begin = ()
    dtype = _dtype_for(tokenizer.vocab_size)

    def encode(batch: list[tuple[int, str, int, int]]) -> list[tuple[int, np.ndarray, int]]:
        done = []
        for i, text, start, stop in batch:
            ids = [*tokenizer.begin] if start == 0 else []
            ids += tokenizer.encode_part(text, start, stop)
            ids += [eot] if stop == len(text) else []
            done.append((i, np.array(ids, dtype), len(text[start:stop].encode())))
        return done

    batches = sources.pieces(chain(first, texts))
    count, shown = 0, time.monotonic()
    tokens, size = Counter(train=0, val=0), Counter[str]()  # size: bytes of the text
    with (folder / "train.bin").open("wb") as train, (folder / "val.bin").open("wb") as val:
        for batch in map_ahead(encode, batches, config.workers or os.cpu_count() or 1):
            for i, ids, n in batch:
                split = "val" if int((i + 1) * fraction) > int(i * fraction) else "train"
                (val if split == "val" else train).write(ids.data)
                count, size[split] = i + 1, size[split] + n
                tokens[split] += len(ids)
            if time.monotonic() > shown + 10:
                shown = time.monotonic()
                done = f"{count:,} documents, {tokens.total():,} tokens"
                print(f"preparing {config.dataset}: {done}", file=sys.stderr, flush=True)
    if tokens.total() == count * (len(tokenizer.begin) + 1):
        raise FileError(f"{config.source or config.dataset} contains no text")
    missing = math.ceil(tokens.total() * fraction) - tokens["val"]
    if missing > tokens["val"]:
        moved = _move_tail(folder, missing, dtype, tokenizer, size["train"])
        size.update(train=-moved, val=moved)
        tokens.update(train=-missing, val=missing)
    return {"dtype": dtype.name, "files": len(files), "documents": count, "bytes": size,
            "tokens": tokens}  # fmt: skip


def _move_tail(folder: Path, n: int, dtype: np.dtype, tokenizer: Tokenizer, size: int) -> int:
    """Move the last n tokens from train.bin (`size` bytes of text) to val.bin; return their bytes.
    Tokens may have other bytes than their text, as WordPiece's spaces or [UNK]: in proportion."""
    tokens = np.memmap(folder / "train.bin", dtype=dtype, mode="r")
    length = np.array([len(text) for text in tokenizer.token_bytes()])
    parts = (np.array_split(some, len(some) // 2**24 + 1) for some in (tokens, tokens[-n:]))
    total, moved = (sum(int(length[part].sum()) for part in some) for some in parts)
    with (folder / "val.bin").open("ab") as f:
        tokens[-n:].tofile(f)
    os.truncate(folder / "train.bin", dtype.itemsize * (len(tokens) - n))
    return size * moved // max(1, total)
