"""Texts -> train.bin, val.bin (uint16 token ids, little endian) and meta.json.

Files are written under temporary names and renamed at the end, meta.json last, so an incomplete
dataset is never mistaken for a complete one. If the same dataset is there already, nothing is done;
another one is not replaced. Errors are UserErrors.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor
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
from data.sources import PLAYS_SHA256, holds, plays, sha256, tiny_shakespeare
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
SMALL = 1_000_000  # tokens of a text for which characters may work better than GPT-2's vocabulary

Fraction = Annotated[float, Field(gt=0, le=0.5)]
Report = Callable[[str, str], None]  # a stage of the work, and its progress


@dataclass(frozen=True)
class PrepareConfig:
    """How a dataset is made; the datasets are those of DATASETS."""

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
    """Write train.bin, val.bin and meta.json unless they are there and intact."""
    if dataset not in DATASETS:
        hint = did_you_mean(dataset, dict(zip(DATASETS, DATASETS)))
        if Path(dataset).suffix or Path(dataset).exists():
            hint = f"; for a text of your own: python -m data text --source={dataset}"
        raise UserError(f"unknown dataset {dataset!r} (known: {', '.join(DATASETS)}){hint}")
    out_dir = Path(config.out_dir or Path(__file__).parent / dataset)
    shakespeare = dataset.startswith("shakespeare")
    options = _options(dataset, config)
    made_from = {"dataset": dataset, "options": options, "source": _state(options.get("source"))}
    if shakespeare and "source" not in options:
        made_from["source"] = PLAYS_SHA256  # a later version may extract another text
    if not config.force and up_to_date(out_dir, made_from):
        print(f"{out_dir} is prepared already: nothing to do (--force does it again)")
        return
    work = prepare_shakespeare if shakespeare else prepare_documents
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        tokenizer, found = work(dataset, config, out_dir, progress(f"preparing {dataset}"))
        name, V = tokenizer.name, tokenizer.vocab_size
        meta = {**made_from, "dtype": "uint16", "tokenizer": tokenizer.to_meta(), "vocab_size": V}
        _publish(out_dir, meta | found)
    except OSError as e:  # an error of writing: those of reading are UserErrors by now
        reason = e.strerror or e
        raise UserError(f"{out_dir} cannot be written ({reason}); give another --out_dir") from e
    train, val = found["tokens"]["train"], found["tokens"]["val"]
    parts = f"{train:,} tokens to train on, {val:,} to validate"
    print(f"{out_dir}: {parts}, vocabulary {V:,} ({name})")
    if dataset == "text" and config.tokenizer is None and train + val < SMALL:
        print(
            f"hint: {train + val:,} tokens are few for a vocabulary of 50,257; characters suit a "
            f"small text: {command(out_dir, meta)} --tokenizer=char --force"
        )
    print(f"next: {train_command(dataset, out_dir)}")


def train_command(dataset: str, folder: Path) -> str:
    """The command that trains on the dataset just prepared."""
    web = dataset in HUB
    config, usual = ("gpt2", "openwebtext") if web else ("shakespeare_cpu", "shakespeare_char")
    options: dict[str, Any] = {}
    if folder.parent.resolve() != Path(__file__).resolve().parent:
        options["data_dir"] = folder.parent
    if folder.name != usual:
        options |= {"dataset": folder.name, "out_dir": f"out/{folder.name}"}
    return " ".join([f"python train.py config/train_{config}.py", *_words(options)])


def _publish(out_dir: Path, meta: dict[str, Any]) -> None:
    """Give the partial files their final names; no meta.json is ever beside another run's files."""
    meta["sha256"] = {name: sha256(_partial_path(out_dir, name)) for name in BINS}
    with _partial(out_dir, "meta.json") as f:
        f.write(json.dumps(meta, indent=1).encode())
    (out_dir / "meta.json").unlink(missing_ok=True)  # from here on the old dataset is gone
    for name in (*BINS, "meta.json"):
        os.replace(_partial_path(out_dir, name), out_dir / name)


def _options(dataset: str, config: PrepareConfig) -> dict[str, Any]:
    """The settings that affect the result (not workers, say) and are not the default."""
    shaping = [f for f in fields(config) if f.name in set().union(*DATASETS.values())]
    options = {f.name: v for f in shaping if (v := getattr(config, f.name)) != f.default}
    if unused := options.keys() - DATASETS[dataset]:
        allowed = ", ".join(f"--{name}" for name in sorted(DATASETS[dataset]))
        raise UserError(f"{dataset} takes no --{min(unused)}; what it reads is set by {allowed}")
    if options.get("tokenizer") == "gpt2":
        del options["tokenizer"]
    if dataset.startswith("shakespeare") and options.get("source") in NAMED:
        if options["source"] == "plays":
            del options["source"]
    elif os.path.exists(options.get("source", "")):
        options["source"] = os.path.abspath(options["source"])
    return options


