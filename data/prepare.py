"""Text -> train.bin, val.bin (uint16 token ids, little endian) and meta.json.

Files are written under temporary names and renamed at the end, meta.json last: an interrupted run
never looks complete. Errors are UserErrors.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
from pydantic import Field, PositiveInt

from core.settings import UserError, check_fields, did_you_mean
from data.documents import (
    HUB,
    Piece,
    batched,
    cut_document,
    file_documents,
    source_files,
    text_parts,
    web_documents,
)
from data.loader import map_ahead
from data.sources import PLAYS_SHA256, plays, sha256, tiny_shakespeare
from data.tokenizer import CharTokenizer, GPT2Tokenizer, Tokenizer

_SHAKESPEARE = {"source", "val_fraction"}
_DOCUMENTS = {"source", "text_key", "val_fraction", "limit"}
DATASETS = {  # name -> the settings that determine its result
    "shakespeare_char": _SHAKESPEARE,
    "shakespeare": _SHAKESPEARE,
    "text": _DOCUMENTS | {"tokenizer"},
    **dict.fromkeys(HUB, _DOCUMENTS),
}
NAMED = ("plays", "tinyshakespeare")  # sources of shakespeare; the first is the default
BINS = ("train.bin", "val.bin")
SMALL = 1_000_000  # tokens; below this a character vocabulary may work better than GPT-2's

Fraction = Annotated[float, Field(gt=0, le=0.5)]
Report = Callable[[str, str], None]  # a stage of the work, and its progress


@dataclass(frozen=True)
class PrepareConfig:
    """Options of `python -m data`."""

    # --- what to read ---
    source: str | None = None  # your text: a file or folder; shakespeare: plays, tinyshakespeare
    text_key: str = "text"  # the field with the text in .jsonl and .parquet
    limit: PositiveInt | None = None  # documents to take at most (None: all)

    # --- what to make of it ---
    tokenizer: Literal["gpt2", "char"] | None = None  # of text: char suits small ones (None: gpt2)
    val_fraction: Fraction | None = None  # part for validation (None: 0.1, web data 0.0005)
    out_dir: str | None = None  # where to write (None: data/NAME)
    workers: PositiveInt | None = None  # processes that tokenize (None: one a core)
    force: bool = False  # prepare again, and replace what is there

    def __post_init__(self) -> None:
        check_fields(self)


def prepare(dataset: str, config: PrepareConfig) -> None:
    """Write train.bin, val.bin and meta.json, unless the same dataset is there already.

    Raises:
        UserError: unknown dataset or option, unreadable source, or another dataset in out_dir.
    """
    if dataset not in DATASETS:
        hint = did_you_mean(dataset, DATASETS)
        if Path(dataset).suffix or Path(dataset).exists():
            hint = f"; for your own text: python -m data text --source={dataset}"
        raise UserError(f"unknown dataset {dataset!r} (known: {', '.join(DATASETS)}){hint}")
    out_dir = Path(config.out_dir or Path(__file__).parent / dataset)
    shakespeare = dataset.startswith("shakespeare")
    options = _options(dataset, config)
    made_from = {"dataset": dataset, "options": options, "source": _state(options.get("source"))}
    if shakespeare and "source" not in options:
        made_from["source"] = PLAYS_SHA256  # a later version may extract another text
    if not config.force and _is_prepared(out_dir, made_from):
        print(f"{out_dir} is already prepared (--force prepares it again)")
        return
    work = prepare_shakespeare if shakespeare else prepare_documents
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        tokenizer, found = work(dataset, config, out_dir, progress(f"preparing {dataset}"))
        name, V = tokenizer.name, tokenizer.vocab_size
        meta = {**made_from, "dtype": "uint16", "tokenizer": tokenizer.to_meta(), "vocab_size": V}
        _publish(out_dir, meta | found)
    except OSError as e:  # errors while reading are UserErrors by now
        raise UserError(f"cannot write {out_dir} ({e.strerror or e}); use another --out_dir") from e
    train, val = found["tokens"]["train"], found["tokens"]["val"]
    print(
        f"{out_dir}: {train:,} training and {val:,} validation tokens, {V:,} in vocabulary ({name})"
    )
    if dataset == "text" and config.tokenizer is None and train + val < SMALL:
        print(f"hint: {train + val:,} tokens are few for GPT-2's vocabulary; try --tokenizer=char")


def _publish(out_dir: Path, meta: dict[str, Any]) -> None:
    """Rename the partial files; meta.json comes last, so it never describes other files."""
    with _partial(out_dir, "meta.json") as f:
        f.write(json.dumps(meta, indent=1).encode())
    (out_dir / "meta.json").unlink(missing_ok=True)
    for name in (*BINS, "meta.json"):
        os.replace(_partial_path(out_dir, name), out_dir / name)


def _options(dataset: str, config: PrepareConfig) -> dict[str, Any]:
    """The non-default settings that change the result (workers, for example, does not)."""
    shaping = [f for f in fields(config) if f.name in set().union(*DATASETS.values())]
    options = {f.name: v for f in shaping if (v := getattr(config, f.name)) != f.default}
    if unused := options.keys() - DATASETS[dataset]:
        allowed = ", ".join(f"--{name}" for name in sorted(DATASETS[dataset]))
        raise UserError(f"{dataset} does not support --{min(unused)}; it supports {allowed}")
    if options.get("tokenizer") == "gpt2":
        del options["tokenizer"]
    if dataset.startswith("shakespeare") and options.get("source") in NAMED:
        if options["source"] == "plays":
            del options["source"]
    elif os.path.exists(options.get("source", "")):
        options["source"] = os.path.abspath(options["source"])
    return options


def _state(source: str | None) -> str | None:
    """Hash of the names, sizes and times of a source's files."""
    if source is None or not (root := Path(source)).exists():
        return None
    stats = {str(f.relative_to(root)): f.stat() for f in source_files(root)}
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
    return sha256(repr(files).encode())


