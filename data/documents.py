"""Documents of files and the hub, in constant memory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from core.settings import UserError, first_line
from data import sources
from data.schema import FileError, reading
from data.tokenizer import well_formed

ENDINGS = (".txt", ".jsonl")
WANTED = "a .txt or .jsonl file, or a folder of them"
HUB: dict[str, tuple[str, str | None]] = {  # name, configuration
    "openwebtext": ("Skylion007/openwebtext", None),
    "fineweb": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
}
_DOCUMENTS = {"source", "text_key", "val_fraction", "limit", "tokenizer"}
DATASETS = {  # -> settings that determine the result
    "shakespeare_char": {"source", "val_fraction"},
    "shakespeare": {"source", "val_fraction", "tokenizer"},
    "chars": {"source", "text_key", "val_fraction"},
    "text": _DOCUMENTS,
    **dict.fromkeys(HUB, _DOCUMENTS - {"source"}),
    "shards": {"source", "tokenizer"},
}
PIECE = 2**20  # characters
MOST = 2**24  # of a text without spaces
OVERLAP = 2**12  # characters around a part that may change its tokens

# Document number; text, "": the beginning, None: the end; the part to tokenize.
Piece = tuple[int, str | None, int, int]


def source_files(source: str) -> list[Path]:
    """The file, or a folder tree's text files, sorted, each once. Raises UserError."""
    found: dict[str, Path] = {}

    def visit(path: Path, above: frozenset[str]) -> None:
        real = os.path.realpath(path, strict=True)
        if real in above:
            raise FileError(f"{path} is a link to a folder above it")
        if found.setdefault(real, path) is path and path.is_dir():
            for inside in sorted(path.iterdir()):
                visit(inside, above | {real})

    with reading(source):
        visit(Path(source), frozenset())
    if not os.path.isdir(source):
        return [Path(source)]
    return sorted(f for f in found.values() if f.suffix.lower() in ENDINGS and f.is_file())


def documents(dataset: str, config: Any, files: list[Path]) -> Iterator[Iterable[str]]:
    """Yield each document's parts; add the files read to `files`. config: PrepareConfig."""
    source, text_key = config.source, config.text_key
    shakespeare = dataset.startswith("shakespeare")
    if dataset in HUB:
        yield from ((text,) for text in _web_texts(*HUB[dataset], text_key))
    elif shakespeare and source in (None, "tinyshakespeare"):
        yield (sources.tiny_shakespeare() if source else sources.plays(),)
    elif source is None:
        raise FileError(f"expected --source=PATH: {WANTED}")
    else:
        found = source_files(source)
        if not found:
            raise FileError(f"--source={source}: expected {WANTED}")
        one_text = shakespeare or (dataset == "chars" and found[0].suffix.lower() != ".jsonl")
        for path in found:
            ending = ".txt" if one_text and Path(source).is_file() else path.suffix.lower()
            if ending not in ENDINGS:
                raise FileError(f"{path}: expected {WANTED}")
            files.append(path)
            if ending == ".txt":
                yield text_parts(path)
            else:
                yield from ((text,) for text in filter(None, _json_texts(path, text_key)))


def _read(path: Path, read: Callable[[IO[str]], str]) -> Iterator[str]:
    line = 1
    with reading(path), path.open(encoding="utf-8-sig", errors="surrogateescape") as f:
        while text := read(f):
            if bad := re.search("[\udc80-\udcff]", text):
                line += text.count("\n", 0, bad.start())
                raise FileError(f"{path}, line {line}: not utf-8; convert the file")
            yield text
            line += text.count("\n")


def text_parts(path: Path) -> Iterator[str]:
    """Yield about PIECE characters with the GPT-2 tokens of the whole: up to a space after a word,
    or MOST characters."""
    rest = ""
    for part in _read(path, lambda f: f.read(PIECE)):
        if part.count("\0") > len(part) // 4:
            raise FileError(f"{path}: full of NUL bytes (UTF-16?)")
        rest += part
        words = re.match(r".*\S(?=[ \n])", rest, re.DOTALL)
        end = words.end() if words else len(rest) if len(rest) >= MOST else 0
        yield rest[:end]
        rest = rest[end:]
    yield rest


def _json_texts(path: Path, key: str) -> Iterator[str]:
    for number, line in enumerate(_read(path, lambda f: f.readline()), 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            why = getattr(e, "msg", first_line(e))
            raise FileError(f"{where}: invalid JSON ({why})") from None
        yield _text(row, key, where).replace("\r\n", "\n")  # as in .txt


def _text(row: object, key: str, where: str) -> str:
    text = row.get(key, row) if isinstance(row, dict) else row
    if text is None and isinstance(row, dict):
        return ""
    if not isinstance(text, str):
        has = f"fields: {', '.join(row)}" if isinstance(row, dict) else "not an object"
        raise FileError(f"{where}: no text in {key!r} ({has}); use --text_key")
    return well_formed(text)


def _web_texts(name: str, configuration: str | None, key: str) -> Iterator[str]:
    try:
        from datasets import load_dataset

        rows = load_dataset(name, configuration, split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield _text(row, key, f"{name}, row {number}")
    except UserError:
        raise
    except Exception as e:  # dozens for an unreachable hub
        why = f"{type(e).__name__}: {first_line(e)}"
        missing = isinstance(e, ImportError)
        then = "pip install datasets" if missing else "or: python -m data text --source=PATH"
        raise FileError(f"cannot load {name} ({why}); {then}") from e


def pieces(documents: Iterable[Iterable[str]]) -> Iterator[list[Piece]]:
    """Yield about PIECE characters together; documents without text are left out."""
    batch: list[Piece] = []
    size = count = 0
    for document in documents:
        parts = filter(None, document)
        before, part = "", next(parts, "")
        if not part:
            continue
        batch.append((count, "", 0, 0))
        while part:
            after = next(parts, "")
            stop = len(before) + len(part)
            batch.append((count, before + part + after[:OVERLAP], len(before), stop))
            size += len(part)
            if size >= PIECE - OVERLAP:  # a part ends in its last line
                yield batch
                batch, size = [], 0
            before, part = (before + part)[-OVERLAP:], after
        batch.append((count, None, 0, 0))
        count += 1
    yield batch