def _state(source: str | None) -> str | None:
    """A hash of the names, sizes and times of a source's files: it changes when the text does."""
    if source is None or not (root := Path(source)).exists():
        return None
    stats = {str(f.relative_to(root)): f.stat() for f in source_files(root)}
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
    return sha256(repr(files).encode())


def up_to_date(out_dir: Path, made_from: dict[str, Any]) -> bool:
    """Whether out_dir holds this dataset, intact by its sha256; another one there is an error."""
    try:
        meta = json.loads((out_dir / "meta.json").read_text(encoding="utf-8"))
        if all(meta[key] == made_from[key] for key in ("dataset", "options")):
            whole = all(holds(out_dir / name, meta["sha256"][name]) for name in BINS)
            return whole and meta["source"] == made_from["source"]
        there = f"another dataset, made by: {command(out_dir, meta)}"
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged
        ours = any(p.exists() for p in (out_dir / "meta.json", _partial_path(out_dir, "meta.json")))
        if ours or not (out_dir / "train.bin").exists():
            return False
        there = "a train.bin of another origin"
    raise UserError(f"{out_dir} holds {there}; give another --out_dir, or replace it with --force")


def command(folder: Path, meta: Mapping[str, Any] | None = None) -> str:
    """The command that prepares a folder's dataset, with the settings in its meta.json."""
    meta = meta or {}
    dataset, options = meta.get("dataset", folder.name), dict(meta.get("options", {}))
    if dataset not in DATASETS:
        dataset = "text"
    if dataset == "text":
        options.setdefault("source", "PATH")
    if folder.resolve() != Path(__file__).resolve().parent / dataset:
        options["out_dir"] = folder
    return " ".join(["python -m data", dataset, *_words(options)])


def _words(options: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={shlex.quote(str(value))}" for name, value in options.items()]


# ----------------------------------------------------------------------------- shakespeare


def prepare_shakespeare(
    dataset: str, config: PrepareConfig, out_dir: Path, report: Report
) -> tuple[Tokenizer, dict[str, Any]]:
    """One text in memory: the first 90 % of its characters for training, as in nanoGPT."""
    report("reading", f"the text ({config.source or 'plays'})")
    if config.source in (None, "plays"):
        text = plays()
    elif config.source == "tinyshakespeare":
        text = tiny_shakespeare()
    elif (path := Path(config.source or "")).is_file():
        text = "".join(text_parts(path))
    else:
        raise UserError(f"--source={path} is no file; give one, or name plays or tinyshakespeare")
    cut = int(len(text) * (1 - (config.val_fraction or 0.1)))
    parts = {"train": text[:cut], "val": text[cut:]}
    if min(len(part) for part in parts.values()) < 2:
        raise UserError(f"{config.source} has only {len(text)} characters; give a longer text")
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
    """The losses on val, in nats a token, of a unigram and a bigram model of train with add-one
    (Laplace) smoothing."""
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
    """Documents of any number and length, tokenized by worker processes in constant memory.

    Validation takes whole documents at even distances (every tenth if val_fraction is 0.1), or the
    last tokens of the text if there are too few documents.
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
            # eot is an entry that is no character, so no text contains it.
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
        raise UserError(f"there is no text in {where}; give another --source")
    if int(documents * fraction) == 0:
        _move_tail(out_dir, fraction)
    sizes = {s: _partial_path(out_dir, f"{s}.bin").stat().st_size // 2 for s in ("train", "val")}
    if min(sizes.values()) < 2:  # one input and its target
        raise UserError(f"{where} has only {tokens} tokens; give a longer text")
    return tokenizer, {"documents": documents, "tokens": sizes}


def map_ahead(pool: Executor, work: Any, tasks: Iterable[Any], ahead: int) -> Iterator[Any]:
    """pool.map with at most `ahead` tasks in memory; results in order."""
    running: deque[Future[Any]] = deque()
    for task in tasks:
        running.append(pool.submit(work, task))
        if len(running) >= ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


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
        raise UserError(f"of {tokenizer.vocab_size} different characters 65536 fit in uint16")
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
    """A new file under its temporary name, synced to disk when it is closed."""
    with _partial_path(out_dir, name).open("wb") as f:
        yield f
        f.flush()
        os.fsync(f.fileno())


def progress(title: str) -> Report:
    """Report on stderr: a line for each stage, and one every ten seconds."""
    shown, at = "", 0.0

    def report(stage: str, done: str) -> None:
        nonlocal shown, at
        if stage != shown or time.monotonic() > at + 10:
            shown, at = stage, time.monotonic()
            print(f"{title}: {stage} {done}", file=sys.stderr, flush=True)

    return report