def _is_prepared(out_dir: Path, made_from: dict[str, Any]) -> bool:
    try:
        meta = json.loads((out_dir / "meta.json").read_text(encoding="utf-8"))
        there = {key: meta[key] for key in made_from}
        complete = all(
            (out_dir / f"{s}.bin").stat().st_size == 2 * n for s, n in meta["tokens"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing or damaged
        return False
    if there["dataset"] != made_from["dataset"] or there["options"] != made_from["options"]:
        raise UserError(
            f"{out_dir} holds another dataset ({there['dataset']}, options {there['options']}): "
            "use another --out_dir, or --force to replace it"
        )
    return complete and there["source"] == made_from["source"]


# ----------------------------------------------------------------------------- shakespeare


def prepare_shakespeare(
    dataset: str, config: PrepareConfig, out_dir: Path, report: Report
) -> tuple[Tokenizer, dict[str, Any]]:
    """One text in memory; the first 90 % of its characters are for training, as in nanoGPT."""
    report("reading", f"the text ({config.source or 'plays'})")
    if config.source in (None, "plays"):
        text = plays()
    elif config.source == "tinyshakespeare":
        text = tiny_shakespeare()
    elif (path := Path(config.source or "")).is_file():
        text = "".join(text_parts(path))
    else:
        raise UserError(f"--source={path}: expected a file, plays or tinyshakespeare")
    cut = int(len(text) * (1 - (config.val_fraction or 0.1)))
    parts = {"train": text[:cut], "val": text[cut:]}
    if min(len(part) for part in parts.values()) < 2:
        raise UserError(f"{config.source} is too short ({len(text)} characters)")
    char = dataset == "shakespeare_char"
    tokenizer: Tokenizer = CharTokenizer(sorted(set(text))) if char else GPT2Tokenizer()
    report("tokenizing", f"{len(text):,} characters")
    ids = {split: _uint16(tokenizer.encode(part), tokenizer) for split, part in parts.items()}
    for split, tokens in ids.items():
        with _partial(out_dir, f"{split}.bin") as f:
            tokens.tofile(f)
    found: dict[str, Any] = {"tokens": {split: len(tokens) for split, tokens in ids.items()}}
    if char:
        found["baselines"] = baselines(ids["train"], ids["val"], tokenizer.vocab_size)
    return tokenizer, found


def baselines(train: np.ndarray, val: np.ndarray, V: int) -> dict[str, float]:
    """Losses on val (nats per token) of a unigram and a bigram model, add-one smoothing."""
    unigram = np.bincount(train, minlength=V) + 1.0
    pairs = np.bincount(train[:-1].astype(np.int64) * V + train[1:], minlength=V * V) + 1.0
    pairs = pairs.reshape(V, V)
    return {
        "unigram": float(-np.log(unigram / unigram.sum())[val].mean()),
        "bigram": float(-np.log(pairs / pairs.sum(1, keepdims=True))[val[:-1], val[1:]].mean()),
    }


# ----------------------------------------------------------------------------- documents, any size


def prepare_documents(
    dataset: str, config: PrepareConfig, out_dir: Path, report: Report
) -> tuple[Tokenizer, dict[str, Any]]:
    """Any number of documents of any length, tokenized by worker processes in constant memory.

    Validation takes whole documents at even distances (every tenth if val_fraction is 0.1), or the
    last tokens if there are too few documents.
    """
    web = dataset in HUB
    fraction = config.val_fraction or (0.0005 if web else 0.1)

    def pieces() -> Iterator[Piece]:
        if web and config.source is None:
            documents = web_documents(*HUB[dataset], config.text_key)
        else:
            documents = file_documents(config.source, config.text_key)
        for i, document in enumerate(islice(documents, config.limit)):
            yield from cut_document(i, document)

    workers = config.workers or os.cpu_count() or 1
    with ProcessPoolExecutor(workers) as pool:
        tokenizer: Tokenizer
        if config.tokenizer == "char":
            seen: set[str] = set()
            for chars in map_ahead(pool, _characters, batched(pieces()), 2 * workers):
                seen |= chars
                report("looking for characters", f"found {len(seen):,}")
            # The end-of-text entry is empty, so no text contains it.
            tokenizer = CharTokenizer([*sorted(seen), ""], eot=len(seen))
        else:
            tokenizer = GPT2Tokenizer()
        encode = partial(_encode, tokenizer)
        documents = tokens = 0
        with _partial(out_dir, "train.bin") as train, _partial(out_dir, "val.bin") as val:
            for batch in map_ahead(pool, encode, batched(pieces()), 2 * workers):
                for i, ends, ids in batch:
                    (val if int((i + 1) * fraction) > int(i * fraction) else train).write(ids)
                    documents += ends
                    tokens += len(ids) // 2
                report("tokenizing", f"{documents:,} documents, {tokens:,} tokens")
    where = config.source or dataset
    if tokens == documents:  # nothing but the ends of documents
        raise UserError(f"{where} contains no text; use another --source")
    if int(documents * fraction) == 0:
        _move_tail(out_dir, fraction)
    sizes = {s: _partial_path(out_dir, f"{s}.bin").stat().st_size // 2 for s in ("train", "val")}
    if min(sizes.values()) < 2:  # one input and its target
        raise UserError(f"{where} is too short ({tokens} tokens)")
    return tokenizer, {"documents": documents, "tokens": sizes}


def _encode(tokenizer: Tokenizer, batch: list[Piece]) -> list[tuple[int, bool, bytes]]:
    encoded = []
    for i, ends, text in batch:
        ids = tokenizer.encode(text)
        if ends:
            assert tokenizer.eot is not None
            ids.append(tokenizer.eot)
        encoded.append((i, ends, _uint16(ids, tokenizer).tobytes()))
    return encoded


def _characters(batch: list[Piece]) -> set[str]:
    return set().union(*(text for _, _, text in batch))


def _uint16(ids: list[int], tokenizer: Tokenizer) -> np.ndarray:
    if tokenizer.vocab_size > 2**16:
        raise UserError(f"too many different characters: {tokenizer.vocab_size}, at most 65536")
    return np.array(ids, dtype="<u2")


def _move_tail(out_dir: Path, fraction: float) -> None:
    """Move the last part of train's tokens to val."""
    path = _partial_path(out_dir, "train.bin")
    tokens = np.memmap(path, dtype="<u2", mode="r")
    keep = len(tokens) - math.ceil(len(tokens) * fraction)
    with _partial(out_dir, "val.bin") as val:
        tokens[keep:].tofile(val)
    del tokens  # Windows cannot cut a file that is mapped
    os.truncate(path, 2 * keep)


# ----------------------------------------------------------------------------- files


def _partial_path(out_dir: Path, name: str) -> Path:
    return out_dir / f".{name}.partial"


@contextmanager
def _partial(out_dir: Path, name: str) -> Iterator[BinaryIO]:
    """Open a new file under its temporary name; it is synced to disk at the end."""
    with _partial_path(out_dir, name).open("wb") as f:
        yield f
        f.flush()
        os.fsync(f.fileno())


def progress(title: str) -> Report:
    """Return a function that prints a line on stderr for each stage and every ten seconds."""
    shown, at = "", 0.0

    def report(stage: str, done: str) -> None:
        nonlocal shown, at
        if stage != shown or time.monotonic() > at + 10:
            shown, at = stage, time.monotonic()
            print(f"{title}: {stage} {done}", file=sys.stderr, flush=True)

    return report
