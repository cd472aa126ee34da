"""Documents from files and from the hub, cut into pieces for the tokenizer."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from core.hub import why_not_hub
from core.settings import UserError, first_line

ENDINGS = (".txt", ".jsonl", ".parquet", ".txt.gz", ".jsonl.gz")
HUB: dict[str, tuple[str, str | None]] = {  # dataset -> name and configuration on the hub
    "openwebtext": ("Skylion007/openwebtext", None),
    "fineweb": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
}
PIECE = 2**20  # characters of a document that are tokenized at once

# A piece: the number of its document, whether it is the document's last, its text.
Piece = tuple[int, bool, str]


def source_files(root: Path) -> list[Path]:
    """Return the file, or all text files of a folder, sorted."""
    if root.is_dir():
        return sorted(f for f in root.rglob("*") if f.name.endswith(ENDINGS) and f.is_file())
    return [root]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an error while reading a file into a UserError that names the file."""
    try:
        yield
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 text (byte {e.start})") from None
    except UserError:
        raise
    # EOFError, zlib.error: a damaged .gz; ValueError: pyarrow's for a damaged .parquet.
    except (OSError, EOFError, zlib.error, ValueError) as e:
        raise UserError(f"cannot read {path} ({e})") from None


def file_documents(source: str | None, text_key: str) -> Iterator[Iterator[str]]:
    """Yield each document of a file, or of the files in a folder, as an iterator of its parts.

    A document is a .txt file, a line of a .jsonl file, or a row of a .parquet file; .txt and .jsonl
    may be gzipped. Files of a folder are sorted.
    """
    wanted = "a .txt, .jsonl or .parquet file, or a folder of them"
    if source is None:
        raise UserError(f"text needs --source=PATH: {wanted}")
    root = Path(source)
    if not root.exists():
        raise UserError(f"--source={root}: not found; expected {wanted}")
    if not (files := source_files(root)):
        raise UserError(f"--source={root}: the folder has no .txt, .jsonl or .parquet file")
    for path in files:
        if not path.name.endswith(ENDINGS):
            raise UserError(f"{path}: expected {wanted}")
        if path.suffix == ".parquet":
            rows = _parquet_rows(path, text_key)
        elif ".jsonl" in path.name:
            rows = _json_rows(path)
        else:
            yield text_parts(path)
            continue
        with _reading(path):
            for number, row in rows:
                yield iter((_text(row, text_key, f"{path}, line {number}"),))


def text_parts(path: Path) -> Iterator[str]:
    with _reading(path), _open_text(path) as f:
        yield from iter(partial(f.read, PIECE), "")


def _open_text(path: Path) -> Any:
    return (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig")


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with _open_text(path) as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except json.JSONDecodeError as e:
                    raise UserError(f"{path}, line {number}: invalid JSON ({e.msg})") from None


def _parquet_rows(path: Path, key: str) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError("reading .parquet needs pyarrow (pip install pyarrow)") from None
    with pq.ParquetFile(path) as table:
        if key not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise UserError(f"{path}: no column {key!r} (it has {names}); use --text_key")
        batches = table.iter_batches(batch_size=64, columns=[key])
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)


def _text(row: Any, key: str, where: str) -> str:
    """Return the text of a JSON line or a table row."""
    text = row.get(key) if isinstance(row, dict) else None
    if not isinstance(text, str):
        has = f"fields: {', '.join(row)}" if isinstance(row, dict) else "not an object"
        raise UserError(f"{where}: no text in {key!r} ({has}); use --text_key")
    return text


def web_documents(name: str, configuration: str | None, key: str) -> Iterator[Iterator[str]]:
    """Yield each document of a dataset on the Hugging Face hub."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"{name} needs datasets (pip install datasets)") from None
    try:
        if offline := why_not_hub():
            raise ConnectionError(offline)
        rows = load_dataset(name, configuration, split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield iter((_text(row, key, f"{name}, row {number}"),))
    except UserError:
        raise
    except Exception as e:  # the library has dozens of errors for an unreachable hub
        raise UserError(
            f"cannot load {name} ({type(e).__name__}: {first_line(e)}); check the network, or use "
            "local .parquet or .jsonl files with --source=PATH"
        ) from e


# Everything before the last space or line break that a word follows.
_TO_LAST_WORD = re.compile(r".*(?=[ \n]\S)", re.DOTALL)


def cut_document(i: int, parts: Iterable[str]) -> Iterator[Piece]:
    """Yield document i in pieces of at most PIECE characters.

    A piece ends before a space or line break followed by a word, if its second half has one. No
    GPT-2 token spans such a place, so the tokens equal those of the whole text.
    """
    rest, start = "", 0
    for part in parts:
        rest, start = rest[start:] + part, 0
        while len(rest) - start > PIECE:
            end = start + PIECE
            word = _TO_LAST_WORD.match(rest, start + PIECE // 2, end + 1)
            end = word.end() if word else end
            yield i, False, rest[start:end]
            start = end
    yield i, True, rest[start:]


def batched(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into lists of about PIECE characters: one task for a worker."""
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
